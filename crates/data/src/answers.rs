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
/// Fields that say which of several choices is right, or that are the text itself; also each that begins with `correct`.
const OTHERS: [&str; 12] = [
    "label",
    "labels",
    "choices",
    "options",
    "answerKey",
    "answer_key",
    "answer_idx",
    "answer_index",
    "solution",
    "text",
    "caption",
    "alt_text",
];

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
        for answer in &all {
            *times.entry(answer).or_default() += 1;
        }
        let most = *times.values().max()?;
        let own = own.or_else(|| row.get(CHOSEN)?.as_str());
        let chosen = match own {
            Some(own) => all.iter().find(|answer| *answer == own)?,
            None => all.iter().find(|answer| times[answer.as_str()] == most)?,
        };
        let says_which = row
            .iter()
            .any(|(name, value)| !value.is_null() && (OTHERS.contains(&name.as_str()) || name.starts_with("correct")));
        let of_people = match own {
            Some(_) => most > 1 || items.iter().all(Value::is_object),
            None => !says_which,
        };
        let undecided = own.is_none() && most == 1 && all.len() > 1;
        (of_people && !chosen.trim().is_empty()).then(|| Self { chosen: chosen.clone(), undecided, all: all.clone() })
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
        assert!(of(&json!({"answers": choices, "label": null}), None).is_some());
        // Beside an answer they count if people agree, or say more than a text.
        assert_eq!(of(&json!({"answers": choices}), Some("dog")), None);
        assert_eq!(of(&json!({"answers": ["dog", "dog", "cat"]}), Some("cat")).unwrap().chosen, "cat");
        assert_eq!(of(&json!({"answers": [{"answer": "cat"}, {"answer": "dog"}]}), Some("dog")).unwrap().chosen, "dog");
        assert_eq!(of(&json!({"answers": ["dog", "dog"]}), Some("B")), None, "another answer than all of them");
        let vqa = json!({"answers": [{"answer": "net"}, {"answer": "a net"}], "multiple_choice_answer": "a net"});
        assert_eq!(of(&vqa, None).unwrap().chosen, "a net");
    }
}
