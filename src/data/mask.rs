//! Which part of a rendered conversation the assistant wrote. Templates that mark it (`{% generation %}`) are
//! believed. For others the beginning of the conversation is rendered again, up to each assistant turn: what the
//! turn adds is the assistant's. Where a template renders a beginning differently once more turns follow (Qwen3 drops
//! earlier thoughts, Phi closes the text), the turn's content is marked and looked up in the text. Token ids are
//! never searched.
use std::ops::Range;

use serde_json::Value;

use super::row::Conversation;
use super::template::{ChatTemplate, Rendered, Turns};
use crate::config::LossOn;
use crate::error::{Error, Result};

/// Renders a conversation with the byte ranges that carry a loss: assistant text with its end-of-turn token.
/// `special_texts` are the tokenizer's special tokens.
///
/// # Errors
/// The template refuses the conversation, or the assistant's text cannot be told apart.
pub fn render(
    template: &ChatTemplate,
    conversation: &Conversation,
    loss_on: LossOn,
    special_texts: &[String],
) -> Result<Rendered> {
    let turns = Turns::new(conversation)?;
    let mut full = template.render_first(&turns, turns.len(), false)?;
    if loss_on == LossOn::All {
        full.spans.clear();
        full.spans.push(0..full.text.len());
        return Ok(full);
    }
    let assistants = conversation.messages.iter().enumerate();
    let assistants: Vec<usize> =
        assistants.filter(|(_, message)| message["role"] == "assistant").map(|(index, _)| index).collect();
    let mut wanted: Vec<usize> =
        assistants.iter().copied().filter(|&index| index >= conversation.first_supervised).collect();
    if loss_on == LossOn::Completion {
        wanted = wanted.pop().into_iter().collect();
    }
    if !template.marks_generation() {
        let finder = Finder { template, conversation, turns: &turns, full: &full.text, special_texts };
        full.spans = wanted.into_iter().map(|index| finder.span(index)).collect::<Result<_>>()?;
    } else if wanted.len() < assistants.len() {
        // One block for each assistant turn: the last blocks belong to the last turns.
        let skipped = full.spans.len().saturating_sub(wanted.len());
        full.spans.drain(..skipped);
    }
    Ok(full)
}

/// Finds the span of one turn by rendering other versions of the conversation.
struct Finder<'a> {
    template: &'a ChatTemplate,
    conversation: &'a Conversation,
    turns: &'a Turns,
    full: &'a str,
    special_texts: &'a [String],
}

impl Finder<'_> {
    fn span(&self, index: usize) -> Result<Range<usize>> {
        let start = match self.template.render_first(self.turns, index, true) {
            Ok(prompt) if index > 0 && self.full.starts_with(&prompt.text) => prompt.text.len(),
            _ => self.content_start(index)?,
        };
        let last = index + 1 == self.turns.len();
        let through = if last { None } else { self.template.render_first(self.turns, index + 1, false).ok() };
        let end = match through {
            None if last => self.full.len(),
            Some(through) if self.full.starts_with(&through.text) && through.text.len() > start => through.text.len(),
            _ => {
                let content = self.content_end(index)?;
                let end = self.special_after(content, self.full.len());
                end.filter(|&end| self.is_end_of_turn(content, end)).ok_or_else(|| self.unstable(index))?
            }
        };
        Ok(start..self.close(index, start, end))
    }

    /// Ends a turn after its end-of-turn token; what the template puts behind (a newline, a final EOS) is not
    /// the assistant's.
    fn close(&self, index: usize, start: usize, end: usize) -> usize {
        let content = self.conversation.messages[index]["content"].as_str().unwrap_or_default().trim();
        let text = &self.full[start..end];
        let content_end = text.rfind(content).map_or(start, |found| start + found + content.len());
        self.special_after(content_end, end).unwrap_or(end)
    }

    /// The end of the first special token in `[from, to)`.
    fn special_after(&self, from: usize, to: usize) -> Option<usize> {
        let text = &self.full[from..to];
        let found = self.special_texts.iter().filter_map(|special| Some((text.find(special)?, special.len())));
        // Of tokens that begin at the same place the longest is the one that the tokenizer takes.
        found.min_by_key(|&(at, length)| (at, std::cmp::Reverse(length))).map(|(at, length)| from + at + length)
    }

    /// Whether `[content, end)` is nothing but space and one special token.
    fn is_end_of_turn(&self, content: usize, end: usize) -> bool {
        let text = self.full[content..end].trim_start();
        self.special_texts.iter().any(|special| special == text)
    }

    /// Where the content of a message begins, found by a mark before it.
    fn content_start(&self, index: usize) -> Result<usize> {
        let mark = self.turns.marks.0;
        let marked = |content: &str| [format!("{mark}{content}"), format!("{mark}{}", content.trim_start())];
        self.marked_place(index, marked)
    }

    /// Where it ends.
    fn content_end(&self, index: usize) -> Result<usize> {
        let mark = self.turns.marks.0;
        let marked = |content: &str| [format!("{content}{mark}"), format!("{}{mark}", content.trim_end())];
        self.marked_place(index, marked)
    }

    /// Renders the conversation with a marked content; without the mark it must be the text we know.
    fn marked_place(&self, index: usize, marked: impl Fn(&str) -> [String; 2]) -> Result<usize> {
        let mark = self.turns.marks.0;
        let message = &self.conversation.messages[index];
        let Some(content) = message["content"].as_str() else { return Err(self.unstable(index)) };
        for variant in marked(content) {
            let mut message = message.clone();
            message["content"] = Value::String(variant);
            let turns = self.turns.with_message(index, &message);
            let Ok(rendered) = self.template.render_marked(&turns, turns.len(), false) else { continue };
            if let Some((before, after)) = rendered.split_once(mark)
                && self.full.strip_prefix(before) == Some(after)
            {
                return Ok(before.len());
            }
        }
        Err(self.unstable(index))
    }

    fn unstable(&self, index: usize) -> Error {
        Error::data(format!(
            "the chat template ({}) changes earlier text when turns follow, so the text of message {} cannot be told apart",
            self.template.origin(),
            index + 1
        ))
        .hint("mark the assistant's text by {% generation %} in a copy and set data.template_path, or set data.chat_template")
    }
}
