//! The one integration-test binary: a module per subject.
mod arch;
mod run;
mod weights;
mod tidy;
