//! The second encoder of a merged model and its projector (`vision.world`), in files of their own next to it.
use super::beside::BesideFile;
use super::publish::StagedFolder;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::TensorSpec;
use tunesmith_config::vision::{VisionArch, WORLD_ENCODER, WORLD_PROJECTOR, WORLD_SETTINGS, WORLD_WEIGHTS, World};
use tunesmith_model::vision_files::open_latents;
use tunesmith_model::weights::{Dtype, Wrapping};

/// The prefix of the encoder's names in the file.
const ENCODER: &str = "world_encoder.";
/// The same of the projector's.
const PROJECTOR: &str = "world_projector.";

/// The files of a second encoder that are to be written.
#[derive(Debug)]
pub struct WorldFiles<'a> {
    world: &'a World,
    weights: BesideFile,
}

impl<'a> WorldFiles<'a> {
    /// Those of a model in which the projector's tensors are those that `changed` accepts. They are written in `dtype`, or else in
    /// float32; the encoder's stay as they are. `None` without a second encoder.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the encoder's files cannot be read; [`tunesmith_base::Kind::Config`]: the projector was never
    /// trained.
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

    /// Whether a tensor is the encoder's or the projector's.
    pub fn hold(name: &str) -> bool {
        name.starts_with(WORLD_ENCODER) || name.starts_with(WORLD_PROJECTOR)
    }

    /// Whether a tensor is one of the trained projector.
    pub fn has(&self, name: &str) -> bool {
        self.weights.has(name)
    }

    /// Bytes of all tensors of the file of weights.
    pub fn bytes(&self) -> u64 {
        self.weights.bytes()
    }

    /// Writes settings and weights. `values` gives the numbers of the trained projector, which must be finite in the dtype.
    ///
    /// # Errors
    /// Those of the disk and of `values`.
    pub fn stage(
        &self,
        staging: &mut StagedFolder<'_>,
        values: &dyn Fn(&TensorSpec, Dtype) -> Result<Vec<f32>>,
    ) -> Result<()> {
        staging.write_json(WORLD_SETTINGS, &self.world.settings()?)?;
        self.weights.stage(staging, WORLD_WEIGHTS, values)
    }
}
