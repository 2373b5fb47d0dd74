//! A block: branches beside the residual stream, one after the other.
//!
//! Llama's form is `x2 = x + O(attention(norm(x)))`, `y = x2 + D(act(G h) * U h)` with `h = norm(x2)`: two branches.
//! Families differ in the parts, in where the norms are, and in how a branch joins the stream
//! ([`tunesmith_config::arch::BlockSpec`]).
use super::branch::{self, Branch, Part};
use super::grads::Grads;
use super::mixers::Mixing;
use super::moe::Moe;
use super::pass::{BlockRows, Pass};
use super::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;
use tunesmith_ops::route::Routing;

#[derive(Debug)]
pub struct Block {
    /// In order; at most one is a mixer, in which tokens take from others.
    pub branches: Vec<Branch>,
    /// What its output is multiplied by (Gemma 4).
    pub scalar: Option<f32>,
}

/// What forward keeps for backward, beside the block's input.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    /// What the branches keep.
    branches: Vec<branch::Saved<T>>,
    /// The inputs of all branches but the first.
    inputs: Vec<T>,
}

impl<T> Saved<T> {
    /// The same in another form.
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved {
            branches: self.branches.into_iter().map(|saved| saved.map(f)).collect(),
            inputs: self.inputs.into_iter().map(f).collect(),
        }
    }

    /// Where the tokens went, in a block of experts.
    pub fn routing(&self) -> Option<&Routing> {
        self.branches.iter().find_map(branch::Saved::routing)
    }
}

impl Block {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        self.branches.iter_mut().flat_map(Branch::weights_mut).collect()
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        self.branches.iter().any(Branch::trains)
    }

    /// Whether it can give an output for some tokens only: its attention then has only their queries.
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

    /// `[tokens, hidden]` to `[rows, hidden]`: the rows are all tokens, unless `rows.outputs` picks some. With `whole` it
    /// also keeps what backward would else compute again at little cost.
    pub fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        rows: BlockRows<'_>,
        whole: bool,
        mixing: &mut dyn Mixing,
    ) -> (Activation, Saved) {
        let mut saved = Saved { branches: Vec::with_capacity(self.branches.len()), inputs: Vec::new() };
        let mut stream: Option<Activation> = None;
        for branch in &self.branches {
            let (y, kept) = branch.forward(pass, stream.as_ref().unwrap_or(x), rows, whole, mixing);
            saved.branches.push(kept);
            saved.inputs.extend(stream.replace(y));
        }
        let mut y = stream.unwrap_or_else(|| x.copy());
        if let Some(scalar) = self.scalar {
            elementwise::scale(&mut y, scalar);
        }
        (y, saved)
    }

    /// What [`Block::forward`] keeps, computed again. Its output is not wanted: a last branch that keeps nothing is left out.
    pub fn again(&self, pass: &Pass<'_>, x: &Activation, rows: BlockRows<'_>, mixing: &mut dyn Mixing) -> Saved {
        let mut saved = Saved { branches: Vec::with_capacity(self.branches.len()), inputs: Vec::new() };
        let mut stream: Option<Activation> = None;
        for (index, branch) in self.branches.iter().enumerate() {
            let input = stream.as_ref().unwrap_or(x);
            let is_last = index + 1 == self.branches.len();
            if is_last && branch.tiled(input.tokens(), rows).is_some() {
                saved.branches.push(branch::Saved::again());
                saved.inputs.extend(stream.take());
            } else {
                let (y, kept) = branch.forward(pass, input, rows, false, mixing);
                saved.branches.push(kept);
                saved.inputs.extend(stream.replace(y));
            }
        }
        saved
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
        let Saved { branches: mut kept, mut inputs } = saved;
        if let Some(scalar) = self.scalar {
            elementwise::scale(&mut dy, scalar);
        }
        for (index, branch) in self.branches.iter().enumerate().rev() {
            let (kept, input) = (kept.pop()?, inputs.pop());
            let want_dx = want_dx || index > 0;
            dy = branch.backward(pass, input.as_ref().unwrap_or(x), kept, dy, rows, want_dx, grads)?;
        }
        Some(dy)
    }
}
