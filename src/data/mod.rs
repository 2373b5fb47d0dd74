//! Layer 3: from files to padding-free batches. Sources, chat templates, label masks, packing, the sampler.
pub mod batch;
mod jinja;
mod python;
