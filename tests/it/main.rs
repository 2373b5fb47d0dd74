//! The one integration-test binary: a module per subject.
mod arch;
mod checkpoint;
mod comm;
mod config;
mod data;
mod examples;
mod export;
mod generate;
#[cfg(feature = "hub")]
mod hub;
mod import;
mod infer;
mod memory;
mod metrics;
mod objective;
mod optim;
mod oracle;
mod parity;
mod peft;
mod plan;
mod precision;
mod quantization;
mod run;
mod targets;
mod tidy;
mod tuning;
mod weights;
