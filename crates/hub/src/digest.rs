//! Checks files against their `ETag` on the hub: the SHA-256 of files in large-file storage, git's object name of all
//! others. The latter is a SHA-1, which guards against damage, not against forgery.
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::Path;

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

use tunesmith_base::error::{Error, Result};

/// Bytes read at a time.
const CHUNK: usize = 1 << 20;

/// The digest of the file at `path`, of the kind that `etag` has; `None` if `etag` is neither a SHA-256 nor a git
/// object name.
pub(super) fn of_kind(etag: &str, path: &Path) -> Result<Option<String>> {
    if !etag.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(None);
    }
    match etag.len() {
        64 => Ok(Some(sha256(path)?)),
        40 => {
            let length = path.metadata().map_err(|source| Error::io("read", path, &source))?.len();
            let mut sum = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
            sum.update(format!("blob {length}\0").as_bytes());
            digest(path, sum).map(Some)
        }
        _ => Ok(None),
    }
}

/// The SHA-256 of the file at `path`.
pub(super) fn sha256(path: &Path) -> Result<String> {
    digest(path, Context::new(&SHA256))
}

/// Adds the file at `path` to `sum` and returns the digest in hexadecimal.
fn digest(path: &Path, mut sum: Context) -> Result<String> {
    let failed = |source: std::io::Error| Error::io("read", path, &source);
    let mut file = tunesmith_base::files::open_own(path).map_err(failed)?;
    let mut chunk = vec![0; CHUNK];
    loop {
        match file.read(&mut chunk).map_err(failed)? {
            0 => break,
            read => sum.update(&chunk[..read]),
        }
    }
    let mut text = String::with_capacity(64);
    for byte in sum.finish().as_ref() {
        let _ = write!(text, "{byte:02x}"); // a String never fails
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_git_and_sha256sum() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let digest = |length: usize, content: &[u8]| {
            std::fs::write(&path, content).unwrap();
            of_kind(&"0".repeat(length), &path).unwrap()
        };
        // `git hash-object`, `sha256sum`.
        assert_eq!(digest(40, b"").as_deref(), Some("e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"));
        assert_eq!(digest(40, b"hello\n").as_deref(), Some("ce013625030ba8dba906f756967f9e9ca394464a"));
        assert_eq!(digest(40, &[b'a'; 1000]).as_deref(), Some("a50be72b20f0e3f078d252e8e56b11b4bec67509"));
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(digest(64, b"").as_deref(), Some(empty));
        assert_eq!(digest(32, b""), None);
        assert_eq!(of_kind("not-a-hash", &path).unwrap(), None);
    }
}
