//! `RMSNorm` on the CPU: one task takes one panel. A token is a lane, so its mean needs no horizontal sum.
use super::Gain;
use crate::activation::{Activation, LANES};
use crate::par;
use crate::simd::{Simd, dispatch};
use tunesmith_cpu_slice::CpuSlice as _;

/// A [`Gain`] on the CPU, as the kernels read it.
#[derive(Clone, Copy)]
struct HostGain<'a> {
    weight: &'a [f32],
    offset: f32,
}

impl HostGain<'_> {
    /// The weight of a group of `dim` features: its own, or the one that all groups share.
    fn of(&self, group: usize, dim: usize) -> &[f32] {
        if self.weight.len() == dim { self.weight } else { &self.weight[group * dim..][..dim] }
    }
}

/// The number of groups, and the features of each.
fn sizes(x: &Activation, rstd: &Activation) -> [usize; 2] {
    [rstd.features(), x.features() / rstd.features()]
}

impl<'a> Gain<'a> {
    fn host(self) -> HostGain<'a> {
        HostGain { weight: self.weight.cpu_slice(), offset: self.offset }
    }
}

/// # Safety
/// The CPU has the features of `S`; `x` holds `groups * dim` vectors, `out` has room for `groups`.
#[inline(always)]
unsafe fn stats_kernel<S: Simd>(x: *const f32, dim: usize, groups: usize, eps: f32, out: *mut f32) {
    // SAFETY: `group` is below `groups` and `feature` below `dim`: within `x` and `out`, as the caller says.
    unsafe {
        for group in 0..groups {
            let (mut even, mut odd) = (S::splat(0.0), S::splat(0.0));
            let x = x.add(group * dim * LANES);
            let mut feature = 0;
            while feature + 1 < dim {
                let (a, b) = (S::load(x.add(feature * LANES)), S::load(x.add((feature + 1) * LANES)));
                even = S::fma(a, a, even);
                odd = S::fma(b, b, odd);
                feature += 2;
            }
            if feature < dim {
                let a = S::load(x.add(feature * LANES));
                even = S::fma(a, a, even);
            }
            let mean = S::fma(S::add(even, odd), S::splat(1.0 / dim as f32), S::splat(eps));
            let mut lanes = [0.0f32; LANES];
            S::store(lanes.as_mut_ptr(), mean);
            for (lane, value) in lanes.iter().enumerate() {
                *out.add(group * LANES + lane) = 1.0 / value.sqrt();
            }
        }
    }
}

dispatch! { fn stats_panel = stats_kernel(x: *const f32, dim: usize, groups: usize, eps: f32, out: *mut f32); }

/// # Safety
/// The CPU has the features of `S`; `x` and `out` hold `groups * dim` vectors, `rstd` holds `groups`.
#[inline(always)]
unsafe fn apply_kernel<S: Simd>(
    x: *const f32,
    rstd: *const f32,
    gain: HostGain<'_>,
    [groups, dim]: [usize; 2],
    out: *mut f32,
) {
    // SAFETY: `group` is below `groups` and `feature` below `dim`: within all, as the caller says.
    unsafe {
        for group in 0..groups {
            let r = S::load(rstd.add(group * LANES));
            for (feature, &w) in gain.of(group, dim).iter().enumerate() {
                let at = (group * dim + feature) * LANES;
                S::store(out.add(at), S::mul(S::mul(S::load(x.add(at)), r), S::splat(w + gain.offset)));
            }
        }
    }
}

dispatch! {
    fn apply_panel = apply_kernel(
        x: *const f32, rstd: *const f32, gain: HostGain<'_>, sizes: [usize; 2], out: *mut f32,
    );
}

/// # Safety
/// The CPU has the features of `S`; `x`, `dh` and `dx` hold `groups * dim` vectors, `rstd` holds `groups`.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(
    x: *const f32,
    rstd: *const f32,
    gain: HostGain<'_>,
    [groups, dim]: [usize; 2],
    dh: *const f32,
    dx: *mut f32,
    add: bool,
) {
    // SAFETY: `group` is below `groups` and `feature` below `dim`: within all, as the caller says.
    unsafe {
        for group in 0..groups {
            let weight = gain.of(group, dim);
            let base = group * dim * LANES;
            let r = S::load(rstd.add(group * LANES));
            let (mut even, mut odd) = (S::splat(0.0), S::splat(0.0));
            for (feature, &w) in weight.iter().enumerate() {
                let at = base + feature * LANES;
                let term = S::mul(S::load(dh.add(at)), S::splat(w + gain.offset));
                if feature % 2 == 0 {
                    even = S::fma(term, S::load(x.add(at)), even);
                } else {
                    odd = S::fma(term, S::load(x.add(at)), odd);
                }
            }
            // dx = r (w dh - x r^2 mean(w dh x))
            let mean = S::mul(S::add(even, odd), S::splat(-1.0 / dim as f32));
            let pull = S::mul(S::mul(mean, r), r);
            for (feature, &w) in weight.iter().enumerate() {
                let at = base + feature * LANES;
                let inner = S::fma(S::load(x.add(at)), pull, S::mul(S::load(dh.add(at)), S::splat(w + gain.offset)));
                let value = S::mul(inner, r);
                S::store(dx.add(at), if add { S::add(S::load(dx.add(at)), value) } else { value });
            }
        }
    }
}

dispatch! {
    fn backward_panel = backward_kernel(
        x: *const f32, rstd: *const f32, gain: HostGain<'_>, sizes: [usize; 2], dh: *const f32, dx: *mut f32, add: bool,
    );
}

