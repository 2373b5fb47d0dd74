//! Prompt lookup decoding: guesses the next tokens of an answer. It finds the last few tokens earlier in the prompt or
//! the answer, and takes the tokens that followed there. A summary, an extract or a corrected text repeats much of its
//! prompt. One pass reads all guessed tokens. Those that the model would not have chosen are discarded, so that
//! answers do not change. As Transformers' `PromptLookupCandidateGenerator`, but with the last earlier occurrence
//! instead of the first.

/// Settings of prompt lookup decoding, with Transformers' names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLookup {
    /// The most tokens to guess at once (`prompt_lookup_num_tokens`).
    pub num_tokens: usize,
    /// How many of the last tokens to search for at first; then one fewer, down to one (`max_matching_ngram_size`).
    pub max_ngram: usize,
}

impl PromptLookup {
    /// Up to `most` tokens that may follow `text`.
    pub fn guess(self, text: &[u32], most: usize) -> &[u32] {
        let most = most.min(self.num_tokens);
        for length in (1..=self.max_ngram.min(text.len().saturating_sub(1))).rev() {
            let (before, last) = text.split_at(text.len() - length);
            // The last place whose tokens begin before the searched ones, and have one behind them.
            let place = (0..before.len()).rev().find(|&at| text[at..at + length] == *last);
            if let Some(place) = place {
                let next = &text[place + length..];
                return &next[..most.min(next.len())];
            }
        }
        &[]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_match_wins_then_the_last() {
        let lookup = PromptLookup { num_tokens: 3, max_ngram: 2 };
        assert_eq!(lookup.guess(&[1, 2, 3, 4, 5, 9, 2, 7, 1, 2], 10), [3, 4, 5]);
        assert_eq!(lookup.guess(&[1, 2, 3, 4, 5, 9, 2, 7, 1, 2], 1), [3]);
        assert_eq!(lookup.guess(&[1, 2, 3, 1, 2, 4, 1, 2], 10), [4, 1, 2]);
        // One token where two do not occur; a repetition goes on.
        assert_eq!(lookup.guess(&[6, 7, 8, 5, 7], 10), [8, 5, 7]);
        assert_eq!(lookup.guess(&[4, 4], 10), [4]);
        for nothing in [&[][..], &[1], &[1, 2, 3]] {
            assert_eq!(lookup.guess(nothing, 10), [0; 0]);
        }
    }
}
