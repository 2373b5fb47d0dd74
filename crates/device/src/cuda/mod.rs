//! CUDA's driver, its compiler and its products of matrices, loaded at run time: the binary runs without them.
//!
//! Memory, streams and events are the driver's, wrapped so that they are given back; addresses are plain numbers, and whoever
//! passes one to a copy or a kernel says that there is memory. Kernels are compiled by NVRTC for the GPU that is there.
mod blas;
mod context;
pub mod library;
mod memory;
mod module;
mod nvrtc;
mod stream;
pub mod testing;
#[cfg(test)]
mod tests;

pub use blas::{Blas, Number, Operand, OperandType, Product, WORKSPACE};
pub use context::Context;
pub use memory::{Memory, PinnedMemory, release};
pub use module::{Arg, Function, Grid, Module};
pub use nvrtc::{Header, Source};
pub use stream::{Event, Stream};
