//! The files of a merged model's second vision encoder and its projector (`vision.world`), next to those of the model.
use super::beside::BesideFile;
use super::publish::StagedFolder;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::TensorSpec;
use tunesmith_config::vision::{VisionArch, WORLD_ENCODER, WORLD_PROJECTOR, WORLD_SETTINGS, WORLD_WEIGHTS, World};
use tunesmith_model::vision_files::open_latents;
use tunesmith_model::weights::{Dtype, Wrapping};

/// The prefix of the encoder's tensors in the file.
const ENCODER: &str = "world_encoder.";
/// The prefix of the projector's tensors in the file.
const PROJECTOR: &str = "world_projector.";

/// The settings and weights of a second encoder and its projector, ready to be written.
#[derive(Debug)]
pub struct WorldFiles<'a> {
    world: &'a World,
    weights: BesideFile,
}

impl<'a> WorldFiles<'a> {
    /// Finds what to write for a model with a second encoder; `None` for a model without one. If `changed` accepts all
    /// tensors of the projector, they are written with new values in `dtype`, by default float32. Otherwise they are
    /// copied, as the encoder's tensors are.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the encoder's files cannot be read; [`tunesmith_base::Kind::Config`]: the
    /// projector was neither trained nor stored.
    pub fn of(
        vision: Option<&'a VisionArch>,
        changed: &dyn Fn(&str) -> bool,
        dtype: Option<Dtype>,
    ) -> Result<Option<Self>> {
        let Some(world) = vision.and_then(|vision| vision.world.as_deref()) else { return Ok(None) };
        let from = Wrapping::of(open_latents(&world.folder)?);
        let projector = world.projector.tensors();
        let trained = projector.iter().all(|spec| changed(&spec.name));
        if !trained && !world.projector.stored {
            return Err(Error::config("the projector of the second encoder was never trained")
                .hint("merge an adapter that was trained with vision.world, or leave vision.world out"));
        }
        let in_file = |name: &str| name.trim_start_matches("model.").to_owned();
        let computed = projector.into_iter().filter(|_| trained);
        let computed = computed.map(|spec| (in_file(&spec.name), (spec, dtype.unwrap_or(Dtype::F32)))).collect();
        let named = |name: &str| {
            let whole = name.starts_with(ENCODER) || name.starts_with(PROJECTOR);
            if whole { name.to_owned() } else { format!("{ENCODER}{name}") }
        };
        let all = from.tensors(false)?.into_iter();
        let copied = all.filter(|(name, ..)| !(trained && name.starts_with(PROJECTOR)));
        let copied = copied.map(|(name, shape, numbers)| (named(&name), (name, shape, numbers))).collect();
        Ok(Some(Self { world, weights: BesideFile { from, copied, computed } }))
    }

    /// Whether this is the name of a tensor of the second encoder or its projector.
    pub fn hold(name: &str) -> bool {
        name.starts_with(WORLD_ENCODER) || name.starts_with(WORLD_PROJECTOR)
    }

    /// Whether this tensor of the projector is written with new values.
    pub fn has(&self, name: &str) -> bool {
        self.weights.has(name)
    }

    /// The size of the weights file in bytes, without its header.
    pub fn bytes(&self) -> u64 {
        self.weights.bytes()
    }

    /// Writes the settings and the weights. `values` returns the new values of a tensor; they must be finite in its
    /// dtype.
    ///
    /// # Errors
    /// The errors of the disk and of `values`.
    pub fn stage(
        &self,
        staging: &mut StagedFolder<'_>,
        values: &dyn Fn(&TensorSpec, Dtype) -> Result<Vec<f32>>,
    ) -> Result<()> {
        staging.write_json(WORLD_SETTINGS, &self.world.settings()?)?;
        self.weights.stage(staging, WORLD_WEIGHTS, values)
    }
}
