//! The convolution on the CPU. One task computes one panel of tokens. For the weights' gradient, one task takes some
//! channels, and sums each over all tokens.
//!
//! The sixteen tokens of a channel are a vector. The tokens `j` before (or after) them are a vector too: it is read
//! from a copy of two neighbouring panels, across their border. Taps outside of the token's sequence are multiplied by
//! zero.
use super::{Conv, MAX_KERNEL};
use crate::activation::{Activation, LANES};
use crate::floats::Floats;
use crate::gated_mlp::{Gate, both};
use crate::par::{self, Shared};
use crate::simd::{Simd, dispatch};
use tunesmith_cpu_slice::CpuSlice as _;

/// How many channels a task of [`weight_backward`] takes, and how many are laid out at once. A load that crosses the
/// border of two panels has to wait until what was written on both sides has reached the cache: other channels are laid
/// out meanwhile.
const CHANNELS: usize = 32;

/// The tokens of one channel in two neighbouring panels.
type Tokens = [f32; 2 * LANES];

/// `[taps][16 tokens]`: 1 where a tap counts, 0 where it lies outside of the token's sequence.
type Masks = [[f32; LANES]; MAX_KERNEL];

/// The masks for a panel's tokens that read the tokens before them (the forward pass).
fn masks_before(kernel: usize, panel: usize, positions: &[u32]) -> Masks {
    let mut masks = [[0.0; LANES]; MAX_KERNEL];
    for (lane, &position) in positions.iter().skip(panel * LANES).take(LANES).enumerate() {
        for (tap, mask) in masks.iter_mut().enumerate().take(kernel) {
            mask[lane] = f32::from(u8::from(tap <= position as usize));
        }
    }
    masks
}

/// The masks for a panel's tokens that are read by the tokens after them (the gradient of the input).
fn masks_after(kernel: usize, panel: usize, positions: &[u32]) -> Masks {
    let mut masks = [[0.0; LANES]; MAX_KERNEL];
    for lane in 0..LANES.min(positions.len() - panel * LANES) {
        for (tap, mask) in masks.iter_mut().enumerate().take(kernel) {
            let taker = positions.get(panel * LANES + lane + tap);
            mask[lane] = f32::from(u8::from(taker.is_some_and(|&position| tap <= position as usize)));
        }
    }
    masks
}

/// What the kernels read of one panel.
struct Panel<'a> {
    /// The panel `[channels][16]`, and its neighbour if there is one.
    here: &'a [f32],
    beside: Option<&'a [f32]>,
    weight: &'a [f32],
    kernel: usize,
    masks: &'a Masks,
}

/// Copies some channels' tokens of two panels side by side, from channel `first` on. A missing panel counts as zeros.
///
/// # Safety
/// The CPU has the features of `S`; panels that are there have the channels.
#[inline(always)]
unsafe fn lay_out<S: Simd>(panels: [Option<&[f32]>; 2], first: usize, tokens: &mut [Tokens]) {
    for (channel, tokens) in (first..).zip(tokens) {
        for (panel, to) in panels.into_iter().zip(tokens.chunks_exact_mut(LANES)) {
            // SAFETY: a panel has 16 floats of each channel.
            unsafe {
                let lanes = panel.map_or(S::splat(0.0), |panel| S::load(panel[channel * LANES..][..LANES].as_ptr()));
                S::store(to.as_mut_ptr(), lanes);
            }
        }
    }
}

/// The convolution `z` of one channel, from its tokens in the previous panel and this one.
///
/// # Safety
/// The CPU has the features of `S`; `panel` has `channel`.
#[inline(always)]
unsafe fn convolved<S: Simd>(panel: &Panel<'_>, channel: usize, tokens: &Tokens, bias: f32) -> S::V {
    // SAFETY: `LANES - tap` is 1 to 16, so that a vector ends within the 32 tokens.
    unsafe {
        let here = S::load(tokens.as_ptr().add(LANES));
        let weights = &panel.weight[channel * panel.kernel..][..panel.kernel];
        let mut sum = S::fma(S::splat(weights[panel.kernel - 1]), here, S::splat(bias));
        for (tap, weight) in weights.iter().rev().enumerate().skip(1) {
            let earlier = S::mul(S::load(tokens.as_ptr().add(LANES - tap)), S::load(panel.masks[tap].as_ptr()));
            sum = S::fma(S::splat(*weight), earlier, sum);
        }
        sum
    }
}

