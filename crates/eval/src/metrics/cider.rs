//! `CIDEr` of captions: R. Vedantam et al., "`CIDEr`: consensus-based image description evaluation", 2015, by the formula of
//! `pycocoevalcap`'s `cider`.
//!
//! A text is a vector of its n-grams' counts times `ln(rows / rows whose references have the n-gram)`, for each n from 1 to 4.
//! A row's score is the mean, over n and references, of
//! `10 * exp(-d^2 / (2 * 6^2)) * sum(min(answer, reference) * reference) / (|answer| * |reference|)`, where `d` is the difference
//! in the number of word pairs. The paper calls this form, with `min` and the factor for lengths, `CIDEr-D`.
//!
//! Words are those of the tokenizer 13a in lower case, without words that are only ASCII punctuation. `pycocoevalcap`
//! itself runs a Java program for that, which also splits off `'s` and `n't`.
use super::bootstrap::Sums;
use super::text::{tokenize_13a, without_end_space};
use std::collections::{HashMap, HashSet};

/// N-grams have up to this many words.
const ORDER: usize = 4;
const SIGMA: f64 = 6.0;
const SCALE: f64 = 10.0;

/// The words of a caption as they are compared.
pub fn tokenize(text: &str) -> Vec<String> {
    let mut words = tokenize_13a(without_end_space(&text.to_lowercase()));
    words.retain(|word| !word.chars().all(|character| character.is_ascii_punctuation()));
    words
}

/// The words of one row, as numbers.
#[derive(Debug)]
struct Caption {
    row: u64,
    answer: Vec<u32>,
    references: Vec<Vec<u32>>,
}

/// Answers and references of all rows, because the weight of an n-gram depends on all of them. Takes 4 bytes a word.
#[derive(Debug, Default)]
pub struct Cider {
    ids: HashMap<String, u32>,
    captions: Vec<Caption>,
}

/// One n-gram with its weight.
type Weighted<'a> = (&'a [u32], f64);

/// A text's n-grams of each length in their order, with weights, and the norm of each length.
struct Vector<'a> {
    grams: [Vec<Weighted<'a>>; ORDER],
    norms: [f64; ORDER],
    pairs: f64,
}

impl Cider {
    /// Adds a row; `row` is its index in the split.
    pub fn add(&mut self, row: u64, answer: &str, references: &[&str]) {
        let answer = self.words(answer);
        let references = references.iter().map(|text| self.words(text)).collect();
        self.captions.push(Caption { row, answer, references });
    }

    fn words(&mut self, text: &str) -> Vec<u32> {
        let mut id = |word| {
            let next = self.ids.len() as u32;
            *self.ids.entry(word).or_insert(next)
        };
        tokenize(text).into_iter().map(&mut id).collect()
    }

    /// The score of each row, 0 to 10, in the order they were added. A single row has 0: every n-gram is in all rows.
    pub fn scores(&self) -> Vec<f64> {
        let weights = self.weights();
        let score = |caption: &Caption| {
            let answer = Vector::of(&caption.answer, &weights);
            let alike = |reference: &Vec<u32>| answer.similarity(&Vector::of(reference, &weights));
            SCALE * caption.references.iter().map(alike).sum::<f64>() / caption.references.len() as f64
        };
        self.captions.iter().map(score).collect()
    }

    /// The sums of scores and rows; `None` without rows. In replicates, n-grams keep the weights that they have over all rows.
    pub(super) fn sums(&self, replicates: usize, seed: u64) -> Option<Sums> {
        if self.captions.is_empty() {
            return None;
        }
        let mut sums = Sums::new(2, replicates, seed);
        for (caption, score) in self.captions.iter().zip(self.scores()) {
            sums.add(caption.row, &[score, 1.0]);
        }
        Some(sums)
    }

    fn weights(&self) -> Weights<'_> {
        let mut rows: HashMap<&[u32], f64> = HashMap::new();
        for caption in &self.captions {
            let grams = |n| caption.references.iter().flat_map(move |reference| reference.windows(n));
            let once: HashSet<&[u32]> = (1..=ORDER).flat_map(grams).collect();
            for gram in once {
                *rows.entry(gram).or_insert(0.0) += 1.0;
            }
        }
        Weights { rows, all: (self.captions.len() as f64).ln() }
    }
}

