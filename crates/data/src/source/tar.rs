//! Reads rows from tar archives, one for each stem ([`samples`](super::samples)). Images stay in an uncompressed
//! archive and are read when they are needed. Images of a compressed archive are taken out of it, as `data:` URIs.
use std::io::BufRead;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::samples::{Kind, Samples, reference};
use super::{MAX_ROW_BYTES, Read, TakeRow};
use crate::archive::tar::{Members, Streamed};
use tunesmith_base::error::Result;

pub(super) const READ: Read = Read::Text(read);

fn read(path: &Path, reader: &mut dyn BufRead, take: TakeRow<'_>) -> Result<()> {
    let stays = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("tar"));
    let mut members = Members::new(Streamed(reader));
    let mut samples = Samples::new(path, take);
    while let Some(member) = members.next_file().map_err(|error| error.context(path.display()))? {
        let goes_on = samples.add(&member.name, &mut |kind| match kind {
            Kind::Picture if stays => reference(path, &member.name),
            Kind::Picture => {
                // Base64 writes three bytes as four letters.
                let bytes = members.read(&member, MAX_ROW_BYTES as u64 / 4 * 3)?;
                Ok(format!("data:;base64,{}", STANDARD.encode(bytes)).into_bytes())
            }
            _ => members.read(&member, MAX_ROW_BYTES as u64),
        })?;
        if !goes_on {
            return Ok(());
        }
    }
    samples.finish().map(drop)
}
