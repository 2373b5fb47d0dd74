//! The one integration-test binary: a module per subject.
mod arch;
mod parity;
mod targets;
mod config;
mod data;
mod run;
mod tidy;
mod weights;
