//! Data parallelism: gradients are summed over ranks, and optimizer state, gradients or weights are sharded among them
//! (DDP, ZeRO 1 to 3, FSDP).
#![warn(missing_docs)]

pub mod ddp_zero;
pub mod fsdp;
pub mod gather_optimizer;
pub mod gather_params;
pub(crate) mod grad_buffer;
pub mod optimizer;
pub mod plan;
mod reducer;
pub mod replicas;
pub mod timeline;

pub use plan::ParallelPlan;
