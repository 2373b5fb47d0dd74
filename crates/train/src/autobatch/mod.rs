//! Resolves `auto`: the strategy from predicted memory; micro-batches, passes, and checkpointing from measured memory.
pub mod batch_plan;
pub(crate) mod choice_cache;
pub mod choose_batch;
pub mod measure_pass;
pub(crate) mod sizes;
pub(crate) mod strategy_auto;
