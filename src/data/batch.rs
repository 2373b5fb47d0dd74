//! What the engine is fed: a flat token stream without padding, and where its sequences begin.

/// The label of a token that carries no loss (the value that Hugging Face and PyTorch use).
pub const IGNORE: i32 = -100;

/// One tokenized training row, before the shift: `labels[t]` is `input_ids[t]` or [`IGNORE`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Example {
    /// Token ids.
    pub input_ids: Vec<u32>,
    /// As long as `input_ids`.
    pub labels: Vec<i32>,
}

impl Example {
    /// How many tokens carry a loss: labels after the first, since the first token is never predicted.
    pub fn label_tokens(&self) -> usize {
        self.labels.iter().skip(1).filter(|&&label| label != IGNORE).count()
    }
}

/// A padding-free batch: sequences laid end to end; attention never crosses a boundary, positions restart at 0.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Batch {
    /// `[tokens]` ids of all sequences.
    pub tokens: Vec<u32>,
    /// `[tokens]` what position t must predict: the next token's label within the same sequence, or [`IGNORE`].
    pub targets: Vec<i32>,
    /// `[sequences + 1]` where each sequence starts; the last entry is the token count.
    pub cu_seqlens: Vec<usize>,
    /// How many tokens the step's earlier micro-batches hold: the dropout counter of token t is `first_row + t`,
    /// so that splitting a step otherwise does not change its masks.
    pub first_row: u64,
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

    /// Appends one sequence and shifts its labels: position t predicts label t + 1, the last position nothing.
    pub fn push(&mut self, ids: &[u32], labels: &[i32]) {
        self.tokens.extend_from_slice(ids);
        self.targets.extend(labels.iter().skip(1).copied());
        if !ids.is_empty() {
            self.targets.push(IGNORE);
            self.cu_seqlens.push(self.tokens.len());
        }
    }

    /// How many positions carry a loss.
    pub fn label_tokens(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORE).count()
    }
}
