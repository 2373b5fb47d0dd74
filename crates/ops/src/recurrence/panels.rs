//! What a task reads and writes of activations in panels.
use crate::activation::{Activation, LANES};
use crate::simd::Simd;
use std::ops::Range;

/// Columns of a state that pass through the tokens together.
pub(crate) const COLUMNS: usize = 32;

/// Rows of `[LANES][COLUMNS]` floats.
pub(crate) type Block = [[f32; COLUMNS]; LANES];

/// Floats in which a vector's loads cross no cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code, reason = "kernels read it through a pointer")] [f32; LANES]);

/// Memory of a task, of zeros.
pub(crate) struct Scratch(Vec<Line>);

impl Scratch {
    pub(crate) fn new(floats: usize) -> Self {
        Self(vec![Line([0.0; LANES]); floats.div_ceil(LANES)])
    }

    pub(crate) fn ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }

    pub(crate) fn zero(&mut self) {
        self.0.fill(Line([0.0; LANES]));
    }
}

/// The tokens that a sequence has in one panel.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) panel: usize,
    /// Its first token's place in the panel.
    pub(crate) first: usize,
    pub(crate) len: usize,
    /// Whether the sequence begins with it.
    pub(crate) is_first: bool,
}

impl Chunk {
    pub(crate) const fn lanes(&self) -> Range<usize> {
        self.first..self.first + self.len
    }
}

/// The chunks of a sequence, in order.
pub(crate) fn chunks(sequence: &Range<usize>) -> impl DoubleEndedIterator<Item = Chunk> {
    let Range { start, end } = *sequence;
    (start / LANES..end.div_ceil(LANES)).filter(move |_| start < end).map(move |panel| {
        let first = start.max(panel * LANES);
        let len = end.min((panel + 1) * LANES) - first;
        Chunk { panel, first: first - panel * LANES, len, is_first: first == start }
    })
}

/// Some features of a chunk's tokens, at most 32 from `first` on; zeros beyond.
pub(crate) fn read_block(act: &Activation, chunk: &Chunk, first: usize, count: usize) -> Block {
    let (panel, mut block) = (act.panel(chunk.panel), Block::default());
    for (feature, lanes) in panel[first * LANES..][..count * LANES].chunks_exact(LANES).enumerate() {
        for (row, value) in block.iter_mut().zip(&lanes[chunk.lanes()]) {
            row[feature] = *value;
        }
    }
    block
}

/// Writes the features `columns` of a chunk's tokens.
///
/// # Safety
/// `panel` is that of the chunk, with these features, and nobody else has them at these tokens.
pub(crate) unsafe fn write_block(block: &Block, chunk: &Chunk, panel: *mut f32, columns: Range<usize>) {
    debug_assert!(columns.len() <= COLUMNS, "a block's columns");
    for (index, feature) in columns.enumerate() {
        for (row, lane) in block.iter().zip(chunk.lanes()) {
            // SAFETY: as the caller says.
            unsafe { *panel.add(feature * LANES + lane) = row[index] };
        }
    }
}

/// Adds `rows [tokens][stride]` to so many features from `place` on.
///
/// # Safety
/// As for [`write_block`]; `rows` has a row for each token of the chunk, of at least `features` numbers.
pub(crate) unsafe fn add_rows(rows: *const f32, stride: usize, chunk: &Chunk, place: *mut f32, features: usize) {
    for feature in 0..features {
        for (token, lane) in chunk.lanes().enumerate() {
            // SAFETY: as the caller says.
            unsafe { *place.add(feature * LANES + lane) += *rows.add(token * stride + feature) };
        }
    }
}

/// The sums over the lanes of sixteen vectors.
///
/// # Safety
/// The features of `S`.
#[inline(always)]
pub(crate) unsafe fn sums_of<S: Simd>(vectors: &[S::V; LANES]) -> S::V {
    // SAFETY: registers only; the caller has the features of `S`.
    unsafe {
        let mut turned = S::turn(vectors);
        for width in [8, 4, 2, 1] {
            for index in 0..width {
                turned[index] = S::add(turned[index], turned[index + width]);
            }
        }
        turned[0]
    }
}
