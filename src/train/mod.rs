//! Layer 6: one optimizer step, and the run around it: preparation, the loop, evaluation, checkpoints, metrics,
//! TensorBoard, signals, samples and the report. [`run`] has the run on one page.
pub mod adapter;
pub mod bench;
pub mod decode_bench;
mod engine;
pub mod feed;
mod finish;
mod load;
pub mod lock;
pub mod machine;
pub mod metrics;
mod norms;
pub mod optimizer;
pub mod output;
mod predict;
mod prepare;
pub mod progress;
mod record;
pub mod report;
pub mod run;
mod samples;
mod save;
mod session;
pub mod signals;
pub mod step;
pub mod tensorboard;
pub mod trained;
