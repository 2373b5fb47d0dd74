//! Where the sequences of a padding-free batch lie, for attention.
use std::ops::Range;

/// One sequence of a batch: which tokens hold its keys, which rows hold its queries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The first token of its keys.
    pub key_start: usize,
    /// The number of its keys.
    pub keys: usize,
    /// The first row of its queries.
    pub query_start: usize,
    /// Each query's position in the sequence, rising; query i sees keys `0..=positions[i]`.
    pub positions: Vec<usize>,
}

impl Span {
    /// The tokens that hold its keys.
    pub(super) const fn key_tokens(&self) -> Range<usize> {
        self.key_start..self.key_start + self.keys
    }

    /// The rows that hold its queries.
    pub(super) const fn query_tokens(&self) -> Range<usize> {
        self.query_start..self.query_start + self.positions.len()
    }
}

/// Sequences whose every token is a query.
pub fn full_spans(cu_seqlens: &[usize]) -> Vec<Span> {
    let span = |ends: &[usize]| Span {
        key_start: ends[0],
        keys: ends[1] - ends[0],
        query_start: ends[0],
        positions: (0..ends[1] - ends[0]).collect(),
    };
    cu_seqlens.windows(2).map(span).collect()
}

/// Sequences whose queries are only the tokens `rows` (rising), laid end to end.
pub fn row_spans(cu_seqlens: &[usize], rows: &[usize]) -> Vec<Span> {
    let span = |ends: &[usize]| {
        let (first, last) = (rows.partition_point(|&row| row < ends[0]), rows.partition_point(|&row| row < ends[1]));
        Span {
            key_start: ends[0],
            keys: ends[1] - ends[0],
            query_start: first,
            positions: rows[first..last].iter().map(|&row| row - ends[0]).collect(),
        }
    };
    cu_seqlens.windows(2).map(span).collect()
}
