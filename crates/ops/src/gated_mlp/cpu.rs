//! The middle of a gated MLP on the CPU. One task takes one panel, or a part of it if there are few panels.
use super::Gate;
use crate::activation::{Activation, LANES};
use crate::par;
use crate::simd::{Simd, dispatch};

/// A panel with at least so many vectors is shared among threads. The limit is an estimate of when its work takes
/// longer than handing it to other threads.
const SHARED_VECTORS: usize = 512;

/// The normal distribution's cumulative probability of `x`: `erfc(-x / sqrt(2)) / 2`, by the Chebyshev fit of Press et al.,
/// "Numerical Recipes" (`erfcc`), with a relative error below 1.2e-7.
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
unsafe fn normal_cdf<S: Simd>(x: S::V) -> S::V {
    // SAFETY: registers only; the caller has the features of `S`.
    unsafe {
        let (zero, one) = (S::splat(0.0), S::splat(1.0));
        let z = S::mul(S::max(x, S::sub(zero, x)), S::splat(std::f32::consts::FRAC_1_SQRT_2));
        let t = S::div(one, S::fma(z, S::splat(0.5), one));
        let mut p = S::splat(0.170_872_77);
        for factor in [
            -0.822_152_23,
            1.488_515_9,
            -1.135_204,
            0.278_868_07,
            -0.186_288_06,
            0.096_784_18,
            0.374_091_96,
            1.000_023_7,
            -1.265_512_2,
        ] {
            p = S::fma(p, t, S::splat(factor));
        }
        let tail = S::mul(S::mul(t, S::splat(0.5)), S::exp(S::sub(p, S::mul(z, z))));
        S::if_gt(x, zero, S::sub(one, tail), tail)
    }
}

/// `(act(x), act'(x))`: the value of the function and its derivative.
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
pub(crate) unsafe fn both<S: Simd>(gate: Gate, x: S::V) -> (S::V, S::V) {
    // SAFETY: registers only; the caller has the features of `S`.
    unsafe {
        let one = S::splat(1.0);
        match gate {
            Gate::Silu => {
                let s = S::sigmoid(x);
                // silu'(x) = s (1 + x (1 - s))
                (S::mul(x, s), S::mul(s, S::fma(x, S::sub(one, s), one)))
            }
            Gate::Gelu => {
                let cdf = normal_cdf::<S>(x);
                // The density e^(-x^2/2) / sqrt(2 pi).
                let density = S::exp(S::mul(S::mul(x, x), S::splat(-0.5)));
                let density = S::mul(density, S::splat(0.398_942_3));
                (S::mul(x, cdf), S::fma(x, density, cdf))
            }
            Gate::GeluTanh => {
                let (root, cube) = (S::splat((2.0 / std::f64::consts::PI).sqrt() as f32), S::splat(0.044_715));
                let square = S::mul(x, x);
                let t = S::tanh(S::mul(root, S::fma(S::mul(square, x), cube, x)));
                let half = S::mul(S::splat(0.5), S::add(one, t));
                // gelu'(x) = (1 + t) / 2 + x/2 (1 - t^2) sqrt(2/pi) (1 + 3 * 0.044715 x^2)
                let inner = S::mul(root, S::fma(S::mul(S::splat(3.0), cube), square, one));
                let bend = S::mul(S::mul(S::splat(0.5), x), S::mul(S::sub(one, S::mul(t, t)), inner));
                (S::mul(x, half), S::add(half, bend))
            }
            Gate::Sigmoid => {
                let s = S::sigmoid(x);
                (s, S::mul(s, S::sub(one, s)))
            }
            Gate::Identity => (x, one),
            Gate::Clamped { alpha, limit } => {
                let (alpha, x) = (S::splat(alpha), S::min(x, S::splat(limit)));
                let s = S::sigmoid(S::mul(alpha, x));
                let bend = S::mul(S::mul(alpha, x), S::sub(one, s));
                (S::mul(x, s), S::mul(s, S::add(one, bend)))
            }
        }
    }
}

/// The factor on `act(gate)`: `up`, or `up + 1` after clamping for [`Gate::Clamped`].
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
unsafe fn factor<S: Simd>(act: Gate, up: S::V) -> S::V {
    // SAFETY: registers only; the caller has the features of `S`.
    unsafe {
        match act {
            Gate::Clamped { limit, .. } => S::add(S::splat(1.0), S::max(S::min(up, S::splat(limit)), S::splat(-limit))),
            _ => up,
        }
    }
}

