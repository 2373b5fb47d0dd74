//! The last segment: final norm, LM head or classification head, and loss, on the rows that carry a label.
use super::grads::Grads;
use super::norm::Norm;
use super::pass::Pass;
use super::weight::{View, Weight};
use std::sync::Arc;
use tunesmith_ops::activation::{Activation, Pool};
use tunesmith_ops::elementwise;
use tunesmith_ops::loss::Terms;
use tunesmith_ops::loss::linear::{Logits, LossGradient, Objective, Projection, RowLosses};

/// The model's head: final norm, and the projection to logits or scores.
#[derive(Debug)]
pub struct Head {
    pub norm: Norm,
    /// `[outputs, hidden]`; shared with the embedding where the model ties them.
    pub weight: Weight,
    /// The size of the vocabulary, or the number of labels of a classification.
    pub outputs: usize,
    /// Regression: the loss is the squared error of one number, and targets are the bits of `f32` numbers.
    pub squared: bool,
    /// The factor on logits.
    pub scale: f32,
    /// Soft-capping: after the factor, a logit becomes `cap * tanh(logit / cap)`.
    pub softcap: Option<f32>,
    /// Chunks of logits come from here, so that the walk's pool does not size them for a whole batch.
    pub pool: Arc<Pool>,
}

/// The losses of the labelled rows and the gradient of the head's input ([`Head::forward_backward`]).
#[derive(Debug)]
pub struct HeadResult {
    /// The rows' losses, and which targets were the most probable ones.
    pub losses: RowLosses,
    /// The gradient with respect to the rows.
    pub dx: Activation,
}

impl Head {
    /// The normed rows times the factor on logits, and `rstd`.
    fn normed(&self, pass: &Pass<'_>, x: &Activation) -> (Activation, Activation) {
        let (mut h, rstd) = self.norm.forward(pass, x, 1);
        self.rescale(&mut h);
        (h, rstd)
    }

    fn rescale(&self, h: &mut Activation) {
        if self.scale != 1.0 {
            elementwise::scale(h, self.scale);
        }
    }

    fn projection<'a>(&'a self, weight: &'a View<'_>) -> Projection<'a> {
        Projection { weight: weight.store(), outputs: self.outputs, softcap: self.softcap, pool: &self.pool }
    }

    /// Logits of a few rows `x [rows, hidden]`, in parts that hold some of the rows each.
    pub fn next(&self, pass: &Pass<'_>, x: &Activation) -> Vec<Logits> {
        let (h, _) = self.normed(pass, x);
        self.projection(&self.weight.view(pass.values)).logits(&h)
    }

    /// Logits `[rows, outputs]`, row-major, of a few rows `x [rows, hidden]`.
    pub fn logits(&self, pass: &Pass<'_>, x: &Activation) -> Vec<f32> {
        self.next(pass, x).iter().flat_map(Logits::to_rows).collect()
    }

    /// Each row's negative log-likelihood of its target, for `x [rows, hidden]`; and whether the target is the most probable
    /// output, or one of several equally probable ones.
    pub fn losses(&self, pass: &Pass<'_>, x: &Activation, targets: &[u32]) -> Vec<(f32, bool)> {
        let (h, _) = self.normed(pass, x);
        self.projection(&self.weight.view(pass.values)).losses(&h, targets, self.squared)
    }

    /// The rows' losses, each counting `weights[row]` times (empty: once), and the gradient of `scale` times the
    /// objective with respect to `x [rows, hidden]`. Adds the gradients of what is trained here to `grads`.
    pub fn forward_backward(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        targets: &[u32],
        terms: Terms,
        weights: &[f32],
        scale: f32,
        grads: &mut Grads<'_>,
    ) -> HeadResult {
        let (h, rstd) = self.normed(pass, x);
        let weight = self.weight.view(pass.values);
        let objective = Objective { terms, squared: self.squared, weights };
        let d_weight = self.weight.head_gradient(grads);
        let LossGradient { losses, mut dh } =
            self.projection(&weight).forward_backward(&h, targets, objective, scale, d_weight);
        self.rescale(&mut dh);
        let mut dx = x.pool().act(x.tokens(), x.features());
        self.norm.backward(pass, x, &rstd, &dh, Some((&mut dx, false)), grads);
        HeadResult { losses, dx }
    }
}
