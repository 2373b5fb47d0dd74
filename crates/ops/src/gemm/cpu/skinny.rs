//! The matrix product with few tokens, as in a step of generation. The speed of reading memory limits it.
//!
//! In [`matmul`](super::matmul) tokens fill the lanes of a vector, so with few tokens most lanes would be empty. Here sixteen rows of the
//! matrix fill the lanes ([`columns`](super::columns)), and a number of a token is broadcast. Each sum has the same multiply-adds in the same
//! order as there, and so the same bits: a text's answer does not depend on how many others are answered with it. Where an interleaved matrix
//! has scales apart, both sum a few columns before they multiply by a scale ([`Interleaved`](crate::gemm::Interleaved)).
use super::columns::{Ahead, Bytes, Kept, Nibbles, Plain, Sink, Source, Sums, Widened, some};
use super::interleaved::{self, Columns, Reader};
use super::product::splits;
use super::tokens::{COMPACT, Copies, Part, groups_in_pairs};
use crate::activation::{Activation, LANES, Pool};
use crate::gemm::{Init, Matrix, Store, Term};
use crate::quant::{Eight, Format, Quantized};
use crate::simd::{Simd, dispatch};
use smallvec::SmallVec;
use tunesmith_cpu_slice::CpuSlice as _;

/// The most tokens of such a product.
const MOST: usize = LANES;
/// How many vectors of rows are summed side by side for one token and interleaved matrices: enough that no sum waits for the one before it.
const MANY: usize = 4;
/// The same for a few tokens, or for other matrices.
const FEW: usize = 2;
/// How many vectors of rows the largest task has.
const LARGEST: usize = 64;
/// How many columns are kept until all tokens were multiplied with them.
const CHUNK: usize = 64;
/// If sixteen rows take at most so many bytes, the next sixteen are prefetched while they are multiplied, in the order of memory.
const WHOLE: usize = 256 << 10;
/// If they take more: how many of their columns are prefetched while as many before them are multiplied.
const STRETCH: usize = LANES * 8;

/// A product, and how it is divided into tasks.
pub(super) struct Job<'a> {
    /// Where the first lane of the result's first feature is.
    out: *mut f32,
    /// Whether the result is `[rows, tokens]`, with rows in the lanes.
    transposed: bool,
    pub(super) tokens: usize,
    init: Init<'a>,
    /// The terms. There is only one if its matrix lies in pairs.
    pub(super) parts: SmallVec<[Part<'a>; 2]>,
    rows: usize,
    /// Whether all matrices are interleaved.
    interleaved: bool,
    /// How many vectors of rows are summed side by side at most, if the tokens are few.
    pub(super) groups: usize,
    /// How many rows a task has.
    step: usize,
}

// SAFETY: the operands stay borrowed while tasks run; each reads them and writes rows of `out` that no other task has.
unsafe impl Sync for Job<'_> {}

/// Where a matrix's numbers are, and how many bits each has. Scales lie elsewhere, and are few.
fn stored(matrix: &Matrix<'_>) -> (*const u8, usize) {
    match matrix.data {
        Store::F32(values) => (values.cpu_slice().as_ptr().cast(), 32),
        Store::Bf16(values) => (values.cpu_slice().as_ptr().cast(), 16),
        Store::Quantized(Quantized::Four(four)) => (four.codes().as_ptr(), 4),
        Store::Quantized(Quantized::Eight(eight)) => (eight.codes().as_ptr(), 8),
        Store::Quantized(Quantized::Tiled(tiled)) => tiled.stored(),
        Store::Interleaved(_) => (std::ptr::null(), 0), // it fetches what follows itself
    }
}