/// How rare n-grams are.
struct Weights<'a> {
    /// The number of rows whose references have an n-gram.
    rows: HashMap<&'a [u32], f64>,
    /// The logarithm of the number of rows.
    all: f64,
}

impl Weights<'_> {
    /// An n-gram that no reference has counts like one of a single row.
    fn of(&self, gram: &[u32]) -> f64 {
        self.all - self.rows.get(gram).copied().unwrap_or(1.0).ln()
    }
}

impl<'a> Vector<'a> {
    fn of(words: &'a [u32], weights: &Weights<'_>) -> Self {
        let mut grams = [const { Vec::new() }; ORDER];
        let mut norms = [0.0; ORDER];
        for (n, grams) in grams.iter_mut().enumerate() {
            let mut sorted: Vec<&[u32]> = words.windows(n + 1).collect();
            sorted.sort_unstable();
            *grams = sorted
                .chunk_by(|one, next| one == next)
                .map(|same| (same[0], same.len() as f64 * weights.of(same[0])))
                .collect();
            norms[n] = grams.iter().map(|(_, weight)| weight * weight).sum::<f64>().sqrt();
        }
        Self { grams, norms, pairs: words.len().saturating_sub(1) as f64 }
    }

    /// From 0 to 1, the mean over the lengths of n-grams.
    fn similarity(&self, reference: &Self) -> f64 {
        let mut sum = 0.0;
        for n in 0..ORDER {
            let norms = self.norms[n] * reference.norms[n];
            if norms > 0.0 {
                sum += common(&self.grams[n], &reference.grams[n]) / norms;
            }
        }
        let distance = self.pairs - reference.pairs;
        sum / ORDER as f64 * (-distance * distance / (2.0 * SIGMA * SIGMA)).exp()
    }
}

/// The sum of `min(answer, reference) * reference` over the n-grams of both, which are sorted.
fn common(answer: &[Weighted<'_>], reference: &[Weighted<'_>]) -> f64 {
    let both = |(gram, weight): &Weighted<'_>| {
        let place = reference.binary_search_by(|(other, _)| other.cmp(gram)).ok()?;
        let wanted = reference[place].1;
        Some(weight.min(wanted) * wanted)
    };
    answer.iter().filter_map(both).sum()
}

#[cfg(test)]
mod tests {
    use super::super::tests as golden;
    use super::*;

    #[test]
    fn scores_and_words_are_those_of_pycocoevalcap() {
        let golden = &golden::captions()["captions"];
        let rows = golden["rows"].as_array().unwrap();
        let mut cider = Cider::default();
        for (index, row) in rows.iter().enumerate() {
            let (answer, references) = golden::texts(row);
            let words: Vec<String> = references.iter().map(|text| tokenize(text).join(" ")).collect();
            assert_eq!(serde_json::json!(words), row["words"]);
            cider.add(index as u64, answer, &references);
        }
        for (score, row) in cider.scores().into_iter().zip(rows) {
            let want = row["cider"].as_f64().unwrap();
            assert!((score - want).abs() < 1e-12, "{row}: {score}");
        }
        let sums = cider.sums(0, 1).unwrap().all;
        assert!((sums[0] / sums[1] - golden["cider"].as_f64().unwrap()).abs() < 1e-12);
    }

    #[test]
    fn rare_n_grams_count_more_than_those_of_all_rows() {
        let mut cider = Cider::default();
        assert!(cider.sums(10, 1).is_none());
        cider.add(0, "a dog", &["a dog"]);
        assert_eq!(cider.scores(), [0.0], "of one row, every n-gram is in all");
        cider.add(1, "a dog", &["a cat"]);
        // By hand: `a` weighs nothing; `dog`, `cat` and the pairs weigh ln 2. The first row agrees in words and pairs, of four
        // lengths; the second in nothing that weighs.
        let scores = cider.scores();
        assert!((scores[0] - 5.0).abs() < 1e-12 && scores[1] == 0.0, "{scores:?}");
        cider.add(2, "a dog a dog a dog a dog", &["a dog"]);
        assert!(cider.scores()[2] < 5.0, "a repeated word counts as often as in the reference");
    }
}
