//! Rows of one kind (training, validation, test) as numbers of rows in token sets: what is shuffled, split, mixed and
//! repeated are these numbers; tokens stay on disk.
use std::sync::Arc;

use super::batch::{Batch, Example, IGNORE};
use super::report::Counts;
use super::rng::shuffle;
use super::sampler::Step;
use super::tokens::{TokenSet, TokenWriter};
use crate::error::{Error, Result};

/// A row of one of the sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowId {
    /// The set's number.
    pub set: u32,
    /// The row's number in it, rows that were left out counted.
    pub row: u32,
}

/// Examples of one kind (training, validation, test).
#[derive(Debug, Clone, Default)]
pub struct Split {
    pub(super) sets: Vec<Arc<TokenSet>>,
    pub(super) rows: Vec<RowId>,
    /// What rows count by the class that they are of; nothing where all count alike.
    pub(super) class_weights: Option<Arc<[f32]>>,
}

impl Split {
    /// Examples that are not from files, kept in a file without a name.
    ///
    /// # Errors
    /// [`crate::Kind::Io`]: the folder for temporary files cannot be written.
    pub fn from_examples<'a>(examples: impl IntoIterator<Item = &'a Example>) -> Result<Self> {
        let dir = std::env::temp_dir();
        let mut writer =
            TokenWriter::scratch(&dir).map_err(|error| Error::io("write tokenized data to", &dir, &error))?;
        for example in examples {
            writer.push(Some((example, 1.0)))?;
        }
        Ok(Self::of(vec![Arc::new(writer.finish(&Counts::default())?)]))
    }

    /// All usable rows of some sets, one set behind the other.
    pub(super) fn of(sets: Vec<Arc<TokenSet>>) -> Self {
        let rows =
            sets.iter().zip(0..).flat_map(|(set, number)| set.usable().map(move |row| RowId { set: number, row }));
        Self { rows: rows.collect(), sets, class_weights: None }
    }

    /// How many examples.
    pub const fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    fn at(&self, index: usize) -> (&TokenSet, u32) {
        let RowId { set, row } = self.rows[index];
        (&self.sets[set as usize], row)
    }

    /// The tokens of an example, counted.
    pub fn length(&self, index: usize) -> usize {
        let (set, row) = self.at(index);
        set.length(row)
    }

    /// The length of each example in tokens.
    pub fn lengths(&self) -> Vec<usize> {
        (0..self.len()).map(|index| self.length(index)).collect()
    }

    /// All tokens.
    pub fn tokens(&self) -> usize {
        (0..self.len()).map(|index| self.length(index)).sum()
    }

    /// All tokens that carry a loss.
    pub fn label_tokens(&self) -> usize {
        let count = |index| {
            let (set, row) = self.at(index);
            set.label_tokens(row)
        };
        (0..self.len()).map(count).sum()
    }

    /// Reads an example.
    ///
    /// # Errors
    /// [`crate::Kind::Io`]: the tokens cannot be read from disk.
    pub fn example(&self, index: usize) -> Result<Example> {
        let (set, row) = self.at(index);
        Ok(set.read(row)?.0)
    }

    /// An example as a question and its answer: the tokens before its last run of labels, and that run.
    ///
    /// # Errors
    /// As [`Self::example`].
    pub fn prompt(&self, index: usize) -> Result<(Vec<u32>, Vec<u32>)> {
        let Example { input_ids, mut labels } = self.example(index)?;
        // A label of the whole row is no answer.
        labels.truncate(input_ids.len());
        let end = labels.iter().rposition(|&label| label != IGNORE).map_or(0, |last| last + 1);
        let start = labels[..end].iter().rposition(|&label| label == IGNORE).map_or(0, |last| last + 1);
        Ok((input_ids[..start].to_vec(), input_ids[start..end].to_vec()))
    }

    /// The label that an example has as a whole: a class, or the bits of a number.
    ///
    /// # Errors
    /// As [`Self::example`].
    pub fn target(&self, index: usize) -> Result<Option<i32>> {
        let (set, row) = self.at(index);
        set.target(row)
    }

    /// The label that an example has as a whole, and what its loss counts; nothing without such a label.
    ///
    /// # Errors
    /// As [`Self::example`].
    pub fn labelled(&self, index: usize) -> Result<Option<(i32, f32)>> {
        let batch = self.batch([index])?;
        let end = batch.tokens.len().saturating_sub(1);
        Ok(batch.targets.last().copied().filter(|&target| target != IGNORE).map(|target| (target, batch.weight(end))))
    }

    /// The batch of the given examples, each a sequence of its own.
    ///
    /// # Errors
    /// As [`Self::example`].
    pub fn batch(&self, indices: impl IntoIterator<Item = usize>) -> Result<Batch> {
        let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
        for index in indices {
            let (set, row) = self.at(index);
            let (example, weight) = set.read(row)?;
            batch.push(&example.input_ids, &example.labels);
            let class = example.labels.get(example.input_ids.len()).map_or(0, |&class| class as usize);
            let of_class = self.class_weights.as_ref().and_then(|weights| weights.get(class));
            batch.weigh_last(weight * of_class.unwrap_or(&1.0));
        }
        Ok(batch)
    }

    /// The micro-batches of a step, their rows counted through for dropout.
    ///
    /// # Errors
    /// As [`Self::example`].
    pub fn batches(&self, step: &Step) -> Result<Vec<Batch>> {
        let mut first_row = 0;
        let batch = |micro_batch: &Vec<Vec<usize>>| {
            let mut batch = self.batch(micro_batch.iter().flatten().copied())?;
            batch.first_row = first_row;
            first_row += batch.tokens.len() as u64;
            Ok(batch)
        };
        step.iter().map(batch).collect()
    }

    /// Takes a share of the examples out, drawn by `seed`; both parts keep their order. At least one goes out.
    #[must_use]
    pub fn take_share(&mut self, share: f64, seed: u64) -> Self {
        const STREAM: u64 = u64::MAX - 1;
        let count = ((self.len() as f64 * share).round() as usize).max(1).min(self.len());
        let mut order: Vec<u32> = (0..self.len() as u32).collect();
        shuffle(&mut order, seed, STREAM);
        self.take(order[..count].iter().copied())
    }

    /// As [`Self::take_share`], the same share of each class (stratified). What does not come out even goes to the classes with the
    /// largest remainders; the last row of a class stays.
    ///
    /// # Errors
    /// As [`Self::example`].
    pub fn take_share_of_each(&mut self, share: f64, seed: u64, classes: usize) -> Result<Self> {
        const STREAM: u64 = u64::MAX - 1;
        let mut of_class: Vec<Vec<u32>> = vec![Vec::new(); classes];
        let mut order: Vec<u32> = (0..self.len() as u32).collect();
        shuffle(&mut order, seed, STREAM);
        for index in order {
            if let Some(rows) = self.target(index as usize)?.and_then(|class| of_class.get_mut(class as usize)) {
                rows.push(index);
            }
        }
        let count = ((self.len() as f64 * share).round() as usize).max(1);
        let exact: Vec<f64> = of_class.iter().map(|rows| rows.len() as f64 * share).collect();
        let most = |class: usize| of_class[class].len().saturating_sub(1);
        let mut counts: Vec<usize> = (0..classes).map(|class| (exact[class] as usize).min(most(class))).collect();
        let mut by_rest: Vec<usize> = (0..classes).collect();
        by_rest.sort_by(|&one, &other| exact[other].fract().total_cmp(&exact[one].fract()).then(one.cmp(&other)));
        let mut missing = count.saturating_sub(counts.iter().sum());
        for class in by_rest {
            if missing > 0 && counts[class] < most(class) {
                counts[class] += 1;
                missing -= 1;
            }
        }
        let taken: Vec<u32> =
            of_class.iter().zip(counts).flat_map(|(rows, count)| rows[..count].iter().copied()).collect();
        Ok(self.take(taken))
    }

    /// Takes examples out; both parts keep their order.
    fn take(&mut self, indices: impl IntoIterator<Item = u32>) -> Self {
        let mut goes = vec![false; self.len()];
        indices.into_iter().for_each(|index| goes[index as usize] = true);
        let mut taken = Vec::new();
        let mut fates = goes.into_iter();
        self.rows.retain(|&row| {
            let goes = fates.next() == Some(true);
            if goes {
                taken.push(row);
            }
            !goes
        });
        Self { sets: self.sets.clone(), rows: taken, class_weights: None }
    }

    /// Hashes what the examples are: the sets' content, and which rows of them.
    pub(super) fn hash_into(&self, hasher: &mut blake3::Hasher) {
        hasher.update(&(self.sets.len() as u64).to_le_bytes());
        for set in &self.sets {
            hasher.update(set.content().as_bytes());
        }
        hasher.update(&(self.len() as u64).to_le_bytes());
        for piece in self.rows.chunks(1 << 14) {
            let bytes = piece.iter().flat_map(|id| (u64::from(id.set) << 32 | u64::from(id.row)).to_le_bytes());
            hasher.update(&bytes.collect::<Vec<u8>>());
        }
    }
}
