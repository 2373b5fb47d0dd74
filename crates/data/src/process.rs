//! Iterates over the rows of a data set after parsing, as `tunesmith process` writes them. It also tells
//! `tunesmith ingest` which rows of a file are duplicates.
use super::dataset::Dataset;
use super::inputs::Input;
use super::parsed_row::Parsed;
use super::progress::Progress;
use super::row::Form;
use super::row_pass::{Walker, threads};
use super::source::RawRow;
use super::source_texts::source_texts;
use super::split::{RowId, Split};
use super::{Counts, dedupe};
use std::path::Path;
use tunesmith_base::error::Result;
use tunesmith_config::{Config, Dedupe};

/// A part of a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The rows to train on.
    Train,
    /// The rows for evaluation during training.
    Validation,
    /// The rows for evaluation after training.
    Test,
}

impl Part {
    /// All parts, in the order in which they are written.
    pub const ALL: [Self; 3] = [Self::Train, Self::Validation, Self::Test];

    /// The name in messages and file names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Test => "test",
        }
    }
}

/// The examples of a part, and the files with its rows.
fn of(dataset: &Dataset, part: Part) -> (Option<&Split>, Vec<Input>) {
    let inputs = &dataset.inputs;
    match part {
        Part::Train => (Some(&dataset.train), inputs.train.clone()),
        Part::Validation => (dataset.validation.as_ref(), inputs.of_validation()),
        Part::Test => {
            let test = inputs.test.clone().map_or_else(|| inputs.train.clone(), |input| vec![input]);
            (dataset.test.as_ref(), test)
        }
    }
}

/// The source text of each example of a part ([`super::row::source_of`]), in the order of the examples.
///
/// # Errors
/// The files cannot be read again.
pub fn sources(dataset: &Dataset, config: &Config, part: Part) -> Result<Vec<String>> {
    let (split, inputs) = of(dataset, part);
    source_texts(split.map_or(&[], |split| &split.rows), &inputs, config)
}

/// Passes the rows of a part to `take` as JSON, in the order of the files. A row that the mix repeats is passed as
/// often. Returns the number of rows, or `None` if the data set has no such part.
///
/// # Errors
/// The files cannot be read again, or `take` fails.
pub fn rows(
    dataset: &Dataset,
    config: &Config,
    part: Part,
    progress: &dyn Progress,
    take: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<Option<u64>> {
    let (split, inputs) = of(dataset, part);
    let Some(split) = split else { return Ok(None) };
    let mut wanted = split.rows.clone();
    wanted.sort_unstable();
    let mut wanted = wanted.into_iter().peekable();
    let threads = threads(config)?;
    let walker = Walker { threads: &threads, progress, max_rows: config.data.max_rows };
    let write = |row: RawRow, forms: &[Form]| {
        let Parsed { row, weight, .. } = row.parse_noting(forms)?;
        let mut row = row.into_json();
        if weight != 1.0 {
            row["loss_weight"] = weight.into();
        }
        Ok(row.to_string())
    };
    let mut count = 0;
    for (input, set) in inputs.iter().zip(0..) {
        let mut next = RowId { set, row: 0, piece: 0 };
        walker.walk(&format!("writing {}", part.name()), input, &write, &mut |text| {
            // The pieces of one row are adjacent. The row is written as often as its most frequent piece.
            let (mut last, mut times, mut most) = (None, 0, 0);
            while let Some(id) = wanted.next_if(|id| (id.set, id.row) == (next.set, next.row)) {
                times = if last == Some(id) { times + 1 } else { 1 };
                most = most.max(times);
                last = Some(id);
            }
            for _ in 0..most {
                take(&text)?;
            }
            count += most;
            next.row += 1;
            Ok(())
        })?;
    }
    Ok(Some(count))
}

/// Which of the `rows` rows of a text file remain after `data.dedupe`, with counts of those that do not.
///
/// # Errors
/// The file cannot be read, or the temporary file of signatures cannot be written.
pub fn distinct(path: &Path, rows: u32, config: &Config, progress: &dyn Progress) -> Result<(Vec<bool>, Counts)> {
    let input = Input {
        setting: "data.dedupe".to_owned(),
        name: path.display().to_string(),
        paths: vec![path.to_owned()],
        format: Some(Form::Text),
        weight: None,
    };
    let (inputs, threads) = ([input], threads(config)?);
    let walker = Walker { threads: &threads, progress, max_rows: None };
    let mut pool = Split { rows: (0..rows).map(|row| RowId { set: 0, row, piece: 0 }).collect(), ..Split::default() };
    let mut counts = Counts::default();
    if config.data.dedupe != Dedupe::None {
        dedupe::exact(&walker, &inputs, &mut pool, &mut counts)?;
    }
    if config.data.dedupe == Dedupe::Minhash {
        dedupe::near(&walker, &inputs, config.data.dedupe_threshold, &mut pool, &mut counts)?;
    }
    let mut stays = vec![false; rows as usize];
    pool.rows.iter().for_each(|id| stays[id.row as usize] = true);
    Ok((stays, counts))
}
