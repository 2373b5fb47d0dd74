//! Reads rows from Arrow IPC files and streams, such as Feather files and the cache files of Hugging Face's `datasets`.
use std::cell::Cell;
use std::fs::File;
use std::io::{BufReader, Read as _, Seek, SeekFrom};
use std::path::Path;

use arrow_ipc::reader::StreamReader;

use super::columns::{ROWS, Rows, library};
use super::compressed::Counted;
use super::{Read, TakeRow};
use crate::catch_panic::isolated;
use tunesmith_base::error::{Error, Result};

/// The largest batch of an Arrow file, unpacked, in bytes.
const MAX_BATCH_BYTES: u64 = 4 << 30;
/// The largest header of an Arrow message, in bytes. A batch of a wide table has some kilobytes.
const MAX_HEADER_BYTES: u64 = 64 << 20;
/// The magic bytes of an Arrow IPC file, with padding. A stream follows.
const ARROW_MAGIC: &[u8; 8] = b"ARROW1\0\0";

pub(super) const READ: Read = Read::Whole(read);

fn read(path: &Path, mut file: File, bytes: &Cell<u64>, take: TakeRow<'_>) -> Result<()> {
    let begin = check_messages(&mut file)
        .and_then(|begin| file.seek(SeekFrom::Start(begin)).map(|_| begin))
        .map_err(|error| Error::data(format!("{}: malformed Arrow file", path.display())).caused_by(error))?;
    bytes.set(begin);
    let reader = BufReader::with_capacity(1 << 20, Counted { inner: file, bytes });
    let opened = isolated("reading the file", || StreamReader::try_new(reader, None));
    let mut batches = library(path, "Arrow", opened)?;
    let mut rows = Rows::new(path, take);
    while let Some(batch) =
        isolated("reading rows", || batches.next()).map_err(|error| error.context(path.display()))?
    {
        let batch = library(path, "Arrow", Ok(batch))?;
        for start in (0..batch.num_rows()).step_by(ROWS) {
            if !rows.take(&batch.slice(start, ROWS.min(batch.num_rows() - start)))? {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Checks the sizes of all messages of an Arrow file before the library allocates memory for them. Returns the offset
/// of the stream.
fn check_messages(file: &mut File) -> std::io::Result<u64> {
    let size = file.metadata()?.len();
    let wrong = |what: &str| Err(std::io::Error::other(what.to_owned()));
    let mut magic = [0; ARROW_MAGIC.len()];
    let begin = match file.read_exact(&mut magic) {
        Ok(()) if magic == *ARROW_MAGIC => ARROW_MAGIC.len() as u64,
        Ok(()) if magic.starts_with(b"FEA1") => return wrong("Feather version 1, expected version 2 (Arrow IPC)"),
        _ => 0,
    };
    let mut at = begin;
    loop {
        let mut length = [0; 4];
        file.seek(SeekFrom::Start(at))?;
        if at == size && at > begin {
            // A stream may end without a mark. A file ends with a footer, so that the rest of this one is missing.
            return if begin == 0 { Ok(begin) } else { wrong("it ends after a message, without a footer") };
        }
        file.read_exact(&mut length)?;
        at += 4;
        if length == [0xff; 4] {
            file.read_exact(&mut length)?;
            at += 4;
        }
        let header = u64::from(u32::from_le_bytes(length));
        if header == 0 {
            return if begin == 0 || ends_with_footer(file, size)? {
                Ok(begin)
            } else {
                wrong("it does not end with a footer")
            };
        }
        if header > MAX_HEADER_BYTES || at + header > size {
            return wrong("a message's header is longer than the file");
        }
        let mut bytes = vec![0; header as usize];
        file.read_exact(&mut bytes)?;
        at += header;
        let Ok(message) = arrow_ipc::root_as_message(&bytes) else { return wrong("a message has no valid header") };
        let Some(end) = u64::try_from(message.bodyLength()).ok().and_then(|body| at.checked_add(body)) else {
            return wrong("a message has a negative length");
        };
        if end > size {
            return wrong("a message goes beyond the end of the file");
        }
        let batch = message.header_as_record_batch();
        let batch = batch.or_else(|| message.header_as_dictionary_batch().and_then(|dictionary| dictionary.data()));
        if let Some(batch) = batch.filter(|batch| batch.compression().is_some()) {
            let mut unpacked = 0_u64;
            for buffer in batch.buffers().into_iter().flatten().filter(|buffer| buffer.length() >= 8) {
                let place = u64::try_from(buffer.offset()).ok().and_then(|offset| at.checked_add(offset));
                let Some(place) = place.filter(|place| place.saturating_add(8) <= end) else {
                    return wrong("a buffer lies outside of its message");
                };
                let mut length = [0; 8];
                file.seek(SeekFrom::Start(place))?;
                file.read_exact(&mut length)?;
                // -1 marks an uncompressed buffer.
                unpacked = unpacked.saturating_add(u64::try_from(i64::from_le_bytes(length)).unwrap_or(0));
            }
            if unpacked > MAX_BATCH_BYTES {
                return wrong("a batch unpacks to more than 4 GiB");
            }
        }
        at = end;
    }
}

/// Whether the file ends with the magic bytes, as every whole Arrow IPC file does.
fn ends_with_footer(file: &mut File, size: u64) -> std::io::Result<bool> {
    let magic = &ARROW_MAGIC[..6];
    let mut end = [0; 6];
    file.seek(SeekFrom::Start(size.saturating_sub(end.len() as u64)))?;
    file.read_exact(&mut end)?;
    Ok(end == *magic)
}
