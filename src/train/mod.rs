//! Layer 6: one optimizer step, and the run around it: preparation, the loop, evaluation, checkpoints, metrics,
//! TensorBoard, signals, samples and the report.
pub mod bench;
pub mod feed;
pub mod lock;
pub mod machine;
pub mod metrics;
pub mod report;
pub mod signals;
pub mod step;
pub mod tensorboard;
