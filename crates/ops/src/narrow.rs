//! Activations kept in sixteen bits between forward and backward: half the memory; bfloat16 has eight bits of mantissa,
//! float16 eleven, and numbers up to 65504 alone.
use super::panel::{Act, LANES};
use super::par;
use super::simd::{Simd, dispatch};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// How sixteen bits are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// bfloat16: 8 bits of exponent, 7 of fraction.
    Bf16,
    /// IEEE half precision: 5 bits of exponent, 10 of fraction.
    F16,
}

/// An activation in sixteen bits, in the same panels.
#[derive(Debug)]
pub struct Narrow {
    half: Half,
    /// Two numbers in the place of one.
    halves: Act,
    features: usize,
}

/// # Safety
/// The features of `S`; `from` and `to` hold `vectors` times 16 numbers each.
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
/// The features of `S`; `from` and `to` hold `vectors` times 16 numbers each.
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

impl Narrow {
    /// Rounds every number to the nearest, ties to even.
    pub fn new(act: &Act, half: Half) -> Self {
        let mut halves = act.pool().act(act.tokens(), act.features().div_ceil(2));
        if act.is_meta() {
            return Self { half, halves, features: act.features() };
        }
        let (to, stride) = (halves.shared(), halves.stride());
        par::run(act.panels(), |panel| {
            // SAFETY: a panel of `halves` has `features.div_ceil(2)` vectors of f32, room for `features` vectors of 16
            // bits, and its alignment is more than they need. No other task has this panel.
            unsafe {
                let to: *mut u16 = to.get().add(panel * stride).cast();
                let from = act.panel(panel);
                match half {
                    Half::Bf16 => narrow_panel(from.as_ptr(), to, act.features()),
                    Half::F16 => {
                        std::slice::from_raw_parts_mut(to.cast::<f16>(), from.len()).convert_from_f32_slice(from);
                    }
                }
            }
        });
        Self { half, halves, features: act.features() }
    }

    /// Converts the rounded numbers back to f32.
    pub fn widen(&self) -> Act {
        let mut out = self.halves.pool().act(self.halves.tokens(), self.features);
        if out.is_meta() {
            return out;
        }
        let (to, stride) = (out.shared(), out.stride());
        par::run(self.halves.panels(), |panel| {
            // SAFETY: a panel of `halves` holds `features` vectors of 16 bits, as `new` wrote them; one of `out` has
            // room for them in 32. No other task has this panel of `out`, and the two do not overlap.
            unsafe {
                let from: *const u16 = self.halves.panel(panel).as_ptr().cast();
                let to = to.get().add(panel * stride);
                match self.half {
                    Half::Bf16 => widen_panel(from, to, self.features),
                    Half::F16 => {
                        let count = self.features * LANES;
                        let to = std::slice::from_raw_parts_mut(to, count);
                        std::slice::from_raw_parts(from.cast::<f16>(), count).convert_to_f32_slice(to);
                    }
                }
            }
        });
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panel::Pool;
    use crate::testing::{each_level, numbers};
    use half::bf16;

    #[test]
    fn rounds_every_number_and_keeps_its_place() {
        each_level(|_| {
            for (tokens, features) in [(1, 1), (19, 5), (32, 8)] {
                let x = numbers(1, tokens * features);
                let act = Act::from_rows(&Pool::new(), &x, features);
                let rounded: Vec<f32> = x.iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
                assert_eq!(Narrow::new(&act, Half::Bf16).widen().to_rows(), rounded);
                let rounded: Vec<f32> = x.iter().map(|&value| f16::from_f32(value).to_f32()).collect();
                assert_eq!(Narrow::new(&act, Half::F16).widen().to_rows(), rounded);
            }
        });
    }
}
