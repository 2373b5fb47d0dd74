//! The one integration-test binary: a module per subject.
mod arch;
mod targets;
mod tidy;
mod weights;
