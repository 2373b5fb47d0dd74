//! What text metrics share: white space as Python splits it, WMT's tokenizer `13a`, and counts of n-grams.
use regex::Regex;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::LazyLock;

/// Whether Python's `str.split` separates at `character`: Unicode's white space and four control characters.
const fn is_space(character: char) -> bool {
    character.is_whitespace() || matches!(character, '\u{1c}'..='\u{1f}')
}

/// The words of a text, as Python's `str.split()` finds them.
pub fn words(text: &str) -> Vec<&str> {
    text.split(is_space).filter(|word| !word.is_empty()).collect()
}

/// The text without white space at its end, as by Python's `str.rstrip()`.
pub fn without_end_space(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

/// The words of a text by mteval's tokenizer `13a`, sacrebleu's default: punctuation marks are words of their own, but
/// periods and commas stay within numbers.
pub fn tokenize_13a(text: &str) -> Vec<String> {
    static RULES: LazyLock<[(Regex, &str); 4]> = LazyLock::new(|| {
        [
            (r"([\{-\~\[-\` -\&\(-\+\:-\@/])", " ${1} "),
            (r"([^0-9])([.,])", "${1} ${2} "),
            (r"([.,])([^0-9])", " ${1} ${2}"),
            (r"([0-9])(-)", "${1} ${2} "),
        ]
        .map(|(pattern, with)| (Regex::new(pattern).expect("a constant expression"), with))
    });
    let mut line = text.replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
    if line.contains('&') {
        for (entity, character) in [("&quot;", "\""), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")] {
            line = line.replace(entity, character);
        }
    }
    line = format!(" {line} ");
    for (pattern, with) in RULES.iter() {
        line = pattern.replace_all(&line, *with).into_owned();
    }
    words(&line).into_iter().map(ToOwned::to_owned).collect()
}

/// How often each n-gram of a text occurs.
pub type Counts<'a, T> = HashMap<&'a [T], u64>;

/// How often each sequence of `n` items occurs.
pub fn ngrams<T: Eq + Hash>(items: &[T], n: usize) -> Counts<'_, T> {
    let mut counts = HashMap::new();
    for gram in items.windows(n) {
        *counts.entry(gram).or_insert(0) += 1;
    }
    counts
}

/// The number of n-grams in both texts, with repetitions.
pub fn common<T: Eq + Hash>(left: &Counts<'_, T>, right: &Counts<'_, T>) -> u64 {
    let (small, large) = if left.len() <= right.len() { (left, right) } else { (right, left) };
    small.iter().map(|(gram, count)| (*count).min(large.get(gram).copied().unwrap_or(0))).sum()
}

/// The harmonic mean of precision and recall; 0 if both are 0.
pub fn f_measure(precision: f64, recall: f64) -> f64 {
    if precision + recall > 0.0 { 2.0 * precision * recall / (precision + recall) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokenizer_keeps_numbers_whole_and_python_s_spaces_apart() {
        let tokens = |text| tokenize_13a(text).join("|");
        assert_eq!(
            tokens("Hello, world! 3.14 costs $1,000.50 (approx)."),
            "Hello|,|world|!|3.14|costs|$|1,000.50|(|approx|)|."
        );
        assert_eq!(tokens("1990-1995 &quot;x&amp;y&quot; a-\nb"), "1990|-|1995|\"|x|&|y|\"|ab");
        assert_eq!(words("a\u{1f}b\u{a0}c "), ["a", "b", "c"]);
        assert_eq!(without_end_space("a \u{1e}"), "a");
    }

    #[test]
    fn common_n_grams_count_as_often_as_both_have_them() {
        let (left, right) = (["a", "b", "a", "b"], ["a", "b", "c"]);
        assert_eq!(common(&ngrams(&left, 1), &ngrams(&right, 1)), 2);
        assert_eq!(common(&ngrams(&left, 2), &ngrams(&right, 2)), 1);
        assert!(ngrams(&right, 4).is_empty());
    }
}