/// What to prefetch while the columns from `column` on are multiplied: one stretch for every eight columns. The matrix's numbers have `bits`
/// bits and begin at `from`. `own` is the first of the sixteen rows, `next` the row that follows them.
#[inline(always)]
fn ahead(from: *const u8, bits: usize, [row, depth]: [usize; 2], column: usize, [own, next]: [usize; 2]) -> Ahead {
    let bytes = |numbers: usize| numbers * bits / 8;
    if row == depth && bytes(LANES * depth) <= WHOLE {
        let next = from.wrapping_add(bytes(next * row + column * LANES));
        return Ahead { next, step: bytes(LANES * 8) };
    }
    // Long rows are prefetched one after the other.
    let (later, index) = (column / STRETCH * STRETCH + STRETCH, column % STRETCH / 8);
    let (first, column) = if later < depth { (own, later) } else { (next, 0) };
    Ahead { next: from.wrapping_add(bytes((first + index) * row + column)), step: bytes(row) }
}

/// Some rows of one term, and the columns of them to multiply.
#[derive(Clone, Copy)]
struct Block<'a> {
    matrix: &'a Matrix<'a>,
    depth: usize,
    /// The first row, and how many rows.
    rows: [usize; 2],
    /// The first column, a multiple of [`CHUNK`], and the one after the last.
    columns: [usize; 2],
}

impl Block<'_> {
    /// Hands all whole steps of columns to the sinks, one sink for each sixteen rows, in turn. Returns the first column that is left.
    ///
    /// # Safety
    /// The CPU has the features of `S`; the sources have the columns, and each sink may take them.
    #[inline(always)]
    unsafe fn steps<S: Simd, R: Source<S>, K: Sink<S::V> + Copy, const GROUPS: usize>(
        &self,
        mut sources: [R; GROUPS],
        sinks: &mut [K; GROUPS],
    ) -> usize {
        let ([first, _], [mut k, end]) = (self.rows, self.columns);
        let (from, bits) = stored(self.matrix);
        let mut aheads = [Ahead { next: from, step: 0 }; GROUPS];
        // SAFETY: as the caller says.
        let mut turned = [unsafe { R::room() }; GROUPS];
        while k + R::COLUMNS <= end {
            if k.is_multiple_of(CHUNK) {
                for (group, to) in aheads.iter_mut().enumerate() {
                    let own = first + group * LANES;
                    *to = ahead(from, bits, [self.matrix.row, self.depth], k, [own, own + GROUPS * LANES]);
                }
            }
            // SAFETY: as the caller says.
            unsafe {
                for ((source, ahead), to) in sources.iter_mut().zip(&mut aheads).zip(&mut turned) {
                    source.turn(k, ahead, to);
                }
                // A local copy: what is behind a reference would be written to memory after each column.
                let mut own = *sinks;
                // The groups take turns, so that no sum waits for the one before it.
                for at in (0..R::COLUMNS).step_by(2) {
                    for at in [at, at + 1] {
                        for (group, sink) in own.iter_mut().enumerate() {
                            sink.take(k + at, sources[group].column(&turned[group], at));
                        }
                    }
                }
                *sinks = own;
            }
            k += R::COLUMNS;
        }
        k
    }

    /// As [`Block::steps`], of a matrix of 8 bits.
    ///
    /// # Safety
    /// As there, of this matrix.
    #[inline(always)]
    unsafe fn bytes<S: Simd, K: Sink<S::V> + Copy, const GROUPS: usize, const FP8: bool>(
        &self,
        eight: &Eight,
        sinks: &mut [K; GROUPS],
    ) -> usize {
        // SAFETY: as the caller says.
        unsafe {
            let mut sources = [Bytes::<S::V, FP8>::new::<S>(eight, self.rows[0]); GROUPS];
            for (group, source) in sources.iter_mut().enumerate() {
                *source = Bytes::new::<S>(eight, self.rows[0] + group * LANES);
            }
            self.steps::<S, _, K, GROUPS>(sources, sinks)
        }
    }

    /// Hands the columns to the sinks, one for each sixteen rows.
    ///
    /// # Safety
    /// The CPU has the features of `S`; the matrix, whose columns are 1 apart, has these rows, at most sixteen for each sink, and these columns; the
    /// sinks may take them.
    #[inline(always)]
    unsafe fn feed<S: Simd, K: Sink<S::V> + Copy, const GROUPS: usize>(&self, sinks: &mut [K; GROUPS]) {
        let (Self { matrix, rows: [first, count], columns, .. }, row) = (*self, self.matrix.row);
        if const { GROUPS > FEW || K::ONLY_INTERLEAVED } {
            // So many groups are used for interleaved matrices only: no code is compiled for others.
            let Store::Interleaved(matrix) = matrix.data else { unreachable!("not an interleaved matrix") };
            let reader = Feed { columns, fold: matrix.fold().unwrap_or(usize::MAX), width: matrix.width(), sinks };
            // SAFETY: as the caller says.
            return unsafe { interleaved::read::<S, _, GROUPS>(matrix, first / LANES, reader) };
        }
        let mut done = columns[0];
        // SAFETY: sixteen rows are there for each sink where whole steps are taken. For the rest the caller answers.
        unsafe {
            match matrix.data {
                Store::Interleaved(matrix) => {
                    let reader =
                        Feed { columns, fold: matrix.fold().unwrap_or(usize::MAX), width: matrix.width(), sinks };
                    return interleaved::read::<S, _, GROUPS>(matrix, first / LANES, reader);
                }
                _ if count < GROUPS * LANES => {}
                Store::F32(values) => {
                    let from = values.cpu_slice().as_ptr().add(first * row);
                    let sources = std::array::from_fn(|group| Plain { from: from.add(group * LANES * row), row });
                    done = self.steps::<S, _, K, GROUPS>(sources, sinks);
                }
                Store::Bf16(values) => {
                    let from = values.cpu_slice().as_ptr().cast::<u16>().add(first * row);
                    let sources = std::array::from_fn(|group| Plain { from: from.add(group * LANES * row), row });
                    done = self.steps::<S, _, K, GROUPS>(sources, sinks);
                }
                Store::Quantized(Quantized::Eight(eight)) if eight.width() == row => {
                    done = if eight.format() == Format::Fp8 {
                        self.bytes::<S, K, GROUPS, true>(eight, sinks)
                    } else {
                        self.bytes::<S, K, GROUPS, false>(eight, sinks)
                    };
                }
                Store::Quantized(Quantized::Four(four)) if row.is_multiple_of(four.block()) => {
                    let mut sources = [Nibbles::new::<S>(four, first, row); GROUPS];
                    for (group, source) in sources.iter_mut().enumerate() {
                        *source = Nibbles::new::<S>(four, first + group * LANES, row);
                    }
                    done = self.steps::<S, _, K, GROUPS>(sources, sinks);
                }
                Store::Quantized(matrix) => {
                    let (_, bits) = stored(self.matrix);
                    let source = Widened { matrix, row: first, width: row, lines: bits / 4 };
                    done = self.steps::<S, _, K, GROUPS>(
                        std::array::from_fn(|group| Widened { row: first + group * LANES, ..source }),
                        sinks,
                    );
                }
            }
            for (group, sink) in sinks.iter_mut().enumerate() {
                let rows = count.saturating_sub(group * LANES).min(LANES);
                for k in (done..columns[1]).step_by(LANES) {
                    if rows > 0 {
                        some::<S>(matrix, [first + group * LANES, rows], [k, LANES.min(columns[1] - k)], sink);
                    }
                }
            }
        }
    }
}

