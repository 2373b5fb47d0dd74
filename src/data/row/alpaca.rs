//! `{instruction, input, output}`; `input` may be absent or empty.
use serde_json::{Map, Value};

use super::{ANSWER, QUESTION, Row, Shape, count, has, pair, text, text_of};
use crate::error::Result;

pub(super) const SHAPE: Shape = Shape {
    fields: "instruction, output",
    plain: false,
    fits: |row| {
        has(row, "instruction")
            && count(row, &QUESTION) == 1 + usize::from(has(row, "input"))
            && count(row, &ANSWER) == 1
    },
    parse,
    asks: |row| row.get("input").and_then(Value::as_str).filter(|input| !input.is_empty()),
};

fn parse(row: &mut Map<String, Value>) -> Result<Row> {
    let mut question = text(row, "instruction")?;
    if has(row, "input") {
        let input = text(row, "input")?;
        if !input.is_empty() {
            question = format!("{question}\n\n{input}");
        }
    }
    let answer = text_of(row, &ANSWER)?;
    pair(&question, &answer, row)
}
