//! The encoder of a variational autoencoder (diffusers' `AutoencoderKL` or `AutoencoderKLWan`), which turns an image
//! into latents: one image at a time, in float32, forward only.
use crate::values::Values;
use crate::weight::Weight;
use std::sync::Arc;
use tunesmith_ops::activation::{Activation, Pool};
use tunesmith_ops::attention::{self, Heads, Scores};
use tunesmith_ops::conv2d::{self, Kernel, Steps};
use tunesmith_ops::elementwise;
use tunesmith_ops::group_norm;
use tunesmith_ops::pointwise::{self, Function};
use tunesmith_ops::rms_norm::{self, Gain};
use tunesmith_ops::spans::{Mask, full_spans};
use tunesmith_vision::Pixels;

/// The epsilon of the group norms of diffusers' autoencoders, which have no setting for it.
const GROUP_EPS: f32 = 1e-6;

/// The layers of the encoder, in order.
#[derive(Debug)]
pub struct LatentEncoder {
    pub layers: Vec<Layer>,
    /// The number of features of a latent: half of what the last layer gives, which is the mean and the log-variance.
    pub latent: usize,
    /// The pool, of float32 whatever the run computes in, because 16 bits lose too much over so many convolutions.
    /// Activations have as many sizes as the image has on its way.
    pub pool: Arc<Pool>,
}

/// A layer of a [`LatentEncoder`], as [`tunesmith_config::vision::LatentLayer`] describes it.
#[derive(Debug)]
pub enum Layer {
    Convolution(Convolution),
    Residual(Box<Residual>),
    Attention(Box<SpatialAttention>),
    Activation(Norm),
}

/// Twice norm, SiLU and convolution, beside a shortcut.
#[derive(Debug)]
pub struct Residual {
    pub norms: [Norm; 2],
    pub convolutions: [Convolution; 2],
    pub shortcut: Option<Convolution>,
}

/// Self-attention with one head over all places of the image.
#[derive(Debug)]
pub struct SpatialAttention {
    pub norm: Norm,
    /// The convolutions to query, key and value, or one for all three.
    pub qkv: Vec<Convolution>,
    pub out: Convolution,
}

/// A 2-D convolution of an image.
#[derive(Debug)]
pub struct Convolution {
    pub weight: Weight,
    pub bias: Weight,
    pub planes: usize,
    pub side: usize,
    pub steps: Steps,
}

#[derive(Debug)]
pub enum Norm {
    /// Gain, bias, and the number of groups.
    Group([Weight; 2], usize),
    Rms(Weight),
}

impl Convolution {
    fn forward(&self, values: Values<'_>, x: &Activation, size: [usize; 2]) -> Activation {
        let (weight, bias) = (self.weight.view(values), self.bias.view(values));
        let kernel = Kernel { weight: weight.store(), bias: bias.vector(), planes: self.planes, side: self.side };
        conv2d::forward(x, size, kernel, self.steps)
    }
}

impl Norm {
    fn forward(&self, values: Values<'_>, x: &Activation) -> Activation {
        match self {
            Self::Group([weight, bias], groups) => {
                let (weight, bias) = (weight.view(values), bias.view(values));
                group_norm::forward(x, *groups, GROUP_EPS, weight.vector(), bias.vector())
            }
            Self::Rms(gamma) => {
                // This equals `x / max(|x|, 1e-12) sqrt(size)` for a place that is not zero.
                let stats = rms_norm::stats(x, 1, 1e-24 / x.features() as f32);
                rms_norm::apply(x, &stats, Gain { weight: gamma.view(values).vector(), offset: 0.0 })
            }
        }
    }

    fn activated(&self, values: Values<'_>, x: &Activation) -> Activation {
        pointwise::forward(Function::Silu, &self.forward(values, x))
    }
}

impl Residual {
    fn forward(&self, values: Values<'_>, x: &Activation, size: [usize; 2]) -> Activation {
        let [norm1, norm2] = &self.norms;
        let [conv1, conv2] = &self.convolutions;
        let inner = conv1.forward(values, &norm1.activated(values, x), size);
        let mut y = conv2.forward(values, &norm2.activated(values, &inner), size);
        match &self.shortcut {
            Some(shortcut) => elementwise::add(&mut y, &shortcut.forward(values, x, size)),
            None => elementwise::add(&mut y, x),
        }
        y
    }
}

impl SpatialAttention {
    fn forward(&self, values: Values<'_>, x: &Activation, size: [usize; 2]) -> Activation {
        let h = self.norm.forward(values, x);
        let parts: Vec<Activation> = self.qkv.iter().map(|module| module.forward(values, &h, size)).collect();
        let width = x.features();
        let [q, k, v] = <[Activation; 3]>::try_from(parts)
            // One module for all three.
            .unwrap_or_else(|all| [0, 1, 2].map(|part| all[0].columns(part * width..(part + 1) * width)));
        let spans: Vec<_> = full_spans(&[0, x.tokens()]).into_iter().map(|span| span.masked(&Mask::Full)).collect();
        let how = Scores { scale: (width as f32).powf(-0.5), softcap: None, window: None };
        let (mixed, _) = attention::forward(&q, &k, &v, None, &spans, Heads::new(1, 1, width), how);
        let mut y = self.out.forward(values, &mixed, size);
        elementwise::add(&mut y, x);
        y
    }
}

impl LatentEncoder {
    /// The mean of the latents' distribution for an image: `[places, latent]`, row by row. The patches of `pixels` are
    /// single pixels.
    pub fn forward(&self, values: Values<'_>, pixels: &Pixels) -> Activation {
        let mut size = pixels.tiles.first().map_or([0; 2], |tile| [tile.rows, tile.columns]);
        let mut x = Activation::from_rows(&self.pool, &pixels.patches, 3);
        for layer in &self.layers {
            x = match layer {
                Layer::Convolution(convolution) => {
                    let y = convolution.forward(values, &x, size);
                    size = convolution.steps.size(size, convolution.side);
                    y
                }
                Layer::Residual(residual) => residual.forward(values, &x, size),
                Layer::Attention(attention) => attention.forward(values, &x, size),
                Layer::Activation(norm) => norm.activated(values, &x),
            };
        }
        x.columns(0..self.latent)
    }
}
