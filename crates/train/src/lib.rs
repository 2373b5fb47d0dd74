//! One optimizer step, and the run around it: preparation, the loop, evaluation, checkpoints, metrics,
//! TensorBoard, signals, samples and the report. [`run`] has the run on one page.
pub mod adapter;
pub mod autobatch;
mod averages;
pub mod classification_run;
mod data_summary;
mod divergence;
pub mod engine;
mod finish;
mod load;
pub mod lock;
pub mod memory_check;
pub mod micro_batches;
pub mod output;
mod output_checks;
mod predict;
mod prepare;
mod rank_consistency;
pub mod ranks;
pub mod run;
mod run_files;
mod samples;
mod save;
mod scaling;
mod session;
pub mod signals;
pub mod step;
pub mod trainable;
