//! Clamping on the CPU: one task clamps one panel.
use crate::activation::{Activation, LANES};
use crate::par;
use crate::simd::{Simd, dispatch};

/// # Safety
/// The CPU has the features of `S`; `x` and `y` hold `vectors` vectors each.
#[inline(always)]
unsafe fn forward_kernel<S: Simd>(x: *const f32, low: f32, high: f32, y: *mut f32, vectors: usize) {
    // SAFETY: `at` stays below the floats that both hold, as the caller says.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            S::store(y.add(at), S::min(S::splat(high), S::max(S::splat(low), S::load(x.add(at)))));
        }
    }
}

dispatch! { fn forward_panel = forward_kernel(x: *const f32, low: f32, high: f32, y: *mut f32, vectors: usize); }

/// # Safety
/// The CPU has the features of `S`; `x` and `gradient` hold `vectors` vectors each.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(x: *const f32, low: f32, high: f32, gradient: *mut f32, vectors: usize) {
    // SAFETY: `at` stays below the floats that both hold, as the caller says.
    unsafe {
        let zero = S::splat(0.0);
        for at in (0..vectors * LANES).step_by(LANES) {
            let (x, own) = (S::load(x.add(at)), S::load(gradient.add(at)));
            let above = S::if_gt(S::splat(low), x, zero, own);
            S::store(gradient.add(at), S::if_gt(x, S::splat(high), zero, above));
        }
    }
}

dispatch! {
    fn backward_panel = backward_kernel(x: *const f32, low: f32, high: f32, gradient: *mut f32, vectors: usize);
}

pub(super) fn forward(x: &Activation, [low, high]: [f32; 2], y: &mut Activation) {
    let (to, stride) = (y.shared(), y.stride());
    par::run(x.panels(), |panel| {
        // SAFETY: `super::forward` makes `y` with the shape of `x`; a panel of it is `stride / LANES` vectors. That of `y` is no
        // other task's.
        unsafe { forward_panel(x.panel(panel).as_ptr(), low, high, to.get().add(panel * stride), stride / LANES) };
    });
}

pub(super) fn backward(x: &Activation, [low, high]: [f32; 2], gradient: &mut Activation) {
    let (to, stride) = (gradient.shared(), gradient.stride());
    par::run(x.panels(), |panel| {
        // SAFETY: `super::backward` asserts that both have one shape, so that a panel of each is `stride / LANES` vectors. That of
        // `gradient` lies within it; it is borrowed for writing, and no other task has the panel.
        unsafe { backward_panel(x.panel(panel).as_ptr(), low, high, to.get().add(panel * stride), stride / LANES) };
    });
}
