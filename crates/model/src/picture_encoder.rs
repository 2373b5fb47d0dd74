//! The image encoder without a decoder, which computes the features of a run's images once, for the cache on disk.
use super::build::Builder;
use super::device::{device, pool};
use super::params::Params;
use super::pass::Pass;
use super::source::Source;
use super::stack::Stack;
use super::vision::Vision;
use super::weights::WeightFiles;
use std::sync::Arc;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Config;
use tunesmith_config::arch::Arch;
use tunesmith_config::vision::Features;
use tunesmith_device::memory;
use tunesmith_ops::activation::Pool;
use tunesmith_vision::Pixels;

/// A frozen image encoder with its connector, and without its decoder.
#[derive(Debug)]
pub struct PictureEncoder {
    vision: Vision,
    params: Params,
    pool: Arc<Pool>,
    features: Features,
}

impl PictureEncoder {
    /// Loads encoder and connector of `arch.vision` as a model of this configuration has them.
    ///
    /// # Errors
    /// As [`crate::Model::load`]; [`tunesmith_base::Kind::Model`] where the architecture has no image encoder.
    pub fn load(
        arch: &Arch,
        weights: Option<&WeightFiles>,
        config: &Config,
        stack: &Stack,
        features: Features,
    ) -> Result<Self> {
        let vision = arch.vision.as_ref().ok_or_else(|| Error::model("no image encoder"))?;
        let device = device(config.model.device)?;
        let mut builder = Builder::of_vision(device, arch, weights, config, stack)?;
        let vision = builder.vision(vision, arch, None)?;
        Ok(Self { vision, params: builder.tensors.params, pool: pool(device, config), features })
    }

    /// The features of an image, `[rows, width]` as
    /// [`features_shape`](tunesmith_config::vision::VisionArch::features_shape) says, on the host.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the encoder cannot read such an image; [`tunesmith_base::Kind::Memory`].
    pub fn encode(&self, pixels: &Pixels) -> Result<Vec<f32>> {
        let pass = Pass { values: self.params.values().into(), pool: &self.pool, balance: None, dropout: None };
        memory::guarded(|| self.vision.features(&pass, pixels, self.features))
    }

    /// A hash of every value that features depend on.
    ///
    /// # Errors
    /// The weights cannot be read.
    pub fn fingerprint(source: &Source<'_>, features: Features) -> Result<String> {
        let mut hasher = blake3::Hasher::new();
        let Some(vision) = &source.arch.vision else { return Ok(String::new()) };
        let mut tensors = vision.encoder.tensors();
        if features == Features::Connector {
            tensors.extend(vision.connectors().flat_map(tunesmith_config::vision::Connector::tensors));
            tensors.extend(vision.newline());
        }
        tensors.extend(vision.world.iter().flat_map(|world| world.encoder.tensors()));
        for spec in tensors {
            hasher.update(format!("{:?} {:?}\n", spec.name, spec.shape).as_bytes());
            for value in source.values(&spec.name, spec.shape.iter().product())? {
                hasher.update(&value.to_le_bytes());
            }
        }
        Ok(hasher.finalize().to_hex().to_string())
    }
}
