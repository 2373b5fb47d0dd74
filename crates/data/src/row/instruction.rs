//! Rows with a question field and an answer field under one of several names, such as `question` and `answer`, and an
//! optional `system`.
use super::{ANSWER, QUESTION, Shape, count, pair, text_of};

pub(super) const SHAPE: Shape = Shape {
    fields: "one of user/question/prompt/input/instruction/query, one of assistant/answer/response/target/output",
    plain: false,
    fits: |row| count(row, &QUESTION) == 1 && count(row, &ANSWER) == 1,
    parse: |row| {
        let (question, answer) = (text_of(row, &QUESTION)?, text_of(row, &ANSWER)?);
        pair(&question, &answer, row)
    },
    source_text: |_| None,
};
