//! What a run tells: metrics, TensorBoard, the report, progress, the resolved configuration, and what the machine has.
#![warn(missing_docs)]

pub mod machine;
pub mod metrics;
pub mod norms;
pub mod nvidia;
pub mod progress;
pub mod report;
pub mod resolved_config;
pub mod tensorboard;
