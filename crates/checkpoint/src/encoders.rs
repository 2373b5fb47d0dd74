//! The files of vision encoders that are stored next to a model: the encoder of a pair, and a second encoder.
use super::pair::PairFiles;
use super::publish::StagedFolder;
use super::world::WorldFiles;
use tunesmith_base::error::Result;
use tunesmith_config::arch::{TensorSpec, is_beside};
use tunesmith_config::vision::VisionArch;
use tunesmith_model::weights::Dtype;

/// What to write for all encoders of a model that have files of their own.
#[derive(Debug)]
pub struct EncoderFiles<'a> {
    pair: Option<PairFiles<'a>>,
    world: Option<WorldFiles<'a>>,
}

impl<'a> EncoderFiles<'a> {
    /// Finds what to write for the encoders of `vision`. Tensors that `changed` accepts are written with new values in
    /// `dtype`; all others are copied from the encoders' files.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: an encoder's files cannot be read; [`tunesmith_base::Kind::Config`]: a
    /// connector or projector was never trained.
    pub fn of(vision: Option<&'a VisionArch>, changed: &dyn Fn(&str) -> bool, dtype: Option<Dtype>) -> Result<Self> {
        Ok(Self { pair: PairFiles::of(vision, changed, dtype)?, world: WorldFiles::of(vision, changed, dtype)? })
    }

    /// The size of all these weights files in bytes, without their headers.
    pub fn bytes(&self) -> u64 {
        self.pair.as_ref().map_or(0, PairFiles::bytes) + self.world.as_ref().map_or(0, WorldFiles::bytes)
    }

    /// Whether a tensor belongs into these files and not into the model's.
    pub fn hold(&self, name: &str) -> bool {
        self.pair.is_some() && is_beside(name) || self.world.is_some() && WorldFiles::hold(name)
    }

    /// Whether this tensor is written with new values.
    pub fn change(&self, name: &str) -> bool {
        self.pair.as_ref().is_some_and(|pair| pair.has(name))
            || self.world.as_ref().is_some_and(|world| world.has(name))
    }

    /// Writes all files. `values` returns the new values of a tensor; they must be finite in its dtype.
    ///
    /// # Errors
    /// The errors of the disk and of `values`.
    pub fn stage(
        &self,
        staging: &mut StagedFolder<'_>,
        values: &dyn Fn(&TensorSpec, Dtype) -> Result<Vec<f32>>,
    ) -> Result<()> {
        self.pair.iter().try_for_each(|pair| pair.stage(staging, values))?;
        self.world.iter().try_for_each(|world| world.stage(staging, values))
    }
}
