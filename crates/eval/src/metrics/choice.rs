//! Metrics of answers that choose: the letter of a multiple-choice option, or yes or no.
use super::text::f_measure;
use regex::Regex;
use std::sync::LazyLock;

/// The letter of the option that a text chooses, in upper case:
///
/// 1. a letter at its beginning, in either case, that is all of it or is followed by `)`, `]`, `.`, `:` or `,` (`B`, `(b)`,
///    `B. a dog`);
/// 2. else the last capital letter after `answer`, `answer is` or `answer:`;
/// 3. else the capital letter that stands in parentheses, or after `option` or `choice`, if there is only one such letter.
///
/// `None` if there is none, as in `A dog.`.
pub fn letter(text: &str) -> Option<char> {
    static RULES: LazyLock<[Regex; 3]> = LazyLock::new(|| {
        [
            r"^[(\[*\s]*([A-Za-z])\**(?:[)\].:,]|\s*$)",
            r"(?i:\banswer(?:\s+is)?\s*:?)[\s(\[*]*([A-Z])\b",
            r"(?:[(\[]\s*([A-Z])\s*[)\]])|(?:(?i:\b(?:option|choice)\s+)[(\[*]*([A-Z])\b)",
        ]
        .map(|pattern| Regex::new(pattern).expect("a constant expression"))
    });
    let [first, answer, option] = &*RULES;
    let letters = |rule: &Regex| -> Vec<char> {
        let all = rule.captures_iter(text).filter_map(|found| {
            let group = found.iter().skip(1).flatten().next();
            group.and_then(|group| group.as_str().chars().next())
        });
        all.map(|letter| letter.to_ascii_uppercase()).collect()
    };
    let only =
        |letters: Vec<char>| letters.first().copied().filter(|letter| letters.iter().all(|other| other == letter));
    letters(first).first().copied().or_else(|| letters(answer).last().copied()).or_else(|| only(letters(option)))
}

/// Whether both choose the same letter; `None` if the reference chooses none.
pub fn same_letter(answer: &str, reference: &str) -> Option<bool> {
    letter(reference).map(|wanted| letter(answer) == Some(wanted))
}

/// How many counts [`yes_no`] gives for a row.
pub const WIDTH: usize = 4;

/// What a row counts as: a yes that is right, a yes that is wrong, a no that is right, a no that is wrong. Nothing, if the
/// reference's first word is neither yes nor no.
pub fn yes_no(answer: &str, reference: &str) -> [f64; WIDTH] {
    let mut counts = [0.0; WIDTH];
    let wanted = words(reference).next();
    let wanted = match wanted.as_deref() {
        Some("yes") => true,
        Some("no") => false,
        _ => return counts,
    };
    let yes = is_yes(answer);
    counts[2 * usize::from(!yes) + usize::from(yes != wanted)] = 1.0;
    counts
}

/// As in POPE (Y. Li et al., "Evaluating object hallucination in large vision-language models", 2023): everything is yes, unless
/// the first sentence has the word no or not. Upper and lower case are the same here, and punctuation is no part of a word.
fn is_yes(answer: &str) -> bool {
    let sentence = answer.trim().split('.').next().unwrap_or_default();
    !words(sentence).any(|word| word == "no" || word == "not")
}

/// Words of letters, digits and apostrophes, in lower case.
fn words(text: &str) -> impl Iterator<Item = String> {
    let parts = text.split(|character: char| !(character.is_alphanumeric() || matches!(character, '\'' | '’')));
    parts.filter(|word| !word.is_empty()).map(str::to_lowercase)
}

/// Accuracy, and precision, recall and F1 of yes. A division by 0 gives 0; without any row all are NaN.
pub fn yes_no_scores(counts: &[f64; WIDTH]) -> [f64; 4] {
    let [right_yes, wrong_yes, right_no, wrong_no] = *counts;
    if counts.iter().all(|&count| count == 0.0) {
        return [f64::NAN; 4];
    }
    let share = |of: f64| if of > 0.0 { right_yes / of } else { 0.0 };
    let (precision, recall) = (share(right_yes + wrong_yes), share(right_yes + wrong_no));
    [(right_yes + right_no) / counts.iter().sum::<f64>(), precision, recall, f_measure(precision, recall)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_letter_is_found_where_answers_have_it() {
        for text in ["B", " b\n", "(b)", "[B]", "B. a dog", "B) a dog", "b: dog", "**B**", "**B.** a dog", "B, the dog"]
        {
            assert_eq!(letter(text), Some('B'), "{text}");
        }
        for text in [
            "The answer is B.",
            "Answer: (B) a dog",
            "I think A is wrong, so the answer is **B**, not A.",
            "First, the answer is A. No: the answer is B",
            "It must be (B).",
            "Clearly option B",
            "Choice B, I mean option B",
        ] {
            assert_eq!(letter(text), Some('B'), "{text}");
        }
        for text in
            ["", "A dog.", "a dog", "the answer is a dog", "Either (A) or (B)", "option A or option B", "Both", "42"]
        {
            assert_eq!(letter(text), None, "{text}");
        }
        assert_eq!(same_letter("c", "C. a cat"), Some(true));
        assert_eq!(same_letter("A cat", "A"), Some(false));
        assert_eq!(same_letter("A", "a cat"), None);
    }

    #[test]
    fn yes_and_no_are_counted_against_the_reference() {
        for (answer, reference, place) in [
            ("Yes, there is a dog.", "yes", 0),
            ("There is a dog. It is not big.", "Yes.", 0),
            ("yes", "no", 1),
            ("", "No", 1),
            ("NO!", "no", 2),
            ("There is not, I think", "No, there is none.", 2),
            ("No\n", "yes", 3),
        ] {
            let mut wanted = [0.0; WIDTH];
            wanted[place] = 1.0;
            assert_eq!(yes_no(answer, reference), wanted, "{answer:?} {reference:?}");
        }
        assert_eq!(yes_no("yes", "two dogs"), [0.0; WIDTH]);
        // Precision 3/4, recall 3/5: F1 is 2 * 0.45 / 1.35.
        let [accuracy, precision, recall, f1] = yes_no_scores(&[3.0, 1.0, 4.0, 2.0]);
        assert_eq!((accuracy, precision, recall), (0.7, 0.75, 0.6));
        assert!((f1 - 2.0 / 3.0).abs() < 1e-15);
        assert_eq!(yes_no_scores(&[0.0, 0.0, 2.0, 0.0]), [1.0, 0.0, 0.0, 0.0]);
        assert!(yes_no_scores(&[0.0; WIDTH]).iter().all(|score| score.is_nan()));
    }
}
