//! The state that a text has in one mixer.
use super::{Heads, cpu};
use tunesmith_device::{Device, FloatBuffer};

/// The states of all value heads, in float32 on a device.
#[derive(Debug)]
pub struct State {
    heads: Heads,
    /// On a GPU `[value heads][key_dim][value_dim]`; on the CPU as its kernels take it ([`cpu::state_floats`]).
    pub(super) floats: FloatBuffer,
}

impl State {
    /// Of zeros.
    pub fn new(device: Device, heads: Heads) -> Self {
        let floats = match device {
            Device::Cpu | Device::Meta => cpu::state_floats(heads),
            Device::Cuda(_) => heads.value * heads.key_dim * heads.value_dim,
        };
        Self { heads, floats: FloatBuffer::zeros(device, floats) }
    }

    /// The heads that it was made for.
    pub const fn heads(&self) -> Heads {
        self.heads
    }

    /// Bytes of its numbers.
    pub const fn bytes(&self) -> usize {
        self.heads.value * self.heads.key_dim * self.heads.value_dim * size_of::<f32>()
    }
}

impl Clone for State {
    fn clone(&self) -> Self {
        Self { heads: self.heads, floats: self.floats.to(self.floats.device()) }
    }
}
