//! The one integration-test binary: a module per subject.
mod arch;
mod config;
mod data;
mod examples;
mod parity;
mod run;
mod targets;
mod tidy;
mod weights;
