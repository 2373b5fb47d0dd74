//! Beam search as Transformers does it (`GenerationMixin._beam_search`), for one text: the most probable continuations
//! so far run side by side; a finished one is ranked by its log-probability over its length to the power of a penalty.
use super::processors::Processors;
use super::sample::{has_largest, not_finite};
use tunesmith_base::error::Result;
use tunesmith_model::{Logits, TextCache};

/// Settings of a beam search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Beams {
    /// Beams that run side by side (`num_beams`).
    pub count: usize,
    /// A finished answer's log-probability is divided by its length to this power: above 0 favours long answers.
    pub length_penalty: f64,
    /// Whether the search may end before its beams reach the longest answer.
    pub early_stopping: BeamEarlyStopping,
}

/// When a beam search ends before its beams reach the longest answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BeamEarlyStopping {
    /// When the best running beam, ranked by its length now, is below the worst finished one.
    Heuristic,
    /// As soon as there are as many finished answers as beams.
    Full,
    /// When no running beam can get above the worst finished one.
    Never,
}

/// A beam that has not ended.
#[derive(Debug)]
struct Running {
    tokens: Vec<u32>,
    score: f32,
}

#[derive(Debug, Clone)]
struct Finished {
    tokens: Vec<u32>,
    score: f32,
    done: bool,
}

/// Added to a score to rule a candidate out, as in Transformers.
const OUT: f32 = -1.0e9;

/// What ends an answer in a search, and how candidates are scored.
pub(crate) struct Rules<'a> {
    /// Whether an answer ends with these tokens. The last one stays in the candidate.
    pub stops: &'a mut dyn FnMut(&[u32]) -> bool,
    /// The most tokens of an answer.
    pub max_new: usize,
    /// The rules that change log-probabilities before candidates are compared.
    pub processors: Processors<'a>,
}

/// A beam search over one text: its running beams in the order of their caches, and its finished answers.
#[derive(Debug)]
pub(crate) struct Search {
    how: Beams,
    running: Vec<Running>,
    finished: Vec<Finished>,
    improvable: bool,
}

impl Search {
    /// Starts with one empty beam, which continues the prompt.
    pub fn new(how: Beams) -> Self {
        let empty = Finished { tokens: Vec::new(), score: OUT, done: false };
        let running = vec![Running { tokens: Vec::new(), score: 0.0 }];
        Self { how, running, finished: vec![empty; how.count], improvable: true }
    }

