//! Where tensors lie and ops compute: the CPU, an NVIDIA GPU, or a device that stores and computes nothing: meta for the CPU's
//! layouts, [`CountedGpu`] for a GPU's.
//!
//! [`cuda`] wraps the driver, its compiler and its products; [`gpu`] is the one stream of each GPU, on which ops run in order;
//! a [`Queue`] is a second one. Layers above see neither: they hold [`Array`]s, [`Slice`]s and activations.
mod array;
pub mod away;
mod buffer;
mod counted;
pub mod cuda;
mod current;
pub mod gpu;
mod late;
pub mod memory;
mod pinned;
mod queue;
mod slice;

pub use array::{Array, FloatBuffer};
pub use buffer::{Buffer, buffer_bytes};
pub use counted::CountedGpu;
pub use late::{Delivery, Late};
pub use pinned::{Fetching, Storing};
pub use queue::{Mark, Queue};
pub use slice::{Element, Floats, FloatsMut, HostMut, Slice, SliceMut};

/// Where tensors lie and ops compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// Main memory and the processor.
    #[default]
    Cpu,
    /// The NVIDIA GPU of this number, counted as CUDA counts them (`CUDA_VISIBLE_DEVICES`).
    Cuda(u8),
    /// Tensors have sizes and no memory, ops do nothing, as on PyTorch's device of this name: what a pass needs is counted
    /// without computing it.
    Meta,
}

impl Device {
    /// Whether tensors have sizes and no memory there: the meta device, or a [`CountedGpu`].
    pub const fn only_counts(self) -> bool {
        match self {
            Self::Cpu => false,
            Self::Cuda(ordinal) => counted::counts(ordinal),
            Self::Meta => true,
        }
    }
}
