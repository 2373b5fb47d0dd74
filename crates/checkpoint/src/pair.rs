//! The files of a pair's vision encoder and connector (`vision.encoder`), next to those of its text model.
use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::beside::BesideFile;
use super::publish::StagedFolder;
use super::world::WorldFiles;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_config::arch::TensorSpec;
use tunesmith_config::vision::{PAIR_SETTINGS, PAIR_WEIGHTS, VisionArch};
use tunesmith_model::weights::{Dtype, WeightFiles, Wrapping};

/// The prefix of the encoder's tensors in the file.
const TOWER: &str = "vision_tower.";

/// The settings and weights of a pair's encoder and connector, ready to be written.
#[derive(Debug)]
pub struct PairFiles<'a> {
    vision: &'a VisionArch,
    folder: &'a Path,
    weights: BesideFile,
}

impl<'a> PairFiles<'a> {
    /// Finds what to write for a pair; `None` for any other model. Tensors that `changed` accepts are written with new
    /// values, in `dtype` or else in the dtype of the encoder's files. All others are copied from these files.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the encoder's files cannot be read; [`tunesmith_base::Kind::Config`]: the
    /// connector was neither trained nor stored.
    pub fn of(
        vision: Option<&'a VisionArch>,
        changed: &dyn Fn(&str) -> bool,
        dtype: Option<Dtype>,
    ) -> Result<Option<Self>> {
        let Some((vision, folder)) = vision.and_then(|vision| Some((vision, vision.folder.as_deref()?))) else {
            return Ok(None);
        };
        let files = Wrapping::of(WeightFiles::open_at(folder)?);
        let mut computed = BTreeMap::new();
        let mut replaced = Vec::new();
        for spec in vision.tensors().into_iter().filter(|spec| !WorldFiles::hold(&spec.name)) {
            let stored = vision.stored_names(&spec.name).into_iter().find(|name| files.has(name));
            let changed = changed(&spec.name);
            if stored.is_none() && !changed {
                return Err(Error::config("the connector of the pair was never trained")
                    .hint("train it (tuning.freeze_connector: false), or merge without vision.encoder"));
            }
            if changed {
                let own = dtype.or_else(|| files.dtype(stored.as_deref()?)).unwrap_or(Dtype::F32);
                let name = match &stored {
                    Some(name) => in_file(name),
                    None => spec.name.trim_start_matches("model.").to_owned(),
                };
                replaced.extend(stored);
                computed.insert(name, (spec, own));
            }
        }
        let all = files.tensors(false)?;
        // A repository that also has a text model, such as CLIP's, has the whole encoder below this name.
        let part = all.iter().any(|(name, ..)| name.starts_with("text_model.")).then_some("vision_model.");
        let wanted = |name: &String| !replaced.contains(name) && part.is_none_or(|part| name.starts_with(part));
        let copied = all.into_iter().filter(|(name, ..)| wanted(name));
        let copied = copied.map(|(name, shape, numbers)| (in_file(&name), (name, shape, numbers))).collect();
        Ok(Some(Self { vision, folder, weights: BesideFile { from: files, copied, computed } }))
    }

    /// Whether this tensor is written with new values.
    pub fn has(&self, name: &str) -> bool {
        self.weights.has(name)
    }

    /// The size of the weights file in bytes, without its header.
    pub fn bytes(&self) -> u64 {
        self.weights.bytes()
    }

    fn settings(&self) -> Result<Value> {
        if self.folder.is_file() {
            let of_pair = self.folder.with_file_name(PAIR_SETTINGS);
            let text = tunesmith_base::files::read_text(&of_pair, tunesmith_base::files::SMALL)
                .map_err(|error| Error::io("read", &of_pair, &error))?;
            return serde_json::from_str(&text)
                .map_err(|error| Error::model(format!("{}: not valid JSON", of_pair.display())).caused_by(error));
        }
        let feature = self.vision.encoder.feature;
        // The index in Transformers' `hidden_states`, where -1 is the output of the last block.
        let layer =
            (!feature.final_norm).then(|| feature.blocks as i64 - self.vision.encoder.num_hidden_layers as i64 - 1);
        Ok(json!({
            "vision_config": VisionArch::encoder_config(self.folder)?,
            "connector_hidden_size": self.vision.connector.hidden_size(),
            "feature_layer": layer,
            "image_token_id": self.vision.chat.map(|chat| chat.token),
        }))
    }

    /// Writes the settings, the weights and the settings of the image processor. `values` returns the new values of a
    /// tensor; they must be finite in its dtype.
    ///
    /// # Errors
    /// The errors of the disk and of `values`.
    pub fn stage(
        &self,
        staging: &mut StagedFolder<'_>,
        values: &dyn Fn(&TensorSpec, Dtype) -> Result<Vec<f32>>,
    ) -> Result<()> {
        staging.write_json(PAIR_SETTINGS, &self.settings()?)?;
        for name in ["preprocessor_config.json", "processor_config.json"] {
            let path = self.folder.join(name);
            if files::is_there(&path) {
                staging.copy(name, &path)?;
            }
        }
        self.weights.stage(staging, PAIR_WEIGHTS, values)
    }
}

/// The name in the written file of a tensor from the encoder's files.
fn in_file(stored: &str) -> String {
    // The encoder's own class has no such prefix, which a class with a head puts before the encoder's tensors.
    let bare = ["model.", "vit.", "dinov2."].iter().find_map(|start| stored.strip_prefix(start)).unwrap_or(stored);
    let named = bare.starts_with(TOWER) || bare.starts_with("multi_modal_projector.");
    if named { bare.to_owned() } else { format!("{TOWER}{bare}") }
}
