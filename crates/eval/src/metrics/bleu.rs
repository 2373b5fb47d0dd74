//! BLEU as sacrebleu computes it: K. Papineni et al., "BLEU: a method for automatic evaluation of machine translation", 2002;
//! tokenizer 13a, case kept, n-grams up to 4, smoothing `exp`.
use super::text::{common, ngrams, tokenize_13a, without_end_space};

/// N-grams have up to this many words.
const ORDER: usize = 4;
/// Length of a row's counts: answer length, reference length, matches and n-grams per order.
pub const WIDTH: usize = 2 + 2 * ORDER;

/// The counts of one answer. Those of a corpus are the sums over its rows.
pub fn counts(answer: &str, reference: &str) -> [f64; WIDTH] {
    let [answer, reference] = [answer, reference].map(|text| tokenize_13a(without_end_space(text)));
    let mut counts = [0.0; WIDTH];
    (counts[0], counts[1]) = (answer.len() as f64, reference.len() as f64);
    for n in 1..=ORDER {
        counts[1 + n] = common(&ngrams(&answer, n), &ngrams(&reference, n)) as f64;
        counts[1 + ORDER + n] = (answer.len() + 1).saturating_sub(n) as f64;
    }
    counts
}

/// The BLEU of counts, from 0 to 100. `effective_order` leaves out orders longer than the answer, as sacrebleu does for single
/// sentences only.
pub fn bleu(counts: &[f64; WIDTH], effective_order: bool) -> f64 {
    let [length, reference] = [counts[0], counts[1]];
    let (correct, total) = counts[2..].split_at(ORDER);
    if correct.iter().all(|&count| count == 0.0) {
        return 0.0;
    }
    let brevity = if length < reference { (1.0 - reference / length).exp() } else { 1.0 };
    let (mut smoothing, mut order) = (1.0, ORDER);
    let mut logarithms = [None; ORDER];
    for (n, (&correct, &total)) in correct.iter().zip(total).enumerate() {
        if total == 0.0 {
            break;
        }
        if effective_order {
            order = n + 1;
        }
        let precision = if correct == 0.0 {
            smoothing *= 2.0;
            100.0 / (smoothing * total)
        } else {
            100.0 * correct / total
        };
        logarithms[n] = Some(precision.ln());
    }
    // An order without n-grams has precision 0, so the score is 0.
    let sum: Option<f64> = logarithms[..order].iter().copied().sum();
    sum.map_or(0.0, |sum| brevity * (sum / order as f64).exp())
}
