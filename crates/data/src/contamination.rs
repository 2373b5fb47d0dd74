//! Finds training rows that are also in the validation or test rows. A training row is contaminated if it has the same
//! words in the same order as an evaluation row, or at least half of that row's 13-grams. 13-grams in many evaluation
//! rows (instructions, boilerplate) do not count, nor do system messages.
use std::collections::{HashMap, HashSet};

use super::dedupe::{Members, leave_out};
use super::inputs::Inputs;
use super::minhash::{sequence, shingles};
use super::report::Counts;
use super::row::{Form, Row};
use super::row_pass::Walker;
use super::source::RawRow;
use super::split::{RowId, Split};
use tunesmith_base::error::Result;

/// Words per n-gram, as for GPT-3.
const WORDS: usize = 13;
/// An n-gram in more evaluation rows than this, and in more than a tenth of them, is boilerplate.
const COMMON: usize = 8;

/// Hashes of a row's words.
struct Sketch {
    whole: Option<u64>,
    /// The n-grams, sorted, each once; empty if the row has fewer words than an n-gram.
    sequences: Vec<u64>,
}

impl Sketch {
    fn of(row: &Row) -> Self {
        let (words, images) = (row.words(false), row.images_hash());
        let whole = (!words.is_empty()).then(|| sequence(&words) ^ images);
        let mut sequences = if words.len() < WORDS { Vec::new() } else { shingles(&words, WORDS) };
        // The same question about another image is another row.
        if images != 0 {
            for sequence in &mut sequences {
                *sequence ^= images;
            }
            sequences.sort_unstable();
        }
        Self { whole, sequences }
    }
}

/// An index of the evaluation rows.
#[derive(Default)]
struct Evaluation {
    whole: HashSet<u64>,
    /// The rows with each n-gram.
    rows_of: HashMap<u64, Vec<u32>>,
    /// How many n-grams of each row count.
    sequences: Vec<u32>,
}

impl Evaluation {
    fn add(&mut self, sketch: &Sketch) {
        let row = self.sequences.len() as u32;
        self.whole.extend(sketch.whole);
        for &sequence in &sketch.sequences {
            self.rows_of.entry(sequence).or_default().push(row);
        }
        self.sequences.push(sketch.sequences.len() as u32);
    }

    /// Removes n-grams that are [`COMMON`].
    fn finish(&mut self) {
        let (limit, sequences) = (COMMON.max(self.sequences.len() / 10), &mut self.sequences);
        self.rows_of.retain(|_, rows| {
            let stays = rows.len() <= limit;
            if !stays {
                for &row in &*rows {
                    sequences[row as usize] -= 1;
                }
            }
            stays
        });
    }

    fn has(&self, sketch: &Sketch) -> bool {
        if sketch.whole.is_some_and(|whole| self.whole.contains(&whole)) {
            return true;
        }
        let mut shared: HashMap<u32, u32> = HashMap::new();
        for row in sketch.sequences.iter().filter_map(|sequence| self.rows_of.get(sequence)).flatten() {
            *shared.entry(*row).or_default() += 1;
        }
        shared.into_iter().any(|(row, count)| 2 * count >= self.sequences[row as usize])
    }
}

/// Finds the training rows of `pool` that are also evaluation rows, and counts them. With `drop` they are left out.
///
/// The evaluation rows are the validation and test rows of `inputs`, and `held_out` if the validation rows come from
/// the training files.
///
/// # Errors
/// The files cannot be read again.
pub fn check(
    walker: &Walker<'_>,
    inputs: &Inputs,
    held_out: Option<&Split>,
    pool: &mut Split,
    drop: bool,
    counts: &mut Counts,
) -> Result<()> {
    let mut evaluation = Evaluation::default();
    let sketch = |row: RawRow, forms: &[Form]| Ok(Sketch::of(&row.parse(forms)?));
    for input in inputs.validation.iter().chain(&inputs.test) {
        walker.walk("reading evaluation rows", input, &sketch, &mut |sketch| {
            evaluation.add(&sketch);
            Ok(())
        })?;
    }
    for (set, input) in inputs.train.iter().enumerate().filter(|_| held_out.is_some()) {
        let mut members = Members::of(held_out.map_or(&[], |split| &split.rows), set);
        walker.walk("reading evaluation rows", input, &sketch, &mut |sketch| {
            if members.next().is_some() {
                evaluation.add(&sketch);
            }
            Ok(())
        })?;
    }
    evaluation.finish();
    if evaluation.sequences.is_empty() {
        return Ok(());
    }
    let mut found: Vec<RowId> = Vec::new();
    for (set, input) in inputs.train.iter().enumerate() {
        let mut members = Members::of(&pool.rows, set);
        let look = |row: RawRow, forms: &[Form]| {
            let place = row.place.clone();
            Ok((place, evaluation.has(&Sketch::of(&row.parse(forms)?))))
        };
        walker.walk("looking for evaluation rows in train", input, &look, &mut |(place, is_known)| {
            if let Some(id) = members.next().filter(|_| is_known) {
                found.push(id);
                counts.contaminated.add(place);
            }
            Ok(())
        })?;
    }
    if drop {
        leave_out(pool, &found);
    }
    Ok(())
}
