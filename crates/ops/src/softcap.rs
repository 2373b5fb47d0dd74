//! A soft cap on logits: `cap * tanh(x / cap)`, and its slope. Gemma Team, "Gemma 2", 2024.
use super::panel::{Act, LANES};
use super::par;
use super::simd::{Simd, dispatch};

/// # Safety
/// The features of `S`; `x` holds `vectors` vectors.
#[inline(always)]
unsafe fn forward_kernel<S: Simd>(x: *mut f32, cap: f32, vectors: usize) {
    // SAFETY: `at` stays below the floats that `x` holds, as the caller says.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            let t = S::tanh(S::mul(S::load(x.add(at)), S::splat(1.0 / cap)));
            S::store(x.add(at), S::mul(S::splat(cap), t));
        }
    }
}

dispatch! { fn forward_panel = forward_kernel(x: *mut f32, cap: f32, vectors: usize); }

/// # Safety
/// The features of `S`; `capped` and `gradient` hold `vectors` vectors each.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(capped: *const f32, cap: f32, gradient: *mut f32, vectors: usize) {
    // SAFETY: `at` stays below the floats that both hold, as the caller says.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            let t = S::mul(S::load(capped.add(at)), S::splat(1.0 / cap));
            let slope = S::sub(S::splat(1.0), S::mul(t, t));
            S::store(gradient.add(at), S::mul(S::load(gradient.add(at)), slope));
        }
    }
}

dispatch! {
    fn backward_panel = backward_kernel(capped: *const f32, cap: f32, gradient: *mut f32, vectors: usize);
}

/// Caps every value in place.
pub fn forward(x: &mut Act, cap: f32) {
    if x.is_meta() {
        return;
    }
    let (to, stride, panels) = (x.shared(), x.stride(), x.panels());
    par::run(panels, |panel| {
        // SAFETY: a panel is `stride` floats, `stride / LANES` vectors. It lies within `x`, which is borrowed for
        // writing; no other task has it.
        unsafe { forward_panel(to.get().add(panel * stride), cap, stride / LANES) };
    });
}

/// Multiplies the gradient of [`forward`]'s result, which is `capped`, by the slope: it becomes that of the input.
pub fn backward(capped: &Act, cap: f32, gradient: &mut Act) {
    assert_eq!((capped.tokens(), capped.features()), (gradient.tokens(), gradient.features()), "both have one shape");
    if capped.is_meta() {
        return;
    }
    let (to, stride) = (gradient.shared(), gradient.stride());
    par::run(capped.panels(), |panel| {
        let capped = capped.panel(panel).as_ptr();
        // SAFETY: a panel of both is `stride / LANES` vectors, for their shapes are the same. That of `gradient` lies
        // within it; it is borrowed for writing, and no other task has the panel.
        unsafe { backward_panel(capped, cap, to.get().add(panel * stride), stride / LANES) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panel::Pool;
    use crate::testing::{check_gradient, each_level, numbers};

    #[test]
    fn equals_the_definition_and_its_finite_differences() {
        each_level(|_| {
            let (x, seed): (Vec<f32>, _) = (numbers(1, 19 * 5).iter().map(|x| x * 9.0).collect(), numbers(2, 19 * 5));
            let cap = |x: f64| 2.0 * (x / 2.0).tanh();
            let pool = Pool::new();
            let mut capped = Act::from_rows(&pool, &x, 5);
            forward(&mut capped, 2.0);
            for (got, want) in capped.to_rows().iter().zip(&x) {
                assert!((f64::from(*got) - cap(f64::from(*want))).abs() < 1e-6);
            }
            let mut dx = Act::from_rows(&pool, &seed, 5);
            backward(&capped, 2.0, &mut dx);
            let wanted = |x: &[f64]| x.iter().zip(&seed).map(|(&x, &s)| cap(x) * f64::from(s)).sum();
            check_gradient("dx", &x, &dx.to_rows(), wanted);
        });
    }
}
