//! Reads images from tar and zip archives, in any order and without unpacking the archive. The path
//! `shards/0001.tar/0042.jpg` names the member `0042.jpg` of the archive `shards/0001.tar`.
//!
//! Archives are untrusted. No memory is allocated on the word of a header, and the unpacked size of a member is
//! bounded. An archive with a link, a device, or a name that leads out of it is refused as a whole.
pub(super) mod tar;
pub(super) mod zip;

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use flate2::read::DeflateDecoder;

use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::files;

/// The longest name of a member, in bytes.
const LONGEST_NAME: usize = 4096;

/// Where the bytes of a member are in the archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// The offset in the archive, in bytes: of the member's first byte in a tar archive, of its local header in a zip
    /// archive.
    pub offset: u64,
    /// Bytes that the member takes in the archive.
    pub packed: u64,
    /// Bytes after unpacking, as the archive claims. [`read`] checks it.
    pub size: u64,
    pub coding: Coding,
}

/// How a member is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coding {
    /// Uncompressed, in a tar archive.
    Tar,
    /// Stored or deflated in a zip archive, with the CRC-32 of the unpacked bytes.
    Zip { deflated: bool, sum: u32 },
}

/// The kind of an archive by its last extension; `None` if the path is not that of an archive.
fn kind(path: &Path) -> Option<Packing> {
    match path.extension()?.to_str()?.to_lowercase().as_str() {
        "tar" => Some(Packing::Tar),
        "zip" => Some(Packing::Zip),
        "gz" | "tgz" | "zst" | "zstd" => Some(Packing::Compressed),
        _ => None,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packing {
    Tar,
    Zip,
    /// A compressed tar archive. A member can be found only by unpacking everything before it.
    Compressed,
}

/// Splits a path into the archive and the name of the member. `None` if no parent of the path is an archive file.
pub(super) fn split(path: &Path) -> Option<(PathBuf, String)> {
    let mut archive = PathBuf::new();
    let mut components = path.components();
    while let Some(component) = components.next() {
        archive.push(component);
        let rest = components.as_path();
        if kind(&archive).is_some() && !rest.as_os_str().is_empty() && archive.is_file() {
            return Some((archive, rest.to_str()?.to_owned()));
        }
    }
    None
}

/// The name of a member without a leading `./`; `None` for a folder.
///
/// # Errors
/// [`Kind::Data`]: the name leads out of the archive, is too long, or is not in UTF-8.
pub(super) fn member_name(raw: &[u8]) -> Result<Option<String>> {
    let shown = || String::from_utf8_lossy(&raw[..raw.len().min(200)]).into_owned();
    if raw.len() > LONGEST_NAME {
        return Err(Error::data(format!("a member's name has {} bytes ({:?}…)", raw.len(), shown())));
    }
    let name = std::str::from_utf8(raw)
        .map_err(|_| Error::data(format!("the name of a member is not in UTF-8 ({:?})", shown())))?;
    let leads_out = Path::new(name).components().any(|part| !matches!(part, Component::Normal(_) | Component::CurDir));
    if leads_out || name.contains('\0') {
        return Err(Error::data(format!("the name of a member leads out of the archive ({name:?})")));
    }
    let bare = name.trim_start_matches("./");
    Ok((!bare.is_empty() && bare != "." && !bare.ends_with('/')).then(|| bare.to_owned()))
}

/// Where each member of an archive is, sorted by the hash of its name. The names themselves are not kept, because the
/// archives of a run may have millions of members.
#[derive(Debug)]
struct Index(Vec<(u128, Place)>);

/// The hash of a member's name, which stands for it in an [`Index`].
pub(super) fn hash(name: &str) -> u128 {
    let hash = blake3::hash(name.as_bytes());
    hash.as_bytes().first_chunk().map_or(0, |bytes| u128::from_le_bytes(*bytes))
}

impl Index {
    fn of(path: &Path) -> Result<Self> {
        let mut found = Vec::new();
        let mut add = |name: String, place: Place| -> Result<bool> {
            found.push((hash(&name), place));
            Ok(true)
        };
        let file = files::open(path).map_err(|error| unreadable(&error))?;
        match kind(path) {
            Some(Packing::Tar) => {
                let mut members = tar::Members::new(tar::Seekable(BufReader::new(file)));
                while let Some(member) = members.next_file()? {
                    add(member.name, member.place)?;
                }
            }
            Some(Packing::Zip) => zip::members(&file, &mut add)?,
            _ => {
                return Err(Error::data(
                    "a compressed archive, in which no image can be found without unpacking all before it",
                )
                .hint("decompress it, or name it in data.train_path"));
            }
        }
        found.sort_by_key(|(name, _)| *name);
        if found.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            return Err(Error::data("two members of the archive have one name"));
        }
        Ok(Self(found))
    }

    fn find(&self, name: &str) -> Option<Place> {
        let name = hash(name);
        self.0.binary_search_by_key(&name, |(name, _)| *name).ok().map(|at| self.0[at].1)
    }
}

fn unreadable(error: &std::io::Error) -> Error {
    Error::data(format!("the archive cannot be read: {error}"))
}

/// The indexes of the archives that were read so far. Each archive is indexed when its first member is read.
#[derive(Debug, Default)]
pub(super) struct Archives(Mutex<HashMap<PathBuf, Arc<Index>>>);

impl Archives {
    /// Reads a member of at most `most` bytes, unpacked.
    ///
    /// # Errors
    /// [`Kind::Data`]: there is no such member, it is damaged or too large, or the archive is refused.
    pub(super) fn read(&self, archive: &Path, name: &str, most: u64) -> Result<Vec<u8>> {
        let within = |error: Error| error.context(archive.display()).with_kind(Kind::Data);
        let index = self.index(archive).map_err(within)?;
        let name = name.trim_start_matches("./");
        let place =
            index.find(name).ok_or_else(|| within(Error::data(format!("the archive has no member {name:?}"))))?;
        let file = files::open(archive).map_err(|error| within(unreadable(&error)))?;
        read(&file, place, most).map_err(within)
    }

    fn index(&self, archive: &Path) -> Result<Arc<Index>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = known.get(archive) {
            return Ok(Arc::clone(index));
        }
        let index = Arc::new(Index::of(archive)?);
        known.insert(archive.to_owned(), Arc::clone(&index));
        Ok(index)
    }
}

