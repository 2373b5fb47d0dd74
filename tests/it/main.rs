//! The one integration-test binary: a module per subject.
mod arch;
mod data;
mod run;
mod tidy;
mod weights;