/// Hands columns of an interleaved matrix to sinks, one for each sixteen rows.
struct Feed<'s, K, const GROUPS: usize> {
    /// The first column, and the one after the last.
    columns: [usize; 2],
    /// [`Interleaved::fold`], if there is one.
    fold: usize,
    /// Columns of the matrix.
    width: usize,
    sinks: &'s mut [K; GROUPS],
}

impl<S: Simd, K: Sink<S::V> + Copy, const GROUPS: usize> Reader<S, GROUPS> for Feed<'_, K, GROUPS> {
    #[inline(always)]
    unsafe fn read<R: Columns<S>>(self, mut sources: [R; GROUPS]) {
        let Self { columns: [mut k, end], fold, width, sinks } = self;
        let folds = const { R::SCALED && K::SUMS };
        // SAFETY: as the caller says. Whoever makes this has sinks that may take the columns.
        unsafe {
            let (mut turned, mut ahead) = ([R::room(); GROUPS], Ahead { next: std::ptr::null(), step: 0 });
            while k < end {
                let (first, stop) = (k, if folds { end.min((k / fold + 1) * fold) } else { end });
                // A local copy: what is behind a reference would be written to memory after each column.
                let mut own = *sinks;
                if folds {
                    for sink in &mut own {
                        *sink = sink.fresh();
                    }
                }
                while k < stop {
                    let count = R::COLUMNS.min(stop - k);
                    ahead.step = R::distance(k, width, GROUPS);
                    for (source, to) in sources.iter_mut().zip(&mut turned) {
                        source.turn(k, &mut ahead, to);
                    }
                    if count == R::COLUMNS {
                        for at in 0..R::COLUMNS {
                            for (group, sink) in own.iter_mut().enumerate() {
                                sink.take(k + at, sources[group].column(&turned[group], at));
                            }
                        }
                    } else {
                        for at in 0..count {
                            for (group, sink) in own.iter_mut().enumerate() {
                                sink.take(k + at, sources[group].column(&turned[group], at));
                            }
                        }
                    }
                    k += count;
                }
                if folds {
                    for ((sink, sums), source) in sinks.iter_mut().zip(own).zip(&sources) {
                        sink.fold(sums, source.factor(first));
                    }
                } else {
                    *sinks = own;
                }
            }
        }
    }
}

