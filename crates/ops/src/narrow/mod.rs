//! [`Narrow`]: keeps an activation in 16 bits between forward and backward, which takes half the memory. bfloat16 keeps
//! eight bits of mantissa; float16 keeps eleven, and no number above 65504.
mod cpu;
#[cfg(test)]
mod tests;

use crate::activation::{Activation, Number};
use tunesmith_device::Device;

/// The 16-bit number type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// bfloat16: 8 bits of exponent, 7 of fraction.
    Bf16,
    /// IEEE half precision: 5 bits of exponent, 10 of fraction.
    F16,
}

impl Half {
    /// The number type of an activation in this format on a GPU.
    pub const fn number(self) -> Number {
        match self {
            Self::Bf16 => Number::Bf16,
            Self::F16 => Number::F16,
        }
    }
}

/// An activation `[tokens, features]` in 16 bits. On the CPU it has the same panels as the activation.
#[derive(Debug)]
pub struct Narrow {
    half: Half,
    /// On the CPU, two 16-bit numbers take the place of one float: `[tokens, ceil(features / 2)]`.
    halves: Activation,
    features: usize,
}

impl Narrow {
    /// Rounds every number of `act [tokens, features]` to the nearest, ties to even.
    pub fn new(act: &Activation, half: Half) -> Self {
        let halves = match act.device() {
            Device::Cuda(_) => act.to(half.number()),
            Device::Cpu | Device::Meta => act.pool().act_f32(act.tokens(), act.features().div_ceil(2)),
        };
        let mut narrow = Self { half, halves, features: act.features() };
        if act.device() == Device::Cpu {
            cpu::narrow(act, half, &mut narrow.halves);
        }
        narrow
    }

    /// The activation in whose memory the rounded numbers are.
    pub const fn memory(&mut self) -> &mut Activation {
        &mut self.halves
    }

    /// Converts the rounded numbers back to the type of the pool's activations: `[tokens, features]`.
    pub fn widen(&self) -> Activation {
        let pool = self.halves.pool();
        match pool.device() {
            Device::Cpu => {
                let mut out = pool.act(self.halves.tokens(), self.features);
                cpu::widen(self, &mut out);
                out
            }
            Device::Cuda(_) => self.halves.to(pool.number()),
            Device::Meta => pool.act(self.halves.tokens(), self.features),
        }
    }
}
