//! The one integration-test binary: a module per subject.
mod arch;
mod parity;
mod run;
mod targets;
mod config;
mod data;
mod tidy;
mod weights;