    /// Advances every beam by one token. The beams' logits begin at row `first`. Reorders `caches` to match the new beams.
    /// Returns the tokens to feed next, one per beam, or `None` when the search is over.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Numeric`]: a beam's scores are not finite.
    pub fn take(
        &mut self,
        prompt: &[u32],
        rules: &mut Rules<'_>,
        logits: &Logits,
        first: usize,
        caches: &mut Vec<TextCache>,
    ) -> Result<Option<Vec<u32>>> {
        let Beams { count, length_penalty, early_stopping } = self.how;
        let length = self.running.first().map_or(0, |beam| beam.tokens.len()) + 1;
        // The best continuations of all beams.
        let keep = 2.max(1 + rules.processors.stop_ids.len()) * count;
        let mut candidates: Vec<(f32, usize, u32)> = Vec::new();
        for (index, beam) in self.running.iter().enumerate() {
            let mut scores = log_softmax(logits.row(first + index));
            rules.processors.apply(&mut scores, prompt, &beam.tokens);
            if !has_largest(&scores) {
                return Err(not_finite(&logits.row(first + index), length - 1));
            }
            let of_beam = (0..).zip(scores).map(|(id, score): (u32, f32)| (score + beam.score, index, id));
            candidates.extend(largest(of_beam.collect(), keep));
        }
        let candidates = largest(candidates, keep);
        let mut ends = |&(_, beam, id): &(f32, usize, u32)| {
            let mut tokens = self.running[beam].tokens.clone();
            tokens.push(id);
            let ended = length >= rules.max_new || (rules.stops)(&tokens);
            (tokens, ended)
        };
        let grown: Vec<(Vec<u32>, bool)> = candidates.iter().map(&mut ends).collect();

        // Newly finished candidates compete with earlier ones; only the first `count` may finish.
        let full = early_stopping == BeamEarlyStopping::Full && self.finished.iter().all(|beam| beam.done);
        let divisor = (length as f64).powf(length_penalty) as f32;
        let mut merged = std::mem::take(&mut self.finished);
        for (place, (&(score, ..), (tokens, ended))) in candidates.iter().zip(&grown).enumerate() {
            let done = *ended && place < count;
            let mut score = score / divisor;
            for out in [full, !self.improvable, !done] {
                score += if out { OUT } else { 0.0 };
            }
            merged.push(Finished { tokens: tokens.clone(), score, done });
        }
        let order = ranked(merged.iter().map(|beam| beam.score), count);
        self.finished = order.into_iter().map(|index| merged[index].clone()).collect();

        // The best of the others continue.
        let all_end = grown.iter().all(|(_, ended)| *ended);
        let scores: Vec<f32> = candidates
            .iter()
            .zip(&grown)
            .map(|(&(score, ..), (_, ended))| score + if *ended { OUT } else { 0.0 })
            .collect();
        let order = ranked(scores.iter().copied(), count);
        let parents: Vec<usize> = order.iter().map(|&index| candidates[index].1).collect();
        self.running =
            order.iter().map(|&index| Running { tokens: grown[index].0.clone(), score: scores[index] }).collect();
        let next: Vec<u32> = order.iter().map(|&index| candidates[index].2).collect();
        *caches = parents.into_iter().map(|parent| caches[parent].clone()).collect();

        // Whether a running beam can still improve the result. Transformers counts this step as done.
        let hypothetical =
            if early_stopping == BeamEarlyStopping::Never && length_penalty > 0.0 { rules.max_new } else { length };
        let best = self.running.first().map_or(f32::NEG_INFINITY, |beam| beam.score)
            / (hypothetical as f64).powf(length_penalty) as f32;
        let lowest = self.finished.iter().map(|beam| beam.score).fold(f32::INFINITY, f32::min);
        self.improvable &= self.finished.iter().any(|beam| best > if beam.done { lowest } else { OUT });
        let complete = early_stopping == BeamEarlyStopping::Full && self.finished.iter().all(|beam| beam.done);
        Ok((self.improvable && !complete && !all_end).then_some(next))
    }

    /// The best finished answer, else the best running beam.
    pub fn best(&self) -> &[u32] {
        let finished = self.finished.first().filter(|beam| beam.done).map(|beam| &beam.tokens[..]);
        finished.or_else(|| self.running.first().map(|beam| &beam.tokens[..])).unwrap_or_default()
    }

    /// The most probable running beam.
    pub fn leading(&self) -> &[u32] {
        self.running.first().map_or(&[], |beam| &beam.tokens)
    }
}

fn log_softmax(mut logits: Vec<f32>) -> Vec<f32> {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - top).exp()).sum();
    let log = sum.ln() as f32;
    for logit in &mut logits {
        *logit = *logit - top - log;
    }
    logits
}

/// The `count` candidates with the highest scores, highest first. Of equal scores, earlier beams and lower ids come first.
fn largest(mut candidates: Vec<(f32, usize, u32)>, count: usize) -> Vec<(f32, usize, u32)> {
    let order = |a: &(f32, usize, u32), b: &(f32, usize, u32)| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2)));
    if candidates.len() > count {
        candidates.select_nth_unstable_by(count, order);
        candidates.truncate(count);
    }
    candidates.sort_by(order);
    candidates
}

/// The indices of the `count` highest scores, highest first.
fn ranked(scores: impl Iterator<Item = f32>, count: usize) -> Vec<usize> {
    let scores: Vec<f32> = scores.collect();
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(count);
    order
}
