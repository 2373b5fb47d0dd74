//! Exact match and containment, after normalization.
use super::text::words;
use tunesmith_config::Normalization;

/// The text as it is compared: `trim` takes white space off both ends; `squad` is that of the `SQuAD` benchmark: lower case,
/// no ASCII punctuation, no words `a`, `an`, `the`, single spaces.
pub fn normalize(text: &str, by: Normalization) -> String {
    match by {
        Normalization::Trim => text.trim().to_owned(),
        Normalization::Squad => {
            let lower = text.to_lowercase();
            let plain: String = lower.chars().filter(|character| !character.is_ascii_punctuation()).collect();
            let kept: Vec<&str> =
                words(&plain).into_iter().filter(|word| !matches!(*word, "a" | "an" | "the")).collect();
            kept.join(" ")
        }
    }
}

/// Whether both are equal after normalization.
pub fn equal(answer: &str, reference: &str, by: Normalization) -> bool {
    normalize(answer, by) == normalize(reference, by)
}

/// Whether the normalized answer contains the normalized reference. Only an empty answer contains an empty reference.
pub fn contains(answer: &str, reference: &str, by: Normalization) -> bool {
    let (answer, reference) = (normalize(answer, by), normalize(reference, by));
    if reference.is_empty() { answer.is_empty() } else { answer.contains(&reference) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Normalization::{Squad, Trim};

    #[test]
    fn what_counts_as_the_same_is_what_the_normalization_says() {
        assert!(equal(" Paris\n", "Paris", Trim) && !equal("paris", "Paris", Trim));
        assert!(equal("The  Eiffel-Tower, a.", "eiffeltower", Squad));
        assert!(contains("It is Paris.", "Paris", Trim) && !contains("It is paris.", "Paris", Trim));
        assert!(contains("It is the PARIS!", "a paris", Squad));
        assert!(!contains("anything", " ", Trim) && contains(" ", "", Trim));
    }
}
