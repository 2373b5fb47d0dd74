//! What `auto` becomes: the strategy, the rows of a micro-batch and of a pass, from predicted and measured memory.
pub mod budget;
pub mod choose_batch;
pub mod measure_pass;
pub(crate) mod oom_retry;
pub(crate) mod resolve;
pub(crate) mod strategy_auto;
