//! Image encoders that stand next to a model in files of their own: that of a pair, and a second one.
use super::pair::PairFiles;
use super::publish::StagedFolder;
use super::world::WorldFiles;
use tunesmith_base::error::Result;
use tunesmith_config::arch::{TensorSpec, is_beside};
use tunesmith_config::vision::VisionArch;
use tunesmith_model::weights::Dtype;

/// The files of a model's encoders that are to be written.
#[derive(Debug)]
pub struct EncoderFiles<'a> {
    pair: Option<PairFiles<'a>>,
    world: Option<WorldFiles<'a>>,
}

impl<'a> EncoderFiles<'a> {
    /// Those of a model in which the tensors that `changed` accepts are not those of the encoders' files. Such tensors are written in
    /// `dtype`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: an encoder's files cannot be read; [`tunesmith_base::Kind::Config`]: the second encoder's
    /// projector was never trained.
    pub fn of(vision: Option<&'a VisionArch>, changed: &dyn Fn(&str) -> bool, dtype: Option<Dtype>) -> Result<Self> {
        Ok(Self { pair: PairFiles::of(vision, changed, dtype)?, world: WorldFiles::of(vision, changed, dtype)? })
    }

    /// Bytes of all tensors of these files.
    pub fn bytes(&self) -> u64 {
        self.pair.as_ref().map_or(0, PairFiles::bytes) + self.world.as_ref().map_or(0, WorldFiles::bytes)
    }

    /// Whether a tensor is in these files and not in the model's.
    pub fn hold(&self, name: &str) -> bool {
        self.pair.is_some() && is_beside(name) || self.world.is_some() && WorldFiles::hold(name)
    }

    /// Whether a tensor's numbers are not those of the encoders' files.
    pub fn change(&self, name: &str) -> bool {
        self.pair.as_ref().is_some_and(|pair| pair.has(name))
            || self.world.as_ref().is_some_and(|world| world.has(name))
    }

    /// Writes the files. `values` gives the numbers of changed tensors, which must be finite in the dtype.
    ///
    /// # Errors
    /// Those of the disk and of `values`.
    pub fn stage(
        &self,
        staging: &mut StagedFolder<'_>,
        values: &dyn Fn(&TensorSpec, Dtype) -> Result<Vec<f32>>,
    ) -> Result<()> {
        self.pair.iter().try_for_each(|pair| pair.stage(staging, values))?;
        self.world.iter().try_for_each(|world| world.stage(staging, values))
    }
}
