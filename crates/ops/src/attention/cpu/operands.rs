//! What a pass of attention multiplies: float32 numbers, or pairs of bfloat16 numbers that are neighbours along the sum.
use super::BLOCK;
use crate::activation::{Activation, LANES, realign};
use crate::gemm::cpu::{pairs, rounding, score_tile, sum_tile, tile_rows, with_tile};
use crate::simd::{PairLanes, Simd, TileLanes, dispatch_pairs};
use std::marker::PhantomData;
use std::ops::Range;

/// How an operand of sums over tokens lies: floats from one panel of tokens to the next, and from one feature to the next.
#[derive(Clone, Copy)]
pub(super) struct Along {
    pub(super) panel: usize,
    pub(super) row: usize,
}

/// Panels of vectors of a product: the first, floats from one to the next, and how many, one or two.
#[derive(Clone, Copy)]
pub(super) struct Panels<P> {
    pub(super) first: P,
    pub(super) apart: usize,
    pub(super) count: usize,
}

impl Panels<*mut f32> {
    /// The same, to read.
    pub(super) const fn to_read(self) -> Panels<*const f32> {
        Panels { first: self.first.cast_const(), apart: self.apart, count: self.count }
    }
}

/// The operands of a pass's products; sums are float32.
pub(super) trait Operands {
    /// The vectors of float32.
    type Wide: Simd;
    /// The lanes of a tile.
    type Tile: TileLanes<Sum = <Self::Wide as Simd>::V>;
    /// What a kernel holds while it multiplies.
    type Engine;
    /// How many numbers a lane holds.
    const NUMBERS: usize;
    /// Panels of tokens are multiplied so many at a time: blocks begin and end at a multiple of it, and what no token fills is zero.
    const STEP: usize;
    /// Floats of a panel of an operand of scores with so many features.
    fn score_panel(features: usize) -> usize {
        features.div_ceil(Self::NUMBERS) * LANES
    }
    /// How an operand of sums over so many panels of tokens lies.
    fn along(features: usize, _panels: usize) -> Along {
        let row = LANES / Self::NUMBERS;
        Along { panel: features * row, row }
    }
    /// # Safety
    /// The processor has what the operands need.
    unsafe fn engine() -> Self::Engine;
    /// `to[panel j][block b][row i] = sum over features of rows[b][i] x[panel j]`, for `blocks` blocks of 16 rows.
    ///
    /// # Safety
    /// The features of `Wide` and `Tile`; `rows` and `x` are operands of scores with these blocks, panels, and features; `to` has room.
    #[inline(always)]
    unsafe fn scores(
        _engine: &Self::Engine,
        features: usize,
        (rows, blocks): (*const f32, usize),
        x: Panels<*const f32>,
        to: Panels<*mut f32>,
    ) {
        let (depth, panel) = (features.div_ceil(Self::NUMBERS), Self::score_panel(features));
        for block in 0..blocks {
            let to = Panels { first: to.first.wrapping_add(block * BLOCK), ..to };
            // SAFETY: the block is one of `blocks`; the rest is as the caller says.
            unsafe { score_block::<Self::Tile>(depth, rows.add(block * panel), x, to) };
        }
    }
    /// `to[panel j][feature i] = (to[panel j][feature i] if add) + sum over blocks b, tokens t of matrix[b][i][t] x[b][t][panel j]`.
    ///
    /// # Safety
    /// The features of `Wide` and `Tile`; `matrix` is an operand of sums of `blocks` panels from the first on, `x` holds as many, end to end;
    /// `to` has room for the features.
    #[inline(always)]
    unsafe fn sums(
        _engine: &Self::Engine,
        features: usize,
        (matrix, along, blocks): (*const f32, Along, usize),
        x: Panels<*const f32>,
        to: Panels<*mut f32>,
        add: bool,
    ) {
        // SAFETY: as the caller says.
        unsafe { sum_rows::<Self::Tile>(features, (matrix, along, blocks), x, BLOCK / Self::NUMBERS, to, add) }
    }
    /// Makes rows `[rows][16]` of float32 an operand along the rows, in place: `[rows / NUMBERS][16]`.
    ///
    /// # Safety
    /// The features of `Wide` and `Tile`; the rows are there, an even number of them.
    #[inline(always)]
    unsafe fn along_rows(rows: usize, at: *mut f32) {
        // SAFETY: as the caller says; each row is read before its place is written.
        unsafe { Self::move_along_rows(rows, at, at) }
    }
    /// As [`Operands::along_rows`], to another place, at or before the rows.
    ///
    /// # Safety
    /// As there; `to` has room for the operand.
    unsafe fn move_along_rows(rows: usize, from: *const f32, to: *mut f32);
    /// Transposes 16 rows of 16 and makes them an operand along the rows of the result.
    ///
    /// # Safety
    /// The features of `Wide` and `Tile`; `from` holds 256 floats, `to` has room for the operand, and they do not overlap.
    unsafe fn transposed(from: *const f32, to: *mut f32);
}