/// The gradients, set to 0 where [`Gate::Clamped`] clamped gate or up.
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
unsafe fn uncut<S: Simd>(act: Gate, (gate, up): (S::V, S::V), (d_gate, d_up): (S::V, S::V)) -> (S::V, S::V) {
    // SAFETY: registers only; the caller has the features of `S`.
    unsafe {
        let Gate::Clamped { limit, .. } = act else { return (d_gate, d_up) };
        let (limit, none) = (S::splat(limit), S::splat(0.0));
        let size = S::max(up, S::sub(none, up));
        (S::if_gt(gate, limit, none, d_gate), S::if_gt(size, limit, none, d_up))
    }
}

/// # Safety
/// The CPU has the features of `S`; `gate`, `up` and `out` hold `vectors` vectors each.
#[inline(always)]
unsafe fn forward_kernel<S: Simd>(act: Gate, gate: *const f32, up: *const f32, out: *mut f32, vectors: usize) {
    // SAFETY: `at` stays below the floats that each of the three holds, as the caller says.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            let up = factor::<S>(act, S::load(up.add(at)));
            S::store(out.add(at), S::mul(both::<S>(act, S::load(gate.add(at))).0, up));
        }
    }
}

dispatch! {
    fn forward_panel = forward_kernel(act: Gate, gate: *const f32, up: *const f32, out: *mut f32, vectors: usize);
}

/// # Safety
/// The CPU has the features of `S`; `gate`, `up` and `d_out` hold `vectors` vectors each.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(act: Gate, gate: *mut f32, up: *mut f32, d_out: *const f32, vectors: usize) {
    // SAFETY: `at` stays below the floats that each of the three holds, as the caller says.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            let (g, u, d) = (S::load(gate.add(at)), S::load(up.add(at)), S::load(d_out.add(at)));
            let (value, slope) = both::<S>(act, g);
            let gradients = (S::mul(S::mul(d, factor::<S>(act, u)), slope), S::mul(d, value));
            let (d_gate, d_up) = uncut::<S>(act, (g, u), gradients);
            S::store(gate.add(at), d_gate);
            S::store(up.add(at), d_up);
        }
    }
}

dispatch! {
    fn backward_panel = backward_kernel(act: Gate, gate: *mut f32, up: *mut f32, d_out: *const f32, vectors: usize);
}

pub(super) fn forward(act: Gate, gate: &Activation, up: &Activation, out: &mut Activation) {
    let (to, stride) = (out.shared(), out.stride());
    let (panels, vectors) = (gate.panels(), stride / LANES);
    // A step of generation has a single panel, which threads then share.
    let parts = if vectors < SHARED_VECTORS { 1 } else { par::threads().div_ceil(panels.max(1)) };
    par::run(panels * parts, |task| {
        let (panel, part) = (task / parts, task % parts);
        let (first, end) = (part * vectors / parts, (part + 1) * vectors / parts);
        let (gate, up) = (gate.panel(panel).as_ptr(), up.panel(panel).as_ptr());
        // SAFETY: `super::forward` asserts that `gate` and `up` have one shape and makes `out` with it; a panel of it
        // is `stride / LANES` vectors. These ones of `out` are no other task's.
        unsafe {
            let at = first * LANES;
            forward_panel(act, gate.add(at), up.add(at), to.get().add(panel * stride + at), end - first);
        }
    });
}

pub(super) fn backward(act: Gate, gate: &mut Activation, up: &mut Activation, d_out: &Activation) {
    let (stride, panels) = (gate.stride(), gate.panels());
    let (gate, up) = (gate.shared(), up.shared());
    par::run(panels, |panel| {
        let (gate, up) = (gate.get().wrapping_add(panel * stride), up.get().wrapping_add(panel * stride));
        // SAFETY: `super::backward` asserts that all three have one shape; a panel of it is `stride / LANES` vectors.
        // `gate` and `up` are borrowed for writing, and no other task has this panel of them.
        unsafe { backward_panel(act, gate, up, d_out.panel(panel).as_ptr(), stride / LANES) };
    });
}
