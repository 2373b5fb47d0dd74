//! The rows of a data set as they were understood, in one form: what `tunesmith process` writes; and which rows of a file
//! repeat others, for `tunesmith ingest`.
use super::dataset::{Dataset, Progress, Silent, threads};
use super::fields::Parsed;
use super::inputs::Input;
use super::row::Form;
use super::source::RawRow;
use super::split::{RowId, Split};
use super::walk::Walker;
use super::{Counts, dedupe};
use std::path::Path;
use tunesmith_base::error::Result;
use tunesmith_config::{Config, Dedupe};

/// The parts of a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// What is trained on.
    Train,
    /// What is measured during training.
    Validation,
    /// What is kept for the end.
    Test,
}

impl Part {
    /// All parts.
    pub const ALL: [Self; 3] = [Self::Train, Self::Validation, Self::Test];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Test => "test",
        }
    }
}

/// A part, and the files that its rows are in.
fn of(dataset: &Dataset, part: Part) -> (Option<&Split>, Vec<Input>) {
    let inputs = &dataset.inputs;
    let own = |input: &Option<Input>| input.clone().map_or_else(|| inputs.train.clone(), |input| vec![input]);
    match part {
        Part::Train => (Some(&dataset.train), inputs.train.clone()),
        Part::Validation => (dataset.validation.as_ref(), own(&inputs.validation)),
        Part::Test => (dataset.test.as_ref(), own(&inputs.test)),
    }
}

/// What each example of a part is asked by ([`super::row::source_of`]), in their order; nothing for the later pieces of a text.
///
/// # Errors
/// Those of reading the files again.
pub fn sources(dataset: &Dataset, config: &Config, part: Part) -> Result<Vec<String>> {
    let (split, inputs) = of(dataset, part);
    let mut wanted = split.into_iter().flat_map(|split| &split.rows).copied().peekable();
    let threads = threads(config)?;
    let walker = Walker { threads: &threads, progress: &Silent, max_rows: config.data.max_rows };
    let mut found = Vec::new();
    for (input, set) in inputs.iter().zip(0..) {
        let mut row = 0;
        walker.walk("reading questions", input, &|row: RawRow, forms: &[Form]| row.source(forms), &mut |source| {
            let mut source = Some(source);
            while wanted.next_if(|id| (id.set, id.row) == (set, row)).is_some() {
                found.push(source.take().unwrap_or_default());
            }
            row += 1;
            Ok(())
        })?;
    }
    Ok(found)
}

/// Hands the rows of a part on as JSON, in the order of their files; a row that a mix repeats comes as often. Returns how
/// many there are; none if the data set has no such part.
///
/// # Errors
/// Those of reading the files again, and whatever `take` returns.
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
            // Pieces of one row stand together: the row comes as often as the piece that comes most often.
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

/// For each of the `rows` rows of a file of texts, whether `data.dedupe` leaves it in; and how many it does not.
///
/// # Errors
/// Those of reading the file, and of the file that signatures lie in meanwhile.
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
