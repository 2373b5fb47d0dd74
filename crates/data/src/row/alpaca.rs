//! Rows `{instruction, input, output}` (Alpaca). `input` may be absent or empty; Dolly calls it `context`.
use serde_json::{Map, Value};

use super::{ANSWER, QUESTION, Row, Shape, count, has, pair, text, text_of};
use tunesmith_base::error::{Error, Result};

pub(super) const SHAPE: Shape = Shape {
    fields: "instruction, output",
    plain: false,
    fits: |row| {
        has(row, "instruction")
            && count(row, &QUESTION) == 1 + usize::from(has(row, "input"))
            && count(row, &ANSWER) == 1
    },
    parse,
    source_text: |row| {
        let mut texts = ["input", "context"].into_iter().filter_map(|field| row.get(field).and_then(Value::as_str));
        texts.find(|input| !input.is_empty())
    },
};

fn parse(row: &mut Map<String, Value>) -> Result<Row> {
    let mut question = text(row, "instruction")?;
    let given = |field: &&str| row.get(*field).is_some_and(|input| !input.is_null() && *input != "");
    let inputs: Vec<&str> = ["input", "context"].into_iter().filter(given).collect();
    match inputs[..] {
        [] => {}
        [field] => question = format!("{question}\n\n{}", text(row, field)?),
        _ => return Err(Error::data("found \"input\" and \"context\", expected one of them")),
    }
    let answer = text_of(row, &ANSWER)?;
    pair(&question, &answer, row)
}
