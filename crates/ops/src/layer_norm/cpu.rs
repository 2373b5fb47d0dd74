//! `LayerNorm` on the CPU: one task takes one panel. A token is a lane, so its mean needs no horizontal sum.
use crate::activation::{Activation, LANES};
use crate::par;
use crate::simd::{Simd, dispatch};

/// The sum of the vectors `of(0)..of(count - 1)`, in two independent chains of additions.
///
/// # Safety
/// The CPU has the features of `S`, and what `of` asks for below `count`.
#[inline(always)]
unsafe fn sum<S: Simd>(count: usize, of: impl Fn(usize) -> S::V) -> S::V {
    // SAFETY: registers only; the caller has the features of `S`.
    unsafe {
        let (mut even, mut odd, mut index) = (S::splat(0.0), S::splat(0.0), 0);
        while index + 1 < count {
            (even, odd) = (S::add(even, of(index)), S::add(odd, of(index + 1)));
            index += 2;
        }
        if index < count {
            even = S::add(even, of(index));
        }
        S::add(even, odd)
    }
}

/// # Safety
/// The CPU has the features of `S`; `x` holds `dim` vectors, `out` has room for two.
#[inline(always)]
unsafe fn stats_kernel<S: Simd>(x: *const f32, dim: usize, eps: f32, out: *mut f32) {
    // SAFETY: what is read is below `dim`: within `x`, as the caller says; `out` has two vectors.
    unsafe {
        let share = S::splat(1.0 / dim as f32);
        let mean = S::mul(sum::<S>(dim, |at| S::load(x.add(at * LANES))), share);
        let square = |at: usize| {
            let apart = S::sub(S::load(x.add(at * LANES)), mean);
            S::mul(apart, apart)
        };
        let var = S::fma(sum::<S>(dim, square), share, S::splat(eps));
        let mut lanes = [0.0f32; LANES];
        S::store(lanes.as_mut_ptr(), var);
        S::store(out, mean);
        for (lane, value) in lanes.iter().enumerate() {
            *out.add(LANES + lane) = 1.0 / value.sqrt();
        }
    }
}

dispatch! { fn stats_panel = stats_kernel(x: *const f32, dim: usize, eps: f32, out: *mut f32); }

/// # Safety
/// The CPU has the features of `S`; `x` and `out` hold `weight.len()` vectors, `stats` two; `bias` is as long as `weight`.
#[inline(always)]
unsafe fn apply_kernel<S: Simd>(x: *const f32, stats: *const f32, weight: &[f32], bias: &[f32], out: *mut f32) {
    // SAFETY: `at` is below the weight's length in vectors: within all, as the caller says.
    unsafe {
        let (mean, r) = (S::load(stats), S::load(stats.add(LANES)));
        for (feature, (&w, &b)) in weight.iter().zip(bias).enumerate() {
            let at = feature * LANES;
            let y = S::mul(S::sub(S::load(x.add(at)), mean), r);
            S::store(out.add(at), S::fma(y, S::splat(w), S::splat(b)));
        }
    }
}

dispatch! {
    fn apply_panel = apply_kernel(x: *const f32, stats: *const f32, weight: &[f32], bias: &[f32], out: *mut f32);
}

/// Two vectors for one feature: the gradient of the normalized feature (the result's gradient times the weight), and
/// the normalized feature itself.
///
/// # Safety
/// The CPU has the features of `S`; `x` and `dh` have the feature's vector.
#[inline(always)]
unsafe fn weighted<S: Simd>(
    x: *const f32,
    [mean, r]: [S::V; 2],
    weight: f32,
    dh: *const f32,
    feature: usize,
) -> [S::V; 2] {
    // SAFETY: as the caller says.
    unsafe {
        let g = S::mul(S::load(dh.add(feature * LANES)), S::splat(weight));
        [g, S::mul(S::sub(S::load(x.add(feature * LANES)), mean), r)]
    }
}

