//! The field `answers` of a question: what several people answered, as VQA v2, `TextVQA`, and `DocVQA` store it. It is a list
//! of texts, or of objects with the text in `answer`.
use serde_json::{Map, Value};
use std::collections::HashMap;

/// The name of the field.
pub const FIELD: &str = "answers";

/// The answers of a row; `None` if the field is absent, empty, or has anything else.
pub fn of(row: &Map<String, Value>) -> Option<Vec<&str>> {
    let items = row.get(FIELD)?.as_array().filter(|items| !items.is_empty())?;
    items.iter().map(|item| item.as_str().or_else(|| item.get("answer")?.as_str())).collect()
}

/// Takes the answers from a row; empty if it has none.
pub fn take(row: &mut Map<String, Value>) -> Vec<String> {
    let answers = of(row).map(|texts| texts.into_iter().map(str::to_owned).collect());
    answers.inspect(|_| drop(row.shift_remove(FIELD))).unwrap_or_default()
}

/// The most frequent answer; of several, the one that comes first. `None` if there is no answer.
pub fn most_frequent<'a>(answers: &[&'a str]) -> Option<&'a str> {
    let mut times: HashMap<&str, usize> = HashMap::new();
    for &text in answers {
        *times.entry(text).or_default() += 1;
    }
    let most = times.values().max()?;
    answers.iter().copied().find(|text| times[text] == *most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn answers_are_texts_or_objects_with_a_text() {
        let of = |answers: Value| {
            let mut row = Map::from_iter([(FIELD.to_owned(), answers)]);
            let taken = take(&mut row);
            assert_eq!(row.is_empty(), !taken.is_empty(), "what is not read stays");
            taken
        };
        assert_eq!(of(json!(["net", "a net", "net"])), ["net", "a net", "net"]);
        assert_eq!(of(json!([{"answer": "yes", "answer_confidence": "maybe"}, {"answer": "no"}])), ["yes", "no"]);
        for other in [json!([]), json!(null), json!("net"), json!({"text": ["net"]}), json!(["net", 1]), json!([{}])] {
            assert!(of(other.clone()).is_empty(), "{other}");
        }
    }

    #[test]
    fn of_equally_frequent_answers_the_first_counts() {
        assert_eq!(most_frequent(&["b", "a", "a", "b", "c"]), Some("b"));
        assert_eq!(most_frequent(&["b", "a", "a"]), Some("a"));
        assert_eq!(most_frequent(&[]), None);
    }
}
