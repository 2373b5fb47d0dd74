//! ROUGE-1, -2, -L and -Lsum as the package rouge-score computes them: C.-Y. Lin, "ROUGE: a package for automatic evaluation
//! of summaries", 2004. Only the letters a-z and digits count, so that text in other scripts scores 0.
use super::porter::stem;
use super::text::{common, f_measure, ngrams};
use std::collections::HashMap;

/// Overlap of an answer with its reference, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Overlap {
    /// Matches over the answer's n-grams.
    pub precision: f64,
    /// Matches over the reference's n-grams.
    pub recall: f64,
    /// Harmonic mean of precision and recall.
    pub f: f64,
}

impl Overlap {
    fn of(hits: u64, answer: usize, reference: usize) -> Self {
        let share = |of: usize| hits as f64 / of.max(1) as f64;
        let (precision, recall) = (share(answer), share(reference));
        Self { precision, recall, f: f_measure(precision, recall) }
    }
}

/// The four kinds of ROUGE of one answer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rouge {
    /// ROUGE-1: overlap of single words.
    pub one: Overlap,
    /// ROUGE-2: overlap of word pairs.
    pub two: Overlap,
    /// ROUGE-L: longest common subsequence of words.
    pub l: Overlap,
    /// ROUGE-Lsum: union of longest common subsequences by line.
    pub lsum: Overlap,
}

/// The ROUGE of an answer; `stemmed` compares words of more than three letters by their stems.
pub fn rouge(answer: &str, reference: &str, stemmed: bool) -> Rouge {
    let mut ids = HashMap::new();
    let mut tokens = |text: &str| tokenize(text, stemmed, &mut ids);
    let (answer_words, reference_words) = (tokens(answer), tokens(reference));
    let mut lines =
        |text: &str| -> Vec<Vec<u32>> { text.split('\n').filter(|line| !line.is_empty()).map(&mut tokens).collect() };
    let (answer_lines, reference_lines) = (lines(answer), lines(reference));
    let of_ngrams = |n: usize| {
        let hits = common(&ngrams(&answer_words, n), &ngrams(&reference_words, n));
        let count = |words: &[u32]| (words.len() + 1).saturating_sub(n);
        Overlap::of(hits, count(&answer_words), count(&reference_words))
    };
    Rouge {
        one: of_ngrams(1),
        two: of_ngrams(2),
        l: Overlap::of(lcs_length(&reference_words, &answer_words), answer_words.len(), reference_words.len()),
        lsum: by_line(&answer_lines, &reference_lines),
    }
}

/// The best of each kind over several references: the one with the highest F, as rouge-score's `score_multi`.
pub fn best(answer: &str, references: &[&str], stemmed: bool) -> Rouge {
    let better = |best: Overlap, next: Overlap| if next.f > best.f { next } else { best };
    let each = references.iter().map(|reference| rouge(answer, reference, stemmed));
    let both = |best: Rouge, next: Rouge| Rouge {
        one: better(best.one, next.one),
        two: better(best.two, next.two),
        l: better(best.l, next.l),
        lsum: better(best.lsum, next.lsum),
    };
    each.reduce(both).unwrap_or_default()
}

/// The words of a text as numbers, equal for equal words (or stems).
fn tokenize(text: &str, stemmed: bool, ids: &mut HashMap<String, u32>) -> Vec<u32> {
    let lower = text.to_lowercase();
    let words = lower.split(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit())).filter(|word| !word.is_empty());
    words
        .map(|word| {
            let token = if stemmed && word.len() > 3 { stem(word) } else { word.to_owned() };
            let next = ids.len() as u32;
            *ids.entry(token).or_insert(next)
        })
        .collect()
}

fn lcs_length(reference: &[u32], answer: &[u32]) -> u64 {
    let mut row = vec![0u32; answer.len() + 1];
    for word in reference {
        let mut above_left = 0;
        for (column, other) in answer.iter().enumerate() {
            let above = row[column + 1];
            row[column + 1] = if word == other { above_left + 1 } else { above.max(row[column]) };
            above_left = above;
        }
    }
    u64::from(row[answer.len()])
}

/// Marks the words of `reference` in the longest common subsequence that rouge-score finds. The table keeps one bit per cell:
/// whether the left cell is larger than the upper one.
fn mark_lcs(reference: &[u32], answer: &[u32], marks: &mut [bool]) {
    let columns = answer.len();
    let mut left_is_larger = vec![0u64; (reference.len() * columns).div_ceil(64)];
    let mut row = vec![0u32; columns + 1];
    for (line, word) in reference.iter().enumerate() {
        let mut above_left = 0;
        for (column, other) in answer.iter().enumerate() {
            let (above, left) = (row[column + 1], row[column]);
            if left > above {
                let cell = line * columns + column;
                left_is_larger[cell / 64] |= 1 << (cell % 64);
            }
            row[column + 1] = if word == other { above_left + 1 } else { above.max(left) };
            above_left = above;
        }
    }
    let (mut line, mut column) = (reference.len(), columns);
    while line > 0 && column > 0 {
        let cell = (line - 1) * columns + column - 1;
        if reference[line - 1] == answer[column - 1] {
            marks[line - 1] = true;
            (line, column) = (line - 1, column - 1);
        } else if left_is_larger[cell / 64] >> (cell % 64) & 1 == 1 {
            column -= 1;
        } else {
            line -= 1;
        }
    }
}

/// ROUGE-Lsum of texts split into lines. A word counts at most as often as both sides contain it.
fn by_line(answer: &[Vec<u32>], reference: &[Vec<u32>]) -> Overlap {
    let total = |lines: &[Vec<u32>]| lines.iter().map(Vec::len).sum::<usize>();
    let (answer_total, reference_total) = (total(answer), total(reference));
    if answer_total == 0 || reference_total == 0 {
        return Overlap::default();
    }
    let counts = |lines: &[Vec<u32>]| {
        let mut counts: HashMap<u32, u64> = HashMap::new();
        lines.iter().flatten().for_each(|word| *counts.entry(*word).or_insert(0) += 1);
        counts
    };
    let (mut of_answer, mut of_reference) = (counts(answer), counts(reference));
    let mut hits = 0;
    for line in reference {
        let mut marks = vec![false; line.len()];
        for other in answer {
            mark_lcs(line, other, &mut marks);
        }
        for (word, _) in line.iter().zip(marks).filter(|(_, marked)| *marked) {
            if let (Some(left @ 1..), Some(right @ 1..)) = (of_answer.get_mut(word), of_reference.get_mut(word)) {
                (*left, *right, hits) = (*left - 1, *right - 1, hits + 1);
            }
        }
    }
    Overlap::of(hits, answer_total, reference_total)
}
