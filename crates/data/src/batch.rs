//! What the engine is fed: a flat token stream without padding, and where its sequences begin.

/// The label of a token that carries no loss (the value that Hugging Face and PyTorch use).
pub const IGNORE: i32 = -100;

/// One tokenized training row, before the shift: `labels[t]` is `input_ids[t]` or [`IGNORE`]. A row with a label for the whole
/// of it has one label more than tokens, which its last token predicts: a class, or the bits of a number in f32.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Example {
    /// Token ids.
    pub input_ids: Vec<u32>,
    /// As long as `input_ids`, or one longer.
    pub labels: Vec<i32>,
}

impl Example {
    /// How many tokens carry a loss: labels after the first, since the first token is never predicted.
    pub fn label_tokens(&self) -> usize {
        self.labels.iter().skip(1).filter(|&&label| label != IGNORE).count()
    }

    /// These labels.
    pub fn predicted(&self) -> Vec<u32> {
        self.labels.iter().skip(1).filter_map(|&label| u32::try_from(label).ok()).collect()
    }
}

/// A padding-free batch: sequences laid end to end; attention never crosses a boundary, positions restart at 0.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Batch {
    /// `[tokens]` ids of all sequences.
    pub tokens: Vec<u32>,
    /// `[tokens]` what position t must predict: the next token's label within the same sequence, or [`IGNORE`]; of a sequence with
    /// a label as a whole its last position predicts that, a class or the bits of a number (none of which are [`IGNORE`]).
    pub targets: Vec<i32>,
    /// `[sequences + 1]` where each sequence starts; the last entry is the token count.
    pub cu_seqlens: Vec<usize>,
    /// How many tokens the step's earlier micro-batches hold: the dropout counter of token t is `first_row + t`,
    /// so that splitting a step otherwise does not change its masks.
    pub first_row: u64,
    /// `[tokens]` what each position's loss counts; empty where all count 1.
    pub weights: Vec<f32>,
}

impl Batch {
    /// Lays examples end to end, each a sequence of its own, and shifts their labels.
    pub fn from_examples<'a>(examples: impl IntoIterator<Item = &'a Example>) -> Self {
        let mut batch = Self { cu_seqlens: vec![0], ..Self::default() };
        for example in examples {
            batch.push(&example.input_ids, &example.labels);
        }
        batch
    }

    /// Appends one sequence and shifts its labels: position t predicts label t + 1, the last position nothing unless the
    /// row as a whole has a label.
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

    /// Lets the sequence that was appended last count `weight` times in the loss.
    pub fn weigh_last(&mut self, weight: f32) {
        let tokens = self.tokens.len();
        if weight == 1.0 && self.weights.is_empty() {
            return;
        }
        let start = self.cu_seqlens.len().checked_sub(2).map_or(0, |last| self.cu_seqlens[last]);
        self.weights.resize(start, 1.0);
        self.weights.resize(tokens, weight);
    }

    /// What a position's loss counts.
    pub fn weight(&self, position: usize) -> f32 {
        self.weights.get(position).copied().unwrap_or(1.0)
    }

    /// The sum of the weights of the positions that carry a loss; their number where all count 1.
    pub fn label_weight(&self) -> f64 {
        let labelled = self.targets.iter().enumerate().filter(|&(_, &target)| target != IGNORE);
        labelled.map(|(position, _)| f64::from(self.weight(position))).sum()
    }

    /// How many positions carry a loss.
    pub fn label_tokens(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORE).count()
    }
}
