//! Operands of attention for tiles of AMX: bfloat16 numbers, tokens padded with zeros to multiples of 32.
use super::BLOCK;
use super::operands::{Along, Operands, Pairs, Panels, Part};
use crate::activation::LANES;
use crate::attention::Heads;
use crate::gemm::cpu::pairs::round_row;
use crate::simd::amx::{STEP, TilePart, TileSums, Tiles, pairs};
use crate::simd::{PairLanes, Simd, dispatch_pairs, in_tiles};
use std::marker::PhantomData;

/// Pairs of a panel's tokens.
const PAIRS: usize = LANES / 2;
/// Bytes from one row of sums to the next.
const ROW: usize = LANES * size_of::<f32>();

/// Whether heads of these sizes are multiplied in tiles: features of whole tiles, so that sums have no others.
pub(super) fn fits(heads: Heads) -> bool {
    in_tiles() && heads.head_dim.is_multiple_of(LANES) && heads.v_head_dim.is_multiple_of(LANES)
}

/// What numbers of tokens and of features along a sum are padded to.
pub(super) const fn padded(tiles: bool) -> [usize; 2] {
    if tiles { [2 * LANES, STEP] } else { [LANES, 2] }
}

/// Tiles of bfloat16 numbers.
pub(super) struct InTiles<P>(PhantomData<P>);

impl<P: PairLanes> Operands for InTiles<P> {
    type Wide = P::Wide;
    type Tile = P;
    type Engine = Tiles;
    const NUMBERS: usize = 2;
    const STEP: usize = 2;
    fn score_panel(features: usize) -> usize {
        pairs(features) * LANES
    }
    fn along(_features: usize, panels: usize) -> Along {
        Along { panel: PAIRS, row: panels * PAIRS }
    }
    #[inline(always)]
    unsafe fn engine() -> Tiles {
        // SAFETY: the processor has tiles, as the caller says.
        unsafe { Tiles::begin() }
    }
    #[inline(always)]
    unsafe fn scores(
        engine: &Tiles,
        features: usize,
        (rows, blocks): (*const f32, usize),
        x: Panels<*const f32>,
        to: Panels<*mut f32>,
    ) {
        let pairs = pairs(features);
        for block in (0..blocks).step_by(2) {
            let part = TilePart {
                rows: rows.wrapping_add(block * LANES * pairs).cast(),
                apart: pairs * size_of::<f32>(),
                columns: [x.first, x.first.wrapping_add((x.count - 1) * x.apart)].map(<*const f32>::cast),
                steps: pairs / (STEP / 2),
            };
            let to = TileSums::places(to.first.wrapping_add(block * BLOCK), BLOCK, to.apart);
            let sums = TileSums { from: [std::ptr::null(); 4], to, apart: ROW };
            // SAFETY: as the caller says; blocks are even in number, and rows and columns have these pairs.
            unsafe { engine.add_products(&sums, &[part], [2, x.count]) };
        }
    }
    #[inline(always)]
    unsafe fn sums(
        engine: &Tiles,
        features: usize,
        (matrix, along, blocks): (*const f32, Along, usize),
        x: Panels<*const f32>,
        to: Panels<*mut f32>,
        add: bool,
    ) {
        for row in (0..features).step_by(2 * LANES) {
            let part = TilePart {
                rows: matrix.wrapping_add(row * along.row).cast(),
                apart: along.row * size_of::<f32>(),
                columns: [x.first, x.first.wrapping_add((x.count - 1) * x.apart)].map(<*const f32>::cast),
                steps: blocks / 2,
            };
            let to = TileSums::places(to.first.wrapping_add(row * LANES), LANES * LANES, to.apart);
            let from = if add { to.map(<*mut f32>::cast_const) } else { [std::ptr::null(); 4] };
            let size = [(features - row).div_ceil(LANES).min(2), x.count];
            // SAFETY: as the caller says; blocks are even in number, and features make whole tiles.
            unsafe { engine.add_products(&TileSums { from, to, apart: ROW }, &[part], size) };
        }
    }
    #[inline(always)]
    unsafe fn move_along_rows(rows: usize, from: *const f32, to: *mut f32) {
        // SAFETY: as the caller says.
        unsafe { Pairs::<P>::move_along_rows(rows, from, to) }
    }
    #[inline(always)]
    unsafe fn transposed(from: *const f32, to: *mut f32) {
        // SAFETY: as the caller says.
        unsafe { Pairs::<P>::transposed(from, to) }
    }
}

