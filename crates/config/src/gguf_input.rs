//! GGUF files in the place of a model or an adapter: this program writes them, and reads none.
use std::fs;
use std::path::Path;

use tunesmith_base::error::{Error, Result};

/// What to name instead of a GGUF file.
pub const INSTEAD_OF_GGUF: &str = "name the model's own repository or folder with config.json and *.safetensors; the card of a GGUF repository \
     names it (base_model)";

/// Whether a name is that of a GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"))
}

/// Refuses a GGUF file, and a folder of such without a `config.json` or an `adapter_config.json`.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`], with the file.
pub fn refuse_gguf(path: &Path) -> Result<()> {
    let refused = |what: String| {
        Err(Error::model(format!("{what}: tunesmith writes GGUF (export --gguf) and reads none")).hint(INSTEAD_OF_GGUF))
    };
    if is_gguf(path) && !path.is_dir() {
        return refused(format!("{} is a GGUF file", path.display()));
    }
    if ["config.json", "adapter_config.json"].iter().any(|name| path.join(name).exists()) {
        return Ok(());
    }
    let mut files: Vec<_> = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.file_name()).collect();
    files.sort();
    match files.iter().find(|name| is_gguf(Path::new(name))) {
        Some(name) => refused(format!("{} holds a model in a GGUF file ({})", path.display(), name.to_string_lossy())),
        None => Ok(()),
    }
}
