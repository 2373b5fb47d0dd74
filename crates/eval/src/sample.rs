//! Chooses the next token from logits: repetition penalty and sampling. The steps have the order and meaning of Transformers'
//! logits processors: penalty, temperature, top-k, top-p, min-p.
use tunesmith_base::error::Error;
use tunesmith_ops::dropout::key;

/// How the next token is drawn from the logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; above 0.
    pub temperature: f64,
    /// Keeps this many most probable tokens, and all that equal the last of them; 0 keeps all.
    pub top_k: usize,
    /// Then keeps the most probable tokens whose probabilities sum to at least this.
    pub top_p: f64,
    /// Then keeps tokens with at least this share of the largest probability; 0 keeps all.
    pub min_p: f64,
    /// A draw depends only on the seed, the text's number and the place in the answer.
    pub seed: u64,
}

/// Makes tokens of `seen` less probable: a negative score times `penalty`, another one divided by it. Keskar et al.,
/// "CTRL", 2019.
pub fn penalise(scores: &mut [f32], seen: impl Iterator<Item = u32>, penalty: f32) {
    if penalty == 1.0 {
        return;
    }
    let mut ids: Vec<u32> = seen.collect();
    ids.sort_unstable();
    ids.dedup();
    for id in ids {
        if let Some(score) = scores.get_mut(id as usize) {
            *score = if *score < 0.0 { *score * penalty } else { *score / penalty };
        }
    }
}

/// Whether one score is the largest: none is NaN, and the largest is finite.
pub fn has_largest(scores: &[f32]) -> bool {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    largest.is_finite() && !scores.iter().any(|score| score.is_nan())
}

/// The tokens that may be drawn and their probabilities, by rising id. `None` if the scores are NaN or infinite.
pub fn distribution(logits: &[f32], how: &Sampling) -> Option<Vec<(u32, f64)>> {
    let scores: Vec<f32> = logits.iter().map(|&logit| logit / how.temperature as f32).collect();
    if !has_largest(&scores) {
        return None;
    }
    let mut kept: Vec<(u32, f32)> = (0..).zip(scores).collect();
    if how.top_k > 0 && how.top_k < kept.len() {
        let mut sorted: Vec<f32> = kept.iter().map(|&(_, logit)| logit).collect();
        let (_, &mut limit, _) = sorted.select_nth_unstable_by(how.top_k - 1, |a, b| b.total_cmp(a));
        kept.retain(|&(_, logit)| logit >= limit);
    }
    if how.top_p < 1.0 {
        // Drops the least probable tokens that sum to 1 - top_p, but never the last one.
        let mut order: Vec<usize> = (0..kept.len()).collect();
        order.sort_by(|&a, &b| kept[a].1.total_cmp(&kept[b].1));
        let probabilities = softmax(&kept);
        let mut sum = 0.0;
        let mut gone = vec![false; kept.len()];
        for &index in &order[..order.len().saturating_sub(1)] {
            sum += probabilities[index];
            gone[index] = sum <= 1.0 - how.top_p;
        }
        let mut gone = gone.into_iter();
        kept.retain(|_| !gone.next().unwrap_or(false));
    }
    if how.min_p > 0.0 {
        let probabilities = softmax(&kept);
        let limit = how.min_p * probabilities.iter().copied().fold(0.0, f64::max);
        let mut probabilities = probabilities.into_iter();
        kept.retain(|_| probabilities.next().is_some_and(|probability| probability >= limit));
    }
    let probabilities = softmax(&kept);
    Some(kept.into_iter().map(|(id, _)| id).zip(probabilities).collect())
}

/// Why an answer's token at `place` cannot be chosen: its `logits` are NaN or infinite, or the settings of generation make them so.
pub fn not_finite(logits: &[f32], place: usize) -> Error {
    let token = place + 1;
    if has_largest(logits) {
        let message = format!("the scores of token {token} of an answer are not finite after the settings of gen");
        return Error::numeric(message).hint(
            "raise gen.temperature or gen.repetition_penalty; common values are 0.1 to 2 and 1 to 1.3. If \
             gen.no_repeat_ngram_size leaves no token, raise it too",
        );
    }
    Error::numeric(format!("the model's logits for token {token} of an answer are not finite"))
        .hint("the weights are too large for float32, as after a training that diverged: use an earlier checkpoint")
}

fn softmax(kept: &[(u32, f32)]) -> Vec<f64> {
    let top = kept.iter().map(|&(_, logit)| logit).fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = kept.iter().map(|&(_, logit)| f64::from(logit - top).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}

/// Draws the token at `place` of the answer to text number `text`.
pub fn draw(distribution: &[(u32, f64)], how: &Sampling, text: u64, place: u64) -> u32 {
    let uniform = (key(how.seed, text, place) >> 11) as f64 / (1u64 << 53) as f64;
    let mut left = uniform * distribution.iter().map(|&(_, probability)| probability).sum::<f64>();
    for &(id, probability) in distribution {
        left -= probability;
        if left < 0.0 {
            return id;
        }
    }
    // Rounding may leave a rest: it goes to the last token with any probability.
    distribution.iter().rev().find(|&&(_, probability)| probability > 0.0).map_or(0, |&(id, _)| id)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 7 };

    #[test]
    fn draws_follow_the_probabilities_and_repeat() {
        let logits = [0.0f32, 1.0, 2.0, f32::NEG_INFINITY];
        let kept = distribution(&logits, &PLAIN).unwrap();
        let mut counts = [0.0f64; 4];
        for text in 0..20_000 {
            let id = draw(&kept, &PLAIN, text, 3);
            assert_eq!(id, draw(&kept, &PLAIN, text, 3));
            counts[id as usize] += 1.0 / 20_000.0;
        }
        for (&(id, probability), count) in kept.iter().zip(counts) {
            assert!((probability - count).abs() < 0.01, "{id}: {probability} and {count}");
        }
        let other = Sampling { seed: 8, ..PLAIN };
        assert!((0..100).any(|text| draw(&kept, &PLAIN, text, 0) != draw(&kept, &other, text, 0)));
    }

    #[test]
    fn scores_that_are_not_finite_have_no_distribution() {
        let none = |logits: &[f32], temperature| distribution(logits, &Sampling { temperature, ..PLAIN }).is_none();
        assert!(none(&[f32::NEG_INFINITY; 2], 1.0));
        assert!(none(&[1.0, f32::NAN], 1.0) && none(&[f32::NAN, 1.0], 1.0));
        assert!(none(&[1.0, f32::INFINITY], 1.0));
        // As float32 this temperature is 0.
        assert!(none(&[1.0, 0.0], 1e-300));
        assert!(!none(&[1.0, f32::NEG_INFINITY], 1.0));
    }

    #[test]
    fn the_penalty_counts_a_token_once() {
        let mut scores = [1.0f32, -1.0, 2.0];
        penalise(&mut scores, [1, 0, 1, 9].into_iter(), 2.0);
        assert_eq!(scores, [0.5, -2.0, 2.0]);
    }
}
