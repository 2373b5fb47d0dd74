//! What all text formats share: the byte order mark, and errors for bytes that cannot be read.
use std::io::BufRead;
use std::path::Path;

use crate::encoding::other_encoding;
use tunesmith_base::error::{Error, Result};

/// Skips a byte order mark. Returns the first byte that is not white space, if it is near the start.
pub(super) fn begin(path: &Path, reader: &mut dyn BufRead) -> Result<Option<u8>> {
    let head = reader.fill_buf().map_err(|error| unreadable(path, &error))?;
    if let Some((name, how)) = other_encoding(head) {
        return Err(Error::data(format!("{} is {name}, expected UTF-8", path.display())).hint(how));
    }
    let packed = [("gzip", b"\x1f\x8b".as_slice(), ".gz"), ("zstd", b"\x28\xb5\x2f\xfd", ".zst")];
    let columns = [("Parquet", b"PAR1".as_slice(), ".parquet"), ("Arrow", b"ARROW1", ".arrow")];
    if let Some((what, _, end)) = packed.iter().chain(&columns).find(|(_, magic, _)| head.starts_with(magic)) {
        return Err(Error::data(format!("{} holds {what}, expected text", path.display()))
            .hint(format!("its name has to end in {end}")));
    }
    let bom = if head.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
    let first = head[bom..].iter().copied().find(|byte| !byte.is_ascii_whitespace());
    reader.consume(bom);
    Ok(first)
}

/// The error of a file whose bytes cannot be read, such as a truncated archive or a row without an end.
pub(super) fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    Error::io("read", path, error).with_kind(tunesmith_base::Kind::Data)
}
