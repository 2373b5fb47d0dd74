//! `RMSNorm`: `h = x / sqrt(mean(x^2) + eps) * (weight + offset)`, over all features or over each head's (Qwen3's q and k).
//! Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
use super::floats::{Floats, FloatsMut};
use super::panel::{Act, LANES};
use super::par;
use super::simd::{Simd, dispatch};

/// What a normed row is multiplied by.
#[derive(Debug, Clone, Copy)]
pub struct Gain<'a> {
    /// The gain `[features]`.
    pub weight: Floats<'a>,
    /// Added to each of them: Gemma counts its weights from 1.
    pub offset: f32,
}

/// A [`Gain`] as the kernels read it.
#[derive(Clone, Copy)]
struct HostGain<'a> {
    weight: &'a [f32],
    offset: f32,
}

impl<'a> Gain<'a> {
    const fn host(self) -> HostGain<'a> {
        HostGain { weight: self.weight.host(), offset: self.offset }
    }
}

/// # Safety
/// The features of `S`; `x` holds `groups * dim` vectors, `out` has room for `groups`.
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
/// The features of `S`; `x` and `out` hold `groups * gain.weight.len()` vectors, `rstd` holds `groups`.
#[inline(always)]
unsafe fn apply_kernel<S: Simd>(x: *const f32, rstd: *const f32, gain: HostGain<'_>, groups: usize, out: *mut f32) {
    // SAFETY: `group` is below `groups` and `feature` below the weight's length: within all, as the caller says.
    unsafe {
        for group in 0..groups {
            let r = S::load(rstd.add(group * LANES));
            for (feature, &w) in gain.weight.iter().enumerate() {
                let at = (group * gain.weight.len() + feature) * LANES;
                S::store(out.add(at), S::mul(S::mul(S::load(x.add(at)), r), S::splat(w + gain.offset)));
            }
        }
    }
}

