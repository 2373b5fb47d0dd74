//! Reads rows from zip archives, one for each stem ([`samples`](super::samples)). Images stay in the archive and are
//! read when they are needed.
use std::cell::Cell;
use std::fs::File;
use std::path::Path;

use super::samples::{Kind, Samples, reference};
use super::{MAX_ROW_BYTES, Read, TakeRow};
use crate::archive;
use tunesmith_base::error::Result;

pub(super) const READ: Read = Read::Whole(read);

#[allow(clippy::needless_pass_by_value, reason = "the type of every reader of whole files")]
fn read(path: &Path, file: File, bytes: &Cell<u64>, take: TakeRow<'_>) -> Result<()> {
    let mut samples = Samples::new(path, take);
    let mut goes_on = true;
    let members = archive::zip::members(&file, &mut |name, place| {
        bytes.set(bytes.get() + place.packed);
        goes_on = samples.add(&name, &mut |kind| match kind {
            Kind::Picture => reference(path, &name),
            _ => archive::read(&file, place, MAX_ROW_BYTES as u64),
        })?;
        Ok(goes_on)
    });
    members.map_err(|error| {
        // Errors of a row name the archive already.
        let named = error.message().starts_with(&path.display().to_string());
        if named { error } else { error.context(path.display()) }
    })?;
    if goes_on { samples.finish().map(drop) } else { Ok(()) }
}
