//! METEOR as the Natural Language Toolkit computes it, **without `WordNet`**: words match that are equal in lower case, then those
//! with equal stems; synonyms do not. A. Lavie and A. Agarwal, "METEOR: an automatic metric for MT evaluation with high levels
//! of correlation with human judgments", 2007. Words are those of the tokenizer 13a.
use super::porter::stem;
use super::text::{tokenize_13a, without_end_space};
use std::collections::HashMap;

const ALPHA: f64 = 0.9;
const BETA: i32 = 3;
const GAMMA: f64 = 0.5;

/// The score of one answer, from 0 to 1.
pub fn meteor(answer: &str, reference: &str) -> f64 {
    let words = |text: &str| -> Vec<(usize, String)> {
        let tokens = tokenize_13a(without_end_space(text));
        tokens.iter().map(|token| token.to_lowercase()).enumerate().collect()
    };
    let (mut answer, mut reference) = (words(answer), words(reference));
    let (answer_length, reference_length) = (answer.len() as f64, reference.len() as f64);
    let mut pairs = align(&mut answer, &mut reference);
    answer.iter_mut().chain(&mut reference).for_each(|(_, word)| *word = stem(word));
    pairs.extend(align(&mut answer, &mut reference));
    if pairs.is_empty() {
        return 0.0;
    }
    pairs.sort_unstable();
    let matches = pairs.len() as f64;
    let (precision, recall) = (matches / answer_length, matches / reference_length);
    let mean = precision * recall / (ALPHA * precision + (1.0 - ALPHA) * recall);
    let breaks = pairs.windows(2).filter(|pair| pair[1] != (pair[0].0 + 1, pair[0].1 + 1)).count();
    let fragmentation = (1 + breaks) as f64 / matches;
    (1.0 - GAMMA * fragmentation.powi(BETA)) * mean
}

/// The highest score of one answer over several references, as in the paper and in nltk's `meteor_score`.
pub fn best(answer: &str, references: &[&str]) -> f64 {
    references.iter().map(|reference| meteor(answer, reference)).fold(0.0, f64::max)
}

/// Pairs equal words from the end, each with the last remaining match, and removes them from both sides.
fn align(answer: &mut Vec<(usize, String)>, reference: &mut Vec<(usize, String)>) -> Vec<(usize, usize)> {
    let mut places: HashMap<&str, Vec<usize>> = HashMap::new();
    for (at, (_, word)) in reference.iter().enumerate() {
        places.entry(word).or_default().push(at);
    }
    let (mut used_answer, mut used_reference) = (vec![false; answer.len()], vec![false; reference.len()]);
    let mut pairs = Vec::new();
    for (at, (number, word)) in answer.iter().enumerate().rev() {
        if let Some(place) = places.get_mut(word.as_str()).and_then(Vec::pop) {
            (used_answer[at], used_reference[place]) = (true, true);
            pairs.push((*number, reference[place].0));
        }
    }
    let drop_used = |words: &mut Vec<(usize, String)>, used: Vec<bool>| {
        let mut used = used.into_iter();
        words.retain(|_| !used.next().unwrap_or(false));
    };
    drop_used(answer, used_answer);
    drop_used(reference, used_reference);
    pairs
}
