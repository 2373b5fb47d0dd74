//! Rows `{conversations: [{from, value}, …]}`: a conversation in the form of `ShareGPT`.
use super::{Shape, chat, has, list};
use crate::messages::share_gpt_turn;
use tunesmith_base::error::Result;

pub(super) const SHAPE: Shape = Shape {
    fields: "conversations",
    plain: false,
    fits: |row| has(row, "conversations"),
    parse: |row| {
        let turns = list(row, "conversations")?;
        chat(turns.into_iter().map(share_gpt_turn).collect::<Result<_>>()?, row)
    },
    source_text: |_| None,
};
