//! The one integration-test binary: a module per subject.
mod arch;
mod checkpoint;
mod peft;
mod targets;
mod tidy;
mod weights;
