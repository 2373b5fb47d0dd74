//! Leaves out rows that duplicate an earlier one: exactly (by the hash of the normalized row) or nearly (by `MinHash`).
//! The first row stays. Rows are compared across all sources.
use std::collections::HashSet;
use std::slice::from_ref;

use super::batch::Example;
use super::clusters::Clustering;
use super::inputs::Input;
use super::minhash::{band, bands, signature, similarity};
use super::report::{Counts, NAMED_ROWS};
use super::row_pass::Walker;
use super::split::{RowId, Split};
use super::tokens::{TokenSet, TokenWriter};
use tunesmith_base::error::{Error, Result};

/// How many earlier rows of a bucket a row is compared with.
const COMPARED: usize = 16;

/// Follows a pass over one token set and tells which of its rows belong to a split.
pub struct Members<'a> {
    rows: std::iter::Peekable<std::iter::Copied<std::slice::Iter<'a, RowId>>>,
    next: RowId,
}

impl<'a> Members<'a> {
    /// Starts at the first row of `set`. `rows` must be sorted.
    pub fn of(rows: &'a [RowId], set: usize) -> Self {
        let set = set as u32;
        let begin = rows.partition_point(|id| id.set < set);
        Self { rows: rows[begin..].iter().copied().peekable(), next: RowId { set, row: 0, piece: 0 } }
    }

    /// Moves to the next row of the pass. Returns its id if it belongs to the split.
    pub fn next(&mut self) -> Option<RowId> {
        let id = self.next;
        self.next.row += 1;
        self.rows.next_if_eq(&id)
    }
}

/// Leaves out exact duplicates of earlier rows.
///
/// # Errors
/// The files cannot be read again.
pub fn exact(walker: &Walker<'_>, inputs: &[Input], pool: &mut Split, counts: &mut Counts) -> Result<()> {
    let (mut seen, mut dropped) = (HashSet::new(), Vec::new());
    for (set, input) in inputs.iter().enumerate() {
        let mut members = Members::of(&pool.rows, set);
        let hash = |row: super::source::RawRow, forms: &[super::row::Form]| {
            let place = row.place.clone();
            let text = row.parse(forms)?.into_json().to_string();
            let hash = *blake3::hash(text.as_bytes()).as_bytes().first_chunk::<16>().expect("32 bytes");
            Ok((place, u128::from_le_bytes(hash)))
        };
        walker.walk("looking for duplicates", input, &hash, &mut |(place, hash)| {
            if let Some(id) = members.next()
                && !seen.insert(hash)
            {
                dropped.push(id);
                counts.duplicates.add(place);
            }
            Ok(())
        })?;
    }
    leave_out(pool, &dropped);
    Ok(())
}

/// Removes rows from a split. Both must be sorted.
pub fn leave_out(pool: &mut Split, dropped: &[RowId]) {
    pool.rows.retain(|id| dropped.binary_search(id).is_err());
}

/// Leaves out rows whose estimated Jaccard similarity to an earlier row is at least `threshold`, directly or over a
/// chain of similar rows.
///
/// # Errors
/// The files cannot be read again, or the temporary file of signatures cannot be written.
pub fn near(
    walker: &Walker<'_>,
    inputs: &[Input],
    threshold: f64,
    pool: &mut Split,
    counts: &mut Counts,
) -> Result<()> {
    let dir = std::env::temp_dir();
    let mut writer = TokenWriter::temporary(&dir).map_err(|error| Error::io("write to", &dir, &error))?;
    let sign = |row: super::source::RawRow, forms: &[super::row::Form]| {
        let row = row.parse(forms)?;
        let signature = signature(&row.words(true));
        // Rows with other images are not alike in any number.
        let images = row.images_hash() as u32;
        Ok(signature.map(|numbers| numbers.into_iter().map(|number| number ^ images).collect::<Vec<_>>()))
    };
    for (set, input) in inputs.iter().enumerate() {
        let mut members = Members::of(&pool.rows, set);
        walker.walk("looking for near-duplicates", input, &sign, &mut |signature| {
            // Signatures are on disk, stored like token rows: 512 bytes per row are too much for memory.
            let stored = |numbers: Vec<u32>| {
                let labels = numbers.iter().map(|&number| number as i32).collect();
                Example { input_ids: numbers, labels }
            };
            if members.next().is_some() {
                writer.push(signature.map(stored).as_ref().map(|stored| (from_ref(stored), 1.0)))?;
            }
            Ok(())
        })?;
    }
    let signatures = writer.finish(&Counts::default())?;
    let roots = walker.threads.install(|| clusters(&signatures, threshold))?;
    let repeated = (0..).zip(&roots).filter(|(row, root)| row != *root);
    let dropped: Vec<RowId> = repeated.map(|(row, _): (u32, _)| pool.rows[row as usize]).collect();
    let named = &dropped[..dropped.len().min(NAMED_ROWS)];
    places(walker, inputs, named)?.into_iter().for_each(|place| counts.near_duplicates.add(place));
    counts.near_duplicates.rows += (dropped.len() - named.len()) as u64;
    leave_out(pool, &dropped);
    Ok(())
}

/// The `file:line` of rows, which must be sorted. Reads the files again up to the last of these rows, because the
/// places of all rows would not fit into memory.
fn places(walker: &Walker<'_>, inputs: &[Input], rows: &[RowId]) -> Result<Vec<String>> {
    let mut places = Vec::with_capacity(rows.len());
    for ids in rows.chunk_by(|one, other| one.set == other.set) {
        let last = ids.last().map_or(0, |id| id.row as usize + 1);
        let short = Walker { max_rows: Some(last), ..*walker };
        let mut members = Members::of(ids, ids[0].set as usize);
        let place = |row: super::source::RawRow, _: &[super::row::Form]| Ok(row.place);
        short.walk("naming near-duplicates", &inputs[ids[0].set as usize], &place, &mut |place| {
            if members.next().is_some() {
                places.push(place.to_string());
            }
            Ok(())
        })?;
    }
    Ok(places)
}

/// For each row, the first row of its cluster. Two rows are in one cluster if a chain of similar rows connects them.
fn clusters(signatures: &TokenSet, threshold: f64) -> Result<Vec<u32>> {
    let (bands, rows) = bands(threshold);
    let clustering = Clustering {
        bands,
        compared: COMPARED,
        read: |row: u32| {
            let examples = signatures.read(row)?.0.into_iter();
            Ok(examples.flat_map(|one| one.input_ids).collect::<Vec<u32>>())
        },
        key: |signature: &Vec<u32>, number| band(signature, number, rows),
        alike: |one: &Vec<u32>, other: &Vec<u32>| similarity(one, other) >= threshold,
    };
    let usable: Vec<u32> = signatures.usable().collect();
    clustering.roots(signatures.rows(), &usable, &mut |_, _| {})
}
