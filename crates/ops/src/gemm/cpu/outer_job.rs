//! The operands of a weight's gradient on the CPU, `out[m, n] += sum_t y[t, m] x[t, n]`.
use crate::activation::LANES;
use crate::simd::prefetch;

/// If `x` has at least so many blocks of 16 features, the rows of `y` are packed. Packing was slower with one block
/// (LoRA's rank of 16), equal with two, and faster with 36: four is an estimate.
const PACK_BLOCKS: usize = 4;

pub(super) struct OuterJob {
    pub(super) out: *mut f32,
    pub(super) row: usize,
    pub(super) col: usize,
    pub(super) cols: usize,
    pub(super) y: *const f32,
    pub(super) y_stride: usize,
    pub(super) x: *const f32,
    pub(super) panels: usize,
}

// SAFETY: the operands stay borrowed while tasks run; each reads them and writes rows of `out` that no other task has.
unsafe impl Sync for OuterJob {}

impl OuterJob {
    /// Whether rows of `y` are packed for their products.
    pub(super) const fn packs(&self) -> bool {
        self.cols.div_ceil(LANES) >= PACK_BLOCKS
    }

    /// Prefetches `count` numbers of `out`, from row `m` and column `n` on.
    #[inline(always)]
    pub(super) fn fetch(&self, m: usize, n: usize, count: usize) {
        if self.col == 1 {
            let first = self.out.wrapping_add(m * self.row + n);
            (0..count).step_by(LANES).for_each(|at| prefetch(first.wrapping_add(at).cast_const().cast()));
        }
    }
}
