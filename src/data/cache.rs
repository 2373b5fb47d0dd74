//! Tokenized data on disk, found by the hash of everything that went into it. A file that is damaged in any way is
//! as good as none.
//!
//! Layout, little-endian: magic, key [32], lengths of counts, ends, tokens and weights (u64 each), the counts as JSON,
//! ends (u64), ids (u32), labels (i32), weights (f32), BLAKE3 of all that [32].
use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use super::dataset::Counts;
use super::split::Split;

const MAGIC: &[u8; 16] = b"tunesmith-data2\n";
const HEADER: usize = MAGIC.len() + 32 + 4 * 8;
const PIECE: usize = 1 << 16;

/// The folder that is used unless the configuration names one.
pub fn default_dir() -> Option<PathBuf> {
    let xdg = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    xdg.or_else(home).map(|cache| cache.join("tunesmith"))
}

/// Where the data of a key lies.
pub fn path(dir: &Path, key: &blake3::Hash) -> PathBuf {
    dir.join(format!("{}.tokens", key.to_hex()))
}

/// Reads what was stored under a key; nothing if it is not there or not whole.
pub fn read(path: &Path, key: &blake3::Hash) -> Option<(Split, Counts)> {
    let file = File::open(path).ok()?;
    let size = file.metadata().ok()?.len();
    let mut reader = HashingReader { inner: BufReader::with_capacity(PIECE, file), hasher: blake3::Hasher::new() };
    let header = reader.bytes(HEADER)?;
    let length = |index: usize| {
        let at = MAGIC.len() + 32 + 8 * index;
        u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"))
    };
    let (counts, ends, tokens, weights) = (length(0), length(1), length(2), length(3));
    // Checked before anything is allocated: a damaged length must not ask for the machine's memory.
    let numbers = ends.checked_mul(8)?.checked_add(tokens.checked_mul(8)?)?.checked_add(weights.checked_mul(4)?)?;
    let expected = counts.checked_add(numbers)?;
    if header[..16] != MAGIC[..]
        || header[16..48] != key.as_bytes()[..]
        || expected.checked_add(HEADER as u64 + 32)? != size
    {
        return None;
    }
    let counts = reader.bytes(counts as usize)?;
    let split = Split {
        ends: reader.numbers(ends as usize, u64::from_le_bytes)?,
        ids: reader.numbers(tokens as usize, u32::from_le_bytes)?,
        labels: reader.numbers(tokens as usize, i32::from_le_bytes)?,
        weights: reader.numbers(weights as usize, f32::from_le_bytes)?,
    };
    let found = reader.hasher.finalize();
    let mut stored = [0; 32];
    reader.inner.read_exact(&mut stored).ok()?;
    (found == stored).then_some(())?;
    Some((split, serde_json::from_slice(&counts).ok()?))
}

struct HashingReader<R> {
    inner: R,
    hasher: blake3::Hasher,
}

impl<R: Read> HashingReader<R> {
    fn bytes(&mut self, count: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; count];
        self.inner.read_exact(&mut bytes).ok()?;
        self.hasher.update(&bytes);
        Some(bytes)
    }

    fn numbers<const N: usize, T>(&mut self, count: usize, number: fn([u8; N]) -> T) -> Option<Vec<T>> {
        let mut numbers = Vec::with_capacity(count);
        while numbers.len() < count {
            let piece = self.bytes((count - numbers.len()).min(PIECE) * N)?;
            numbers.extend(piece.as_chunks::<N>().0.iter().map(|bytes| number(*bytes)));
        }
        Some(numbers)
    }
}

/// Stores data under a key: written beside its place, synced, then renamed.
pub fn write(path: &Path, key: &blake3::Hash, split: &Split, counts: &Counts) -> std::io::Result<()> {
    let counts = serde_json::to_vec(counts)?;
    let temporary = path.with_extension(format!("tmp-{}", std::process::id()));
    let write_to = |file: File| -> std::io::Result<()> {
        let mut writer = HashingWriter { inner: BufWriter::with_capacity(PIECE, file), hasher: blake3::Hasher::new() };
        writer.put(MAGIC)?;
        writer.put(key.as_bytes())?;
        for length in [counts.len(), split.ends.len(), split.ids.len(), split.weights.len()] {
            writer.put(&(length as u64).to_le_bytes())?;
        }
        writer.put(&counts)?;
        writer.numbers(&split.ends, u64::to_le_bytes)?;
        writer.numbers(&split.ids, u32::to_le_bytes)?;
        writer.numbers(&split.labels, i32::to_le_bytes)?;
        writer.numbers(&split.weights, f32::to_le_bytes)?;
        let hash = writer.hasher.finalize();
        writer.inner.write_all(hash.as_bytes())?;
        writer.inner.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()
    };
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    let written = File::create(&temporary).and_then(write_to).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

struct HashingWriter<W> {
    inner: W,
    hasher: blake3::Hasher,
}

impl<W: Write> HashingWriter<W> {
    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.hasher.update(bytes);
        self.inner.write_all(bytes)
    }

    fn numbers<const N: usize, T: Copy>(&mut self, numbers: &[T], bytes: fn(T) -> [u8; N]) -> std::io::Result<()> {
        numbers.chunks(PIECE).try_for_each(|piece| {
            let piece: Vec<u8> = piece.iter().flat_map(|&number| bytes(number)).collect();
            self.put(&piece)
        })
    }
}
