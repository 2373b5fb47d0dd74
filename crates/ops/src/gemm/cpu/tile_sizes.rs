//! Sizes of what is multiplied in tiles of AMX.
use crate::activation::LANES;
use crate::par;
pub(super) use crate::simd::amx::{STEP, pairs};

/// The most features of a block of the sum: 32 rows of it are 16 KiB, which stay in the first cache while panels pass through it.
pub(super) const BLOCK: usize = 256;
/// The same where numbers are split: 32 tokens of it are 24 KiB.
pub(super) const SPLIT_BLOCK: usize = BLOCK / 2;
/// Rows that are packed together: two tiles.
pub(super) const GROUP: usize = 2 * LANES;
/// Tasks for each thread, and the most rows and panels of one.
const TASKS: usize = 4;
const MOST_ROWS: usize = 288;
const PANELS: usize = 32;
const MOST_PANELS: usize = 64;

/// Rows and panels of a task of a product with so many.
pub(super) fn steps(rows: usize, panels: usize) -> [usize; 2] {
    let wanted = TASKS * par::threads();
    let row_tasks = wanted.div_ceil(panels.div_ceil(PANELS));
    let row_step = rows.div_ceil(row_tasks).next_multiple_of(GROUP).clamp(GROUP, MOST_ROWS);
    let panel_tasks = wanted.div_ceil(rows.div_ceil(row_step));
    [row_step, panels.div_ceil(panel_tasks).next_multiple_of(2).clamp(2, MOST_PANELS)]
}