dispatch! {
    fn apply_panel = apply_kernel(x: *const f32, rstd: *const f32, gain: HostGain<'_>, groups: usize, out: *mut f32);
}

/// # Safety
/// The features of `S`; `x`, `dh` and `dx` hold `groups * gain.weight.len()` vectors, `rstd` holds `groups`.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(
    x: *const f32,
    rstd: *const f32,
    gain: HostGain<'_>,
    groups: usize,
    dh: *const f32,
    dx: *mut f32,
    add: bool,
) {
    // SAFETY: `group` is below `groups` and `feature` below the weight's length: within all, as the caller says.
    unsafe {
        let dim = gain.weight.len();
        for group in 0..groups {
            let base = group * dim * LANES;
            let r = S::load(rstd.add(group * LANES));
            let (mut even, mut odd) = (S::splat(0.0), S::splat(0.0));
            for (feature, &w) in gain.weight.iter().enumerate() {
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
            for (feature, &w) in gain.weight.iter().enumerate() {
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
        x: *const f32, rstd: *const f32, gain: HostGain<'_>, groups: usize, dh: *const f32, dx: *mut f32, add: bool,
    );
}

/// `1 / sqrt(mean(x^2) + eps)` of each token and group: `[tokens, groups]`, for `x [tokens, groups * dim]`.
pub fn stats(x: &Act, groups: usize, eps: f32) -> Act {
    assert!(x.features().is_multiple_of(groups), "whole groups");
    let mut out = x.pool().blank(x.tokens(), groups);
    if x.is_meta() {
        return out;
    }
    let (to, stride, dim) = (out.shared(), out.stride(), x.features() / groups);
    par::run(x.panels(), |panel| {
        // SAFETY: a panel of `x` has `groups * dim` vectors, one of `out` has `groups`; no other task has this one of
        // `out`.
        unsafe { stats_panel(x.panel(panel).as_ptr(), dim, groups, eps, to.get().add(panel * stride)) };
    });
    out
}

/// `h = x * rstd * gain`, with `rstd` from [`stats`] and one gain of `dim` for every group.
pub fn apply(x: &Act, rstd: &Act, gain: Gain<'_>) -> Act {
    let groups = rstd.features();
    assert_eq!(x.features(), groups * gain.weight.len(), "a weight for each feature");
    let mut out = x.pool().blank(x.tokens(), x.features());
    if x.is_meta() {
        return out;
    }
    let gain = gain.host();
    let (to, stride) = (out.shared(), out.stride());
    par::run(x.panels(), |panel| {
        let (x, rstd) = (x.panel(panel).as_ptr(), rstd.panel(panel).as_ptr());
        // SAFETY: the assertion holds the gain against the panels of `x` and `rstd`; `out` has the shape of `x`, and no
        // other task has this panel of it.
        unsafe { apply_panel(x, rstd, gain, groups, to.get().add(panel * stride)) };
    });
    out
}

/// The gradient of [`apply`] after [`stats`] with respect to `x`, written to `dx` or added to it.
pub fn backward(x: &Act, rstd: &Act, gain: Gain<'_>, dh: &Act, dx: &mut Act, add: bool) {
    for other in [dh, &*dx] {
        assert_eq!((x.tokens(), x.features()), (other.tokens(), other.features()), "all have one shape");
    }
    assert_eq!(
        (x.tokens(), x.features()),
        (rstd.tokens(), rstd.features() * gain.weight.len()),
        "a weight for each feature"
    );
    if x.is_meta() {
        return;
    }
    let gain = gain.host();
    let (to, stride, groups) = (dx.shared(), dx.stride(), rstd.features());
    par::run(x.panels(), |panel| {
        let (x, rstd, dh) = (x.panel(panel).as_ptr(), rstd.panel(panel).as_ptr(), dh.panel(panel).as_ptr());
        // SAFETY: the assertions hold all shapes against each other; `dx` is borrowed for writing, and no other task
        // has this panel of it.
        unsafe { backward_panel(x, rstd, gain, groups, dh, to.get().add(panel * stride), add) };
    });
}

/// Adds the gradient with respect to the weight, `sum over tokens and groups of dh x rstd`, to `dw [dim]`.
pub fn backward_weight(x: &Act, rstd: &Act, dh: &Act, dw: FloatsMut<'_>) {
    if x.is_meta() {
        return;
    }
    let dw = dw.host();
    let (dim, groups) = (dw.len(), rstd.features());
    for panel in 0..x.panels() {
        let (x, rstd, dh) = (x.panel(panel), rstd.panel(panel), dh.panel(panel));
        for group in 0..groups {
            let r = &rstd[group * LANES..][..LANES];
            for (feature, total) in dw.iter_mut().enumerate() {
                let at = (group * dim + feature) * LANES;
                let (x, dh) = (&x[at..at + LANES], &dh[at..at + LANES]);
                *total += (0..LANES).map(|lane| x[lane] * r[lane] * dh[lane]).sum::<f32>();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panel::Pool;
    use crate::testing::{check_gradient, each_level, numbers};

    fn reference(x: &[f64], weight: &[f64], offset: f64, eps: f64) -> Vec<f64> {
        let one = |x: &[f64]| {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * (w + offset)).collect::<Vec<_>>()
        };
        x.chunks(weight.len()).flat_map(one).collect()
    }

    #[test]
    fn equals_the_definition_and_its_finite_differences() {
        each_level(|_| {
            for (tokens, groups, dim, offset) in [(1, 1, 1, 0.0), (5, 1, 7, 1.0), (17, 3, 8, 0.0), (33, 1, 65, 1.0)] {
                let (x, weight, seed) =
                    (numbers(1, tokens * groups * dim), numbers(2, dim), numbers(3, tokens * groups * dim));
                let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
                let pool = Pool::new();
                let (xa, dh) = (Act::from_rows(&pool, &x, groups * dim), Act::from_rows(&pool, &seed, groups * dim));
                let rstd = stats(&xa, groups, 1e-3);
                let gain = Gain { weight: (&weight).into(), offset };
                let h = apply(&xa, &rstd, gain);
                for (got, want) in
                    h.to_rows().iter().zip(reference(&double(&x), &double(&weight), f64::from(offset), 1e-3))
                {
                    assert!((f64::from(*got) - want).abs() < 1e-5, "{got} != {want}");
                }
                let loss = |x: &[f64], w: &[f64]| -> f64 {
                    reference(x, w, f64::from(offset), 1e-3).iter().zip(&seed).map(|(h, &s)| h * f64::from(s)).sum()
                };
                let mut dx = pool.act(tokens, groups * dim);
                backward(&xa, &rstd, gain, &dh, &mut dx, false);
                check_gradient("dx", &x, &dx.to_rows(), |x| loss(x, &double(&weight)));
                let once = dx.to_rows();
                backward(&xa, &rstd, gain, &dh, &mut dx, true);
                assert!(dx.to_rows().iter().zip(&once).all(|(twice, once)| (twice - 2.0 * once).abs() < 1e-4));
                let mut dw = vec![0.0; dim];
                backward_weight(&xa, &rstd, &dh, (&mut dw).into());
                check_gradient("dw", &weight, &dw, |w| loss(&double(&x), w));
            }
        });
    }
}
