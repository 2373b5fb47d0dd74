//! A factor for each feature, on the CPU. One task takes one panel; for the gradient, one task takes some features and sums each over
//! all tokens.
use crate::activation::{Activation, LANES};
use crate::par;

/// How many features one task of [`backward`] takes.
const FEATURES: usize = 64;

pub(super) fn times(v: &Activation, gain: &[f32], out: &mut Activation) {
    let (to, stride) = (out.shared(), out.stride());
    par::run(v.panels(), |panel| {
        for (feature, (lanes, gain)) in v.panel(panel).chunks_exact(LANES).zip(gain).enumerate() {
            for (lane, value) in lanes.iter().enumerate() {
                // SAFETY: `out` was made with the shape of `v`, which `panel`, `feature` and `lane` come from; no other
                // task has this panel.
                unsafe { *to.get().add(panel * stride + feature * LANES + lane) = gain * value };
            }
        }
    });
}

pub(super) fn add(y: &mut Activation, v: &Activation, gain: &[f32]) {
    let (to, stride) = (y.shared(), y.stride());
    par::run(v.panels(), |panel| {
        for (feature, (lanes, gain)) in v.panel(panel).chunks_exact(LANES).zip(gain).enumerate() {
            for (lane, value) in lanes.iter().enumerate() {
                // SAFETY: `y` has the shape of `v`, as `super::add` asserts; `panel`, `feature` and `lane` come from
                // it. `y` is borrowed for writing, and no other task has this panel.
                unsafe { *to.get().add(panel * stride + feature * LANES + lane) += gain * value };
            }
        }
    });
}

pub(super) fn backward(dy: &Activation, v: &Activation, norm: &[f32], d_magnitude: &mut [f32]) {
    let out = par::Shared(d_magnitude.as_mut_ptr());
    par::run(norm.len().div_ceil(FEATURES), |task| {
        for (feature, norm) in norm.iter().enumerate().skip(task * FEATURES).take(FEATURES) {
            let lanes = |act: &Activation, panel: usize| -> [f32; LANES] {
                let panel = &act.panel(panel)[feature * LANES..][..LANES];
                std::array::from_fn(|lane| panel[lane])
            };
            let mut sums = [0.0f32; LANES];
            for panel in 0..dy.panels() {
                let (dy, v) = (lanes(dy, panel), lanes(v, panel));
                sums.iter_mut().zip(dy).zip(v).for_each(|((sum, dy), v)| *sum += dy * v);
            }
            // SAFETY: `feature` is below `norm.len()`, as many as `d_magnitude` has, as `super::backward` asserts. It
            // is borrowed for writing; no other task has this feature.
            unsafe { *out.get().add(feature) += sums.iter().sum::<f32>() / norm };
        }
    });
}
