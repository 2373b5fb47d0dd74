//! Layer 3: to come in this first version.