/// The values with which the sums of the rows `m..m + count` start, for one token. Lanes without a row are zero.
///
/// # Safety
/// The rows, at most 16, are some of the result, and `token` is below 16.
#[inline(always)]
pub(super) unsafe fn first_sums(job: &Job<'_>, [m, count]: [usize; 2], token: usize) -> [f32; LANES] {
    let mut sums = [0.0f32; LANES];
    // SAFETY: an addend has the result's shape, and a bias its rows: `gemm::matmul_grouped` has asserted it.
    unsafe {
        for (row, sum) in (m..m + count).zip(&mut sums) {
            *sum = match job.init {
                Init::Zero => 0.0,
                Init::Bias(bias) => bias.cpu_slice()[row],
                Init::Out => *job.out.add(row * LANES + token),
                Init::Add(other) => *other.ptr().add(row * LANES + token),
            };
        }
    }
    sums
}

/// Writes the rows `m..m + count` of the result from each token's sums. Lanes without a token become zero.
///
/// # Safety
/// The CPU has the features of `S`; the rows, at most 16 from a multiple of 16 on, are some of the result, and no other task has them.
#[inline(always)]
pub(super) unsafe fn write<S: Simd>(job: &Job<'_>, [m, count]: [usize; 2], sums: &[[f32; LANES]]) {
    if job.transposed {
        for (token, sums) in sums[..job.tokens].iter().enumerate() {
            // SAFETY: a panel of the result has the sums of sixteen rows for each token.
            unsafe { S::store(job.out.add(m * job.tokens + token * LANES), S::load(sums.as_ptr())) };
        }
        return;
    }
    for row in 0..count {
        let mut lanes = [0.0f32; LANES];
        for (lane, sum) in lanes.iter_mut().zip(&sums[..job.tokens]) {
            *lane = sum[row];
        }
        // SAFETY: the place is the row's, with 16 lanes.
        unsafe { S::store(job.out.add((m + row) * LANES), S::load(lanes.as_ptr())) };
    }
}

