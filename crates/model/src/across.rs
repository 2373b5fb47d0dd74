//! The rows of pictures that texts attend to by cross-attention: beside the stream, for all blocks of a walk.
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;
use tunesmith_ops::spans::Span;

/// The rows of the pictures of a batch, one picture for each sequence, in order.
#[derive(Debug)]
pub struct Across {
    /// `[rows, hidden]`.
    features: Activation,
    /// Where each picture's rows begin, and where the last one's end.
    bounds: Vec<usize>,
    /// The number of each row within the step, for dropout.
    numbers: Vec<usize>,
    /// Their gradient, the sum over the blocks that a backward walk came by; none where it is not asked for.
    gradient: Option<Mutex<Option<Activation>>>,
}

impl Across {
    /// `counts` are the rows of each picture; `numbers` those of each row for dropout, or empty without.
    ///
    /// # Panics
    /// If the counts are not those of all rows.
    pub fn new(features: Activation, counts: &[usize], numbers: Vec<usize>, want_gradient: bool) -> Self {
        let mut bounds = vec![0];
        bounds.extend(counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        }));
        assert_eq!(bounds.last(), Some(&features.tokens()), "the rows of all pictures");
        Self { features, bounds, numbers, gradient: want_gradient.then(Mutex::default) }
    }

    /// `[rows, hidden]`.
    pub const fn features(&self) -> &Activation {
        &self.features
    }

    /// The number of each row within the step, for dropout; empty without.
    pub fn numbers(&self) -> &[usize] {
        &self.numbers
    }

    /// Who sees what: the queries of each of `sequences` all rows of its picture.
    ///
    /// # Panics
    /// If there are not as many sequences as pictures.
    pub fn spans(&self, sequences: Vec<Range<usize>>) -> Vec<Span> {
        spans(sequences, &self.bounds)
    }

    /// Whether anything asks for the gradient of the rows.
    pub const fn want_gradient(&self) -> bool {
        self.gradient.is_some()
    }

    /// Adds what a block gives.
    pub fn add_gradient(&self, more: Option<Activation>) {
        let (Some(gradient), Some(more)) = (&self.gradient, more) else { return };
        match &mut *gradient.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(sum) => elementwise::add(sum, &more),
            none => *none = Some(more),
        }
    }

    /// The gradient of the rows, `[rows, hidden]`, if a block gave some.
    pub fn into_gradient(self) -> Option<Activation> {
        self.gradient?.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Who sees what: the queries of each of `sequences` all keys between its two `bounds`.
///
/// # Panics
/// If there are not as many sequences as keys' parts.
pub fn spans(sequences: Vec<Range<usize>>, bounds: &[usize]) -> Vec<Span> {
    assert_eq!(sequences.len() + 1, bounds.len(), "a picture for each sequence");
    // A query at the last position sees all keys.
    let span = |(queries, keys): (Range<usize>, &[usize])| Span {
        key_start: keys[0],
        keys: keys[1] - keys[0],
        query_start: queries.start,
        positions: vec![keys[1] - keys[0] - 1; queries.len()],
        ranges: None,
    };
    sequences.into_iter().zip(bounds.windows(2)).map(span).collect()
}
