//! The tokens of a product with few of them, whose numbers are broadcast.
use crate::activation::{Activation, LANES};
use smallvec::SmallVec;
use std::sync::Arc;

/// Up to this many tokens, their features are first put side by side.
pub(super) const COMPACT: usize = 4;

/// The operand whose numbers are broadcast.
pub(super) struct Tokens {
    /// The activation's own.
    panel: *const f32,
    /// Those of few tokens, side by side; nothing where the panel is read.
    compact: Option<Arc<[f32]>>,
    /// Floats from one feature to the next.
    pub(super) apart: usize,
}

/// Where an operand is, its tokens and features, and these side by side.
type Copied = (*const f32, [usize; 2], Arc<[f32]>);

/// The features of few tokens, put side by side once for all products of a group.
#[derive(Default)]
pub(super) struct Copies(SmallVec<[Copied; 2]>);

impl Copies {
    fn of(&mut self, x: &Activation) -> Arc<[f32]> {
        let (from, size) = (x.ptr(), [x.tokens(), x.features()]);
        if let Some((.., copy)) = self.0.iter().find(|it| (it.0, it.1) == (from, size)) {
            return Arc::clone(copy);
        }
        // This is what other threads wait for.
        let features = x.panel(0).as_chunks::<LANES>().0;
        let copy: Arc<[f32]> = if x.tokens() == 1 {
            features.iter().map(|feature| feature[0]).collect()
        } else {
            let mut fours = vec![0.0; features.len() * COMPACT];
            let chunks = fours.as_chunks_mut::<COMPACT>().0.iter_mut();
            chunks.zip(features).for_each(|(to, from)| to.copy_from_slice(&from[..COMPACT]));
            fours.into()
        };
        self.0.push((from, size, Arc::clone(&copy)));
        copy
    }
}

impl Tokens {
    pub(super) fn new(x: &Activation, copies: &mut Copies) -> Self {
        let (panel, tokens) = (x.ptr(), x.tokens());
        if tokens > COMPACT {
            return Self { panel, compact: None, apart: LANES };
        }
        Self { panel, compact: Some(copies.of(x)), apart: if tokens == 1 { 1 } else { COMPACT } }
    }

    /// Of a vector `[features, 1]`.
    pub(super) fn of_vector(x: &Activation) -> Self {
        Self { panel: x.ptr(), compact: None, apart: 1 }
    }

    /// The first number of the first token.
    pub(super) fn first(&self) -> *const f32 {
        self.compact.as_ref().map_or(self.panel, |compact| compact.as_ptr())
    }
}
