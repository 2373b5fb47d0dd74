//! A norm of the model: `RMSNorm`, or `LayerNorm` if it has a bias.
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
    /// The gain `[features]`, the same for each group.
    pub weight: Weight,
    /// The bias `[features]` of a `LayerNorm`, which has one group.
    pub bias: Option<Weight>,
    /// Added to the gain of an `RMSNorm`: 1 for Gemma, else 0.
    pub offset: f32,
    /// Epsilon: added to the mean square (`RMSNorm`) or to the variance (`LayerNorm`).
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

    /// The normed `x [tokens, groups * features]`, and what backward needs beside `x`: `rstd [tokens, groups]`, or mean
    /// and `rstd` of a `LayerNorm`, `[tokens, 2]`. Each group of features is normed by itself: the heads of q and k, or
    /// all features with one group.
    pub fn forward(&self, pass: &Pass<'_>, x: &Activation, groups: usize) -> (Activation, Activation) {
        let stats = self.stats(x, groups);
        (self.again(pass, x, &stats), stats)
    }

    /// The statistics of `x`, which [`Norm::backward`] and [`Norm::again`] need.
    pub fn stats(&self, x: &Activation, groups: usize) -> Activation {
        match &self.bias {
            Some(_) => layer_norm::stats(x, self.eps),
            None => rms_norm::stats(x, groups, self.eps),
        }
    }

    /// The normed `x` again, from the statistics that [`Norm::forward`] gave.
    pub fn again(&self, pass: &Pass<'_>, x: &Activation, stats: &Activation) -> Activation {
        let weight = self.weight.view(pass.values);
        match &self.bias {
            Some(bias) => layer_norm::apply(x, stats, weight.vector(), bias.view(pass.values).vector()),
            None => rms_norm::apply(x, stats, Gain { weight: weight.vector(), offset: self.offset }),
        }
    }

    /// The normed form of a vector `x [groups * features, 1]` ([`Activation::to_vector`]), as such a vector. `None` for
    /// a `LayerNorm`.
    pub fn of_vector(&self, pass: &Pass<'_>, x: &Activation, groups: usize) -> Option<Activation> {
        let weight = self.weight.view(pass.values);
        let gain = Gain { weight: weight.vector(), offset: self.offset };
        self.bias.is_none().then(|| rms_norm::of_vector(x, groups, self.eps, gain))
    }

    /// Adds the gradients of what is trained to `grads`. `dh` is the gradient of the output. The gradient of the input
    /// is written to `dx`, or added to it if its flag is true.
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
