//! The one integration-test binary: a module per subject.
mod arch;
mod weights;
mod tidy;