/// Where operands of all panels go; none where a pointer is null.
#[derive(Clone, Copy)]
pub(super) struct TilesTo {
    /// Of scores, as rows: `[token][pair of features]`.
    pub(super) rows: *mut f32,
    /// Of scores, as columns: `[panel][pair of features][16 tokens]`.
    pub(super) columns: *mut f32,
    /// Of sums over tokens: `[feature][pair of tokens]`.
    pub(super) sums: *mut f32,
}

impl TilesTo {
    pub(super) const NONE: Self =
        Self { rows: std::ptr::null_mut(), columns: std::ptr::null_mut(), sums: std::ptr::null_mut() };
}

/// Rounds panel number `panel` of `panels`, `[features][16 tokens]`, to its places.
///
/// # Safety
/// The features of `P`; `from` holds the panel; there is room for all operands of as many panels.
#[inline(always)]
unsafe fn tile_panel_kernel<P: PairLanes>(features: usize, from: *const f32, panel: usize, panels: usize, to: TilesTo) {
    let (pairs, at) = (pairs(features), panel * pairs(features) * LANES);
    // SAFETY: feature `feature` is below `features`; the places are this panel's.
    unsafe {
        if !to.rows.is_null() || !to.columns.is_null() {
            for first in (0..pairs).step_by(LANES) {
                let mut vectors = [P::broadcast(0.0); LANES];
                for (pair, vector) in vectors.iter_mut().enumerate() {
                    let feature = 2 * (first + pair);
                    // The features are an even number.
                    if feature < features {
                        let from = from.add(feature * LANES);
                        *vector = P::pair(P::read(from), P::read(from.add(LANES)));
                    }
                }
                if !to.columns.is_null() {
                    for (pair, vector) in vectors.iter().enumerate() {
                        P::write(to.columns.add(at + (first + pair) * LANES), *vector);
                    }
                }
                if !to.rows.is_null() {
                    for (token, row) in P::Wide::turn(&vectors).into_iter().enumerate() {
                        P::write(to.rows.add(at + token * pairs + first), row);
                    }
                }
            }
        }
        if !to.sums.is_null() {
            for feature in (0..features).step_by(2) {
                let mut both = [0.0f32; LANES];
                round_row::<P>(from.add(feature * LANES), 2 * LANES, both.as_mut_ptr());
                for (offset, row) in both.as_chunks::<PAIRS>().0.iter().enumerate() {
                    let to = to.sums.add(((feature + offset) * panels + panel) * PAIRS);
                    to.cast::<[f32; PAIRS]>().write_unaligned(*row);
                }
            }
        }
    }
}

dispatch_pairs! {
    fn tile_panel = tile_panel_kernel(features: usize, from: *const f32, panel: usize, panels: usize, to: TilesTo);
}

impl Part {
    /// All panels as operands in tiles, and one of zeros where their number is odd.
    ///
    /// # Safety
    /// As [`Part::panel`]; `temporary` has room for a panel, the places of `to` for operands of an even number of them.
    pub(super) unsafe fn to_tiles(&self, temporary: *mut f32, to: TilesTo) {
        let (features, panels) = (self.features.len(), self.panels().next_multiple_of(2));
        for panel in 0..panels {
            // SAFETY: `panel` is one of the part's, or its numbers are zeros; the rest is as the caller says.
            unsafe {
                if panel < self.panels() {
                    self.panel(panel, temporary);
                } else {
                    temporary.write_bytes(0, features * LANES);
                }
                tile_panel(features, temporary, panel, panels, to);
            }
        }
    }
}
