//! Finds the assistant's text in a rendered conversation.
//!
//! A template that marks this text (`{% generation %}`) decides. With any other template, each turn is found in a
//! rendering that ends with this turn: it begins after the prompt that inference would use, and ends with its
//! end-of-turn token. If the template writes nothing behind an answer, the special token that begins the next message
//! ends the turn.
//!
//! Most templates write a turn the same when others follow, so one rendering has all turns. A template may rewrite
//! earlier turns: drop their reasoning, or move the tools. Then each turn that later renderings do not have unchanged
//! gets a rendering of its own. Token ids are never searched.
use std::cell::RefCell;
use std::ops::Range;

use serde_json::{Value, json};

use super::messages::Conversation;
use super::template::{ChatTemplate, Rendered};
use super::template_input::TemplateInput;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_config::LossOn;

/// Renders a conversation and finds the byte ranges that carry a loss: the assistant's text with its end-of-turn token.
///
/// Every turn to train on is in one of the renderings, after exactly the text that precedes it at inference. There is
/// one rendering unless the template rewrites earlier turns; renderings are in the order of the turns. `special_texts`
/// are the tokenizer's special tokens.
///
/// # Errors
/// The template refuses the conversation, or the assistant's text cannot be found in it.
pub fn render(
    template: &ChatTemplate,
    conversation: &Conversation,
    loss_on: LossOn,
    special_texts: &[String],
) -> Result<Vec<Rendered>> {
    let mut renderings = Vec::new();
    render_each(template, conversation, loss_on, special_texts, &mut |rendered, _| {
        renderings.push(rendered);
        Ok(true)
    })?;
    renderings.reverse();
    Ok(renderings)
}

/// As [`render`], but passes one rendering at a time to `take`, the last one first. `take` also gets how many messages
/// the rendering has, and returns whether to continue: a long conversation may have many renderings.
///
/// # Errors
/// Those of [`render`] and of `take`.
pub(super) fn render_each(
    template: &ChatTemplate,
    conversation: &Conversation,
    loss_on: LossOn,
    special_texts: &[String],
    take: &mut dyn FnMut(Rendered, usize) -> Result<bool>,
) -> Result<()> {
    let input = TemplateInput::new(conversation)?;
    let mut full = template.render_first(&input, input.len(), false)?;
    let assistants = conversation.messages.iter().enumerate();
    let assistants: Vec<usize> =
        assistants.filter(|(_, message)| message["role"] == "assistant").map(|(index, _)| index).collect();
    let unlearned = |index: &usize| conversation.unlearned.contains(index);
    let all = loss_on == LossOn::All;
    let wanted: Vec<usize> = match loss_on {
        // These turns are found in order to exclude them.
        LossOn::All => assistants.iter().copied().filter(unlearned).collect(),
        LossOn::Assistant | LossOn::Completion => {
            let last = assistants.last().filter(|_| loss_on == LossOn::Completion);
            let first = conversation.first_supervised.max(last.copied().unwrap_or(0));
            assistants.iter().copied().filter(|index| *index >= first && !unlearned(index)).collect()
        }
    };
    let blocks = std::mem::take(&mut full.spans);
    let finder = Finder { template, conversation, input: &input, special_texts, stopped: RefCell::default() };
    let spans = if template.marks_generation() {
        let rest: Vec<usize> = assistants.iter().copied().filter(|index| !wanted.contains(index)).collect();
        finder.blocks_of(blocks, &wanted, &rest)?
    } else if all {
        wanted.iter().map(|&index| finder.within(index, &full.text)).collect::<Result<Vec<_>>>()?
    } else {
        return finder.renderings(full, &wanted, take);
    };
    full.spans = if all { around(&spans, full.text.len()) } else { spans };
    take(full, input.len()).map(drop)
}

/// The gaps between sorted ranges, and before and after them, up to `end`.
fn around(ranges: &[Range<usize>], end: usize) -> Vec<Range<usize>> {
    let starts = std::iter::once(0).chain(ranges.iter().map(|range| range.end));
    let ends = ranges.iter().map(|range| range.start).chain([end]);
    starts.zip(ends).filter(|(start, end)| start < end).map(|(start, end)| start..end).collect()
}

/// A rendering that ends with a turn, and the bytes of this turn.
struct Turn {
    text: String,
    span: Range<usize>,
    /// How many bytes at the end are the special token of the next message, which ends the turn.
    borrowed: usize,
}

