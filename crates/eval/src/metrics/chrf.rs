//! chrF and chrF++ as sacrebleu computes them: M. Popović, "chrF: character n-gram F-score for automatic MT evaluation", 2015,
//! and "chrF++: words helping character n-grams", 2017. Character n-grams up to 6 without white space, beta 2.
use super::text::{Counts, common, ngrams, words};
use std::hash::Hash;

const CHARACTERS: usize = 6;
/// Longest word n-grams, which only chrF++ counts.
const WORDS: usize = 2;
const BETA_SQUARED: f64 = 4.0;
/// Length of a row's counts: for each order, n-grams of the answer, of the reference, and matches.
pub const WIDTH: usize = 3 * (CHARACTERS + WORDS);

/// The counts of one answer: character orders, then the word orders of chrF++. Those of a corpus are the sums over its rows.
pub fn counts(answer: &str, reference: &str) -> [f64; WIDTH] {
    let characters = |text: &str| words(text).concat().chars().collect::<Vec<char>>();
    let (answer_characters, reference_characters) = (characters(answer), characters(reference));
    let (answer_words, reference_words) = (split_punctuation(answer), split_punctuation(reference));
    let mut counts = [0.0; WIDTH];
    let (of_characters, of_words) = counts.split_at_mut(3 * CHARACTERS);
    for (n, counts) in of_characters.chunks_exact_mut(3).enumerate() {
        count(&ngrams(&answer_characters, n + 1), &ngrams(&reference_characters, n + 1), counts);
    }
    for (n, counts) in of_words.chunks_exact_mut(3).enumerate() {
        count(&ngrams(&answer_words, n + 1), &ngrams(&reference_words, n + 1), counts);
    }
    counts
}

/// The answer's n-grams do not count if the reference has none of that length.
fn count<T: Eq + Hash>(answer: &Counts<'_, T>, reference: &Counts<'_, T>, counts: &mut [f64]) {
    let total = |grams: &Counts<'_, T>| grams.values().sum::<u64>() as f64;
    counts[0] = if reference.is_empty() { 0.0 } else { total(answer) };
    counts[1] = total(reference);
    counts[2] = common(answer, reference) as f64;
}

/// Words with one punctuation mark at the end, or else at the beginning, taken off.
fn split_punctuation(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    for word in words(text) {
        let marks = |character: Option<char>| character.filter(char::is_ascii_punctuation).map(char::len_utf8);
        let single = word.chars().nth(1).is_none();
        match (marks(word.chars().next_back()), marks(word.chars().next())) {
            (Some(mark), _) if !single => parts.extend([&word[..word.len() - mark], &word[word.len() - mark..]]),
            (_, Some(mark)) if !single => parts.extend([&word[..mark], &word[mark..]]),
            _ => parts.push(word),
        }
    }
    parts
}

/// The score of counts, from 0 to 100; `with_words` is chrF++.
pub fn chrf(counts: &[f64; WIDTH], with_words: bool) -> f64 {
    let orders = if with_words { CHARACTERS + WORDS } else { CHARACTERS };
    let (mut precision, mut recall, mut used) = (0.0, 0.0, 0.0);
    for order in counts.chunks_exact(3).take(orders) {
        let [answer, reference, both] = [order[0], order[1], order[2]];
        if answer > 0.0 && reference > 0.0 {
            precision += both / answer;
            recall += both / reference;
            used += 1.0;
        }
    }
    if precision + recall == 0.0 {
        return 0.0;
    }
    let (precision, recall) = (precision / used, recall / used);
    100.0 * (1.0 + BETA_SQUARED) * precision * recall / (BETA_SQUARED * precision + recall)
}
