//! Soft capping on the CPU: one task takes one panel.
use crate::activation::{Activation, LANES};
use crate::par;
use crate::simd::{Simd, dispatch};

/// # Safety
/// The CPU has the features of `S`; `x` holds `vectors` vectors.
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
/// The CPU has the features of `S`; `capped` and `gradient` hold `vectors` vectors each.
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

pub(super) fn forward(x: &mut Activation, cap: f32) {
    let (to, stride, panels) = (x.shared(), x.stride(), x.panels());
    par::run(panels, |panel| {
        // SAFETY: a panel is `stride` floats, `stride / LANES` vectors. It lies within `x`, which is borrowed for
        // writing; no other task has it.
        unsafe { forward_panel(to.get().add(panel * stride), cap, stride / LANES) };
    });
}

pub(super) fn backward(capped: &Activation, cap: f32, gradient: &mut Activation) {
    let (to, stride) = (gradient.shared(), gradient.stride());
    par::run(capped.panels(), |panel| {
        let capped = capped.panel(panel).as_ptr();
        // SAFETY: `super::backward` asserts that both have one shape, so that a panel of each is `stride / LANES`
        // vectors. That of `gradient` lies within it; it is borrowed for writing, and no other task has the panel.
        unsafe { backward_panel(capped, cap, to.get().add(panel * stride), stride / LANES) };
    });
}
