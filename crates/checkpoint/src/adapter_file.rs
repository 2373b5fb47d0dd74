//! The tensors of `adapter_model.safetensors`.
use super::layout::ADAPTER_WEIGHTS as WEIGHTS_FILE;
use std::path::Path;
use tunesmith_base::Kind;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::plain_name;
use tunesmith_model::weights::WeightFiles;

/// What PEFT puts before a tensor's name in the base model.
pub const PREFIX: &str = "base_model.model.";

/// Opens `dir/adapter_model.safetensors`. The tensors get the names of the language model, still behind [`PREFIX`].
///
/// # Errors
/// [`Kind::Checkpoint`].
pub fn open_weights(dir: &Path) -> Result<WeightFiles> {
    let path = dir.join(WEIGHTS_FILE);
    if !path.exists() && dir.join("adapter_model.bin").exists() {
        return Err(Error::checkpoint(format!("{}: not yet: adapter_model.bin", dir.display()))
            .hint("save the adapter again with safetensors (PEFT's save_pretrained does)"));
    }
    let plain = |name: &str| match name.strip_prefix(PREFIX) {
        Some(module) => format!("{PREFIX}{}", plain_name(module)),
        None => name.to_owned(),
    };
    let weights = WeightFiles::open_file(&path).and_then(|weights| weights.renamed(plain));
    weights.map_err(|error| error.with_kind(Kind::Checkpoint))
}
