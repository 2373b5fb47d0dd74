//! Rows `{messages: [{role, content, …}, …]}`: a conversation in the form of `OpenAI` and Transformers.
use super::{Shape, chat, has, list};

pub(super) const SHAPE: Shape = Shape {
    fields: "messages",
    plain: false,
    fits: |row| has(row, "messages"),
    parse: |row| chat(list(row, "messages")?, row),
    source_text: |_| None,
};
