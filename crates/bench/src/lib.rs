//! Benchmarks of training, generation and ranks, and the measured rates that plans use.
#![warn(missing_docs)]

pub mod bench_cache;
mod clock;
pub mod decode_bench;
pub mod kernels_bench;
pub mod ranks_bench;
mod recurrent_bench;
pub mod sweep;
pub mod training;
