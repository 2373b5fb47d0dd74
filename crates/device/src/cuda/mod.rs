//! CUDA's driver, its compiler (NVRTC) and its matrix products (cublasLt), loaded at run time. The binary also runs
//! without them.
//!
//! Memory, streams and events are the driver's, wrapped so that they are released. Addresses are plain numbers: the
//! caller who passes one to a copy or a kernel guarantees that the memory exists. NVRTC compiles kernels for the
//! machine's GPU.
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
