//! Layer 5: to come in this first version.
