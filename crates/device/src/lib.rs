//! Where tensors lie and ops compute: the CPU, or the meta device, which stores and computes nothing.
mod array;
mod buffer;
mod late;
pub mod memory;
mod slice;

pub use array::{Array, FloatBuffer};
pub use buffer::{Buffer, buffer_bytes};
pub use late::{Delivery, Late};
pub use slice::{Element, Floats, FloatsMut, HostMut, Slice, SliceMut};

/// Where tensors lie and ops compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// Main memory and the processor.
    #[default]
    Cpu,
    /// Tensors have sizes and no memory, ops do nothing, as on PyTorch's device of this name: what a pass needs is counted
    /// without computing it.
    Meta,
}
