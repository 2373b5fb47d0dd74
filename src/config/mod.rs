//! Layer 1: to come in this first version.
pub mod arch;
mod hf_json;