/// As [`stats_kernel`] and then [`apply_kernel`] for one token whose features lie side by side: the same sums in the
/// same order.
///
/// # Safety
/// The CPU has the features of `S`; `x` holds `groups * dim` floats, `out` has room for as many.
#[inline(always)]
unsafe fn vector_kernel<S: Simd>(
    x: *const f32,
    [groups, dim]: [usize; 2],
    eps: f32,
    gain: HostGain<'_>,
    out: *mut f32,
) {
    // SAFETY: `group` is below `groups` and a feature below `dim`: within `x` and `out`, as the caller says.
    unsafe {
        for group in 0..groups {
            let (x, out) = (x.add(group * dim), out.add(group * dim));
            let (mut even, mut odd) = (S::splat(0.0), S::splat(0.0));
            for feature in (0..dim).step_by(2) {
                let a = S::splat(*x.add(feature));
                even = S::fma(a, a, even);
                if feature + 1 < dim {
                    let b = S::splat(*x.add(feature + 1));
                    odd = S::fma(b, b, odd);
                }
            }
            let mut lanes = [0.0f32; LANES];
            S::store(lanes.as_mut_ptr(), S::fma(S::add(even, odd), S::splat(1.0 / dim as f32), S::splat(eps)));
            let r = 1.0 / lanes[0].sqrt();
            let weight = gain.of(group, dim);
            let whole = dim - dim % LANES;
            for at in (0..whole).step_by(LANES) {
                let w = S::add(S::load(weight.as_ptr().add(at)), S::splat(gain.offset));
                S::store(out.add(at), S::mul(S::mul(S::load(x.add(at)), S::splat(r)), w));
            }
            for (at, &w) in weight.iter().enumerate().skip(whole) {
                *out.add(at) = *x.add(at) * r * (w + gain.offset);
            }
        }
    }
}

dispatch! {
    fn of_features = vector_kernel(x: *const f32, sizes: [usize; 2], eps: f32, gain: HostGain<'_>, out: *mut f32);
}

pub(super) fn of_vector(x: &Activation, groups: usize, eps: f32, gain: Gain<'_>, out: &mut Activation) {
    let features = x.tokens();
    out.data_mut()[features..].fill(0.0);
    let sizes = [groups, features / groups];
    // SAFETY: both hold a float for each feature, which are those of all groups, and `super::of_vector` has held the weights against them.
    // `out` is borrowed for writing.
    unsafe { of_features(x.ptr(), sizes, eps, gain.host(), out.shared().get()) };
}

pub(super) fn stats(x: &Activation, eps: f32, out: &mut Activation) {
    let groups = out.features();
    let (to, stride, dim) = (out.shared(), out.stride(), x.features() / groups);
    par::run(x.panels(), |panel| {
        // SAFETY: `super::stats` asserts that a panel of `x` has `groups * dim` vectors, and makes `out` with `groups`
        // features for the same tokens; no other task has this panel of `out`.
        unsafe { stats_panel(x.panel(panel).as_ptr(), dim, groups, eps, to.get().add(panel * stride)) };
    });
}

pub(super) fn apply(x: &Activation, rstd: &Activation, gain: Gain<'_>, out: &mut Activation) {
    let (gain, sizes) = (gain.host(), sizes(x, rstd));
    let (to, stride) = (out.shared(), out.stride());
    par::run(x.panels(), |panel| {
        let (x, rstd) = (x.panel(panel).as_ptr(), rstd.panel(panel).as_ptr());
        // SAFETY: `super::apply` holds the gain against the panels of `x` and `rstd`, and makes `out` with the shape of
        // `x`; no other task has this panel of it.
        unsafe { apply_panel(x, rstd, gain, sizes, to.get().add(panel * stride)) };
    });
}

pub(super) fn backward(
    x: &Activation,
    rstd: &Activation,
    gain: Gain<'_>,
    dh: &Activation,
    dx: &mut Activation,
    add: bool,
) {
    let gain = gain.host();
    let (to, stride, sizes) = (dx.shared(), dx.stride(), sizes(x, rstd));
    par::run(x.panels(), |panel| {
        let (x, rstd, dh) = (x.panel(panel).as_ptr(), rstd.panel(panel).as_ptr(), dh.panel(panel).as_ptr());
        // SAFETY: `super::backward` holds all shapes against each other; `dx` is borrowed for writing, and no other
        // task has this panel of it.
        unsafe { backward_panel(x, rstd, gain, sizes, dh, to.get().add(panel * stride), add) };
    });
}

/// In a single task, so that each sum is added panel by panel, whatever the number of threads.
pub(super) fn backward_weight(x: &Activation, rstd: &Activation, dh: &Activation, dw: &mut [f32]) {
    let [groups, dim] = sizes(x, rstd);
    let own = dw.len() != dim;
    for panel in 0..x.panels() {
        let (x, rstd, dh) = (x.panel(panel), rstd.panel(panel), dh.panel(panel));
        for group in 0..groups {
            let r = &rstd[group * LANES..][..LANES];
            let dw = if own { &mut dw[group * dim..][..dim] } else { &mut *dw };
            for (feature, total) in dw.iter_mut().enumerate() {
                let at = (group * dim + feature) * LANES;
                let (x, dh) = (&x[at..at + LANES], &dh[at..at + LANES]);
                *total += (0..LANES).map(|lane| x[lane] * r[lane] * dh[lane]).sum::<f32>();
            }
        }
    }
}
