//! Attention masks, stored as the range of keys that each query sees: `first <= j < end`.
//!
//! Every mask here gives a query one contiguous range with at least one key, because each query sees itself. So a
//! kernel needs only two numbers for each query, and skips blocks of keys outside of them.
use std::ops::Range;

/// A layer's attention window: which keys a query sees of those up to its own. A layer without a window shows them all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Window {
    /// Sliding window, the last n keys: `i - n < j <= i`. Mistral, Gemma 2.
    Sliding(usize),
    /// Chunked attention, the keys in the query's chunk of n positions: `j <= i` and `j / n == i / n`. Llama 4.
    Chunked(usize),
}

impl Window {
    /// The first key that the query at `position` sees. It never decreases as the position rises.
    #[inline(always)]
    pub const fn first(self, position: usize) -> usize {
        match self {
            Self::Sliding(keys) => (position + 1).saturating_sub(keys),
            Self::Chunked(keys) => position / keys * keys,
        }
    }

    /// The keys that the query at `position` sees by the causal rule in a layer with this window.
    #[inline(always)]
    pub(crate) fn causal(window: Option<Self>, position: usize) -> Range<usize> {
        window.map_or(0, |window| window.first(position))..position + 1
    }
}

/// An attention mask: which keys j the query at position i of a sequence sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask<'a> {
    /// `j <= i`, within the window.
    Causal(Option<Window>),
    /// Every query sees all keys: encoders.
    Full,
    /// `i - before <= j <= i + after`: local layers of encoders, such as `ModernBERT`.
    Local {
        /// How many keys before its own position a query sees.
        before: usize,
        /// How many keys after its own position a query sees.
        after: usize,
    },
    /// `j <= i`, or `j` is among the first n keys: prefix language models, such as `PaliGemma`.
    Prefix(usize),
    /// As [`Mask::Causal`], and a query in a block also sees all keys of its block: images in Gemma 3.
    Blocks {
        /// The positions of each block, in rising order; blocks do not overlap.
        blocks: &'a [Range<usize>],
        /// The window of the causal part.
        window: Option<Window>,
    },
    /// As [`Mask::Blocks`], but no query sees a key before its window: images in Gemma 4.
    BlocksWithin {
        /// The positions of each block, in rising order; blocks do not overlap.
        blocks: &'a [Range<usize>],
        /// The window, which limits everything that a query sees before itself.
        window: Window,
    },
}

impl Mask<'_> {
    /// The keys that the query at `position` sees in a sequence of `keys` keys.
    pub fn keys_of(&self, position: usize, keys: usize) -> Range<usize> {
        let seen = match *self {
            Self::Causal(window) => Window::causal(window, position),
            Self::Full => 0..keys,
            Self::Local { before, after } => position.saturating_sub(before)..(position + 1).saturating_add(after),
            Self::Prefix(prefix) => 0..prefix.max(position + 1),
            Self::Blocks { blocks, window } => {
                let causal = Window::causal(window, position);
                // Both ranges contain the query's own key, so there is no gap between them.
                match blocks.get(blocks.partition_point(|block| block.end <= position)) {
                    Some(block) if block.contains(&position) => {
                        causal.start.min(block.start)..causal.end.max(block.end)
                    }
                    _ => causal,
                }
            }
            Self::BlocksWithin { blocks, window } => {
                let seen = Mask::Blocks { blocks, window: Some(window) }.keys_of(position, keys);
                window.first(position)..seen.end
            }
        };
        seen.start..seen.end.min(keys)
    }
}

/// The keys that each query of a span sees, counted from the span's first key: `first[i] <= j < end[i]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRanges {
    /// The first key of each query, `[queries]`.
    pub first: Vec<u32>,
    /// One past the last key of each query, `[queries]`: above `first`, and at most the span's number of keys.
    pub end: Vec<u32>,
}

