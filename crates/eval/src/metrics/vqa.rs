//! The accuracy of VQA v2: A. Agrawal et al., "VQA: visual question answering", 2015, by the official script
//! `vqaEval.py` (<https://github.com/GT-Vision-Lab/VQA>). An answer that three of the other annotators gave is right.
//! Each annotator is left out once, and the accuracy is the mean.
use super::text::words;
use regex::Regex;
use std::collections::HashMap;
use std::sync::LazyLock;

/// The number of equal answers that make an answer right.
const ENOUGH: f64 = 3.0;
/// Punctuation that is removed, in this order.
const PUNCTUATION: &str = ";/[]\"{}()=+\\_-><@`,?!";
/// The script removes as many periods: it passes a flag in place of the count.
const PERIODS: usize = 32;
const NUMBERS: [(&str, &str); 12] = [
    ("none", "0"),
    ("zero", "0"),
    ("one", "1"),
    ("two", "2"),
    ("three", "3"),
    ("four", "4"),
    ("five", "5"),
    ("six", "6"),
    ("seven", "7"),
    ("eight", "8"),
    ("nine", "9"),
    ("ten", "10"),
];
/// A word that equals one of these except for a missing apostrophe gets the apostrophe.
const CONTRACTIONS: &str = "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't \
     he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't needn't \
     not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's \
     someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're \
     there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's \
     where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've y'all \
     y'all'd've y'all'll you'd you'd've you'll you're you've";

/// The accuracy of an answer, from 0 to 1, by the `references` of several annotators. As in the script, texts are
/// normalized only if the references differ. With a single reference, it is 1 if both are equal after normalization.
pub fn accuracy(answer: &str, references: &[&str]) -> f64 {
    let references: Vec<String> = references.iter().map(|text| one_line(text)).collect();
    let answer = one_line(answer);
    if let [reference] = &references[..] {
        return f64::from(normalize(&answer) == normalize(reference));
    }
    let differ = references.windows(2).any(|pair| pair[0] != pair[1]);
    let wanted = if differ { normalize(&answer) } else { answer };
    let same = |reference: &String| if differ { normalize(reference) == wanted } else { *reference == wanted };
    let equal: Vec<bool> = references.iter().map(same).collect();
    let all = equal.iter().filter(|equal| **equal).count() as f64;
    equal.iter().map(|own| ((all - f64::from(*own)) / ENOUGH).min(1.0)).sum::<f64>() / references.len().max(1) as f64
}

fn one_line(text: &str) -> String {
    text.replace(['\n', '\t'], " ").trim().to_owned()
}

/// The text without most punctuation and articles, in lower case, with numbers up to ten as digits.
pub fn normalize(text: &str) -> String {
    static MISSING: LazyLock<HashMap<String, &str>> = LazyLock::new(contractions);
    let plain = without_punctuation(text).to_lowercase();
    let number = |word| NUMBERS.iter().find(|(name, _)| *name == word).map_or(word, |(_, digits)| *digits);
    let kept = words(&plain).into_iter().map(number).filter(|word| !matches!(*word, "a" | "an" | "the"));
    kept.map(|word| MISSING.get(word).copied().unwrap_or(word)).collect::<Vec<&str>>().join(" ")
}

/// Every word that lacks one apostrophe, with the right one.
fn contractions() -> HashMap<String, &'static str> {
    // The script takes this one's apostrophe away.
    let mut missing = HashMap::from([("somebody'd".to_owned(), "somebodyd")]);
    for word in CONTRACTIONS.split(' ') {
        for (at, mark) in word.match_indices('\'') {
            missing.insert([&word[..at], &word[at + mark.len()..]].concat(), word);
        }
    }
    missing
}

/// Removes a mark that stands beside a space anywhere in the text, and every mark if a comma stands between digits. Other marks
/// become spaces. Periods go unless a digit follows.
fn without_punctuation(text: &str) -> String {
    static COMMA: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\d,\d").expect("a constant expression"));
    static DIGIT: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"^\d").expect("a constant expression"));
    let comma = COMMA.is_match(text);
    let mut plain = text.to_owned();
    for mark in PUNCTUATION.chars() {
        let beside_space = text.contains(&format!("{mark} ")) || text.contains(&format!(" {mark}"));
        plain = plain.replace(mark, if comma || beside_space { "" } else { " " });
    }
    let (mut kept, mut removed) = (String::with_capacity(plain.len()), 0);
    for (at, character) in plain.char_indices() {
        if character == '.' && removed < PERIODS && !DIGIT.is_match(&plain[at + 1..]) {
            removed += 1;
        } else {
            kept.push(character);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::super::tests as golden;
    use super::*;

    #[test]
    fn accuracy_is_that_of_the_official_script() {
        let golden = &golden::captions()["questions"];
        for row in golden["rows"].as_array().unwrap() {
            let (answer, references) = golden::texts(row);
            let (got, want) = (accuracy(answer, &references), row["accuracy"].as_f64().unwrap());
            assert!((got - want).abs() < 1e-12, "{answer:?} {references:?}: {got}, not {want}");
        }
        for (text, normalized) in golden["normalized"].as_object().unwrap() {
            assert_eq!(normalize(text), normalized.as_str().unwrap(), "{text:?}");
        }
        for (word, whole) in golden["contractions"].as_object().unwrap() {
            // Words that have all their apostrophes are left as they are, which the script's table says of a few.
            assert_eq!(contractions().get(word).copied().unwrap_or(word), whole.as_str().unwrap(), "{word}");
        }
        let pairs = golden["contractions"].as_object().unwrap();
        assert!(contractions().keys().all(|word| pairs.contains_key(word)), "no word that the script lacks");
    }

    #[test]
    fn a_single_reference_is_compared_after_normalization() {
        assert_eq!(accuracy("The Two dogs!", &["2 dogs"]), 1.0);
        assert_eq!(accuracy("three dogs", &["2 dogs"]), 0.0);
        // Two others gave it, of three needed; but three did where the dog is left out.
        assert!((accuracy("cat", &["cat", "cat", "cat", "dog"]) - (3.0 * 2.0 / 3.0 + 1.0) / 4.0).abs() < 1e-15);
        assert_eq!(accuracy("cat", &[]), 0.0);
    }
}
