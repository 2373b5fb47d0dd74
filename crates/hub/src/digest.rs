//! What a file's `ETag` on the hub says of its content: SHA-256 of files in large-file storage, git's object name of
//! all others. Git's is SHA-1, which nothing else here needs; it guards against damage, not against forgery.
use std::io::Read as _;
use std::path::Path;

use sha2::{Digest as _, Sha256};

use tunesmith_base::error::{Error, Result};

/// Bytes read at a time.
const CHUNK: usize = 1 << 20;

/// The digest of the file at `path` of the kind that `etag` is; nothing where that is none of the two.
pub(super) fn of_kind(etag: &str, path: &Path) -> Result<Option<String>> {
    if !etag.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(None);
    }
    match etag.len() {
        64 => Ok(Some(sha256(path)?)),
        40 => {
            let length = path.metadata().map_err(|source| Error::io("read", path, &source))?.len();
            let mut sum = Sha1::default();
            sum.update(format!("blob {length}\0").as_bytes());
            each(path, |bytes| sum.update(bytes))?;
            Ok(Some(hex(&sum.finish())))
        }
        _ => Ok(None),
    }
}

/// The SHA-256 of the file at `path`.
pub(super) fn sha256(path: &Path) -> Result<String> {
    let mut sum = Sha256::new();
    each(path, |bytes| sum.update(bytes))?;
    Ok(hex(&sum.finalize()))
}

/// Gives the bytes of the file at `path` to `take`, some at a time.
fn each(path: &Path, mut take: impl FnMut(&[u8])) -> Result<()> {
    let failed = |source: std::io::Error| Error::io("read", path, &source);
    let mut file = tunesmith_base::files::open_own(path).map_err(failed)?;
    let mut chunk = vec![0; CHUNK];
    loop {
        match file.read(&mut chunk).map_err(failed)? {
            0 => return Ok(()),
            read => take(&chunk[..read]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // a String never fails
        text
    })
}

/// SHA-1 (FIPS 180-4).
struct Sha1 {
    state: [u32; 5],
    block: [u8; 64],
    filled: usize,
    length: u64,
}

impl Default for Sha1 {
    fn default() -> Self {
        let state = [0x6745_2301, 0xEFCD_AB89, 0x98BA_DCFE, 0x1032_5476, 0xC3D2_E1F0];
        Self { state, block: [0; 64], filled: 0, length: 0 }
    }
}

impl Sha1 {
    fn update(&mut self, mut bytes: &[u8]) {
        self.length += bytes.len() as u64;
        while !bytes.is_empty() {
            let take = bytes.len().min(64 - self.filled);
            self.block[self.filled..self.filled + take].copy_from_slice(&bytes[..take]);
            (self.filled, bytes) = (self.filled + take, &bytes[take..]);
            if self.filled == 64 {
                self.mix();
                self.filled = 0;
            }
        }
    }

    fn finish(mut self) -> [u8; 20] {
        let bits = self.length * 8;
        self.update(&[0x80]);
        while self.filled != 56 {
            self.update(&[0]);
        }
        self.update(&bits.to_be_bytes());
        let mut digest = [0; 20];
        for (word, out) in self.state.iter().zip(digest.chunks_exact_mut(4)) {
            out.copy_from_slice(&word.to_be_bytes());
        }
        digest
    }

    fn mix(&mut self) {
        let mut schedule = [0_u32; 80];
        for (word, bytes) in schedule.iter_mut().zip(self.block.chunks_exact(4)) {
            *word = bytes.iter().fold(0, |word, &byte| word << 8 | u32::from(byte));
        }
        for i in 16..80 {
            schedule[i] = (schedule[i - 3] ^ schedule[i - 8] ^ schedule[i - 14] ^ schedule[i - 16]).rotate_left(1);
        }
        let [mut a, mut b, mut c, mut d, mut e] = self.state;
        for (i, &word) in schedule.iter().enumerate() {
            let (choice, constant) = match i / 20 {
                0 => (b & c | !b & d, 0x5A82_7999),
                1 => (b ^ c ^ d, 0x6ED9_EBA1),
                2 => (b & c | b & d | c & d, 0x8F1B_BCDC),
                _ => (b ^ c ^ d, 0xCA62_C1D6_u32),
            };
            let next = a.rotate_left(5).wrapping_add(choice).wrapping_add(e).wrapping_add(constant).wrapping_add(word);
            (a, b, c, d, e) = (next, a, b.rotate_left(30), c, d);
        }
        for (state, add) in self.state.iter_mut().zip([a, b, c, d, e]) {
            *state = state.wrapping_add(add);
        }
    }
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
