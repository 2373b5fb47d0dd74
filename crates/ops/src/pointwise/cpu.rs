//! Activation functions on the CPU: one task takes one panel.
use super::Function;
use crate::activation::{Activation, LANES};
use crate::gated_mlp::{Gate, both as of_gate};
use crate::par;
use crate::simd::{Simd, dispatch};

/// `(f(x), f'(x))`: the value of the function and its derivative.
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
unsafe fn both<S: Simd>(function: Function, x: S::V) -> (S::V, S::V) {
    // SAFETY: registers only; the caller has the features of `S`.
    unsafe {
        match function {
            Function::Gelu => of_gate::<S>(Gate::Gelu, x),
            Function::GeluTanh => of_gate::<S>(Gate::GeluTanh, x),
            Function::Silu => of_gate::<S>(Gate::Silu, x),
            Function::QuickGelu => {
                let (one, factor) = (S::splat(1.0), S::splat(1.702));
                let scaled = S::mul(x, factor);
                let s = S::sigmoid(scaled);
                // f'(x) = s (1 + 1.702 x (1 - s))
                (S::mul(x, s), S::mul(s, S::fma(scaled, S::sub(one, s), one)))
            }
            Function::Relu => {
                let zero = S::splat(0.0);
                (S::if_gt(x, zero, x, zero), S::if_gt(x, zero, S::splat(1.0), zero))
            }
            Function::Relu2 => {
                let kept = S::if_gt(x, S::splat(0.0), x, S::splat(0.0));
                (S::mul(kept, kept), S::add(kept, kept))
            }
            Function::Tanh => {
                let t = S::tanh(x);
                (t, S::sub(S::splat(1.0), S::mul(t, t)))
            }
        }
    }
}

/// # Safety
/// The CPU has the features of `S`; `x` and `out` hold `vectors` vectors each.
#[inline(always)]
unsafe fn forward_kernel<S: Simd>(function: Function, x: *const f32, out: *mut f32, vectors: usize) {
    // SAFETY: `at` stays below the floats that both hold, as the caller says.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            S::store(out.add(at), both::<S>(function, S::load(x.add(at))).0);
        }
    }
}

dispatch! { fn forward_panel = forward_kernel(function: Function, x: *const f32, out: *mut f32, vectors: usize); }

/// # Safety
/// The CPU has the features of `S`; `x` and `d_out` hold `vectors` vectors each.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(function: Function, x: *mut f32, d_out: *const f32, vectors: usize) {
    // SAFETY: `at` stays below the floats that both hold, as the caller says.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            let slope = both::<S>(function, S::load(x.add(at))).1;
            S::store(x.add(at), S::mul(S::load(d_out.add(at)), slope));
        }
    }
}

dispatch! { fn backward_panel = backward_kernel(function: Function, x: *mut f32, d_out: *const f32, vectors: usize); }

pub(super) fn forward(function: Function, x: &Activation, out: &mut Activation) {
    let (to, stride) = (out.shared(), out.stride());
    par::run(x.panels(), |panel| {
        // SAFETY: `super::forward` makes `out` with the shape of `x`; a panel of it is `stride / LANES` vectors. That of
        // `out` is no other task's.
        unsafe { forward_panel(function, x.panel(panel).as_ptr(), to.get().add(panel * stride), stride / LANES) };
    });
}

pub(super) fn backward(function: Function, x: &mut Activation, d_out: &Activation) {
    let (stride, panels) = (x.stride(), x.panels());
    let x = x.shared();
    par::run(panels, |panel| {
        let x = x.get().wrapping_add(panel * stride);
        // SAFETY: `super::backward` asserts that both have one shape; a panel of it is `stride / LANES` vectors. `x` is
        // borrowed for writing, and no other task has this panel of it.
        unsafe { backward_panel(function, x, d_out.panel(panel).as_ptr(), stride / LANES) };
    });
}
