//! The state of a run before its model is loaded.
use super::lock::DirLock;
use super::model_source::{Loaded, ModelSource};
use super::run_plan::RunPlan;
use tunesmith_checkpoint::Checkpoint;
use tunesmith_data::{Dataset, Sampler};

/// A run that has been checked and planned.
pub struct Prepared {
    pub plan: RunPlan,
    pub source: ModelSource,
    pub dataset: Dataset,
    pub sampler: Sampler,
    pub resume: Option<Checkpoint>,
    /// A note about the checkpoint to resume if the number of steps has changed.
    pub resume_note: Option<String>,
    /// The model before step 1, if it was loaded to measure passes.
    pub loaded: Option<Loaded>,
    /// The lock of the output directory, on the first rank.
    pub lock: Option<DirLock>,
}
