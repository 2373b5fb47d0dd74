//! Rows `{text}`: plain text, of which every token carries a loss.
use super::{Row, Shape, has, text};

pub(super) const SHAPE: Shape = Shape {
    fields: "text",
    plain: true,
    fits: |row| has(row, "text"),
    parse: |row| text(row, "text").map(Row::Text),
    source_text: |_| None,
};
