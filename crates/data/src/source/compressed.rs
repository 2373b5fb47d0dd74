//! Decompresses files while they are read. Unpacked bytes are not kept. A row without an end is an error before it
//! fills the memory, however small the file is on disk.
use std::cell::Cell;
use std::fs::File;
use std::io::{BufRead, BufReader, Error, Read, Result};

/// How a file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstandard,
}

impl Compression {
    /// The compression of a file by its last extension in lower case, one of [`tunesmith_base::registry::COMPRESSED`].
    pub(super) fn of(extension: &str) -> Self {
        match extension {
            "gz" => Self::Gzip,
            "zst" | "zstd" => Self::Zstandard,
            _ => Self::None,
        }
    }
}

/// Bytes per read from disk.
const PIECE: usize = 1 << 20;
/// The largest window of a Zstandard frame, as a power of two: the default of `zstd -d`.
const ZSTD_WINDOW: u32 = 27;

/// A reader of the unpacked bytes of `file`. `bytes` counts the bytes read from disk. `since_row` counts unpacked bytes
/// and must stay below `limit`; the caller sets it to 0 after each row.
pub(super) fn reader<'a>(
    file: File,
    compression: Compression,
    bytes: &'a Cell<u64>,
    since_row: &'a Cell<u64>,
    limit: u64,
) -> Result<impl BufRead + 'a> {
    let counted = Counted { inner: file, bytes };
    let inner: Box<dyn Read + 'a> = match compression {
        Compression::None => Box::new(counted),
        // A file may consist of several archives, one after the other.
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(PIECE, counted))),
        Compression::Zstandard => {
            let mut decoder = zstd::stream::read::Decoder::new(counted)?;
            decoder.window_log_max(ZSTD_WINDOW)?;
            Box::new(decoder)
        }
    };
    // Buffers read ahead of the rows.
    Ok(BufReader::with_capacity(PIECE, Limited { inner, since_row, limit: limit + 2 * PIECE as u64 }))
}

/// Counts the bytes that are read.
pub(super) struct Counted<'a> {
    pub(super) inner: File,
    pub(super) bytes: &'a Cell<u64>,
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let read = self.inner.read(buffer)?;
        self.bytes.set(self.bytes.get() + read as u64);
        Ok(read)
    }
}

struct Limited<'a> {
    inner: Box<dyn Read + 'a>,
    since_row: &'a Cell<u64>,
    limit: u64,
}

impl Read for Limited<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let read = self.inner.read(buffer)?;
        self.since_row.set(self.since_row.get() + read as u64);
        if self.since_row.get() > self.limit {
            return Err(Error::other(format!("a row takes more than {} MiB", self.limit >> 20)));
        }
        Ok(read)
    }
}