/// Computes the rows `m..m + count` of the result, at most `16 GROUPS`, with all sums in registers, for up to `TOKENS` tokens.
///
/// # Safety
/// The CPU has the features of `S`; the rows are some of the result, and no other task has them. `job` has passed the checks of
/// `gemm::matmul_grouped`.
#[inline(always)]
unsafe fn at_once<S: Simd, const TOKENS: usize, const APART: usize, const GROUPS: usize>(
    job: &Job<'_>,
    m: usize,
    count: usize,
) {
    let rows = |group: usize| [m + group * LANES, count.saturating_sub(group * LANES).min(LANES)];
    // SAFETY: `gemm::matmul_grouped` has asserted that each matrix reaches all rows of the result and the operand's features. TOKENS
    // numbers of each feature lie side by side.
    unsafe {
        let none = Sums::<S, TOKENS, APART> { sums: [S::splat(0.0); TOKENS], x: std::ptr::null() };
        let mut sinks = [none; GROUPS];
        for (group, sink) in sinks.iter_mut().enumerate() {
            for (token, sum) in sink.sums.iter_mut().enumerate().take(job.tokens) {
                *sum = S::load(first_sums(job, rows(group), token).as_ptr());
            }
        }
        for Part { matrix, depth, x } in &job.parts {
            debug_assert_eq!(x.apart, APART);
            for sink in &mut sinks {
                sink.x = x.first();
            }
            Block { matrix, depth: *depth, rows: [m, count], columns: [0, *depth] }.feed::<S, _, GROUPS>(&mut sinks);
        }
        for (group, sink) in sinks.iter().enumerate() {
            let mut sums = [[0.0f32; LANES]; TOKENS];
            for (to, sum) in sums.iter_mut().zip(sink.sums) {
                S::store(to.as_mut_ptr(), sum);
            }
            write::<S>(job, rows(group), &sums);
        }
    }
}

/// Adds the products of consecutive columns with `TOKENS` tokens to the tokens' sums.
///
/// # Safety
/// The CPU has the features of `S`; `x` has TOKENS numbers for each column, 16 floats from one column to the next.
#[inline(always)]
unsafe fn add_columns<S: Simd, const TOKENS: usize>(columns: &[f32], x: *const f32, sums: &mut [[f32; LANES]]) {
    // SAFETY: a column is 16 floats, as a token's sums are; for `x` the caller answers.
    unsafe {
        let mut acc = Sums::<S, TOKENS, LANES> { sums: [S::splat(0.0); TOKENS], x };
        for (acc, sum) in acc.sums.iter_mut().zip(&*sums) {
            *acc = S::load(sum.as_ptr());
        }
        for (k, column) in columns.chunks_exact(LANES).enumerate() {
            acc.take(k, S::load(column.as_ptr()));
        }
        for (acc, sum) in acc.sums.iter().zip(sums) {
            S::store(sum.as_mut_ptr(), *acc);
        }
    }
}

/// As [`at_once`], for at most 16 rows and any number of tokens: columns are kept until all tokens were multiplied with them.
///
/// # Safety
/// As for [`at_once`].
#[inline(always)]
unsafe fn in_turn<S: Simd>(job: &Job<'_>, m: usize, count: usize) {
    /// Aligns a vector to a cache line.
    #[repr(align(64))]
    struct Lines<T>(T);
    // SAFETY: as in `at_once`. At most CHUNK columns are kept at a time, and the panel of an operand has 16 numbers of each feature.
    unsafe {
        let mut sums = Lines([[0.0f32; LANES]; MOST]);
        for (token, sum) in sums.0.iter_mut().enumerate().take(job.tokens) {
            *sum = first_sums(job, [m, count], token);
        }
        let mut columns = Lines([0.0f32; LANES * CHUNK]);
        // Sums of columns with a scale apart, until they are multiplied by it.
        let mut apart = Lines([[0.0f32; LANES]; MOST]);
        for Part { matrix, depth, x } in &job.parts {
            let scaled = match matrix.data {
                Store::Interleaved(matrix) => matrix.fold().map(|fold| (matrix, fold)),
                _ => None,
            };
            let chunk = scaled.map_or(CHUNK, |(_, fold)| CHUNK.min(fold));
            for k in (0..*depth).step_by(chunk) {
                let end = (k + chunk).min(*depth);
                // The sink counts columns from the beginning of the row.
                let mut sinks = [Kept(columns.0.as_mut_ptr().wrapping_sub(k * LANES))];
                Block { matrix, depth: *depth, rows: [m, count], columns: [k, end] }.feed::<S, _, 1>(&mut sinks);
                let columns = &columns.0[..(end - k) * LANES];
                let mut token = 0;
                while token < job.tokens {
                    let sums = if scaled.is_some() { &mut apart.0[token..] } else { &mut sums.0[token..] };
                    let from = x.first().add(k * LANES + token);
                    // As many sums as the processor has registers for.
                    if S::ROWS >= 12 {
                        add_columns::<S, 8>(columns, from, sums);
                        token += 8;
                    } else {
                        add_columns::<S, 4>(columns, from, sums);
                        token += 4;
                    }
                }
                if let Some((matrix, _)) = scaled.filter(|(_, fold)| end == *depth || end.is_multiple_of(*fold)) {
                    let factors: [f32; LANES] = std::array::from_fn(|row| matrix.factor(m + row, k));
                    for (total, sum) in sums.0.iter_mut().zip(&mut apart.0).take(job.tokens) {
                        let folded = S::fma(S::load(sum.as_ptr()), S::load(factors.as_ptr()), S::load(total.as_ptr()));
                        S::store(total.as_mut_ptr(), folded);
                    }
                    apart.0 = [[0.0; LANES]; MOST];
                }
            }
        }
        write::<S>(job, [m, count], &sums.0);
    }
}

