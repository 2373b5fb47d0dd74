//! Block and task sizes of the products in AMX tiles.
use crate::activation::LANES;
use crate::par;
pub(super) use crate::simd::amx::{STEP, pairs};

/// The most features of a block of the sum. 32 tokens of it take 32 KiB, which stay in the L1 cache while rows pass through it.
pub(super) const BLOCK: usize = 512;
/// The same if numbers are split: 32 tokens of it take 24 KiB.
pub(super) const SPLIT_BLOCK: usize = BLOCK / 4;
/// How many rows are packed together: two tiles.
pub(super) const GROUP: usize = 2 * LANES;
/// How many tasks each thread gets; and the most rows and the most panels of a task.
const TASKS: usize = 4;
const MOST_ROWS: usize = 288;
const PANELS: usize = 32;
const MOST_PANELS: usize = 64;

/// How many rows and how many panels a task takes of a product with `rows` rows and `panels` panels.
pub(super) fn steps(rows: usize, panels: usize) -> [usize; 2] {
    let wanted = TASKS * par::threads();
    let row_tasks = wanted.div_ceil(panels.div_ceil(PANELS));
    let row_step = rows.div_ceil(row_tasks).next_multiple_of(GROUP).clamp(GROUP, MOST_ROWS);
    let panel_tasks = wanted.div_ceil(rows.div_ceil(row_step));
    [row_step, panels.div_ceil(panel_tasks).next_multiple_of(2).clamp(2, MOST_PANELS)]
}
