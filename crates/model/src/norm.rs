//! A norm as a segment sees it: `RMSNorm`, or `LayerNorm` if it has a bias.
use super::grads::Grads;
use super::pass::Pass;
use super::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;
use tunesmith_ops::layer_norm;
use tunesmith_ops::rms_norm::{self, Gain};

/// A norm's weights and constants.
#[derive(Debug)]
pub struct Norm {
    /// The gain `[features]`, for each group the same.
    pub weight: Weight,
    /// Of a `LayerNorm`, which has one group: `[features]`.
    pub bias: Option<Weight>,
    /// Added to the gain of an `RMSNorm`: 1 for Gemma, else 0.
    pub offset: f32,
    /// Added to the mean square, or to the variance.
    pub eps: f32,
}

impl Norm {
    /// The gain, and the bias of a `LayerNorm`.
    pub fn weights_mut(&mut self) -> impl Iterator<Item = &mut Weight> {
        std::iter::once(&mut self.weight).chain(&mut self.bias)
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        self.weight.trained().is_some() || self.bias.as_ref().is_some_and(|bias| bias.trained().is_some())
    }

    /// `h` of `x [tokens, groups * features]`, and what backward needs beside `x`: `rstd [tokens, groups]`, or of a
    /// `LayerNorm` mean and `rstd`, `[tokens, 2]`.
    pub fn forward(&self, pass: &Pass<'_>, x: &Activation, groups: usize) -> (Activation, Activation) {
        let stats = self.stats(x, groups);
        (self.again(pass, x, &stats), stats)
    }

    /// What backward needs beside `x`, and [`Norm::again`] too.
    pub fn stats(&self, x: &Activation, groups: usize) -> Activation {
        match &self.bias {
            Some(_) => layer_norm::stats(x, self.eps),
            None => rms_norm::stats(x, groups, self.eps),
        }
    }

    /// `h` from what [`Norm::forward`] kept.
    pub fn again(&self, pass: &Pass<'_>, x: &Activation, stats: &Activation) -> Activation {
        let weight = self.weight.view(pass.values);
        match &self.bias {
            Some(bias) => layer_norm::apply(x, stats, weight.vector(), bias.view(pass.values).vector()),
            None => rms_norm::apply(x, stats, Gain { weight: weight.vector(), offset: self.offset }),
        }
    }

    /// `h` of a vector `x [groups * features, 1]` ([`Activation::to_vector`]), as such a vector. `None` for a `LayerNorm`.
    pub fn of_vector(&self, pass: &Pass<'_>, x: &Activation, groups: usize) -> Option<Activation> {
        let weight = self.weight.view(pass.values);
        let gain = Gain { weight: weight.vector(), offset: self.offset };
        self.bias.is_none().then(|| rms_norm::of_vector(x, groups, self.eps, gain))
    }

    /// Adds the gradients of what is trained to `grads`, and the input's to `dx` (replacing it unless `add`).
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        stats: &Activation,
        dh: &Activation,
        dx: Option<(&mut Activation, bool)>,
        grads: &mut Grads<'_>,
    ) {
        if let Some(range) = self.bias.as_ref().and_then(Weight::trained) {
            elementwise::add_bias_backward(dh, grads.at(range));
        }
        if let Some(range) = self.weight.trained() {
            match self.bias {
                Some(_) => layer_norm::backward_weight(x, stats, dh, grads.at(range)),
                None => rms_norm::backward_weight(x, stats, dh, grads.at(range)),
            }
        }
        let Some((dx, add)) = dx else { return };
        let weight = self.weight.view(pass.values);
        match self.bias {
            Some(_) => layer_norm::backward(x, stats, weight.vector(), dh, dx, add),
            None => {
                rms_norm::backward(x, stats, Gain { weight: weight.vector(), offset: self.offset }, dh, dx, add);
            }
        }
    }
}
