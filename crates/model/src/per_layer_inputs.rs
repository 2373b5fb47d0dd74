//! The embeddings of all blocks in a pass ([`super::per_layer`]), and their gradients.
use std::cell::RefCell;
use std::ops::Range;
use tunesmith_ops::activation::Activation;

/// The embeddings of all blocks in a pass, and their gradients.
#[derive(Debug)]
pub struct PerLayerInputs {
    /// `[tokens, blocks * width]`.
    all: Activation,
    width: usize,
    /// Where backward asks for their gradients: of each block those that it has found, `[tokens, width]`.
    gradients: Option<RefCell<Vec<Option<Activation>>>>,
}

impl PerLayerInputs {
    /// Those of `blocks`, side by side `[tokens, blocks * width]`. With `gradients` backward asks for theirs.
    pub fn new(all: Activation, blocks: usize, gradients: bool) -> Self {
        let width = all.features() / blocks;
        let gradients = gradients.then(|| RefCell::new((0..blocks).map(|_| None).collect()));
        Self { all, width, gradients }
    }

    /// The gradients of all, side by side.
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

    /// Those of a block at the tokens `picked`, or at all: `[rows, width]`.
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
