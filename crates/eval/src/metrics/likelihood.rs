//! Loss, perplexity and related metrics: how probable a model finds the references.

/// Sums over label tokens, in constant memory.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Likelihood {
    /// The sum of the tokens' negative log-likelihoods, in nats, each multiplied by its row's `loss_weight`.
    pub nll: f64,
    /// The sum of the label tokens' weights: their number, unless rows have a `loss_weight`.
    pub weight: f64,
    /// Number of label tokens.
    pub tokens: u64,
    /// Label tokens that are the model's most probable token.
    pub right: u64,
    /// UTF-8 bytes of the labels' text.
    pub bytes: u64,
}

impl Likelihood {
    /// How many sums [`Likelihood::counts`] has.
    pub const WIDTH: usize = 5;

    /// The sums as numbers that can be added.
    pub const fn counts(&self) -> [f64; Self::WIDTH] {
        [self.nll, self.weight, self.tokens as f64, self.right as f64, self.bytes as f64]
    }

    /// From the sums of [`Likelihood::counts`].
    pub const fn of(counts: &[f64; Self::WIDTH]) -> Self {
        let [nll, weight, tokens, right, bytes] = *counts;
        Self { nll, weight, tokens: tokens as u64, right: right as u64, bytes: bytes as u64 }
    }

    /// Adds the sums of other rows.
    pub const fn add(&mut self, other: &Self) {
        self.nll += other.nll;
        self.weight += other.weight;
        self.tokens += other.tokens;
        self.right += other.right;
        self.bytes += other.bytes;
    }

    /// The weighted mean loss of a token, in nats, as validation during training has it; NaN without tokens.
    pub fn loss(&self) -> f64 {
        self.nll / self.weight
    }

    /// `exp` of the mean loss of a token: comparable only between models with the same tokenizer.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// `exp` of the loss per byte of text: comparable between tokenizers.
    pub fn byte_perplexity(&self) -> f64 {
        // Weights cancel out: what is spread over the bytes is the mean loss of as many tokens.
        (self.nll * (self.tokens as f64 / self.weight) / self.bytes as f64).exp()
    }

    /// The share of tokens that the model finds most probable, whatever their weights.
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
        let mut sums = Likelihood { nll: 2.0, weight: 1.0, tokens: 1, right: 1, bytes: 4 };
        sums.add(&Likelihood { nll: 1.0, weight: 3.0, tokens: 3, right: 1, bytes: 2 });
        let [(_, loss), (_, perplexity), (_, by_byte), (_, accuracy)] = sums.scores();
        assert_eq!((loss, perplexity, by_byte, accuracy), (0.75, 0.75f64.exp(), 0.5f64.exp(), 0.5));
        assert_eq!(Likelihood::of(&sums.counts()), sums);
        assert!(Likelihood::default().loss().is_nan());
    }

    #[test]
    fn a_row_counts_by_its_loss_weight() {
        // Mean losses of 2 and 1, weights of 3 and 0.5 per token.
        let mut sums = Likelihood { nll: 6.0, weight: 3.0, tokens: 1, right: 1, bytes: 2 };
        sums.add(&Likelihood { nll: 1.0, weight: 1.0, tokens: 2, right: 0, bytes: 2 });
        let [(_, loss), (_, perplexity), (_, by_byte), (_, accuracy)] = sums.scores();
        assert_eq!((loss, perplexity, accuracy), (1.75, 1.75f64.exp(), 1.0 / 3.0));
        assert!((by_byte - (1.75f64 * 3.0 / 4.0).exp()).abs() < 1e-12);
        let left_out = Likelihood { nll: 0.0, weight: 0.0, tokens: 5, right: 5, bytes: 9 };
        sums.add(&left_out);
        assert_eq!(sums.loss(), 1.75);
    }
}
