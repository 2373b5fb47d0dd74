//! Finds the file and line of the rows that show a picture. Neither memory nor the cache of tokenized rows keeps them,
//! so the files are read once more when an error needs them.
use std::cell::Cell;
use std::fmt::Write as _;
use std::sync::Arc;

use super::inputs::Input;
use super::picture_places::PicturePlaces;
use super::pictures::Shown;
use super::source::{self, Place};
use super::tokens::TokenSet;
use tunesmith_base::words::count;

/// Makes the search for a run's rows. Each set of tokenized rows comes with the input that it was read from.
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
            // The files have changed since the rows were read.
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

/// The file and line of row number `row` of an input, counted from 0 over all its files; `None` if the files have fewer
/// rows now.
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
