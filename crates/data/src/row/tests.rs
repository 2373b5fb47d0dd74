//! Unit tests of row forms.
use super::*;

fn parse(row: Value) -> Result<Row> {
    Row::parse(row, Form::ALL)
}

#[test]
fn a_row_is_asked_by_the_last_turn_of_the_user_or_its_input() {
    let source = |row: Value| source_of(row, Form::ALL).unwrap();
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let turns =
        [turn("system", "s"), turn("user", "1"), turn("assistant", "2"), turn("user", "3"), turn("assistant", "4")];
    assert_eq!(source(json!({ "messages": turns })), "3");
    assert_eq!(source(json!({"instruction": "Simplify.", "input": "It is so.", "output": "So."})), "It is so.");
    assert_eq!(source(json!({"instruction": "Sort.", "input": "", "output": "a"})), "Sort.");
    assert_eq!(source(json!({"input": "i", "output": "o"})), "i");
    assert_eq!(source(json!({"prompt": "p", "completion": "c"})), "p");
    assert_eq!(source(json!({"text": "t"})), "");
}

fn contents(row: Row) -> Vec<(String, String)> {
    let Row::Chat(chat) = row else { panic!("not a chat") };
    let part = |value: &Value| value.as_str().unwrap().to_owned();
    chat.messages.iter().map(|message| (part(&message["role"]), part(&message["content"]))).collect()
}

#[test]
fn alpaca_keeps_instruction_and_input() {
    let row = parse(json!({"instruction": "Sort.", "input": "b a", "output": "a b"})).unwrap();
    assert_eq!(contents(row)[0].1, "Sort.\n\nb a");
    let row = parse(json!({"instruction": "Sort.", "input": "", "output": "a b"})).unwrap();
    assert_eq!(contents(row)[0].1, "Sort.");
}

#[test]
fn every_question_and_answer_name_makes_a_pair() {
    for question in QUESTION {
        for answer in ANSWER {
            let row = parse(json!({question: "q", answer: "a", "id": 7})).unwrap();
            assert_eq!(contents(row), [("user".into(), "q".into()), ("assistant".into(), "a".into())]);
        }
    }
}

#[test]
fn all_turns_are_kept() {
    let turns = [("system", "s"), ("human", "1"), ("gpt", "2"), ("human", "3"), ("gpt", "4")];
    let turns: Vec<Value> = turns.iter().map(|(from, value)| json!({"from": from, "value": value})).collect();
    let roles: Vec<String> =
        contents(parse(json!({"conversations": turns})).unwrap()).into_iter().map(|(role, _)| role).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
}

#[test]
fn preference_rows_are_named_with_what_can_be_done() {
    let turns = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]);
    for (row, name) in [
        (json!({"prompt": "p", "chosen": "a", "rejected": "b"}), "completion"),
        (json!({"chosen": turns, "rejected": turns}), "messages"),
        (json!({"chosen": "a", "rejected": "b"}), "text"),
    ] {
        let error = parse(row.clone()).unwrap_err();
        assert!(error.message().contains("preference rows (chosen, rejected)"), "{error}");
        assert!(error.hint_text().unwrap().contains(&format!("rename `chosen` to `{name}`")), "{error}");
        let mut renamed = row.as_object().unwrap().clone();
        let chosen = renamed.shift_remove("chosen").unwrap();
        renamed.insert(name.to_owned(), chosen);
        parse(renamed.into()).unwrap();
    }
}

#[test]
fn malformed_rows_say_what_was_found() {
    let cases = [
        (json!([1]), "a list"),
        (json!({"question": "q"}), "[question]"),
        (json!({"text": 7}), "a number"),
        (json!({"messages": []}), "no messages"),
        (json!({"messages": [{"role": "user", "content": 1}]}), "message 1"),
        (json!({"messages": [{"content": "x"}]}), "\"role\""),
        (json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]}), "message 2: \"content\""),
        (json!({"conversations": [{"from": "narrator", "value": "x"}]}), "narrator"),
        (json!({"input_ids": [1, 2], "labels": [1]}), "2 input_ids but 1 labels"),
        (json!({"input_ids": [1, -5]}), "-5"),
        (json!({"input_ids": [1], "labels": [-1]}), "-1"),
        (json!({"question": "q", "answer": "a", "response": "b"}), "answer, response"),
    ];
    for (row, part) in cases {
        let error = parse(row).unwrap_err();
        assert!(error.message().contains(part), "{error} lacks {part}");
    }
}
