//! [`adamw`](crate::adamw) with moments that take one byte each instead of four: Dettmers et al., "8-bit Optimizers via
//! Block-wise Quantization", 2022, <https://arxiv.org/abs/2110.02861>. Equal to bitsandbytes' blockwise `AdamW8bit`.
//!
//! A block of 256 moments shares its largest magnitude, `absmax`. A moment divided by that is stored as the nearest entry of
//! a dynamic [`CodeMap`]: a signed map for the first moment, an unsigned one for the second.
mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::adamw::Step;
use crate::floats::{Floats, FloatsMut};
use crate::quant::map::dynamic;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::{Device, SliceMut};

/// How many moments share a scale.
pub const BLOCK: usize = 256;

/// The 256 values that a byte can stand for, rising, and the bounds between them.
#[derive(Debug, Clone)]
pub struct CodeMap {
    /// `values[byte]` is the value that the byte stands for.
    pub values: Vec<f32>,
    bounds: Vec<f32>,
}

impl CodeMap {
    /// bitsandbytes' dynamic map: over -1..=1 if `signed` (the first moment), else over 0..=1 (the second).
    pub fn new(signed: bool) -> Self {
        let values = dynamic(signed).to_vec();
        let bounds = values.windows(2).map(|ends| f32::midpoint(ends[0], ends[1])).collect();
        Self { values, bounds }
    }
}

/// Updates `values [n]` and their two moments by `grads [n]`. Moment i is stored as the bytes `codes[i] [n]`, which
/// mean entries of `maps[i]`, times the scale of their block, `absmax[i] [ceil(n / 256)]`.
pub fn update(
    values: FloatsMut<'_>,
    grads: Floats<'_>,
    codes: [SliceMut<'_, u8>; 2],
    absmax: [FloatsMut<'_>; 2],
    maps: [&CodeMap; 2],
    step: &Step,
) {
    let lengths = [values.len(), codes[0].len(), codes[1].len()];
    assert_eq!(lengths, [grads.len(); 3], "a gradient and two moments for each value");
    assert_eq!([absmax[0].len(), absmax[1].len()], [grads.len().div_ceil(BLOCK); 2], "a scale for each block");
    match values.device() {
        Device::Cpu => {
            cpu::update(
                values.cpu_slice(),
                grads.cpu_slice(),
                codes.map(SliceMut::cpu_slice),
                absmax.map(FloatsMut::cpu_slice),
                maps,
                step,
            );
        }
        Device::Cuda(_) => cuda::update(values, grads, codes, absmax, maps, step),
        Device::Meta => {}
    }
}

/// The same update for a small tensor, whose moments `exp_avg [n]` and `exp_avg_sq [n]` stay float32. Unlike
/// [`crate::adamw::update`], it rounds as bitsandbytes' kernel does.
pub fn update_small(
    values: FloatsMut<'_>,
    grads: Floats<'_>,
    exp_avg: FloatsMut<'_>,
    exp_avg_sq: FloatsMut<'_>,
    step: &Step,
) {
    let lengths = [values.len(), exp_avg.len(), exp_avg_sq.len()];
    assert_eq!(lengths, [grads.len(); 3], "a gradient and two moments for each value");
    match values.device() {
        Device::Cpu => {
            cpu::update_small(values.cpu_slice(), grads.cpu_slice(), exp_avg.cpu_slice(), exp_avg_sq.cpu_slice(), step);
        }
        Device::Cuda(_) => cuda::update_small(values, grads, exp_avg, exp_avg_sq, step),
        Device::Meta => {}
    }
}
