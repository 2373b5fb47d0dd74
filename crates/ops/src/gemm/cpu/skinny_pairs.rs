//! The product of few tokens with a matrix that lies in bfloat16 pairs of columns. As in [`skinny`](super::skinny),
//! sixteen rows fill the lanes, and a pair of a token is broadcast. Each sum adds the pairs in the order of
//! [`pairs`](super::pairs), and so has the same bits.
use super::skinny::{Job, first_sums, write};
use crate::activation::LANES;
use crate::simd::{PairLanes, dispatch_pairs, prefetch_far};

/// How many pairs of columns ahead of the current one a block is prefetched, as measured. A pair of columns is one
/// cache line.
const fn ahead(tokens: usize) -> usize {
    match tokens {
        0..=4 => 32,
        5..=8 => 128,
        _ => 64,
    }
}

/// Computes the rows `m..m + count` of the result, at most `16 GROUPS`, with all sums in registers, for up to `TOKENS`
/// tokens.
///
/// # Safety
/// The CPU has the features of `P`; the rows, from a multiple of 16 on, are some of the result, and no other task has them. `words` are those of
/// the matrix's first block, and the operand has `TOKENS` pairs, `APART` floats from one pair of features to the next. `job` has passed the
/// checks of `gemm::matmul_grouped`.
#[inline(always)]
unsafe fn at_once<P: PairLanes, const TOKENS: usize, const APART: usize, const GROUPS: usize>(
    job: &Job<'_>,
    words: *const f32,
    m: usize,
    count: usize,
) {
    let part = &job.parts[0];
    debug_assert_eq!(part.x.apart, APART);
    let pairs = part.pairs();
    let rows = |group: usize| [m + group * LANES, count.saturating_sub(group * LANES).min(LANES)];
    // SAFETY: the matrix has each of these blocks whole, and the operand a pair of each token where the matrix has one. What is fetched
    // ahead may lie beyond the matrix: fetching reads nothing.
    unsafe {
        let mut all = [[[0.0f32; LANES]; TOKENS]; GROUPS];
        for (group, sums) in all.iter_mut().enumerate() {
            for (token, sum) in sums.iter_mut().enumerate().take(job.tokens) {
                *sum = first_sums(job, rows(group), token);
            }
        }
        let mut sums = [[P::broadcast(0.0); TOKENS]; GROUPS];
        for (sums, all) in sums.iter_mut().zip(&all) {
            for (sum, from) in sums.iter_mut().zip(all) {
                *sum = P::read(from.as_ptr());
            }
        }
        let (mut from, mut x) = (words.add(m / LANES * pairs * LANES), part.x.first());
        for pair in 0..pairs {
            // Beyond the end of the row, the next pairs belong to the row GROUPS blocks later, because the blocks
            // between are multiplied side by side.
            let ahead = const { ahead(TOKENS) };
            let ahead = if pair + ahead < pairs { ahead } else { ahead + (GROUPS - 1) * pairs };
            let mut columns = [P::broadcast(0.0); GROUPS];
            for (group, column) in columns.iter_mut().enumerate() {
                let at = from.wrapping_add(group * pairs * LANES);
                prefetch_far(at.wrapping_add(ahead * LANES));
                *column = P::read(at);
            }
            for token in 0..TOKENS {
                let value = P::broadcast(*x.add(token));
                for (sums, column) in sums.iter_mut().zip(columns) {
                    sums[token] = P::add_product(column, value, sums[token]);
                }
            }
            (from, x) = (from.wrapping_add(LANES), x.wrapping_add(APART));
        }
        for (all, sums) in all.iter_mut().zip(sums) {
            for (to, sum) in all.iter_mut().zip(sums) {
                P::write(to.as_mut_ptr(), sum);
            }
        }
        for (group, sums) in all.iter().enumerate() {
            write::<P::Wide>(job, rows(group), sums);
        }
    }
}

/// A function of its own for each kind of block.
macro_rules! at_once {
    ($($name:ident, $kernel:ident: $tokens:expr, $apart:expr, $groups:expr;)*) => { $(
        /// # Safety
        /// As of [`at_once`].
        #[inline(always)]
        unsafe fn $kernel<P: PairLanes>(job: &Job<'_>, words: *const f32, m: usize, count: usize) {
            // SAFETY: as the caller says.
            unsafe { at_once::<P, $tokens, $apart, $groups>(job, words, m, count) }
        }
        dispatch_pairs! { fn $name = $kernel(job: &Job<'_>, words: *const f32, m: usize, count: usize); }
    )* };
}

at_once! {
    one_by_four, one_by_four_kernel: 1, 1, 4;
    one_by_one, one_by_one_kernel: 1, 1, 1;
    two_by_four, two_by_four_kernel: 2, LANES, 4;
    two_by_one, two_by_one_kernel: 2, LANES, 1;
    four_by_four, four_by_four_kernel: 4, LANES, 4;
    four_by_one, four_by_one_kernel: 4, LANES, 1;
    eight_by_two, eight_by_two_kernel: 8, LANES, 2;
    eight_by_one, eight_by_one_kernel: 8, LANES, 1;
    sixteen_by_one, sixteen_by_one_kernel: 16, LANES, 1;
}

/// Computes the rows `m0..m1` of the result.
///
/// # Safety
/// They are some of the result, from a multiple of 16 on, and no other task has them. `words` are those of the matrix's first block. `job`
/// has passed the checks of `gemm::matmul_grouped`.
pub(super) unsafe fn task_at(job: &Job<'_>, words: *const f32, [m0, m1]: [usize; 2]) {
    let mut m = m0;
    while m < m1 {
        let many = (m1 - m) / LANES >= job.groups;
        let count = (if many { job.groups * LANES } else { LANES }).min(m1 - m);
        // SAFETY: `m + count <= m1`, and `count` fits the blocks that are chosen for it.
        unsafe {
            match (job.tokens, many) {
                (1, true) => one_by_four(job, words, m, count),
                (1, false) => one_by_one(job, words, m, count),
                (2, true) => two_by_four(job, words, m, count),
                (2, false) => two_by_one(job, words, m, count),
                (..=4, true) => four_by_four(job, words, m, count),
                (..=4, false) => four_by_one(job, words, m, count),
                (..=8, true) => eight_by_two(job, words, m, count),
                (..=8, false) => eight_by_one(job, words, m, count),
                _ => sixteen_by_one(job, words, m, count),
            }
        }
        m += count;
    }
}
