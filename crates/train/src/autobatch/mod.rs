//! What `auto` becomes: the strategy, the rows of a micro-batch and of a pass, from predicted and measured memory.
pub mod batch_plan;
pub(crate) mod choice_cache;
pub mod choose_batch;
pub mod measure_pass;
pub(crate) mod sizes;
pub(crate) mod strategy_auto;
