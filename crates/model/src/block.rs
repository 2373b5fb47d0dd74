//! A block, which Hugging Face calls a decoder layer: branches beside the residual stream, one after the other.
//!
//! Llama's form is `x2 = x + O(attention(norm(x)))`, `y = x2 + D(act(G h) * U h)` with `h = norm(x2)`: two branches.
//! Families differ in the parts, in where the norms are, and in how a branch joins the stream
//! ([`tunesmith_config::arch::BlockSpec`]).
use super::altup::{self, AltUp};
use super::branch::{Branch, Part};
use super::branches;
use super::grads::Grads;
use super::mixers::Mixing;
use super::moe::Moe;
use super::pass::{BlockRows, Pass};
use super::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;
use tunesmith_ops::route::Routing;

/// A block of a decoder or an image encoder.
#[derive(Debug)]
pub struct Block {
    /// The branches in order. At most one is a mixer, in which a token sees other tokens.
    pub branches: Vec<Branch>,
    /// What its output is multiplied by (Gemma 4).
    pub scalar: Option<f32>,
    /// What surrounds the branches in a model with several residual streams (Gemma 3n).
    pub altup: Option<Box<AltUp>>,
}

/// What forward keeps for backward, beside the block's input.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    branches: branches::Saved<T>,
    /// What is around them.
    altup: Option<Box<altup::Saved<T>>>,
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved { branches: self.branches.map(f), altup: self.altup.map(|saved| Box::new(saved.map(f))) }
    }

    /// Where the tokens went, in a block of experts.
    pub fn routing(&self) -> Option<&Routing> {
        self.branches.routing()
    }
}

impl Block {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let around = self.altup.iter_mut().flat_map(|altup| altup.weights_mut());
        self.branches.iter_mut().flat_map(Branch::weights_mut).chain(around).collect()
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        self.branches.iter().any(Branch::trains) || self.altup.as_ref().is_some_and(|altup| altup.trains())
    }

    /// Whether it can give an output for only some of the tokens: its attention then computes only their queries.
    pub fn picks_rows(&self) -> bool {
        self.branches.iter().any(|branch| matches!(branch.part, Part::Attention(_)))
    }

    /// Its experts, if it has some.
    pub fn experts(&self) -> Option<&Moe> {
        self.branches.iter().find_map(|branch| match &branch.part {
            Part::Experts(moe) => Some(&**moe),
            Part::MlpAndExperts(both) => Some(&both.moe),
            _ => None,
        })
    }

    /// From `[tokens, hidden]` to `[rows, hidden]`. The rows are all tokens, unless `rows.outputs` picks some. Between
    /// blocks of several streams, `hidden` is the width of all streams. With `whole`, what is kept includes what
    /// backward could recompute at little cost.
    pub fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        rows: BlockRows<'_>,
        whole: bool,
        mixing: &mut dyn Mixing,
    ) -> (Activation, Saved) {
        let (mut y, saved) = if let Some(altup) = &self.altup {
            let (y, branches, around) = altup.forward(&self.branches, pass, x, rows, whole, mixing);
            (y, Saved { branches, altup: Some(Box::new(around)) })
        } else {
            let (y, branches) = branches::forward(&self.branches, pass, x, rows, whole, mixing);
            (y, Saved { branches, altup: None })
        };
        if let Some(scalar) = self.scalar {
            elementwise::scale(&mut y, scalar);
        }
        (y, saved)
    }

    /// Recomputes what [`Block::forward`] keeps, for gradient checkpointing. The output of the block is not needed, so
    /// a last branch that keeps nothing is left out.
    pub fn again(&self, pass: &Pass<'_>, x: &Activation, rows: BlockRows<'_>, mixing: &mut dyn Mixing) -> Saved {
        match &self.altup {
            // What corrects the other streams needs the output of the branches.
            Some(altup) => {
                let (_, branches, around) = altup.forward(&self.branches, pass, x, rows, false, mixing);
                Saved { branches, altup: Some(Box::new(around)) }
            }
            None => Saved { branches: branches::again(&self.branches, pass, x, rows, mixing), altup: None },
        }
    }

    /// From `dy [rows, hidden]` to the gradient of `x [tokens, hidden]`, or none if `want_dx` is false. Adds to `grads`.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        saved: Saved,
        mut dy: Activation,
        rows: BlockRows<'_>,
        want_dx: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        if let Some(scalar) = self.scalar {
            elementwise::scale(&mut dy, scalar);
        }
        match (&self.altup, saved.altup) {
            (Some(altup), Some(around)) => {
                let dx = altup.backward(&self.branches, pass, x, (saved.branches, *around), dy, rows, grads);
                want_dx.then_some(dx)
            }
            _ => branches::backward(&self.branches, pass, x, saved.branches, dy, rows, want_dx, grads),
        }
    }
}