/// Makes one function for each kind of block. A single function with all of them would keep the compiler busy for minutes.
macro_rules! at_once {
    ($($name:ident, $kernel:ident: $tokens:expr, $apart:expr, $groups:expr;)*) => { $(
        /// # Safety
        /// As of [`at_once`].
        #[inline(always)]
        unsafe fn $kernel<S: Simd>(job: &Job<'_>, m: usize, count: usize) {
            // SAFETY: as the caller says.
            unsafe { at_once::<S, $tokens, $apart, $groups>(job, m, count) }
        }
        dispatch! { fn $name = $kernel(job: &Job<'_>, m: usize, count: usize); }
    )* };
}

at_once! {
    one_by_many, one_by_many_kernel: 1, 1, MANY;
    one_by_few, one_by_few_kernel: 1, 1, FEW;
    one_by_one, one_by_one_kernel: 1, 1, 1;
    two_by_few, two_by_few_kernel: 2, COMPACT, FEW;
    four_by_few, four_by_few_kernel: 4, COMPACT, FEW;
    four_by_one, four_by_one_kernel: 4, COMPACT, 1;
}

/// # Safety
/// As of [`in_turn`]; at most eight tokens.
#[inline(always)]
unsafe fn eight_kernel<S: Simd>(job: &Job<'_>, m: usize, count: usize) {
    // SAFETY: as the caller says.
    unsafe {
        // As many sums as the processor has registers for.
        if S::ROWS >= 12 { at_once::<S, 8, LANES, 1>(job, m, count) } else { in_turn::<S>(job, m, count) }
    }
}

/// # Safety
/// As of [`in_turn`]; all matrices are interleaved.
#[inline(always)]
unsafe fn sixteen_kernel<S: Simd>(job: &Job<'_>, m: usize, count: usize) {
    // SAFETY: as the caller says.
    unsafe { if S::ROWS >= 12 { at_once::<S, MOST, LANES, 1>(job, m, count) } else { in_turn::<S>(job, m, count) } }
}

dispatch! { fn eight_by_one = eight_kernel(job: &Job<'_>, m: usize, count: usize); }
dispatch! { fn sixteen_by_one = sixteen_kernel(job: &Job<'_>, m: usize, count: usize); }
dispatch! { fn many_by_one = in_turn(job: &Job<'_>, m: usize, count: usize); }

/// Computes the rows `m0..m1` of the result.
///
/// # Safety
/// They are some of the result, and no other task has them. `job`, without [`Job::words`], has passed the checks of `gemm::matmul_grouped`.
pub(super) unsafe fn task_at(job: &Job<'_>, [m0, m1]: [usize; 2]) {
    let mut m = m0;
    while m < m1 {
        let groups = match (m1 - m) / LANES {
            MANY.. if job.groups == MANY => MANY,
            FEW.. if job.tokens <= COMPACT => FEW,
            _ => 1,
        };
        let count = (groups * LANES).min(m1 - m);
        // SAFETY: `m + count <= m1`, and `count` fits the vectors that are chosen for it.
        unsafe {
            match (job.tokens, groups) {
                (1, MANY) => one_by_many(job, m, count),
                (1, FEW) => one_by_few(job, m, count),
                (1, _) => one_by_one(job, m, count),
                (2, FEW) => two_by_few(job, m, count),
                (..=4, FEW) => four_by_few(job, m, count),
                (..=4, _) => four_by_one(job, m, count),
                (..=8, _) => eight_by_one(job, m, count),
                _ if job.interleaved => sixteen_by_one(job, m, count),
                _ => many_by_one(job, m, count),
            }
        }
        m += count;
    }
}

/// Whether this product can be computed here: few tokens, and matrices that lie in rows, which are interleaved if the pool multiplies in pairs
/// or splits an activation.
pub(super) fn fits(pool: &Pool, terms: &[Term<'_>]) -> bool {
    let rounds = pool.in_pairs() || splits(pool, terms);
    let wide = !rounds || terms.iter().any(|term| term.matrix.interleaved().is_some());
    wide && terms.iter().all(|term| term.matrix.col == 1 && term.x.tokens() <= MOST)
}

impl<'a> Job<'a> {
    /// The job for one product of `gemm::matmul_grouped` that [`fits`].
    pub(super) fn new(out: &mut Activation, init: Init<'a>, terms: &[Term<'a>], copies: &mut Copies) -> Self {
        let parts = terms.iter().map(|&term| Part::new(term, copies)).collect();
        Self::of(out.shared().get(), [out.features(), out.tokens()], init, parts)
    }

    /// The job for `gemm::matmul_transposed`, with at most [`MOST`] tokens.
    pub(super) fn transposed(out: &mut Activation, term: Term<'a>) -> Self {
        let parts = SmallVec::from_iter([Part::new(term, &mut Copies::default())]);
        let size = [out.tokens(), out.features()];
        Self { transposed: true, ..Self::of(out.shared().get(), size, Init::Zero, parts) }
    }

    /// The job for one product of `gemm::matvec_grouped`.
    pub(super) fn vector(
        out: &mut Activation,
        init: Init<'a>,
        matrix: Matrix<'a>,
        x: &'a Activation,
        copies: &mut Copies,
    ) -> Self {
        let parts = SmallVec::from_iter([Part::of_vector(matrix, x, copies)]);
        Self { transposed: true, ..Self::of(out.shared().get(), [out.tokens(), 1], init, parts) }
    }

    /// The job for `gemm::matvec`.
    pub(super) fn of_vector(out: &mut Activation, init: Init<'a>, matrix: Matrix<'a>, x: &'a Activation) -> Self {
        let parts = SmallVec::from_iter([Part::of_vector(matrix, x, &mut Copies::default())]);
        Self::of(out.shared().get(), [out.features(), 1], init, parts)
    }

    fn of(out: *mut f32, [rows, tokens]: [usize; 2], init: Init<'a>, parts: SmallVec<[Part<'a>; 2]>) -> Self {
        let interleaved = parts.iter().all(|part| part.matrix.interleaved().is_some());
        let groups = match tokens {
            _ if parts.iter().any(|part| part.matrix.lies_in_pairs()) => groups_in_pairs(tokens),
            1 if interleaved => MANY,
            _ => FEW,
        };
        let share = rows.div_ceil(LANES * groups).div_ceil(16 * crate::par::threads());
        let step = (share * groups).min(LARGEST) * LANES;
        Self { out, transposed: false, tokens, init, parts, rows, interleaved, groups, step }
    }

    /// The number of tasks.
    pub(super) const fn tasks(&self) -> usize {
        self.rows.div_ceil(self.step)
    }

    /// The rows of task number `task`: the first, and the one after the last.
    pub(super) fn rows(&self, task: usize) -> [usize; 2] {
        [task * self.step, self.rows.min((task + 1) * self.step)]
    }

    /// The words of the first block of the matrix, if it lies in pairs; it is then the only matrix.
    pub(super) fn words(&self) -> Option<*const f32> {
        self.parts.first()?.matrix.interleaved()?.pairs(0)
    }
}