/// Reads and unpacks the member at a place.
///
/// # Errors
/// [`Kind::Data`]: the member is damaged, larger than `most` bytes, or not as large as the archive claims.
pub(super) fn read(file: &File, place: Place, most: u64) -> Result<Vec<u8>> {
    if place.size > most || place.packed > most {
        let size = place.size.max(place.packed);
        return Err(Error::data(format!("the member has {size} bytes, at most {most} are read")));
    }
    let start = match place.coding {
        Coding::Tar => place.offset,
        Coding::Zip { .. } => zip::data_start(file, place.offset)?,
    };
    let packed = Part { file, at: start, left: place.packed };
    let mut bytes = Vec::new();
    let found = match place.coding {
        Coding::Zip { deflated: true, .. } => DeflateDecoder::new(packed).take(place.size + 1).read_to_end(&mut bytes),
        _ => BufReader::new(packed).take(place.size + 1).read_to_end(&mut bytes),
    };
    found.map_err(|error| Error::data("the member is damaged").caused_by(error))?;
    if bytes.len() as u64 != place.size {
        return Err(Error::data(format!("the member has other than the {} bytes that the archive claims", place.size)));
    }
    if let Coding::Zip { sum, .. } = place.coding {
        let mut check = flate2::Crc::new();
        check.update(&bytes);
        if check.sum() != sum {
            return Err(Error::data("the member is damaged: its checksum does not match"));
        }
    }
    Ok(bytes)
}

/// A part of a file. It keeps its own position, so threads may share the file.
struct Part<'a> {
    file: &'a File,
    at: u64,
    left: u64,
}

impl std::io::Read for Part<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let read = self.file.read_at(&mut buffer[..most], self.at)?;
        self.at += read as u64;
        self.left -= read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests;
