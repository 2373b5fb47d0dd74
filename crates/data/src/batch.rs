//! Padding-free batches: the tokens of several sequences end to end, and where each sequence begins.

use std::ops::Range;
use std::sync::Arc;
use tunesmith_vision::Pixels;

/// The label of a token that carries no loss (the value that Hugging Face and PyTorch use).
pub const IGNORE: i32 = -100;

/// One tokenized training row, before the shift: `labels[t]` is `input_ids[t]` or [`IGNORE`].
///
/// A classification or regression row has one more label, which its last token predicts: the number of a class, or the
/// bits of an f32.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Example {
    /// Token ids of the row, without padding.
    pub input_ids: Vec<u32>,
    /// As many as `input_ids`, or one more.
    pub labels: Vec<i32>,
}

impl Example {
    /// How many tokens carry a loss. The first label never counts, because nothing predicts the first token.
    pub fn label_tokens(&self) -> usize {
        self.labels.iter().skip(1).filter(|&&label| label != IGNORE).count()
    }

    /// The labels that carry a loss.
    pub fn predicted(&self) -> Vec<u32> {
        self.labels.iter().skip(1).filter_map(|&label| u32::try_from(label).ok()).collect()
    }
}

/// A padding-free batch: sequences end to end. Attention never crosses a boundary, and positions restart at 0.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Batch {
    /// `[tokens]`: the ids of all sequences.
    pub tokens: Vec<u32>,
    /// `[tokens]`: what each position must predict, which is the next token's label in the same sequence or [`IGNORE`].
    /// In classification and regression the last position of a sequence predicts the class or the bits of the f32;
    /// neither is ever [`IGNORE`].
    pub targets: Vec<i32>,
    /// `[sequences + 1]`: where each sequence starts; the last entry is the token count.
    pub cu_seqlens: Vec<usize>,
    /// How many tokens the earlier micro-batches of the step have. The dropout counter of token t is `first_row + t`,
    /// so the masks do not depend on how a step is split into micro-batches.
    pub first_row: u64,
    /// `[tokens]`: the factor of each position's loss; empty if every factor is 1.
    pub weights: Vec<f32>,
    /// The pictures, in the order of their rows.
    pub images: Vec<ImageRows>,
}

/// A picture, and the rows of the flat stream in whose place the connector's output stands. What `tokens` has there is the
/// id of the image token, or any other where no token stands for a row; it is read by nothing but its range's check.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageRows {
    /// Where its rows are: rising runs, one for each stretch between other tokens. Where rows of an image see each other
    /// in both directions, they do so within a run.
    pub runs: Vec<Range<usize>>,
    /// The picture's patches or features, as the model reads them.
    pub pixels: Arc<Pixels>,
}

impl ImageRows {
    /// How many rows it has.
    pub fn rows(&self) -> usize {
        self.runs.iter().map(Range::len).sum()
    }

    /// The same picture, its rows further back by so many.
    #[must_use]
    pub fn moved(&self, by: usize) -> Self {
        let runs = self.runs.iter().map(|run| run.start + by..run.end + by).collect();
        Self { runs, pixels: Arc::clone(&self.pixels) }
    }
}

impl Batch {
    /// Makes each example a sequence and shifts its labels.
    pub fn from_examples<'a>(examples: impl IntoIterator<Item = &'a Example>) -> Self {
        let mut batch = Self { cu_seqlens: vec![0], ..Self::default() };
        for example in examples {
            batch.push(&example.input_ids, &example.labels);
        }
        batch
    }

    /// Appends one sequence and shifts its labels: position t predicts label t + 1. The last position predicts nothing,
    /// unless there is one more label than ids.
    pub fn push(&mut self, ids: &[u32], labels: &[i32]) {
        self.tokens.extend_from_slice(ids);
        self.targets.extend(labels.iter().skip(1).copied());
        if !ids.is_empty() {
            self.targets.resize(self.tokens.len(), IGNORE);
            self.cu_seqlens.push(self.tokens.len());
        }
    }

    /// The last position of each sequence.
    pub fn ends(&self) -> Vec<usize> {
        self.cu_seqlens.iter().skip(1).map(|&end| end - 1).collect()
    }

    /// Multiplies the loss of the last appended sequence by `weight`.
    pub fn weigh_last(&mut self, weight: f32) {
        let tokens = self.tokens.len();
        if weight == 1.0 && self.weights.is_empty() {
            return;
        }
        let start = self.cu_seqlens.len().checked_sub(2).map_or(0, |last| self.cu_seqlens[last]);
        self.weights.resize(start, 1.0);
        self.weights.resize(tokens, weight);
    }

    /// The factor of a position's loss.
    pub fn weight(&self, position: usize) -> f32 {
        self.weights.get(position).copied().unwrap_or(1.0)
    }

    /// The loss factors of the positions that carry a loss, in order.
    pub fn label_weights(&self) -> impl Iterator<Item = f64> {
        let labelled = self.targets.iter().enumerate().filter(|&(_, &target)| target != IGNORE);
        labelled.map(|(position, _)| f64::from(self.weight(position)))
    }

    /// The sum of [`Batch::label_weights`].
    pub fn label_weight(&self) -> f64 {
        self.label_weights().sum()
    }

    /// How many positions carry a loss.
    pub fn label_tokens(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORE).count()
    }
}
