//! Walks through the members of a tar archive: POSIX (ustar, pax) and GNU archives, as `tar` and Python's `tarfile`
//! write them.
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

use super::{Coding, Place, member_name};
use tunesmith_base::error::{Error, Result};

const BLOCK: usize = 512;
/// The largest extended header, in bytes: a pax header, with name, size and times of the member behind it, or GNU's long name.
const MOST_EXTENDED: u64 = 1 << 20;

/// The bytes of an archive, read in order.
pub trait Bytes: Read {
    /// Skips `count` bytes.
    ///
    /// # Errors
    /// The archive ends earlier. A seekable archive may notice this only at the next read.
    fn skip(&mut self, count: u64) -> io::Result<()>;
}

/// An archive in a plain file, in which bytes are skipped by seeking.
pub struct Seekable(pub BufReader<File>);

impl Read for Seekable {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Bytes for Seekable {
    fn skip(&mut self, count: u64) -> io::Result<()> {
        self.0.seek_relative(i64::try_from(count).map_err(io::Error::other)?)
    }
}

/// An archive that can only be read from its beginning to its end, such as a compressed one.
pub struct Streamed<'a>(pub &'a mut dyn BufRead);

impl Read for Streamed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Bytes for Streamed<'_> {
    fn skip(&mut self, mut count: u64) -> io::Result<()> {
        while count > 0 {
            let here = self.0.fill_buf()?.len().min(usize::try_from(count).unwrap_or(usize::MAX));
            if here == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.0.consume(here);
            count -= here as u64;
        }
        Ok(())
    }
}

/// A file in a tar archive.
#[derive(Debug)]
pub struct Member {
    pub name: String,
    pub place: Place,
}

/// Iterates over the files of an archive. Call [`Self::next_file`] until it returns `None`.
pub struct Members<R> {
    bytes: R,
    /// Bytes read so far.
    at: u64,
    /// Bytes of the previous member, with its padding to a full block, that were not read.
    left: u64,
}

/// What the extended headers before a member say about it. They override the member's own header.
#[derive(Default)]
struct Extended {
    path: Option<Vec<u8>>,
    size: Option<u64>,
}

fn cut_off() -> Error {
    Error::data("the archive is cut off").hint("copy it again")
}

impl<R: Bytes> Members<R> {
    pub const fn new(bytes: R) -> Self {
        Self { bytes, at: 0, left: 0 }
    }

    /// The next file; `None` at the end.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the archive is damaged, or has members that are neither files nor folders.
    pub fn next_file(&mut self) -> Result<Option<Member>> {
        let mut extended = Extended::default();
        loop {
            self.skip(self.left)?;
            let mut header = [0; BLOCK];
            self.fill(&mut header)?;
            if header.iter().all(|byte| *byte == 0) {
                self.left = 0;
                return Ok(None);
            }
            check_sum(&header)?;
            let claimed = number(&header[124..136])?;
            let kind = header[156];
            // The size in a pax header is that of the file behind it, not that of the next header.
            let size = if matches!(kind, b'0' | 0 | b'7') { extended.size.unwrap_or(claimed) } else { claimed };
            self.left = size.checked_next_multiple_of(BLOCK as u64).ok_or_else(cut_off)?;
            match kind {
                b'0' | 0 | b'7' => {
                    let name = extended.path.take().unwrap_or_else(|| name_of(&header));
                    extended = Extended::default();
                    let Some(name) = member_name(&name)? else { continue };
                    let place = Place { offset: self.at, packed: size, size, coding: Coding::Tar };
                    return Ok(Some(Member { name, place }));
                }
                b'5' => extended = Extended::default(),
                b'x' => self.pax(size, &mut extended)?,
                b'L' if size > MOST_EXTENDED => {
                    return Err(Error::data(format!(
                        "the archive has a name of {size} bytes, at most {MOST_EXTENDED} are read"
                    )));
                }
                b'L' => extended.path = Some(text(&self.extension(size)?).to_vec()),
                // A global pax header sets defaults for all members, and no name of a file. A `K` header holds the
                // target of a link.
                b'g' | b'K' => {}
                other => {
                    let what = match other {
                        b'1' | b'2' => "a link",
                        b'3' | b'4' | b'6' => "a device or a pipe",
                        b'S' => "a sparse file",
                        _ => "a member of an unknown kind",
                    };
                    let name = extended.path.take().unwrap_or_else(|| name_of(&header));
                    let name = String::from_utf8_lossy(&name[..name.len().min(200)]).into_owned();
                    return Err(Error::data(format!("the archive has {what} ({name:?}), expected files"))
                        .hint("pack the files themselves: tar --dereference --hard-dereference"));
                }
            }
        }
    }

