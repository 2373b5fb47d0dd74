//! The activation of a product with few tokens, arranged so that its numbers can be broadcast.
use super::pairs::round_row_at;
use super::rounding::round_panel_at;
use crate::activation::{Activation, LANES};
use crate::gemm::{Matrix, Term};
use smallvec::SmallVec;
use std::sync::Arc;

/// Up to this many tokens, their features are first copied side by side.
pub(super) const COMPACT: usize = 4;

/// How many blocks of sixteen rows are multiplied side by side at most, for a matrix that lies in pairs.
pub(super) const fn groups_in_pairs(tokens: usize) -> usize {
    match tokens {
        0..=4 => 4,
        5..=8 => 2,
        _ => 1,
    }
}

/// The activation whose numbers are broadcast.
pub(super) struct Tokens {
    /// The first panel of the activation itself.
    panel: *const f32,
    /// A copy with the features of few tokens side by side; `None` if the panel is read.
    compact: Option<Arc<[f32]>>,
    /// How many floats lie from one feature to the next.
    pub(super) apart: usize,
}

/// A copy of an activation: its address, its tokens and features, whether it is rounded to pairs, and the copy itself.
type Copied = (*const f32, [usize; 2], bool, Arc<[f32]>);

/// Copies of activations with few tokens, side by side or rounded to pairs. Each is made once for all products of a
/// group.
#[derive(Default)]
pub(super) struct Copies(SmallVec<[Copied; 2]>);

impl Copies {
    fn of(&mut self, x: &Activation, rounded: bool, make: impl FnOnce() -> Arc<[f32]>) -> Arc<[f32]> {
        let (from, size) = (x.ptr(), [x.tokens(), x.features()]);
        if let Some((.., copy)) = self.0.iter().find(|it| (it.0, it.1, it.2) == (from, size, rounded)) {
            return Arc::clone(copy);
        }
        // Other threads wait while this copy is made.
        let copy = make();
        self.0.push((from, size, rounded, Arc::clone(&copy)));
        copy
    }

    /// The features of up to [`COMPACT`] tokens, with the tokens of a feature side by side.
    fn compact(&mut self, x: &Activation) -> Arc<[f32]> {
        self.of(x, false, || {
            let features = x.panel(0).as_chunks::<LANES>().0;
            if x.tokens() == 1 {
                return features.iter().map(|feature| feature[0]).collect();
            }
            let mut fours = vec![0.0; features.len() * COMPACT];
            let chunks = fours.as_chunks_mut::<COMPACT>().0.iter_mut();
            chunks.zip(features).for_each(|(to, from)| to.copy_from_slice(&from[..COMPACT]));
            fours.into()
        })
    }

    /// The features of one token, rounded to consecutive pairs.
    fn pairs_of_one(&mut self, x: &Activation, features: &[f32]) -> Arc<[f32]> {
        self.of(x, true, || {
            let mut pairs = vec![0.0; features.len().div_ceil(2)];
            // SAFETY: the numbers are there, and so is room for their pairs.
            unsafe { round_row_at(features.as_ptr(), features.len(), pairs.as_mut_ptr()) };
            pairs.into()
        })
    }
}

impl Tokens {
    pub(super) fn new(x: &Activation, copies: &mut Copies) -> Self {
        let (panel, tokens) = (x.ptr(), x.tokens());
        if tokens > COMPACT {
            return Self { panel, compact: None, apart: LANES };
        }
        Self { panel, compact: Some(copies.compact(x)), apart: if tokens == 1 { 1 } else { COMPACT } }
    }

    /// For a vector `[features, 1]`, which needs no copy.
    pub(super) fn of_vector(x: &Activation) -> Self {
        Self { panel: x.ptr(), compact: None, apart: 1 }
    }

    /// Rounded to bfloat16, in pairs of features.
    pub(super) fn in_pairs(x: &Activation, copies: &mut Copies) -> Self {
        let panel = x.ptr();
        if x.tokens() == 1 {
            let features: Vec<f32> = x.panel(0).as_chunks::<LANES>().0.iter().map(|feature| feature[0]).collect();
            return Self { panel, compact: Some(copies.pairs_of_one(x, &features)), apart: 1 };
        }
        let compact = copies.of(x, true, || {
            let features = x.features();
            let mut pairs = vec![0.0; features.div_ceil(2) * LANES];
            // SAFETY: the panel has sixteen numbers of each feature, and there is room for their pairs.
            unsafe { round_panel_at(panel, features, pairs.as_mut_ptr()) };
            pairs.into()
        });
        Self { panel, compact: Some(compact), apart: LANES }
    }

    /// As [`Tokens::in_pairs`], for a vector `[features, 1]`.
    pub(super) fn vector_in_pairs(x: &Activation, copies: &mut Copies) -> Self {
        // SAFETY: a vector's numbers lie end to end.
        let features = unsafe { std::slice::from_raw_parts(x.ptr(), x.tokens()) };
        Self { panel: x.ptr(), compact: Some(copies.pairs_of_one(x, features)), apart: 1 }
    }

    /// The address of the first token's first number.
    pub(super) fn first(&self) -> *const f32 {
        self.compact.as_ref().map_or(self.panel, |compact| compact.as_ptr())
    }
}

/// One term of a product, with its activation ready to be broadcast.
pub(super) struct Part<'a> {
    pub(super) matrix: Matrix<'a>,
    pub(super) depth: usize,
    pub(super) x: Tokens,
}

impl<'a> Part<'a> {
    pub(super) fn new(Term { matrix, x }: Term<'a>, copies: &mut Copies) -> Self {
        let tokens = if matrix.lies_in_pairs() { Tokens::in_pairs(x, copies) } else { Tokens::new(x, copies) };
        Self { matrix, depth: x.features(), x: tokens }
    }

    /// How many pairs the features make.
    pub(super) const fn pairs(&self) -> usize {
        self.depth.div_ceil(2)
    }

    /// For a vector `x [depth, 1]`.
    pub(super) fn of_vector(matrix: Matrix<'a>, x: &'a Activation, copies: &mut Copies) -> Self {
        let lies_in_pairs = matrix.lies_in_pairs();
        let tokens = if lies_in_pairs { Tokens::vector_in_pairs(x, copies) } else { Tokens::of_vector(x) };
        Self { matrix, depth: x.tokens(), x: tokens }
    }
}
