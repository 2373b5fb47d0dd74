//! The per-layer embeddings of a pass ([`super::per_layer`]), and their gradients.
use std::cell::RefCell;
use std::ops::Range;
use tunesmith_ops::activation::Activation;

/// The per-layer embeddings of all blocks in a pass, and their gradients.
#[derive(Debug)]
pub struct PerLayerInputs {
    /// `[tokens, blocks * width]`.
    all: Activation,
    width: usize,
    /// The gradient `[tokens, width]` of each block's part, once backward has found it. `None` where gradients are not
    /// wanted.
    gradients: Option<RefCell<Vec<Option<Activation>>>>,
}

impl PerLayerInputs {
    /// The embeddings of `blocks` blocks, side by side `[tokens, blocks * width]`. With `gradients`, their gradients
    /// are collected.
    pub fn new(all: Activation, blocks: usize, gradients: bool) -> Self {
        let width = all.features() / blocks;
        let gradients = gradients.then(|| RefCell::new((0..blocks).map(|_| None).collect()));
        Self { all, width, gradients }
    }

    /// The gradients of all blocks' embeddings, side by side.
    ///
    /// # Panics
    /// If a block has not given its own.
    pub fn into_gradient(self) -> Activation {
        let Self { all, width, gradients } = self;
        let blocks = all.features() / width;
        drop(all);
        let parts: Vec<Activation> = gradients.into_iter().flat_map(RefCell::into_inner).flatten().collect();
        assert_eq!(parts.len(), blocks, "every block has a gradient of its own");
        Activation::side_by_side(&parts.iter().collect::<Vec<_>>())
    }

    fn columns(&self, block: usize) -> Range<usize> {
        block * self.width..(block + 1) * self.width
    }

    /// The embeddings of one block at the tokens `picked`, or at all tokens: `[rows, width]`.
    pub fn of(&self, block: usize, picked: Option<&[usize]>) -> Activation {
        let own = self.all.columns(self.columns(block));
        match picked {
            Some(picked) => own.gather(picked),
            None => own,
        }
    }

    /// Keeps the gradient of what [`PerLayerInputs::of`] gave.
    pub fn put_gradient(&self, block: usize, gradient: Activation, picked: Option<&[usize]>) {
        let Some(gradients) = &self.gradients else { return };
        let gradient = match picked {
            Some(picked) => gradient.scatter(picked, self.all.tokens()),
            None => gradient,
        };
        gradients.borrow_mut()[block] = Some(gradient);
    }
}
