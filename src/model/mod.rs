//! Layer 4: to come in this first version.
pub mod weights;
