//! Image features for cross-attention: the rows that the texts of a batch attend to. They are no part of the residual
//! stream, and all blocks of a walk use the same rows.
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;
use tunesmith_ops::spans::Span;

/// The image features of a batch. Each sequence has one image, in the order of the sequences.
#[derive(Debug)]
pub struct Across {
    /// `[rows, hidden]`.
    features: Activation,
    /// Where the rows of each image begin, and the end of the last one: one more entry than there are images.
    bounds: Vec<usize>,
    /// The number of each row within the step, for dropout.
    numbers: Vec<usize>,
    /// The gradient of `features`, summed over the blocks that the backward walk has passed; `None` if nobody asked for
    /// it.
    gradient: Option<Mutex<Option<Activation>>>,
}

impl Across {
    /// The features of all images end to end, with the number of rows of each in `counts`. `numbers` has the number of
    /// each row within the step, for dropout; it is empty without dropout. With `want_gradient`, backward sums the
    /// gradient of the rows.
    ///
    /// # Panics
    /// If `counts` does not sum to the rows of `features`.
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

    /// The attention spans: the queries of each of `sequences` see all rows of its image.
    ///
    /// # Panics
    /// If there are not as many sequences as images.
    pub fn spans(&self, sequences: Vec<Range<usize>>) -> Vec<Span> {
        spans(sequences, &self.bounds)
    }

    /// Whether anything asks for the gradient of the rows.
    pub const fn want_gradient(&self) -> bool {
        self.gradient.is_some()
    }

    /// Adds the gradient that one block has for the rows. Does nothing if nobody asked for it.
    pub fn add_gradient(&self, more: Option<Activation>) {
        let (Some(gradient), Some(more)) = (&self.gradient, more) else { return };
        match &mut *gradient.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(sum) => elementwise::add(sum, &more),
            none => *none = Some(more),
        }
    }

    /// The summed gradient of the rows, `[rows, hidden]`; `None` if no block has added one.
    pub fn into_gradient(self) -> Option<Activation> {
        self.gradient?.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Attention spans in which the queries of sequence i see all keys from `bounds[i]` to `bounds[i + 1]`.
///
/// # Panics
/// If `bounds` does not have one more entry than there are sequences.
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
