//! Rows `{history, instruction, input, output}`, as in LLaMA-Factory: an Alpaca row with earlier turns, each
//! `[question, answer]`.
use serde_json::{Map, Value, json};

use super::{Conversation, Row, Shape, alpaca, list};
use crate::json_type::json_type;
use tunesmith_base::error::{Error, Result};

pub(super) const SHAPE: Shape = Shape {
    fields: "history, instruction, output",
    plain: false,
    fits: |row| row.get("history").is_some_and(Value::is_array) && (alpaca::SHAPE.fits)(row),
    parse,
    source_text: alpaca::SHAPE.source_text,
};

fn parse(row: &mut Map<String, Value>) -> Result<Row> {
    let mut earlier = Vec::new();
    for (number, turn) in list(row, "history")?.into_iter().enumerate() {
        let wrong = |found: &str| {
            Error::data(format!("field \"history\": turn {} is {found}, expected [question, answer]", number + 1))
        };
        match turn.as_array().map(Vec::as_slice) {
            Some([Value::String(question), Value::String(answer)]) => {
                earlier.push(json!({"role": "user", "content": question}));
                earlier.push(json!({"role": "assistant", "content": answer}));
            }
            Some(items) => return Err(wrong(&format!("a list of {}", items.len()))),
            None => return Err(wrong(json_type(&turn))),
        }
    }
    let mut row = (alpaca::SHAPE.parse)(row)?;
    if let Row::Chat(Conversation { messages, .. }) = &mut row {
        let first = messages.iter().take_while(|message| message["role"] == "system").count();
        messages.splice(first..first, earlier);
    }
    Ok(row)
}

#[cfg(test)]
mod tests {
    use super::super::{Form, source_of};
    use super::*;

    #[test]
    fn earlier_turns_are_pairs_between_the_system_and_the_question() {
        let row = json!({"system": "s", "history": [["1", "2"], ["3", "4"]], "instruction": "5", "input": "6", "output": "7"});
        let Row::Chat(chat) = Row::parse(row.clone(), Form::ALL).unwrap() else { panic!("not a chat") };
        let contents: Vec<&str> = chat.messages.iter().filter_map(|message| message["content"].as_str()).collect();
        assert_eq!(contents, ["s", "1", "2", "3", "4", "5\n\n6", "7"]);
        assert_eq!(source_of(row, Form::ALL).unwrap(), "6");
        for (history, found) in
            [(json!([["1"]]), "turn 1 is a list of 1"), (json!([["1", "2"], "3"]), "turn 2 is a string")]
        {
            let row = json!({"history": history, "instruction": "q", "output": "a"});
            let error = Row::parse(row, Form::ALL).unwrap_err();
            assert!(error.message().contains(found), "{error}");
        }
    }
}