/// # Safety
/// The CPU has the features of `S`; `out` holds `channels` vectors.
#[inline(always)]
unsafe fn forward_kernel<S: Simd>(panel: &Panel<'_>, bias: Option<&[f32]>, silu: bool, out: *mut f32, channels: usize) {
    let mut tokens = [[0.0; 2 * LANES]; CHANNELS];
    for first in (0..channels).step_by(CHANNELS) {
        let tokens = &mut tokens[..CHANNELS.min(channels - first)];
        // SAFETY: channels from `first` on, as many as `tokens`, are below `channels`.
        unsafe {
            lay_out::<S>([panel.beside, Some(panel.here)], first, tokens);
            for (channel, tokens) in (first..).zip(&*tokens) {
                let z = convolved::<S>(panel, channel, tokens, bias.map_or(0.0, |bias| bias[channel]));
                S::store(out.add(channel * LANES), if silu { both::<S>(Gate::Silu, z).0 } else { z });
            }
        }
    }
}

dispatch! {
    fn forward_panel = forward_kernel(panel: &Panel<'_>, bias: Option<&[f32]>, silu: bool, out: *mut f32, channels: usize);
}

/// # Safety
/// As [`forward_kernel`], with the gradients of `y` in `dz`, which become those of `z`.
#[inline(always)]
unsafe fn silu_kernel<S: Simd>(panel: &Panel<'_>, bias: Option<&[f32]>, dz: *mut f32, channels: usize) {
    let mut tokens = [[0.0; 2 * LANES]; CHANNELS];
    for first in (0..channels).step_by(CHANNELS) {
        let tokens = &mut tokens[..CHANNELS.min(channels - first)];
        // SAFETY: as in `forward_kernel`.
        unsafe {
            lay_out::<S>([panel.beside, Some(panel.here)], first, tokens);
            for (channel, tokens) in (first..).zip(&*tokens) {
                let z = convolved::<S>(panel, channel, tokens, bias.map_or(0.0, |bias| bias[channel]));
                let place = dz.add(channel * LANES);
                S::store(place, S::mul(S::load(place), both::<S>(Gate::Silu, z).1));
            }
        }
    }
}

dispatch! {
    fn silu_panel = silu_kernel(panel: &Panel<'_>, bias: Option<&[f32]>, dz: *mut f32, channels: usize);
}

/// The gradient of `x` in a panel, from `dz` of that panel and of the next one.
///
/// # Safety
/// The CPU has the features of `S`; `dx` holds `channels` vectors.
#[inline(always)]
unsafe fn input_kernel<S: Simd>(panel: &Panel<'_>, dx: *mut f32, channels: usize) {
    let mut tokens = [[0.0; 2 * LANES]; CHANNELS];
    for first in (0..channels).step_by(CHANNELS) {
        let tokens = &mut tokens[..CHANNELS.min(channels - first)];
        // SAFETY: as in `forward_kernel`; `tap` is below 16, so that a vector ends within the 32 tokens.
        unsafe {
            lay_out::<S>([Some(panel.here), panel.beside], first, tokens);
            for (channel, tokens) in (first..).zip(&*tokens) {
                let mut sum = S::splat(0.0);
                for (tap, weight) in panel.weight[channel * panel.kernel..][..panel.kernel].iter().rev().enumerate() {
                    let later = S::mul(S::load(tokens.as_ptr().add(tap)), S::load(panel.masks[tap].as_ptr()));
                    sum = S::fma(S::splat(*weight), later, sum);
                }
                S::store(dx.add(channel * LANES), sum);
            }
        }
    }
}

dispatch! {
    fn input_panel = input_kernel(panel: &Panel<'_>, dx: *mut f32, channels: usize);
}

/// Runs `task` on each panel of `x` together with the panel before it, as [`convolved`] reads them.
fn each_panel(
    weight: &[f32],
    kernel: usize,
    x: &Activation,
    positions: &[u32],
    out: &mut Activation,
    task: impl Fn(&Panel<'_>, *mut f32) + Sync,
) {
    let (to, stride) = (out.shared(), out.stride());
    par::run(x.panels(), |index| {
        let masks = masks_before(kernel, index, positions);
        let beside = index.checked_sub(1).map(|before| x.panel(before));
        let panel = Panel { here: x.panel(index), beside, weight, kernel, masks: &masks };
        task(&panel, to.get().wrapping_add(index * stride));
    });
}

pub(super) fn forward(conv: Conv<'_>, kernel: usize, x: &Activation, positions: &[u32], out: &mut Activation) {
    let (channels, bias) = (x.features(), conv.bias.map(Floats::cpu_slice));
    each_panel(conv.weight.cpu_slice(), kernel, x, positions, out, |panel, out| {
        // SAFETY: `out` has the shape of `x`, whose panels `each_panel` walks: a task's panel is no other's.
        unsafe { forward_panel(panel, bias, conv.silu, out, channels) };
    });
}

/// Turns the gradient of `y` into that of `z`, in place: the backward pass of SiLU.
pub(super) fn silu_backward(conv: Conv<'_>, kernel: usize, x: &Activation, positions: &[u32], dz: &mut Activation) {
    let (channels, bias) = (x.features(), conv.bias.map(Floats::cpu_slice));
    each_panel(conv.weight.cpu_slice(), kernel, x, positions, dz, |panel, dz| {
        // SAFETY: `dz` has the shape of `x`, as `super::backward` asserts: a task's panel is no other's.
        unsafe { silu_panel(panel, bias, dz, channels) };
    });
}

pub(super) fn input_backward(weight: &[f32], kernel: usize, dz: &Activation, positions: &[u32], dx: &mut Activation) {
    let (to, stride, channels) = (dx.shared(), dx.stride(), dx.features());
    par::run(dz.panels(), |index| {
        let masks = masks_after(kernel, index, positions);
        let beside = (index + 1 < dz.panels()).then(|| dz.panel(index + 1));
        let panel = Panel { here: dz.panel(index), beside, weight, kernel, masks: &masks };
        // SAFETY: `dx` has the shape of `dz`, whose panels these are: a task's panel is no other's.
        unsafe { input_panel(&panel, to.get().add(index * stride), channels) };
    });
}

pub(super) fn weight_backward(kernel: usize, x: &Activation, dz: &Activation, positions: &[u32], d_weight: &mut [f32]) {
    let (channels, out) = (x.features(), Shared(d_weight.as_mut_ptr()));
    let masks: Vec<Masks> = (0..x.panels()).map(|panel| masks_before(kernel, panel, positions)).collect();
    par::run(channels.div_ceil(CHANNELS), |task| {
        for channel in (0..channels).skip(task * CHANNELS).take(CHANNELS) {
            let mut sums = [[0.0f32; LANES]; MAX_KERNEL];
            let mut tokens = [0.0f32; 2 * LANES];
            for (panel, masks) in masks.iter().enumerate() {
                tokens.copy_within(LANES.., 0);
                tokens[LANES..].copy_from_slice(&x.panel(panel)[channel * LANES..][..LANES]);
                let dz = &dz.panel(panel)[channel * LANES..][..LANES];
                for (tap, (sums, mask)) in sums.iter_mut().zip(masks).enumerate().take(kernel) {
                    let earlier = &tokens[LANES - tap..][..LANES];
                    for (((sum, dz), x), mask) in sums.iter_mut().zip(dz).zip(earlier).zip(mask) {
                        *sum += dz * x * mask;
                    }
                }
            }
            for (tap, sums) in sums.iter().enumerate().take(kernel) {
                // SAFETY: `channel` is below `channels`, of each of which `d_weight` has `kernel` places, as `super::backward`
                // asserts. It is borrowed for writing; no other task has this channel.
                unsafe { *out.get().add(channel * kernel + kernel - 1 - tap) += sums.iter().sum::<f32>() };
            }
        }
    });
}
