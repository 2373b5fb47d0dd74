//! Reads the parts of a DOCX file, which is a zip archive. Archives are untrusted: what a part unpacks to is bounded,
//! and so is the number of entries.
use std::fs::File;
use std::io::{BufReader, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use zip::{CompressionMethod, ZipArchive};

use crate::catch_panic::isolated;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

/// The end record of a zip archive is within this many bytes of its end.
const TAIL: u64 = (64 << 10) + 64;
/// The signature of a zip64 archive: more than 65,535 entries, or more than 4 GiB.
const ZIP64: &[u8] = b"PK\x06\x07";

pub(super) struct DocxArchive<'a> {
    path: &'a Path,
    zip: ZipArchive<BufReader<File>>,
}

impl<'a> DocxArchive<'a> {
    /// Reads the list of entries.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the file cannot be read, or is not a zip archive.
    pub(super) fn open(path: &'a Path) -> Result<Self> {
        let unreadable = |error| Error::io("read", path, &error).with_kind(tunesmith_base::Kind::Data);
        let mut file = files::open(path).map_err(unreadable)?;
        // Entries are held in memory. Without zip64 there are at most 65,535 of them.
        if read_tail(&mut file).map_err(unreadable)?.windows(ZIP64.len()).any(|bytes| bytes == ZIP64) {
            return Err(broken(path, "a zip archive of the 64-bit form, which no DOCX file needs"));
        }
        let zip = isolated("reading a zip archive", || ZipArchive::new(BufReader::new(file)))
            .map_err(|error| error.context(path.display()))?;
        Ok(Self { path, zip: zip.map_err(|error| broken(path, "broken zip archive").caused_by(error))? })
    }

    /// A part as text, of at most `most` bytes; `None` if there is no such part.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the part is broken, encrypted, too large or not in UTF-8.
    pub(super) fn part(&mut self, name: &str, most: u64) -> Result<Option<String>> {
        isolated("reading a zip archive", || unpack(&mut self.zip, name, most))
            .and_then(|part| part)
            .map_err(|error| error.context(self.path.display()))
    }
}

/// The error of a file that is not a DOCX file.
pub(super) fn broken(path: &Path, what: &str) -> Error {
    Error::data(format!("{}: {what}", path.display()))
        .hint("expected a DOCX file; a .doc file has to be saved as .docx")
}

/// The last [`TAIL`] bytes. Afterwards the file is at its start.
fn read_tail(file: &mut File) -> std::io::Result<Vec<u8>> {
    let size = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(size.saturating_sub(TAIL)))?;
    let mut tail = Vec::new();
    (&*file).take(TAIL).read_to_end(&mut tail)?;
    file.rewind()?;
    Ok(tail)
}

fn unpack(archive: &mut ZipArchive<BufReader<File>>, name: &str, most: u64) -> Result<Option<String>> {
    let broken = |what: String| Error::data(format!("{name}: {what}"));
    let Some(index) = archive.index_for_name(name) else { return Ok(None) };
    let entry = archive.by_index_raw(index).map_err(|error| broken("broken zip archive".into()).caused_by(error))?;
    if entry.encrypted() {
        return Err(broken("encrypted".into()).hint("save it without a password"));
    }
    let (method, sum) = (entry.compression(), entry.crc32());
    let mut bytes = Vec::new();
    // The size in the archive is untrusted, so reading is bounded too.
    let read = match method {
        CompressionMethod::STORE => entry.take(most + 1).read_to_end(&mut bytes),
        CompressionMethod::DEFLATE => flate2::read::DeflateDecoder::new(entry).take(most + 1).read_to_end(&mut bytes),
        other => return Err(broken(format!("compressed with {other}, expected Deflate or no compression"))),
    };
    read.map_err(|error| broken("broken zip archive".into()).caused_by(error))?;
    if bytes.len() as u64 > most {
        return Err(broken(format!("unpacks to more than {} MiB", most >> 20)));
    }
    let mut check = flate2::Crc::new();
    check.update(&bytes);
    if check.sum() != sum {
        return Err(broken("broken zip archive: its checksum does not match".into()));
    }
    let text = String::from_utf8(bytes)
        .map_err(|error| broken(format!("invalid UTF-8 at byte {}", error.utf8_error().valid_up_to() + 1)))?;
    Ok(Some(match text.strip_prefix('\u{feff}') {
        Some(rest) => rest.to_owned(),
        None => text,
    }))
}