impl Turn {
    /// Whether `other` begins with the same text up to the end of the turn.
    fn stands_in(&self, other: &str) -> bool {
        other.starts_with(&self.text[..self.span.end])
    }
}

/// Finds turns by rendering variants of the conversation.
struct Finder<'a> {
    template: &'a ChatTemplate,
    conversation: &'a Conversation,
    input: &'a TemplateInput,
    special_texts: &'a [String],
    /// Why a probe failed for which the row is not to blame, such as a limit of the template's time.
    stopped: RefCell<Option<Error>>,
}

impl Finder<'_> {
    /// A rendering that may fail, which then shows no border. A fault of the template itself is kept for [`Self::unstable`].
    fn probe(&self, input: &TemplateInput, count: usize, prompt: bool) -> Option<String> {
        self.noted(self.template.render_marked(input, count, prompt))
    }

    /// As [`Self::probe`], without the marks.
    fn probe_first(&self, count: usize, prompt: bool) -> Option<Rendered> {
        self.noted(self.template.render_first(self.input, count, prompt))
    }

    fn noted<T>(&self, rendered: Result<T>) -> Option<T> {
        match rendered {
            Ok(rendered) => Some(rendered),
            Err(error) => {
                if error.kind() == Kind::Model {
                    self.stopped.replace(Some(error));
                }
                None
            }
        }
    }

    /// Passes on the fewest renderings that contain every wanted turn as it was written, from the last to the first.
    /// `full` is the whole conversation.
    fn renderings(
        &self,
        full: Rendered,
        wanted: &[usize],
        take: &mut dyn FnMut(Rendered, usize) -> Result<bool>,
    ) -> Result<()> {
        let (mut current, mut count) = (full, self.input.len());
        for &index in wanted.iter().rev() {
            let turn = self.turn(index)?;
            if !turn.stands_in(&current.text) {
                let mut done = std::mem::replace(&mut current, Rendered { text: turn.text, spans: Vec::new() });
                done.spans.reverse();
                // A rendering without a wanted turn is not needed.
                if !done.spans.is_empty() && !take(done, count)? {
                    return Ok(());
                }
                count = index + 1;
            }
            current.spans.push(turn.span);
        }
        current.spans.reverse();
        take(current, count).map(drop)
    }

    /// The conversation up to and including message `index`, and the bytes of that message.
    fn turn(&self, index: usize) -> Result<Turn> {
        let mut text = self.template.render_first(self.input, index + 1, false)?.text;
        let start = self.start(index, &text).ok_or_else(|| self.unstable(index))?;
        if let Some(end) = self.end(index, &text, start) {
            return Ok(Turn { text, span: start..end, borrowed: 0 });
        }
        let next = self.next_header(index, &text).unwrap_or_default();
        text.push_str(&next);
        Ok(Turn { span: start..text.len(), text, borrowed: next.len() })
    }

    /// The special token that begins the next message, if the template writes nothing behind an answer: at inference
    /// this token ends the turn. `text` ends with message `index`. Behind the last message, a tool's result follows its
    /// call, and a question any other answer.
    fn next_header(&self, index: usize, text: &str) -> Option<String> {
        let answer = self.input.followed(index, &json!({ "role": "assistant", "content": self.mark() }));
        let closes = self.probe(&answer, index + 1, false)?;
        if !closes.ends_with(self.input.marks.open) {
            return None;
        }
        let message = &self.conversation.messages[index];
        let calls = message["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
        let role = match self.conversation.messages.get(index + 1) {
            // Nothing ends a turn that the next one continues.
            Some(next) if next["role"] == "assistant" => return None,
            Some(next) => next["role"].as_str()?,
            None if calls => "tool",
            None => "user",
        };
        let next = json!({ "role": role, "content": self.mark() });
        let followed = self.probe(&self.input.followed(index + 1, &next), index + 2, false);
        let behind = followed.as_deref().and_then(|followed| followed.strip_prefix(text));
        // A turn that loses its reasoning when a question follows is not in that text. The plain answer is.
        let plain =
            if behind.is_none() { self.probe(&answer.followed(index + 1, &next), index + 2, false) } else { None };
        let behind = behind.or_else(|| plain.as_deref()?.split(self.input.marks.open).nth(1))?;
        let specials = self.special_texts.iter().filter(|special| !special.is_empty() && behind.starts_with(*special));
        specials.max_by_key(|special| special.len()).cloned()
    }

    /// The blocks of the turns `wanted` among all `blocks` of the conversation. The other assistant turns are `rest`.
    ///
    /// A turn's blocks are those whose text changes with its message.
    fn blocks_of(&self, blocks: Vec<Range<usize>>, wanted: &[usize], rest: &[usize]) -> Result<Vec<Range<usize>>> {
        if wanted.is_empty() || rest.is_empty() {
            return Ok(if wanted.is_empty() { Vec::new() } else { blocks });
        }
        let unclear = || {
            Error::data(format!(
                "the chat template ({}) does not show which turns its {{% generation %}} blocks belong to",
                self.template.origin()
            ))
            .hint("train on every turn: data.loss_on: assistant, without \"train\": false in the row")
        };
        let touched = |messages: &[usize]| -> Result<Vec<bool>> {
            let mark = self.input.spare.ok_or_else(unclear)?;
            let input = messages.iter().fold(None, |input: Option<TemplateInput>, &index| {
                let message = marked_message(&self.conversation.messages[index], mark);
                Some(input.as_ref().unwrap_or(self.input).with_message(index, &message))
            });
            let rendered = input.and_then(|input| self.noted(self.template.render_first(&input, input.len(), false)));
            let rendered = rendered.unwrap_or_default();
            Ok(rendered.spans.iter().map(|span| rendered.text[span.clone()].contains(mark)).collect())
        };
        let (ours, others) = (touched(wanted)?, touched(rest)?);
        let clear = ours.len() == blocks.len()
            && others.len() == blocks.len()
            && ours.iter().zip(&others).all(|(ours, others)| ours != others);
        if !clear {
            return Err(self.stopped.take().unwrap_or_else(unclear));
        }
        Ok(blocks.into_iter().zip(ours).filter(|(_, ours)| *ours).map(|(block, _)| block).collect())
    }

    /// Where the assistant's text begins in `text`, which ends with its turn: after the prompt that inference would
    /// use.
    fn start(&self, index: usize, text: &str) -> Option<usize> {
        let prompt = self.probe_first(index, true).filter(|_| index > 0);
        if let Some(prompt) = &prompt
            && text.starts_with(&prompt.text)
        {
            let said = self.conversation.messages[index - 1]["content"].as_str().unwrap_or_default().trim();
            // A template may write a message together with the next one: a system message in the first question.
            let late = if prompt.text.contains(said) { None } else { self.content_end(index - 1, index + 1, text) };
            return Some(prompt.text.len().max(late.unwrap_or(0)));
        }
        // The text does not begin with the prompt. The prompt may open a thought that the turn does not have, or only
        // prompts have the system message, or an earlier message is written differently as the last one. The turn still
        // begins after the same header.
        let others_end = self.others_end(index, text);
        let answer = self.input.followed(index, &json!({ "role": "assistant", "content": self.mark() }));
        let plain = self.probe(&answer, index + 1, false);
        // The text before the content of a plain answer: the header, and maybe an empty thought that the turn has too.
        let header = plain.as_ref().and_then(|plain| plain.split_once(self.input.marks.open)).map(|(header, _)| header);
        let header = header.map(|header| (common_bytes(header, text), header.len()));
        if let Some(prompt) = &prompt
            && let Some((shared, length)) = header
            && (others_end.is_some() || shared == length)
            && let Some(start) = self.behind_header(
                index,
                &prompt.text,
                &text[..whole_characters(text, shared)],
                others_end.unwrap_or(0),
            )
        {
            return Some(start);
        }
        let opened = prompt.zip(others_end).and_then(|(prompt, from)| {
            let shared = common_bytes(&prompt.text, text);
            self.last_boundary(text, from, shared)
        });
        let header = header.and_then(|(shared, length)| {
            if shared == length { Some(shared) } else { self.last_boundary(text, others_end?, shared) }
        });
        header.or(opened)
    }

    /// Where the header of message `index` ends in `text`, which ends after that header: the last place with the same
    /// text before it as the end of `prompt`. If the prompt opens a thought that `text` does not have, the thought is
    /// ignored.
    /// Earlier turns, up to the byte `from`, may have that text too.
    fn behind_header(&self, index: usize, prompt: &str, text: &str, from: usize) -> Option<usize> {
        let before = self.probe_first(index, false)?.text;
        let asked = common_bytes(&before, prompt);
        let ends = self.boundaries(prompt);
        let candidates = ends.iter().rev().copied().filter(|&end| end > asked && end < prompt.len());
        std::iter::once(prompt.len()).chain(candidates).find_map(|end| {
            let begins = ends.iter().rev().copied().find(|&at| !prompt[at.min(end)..end].trim().is_empty());
            let piece = &prompt[begins.unwrap_or(0)..end];
            let place = text.rfind(piece).filter(|_| !piece.trim().is_empty()).map(|at| at + piece.len());
            place.filter(|&place| place >= from)
        })
    }

    /// The byte offsets of `text` at which a line or a special token ends, sorted.
    fn boundaries(&self, text: &str) -> Vec<usize> {
        let lines = text.match_indices('\n').map(|(at, _)| at + 1);
        let specials = self.special_texts.iter().filter(|special| !special.is_empty());
        let tokens = specials.flat_map(|special| text.match_indices(special.as_str()).map(|(at, it)| at + it.len()));
        let mut places: Vec<usize> = lines.chain(tokens).collect();
        places.sort_unstable();
        places.dedup();
        places
    }

    /// A byte offset in `text`, which ends with message `index`, after the text of all other messages.
    fn others_end(&self, index: usize, text: &str) -> Option<usize> {
        let Some(previous) = index.checked_sub(1) else { return Some(0) };
        let before = self.probe_first(index, false)?.text;
        if text.starts_with(&before) { Some(before.len()) } else { self.content_end(previous, index + 1, text) }
    }

    /// The last byte offset after `from`, up to `to`, at which a line or a special token ends, or else what looks like
    /// a token.
    fn last_boundary(&self, text: &str, from: usize, to: usize) -> Option<usize> {
        let places = || (from + 1..=to).rev().filter(|&at| text.is_char_boundary(at));
        let ends = |&at: &usize| {
            let text = &text[..at];
            text.ends_with('\n') || self.special_texts.iter().any(|special| text.ends_with(special))
        };
        places().find(ends).or_else(|| places().find(|&at| text[..at].ends_with(['>', ']'])))
    }

    /// Where the turn ends that begins at `start`, if `text` ends with it: after its end-of-turn token. A newline or
    /// EOS after that token does not belong to the turn. `None` without a special token at the end.
    fn end(&self, index: usize, text: &str, start: usize) -> Option<usize> {
        let tokens = self.final_tokens(text, start);
        let content = self.conversation.messages[index]["content"].as_str().unwrap_or_default().trim_end();
        // The content itself may end with the text of a special token.
        let doubtful = tokens.len() > 1 || tokens.iter().any(|token| content.ends_with(&text[token.clone()]));
        let behind = |part: &str| tokens.iter().position(|token| text[..token.start].trim_end().ends_with(part));
        let first = match if doubtful { self.content_end(index, index + 1, text) } else { None } {
            Some(end) => tokens.partition_point(|token| token.start < end),
            None if content.is_empty() => 0,
            None => behind(content).unwrap_or(0),
        };
        Some(match &tokens[first..] {
            [] => return None,
            [only] => only.end,
            // Of several tokens, the turn has those that stay when the conversation continues.
            closing @ [one, ..] => {
                let stays = self.shared_with_next(index, text, one);
                let own = closing.iter().rev().find(|token| token.end <= stays);
                let fallback = if content.is_empty() { closing.last() } else { Some(one) };
                own.or(fallback).map_or(text.len(), |token| token.end)
            }
        })
    }

    /// The special tokens at the end of `text` and after `start`, in order. White space may separate them.
    fn final_tokens(&self, text: &str, start: usize) -> Vec<Range<usize>> {
        let mut tokens = Vec::new();
        let mut rest = text.trim_end();
        // Of several tokens that end here, the tokenizer takes the longest.
        let ending = |rest: &str| self.special_texts.iter().filter(|s| rest.ends_with(*s)).map(String::len).max();
        while let Some(length) = ending(rest)
            && rest.len() - length >= start
        {
            tokens.push(rest.len() - length..rest.len());
            rest = rest[..rest.len() - length].trim_end();
        }
        tokens.reverse();
        tokens
    }

    /// Up to which byte `text` stays the same, from the token `one` at its end on, when a message follows.
    fn shared_with_next(&self, index: usize, text: &str, one: &Range<usize>) -> usize {
        let next = ["user", "tool"].into_iter().find_map(|role| {
            let next = self.input.followed(index + 1, &json!({ "role": role, "content": self.mark() }));
            let next = self.probe(&next, index + 2, false)?;
            next.split_once(self.input.marks.open).map(|(before, _)| before.to_owned())
        });
        let Some(next) = next else { return 0 };
        // If earlier text is rewritten, the last such token before the message ends the turn.
        let place = if next.starts_with(&text[..one.start]) { Some(one.start) } else { next.rfind(&text[one.clone()]) };
        place.map_or(0, |place| one.start + common_bytes(&text[one.start..], &next[place..]))
    }

    /// The bytes of a turn in `full`, the whole conversation. If the turn is rewritten there: its content and the
    /// special token right after it.
    fn within(&self, index: usize, full: &str) -> Result<Range<usize>> {
        let turn = self.turn(index)?;
        let own = turn.span.end - turn.borrowed;
        if full.starts_with(&turn.text[..own]) {
            return Ok(turn.span.start..if turn.stands_in(full) { turn.span.end } else { own });
        }
        let begins = |mark, content: &str| [format!("{mark}{content}"), format!("{mark}{}", content.trim_start())];
        let all = self.input.len();
        let content = self.marked_place(index, begins, all, full).zip(self.content_end(index, all, full));
        let (start, end) = content.filter(|(start, end)| start <= end).ok_or_else(|| self.unstable(index))?;
        let behind = full[end..].trim_start();
        let token = self.special_texts.iter().filter(|special| behind.starts_with(*special)).map(String::len).max();
        Ok(start..token.map_or(end, |length| full.len() - behind.len() + length))
    }

    /// Where the content of a message ends in `known`, the rendering of the first `count` messages.
    fn content_end(&self, index: usize, count: usize, known: &str) -> Option<usize> {
        let ends = |mark, content: &str| [format!("{content}{mark}"), format!("{}{mark}", content.trim_end())];
        self.marked_place(index, ends, count, known)
    }

    /// The place of a mark in the content of a message. The first `count` messages are rendered with the mark; without
    /// it, the rendering must equal `known`.
    fn marked_place(
        &self,
        index: usize,
        marked: impl Fn(char, &str) -> [String; 2],
        count: usize,
        known: &str,
    ) -> Option<usize> {
        let mark = self.input.marks.open;
        let message = &self.conversation.messages[index];
        // A tool call may have no content.
        let content = message.get("content").map_or(Some(""), Value::as_str)?;
        for variant in marked(mark, content) {
            let mut message = message.clone();
            message["content"] = Value::String(variant);
            let input = self.input.with_message(index, &message);
            let Some(rendered) = self.probe(&input, count, false) else { continue };
            if let Some((before, after)) = rendered.split_once(mark)
                && known.strip_prefix(before) == Some(after)
            {
                return Some(before.len());
            }
        }
        None
    }

    /// The mark as the content of a message.
    fn mark(&self) -> String {
        self.input.marks.open.to_string()
    }

    fn unstable(&self, index: usize) -> Error {
        if let Some(stopped) = self.stopped.take() {
            return stopped;
        }
        Error::data(format!(
            "the chat template ({}) does not show where message {} begins or ends in its text",
            self.template.origin(),
            index + 1
        ))
        .hint("mark the assistant's text by {% generation %} in a copy and set data.template_path, or set data.chat_template")
    }
}

