//! Tokenized rows in three flat arrays.
use super::batch::{Batch, Example, IGNORE};
use super::rng::shuffle;
use super::sampler::Step;

/// Examples of one kind (training, validation, test): flat ids and labels, and where each example ends.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Split {
    pub(super) ids: Vec<u32>,
    pub(super) labels: Vec<i32>,
    pub(super) ends: Vec<u64>,
    /// What each example's loss counts; shorter than `ends` where the rest count 1.
    pub(super) weights: Vec<f32>,
}

impl Split {
    /// Appends an example.
    pub fn push(&mut self, example: &Example) {
        self.ids.extend_from_slice(&example.input_ids);
        self.labels.extend_from_slice(&example.labels);
        self.ends.push(self.ids.len() as u64);
    }

    /// Lets the example that was appended last count `weight` times in the loss.
    pub fn weigh_last(&mut self, weight: f32) {
        if weight != 1.0 {
            self.weights.resize(self.len() - 1, 1.0);
            self.weights.push(weight);
        }
    }

    /// What an example's loss counts.
    pub fn weight(&self, index: usize) -> f32 {
        self.weights.get(index).copied().unwrap_or(1.0)
    }

    /// How many examples.
    pub const fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    fn range(&self, index: usize) -> std::ops::Range<usize> {
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        start..self.ends[index] as usize
    }

    /// The ids of an example.
    pub fn ids(&self, index: usize) -> &[u32] {
        &self.ids[self.range(index)]
    }

    /// Its labels.
    pub fn labels(&self, index: usize) -> &[i32] {
        &self.labels[self.range(index)]
    }

    /// An example of its own.
    pub fn example(&self, index: usize) -> Example {
        Example { input_ids: self.ids(index).to_vec(), labels: self.labels(index).to_vec() }
    }

    /// An example as a question and its answer: the tokens before its last run of labels, and that run.
    pub fn prompt(&self, index: usize) -> (&[u32], &[u32]) {
        let (ids, labels) = (self.ids(index), self.labels(index));
        let end = labels.iter().rposition(|&label| label != IGNORE).map_or(0, |last| last + 1);
        let start = labels[..end].iter().rposition(|&label| label == IGNORE).map_or(0, |last| last + 1);
        (&ids[..start], &ids[start..end])
    }

    /// The length of each example in tokens.
    pub fn lengths(&self) -> Vec<usize> {
        (0..self.len()).map(|index| self.range(index).len()).collect()
    }

    /// All tokens.
    pub const fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// All tokens that carry a loss.
    pub fn label_tokens(&self) -> usize {
        let count = |index| self.labels(index).iter().skip(1).filter(|&&label| label != IGNORE).count();
        (0..self.len()).map(count).sum()
    }

    /// The batch of the given examples, each a sequence of its own.
    pub fn batch(&self, indices: impl IntoIterator<Item = usize>) -> Batch {
        let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
        for index in indices {
            batch.push(self.ids(index), self.labels(index));
            batch.weigh_last(self.weight(index));
        }
        batch
    }

    /// The micro-batches of a step, their rows counted through for dropout.
    pub fn batches(&self, step: &Step) -> Vec<Batch> {
        let mut first_row = 0;
        let batch = |micro_batch: &Vec<Vec<usize>>| {
            let mut batch = self.batch(micro_batch.iter().flatten().copied());
            batch.first_row = first_row;
            first_row += batch.tokens.len() as u64;
            batch
        };
        step.iter().map(batch).collect()
    }

    /// Takes a share of the examples out, drawn by `seed`; both parts keep their order. At least one goes out.
    #[must_use]
    pub fn take_share(&mut self, share: f64, seed: u64) -> Self {
        const STREAM: u64 = u64::MAX - 1;
        let count = ((self.len() as f64 * share).round() as usize).max(1).min(self.len());
        let mut order: Vec<usize> = (0..self.len()).collect();
        shuffle(&mut order, seed, STREAM);
        let mut goes = vec![false; self.len()];
        order[..count].iter().for_each(|&index| goes[index] = true);
        let mut taken = Self::default();
        // What stays moves up in place: a second copy of a large data set may not fit.
        let (mut start, mut kept_tokens, mut kept) = (0, 0, 0);
        let weights = std::mem::take(&mut self.weights);
        let mut kept_weights = Self::default();
        for (index, goes) in goes.into_iter().enumerate() {
            let weight = weights.get(index).copied().unwrap_or(1.0);
            let range = start..self.ends[index] as usize;
            start = range.end;
            if goes {
                taken.push(&Example {
                    input_ids: self.ids[range.clone()].to_vec(),
                    labels: self.labels[range].to_vec(),
                });
                taken.weigh_last(weight);
            } else {
                let length = range.len();
                self.ids.copy_within(range.clone(), kept_tokens);
                self.labels.copy_within(range, kept_tokens);
                kept_tokens += length;
                self.ends[kept] = kept_tokens as u64;
                kept += 1;
                kept_weights.ends.push(0);
                kept_weights.weigh_last(weight);
            }
        }
        self.ids.truncate(kept_tokens);
        self.labels.truncate(kept_tokens);
        self.ends.truncate(kept);
        self.weights = kept_weights.weights;
        taken
    }

    /// Hashes the content.
    pub(super) fn hash_into(&self, hasher: &mut blake3::Hasher) {
        hasher.update(&(self.len() as u64).to_le_bytes());
        for piece in self.ends.chunks(1 << 14) {
            hasher.update(&piece.iter().flat_map(|end| end.to_le_bytes()).collect::<Vec<u8>>());
        }
        for piece in self.ids.chunks(1 << 14) {
            hasher.update(&piece.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
        }
        for piece in self.labels.chunks(1 << 14) {
            hasher.update(&piece.iter().flat_map(|label| label.to_le_bytes()).collect::<Vec<u8>>());
        }
        for piece in self.weights.chunks(1 << 14) {
            hasher.update(&piece.iter().flat_map(|weight| weight.to_le_bytes()).collect::<Vec<u8>>());
        }
    }
}
