//! The one integration-test binary: a module per subject.
mod arch;
mod config;
mod run;
mod tidy;
mod weights;
