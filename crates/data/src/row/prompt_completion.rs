//! Rows `{prompt, completion}`: two plain texts, or two lists of messages. Only the completion carries a loss.
use serde_json::{Map, Value};

use super::{Conversation, Row, Shape, has, list, text};
use tunesmith_base::error::Result;

pub(super) const SHAPE: Shape = Shape {
    fields: "prompt, completion",
    plain: false,
    fits: |row| has(row, "prompt") && has(row, "completion"),
    parse,
    source_text: |_| None,
};

fn parse(row: &mut Map<String, Value>) -> Result<Row> {
    if row["prompt"].is_array() || row["completion"].is_array() {
        let mut messages = list(row, "prompt")?;
        let first_supervised = messages.len();
        messages.extend(list(row, "completion")?);
        return Conversation::new(messages, row, first_supervised).map(Row::Chat);
    }
    Ok(Row::Completion { prompt: text(row, "prompt")?, completion: text(row, "completion")? })
}
