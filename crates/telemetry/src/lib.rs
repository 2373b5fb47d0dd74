//! What a run reports: metrics, TensorBoard, the HTML report, progress, the resolved configuration, and the machine's
//! properties.
#![warn(missing_docs)]

pub mod machine;
pub mod metrics;
pub mod norms;
pub mod nvidia;
pub mod progress;
pub mod report;
pub mod resolved_config;
pub mod tensorboard;
