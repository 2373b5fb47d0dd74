//! Which part of a rendered conversation the assistant wrote. Templates that mark it (`{% generation %}`) are
//! believed. For others the beginning of the conversation is rendered again, up to each assistant turn: what the
//! turn adds is the assistant's. Where a template renders a beginning differently once more turns follow (Qwen3 drops
//! earlier thoughts, Phi closes the text), the turn's content is marked and looked up in the text, up to the special
//! token that ends the turn. Token ids are never searched.
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
    let assistants = conversation.messages.iter().enumerate();
    let assistants: Vec<usize> =
        assistants.filter(|(_, message)| message["role"] == "assistant").map(|(index, _)| index).collect();
    let unlearned = |index: &usize| conversation.unlearned.contains(index);
    let all = loss_on == LossOn::All;
    let wanted: Vec<usize> = match loss_on {
        // Found to be cut out of the whole.
        LossOn::All => assistants.iter().copied().filter(unlearned).collect(),
        LossOn::Assistant | LossOn::Completion => {
            let last = assistants.last().filter(|_| loss_on == LossOn::Completion);
            let first = conversation.first_supervised.max(last.copied().unwrap_or(0));
            assistants.iter().copied().filter(|index| *index >= first && !unlearned(index)).collect()
        }
    };
    let blocks = std::mem::take(&mut full.spans);
    let spans = if template.marks_generation() && blocks.len() == assistants.len() {
        let of_turns = assistants.iter().zip(blocks);
        of_turns.filter(|(index, _)| wanted.contains(index)).map(|(_, block)| block).collect()
    } else if template.marks_generation() && !all && assistants.ends_with(&wanted) {
        // The template leaves turns out or has several blocks in one: the last blocks belong to the last turns.
        let kept = if wanted.len() < assistants.len() { wanted.len() } else { blocks.len() };
        blocks[blocks.len().saturating_sub(kept)..].to_vec()
    } else {
        let finder = Finder { template, conversation, turns: &turns, full: &full.text, special_texts };
        wanted.into_iter().map(|index| finder.span(index)).collect::<Result<Vec<_>>>()?
    };
    full.spans = if all { around(&spans, full.text.len()) } else { spans };
    Ok(full)
}

