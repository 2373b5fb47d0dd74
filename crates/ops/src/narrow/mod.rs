//! Activations rounded to sixteen bits between forward and backward: half the memory. bfloat16 keeps eight bits of
//! mantissa; float16 keeps eleven, and no number above 65504.
mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use tunesmith_device::Device;

/// How sixteen bits are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// bfloat16: 8 bits of exponent, 7 of fraction.
    Bf16,
    /// IEEE half precision: 5 bits of exponent, 10 of fraction.
    F16,
}

/// An activation `[tokens, features]` in sixteen bits, in the same panels.
#[derive(Debug)]
pub struct Narrow {
    half: Half,
    /// Two numbers in the place of one: `[tokens, ceil(features / 2)]`.
    halves: Activation,
    features: usize,
}

impl Narrow {
    /// Rounds every number of `act [tokens, features]` to the nearest, ties to even.
    pub fn new(act: &Activation, half: Half) -> Self {
        let mut halves = act.pool().act(act.tokens(), act.features().div_ceil(2));
        match act.device() {
            Device::Cpu => cpu::narrow(act, half, &mut halves),
            Device::Cuda(_) => cuda::narrow(act, half, &mut halves),
            Device::Meta => {}
        }
        Self { half, halves, features: act.features() }
    }

    /// What has its memory.
    pub const fn memory(&mut self) -> &mut Activation {
        &mut self.halves
    }

    /// Converts the rounded numbers back to f32: `[tokens, features]`.
    pub fn widen(&self) -> Activation {
        let mut out = self.halves.pool().act(self.halves.tokens(), self.features);
        match out.device() {
            Device::Cpu => cpu::widen(self, &mut out),
            Device::Cuda(_) => cuda::widen(self, &mut out),
            Device::Meta => {}
        }
        out
    }
}
