//! Rows with a question field and an answer field under one of several names, such as `question` and `answer`, and an
//! optional `system`. Instead of one answer, or beside it, a row may have those of several people in `answers`. Without
//! an answer field, the most frequent of them is trained on, or what VQA v2 has in `multiple_choice_answer`.
use serde_json::{Map, Value};

use super::{ANSWER, QUESTION, Row, Shape, count, has, pair, text, text_of};
use crate::answers;
use tunesmith_base::error::Result;

/// VQA v2's name of the most frequent answer.
const CHOSEN: &str = "multiple_choice_answer";

pub(super) const SHAPE: Shape = Shape {
    fields: "one of user/question/prompt/input/instruction/query, one of assistant/answer/response/target/output or a list of answers",
    plain: false,
    fits: |row| {
        count(row, &QUESTION) == 1
            && match count(row, &ANSWER) {
                0 => answers::of(row).is_some(),
                fields => fields == 1,
            }
    },
    parse,
    source_text: |_| None,
};

fn parse(row: &mut Map<String, Value>) -> Result<Row> {
    let question = text_of(row, &QUESTION)?;
    let answer = match answers::of(row) {
        Some(_) if count(row, &ANSWER) == 1 => text_of(row, &ANSWER)?,
        Some(_) if has(row, CHOSEN) => text(row, CHOSEN)?,
        Some(all) => answers::most_frequent(&all).unwrap_or_default().to_owned(),
        None => text_of(row, &ANSWER)?,
    };
    pair(&question, &answer, row)
}

#[cfg(test)]
mod tests {
    use super::super::Form;
    use super::*;
    use serde_json::json;

    #[test]
    fn a_question_may_have_several_people_s_answers() {
        let parse = |row: Value| match Row::parse(row, &[Form::Instruction]).unwrap() {
            Row::Chat(chat) => (chat.messages[1]["content"].clone(), chat.answers, chat.images),
            other => panic!("{other:?}"),
        };
        let vqa = json!({
            "question_type": "what is this", "question": "What is this?", "multiple_choice_answer": "net", "image": "a.jpg",
            "answers": [{"answer": "net", "answer_id": 1}, {"answer": "a net", "answer_id": 2}, {"answer": "net", "answer_id": 3}],
        });
        let all = ["net", "a net", "net"].map(str::to_owned).to_vec();
        assert_eq!(parse(vqa.clone()), (json!("net"), all.clone(), vec!["a.jpg".to_owned()]));
        let listed = json!({"question": "q", "answers": ["a net", "net", "net"]});
        assert_eq!(parse(listed).0, "net");
        let own = json!({"question": "q", "answer": "a fish net", "answers": ["net"]});
        assert_eq!(parse(own), (json!("a fish net"), vec!["net".to_owned()], Vec::new()));
        let is_undecided = |row: Value| match Row::parse(row, &[Form::Instruction]).unwrap() {
            Row::Chat(chat) => chat.is_undecided(),
            other => panic!("{other:?}"),
        };
        assert!(is_undecided(json!({"question": "q", "answers": ["a", "b"]})));
        assert!(!is_undecided(json!({"question": "q", "answers": ["a", "b", "a"]})));
        assert!(!is_undecided(json!({"question": "q", "answers": ["a"]})));
        assert!(!is_undecided(json!({"question": "q", "answer": "b", "answers": ["a", "b"]})));
        // What is no list of answers is left alone.
        let other = json!({"question": "q", "answer": "a", "answers": {"text": ["b"]}});
        assert_eq!(parse(other), (json!("a"), Vec::new(), Vec::new()));
        assert_eq!(Form::detect(vqa.as_object().unwrap()), Some(Form::Instruction));
        assert_eq!(Form::detect(json!({"question": "q", "answers": []}).as_object().unwrap()), None);
    }

    #[test]
    fn answers_stay_beside_the_row_when_it_is_written() {
        let row = Row::parse(json!({"question": "q", "answers": ["a", "b", "b"]}), Form::ALL).unwrap();
        let written = row.clone().into_json();
        assert_eq!(written["answers"], json!(["a", "b", "b"]));
        assert_eq!(Row::parse(written, Form::ALL).unwrap(), row);
    }
}
