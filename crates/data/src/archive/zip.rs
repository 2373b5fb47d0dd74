//! Lists the members of a zip archive from its central directory, which is at the end of the file.
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt as _;

use super::{Coding, Part, Place, member_name};
use tunesmith_base::error::{Error, Result};

/// Bytes of the end-of-central-directory record. A comment may follow it.
const END: usize = 22;
const LONGEST_COMMENT: usize = 0xffff;
const END_64: usize = 56;
const LOCATOR_64: usize = 20;
const ENTRY: usize = 46;
const HEADER: usize = 30;

fn damaged() -> Error {
    Error::data("the archive is damaged, cut off, or no zip archive")
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// Where the central directory of an archive is.
struct Directory {
    entries: u64,
    offset: u64,
    /// The size of the directory, in bytes.
    size: u64,
}

fn exactly(file: &File, at: u64, bytes: &mut [u8]) -> Result<()> {
    file.read_exact_at(bytes, at).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => damaged(),
        _ => super::unreadable(&error),
    })
}

impl Directory {
    fn of(file: &File) -> Result<Self> {
        let size = file.metadata().map_err(|error| super::unreadable(&error))?.len();
        let length = size.min((END + LONGEST_COMMENT) as u64) as usize;
        let mut tail = vec![0; length];
        exactly(file, size - length as u64, &mut tail)?;
        let is_end = |at: &usize| {
            tail[*at..].starts_with(b"PK\x05\x06") && at + END + usize::from(u16_at(&tail, at + 20)) == length
        };
        let at = (0..=length.checked_sub(END).ok_or_else(damaged)?).rev().find(is_end).ok_or_else(damaged)?;
        let end = &tail[at..];
        let position = size - (length - at) as u64;
        let in_parts = || Error::data("a zip archive in several files, expected one file");
        if u16_at(end, 4) != u16_at(end, 6) || u16_at(end, 8) != u16_at(end, 10) {
            return Err(in_parts());
        }
        let mut found =
            Self { entries: u16_at(end, 10).into(), size: u32_at(end, 12).into(), offset: u32_at(end, 16).into() };
        let mut behind = position;
        let wide = u16_at(end, 10) == u16::MAX || u32_at(end, 12) == u32::MAX || u32_at(end, 16) == u32::MAX;
        if let Some(locator_at) = position.checked_sub(LOCATOR_64 as u64).filter(|_| wide) {
            let mut locator = [0; LOCATOR_64];
            exactly(file, locator_at, &mut locator)?;
            if locator.starts_with(b"PK\x06\x07") {
                behind = u64_at(&locator, 8);
                let mut end = [0; END_64];
                exactly(file, behind, &mut end)?;
                if !end.starts_with(b"PK\x06\x06") || u64_at(&end, 24) != u64_at(&end, 32) {
                    return Err(damaged());
                }
                found = Self { entries: u64_at(&end, 32), size: u64_at(&end, 40), offset: u64_at(&end, 48) };
            }
        }
        if found.offset.checked_add(found.size) != Some(behind)
            || found.entries.saturating_mul(ENTRY as u64) > found.size
        {
            return Err(damaged());
        }
        Ok(found)
    }
}

/// Passes the name and the place of every file to `take`, in the order of the directory. Stops when `take` returns
/// false.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`]: the archive is damaged or encrypted, has links, or uses another compression than
/// Deflate; the errors of `take`.
pub fn members(file: &File, take: &mut dyn FnMut(String, Place) -> Result<bool>) -> Result<()> {
    let directory = Directory::of(file)?;
    let mut bytes = BufReader::new(Part { file, at: directory.offset, left: directory.size });
    let mut read = |buffer: &mut [u8]| bytes.read_exact(buffer).map_err(|_| damaged());
    for _ in 0..directory.entries {
        let mut entry = [0; ENTRY];
        read(&mut entry)?;
        if !entry.starts_with(b"PK\x01\x02") {
            return Err(damaged());
        }
        let [name, extra, comment] = [28, 30, 32].map(|at| usize::from(u16_at(&entry, at)));
        let mut rest = vec![0; name + extra + comment];
        read(&mut rest)?;
        let (raw, extra) = (&rest[..name], &rest[name..name + extra]);
        let shown = || String::from_utf8_lossy(&raw[..raw.len().min(200)]).into_owned();
        let (by_unix, mode) = (entry[5] == 3, u32_at(&entry, 38) >> 16);
        if by_unix && !matches!(mode & 0o170_000, 0 | 0o100_000 | 0o040_000) {
            return Err(Error::data(format!("the archive has a link or a device ({:?}), expected files", shown())));
        }
        let Some(name) = member_name(raw)? else { continue };
        if u16_at(&entry, 8) & 1 != 0 {
            return Err(Error::data(format!("{name}: encrypted")).hint("save it without a password"));
        }
        let deflated = match u16_at(&entry, 10) {
            0 => false,
            8 => true,
            other => {
                let found = format!("{name}: compressed by method {other}, expected Deflate or no compression");
                return Err(Error::data(found).hint("pack it again: zip -Z deflate"));
            }
        };
        let [size, packed, offset] = wide(extra, [u32_at(&entry, 24), u32_at(&entry, 20), u32_at(&entry, 42)])?;
        if offset.checked_add(packed).is_none_or(|end| end > directory.offset) {
            return Err(damaged());
        }
        let coding = Coding::Zip { deflated, sum: u32_at(&entry, 16) };
        if !take(name, Place { offset, packed, size, coding })? {
            break;
        }
    }
    Ok(())
}

/// Three 32-bit numbers of a directory entry. Those that do not fit (`0xffff_ffff`) are replaced by the 64-bit numbers
/// in the zip64 extra field.
fn wide(extra: &[u8], numbers: [u32; 3]) -> Result<[u64; 3]> {
    let mut fields = extra;
    let mut large = &[][..];
    while fields.len() >= 4 {
        let (id, length) = (u16_at(fields, 0), usize::from(u16_at(fields, 2)));
        let field = fields.get(4..4 + length).ok_or_else(damaged)?;
        if id == 1 {
            large = field;
        }
        fields = &fields[4 + length..];
    }
    let mut found = numbers.map(u64::from);
    for number in found.iter_mut().filter(|number| **number == u64::from(u32::MAX)) {
        if large.len() < 8 {
            return Err(damaged());
        }
        *number = u64_at(large, 0);
        large = &large[8..];
    }
    Ok(found)
}

/// The offset of the first byte of the member whose local header is at `offset`.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`]: there is no local header at this offset.
pub(super) fn data_start(file: &File, offset: u64) -> Result<u64> {
    let mut header = [0; HEADER];
    exactly(file, offset, &mut header)?;
    if !header.starts_with(b"PK\x03\x04") {
        return Err(damaged());
    }
    let names = u64::from(u16_at(&header, 26)) + u64::from(u16_at(&header, 28));
    offset.checked_add(HEADER as u64 + names).ok_or_else(damaged)
}