impl KeyRanges {
    /// The ranges that `mask` gives queries at `positions` of a sequence of `keys` keys.
    pub fn new(mask: &Mask<'_>, positions: &[usize], keys: usize) -> Self {
        let ranges = positions.iter().map(|&position| mask.keys_of(position, keys));
        let (first, end) = ranges.map(|range| (range.start as u32, range.end as u32)).unzip();
        Self { first, end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spans::{Span, full_spans, row_spans};

    /// The masks of the tests, each with its plain definition.
    fn each_mask(test: impl Fn(Mask<'_>, &dyn Fn(usize, usize) -> bool)) {
        let blocks = [2..7, 7..8, 11..25, 40..43];
        let in_one_block = |i: usize, j: usize| blocks.iter().any(|block| block.contains(&i) && block.contains(&j));
        test(Mask::Causal(None), &|i, j| j <= i);
        test(Mask::Full, &|_, _| true);
        test(Mask::Blocks { blocks: &blocks, window: None }, &|i, j| j <= i || in_one_block(i, j));
        test(Mask::Blocks { blocks: &[], window: None }, &|i, j| j <= i);
        for n in [1, 5, 16, 60] {
            let sliding = |i: usize, j: usize| j <= i && i - j < n;
            let chunked = |i: usize, j: usize| j <= i && i / n == j / n;
            test(Mask::Causal(Some(Window::Sliding(n))), &sliding);
            test(Mask::Causal(Some(Window::Chunked(n))), &chunked);
            test(Mask::Prefix(n), &|i, j| j <= i || j < n);
            test(Mask::Local { before: n, after: 3 }, &|i, j| i <= j + n && j <= i + 3);
            test(Mask::Local { before: 0, after: n }, &|i, j| i <= j && j <= i + n);
            for (window, inside) in
                [(Window::Sliding(n), &sliding as &dyn Fn(usize, usize) -> bool), (Window::Chunked(n), &chunked)]
            {
                let mask = Mask::Blocks { blocks: &blocks, window: Some(window) };
                test(mask, &|i, j| inside(i, j) || in_one_block(i, j));
                let mask = Mask::BlocksWithin { blocks: &blocks, window };
                test(mask, &|i, j| j >= window.first(i) && (j <= i || in_one_block(i, j)));
            }
        }
    }

    #[test]
    fn ranges_equal_the_dense_mask() {
        each_mask(|mask, visible| {
            for keys in [1, 8, 43, 45] {
                for position in 0..keys {
                    let seen = mask.keys_of(position, keys);
                    assert!(seen.contains(&position) && seen.end <= keys, "{mask:?}: {position} of {keys}");
                    for key in 0..keys {
                        assert_eq!(seen.contains(&key), visible(position, key), "{mask:?}: {position} sees {key}");
                    }
                }
            }
        });
    }

    #[test]
    fn queries_that_see_a_strip_are_those_of_the_dense_mask() {
        let bounds = |span: &Span, window, keys: &Range<usize>| {
            let sees = |query: &usize| keys.clone().any(|key| span.visibility(window).keys_of(*query).contains(&key));
            let all: Vec<usize> = (0..span.positions.len()).filter(sees).collect();
            all.first().map(|&first| first..all[all.len() - 1] + 1)
        };
        let spans = [full_spans(&[0, 45]), row_spans(&[0, 45], &[1, 4, 20, 21, 44])].concat();
        let strips = [0..16, 16..32, 32..48, 3..4, 44..45];
        each_mask(|mask, _| {
            for span in &spans {
                let masked = span.clone().masked(&mask);
                for keys in &strips {
                    let found = masked.visibility(None).queries_of(keys.clone());
                    assert_eq!(Some(found.clone()).filter(|found| !found.is_empty()), bounds(&masked, None, keys));
                    if let Mask::Causal(window) = mask {
                        let by_rule = span.visibility(window).queries_of(keys.clone());
                        let wanted = bounds(span, window, keys);
                        assert_eq!(Some(by_rule).filter(|found| !found.is_empty()), wanted, "{mask:?} {keys:?}");
                    }
                }
            }
        });
    }
}
