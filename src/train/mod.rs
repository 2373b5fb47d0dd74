//! Layer 6: to come in this first version.
