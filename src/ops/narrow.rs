//! Activations kept in bfloat16 between forward and backward: half the memory, eight bits of mantissa.
use super::panel::{Act, LANES};
use super::par;
use super::simd::{Simd, dispatch};

/// An activation in bfloat16, in the same panels.
#[derive(Debug)]
pub struct Narrow {
    /// Two numbers in the place of one.
    halves: Act,
    features: usize,
}

#[inline(always)]
unsafe fn narrow_kernel<S: Simd>(from: *const f32, to: *mut u16, vectors: usize) {
    // SAFETY: `vectors` vectors each.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            S::store_bf16(to.add(at), S::load(from.add(at)));
        }
    }
}

dispatch! { fn narrow_panel = narrow_kernel(from: *const f32, to: *mut u16, vectors: usize); }

#[inline(always)]
unsafe fn widen_kernel<S: Simd>(from: *const u16, to: *mut f32, vectors: usize) {
    // SAFETY: `vectors` vectors each.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            S::store(to.add(at), S::load_bf16(from.add(at)));
        }
    }
}

dispatch! { fn widen_panel = widen_kernel(from: *const u16, to: *mut f32, vectors: usize); }

impl Narrow {
    /// Rounds every number to the nearest, ties to even.
    pub fn new(act: &Act) -> Self {
        let mut halves = act.pool().act(act.tokens(), act.features().div_ceil(2));
        let (to, stride) = (halves.shared(), halves.stride());
        par::run(act.panels(), |panel| {
            // SAFETY: a task owns its panel, which has room for two numbers in the place of one.
            unsafe {
                let to: *mut u16 = to.get().add(panel * stride).cast();
                narrow_panel(act.panel(panel).as_ptr(), to, act.features());
            }
        });
        Self { halves, features: act.features() }
    }

    /// The rounded numbers.
    pub fn widen(&self) -> Act {
        let mut out = self.halves.pool().act(self.halves.tokens(), self.features);
        let (to, stride) = (out.shared(), out.stride());
        par::run(self.halves.panels(), |panel| {
            // SAFETY: as above.
            unsafe {
                let from: *const u16 = self.halves.panel(panel).as_ptr().cast();
                widen_panel(from, to.get().add(panel * stride), self.features);
            }
        });
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::panel::Pool;
    use crate::ops::testing::{each_level, numbers};
    use half::bf16;

    #[test]
    fn rounds_every_number_and_keeps_its_place() {
        each_level(|_| {
            for (tokens, features) in [(1, 1), (19, 5), (32, 8)] {
                let x = numbers(1, tokens * features);
                let act = Act::from_rows(&Pool::new(), &x, features);
                let rounded: Vec<f32> = x.iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
                assert_eq!(Narrow::new(&act).widen().to_rows(), rounded);
            }
        });
    }
}
