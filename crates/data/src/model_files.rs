//! Reads the small files of a model folder, and templates, with a bound on their size.
use std::io::Read as _;
use std::path::Path;

use serde_json::{Map, Value};

use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

/// The largest tokenizer file, in bytes. The largest known `tokenizer.json` has 40 MB.
pub const MAX_FILE_BYTES: u64 = 512 << 20;

/// How to open a file: [`files::open`], or [`files::open_member`] for files of a model folder.
pub(super) type Opener = fn(&Path) -> std::io::Result<std::fs::File>;

/// The bytes of a file; `None` if it does not exist.
pub(super) fn read_file(path: &Path, open: Opener) -> Result<Option<Vec<u8>>> {
    let failed = |error: std::io::Error| Error::io("read", path, &error).with_kind(tunesmith_base::Kind::Model);
    let file = match open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let size = file.metadata().map_err(failed)?.len();
    if size > MAX_FILE_BYTES {
        return Err(Error::model(format!("{} has {size} bytes, expected at most {MAX_FILE_BYTES}", path.display()))
            .hint("copy the file of the model again"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut bytes).map_err(failed)?;
    Ok(Some(bytes))
}

/// The JSON object in a file of the model folder; empty if the file does not exist.
pub(super) fn read_json(path: &Path) -> Result<Map<String, Value>> {
    let Some(bytes) = read_file(path, files::open_member)? else { return Ok(Map::new()) };
    serde_json::from_slice(&bytes).map_err(|error| {
        Error::model(format!("{}:{}: expected a JSON object", path.display(), error.line()))
            .caused_by(error)
            .hint("copy the file of the model again")
    })
}