    /// Reads the content of the member that [`Self::next_file`] returned last, of at most `most` bytes.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the member is larger, or the archive is cut off.
    pub fn read(&mut self, member: &Member, most: u64) -> Result<Vec<u8>> {
        let size = member.place.size;
        if size > most {
            return Err(Error::data(format!("{}: {size} bytes, at most {most} are read", member.name)));
        }
        self.extension(size)
    }

    /// Reads the next `size` bytes of the current member or extended header, of which at least as many must be left.
    fn extension(&mut self, size: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.bytes.by_ref().take(size).read_to_end(&mut bytes).map_err(|error| super::unreadable(&error))?;
        self.at += bytes.len() as u64;
        self.left -= bytes.len() as u64;
        if (bytes.len() as u64) < size { Err(cut_off()) } else { Ok(bytes) }
    }

    /// Reads the path and the size from a pax header.
    fn pax(&mut self, size: u64, extended: &mut Extended) -> Result<()> {
        let damaged = || Error::data("a pax header of the archive is damaged");
        if size > MOST_EXTENDED {
            return Err(damaged());
        }
        let bytes = self.extension(size)?;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            // `LENGTH KEY=VALUE\n`, where the length counts all of it.
            let space = rest.iter().position(|byte| *byte == b' ').ok_or_else(damaged)?;
            let length = std::str::from_utf8(&rest[..space]).ok().and_then(|digits| digits.parse::<usize>().ok());
            let length = length.filter(|length| (space + 2..=rest.len()).contains(length)).ok_or_else(damaged)?;
            let (record, after) = rest.split_at(length);
            rest = after;
            let record = record[space + 1..].strip_suffix(b"\n").ok_or_else(damaged)?;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(damaged)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" => extended.path = Some(value.to_vec()),
                b"size" => {
                    let digits = std::str::from_utf8(value).ok().and_then(|digits| digits.parse().ok());
                    extended.size = Some(digits.ok_or_else(damaged)?);
                }
                _ if key.starts_with(b"GNU.sparse") => {
                    return Err(Error::data("the archive has a sparse file, expected whole files"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn fill(&mut self, header: &mut [u8; BLOCK]) -> Result<()> {
        self.bytes.read_exact(header).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => cut_off(),
            _ => super::unreadable(&error),
        })?;
        self.at += BLOCK as u64;
        Ok(())
    }

    fn skip(&mut self, count: u64) -> Result<()> {
        self.bytes.skip(count).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => cut_off(),
            _ => super::unreadable(&error),
        })?;
        self.at = self.at.checked_add(count).ok_or_else(cut_off)?;
        Ok(())
    }
}

/// The bytes of a field up to its first zero byte.
fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn name_of(header: &[u8; BLOCK]) -> Vec<u8> {
    let name = text(&header[..100]);
    // GNU's format has times where POSIX has the folders of a long name.
    let prefix = if &header[257..263] == b"ustar\0" { text(&header[345..500]) } else { &[] };
    if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
}

/// A number of a header: octal digits, or a big-endian integer if the first bit is set.
fn number(field: &[u8]) -> Result<u64> {
    let damaged = || Error::data("the archive is damaged: a member's size is no number");
    if field[0] & 0x80 != 0 {
        let wide = field[1..].iter().try_fold(u64::from(field[0] & 0x7f), |value, byte| {
            value.checked_mul(256).map(|value| value | u64::from(*byte))
        });
        return wide.ok_or_else(damaged);
    }
    let digits = text(field).trim_ascii();
    digits.iter().try_fold(0_u64, |value, digit| match digit {
        b'0'..=b'7' => value.checked_mul(8).map(|value| value + u64::from(digit - b'0')).ok_or_else(damaged),
        _ => Err(damaged()),
    })
}

fn check_sum(header: &[u8; BLOCK]) -> Result<()> {
    let sum = |signed: bool| {
        let value = |byte: u8| if signed { i64::from(byte as i8) } else { i64::from(byte) };
        let place = 148..156;
        header.iter().enumerate().map(|(at, &byte)| if place.contains(&at) { 32 } else { value(byte) }).sum::<i64>()
    };
    let stored = number(&header[148..156]).ok().and_then(|stored| i64::try_from(stored).ok());
    // Old programs summed signed bytes.
    if stored == Some(sum(false)) || stored == Some(sum(true)) {
        Ok(())
    } else {
        Err(Error::data("the archive is damaged, or no tar archive"))
    }
}
