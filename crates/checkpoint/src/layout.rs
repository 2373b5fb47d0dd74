//! The names of the files in a checkpoint, an adapter or a model folder, and a reader for its small JSON files.
use std::path::Path;

use serde::de::DeserializeOwned;

use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

/// Sizes and hashes of all other files; written last.
pub const MANIFEST: &str = "manifest.json";
/// State of the optimizer, and with averaged weights the raw weights.
pub(crate) const OPTIMIZER: &str = "optimizer.safetensors";
/// Only the trained tensors, with `mode: freeze`.
pub(crate) const PART: &str = "trained.safetensors";
/// Where the run stood: [`crate::TrainState`] as JSON.
pub(crate) const STATE: &str = "state.json";
/// What the checkpoint belongs to: [`crate::Stamp`] as JSON.
pub(crate) const STAMP: &str = "backend.json";
/// A whole model's weights, as Transformers names the file.
pub const MODEL_WEIGHTS: &str = "model.safetensors";
/// An adapter's settings, as PEFT names the file.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// An adapter's tensors, as PEFT names the file.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// Reads a JSON file that this program wrote.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`]: the file cannot be read, or has another form.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let fail = |reason: &str| Error::checkpoint(format!("{}: {reason}", path.display()));
    let text = files::read_own(path, files::SMALL).map_err(|error| {
        fail("cannot be read")
            .hint("the checkpoint is incomplete or damaged; resume from an earlier one")
            .unless_of_machine(path, &error)
    })?;
    serde_json::from_slice(&text).map_err(|error| {
        fail("not valid").caused_by(error).hint("the checkpoint may be of another version of tunesmith")
    })
}
