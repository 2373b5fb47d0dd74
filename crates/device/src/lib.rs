//! Devices that hold tensors and run ops: the CPU, NVIDIA GPUs, and devices that only count memory. Of the latter, meta
//! has the CPU's layouts, and [`CountedGpu`] a GPU's.
//!
//! [`cuda`] wraps the driver, NVRTC and cublasLt. [`gpu`] is the one stream of each GPU, on which ops run in order; a
//! [`Queue`] is a second stream. Layers above see neither: they hold [`Array`]s, [`Slice`]s and activations.
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
pub use pinned::{Arrival, Fetching, Storing};
pub use queue::{Mark, Queue};
pub use slice::{Element, Floats, FloatsMut, HostMut, Slice, SliceMut};

/// A device that holds tensors and runs ops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// Main memory and the processor.
    #[default]
    Cpu,
    /// The NVIDIA GPU of this number, counted as CUDA counts them (`CUDA_VISIBLE_DEVICES`).
    Cuda(u8),
    /// Tensors have sizes and no memory, and ops do nothing, as on PyTorch's device of this name. So the memory of a
    /// pass is counted without computing it.
    Meta,
}

impl Device {
    /// Whether tensors have sizes but no memory there: the meta device, or a [`CountedGpu`].
    pub const fn only_counts(self) -> bool {
        match self {
            Self::Cpu => false,
            Self::Cuda(ordinal) => counted::counts(ordinal),
            Self::Meta => true,
        }
    }
}