/// Scores of a block of 16 rows, each the sum of `depth` products of a lane.
///
/// # Safety
/// The features of `T`; both operands have `depth` vectors in each panel, and `to` has room.
#[inline(always)]
unsafe fn score_block<T: TileLanes>(depth: usize, rows: *const f32, x: Panels<*const f32>, to: Panels<*mut f32>) {
    let mut row = 0;
    while row < LANES {
        let count = tile_rows(LANES - row, T::TILE_ROWS);
        // SAFETY: row `row + count` is at most 16; the rest is as the caller says.
        unsafe {
            let (from, to_row) = (rows.add(row), to.first.add(row * LANES));
            with_tile!(count, x.count, score_tile::<T>(depth, from, 1, x.first, x.apart, to_row, to.apart));
        }
        row += count;
    }
}

/// Sums of [`Operands::sums`], where `step` floats lie from one block of `x` to the next.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn sum_rows<T: TileLanes>(
    features: usize,
    (matrix, along, blocks): (*const f32, Along, usize),
    x: Panels<*const f32>,
    step: usize,
    to: Panels<*mut f32>,
    add: bool,
) {
    let mut row = 0;
    while row < features {
        let count = tile_rows(features - row, T::TILE_ROWS);
        // SAFETY: feature `row + count` is at most `features`; the rest is as the caller says.
        unsafe {
            let (from, to_row) = (matrix.add(row * along.row), to.first.add(row * LANES));
            let (lanes, panel) = (along.row, along.panel);
            with_tile!(
                count,
                x.count,
                sum_tile::<T>(blocks, lanes, from, panel, x.first, step, x.apart, to_row, to.apart, add)
            );
        }
        row += count;
    }
}

/// Float32 numbers.
pub(super) struct Singles<S>(PhantomData<S>);

impl<S: Simd> Operands for Singles<S> {
    type Wide = S;
    type Tile = S;
    type Engine = ();
    const NUMBERS: usize = 1;
    const STEP: usize = 1;
    #[inline(always)]
    unsafe fn engine() {}
    #[inline(always)]
    unsafe fn move_along_rows(rows: usize, from: *const f32, to: *mut f32) {
        if !std::ptr::eq(from, to) {
            // SAFETY: both hold the rows, as the caller says.
            unsafe { std::ptr::copy(from, to, rows * LANES) };
        }
    }
    #[inline(always)]
    unsafe fn transposed(from: *const f32, to: *mut f32) {
        // SAFETY: as the caller says.
        unsafe { crate::gemm::cpu::transpose(from, LANES, to) }
    }
}

/// Pairs of bfloat16 numbers.
pub(super) struct Pairs<P>(PhantomData<P>);

impl<P: PairLanes> Operands for Pairs<P> {
    type Wide = P::Wide;
    type Tile = P;
    type Engine = ();
    const NUMBERS: usize = 2;
    const STEP: usize = 1;
    #[inline(always)]
    unsafe fn engine() {}
    #[inline(always)]
    unsafe fn move_along_rows(rows: usize, from: *const f32, to: *mut f32) {
        for pair in 0..rows / 2 {
            // SAFETY: the rows `2 * pair` and the next are there, and are read before they are overwritten.
            unsafe {
                let from = from.add(2 * pair * LANES);
                P::write(to.add(pair * LANES), P::pair(P::read(from), P::read(from.add(LANES))));
            }
        }
    }
    #[inline(always)]
    unsafe fn transposed(from: *const f32, to: *mut f32) {
        // SAFETY: row `row` is below 16, and so is each column.
        unsafe {
            let mut rows = [P::broadcast(0.0); LANES];
            for (row, vector) in rows.iter_mut().enumerate() {
                *vector = P::read(from.add(row * LANES));
            }
            let columns = P::Wide::turn(&rows);
            for (pair, columns) in columns.chunks_exact(2).enumerate() {
                P::write(to.add(pair * LANES), P::pair(columns[0], columns[1]));
            }
        }
    }
}

