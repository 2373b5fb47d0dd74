//! SARI, for rewritten text: W. Xu et al., "Optimizing statistical machine translation for text simplification", 2016, as
//! tensor2tensor and Hugging Face's `evaluate` compute it (0/0 counts as 1; lower case, tokenizer 13a).
use super::text::{f_measure, tokenize_13a};
use std::collections::HashMap;

/// N-grams have up to this many words.
const ORDER: usize = 4;

/// The score of one answer, from 0 to 1: by `references`, how well words of `source` were kept and deleted, and new ones added.
pub fn sari(source: &str, answer: &str, references: &[&str]) -> f64 {
    let tokens = |text: &str| {
        let tokens = tokenize_13a(&text.to_lowercase());
        // The reference implementation sees one empty word in an empty text.
        if tokens.is_empty() { vec![String::new()] } else { tokens }
    };
    let (source, answer) = (tokens(source), tokens(answer));
    let references: Vec<Vec<String>> = references.iter().map(|text| tokens(text)).collect();
    let (mut kept, mut deleted, mut added) = (0.0, 0.0, 0.0);
    for n in 1..=ORDER {
        let grams = Grams {
            source: count([&source[..]], n, references.len()),
            answer: count([&answer[..]], n, references.len()),
            references: count(references.iter().map(Vec::as_slice), n, 1),
        };
        kept += grams.kept();
        deleted += grams.deleted();
        added += grams.added();
    }
    (kept + deleted + added) / (3 * ORDER) as f64
}

/// N-grams by how often they occur.
type Counts<'a> = HashMap<&'a [String], u64>;

/// The n-grams of one length. Those of source and answer count once per reference.
struct Grams<'a> {
    source: Counts<'a>,
    answer: Counts<'a>,
    references: Counts<'a>,
}

fn count<'a>(texts: impl IntoIterator<Item = &'a [String]>, n: usize, times: usize) -> Counts<'a> {
    let mut counts = HashMap::new();
    for gram in texts.into_iter().flat_map(|text| text.windows(n)) {
        *counts.entry(gram).or_insert(0) += times as u64;
    }
    counts
}

/// `sum / of`, or 1 if `of` is 0.
fn share(sum: f64, of: f64) -> f64 {
    if of > 0.0 { sum / of } else { 1.0 }
}

impl Grams<'_> {
    fn kept(&self) -> f64 {
        let (mut kept, mut good_shares, mut good, mut wanted) = (0.0, 0.0, 0.0, 0.0);
        for (gram, &source) in &self.source {
            let of = |counts: &Counts<'_>| counts.get(gram).copied().unwrap_or(0);
            let (here, reference) = (source.min(of(&self.answer)), of(&self.references));
            wanted += source.min(reference) as f64;
            if here > 0 {
                kept += 1.0;
                good += here.min(reference) as f64;
                good_shares += here.min(reference) as f64 / here as f64;
            }
        }
        f_measure(share(good_shares, kept), share(good, wanted))
    }

    fn deleted(&self) -> f64 {
        let (mut deleted, mut good) = (0.0, 0.0);
        for (gram, &source) in &self.source {
            let of = |counts: &Counts<'_>| counts.get(gram).copied().unwrap_or(0);
            let gone = source.saturating_sub(of(&self.answer));
            if gone > 0 {
                deleted += 1.0;
                good += gone.saturating_sub(of(&self.references)) as f64 / gone as f64;
            }
        }
        share(good, deleted)
    }

    fn added(&self) -> f64 {
        let new = |counts: &Counts<'_>| counts.keys().filter(|gram| !self.source.contains_key(*gram)).count() as f64;
        let good =
            self.answer.keys().filter(|gram| !self.source.contains_key(*gram) && self.references.contains_key(*gram));
        let good = good.count() as f64;
        f_measure(share(good, new(&self.answer)), share(good, new(&self.references)))
    }
}
