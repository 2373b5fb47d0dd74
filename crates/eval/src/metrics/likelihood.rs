//! Loss, perplexity and related metrics: how probable a model finds the references.

/// Sums over label tokens, in constant memory.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Likelihood {
    /// The sum of the tokens' negative log-likelihoods, in nats.
    pub nll: f64,
    /// Number of label tokens.
    pub tokens: u64,
    /// Label tokens that are the model's most probable token.
    pub right: u64,
    /// UTF-8 bytes of the labels' text.
    pub bytes: u64,
}

impl Likelihood {
    /// How many sums [`Likelihood::counts`] has.
    pub const WIDTH: usize = 4;

    /// The four sums as numbers that can be added.
    pub const fn counts(&self) -> [f64; Self::WIDTH] {
        [self.nll, self.tokens as f64, self.right as f64, self.bytes as f64]
    }

    /// From the sums of [`Likelihood::counts`].
    pub const fn of(counts: &[f64; Self::WIDTH]) -> Self {
        let [nll, tokens, right, bytes] = *counts;
        Self { nll, tokens: tokens as u64, right: right as u64, bytes: bytes as u64 }
    }

    /// Adds the sums of other rows.
    pub const fn add(&mut self, other: &Self) {
        self.nll += other.nll;
        self.tokens += other.tokens;
        self.right += other.right;
        self.bytes += other.bytes;
    }

    /// The mean loss of a token, in nats; NaN without tokens.
    pub fn loss(&self) -> f64 {
        self.nll / self.tokens as f64
    }

    /// `exp` of the mean loss of a token: comparable only between models with the same tokenizer.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// `exp` of the loss per byte of text: comparable between tokenizers.
    pub fn byte_perplexity(&self) -> f64 {
        (self.nll / self.bytes as f64).exp()
    }

    /// The share of tokens that the model finds most probable.
    pub fn token_accuracy(&self) -> f64 {
        self.right as f64 / self.tokens as f64
    }

    /// Loss, perplexity, perplexity per byte and accuracy, each with its name in results.
    pub fn scores(&self) -> [(&'static str, f64); 4] {
        [
            ("loss", self.loss()),
            ("perplexity", self.perplexity()),
            ("byte_perplexity", self.byte_perplexity()),
            ("token_accuracy", self.token_accuracy()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_become_means_of_all_tokens() {
        let mut sums = Likelihood { nll: 2.0, tokens: 1, right: 1, bytes: 4 };
        sums.add(&Likelihood { nll: 1.0, tokens: 3, right: 1, bytes: 2 });
        let [(_, loss), (_, perplexity), (_, by_byte), (_, accuracy)] = sums.scores();
        assert_eq!((loss, perplexity, by_byte, accuracy), (0.75, 0.75f64.exp(), 0.5f64.exp(), 0.5));
        assert_eq!(Likelihood::of(&sums.counts()), sums);
        assert!(Likelihood::default().loss().is_nan());
    }
}
