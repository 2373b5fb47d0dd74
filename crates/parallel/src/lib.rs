//! Data parallelism: gradients summed over ranks, and optimizer state, gradients or weights shared among them (DDP, ZeRO 1 to 3, FSDP).
#![warn(missing_docs)]

pub mod fetch;
pub mod gathered;
pub mod narrow;
pub mod optimizer;
pub mod replicas;
pub mod shard;
pub mod sharing;
pub mod timeline;
