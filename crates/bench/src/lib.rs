//! Benchmarks of training, generation and ranks, and the measured rates that plans use.
#![warn(missing_docs)]

pub mod bench;
pub mod decode_bench;
pub mod ranks_bench;
pub mod rate;
pub mod sweep;
