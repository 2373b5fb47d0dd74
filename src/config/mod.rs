//! Layer 1: to come in this first version.