/// The message with `mark` in each of its texts that a template writes: its content, its reasoning and the names of its
/// calls. A template may split the content at the end of its reasoning, so the mark is there too.
fn marked_message(message: &Value, mark: char) -> Value {
    let add = |text: &mut String| *text = format!("{}{mark}", text.replace("</think>", &format!("{mark}</think>")));
    let mut message = message.clone();
    let calls = message["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
    for name in ["content", "reasoning_content", "thinking", "reasoning"] {
        match message.get_mut(name) {
            // A call may have no words.
            Some(Value::String(text)) if !(calls && text.is_empty()) => add(text),
            Some(Value::Array(parts)) => {
                parts.iter_mut().filter_map(|part| part.get_mut("text")).for_each(|part| {
                    if let Value::String(text) = part {
                        add(text);
                    }
                });
            }
            _ => {}
        }
    }
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let function = if call["function"].is_object() { &mut call["function"] } else { call };
        if let Some(Value::String(name)) = function.get_mut("name") {
            add(name);
        }
    }
    message
}

/// The last character boundary of `text` up to `end`.
fn whole_characters(text: &str, end: usize) -> usize {
    (0..=end).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// The length of the common prefix of two texts, in bytes.
fn common_bytes(a: &str, b: &str) -> usize {
    a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count()
}
