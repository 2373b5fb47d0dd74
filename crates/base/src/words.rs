//! Numbers and nouns in messages: `1,234 rows`, `1 row is`.
use std::fmt::Display;

/// A number with commas between thousands: `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number with its noun, which is given in the singular: `1 row`, `2 rows`. The number may already be grouped.
pub fn count(number: impl Display, noun: &str) -> String {
    let number = number.to_string();
    let plural = number != "1";
    format!("{number} {}", if plural { many(noun) } else { noun.to_owned() })
}

/// As [`count`], as the subject of a sentence: `1 row is`, `2 rows are`.
pub fn are(number: impl Display, noun: &str) -> String {
    let number = number.to_string();
    let verb = if number == "1" { "is" } else { "are" };
    format!("{} {verb}", count(number, noun))
}

/// The plural of a noun, or of the last word of several.
fn many(noun: &str) -> String {
    if let Some(stem) = noun.strip_suffix("ix") {
        return format!("{stem}ices");
    }
    if let Some(stem) = noun.strip_suffix('y').filter(|stem| !stem.ends_with(['a', 'e', 'o', 'u'])) {
        return format!("{stem}ies");
    }
    if ["s", "x", "ch", "sh"].iter().any(|end| noun.ends_with(end)) { format!("{noun}es") } else { format!("{noun}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_s_noun_is_in_the_singular_after_one_only() {
        assert_eq!(["0 rows", "1 row", "2 rows"].map(String::from), [0, 1, 2].map(|number| count(number, "row")));
        assert_eq!(
            (count(1, "event file"), count(2, "micro-batch")),
            ("1 event file".into(), "2 micro-batches".into())
        );
        assert_eq!([count(2, "matrix"), count(2, "entry"), count(2, "key")], ["2 matrices", "2 entries", "2 keys"]);
        assert_eq!((are(1, "row"), are(grouped(2000), "row")), ("1 row is".into(), "2,000 rows are".into()));
    }

    #[test]
    fn digits_are_grouped_by_three() {
        assert_eq!(["0", "999", "1,000", "1,234,567"].map(String::from), [0, 999, 1000, 1_234_567].map(grouped));
    }
}
