//! A factor a feature, `y[t, j] = gain[j] v[t, j]`: `DoRA`'s magnitudes.
use super::floats::{Floats, FloatsMut};
use super::panel::{Act, LANES};
use super::par;

/// `gain ⊙ v`: each feature of `v [tokens, features]` times its gain.
pub fn times(v: &Act, gain: Floats<'_>) -> Act {
    let mut out = v.pool().act(v.tokens(), v.features());
    if v.is_meta() {
        return out;
    }
    let gain = gain.host();
    let (to, stride) = (out.shared(), out.stride());
    par::run(v.panels(), |panel| {
        for (feature, (lanes, gain)) in v.panel(panel).chunks_exact(LANES).zip(gain).enumerate() {
            for (lane, value) in lanes.iter().enumerate() {
                // SAFETY: `out` has the shape of `v`, which `panel`, `feature` and `lane` come from; no other task has
                // this panel.
                unsafe { *to.get().add(panel * stride + feature * LANES + lane) = gain * value };
            }
        }
    });
    out
}

/// `y += gain ⊙ v`, both `[tokens, features]`.
///
/// # Panics
/// If the shapes differ.
pub fn add(y: &mut Act, v: &Act, gain: Floats<'_>) {
    assert_eq!((y.tokens(), y.features()), (v.tokens(), v.features()), "both have one shape");
    if v.is_meta() {
        return;
    }
    let gain = gain.host();
    let (to, stride) = (y.shared(), y.stride());
    par::run(v.panels(), |panel| {
        for (feature, (lanes, gain)) in v.panel(panel).chunks_exact(LANES).zip(gain).enumerate() {
            for (lane, value) in lanes.iter().enumerate() {
                // SAFETY: `y` has the shape of `v`, which `panel`, `feature` and `lane` come from, and is borrowed for
                // writing; no other task has this panel.
                unsafe { *to.get().add(panel * stride + feature * LANES + lane) += gain * value };
            }
        }
    });
}

/// Adds the gradient of the magnitudes, where `gain = magnitude / norm` and the norm counts as a constant:
/// `d_magnitude[j] += sum_t dy[t, j] v[t, j] / norm[j]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn backward(dy: &Act, v: &Act, norm: Floats<'_>, d_magnitude: FloatsMut<'_>) {
    const FEATURES: usize = 64;
    assert_eq!(norm.len(), d_magnitude.len(), "a norm for each magnitude");
    if dy.is_meta() {
        return;
    }
    let (norm, d_magnitude) = (norm.host(), d_magnitude.host());
    let out = par::Shared(d_magnitude.as_mut_ptr());
    par::run(norm.len().div_ceil(FEATURES), |task| {
        for (feature, norm) in norm.iter().enumerate().skip(task * FEATURES).take(FEATURES) {
            let lanes = |act: &Act, panel: usize| -> [f32; LANES] {
                let panel = &act.panel(panel)[feature * LANES..][..LANES];
                std::array::from_fn(|lane| panel[lane])
            };
            let mut sums = [0.0f32; LANES];
            for panel in 0..dy.panels() {
                let (dy, v) = (lanes(dy, panel), lanes(v, panel));
                sums.iter_mut().zip(dy).zip(v).for_each(|((sum, dy), v)| *sum += dy * v);
            }
            // SAFETY: `feature` is below `norm.len()`, as many as `d_magnitude` has, which is borrowed for writing; no
            // other task has this feature.
            unsafe { *out.get().add(feature) += sums.iter().sum::<f32>() / norm };
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panel::Pool;
    use crate::testing::{check_gradient, numbers};

    #[test]
    fn equals_its_formula_and_its_finite_differences() {
        let (tokens, features) = (37, 70);
        let pool = Pool::new();
        let (v, seed) = (numbers(1, tokens * features), numbers(2, tokens * features));
        let (magnitude, norm) = (numbers(3, features), vec![0.5; features]);
        let gain: Vec<f32> = magnitude.iter().zip(&norm).map(|(magnitude, norm)| magnitude / norm).collect();
        let (va, dy) = (Act::from_rows(&pool, &v, features), Act::from_rows(&pool, &seed, features));
        let y = times(&va, (&gain).into());
        let plain: Vec<f32> = v.iter().enumerate().map(|(at, v)| gain[at % features] * v).collect();
        assert_eq!(y.to_rows(), plain);
        let mut twice = y.copy();
        add(&mut twice, &va, (&gain).into());
        assert_eq!(twice.to_rows(), plain.iter().map(|value| 2.0 * value).collect::<Vec<_>>());
        let mut d_magnitude = vec![0.0; features];
        backward(&dy, &va, (&norm).into(), (&mut d_magnitude).into());
        check_gradient("magnitude", &magnitude, &d_magnitude, |magnitude| {
            let each = v.iter().zip(&seed).enumerate();
            each.map(|(at, (v, s))| magnitude[at % features] / 0.5 * f64::from(*v) * f64::from(*s)).sum()
        });
    }

    #[test]
    #[should_panic(expected = "both have one shape")]
    fn another_shape_is_refused() {
        let pool = Pool::new();
        let (mut y, v) = (Act::from_rows(&pool, &[0.0; 5], 5), Act::from_rows(&pool, &[0.0; 40], 2));
        add(&mut y, &v, [1.0; 2][..].into());
    }
}
