//! The rows of a data set as they were understood, in one form: what `tunesmith process` writes.
use super::dataset::{Dataset, Progress, threads};
use super::inputs::Input;
use super::row::Form;
use super::source::RawRow;
use super::split::{RowId, Split};
use super::walk::Walker;
use crate::config::Config;
use crate::error::Result;

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
    let inputs = &dataset.inputs;
    let own = |input: &'_ Option<Input>| input.clone().map_or_else(|| inputs.train.clone(), |input| vec![input]);
    let (split, inputs): (Option<&Split>, Vec<Input>) = match part {
        Part::Train => (Some(&dataset.train), inputs.train.clone()),
        Part::Validation => (dataset.validation.as_ref(), own(&inputs.validation)),
        Part::Test => (dataset.test.as_ref(), own(&inputs.test)),
    };
    let Some(split) = split else { return Ok(None) };
    let mut wanted = split.rows.clone();
    wanted.sort_unstable();
    let mut wanted = wanted.into_iter().peekable();
    let threads = threads(config)?;
    let walker = Walker { threads: &threads, progress, max_rows: config.data.max_rows };
    let write = |row: RawRow, forms: &[Form]| {
        let (row, weight) = row.parse_weighted(forms)?;
        let mut row = row.into_json();
        if weight != 1.0 {
            row["loss_weight"] = weight.into();
        }
        Ok(row.to_string())
    };
    let mut count = 0;
    for (input, set) in inputs.iter().zip(0..) {
        let mut next = RowId { set, row: 0 };
        walker.walk(&format!("writing {}", part.name()), input, &write, &mut |text| {
            while wanted.next_if_eq(&next).is_some() {
                take(&text)?;
                count += 1;
            }
            next.row += 1;
            Ok(())
        })?;
    }
    Ok(Some(count))
}
