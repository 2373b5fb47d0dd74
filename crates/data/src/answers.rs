//! The field `answers` of a question: what several people answered, as VQA v2, `TextVQA`, and `DocVQA` store it. It is a
//! list of texts, or of objects with the text in `answer`.
//!
//! Other data sets call the choices of a question so. The field is taken for people's answers only where nothing in the
//! row says which of them is right.
use serde_json::{Map, Value};
use std::collections::HashMap;

const FIELD: &str = "answers";
/// VQA v2's name of the most frequent answer.
const CHOSEN: &str = "multiple_choice_answer";
/// Fields that say which of several choices is right; also each that begins with `correct`.
const OF_CHOICES: [&str; 9] =
    ["label", "labels", "choices", "options", "answerKey", "answer_key", "answer_idx", "answer_index", "solution"];

/// Whether a field says which of several choices is right.
fn says_which(name: &str, value: &Value) -> bool {
    let is_empty = match value {
        Value::Null => true,
        Value::String(text) => text.trim().is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    };
    !is_empty && (OF_CHOICES.contains(&name) || name.starts_with("correct"))
}

/// The answers of several people to a question.
#[derive(Debug, Clone, PartialEq)]
pub struct Answers {
    /// All of them, in their order.
    pub all: Vec<String>,
    /// The one to train on: that of the row itself, or the most frequent one; of equally frequent ones, the first.
    pub chosen: String,
    /// Whether it is the first of several that all differ.
    pub undecided: bool,
}

impl Answers {
    /// The answers of a row, which has the answer `own` beside them, or `None`. With an own answer, `answers` may as well be
    /// choices, so they count only if several people gave the same, or if each is an object.
    pub fn of(row: &Map<String, Value>, own: Option<&str>) -> Option<Self> {
        let items = row.get(FIELD)?.as_array()?;
        let text = |item: &Value| item.as_str().or_else(|| item.get("answer")?.as_str()).map(str::to_owned);
        let all: Vec<String> = items.iter().map(text).collect::<Option<_>>()?;
        let mut times: HashMap<&str, usize> = HashMap::new();
        for answer in all.iter().filter(|answer| !answer.trim().is_empty()) {
            *times.entry(answer).or_default() += 1;
        }
        let most = *times.values().max()?;
        let (chosen, undecided) = if let Some(own) = own {
            let agree = most > 1 || items.iter().all(Value::is_object);
            (all.iter().find(|answer| agree && *answer == own)?.clone(), false)
        } else if let Some(chosen) = row.get(CHOSEN).and_then(Value::as_str).filter(|text| !text.trim().is_empty()) {
            (chosen.to_owned(), false)
        } else if row.iter().any(|(name, value)| says_which(name, value)) {
            return None;
        } else {
            let first = all.iter().find(|answer| times.get(answer.as_str()) == Some(&most))?;
            (first.clone(), most == 1 && times.len() > 1)
        };
        Some(Self { all, chosen, undecided })
    }

    /// As [`Self::of`]; also takes the fields from the row.
    pub fn take(row: &mut Map<String, Value>, own: Option<&str>) -> Option<Self> {
        let found = Self::of(row, own);
        if found.is_some() {
            row.shift_remove(FIELD);
            row.shift_remove(CHOSEN);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(row: &Value, own: Option<&str>) -> Option<Answers> {
        Answers::of(row.as_object().unwrap(), own)
    }

    #[test]
    fn the_most_frequent_answer_is_chosen_or_the_first() {
        let chosen =
            |answers: Value| of(&json!({"answers": answers}), None).map(|found| (found.chosen, found.undecided));
        let some = |text: &str, undecided: bool| Some((text.to_owned(), undecided));
        assert_eq!(chosen(json!(["b", "a", "a", "b", "c"])), some("b", false));
        assert_eq!(chosen(json!(["b", "a", "a"])), some("a", false));
        assert_eq!(chosen(json!(["b", "a"])), some("b", true));
        assert_eq!(chosen(json!(["b"])), some("b", false));
        assert_eq!(chosen(json!(["", "", "b"])), some("b", false));
        assert_eq!(chosen(json!([{"answer": "yes", "answer_confidence": "maybe"}])), some("yes", false));
        for other in
            [json!([]), json!(null), json!("a"), json!({"text": ["a"]}), json!(["a", 1]), json!([{}]), json!(["", ""])]
        {
            assert_eq!(chosen(other.clone()), None, "{other}");
        }
    }

    #[test]
    fn choices_are_no_answers() {
        let choices = json!(["cat", "dog"]);
        for field in ["label", "correct_answer_id", "options", "answerKey"] {
            assert_eq!(of(&json!({"answers": choices, field: 1}), None), None, "{field}");
        }
        for absent in [json!(null), json!(""), json!([])] {
            assert!(of(&json!({"answers": choices, "label": absent}), None).is_some(), "{absent}");
        }
        // Beside an answer they count if people agree, or say more than a text.
        assert_eq!(of(&json!({"answers": choices}), Some("dog")), None);
        assert_eq!(of(&json!({"answers": ["dog", "dog", "cat"]}), Some("cat")).unwrap().chosen, "cat");
        assert_eq!(of(&json!({"answers": [{"answer": "cat"}, {"answer": "dog"}]}), Some("dog")).unwrap().chosen, "dog");
        assert_eq!(of(&json!({"answers": ["dog", "dog"]}), Some("B")), None, "another answer than all of them");
        let vqa = json!({"answers": [{"answer": "net"}, {"answer": "a net"}], "multiple_choice_answer": "a net"});
        assert_eq!(of(&vqa, None).unwrap().chosen, "a net");
        let few = json!({"answers": ["net", "a net"], "multiple_choice_answer": "nets"});
        assert_eq!(
            of(&few, None),
            Some(Answers { all: vec!["net".into(), "a net".into()], chosen: "nets".into(), undecided: false })
        );
    }
}
