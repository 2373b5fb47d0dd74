//! An `RMSNorm` as a segment sees it.
use super::grads::Grads;
use super::pass::Pass;
use super::weight::Weight;
use tunesmith_ops::norm::{self, Gain};
use tunesmith_ops::panel::Act;

/// An `RMSNorm`'s weight and constants.
#[derive(Debug)]
pub struct Norm {
    /// The gain `[features]`, for each group the same.
    pub weight: Weight,
    /// Added to the gain: 1 for Gemma, else 0.
    pub offset: f32,
    /// Added to the mean square.
    pub eps: f32,
}

impl Norm {
    /// `(h, rstd)` of `x [tokens, groups * features]`.
    pub fn forward(&self, pass: &Pass<'_>, x: &Act, groups: usize) -> (Act, Act) {
        let rstd = norm::stats(x, groups, self.eps);
        (self.again(pass, x, &rstd), rstd)
    }

    /// `h` from a kept `rstd`.
    pub fn again(&self, pass: &Pass<'_>, x: &Act, rstd: &Act) -> Act {
        norm::apply(x, rstd, Gain { weight: self.weight.view(pass.values).vector(), offset: self.offset })
    }

    /// Adds the weight's gradient to `grads` if it is trained, and the input's to `dx` (replacing it unless `add`).
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        x: &Act,
        rstd: &Act,
        dh: &Act,
        dx: Option<(&mut Act, bool)>,
        grads: &mut Grads<'_>,
    ) {
        if let Some(range) = self.weight.trained() {
            norm::backward_weight(x, rstd, dh, grads.at(range));
        }
        if let Some((dx, add)) = dx {
            norm::backward(
                x,
                rstd,
                Gain { weight: self.weight.view(pass.values).vector(), offset: self.offset },
                dh,
                dx,
                add,
            );
        }
    }
}
