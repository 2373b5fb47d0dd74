//! Builds the second image encoder, that of a variational autoencoder, and its projector.
use super::build::Builder;
use super::vision::latents::{Convolution, LatentEncoder, Layer, Norm, Residual, SpatialAttention};
use super::vision::world::World;
use std::sync::Arc;
use tunesmith_base::error::Result;
use tunesmith_config::vision as spec;
use tunesmith_config::vision::{LatentLayer, LatentNormKind};
use tunesmith_ops::activation::Pool;
use tunesmith_ops::conv2d::Steps;

impl Builder<'_> {
    /// The projector, and the encoder unless images come as `latents` that were computed before.
    ///
    /// # Errors
    /// A tensor cannot be read.
    pub(super) fn world(&mut self, spec: &Arc<spec::World>, latents: bool) -> Result<World> {
        let encoder = (!latents).then(|| self.latent_encoder(&spec.encoder)).transpose()?;
        let projector = self.connector(&spec.projector)?;
        Ok(World { spec: Arc::clone(spec), encoder, projector })
    }

    fn latent_encoder(&mut self, spec: &spec::LatentEncoder) -> Result<LatentEncoder> {
        let layers = spec.layers.iter().map(|layer| self.latent_layer(layer)).collect::<Result<_>>()?;
        Ok(LatentEncoder { layers, latent: spec.latent, pool: Pool::stepped_on(self.tensors.device) })
    }

    fn latent_layer(&mut self, layer: &LatentLayer) -> Result<Layer> {
        Ok(match layer {
            LatentLayer::Convolution(convolution) => Layer::Convolution(self.convolution(convolution)?),
            LatentLayer::Activation(norm) => Layer::Activation(self.latent_norm(norm)?),
            LatentLayer::Residual(residual) => {
                let [norm1, norm2] = &residual.norms;
                let [conv1, conv2] = &residual.convolutions;
                let norms = [self.latent_norm(norm1)?, self.latent_norm(norm2)?];
                let convolutions = [self.convolution(conv1)?, self.convolution(conv2)?];
                let shortcut = residual.shortcut.as_ref().map(|module| self.convolution(module)).transpose()?;
                Layer::Residual(Box::new(Residual { norms, convolutions, shortcut }))
            }
            LatentLayer::Attention(attention) => {
                let norm = self.latent_norm(&attention.norm)?;
                let qkv = attention.qkv.iter().map(|module| self.convolution(module)).collect::<Result<_>>()?;
                let out = self.convolution(&attention.out)?;
                Layer::Attention(Box::new(SpatialAttention { norm, qkv, out }))
            }
        })
    }

    fn convolution(&mut self, spec: &spec::Convolution) -> Result<Convolution> {
        Ok(Convolution {
            weight: self.tensors.weight(&format!("{}.weight", spec.name))?,
            bias: self.tensors.weight(&format!("{}.bias", spec.name))?,
            planes: spec.planes(),
            side: spec.side(),
            steps: Steps { stride: spec.stride, padding: spec.padding },
        })
    }

    fn latent_norm(&mut self, spec: &spec::LatentNorm) -> Result<Norm> {
        let mut part = |part: &str| self.tensors.weight(&format!("{}.{part}", spec.name));
        Ok(match spec.kind {
            LatentNormKind::Group(groups) => Norm::Group([part("weight")?, part("bias")?], groups),
            LatentNormKind::Rms(_) => Norm::Rms(part("gamma")?),
        })
    }
}