/// A scale as a power of two, by which queries are multiplied without rounding, and the rest, by which scores are.
pub(super) fn split_scale(scale: f32) -> (f32, f32) {
    let power = f32::from_bits(scale.to_bits() & 0x7F80_0000);
    if scale > 0.0 && power.is_normal() { (power, scale / power) } else { (1.0, scale) }
}

/// A panel `[features][16 tokens]` as operands along its features, `[features / 2, rounded up][16]`, and along its tokens,
/// `[features][8]`, where they are wanted: where a pointer is not null.
///
/// # Safety
/// The features of `P`; `panel` holds the panel, `by_features` and `by_tokens` have room for the operands, and none overlap.
#[inline(always)]
unsafe fn round_panel_kernel<P: PairLanes>(
    features: usize,
    panel: *const f32,
    by_features: *mut f32,
    by_tokens: *mut f32,
) {
    // SAFETY: as the caller says; along its tokens, a panel is a row of `features` times 16 numbers.
    unsafe {
        if !by_features.is_null() {
            rounding::round_panel::<P>(panel, features, by_features);
        }
        if !by_tokens.is_null() {
            pairs::round_row::<P>(panel, features * LANES, by_tokens);
        }
    }
}

dispatch_pairs! {
    fn round_panel_at = round_panel_kernel(
        features: usize,
        panel: *const f32,
        by_features: *mut f32,
        by_tokens: *mut f32,
    );
}

/// Features of some tokens of an activation.
pub(super) struct Part {
    /// The first panel.
    pub(super) from: *const f32,
    /// From one panel to the next.
    pub(super) stride: usize,
    pub(super) features: Range<usize>,
    pub(super) tokens: Range<usize>,
    /// What each number is multiplied by.
    pub(super) scale: f32,
}

impl Part {
    /// The features `features` of `tokens` of an activation.
    pub(super) fn of(act: &Activation, features: Range<usize>, tokens: &Range<usize>) -> Self {
        Self { from: act.ptr(), stride: act.stride(), features, tokens: tokens.clone(), scale: 1.0 }
    }

    /// Panels that begin with the first token: `[panel][features][16]`.
    ///
    /// # Safety
    /// As [`realign`].
    pub(super) unsafe fn to_panels(&self, to: *mut f32) {
        let Self { from, stride, features, tokens, scale } = self;
        // SAFETY: as the caller says.
        unsafe { realign(*from, *stride, features.clone(), tokens.clone(), *scale, to) };
    }

    /// One panel of [`Part::to_panels`].
    ///
    /// # Safety
    /// As [`realign`]; `panel` is one of the part's.
    pub(super) unsafe fn panel(&self, panel: usize, to: *mut f32) {
        let Self { from, stride, features, tokens, scale } = self;
        let start = tokens.start + panel * LANES;
        // SAFETY: as the caller says.
        unsafe { realign(*from, *stride, features.clone(), start..tokens.end.min(start + LANES), *scale, to) };
    }

    /// The number of panels.
    pub(super) fn panels(&self) -> usize {
        self.tokens.len().div_ceil(LANES)
    }

    /// All panels as operands of bfloat16: see [`round_panel`].
    ///
    /// # Safety
    /// As [`realign`]; `temporary` has room for a panel, the others for all operands.
    pub(super) unsafe fn to_pairs(&self, temporary: *mut f32, by_features: *mut f32, by_tokens: *mut f32) {
        for panel in 0..self.panels() {
            // SAFETY: `panel` is one of the part's; the rest is as the caller says.
            unsafe {
                self.panel(panel, temporary);
                round_panel(panel, self.features.len(), temporary, by_features, by_tokens);
            }
        }
    }
}

/// Rounds panel number `panel`, `[features][16]`, to its place among all: `by_features`
/// `[panel][features / 2, rounded up][16]`, and `by_tokens` `[panel][features][8]`, where these are not null.
///
/// # Safety
/// `from` holds the panel; there is room for the operands.
pub(super) unsafe fn round_panel(
    panel: usize,
    features: usize,
    from: *const f32,
    by_features: *mut f32,
    by_tokens: *mut f32,
) {
    let place = |to: *mut f32, floats: usize| if to.is_null() { to } else { to.wrapping_add(panel * floats) };
    let by_features = place(by_features, features.div_ceil(2) * LANES);
    let by_tokens = place(by_tokens, features * LANES / 2);
    // SAFETY: as the caller says.
    unsafe { round_panel_at(features, from, by_features, by_tokens) };
}
