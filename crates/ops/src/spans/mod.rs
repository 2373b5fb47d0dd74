//! [`Span`]: where the sequences of a padding-free batch lie, and which keys their queries see.
mod mask;

pub use mask::{KeyRanges, Mask, Window};

use std::ops::Range;

/// One sequence of a batch: which tokens hold its keys, and which rows hold its queries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The first token of its keys.
    pub key_start: usize,
    /// The number of its keys.
    pub keys: usize,
    /// The first row of its queries.
    pub query_start: usize,
    /// The position of each query in the sequence. Positions never decrease from one query to the next, and several
    /// queries may have the same.
    pub positions: Vec<usize>,
    /// The keys that each query sees, in place of the causal rule and the layer's [`Window`]. With `None`, query i sees
    /// the keys `0..=positions[i]`, or those of them that are in the window.
    pub ranges: Option<KeyRanges>,
}

impl Span {
    /// The same span with the mask `mask` in place of the causal rule.
    #[must_use]
    pub fn masked(self, mask: &Mask<'_>) -> Self {
        let ranges = KeyRanges::new(mask, &self.positions, self.keys);
        Self { ranges: Some(ranges), ..self }
    }

    /// The range of tokens that hold its keys.
    pub(super) const fn key_tokens(&self) -> Range<usize> {
        self.key_start..self.key_start + self.keys
    }

    /// The range of rows that hold its queries.
    pub const fn query_tokens(&self) -> Range<usize> {
        self.query_start..self.query_start + self.positions.len()
    }

    /// Which queries see which keys in a layer with this window.
    pub(super) fn visibility(&self, window: Option<Window>) -> Visibility<'_> {
        let ranges = self.ranges.as_ref().map(|ranges| (ranges.first.as_slice(), ranges.end.as_slice()));
        Visibility { positions: &self.positions, window, ranges }
    }
}

/// Which queries of a span see which of its keys. It is small: a copy in a kernel's local variables needs no loads in
/// its loops.
#[derive(Debug, Clone, Copy)]
pub(super) struct Visibility<'a> {
    positions: &'a [usize],
    window: Option<Window>,
    /// The first keys and the ends, if ranges replace the causal rule and the window.
    ranges: Option<(&'a [u32], &'a [u32])>,
}

impl Visibility<'_> {
    /// The number of queries.
    pub(super) const fn queries(self) -> usize {
        self.positions.len()
    }

    /// The range of keys that query number `query` sees.
    #[inline(always)]
    pub(super) fn keys_of(self, query: usize) -> Range<usize> {
        match self.ranges {
            None => Window::causal(self.window, self.positions[query]),
            Some((first, end)) => first[query] as usize..end[query] as usize,
        }
    }

    /// The range of queries from the first that sees one of `keys` to the last; those between are included.
    pub(super) fn queries_of(self, keys: Range<usize>) -> Range<usize> {
        if self.ranges.is_none() {
            // Both ends of what a query sees rise with its position, so a binary search finds the range.
            let first = self.positions.partition_point(|&position| position < keys.start);
            let sees = |&position: &usize| Window::causal(self.window, position).start < keys.end;
            return first..self.positions.partition_point(sees);
        }
        let sees = |&query: &usize| {
            let seen = self.keys_of(query);
            seen.start < keys.end && keys.start < seen.end
        };
        let first = (0..self.queries()).find(sees).unwrap_or(self.queries());
        first..(first..self.queries()).rev().find(sees).map_or(first, |last| last + 1)
    }
}

/// The spans of sequences in which every token is a query, with the causal rule. Sequence i has the tokens
/// `cu_seqlens[i]..cu_seqlens[i + 1]`.
pub fn full_spans(cu_seqlens: &[usize]) -> Vec<Span> {
    let span = |ends: &[usize]| Span {
        key_start: ends[0],
        keys: ends[1] - ends[0],
        query_start: ends[0],
        positions: (0..ends[1] - ends[0]).collect(),
        ranges: None,
    };
    cu_seqlens.windows(2).map(span).collect()
}

/// The spans of sequences in which only the tokens `rows` (rising) are queries, with the causal rule. The query rows
/// are laid end to end.
pub fn row_spans(cu_seqlens: &[usize], rows: &[usize]) -> Vec<Span> {
    let span = |ends: &[usize]| {
        let (first, last) = (rows.partition_point(|&row| row < ends[0]), rows.partition_point(|&row| row < ends[1]));
        Span {
            key_start: ends[0],
            keys: ends[1] - ends[0],
            query_start: first,
            positions: rows[first..last].iter().map(|&row| row - ends[0]).collect(),
            ranges: None,
        }
    };
    cu_seqlens.windows(2).map(span).collect()
}