/// What lies outside of some ranges that are in order.
fn around(ranges: &[Range<usize>], end: usize) -> Vec<Range<usize>> {
    let starts = std::iter::once(0).chain(ranges.iter().map(|range| range.end));
    let ends = ranges.iter().map(|range| range.start).chain([end]);
    starts.zip(ends).filter(|(start, end)| start < end).map(|(start, end)| start..end).collect()
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
        let start = self.start(index).ok_or_else(|| self.unstable(index))?;
        let shorter;
        let through = if index + 1 == self.turns.len() {
            self.full
        } else {
            shorter = self.template.render_first(self.turns, index + 1, false)?.text;
            &shorter
        };
        let content = self.conversation.messages[index]["content"].as_str().unwrap_or_default();
        // Both go together up to the turn at least: its tokens are behind its start in either.
        let begin = start.min(common_bytes(through, self.full));
        let token = self.end_of_turn(through, begin, content);
        if self.full.starts_with(through) && through.len() >= start {
            return Ok(start..token.map_or(through.len(), |token| token.end));
        }
        // Turns that follow change the text of this one, but not the token that ends it.
        let ending = token.map(|token| &through[token]);
        let content_end = self.content_end(index).filter(|&end| end >= start).unwrap_or(start);
        let end = ending.and_then(|ending| Some(content_end + self.full[content_end..].find(ending)? + ending.len()));
        Ok(start..end.ok_or_else(|| self.unstable(index))?)
    }

    /// Where the assistant begins to write: after the prompt that a user of the model would give it.
    fn start(&self, index: usize) -> Option<usize> {
        let prompt = self.template.render_first(self.turns, index, true).ok().filter(|_| index > 0);
        match prompt {
            Some(prompt) if self.full.starts_with(&prompt.text) => Some(prompt.text.len()),
            prompt => self.content_start(index).or_else(|| {
                let prompt = prompt?.text;
                self.start_behind(index, &prompt).or_else(|| self.common_start(index, &prompt))
            }),
        }
    }

    /// A prompt that differs from the text further up (Mistral moves tools and system to the last question), for a turn
    /// without content to mark (a call): it begins behind what the prompt writes behind the message before.
    fn start_behind(&self, index: usize, prompt: &str) -> Option<usize> {
        let in_full = self.content_end(index - 1)?;
        let in_prompt = self.marked_place(index - 1, Self::ends_marked, (index, true), prompt)?;
        let between = &prompt[in_prompt..];
        self.full[in_full..].starts_with(between).then_some(in_full + between.len())
    }

    /// A prompt that ends in more than the text has there (an opened thought): what both share, up to the end of a
    /// line or a special token.
    fn common_start(&self, index: usize, prompt: &str) -> Option<usize> {
        let shared = common_bytes(prompt, self.full);
        let before = self.template.render_first(self.turns, index, false).ok()?.text.len();
        let ends = |&at: &usize| {
            self.full.is_char_boundary(at) && {
                let text = &self.full[..at];
                text.ends_with('\n') || self.special_texts.iter().any(|special| text.ends_with(special))
            }
        };
        (before + 1..=shared).rev().find(ends)
    }

    /// The token that ends a turn, which goes from `begin` to the end of `text`: of the special tokens (and space) at
    /// the end the first that stands behind the content. What follows it (a newline, a final EOS) is the template's.
    fn end_of_turn(&self, text: &str, begin: usize, content: &str) -> Option<Range<usize>> {
        let mut tokens = Vec::new();
        let mut rest = text.trim_end();
        // Of tokens that end at the same place the longest is the one that the tokenizer takes.
        let ending = |rest: &str| self.special_texts.iter().filter(|s| rest.ends_with(*s)).map(String::len).max();
        while let Some(length) = ending(rest)
            && rest.len() - length >= begin
        {
            tokens.push(rest.len() - length..rest.len());
            rest = rest[..rest.len() - length].trim_end();
        }
        // A call has no content that it could stand behind, and may itself end in a special token.
        if content.is_empty() && text[begin..].trim() != tokens.last().map_or("", |token| text[token.start..].trim()) {
            return tokens.first().cloned();
        }
        // The content itself may end in what looks like a special token.
        let behind = |token: &&Range<usize>| text[..token.start].trim_end().ends_with(content.trim_end());
        tokens.iter().rev().find(behind).or(tokens.last()).cloned()
    }

    /// Where the content of a message begins, found by a mark before it.
    fn content_start(&self, index: usize) -> Option<usize> {
        let marked = |mark, content: &str| [format!("{mark}{content}"), format!("{mark}{}", content.trim_start())];
        self.marked_place(index, marked, (self.turns.len(), false), self.full)
    }

    /// Where it ends.
    fn content_end(&self, index: usize) -> Option<usize> {
        self.marked_place(index, Self::ends_marked, (self.turns.len(), false), self.full)
    }

    fn ends_marked(mark: char, content: &str) -> [String; 2] {
        [format!("{content}{mark}"), format!("{}{mark}", content.trim_end())]
    }

    /// Renders a conversation (its first so many messages, with or without the prompt for an answer) with a marked
    /// content; without the mark it must be the text that is known.
    fn marked_place(
        &self,
        index: usize,
        marked: impl Fn(char, &str) -> [String; 2],
        (count, prompts): (usize, bool),
        known: &str,
    ) -> Option<usize> {
        let mark = self.turns.marks.0;
        let message = &self.conversation.messages[index];
        // A call may have none.
        let content = message.get("content").map_or(Some(""), Value::as_str)?;
        for variant in marked(mark, content) {
            let mut message = message.clone();
            message["content"] = Value::String(variant);
            let turns = self.turns.with_message(index, &message);
            let Ok(rendered) = self.template.render_marked(&turns, count, prompts) else { continue };
            if let Some((before, after)) = rendered.split_once(mark)
                && known.strip_prefix(before) == Some(after)
            {
                return Some(before.len());
            }
        }
        None
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

/// How many bytes two texts have in common at their beginning.
fn common_bytes(a: &str, b: &str) -> usize {
    a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count()
}
