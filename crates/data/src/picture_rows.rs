//! Finds the rows again that show a picture. Neither memory nor the cache keeps the file and line of a row, so the files are read once
//! more.
use std::cell::Cell;
use std::fmt::Write as _;
use std::sync::Arc;

use super::inputs::Input;
use super::picture_places::PicturePlaces;
use super::pictures::Shown;
use super::source::{self, Place};
use super::tokens::TokenSet;
use tunesmith_base::words::count;

/// The places of the pictures of a run's rows, each set with the files that it was read from.
pub fn places(sets: Vec<(Arc<TokenSet>, Input)>) -> PicturePlaces {
    PicturePlaces::new(move |name| {
        let mut rows = sets.iter().flat_map(|(set, input)| {
            let shows = |shown: &Shown| shown.name() == name;
            let rows = set.all_pictures().iter().filter(move |(_, examples)| examples.iter().flatten().any(shows));
            rows.map(move |(row, _)| (input, *row))
        });
        let (input, row) = rows.next()?;
        let mut place = match place_of(input, row) {
            Some(place) => place.to_string(),
            // The files have changed since.
            None => format!("{}: row {}", input.name, u64::from(row) + 1),
        };
        let more = rows.count();
        if more > 0 {
            // A String never fails.
            let _ = write!(place, " and {}", count(more, "more row"));
        }
        Some(place)
    })
}

/// The file and line of a row of an input; `None` if it is no longer there.
fn place_of(input: &Input, row: u32) -> Option<Place> {
    let mut left = row as usize + 1;
    for path in &input.paths {
        let mut last = None;
        source::read(path, input.format, Some(left), &Cell::new(0), &mut |row, _| {
            left -= 1;
            last = Some(row.place);
            Ok(())
        })
        .ok()?;
        if left == 0 {
            return last;
        }
    }
    None
}
