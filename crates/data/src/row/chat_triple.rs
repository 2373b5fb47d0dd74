//! Rows `{system, user, assistant}`: one question and its answer. `system` may be absent.
use super::{ANSWER, QUESTION, Shape, count, has, pair, text};

pub(super) const SHAPE: Shape = Shape {
    fields: "user, assistant",
    plain: false,
    fits: |row| has(row, "user") && has(row, "assistant") && count(row, &QUESTION) == 1 && count(row, &ANSWER) == 1,
    parse: |row| {
        let (question, answer) = (text(row, "user")?, text(row, "assistant")?);
        pair(&question, &answer, row)
    },
    source_text: |_| None,
};
