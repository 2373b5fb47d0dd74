//! Images in tar and zip archives, read in any order without unpacking them: `shards/0001.tar/0042.jpg` is a member of an
//! archive.
//!
//! Archives are untrusted. Nothing is allocated by what they claim, and what a member unpacks to is bounded. An archive with a
//! link, a device, or a name that leads out of it is refused as a whole.
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

/// Where a member's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Of a tar archive the first byte; of a zip archive the header before it.
    pub offset: u64,
    /// Bytes that the member takes in the archive.
    pub packed: u64,
    /// Bytes after unpacking, as the archive claims.
    pub size: u64,
    pub coding: Coding,
}

/// How a member is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coding {
    /// As it is, in a tar archive.
    Tar,
    /// In a zip archive, with a checksum.
    Zip { deflated: bool, sum: u32 },
}

/// The kinds of archives, by the last extension in lower case.
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
    /// Members of such a file are found only by unpacking all before them.
    Compressed,
}

/// The archive and the member that a path names; `None` if none of its folders is a file.
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

/// The name of a member, without `./` before it; `None` for a folder.
///
/// # Errors
/// [`Kind::Data`]: it leads out of the archive, is too long, or is not in UTF-8.
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

/// Where the members of an archive are. Of names only hashes are kept: archives of a run may have millions of members.
#[derive(Debug)]
struct Index(Vec<(u128, Place)>);

/// Names a member in an index.
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

/// The archives of a run whose members were asked for.
#[derive(Debug, Default)]
pub(super) struct Archives(Mutex<HashMap<PathBuf, Arc<Index>>>);

impl Archives {
    /// The bytes of a member, at most `most`.
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

/// The bytes of the member at a place.
///
/// # Errors
/// [`Kind::Data`]: it is damaged, larger than `most`, or of another size than the archive claims.
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

/// A part of a file, read at its own position, so that threads may share the file.
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
