//! Where tensors lie and ops compute: the CPU, or the meta device, which stores and computes nothing.
mod buffer;
mod float_buffer;
mod floats;
mod late;

pub use buffer::{Buffer, buffer_bytes};
pub use float_buffer::FloatBuffer;
pub use floats::{Floats, FloatsMut, HostMut};
pub use late::{Delivery, Late};

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
