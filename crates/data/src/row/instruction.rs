//! Rows with a question field and an answer field under one of several names, such as `question` and `answer`, and an
//! optional `system`. Instead of one answer, or beside it, a row may have those of several people in `answers`.
use serde_json::{Map, Value};

use super::{ANSWER, QUESTION, Row, Shape, count, has, pair, text_of};
use crate::answers::Answers;
use tunesmith_base::error::Result;

/// The fields of a text or a caption, which may have a question and answers beside it.
const OTHER_FORMS: [&str; 3] = ["text", "caption", "alt_text"];

pub(super) const SHAPE: Shape = Shape {
    fields: "one of user/question/prompt/input/instruction/query, one of assistant/answer/response/target/output or a list of answers",
    plain: false,
    fits: |row| {
        count(row, &QUESTION) == 1
            && match count(row, &ANSWER) {
                0 => !OTHER_FORMS.iter().any(|field| has(row, field)) && Answers::of(row, None).is_some(),
                fields => fields == 1,
            }
    },
    parse,
    source_text: |_| None,
};

fn parse(row: &mut Map<String, Value>) -> Result<Row> {
    let question = text_of(row, &QUESTION)?;
    let own = ANSWER.iter().any(|field| has(row, field)).then(|| text_of(row, &ANSWER)).transpose()?;
    let answers = Answers::take(row, own.as_deref());
    let answer = own.or_else(|| Some(answers.as_ref()?.chosen.clone())).unwrap_or_default();
    let mut parsed = pair(&question, &answer, row)?;
    if let (Row::Chat(conversation), Some(answers)) = (&mut parsed, answers) {
        conversation.undecided = answers.undecided;
        if conversation.references.is_empty() {
            conversation.references = answers.all.into();
        }
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::super::Form;
    use super::*;
    use serde_json::json;

    #[test]
    fn a_question_may_have_several_people_s_answers() {
        let parse = |row: Value| match Row::parse(row, &[Form::Instruction]).unwrap() {
            Row::Chat(chat) => (chat.messages[1]["content"].clone(), chat.references, chat.undecided),
            other => panic!("{other:?}"),
        };
        let texts = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect::<Box<[_]>>();
        let vqa = json!({
            "question_type": "what is this", "question": "What is this?", "multiple_choice_answer": "net", "image": "a.jpg",
            "answers": [{"answer": "net", "answer_id": 1}, {"answer": "a net", "answer_id": 2}, {"answer": "net", "answer_id": 3}],
        });
        assert_eq!(parse(vqa.clone()), (json!("net"), texts(&["net", "a net", "net"]), false));
        assert_eq!(parse(json!({"question": "q", "answers": ["a", "b"]})), (json!("a"), texts(&["a", "b"]), true));
        let own = json!({"question": "q", "answer": "b", "answers": ["a", "b", "a"]});
        assert_eq!(parse(own), (json!("b"), texts(&["a", "b", "a"]), false));
        // What is no list of people's answers is left alone.
        for other in [json!({"text": ["b"]}), json!(["a", "b"])] {
            assert_eq!(
                parse(json!({"question": "q", "answer": "a", "answers": other})),
                (json!("a"), texts(&[]), false)
            );
        }
        let form = |row: Value| Form::detect(row.as_object().unwrap());
        assert_eq!(form(vqa), Some(Form::Instruction));
        assert_eq!(form(json!({"question": "q", "answers": []})), None);
        assert_eq!(form(json!({"question": "q", "answers": ["a", "b"], "label": 1})), None);
        assert_eq!(form(json!({"question": "q", "answers": ["a"], "text": "t"})), Some(Form::Text));
        assert_eq!(
            form(json!({"question": "q", "answers": ["a"], "caption": "t", "image": "a.png"})),
            Some(Form::Captions)
        );
    }

    #[test]
    fn references_stay_beside_a_row_that_is_written() {
        for row in [
            json!({"question": "q", "answers": ["a", "b", "b"]}),
            json!({"instruction": "q", "output": "a", "history": [["p", "o"]], "reference_answers": ["a", "b"]}),
        ] {
            let row = Row::parse(row, Form::ALL).unwrap();
            let Row::Chat(chat) = &row else { panic!("{row:?}") };
            assert!(chat.references.len() > 1, "{chat:?}");
            assert_eq!(Row::parse(row.clone().into_json(), Form::ALL).unwrap(), row);
        }
        let error =
            Row::parse(json!({"question": "q", "answer": "a", "reference_answers": "a"}), Form::ALL).unwrap_err();
        assert!(error.message().contains("expected a list of strings"), "{error}");
    }
}
