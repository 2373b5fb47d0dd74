//! The branches of a block in order: each reads the residual stream that the one before it leaves.
use super::branch::{self, Branch};
use super::grads::Grads;
use super::mixers::Mixing;
use super::pass::{BlockRows, Pass};
use tunesmith_ops::activation::Activation;
use tunesmith_ops::route::Routing;

/// What forward keeps for backward, beside the first branch's input.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    /// What the branches keep.
    branches: Vec<branch::Saved<T>>,
    /// The inputs of all branches but the first.
    inputs: Vec<T>,
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved {
            branches: self.branches.into_iter().map(|saved| saved.map(f)).collect(),
            inputs: self.inputs.into_iter().map(f).collect(),
        }
    }

    /// Where the tokens went, in a branch of experts.
    pub fn routing(&self) -> Option<&Routing> {
        self.branches.iter().find_map(branch::Saved::routing)
    }
}

/// The residual stream after all `branches`, and what they keep.
pub fn forward(
    branches: &[Branch],
    pass: &Pass<'_>,
    x: &Activation,
    rows: BlockRows<'_>,
    whole: bool,
    mixing: &mut dyn Mixing,
) -> (Activation, Saved) {
    let mut saved = Saved { branches: Vec::with_capacity(branches.len()), inputs: Vec::new() };
    let mut stream: Option<Activation> = None;
    for branch in branches {
        let (y, kept) = branch.forward(pass, stream.as_ref().unwrap_or(x), rows, whole, mixing);
        saved.branches.push(kept);
        saved.inputs.extend(stream.replace(y));
    }
    (stream.unwrap_or_else(|| x.copy()), saved)
}

/// Recomputes what [`forward`] keeps. The output is not needed, so a last branch that keeps nothing is left out.
pub fn again(
    branches: &[Branch],
    pass: &Pass<'_>,
    x: &Activation,
    rows: BlockRows<'_>,
    mixing: &mut dyn Mixing,
) -> Saved {
    let mut saved = Saved { branches: Vec::with_capacity(branches.len()), inputs: Vec::new() };
    let mut stream: Option<Activation> = None;
    for (index, branch) in branches.iter().enumerate() {
        let input = stream.as_ref().unwrap_or(x);
        let is_last = index + 1 == branches.len();
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

/// From `dy`, the gradient of the stream after all branches, to that of `x`, or none if `want_dx` is false. Adds to
/// `grads`.
pub fn backward(
    branches: &[Branch],
    pass: &Pass<'_>,
    x: &Activation,
    saved: Saved,
    mut dy: Activation,
    rows: BlockRows<'_>,
    want_dx: bool,
    grads: &mut Grads<'_>,
) -> Option<Activation> {
    let Saved { branches: mut kept, mut inputs } = saved;
    for (index, branch) in branches.iter().enumerate().rev() {
        let (kept, input) = (kept.pop()?, inputs.pop());
        let want_dx = want_dx || index > 0;
        dy = branch.backward(pass, input.as_ref().unwrap_or(x), kept, dy, rows, want_dx, grads)?;
    }
    Some(dy)
}
