//! What every segment needs in one pass over a batch.

use crate::ops::dropout::{Dropout, key};
use crate::ops::panel::Pool;
use crate::ops::rope::Rope;
use crate::ops::spans::{Span, full_spans, row_spans};
use std::sync::Arc;

/// One walk over the segments.
#[derive(Debug)]
pub struct Pass<'a> {
    /// The flat buffer of trained values.
    pub values: &'a [f32],
    /// Where activations come from.
    pub pool: &'a Arc<Pool>,
    /// Adapter dropout; none in evaluation.
    pub dropout: Option<Drops<'a>>,
}

/// Which dropout masks hold in this pass.
#[derive(Debug, Clone, Copy)]
pub struct Drops<'a> {
    /// Probability that a value is dropped.
    pub rate: f32,
    /// The run's seed.
    pub seed: u64,
    /// The optimizer step.
    pub step: u64,
    /// Row number of the first token within the step.
    pub first_row: u64,
    /// The tokens that the last block's rows are.
    pub picked: &'a [usize],
}

impl<'a> Drops<'a> {
    /// The mask of one module, whose input has so many rows: all tokens, or those picked, which are fewer, since no
    /// sequence's last token is.
    pub fn of(&self, module: u64, rows: usize) -> Dropout<'a> {
        let rows = (rows == self.picked.len()).then_some(self.picked);
        Dropout { rate: self.rate, key: key(self.seed, self.step, module), first_row: self.first_row, rows }
    }
}

/// Which tokens a block works on: all, or for the last block the rows that are asked for.
#[derive(Debug)]
pub struct Rows {
    /// The tokens, rising; none means all.
    pub picked: Option<Vec<usize>>,
    /// Keys and queries of each sequence.
    pub spans: Vec<Span>,
    /// Rotary table of the queries.
    pub rope: Rope,
}

/// Sequence boundaries and rotary tables of a batch.
#[derive(Debug)]
pub struct Layout {
    /// Every token.
    pub all: Rows,
    /// What the last block's queries are.
    pub last: Rows,
}

impl Layout {
    /// For a batch with these boundaries, whose head looks at the tokens `rows` (rising).
    pub fn new(pool: &Arc<Pool>, cu_seqlens: &[usize], rows: &[usize], inv_freq: &[f32]) -> Self {
        let positions: Vec<usize> = cu_seqlens.windows(2).flat_map(|ends| 0..ends[1] - ends[0]).collect();
        let rope = Rope::new(pool, &positions, inv_freq);
        let last = Rows { rope: rope.gather(rows), spans: row_spans(cu_seqlens, rows), picked: Some(rows.to_vec()) };
        Self { all: Rows { picked: None, spans: full_spans(cu_seqlens), rope }, last }
    }
}