/// # Safety
/// The CPU has the features of `S`; `x`, `dh` and `dx` hold `weight.len()` vectors, `stats` two.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(
    x: *const f32,
    stats: *const f32,
    weight: &[f32],
    dh: *const f32,
    dx: *mut f32,
    add: bool,
) {
    // SAFETY: every feature is below the weight's length: within all, as the caller says.
    unsafe {
        let (mean, r) = (S::load(stats), S::load(stats.add(LANES)));
        let share = S::splat(1.0 / weight.len() as f32);
        // Plain loops, because closures within closures are not compiled with the vector instructions of `S`.
        let (mut sum_g, mut sum_gy) = ([S::splat(0.0); 2], [S::splat(0.0); 2]);
        let (pairs, last) = weight.as_chunks::<2>();
        for (pair, weights) in pairs.iter().enumerate() {
            for chain in 0..2 {
                let [g, y] = weighted::<S>(x, [mean, r], weights[chain], dh, 2 * pair + chain);
                sum_g[chain] = S::add(sum_g[chain], g);
                sum_gy[chain] = S::add(sum_gy[chain], S::mul(g, y));
            }
        }
        if let &[weight] = last {
            let [g, y] = weighted::<S>(x, [mean, r], weight, dh, 2 * pairs.len());
            sum_g[0] = S::add(sum_g[0], g);
            sum_gy[0] = S::add(sum_gy[0], S::mul(g, y));
        }
        let mean_g = S::mul(S::add(sum_g[0], sum_g[1]), share);
        let mean_gy = S::mul(S::add(sum_gy[0], sum_gy[1]), share);
        for (feature, &weight) in weight.iter().enumerate() {
            let [g, y] = weighted::<S>(x, [mean, r], weight, dh, feature);
            let inner = S::sub(S::sub(g, mean_g), S::mul(y, mean_gy));
            let (value, to) = (S::mul(inner, r), dx.add(feature * LANES));
            S::store(to, if add { S::add(S::load(to), value) } else { value });
        }
    }
}

dispatch! {
    fn backward_panel = backward_kernel(
        x: *const f32, stats: *const f32, weight: &[f32], dh: *const f32, dx: *mut f32, add: bool,
    );
}

pub(super) fn stats(x: &Activation, eps: f32, out: &mut Activation) {
    let (to, stride, dim) = (out.shared(), out.stride(), x.features());
    par::run(x.panels(), |panel| {
        // SAFETY: a panel of `x` has `dim` vectors, and `super::stats` makes `out` with two features for the same
        // tokens; no other task has this panel of `out`.
        unsafe { stats_panel(x.panel(panel).as_ptr(), dim, eps, to.get().add(panel * stride)) };
    });
}

pub(super) fn apply(x: &Activation, stats: &Activation, weight: &[f32], bias: &[f32], out: &mut Activation) {
    let (to, stride) = (out.shared(), out.stride());
    par::run(x.panels(), |panel| {
        let (x, stats) = (x.panel(panel).as_ptr(), stats.panel(panel).as_ptr());
        // SAFETY: `super::apply` holds weight, bias and `stats` against `x`, and makes `out` with the shape of `x`; no
        // other task has this panel of it.
        unsafe { apply_panel(x, stats, weight, bias, to.get().add(panel * stride)) };
    });
}

pub(super) fn backward(
    x: &Activation,
    stats: &Activation,
    weight: &[f32],
    dh: &Activation,
    dx: &mut Activation,
    add: bool,
) {
    let (to, stride) = (dx.shared(), dx.stride());
    par::run(x.panels(), |panel| {
        let (x, stats, dh) = (x.panel(panel).as_ptr(), stats.panel(panel).as_ptr(), dh.panel(panel).as_ptr());
        // SAFETY: `super::backward` holds all shapes against each other; `dx` is borrowed for writing, and no other
        // task has this panel of it.
        unsafe { backward_panel(x, stats, weight, dh, to.get().add(panel * stride), add) };
    });
}

/// In a single task, so that each sum is added panel by panel, whatever the number of threads.
pub(super) fn backward_weight(x: &Activation, stats: &Activation, dh: &Activation, dw: &mut [f32]) {
    for panel in 0..x.panels() {
        let (x, stats, dh) = (x.panel(panel), stats.panel(panel), dh.panel(panel));
        let (mean, r) = stats.split_at(LANES);
        for ((x, dh), total) in x.chunks_exact(LANES).zip(dh.chunks_exact(LANES)).zip(dw.iter_mut()) {
            *total += (0..LANES).map(|lane| (x[lane] - mean[lane]) * r[lane] * dh[lane]).sum::<f32>();
        }
    }
}
