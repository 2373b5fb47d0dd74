//! Layer 2: to come in this first version.
