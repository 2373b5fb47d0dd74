//! The conversions on the CPU: one task takes one panel. bfloat16 uses vector instructions, float16 the `half` crate.
use super::{Half, Narrow};
use crate::activation::{Activation, LANES};
use crate::par;
use crate::simd::{Simd, dispatch};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// # Safety
/// The CPU has the features of `S`; `from` and `to` hold `vectors` times 16 numbers each.
#[inline(always)]
unsafe fn narrow_kernel<S: Simd>(from: *const f32, to: *mut u16, vectors: usize) {
    // SAFETY: `at` stays below the numbers that both hold, as the caller says.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            S::store_bf16(to.add(at), S::load(from.add(at)));
        }
    }
}

dispatch! { fn narrow_panel = narrow_kernel(from: *const f32, to: *mut u16, vectors: usize); }

/// # Safety
/// The CPU has the features of `S`; `from` and `to` hold `vectors` times 16 numbers each.
#[inline(always)]
unsafe fn widen_kernel<S: Simd>(from: *const u16, to: *mut f32, vectors: usize) {
    // SAFETY: `at` stays below the numbers that both hold, as the caller says.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            S::store(to.add(at), S::load_bf16(from.add(at)));
        }
    }
}

dispatch! { fn widen_panel = widen_kernel(from: *const u16, to: *mut f32, vectors: usize); }

pub(super) fn narrow(act: &Activation, half: Half, halves: &mut Activation) {
    let (to, stride) = (halves.shared(), halves.stride());
    par::run(act.panels(), |panel| {
        // SAFETY: `Narrow::new` makes `halves` with `features.div_ceil(2)` features. A panel of it has as many vectors
        // of f32, room for `features` vectors of 16 bits, and its alignment is more than they need. No other task has
        // this panel.
        unsafe {
            let to: *mut u16 = to.get().add(panel * stride).cast();
            let from = act.panel(panel);
            match half {
                Half::Bf16 => narrow_panel(from.as_ptr(), to, act.features()),
                Half::F16 => std::slice::from_raw_parts_mut(to.cast::<f16>(), from.len()).convert_from_f32_slice(from),
            }
        }
    });
}

pub(super) fn widen(Narrow { half, halves, features }: &Narrow, out: &mut Activation) {
    let (to, stride) = (out.shared(), out.stride());
    par::run(halves.panels(), |panel| {
        // SAFETY: a panel of `halves` holds `features` vectors of 16 bits, as `narrow` wrote them; one of `out`, which
        // `Narrow::widen` makes, has room for them in 32. No other task has this panel of `out`, and the two do not
        // overlap.
        unsafe {
            let from: *const u16 = halves.panel(panel).as_ptr().cast();
            let to = to.get().add(panel * stride);
            match half {
                Half::Bf16 => widen_panel(from, to, *features),
                Half::F16 => {
                    let count = features * LANES;
                    let to = std::slice::from_raw_parts_mut(to, count);
                    std::slice::from_raw_parts(from.cast::<f16>(), count).convert_to_f32_slice(to);
                }
            }
        }
    });
}
