//! Layer 6: one optimizer step, and the run around it.
pub mod step;
