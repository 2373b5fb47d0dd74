//! What changes scores before a token is chosen: the repetition penalty, and tokens that may not come next. As Transformers'
//! `RepetitionPenaltyLogitsProcessor`, `NoRepeatNGramLogitsProcessor`, and `MinNewTokensLengthLogitsProcessor`, in this order.
use super::sample::penalise;

/// The rules that change scores, with their settings.
#[derive(Debug, Clone, Copy)]
pub struct Processors<'a> {
    /// Repetition penalty; 1 does nothing.
    pub repetition_penalty: f32,
    /// No sequence of this many tokens may occur twice in prompt and answer; 0 does nothing.
    pub no_repeat_ngram_size: usize,
    /// An answer with fewer tokens cannot be ended by a stop id.
    pub min_new_tokens: usize,
    /// Tokens that end an answer.
    pub stop_ids: &'a [u32],
}

impl Processors<'_> {
    /// Whether any rule can change the scores for the next token of an answer that has `tokens` tokens.
    pub fn change(&self, tokens: usize) -> bool {
        self.repetition_penalty != 1.0 || self.no_repeat_ngram_size > 0 || tokens < self.min_new_tokens
    }

    /// Applies the rules to the scores for the next token. Tokens that may not come next get minus infinity.
    pub fn apply(&self, scores: &mut [f32], prompt: &[u32], answer: &[u32]) {
        penalise(scores, prompt.iter().chain(answer).copied(), self.repetition_penalty);
        let mut ban = |id: u32| {
            if let Some(score) = scores.get_mut(id as usize) {
                *score = f32::NEG_INFINITY;
            }
        };
        if self.no_repeat_ngram_size > 0 {
            let text = [prompt, answer].concat();
            let begun = (text.len() + 1).checked_sub(self.no_repeat_ngram_size).map(|at| &text[at..]);
            for ngram in text.windows(self.no_repeat_ngram_size) {
                if let Some((last, first)) = ngram.split_last()
                    && begun == Some(first)
                {
                    ban(*last);
                }
            }
        }
        if answer.len() < self.min_new_tokens {
            self.stop_ids.iter().copied().for_each(&mut ban);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Processors<'static> =
        Processors { repetition_penalty: 1.0, no_repeat_ngram_size: 0, min_new_tokens: 0, stop_ids: &[] };

    /// The ids below 10 that may not come next.
    fn banned(of: Processors<'_>, prompt: &[u32], answer: &[u32]) -> Vec<u32> {
        let mut scores = [0.5; 10];
        of.apply(&mut scores, prompt, answer);
        (0..).zip(scores).filter(|(_, score)| *score == f32::NEG_INFINITY).map(|(id, _)| id).collect()
    }

    #[test]
    fn no_ngram_of_prompt_and_answer_comes_again() {
        let of = |size| Processors { no_repeat_ngram_size: size, ..NONE };
        // After 1 2 came 3 once and 5 once; after 2 alone nothing else.
        assert_eq!(banned(of(3), &[1, 2, 3, 1], &[2, 5, 1, 2]), [3, 5]);
        assert_eq!(banned(of(2), &[1, 2, 3, 1], &[2, 5, 1, 2]), [3, 5]);
        assert_eq!(banned(of(4), &[1, 2, 3, 1], &[2, 5, 1, 2]), [0; 0]);
        assert_eq!(banned(of(1), &[7], &[3, 3]), [3, 7]);
        // The last tokens do not ban what would follow them for the first time, but what repeats them.
        assert_eq!(banned(of(2), &[4], &[4]), [4]);
        assert_eq!(banned(of(2), &[4], &[]), [0; 0]);
        // Too short for a whole n-gram, and ids beyond the scores.
        assert_eq!(banned(of(3), &[1], &[1]), [0; 0]);
        assert_eq!(banned(of(2), &[1, 99, 1], &[]), [0; 0]);
        assert!(of(2).change(0) && !of(0).change(0));
    }

    #[test]
    fn no_stop_id_comes_before_the_fewest_tokens() {
        let of = Processors { min_new_tokens: 2, stop_ids: &[3, 8, 99], ..NONE };
        assert_eq!(banned(of, &[1; 9], &[]), [3, 8]);
        assert_eq!(banned(of, &[], &[1]), [3, 8]);
        assert_eq!(banned(of, &[], &[1, 1]), [0; 0]);
        assert!(of.change(1) && !of.change(2));
    }

    #[test]
    fn a_ban_stays_beside_a_penalty() {
        let of = Processors { repetition_penalty: 2.0, no_repeat_ngram_size: 2, ..NONE };
        let mut scores = [1.0, -1.0, 4.0];
        of.apply(&mut scores, &[1, 2], &[1]);
        assert_eq!(scores, [1.0, -2.0, f32::NEG_INFINITY]);
    }
}
