//! Which part of a rendered conversation the assistant wrote, and in which rendering. Templates that mark it
//! (`{% generation %}`) are believed. For others each turn is found in the conversation rendered through it, where nothing
//! follows: the turn begins after the prompt that a user of the model would give, and ends with its end-of-turn token.
//! Most templates write an earlier turn the same when others follow, so one rendering holds all turns. A template
//! that rewrites earlier turns (drops their reasoning, moves the tools) gets a rendering for each turn that the later
//! ones do not hold as it was written. Token ids are never searched.
use std::cell::RefCell;
use std::ops::Range;

use serde_json::{Value, json};

use super::row::Conversation;
use super::template::{ChatTemplate, Rendered, Turns};
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_config::LossOn;

/// Renders a conversation with the byte ranges that carry a loss: assistant text with its end-of-turn token. Each turn
/// that is learned stands in one of the renderings, after exactly the text that precedes it when the model answers.
/// There is one rendering unless the template rewrites earlier turns; they are in the order of the turns.
/// `special_texts` are the tokenizer's special tokens.
///
/// # Errors
/// The template refuses the conversation, or the assistant's text cannot be told apart.
pub fn render(
    template: &ChatTemplate,
    conversation: &Conversation,
    loss_on: LossOn,
    special_texts: &[String],
) -> Result<Vec<Rendered>> {
    let mut renderings = Vec::new();
    render_each(template, conversation, (loss_on, special_texts), &mut |rendered, _| {
        renderings.push(rendered);
        Ok(true)
    })?;
    renderings.reverse();
    Ok(renderings)
}

/// The same, a rendering at a time, the last one first. `take` gets each with the number of messages that it has, and
/// returns whether it wants another one: a long conversation may have many.
///
/// # Errors
/// As [`render`], and whatever `take` returns.
pub fn render_each(
    template: &ChatTemplate,
    conversation: &Conversation,
    (loss_on, special_texts): (LossOn, &[String]),
    take: &mut dyn FnMut(Rendered, usize) -> Result<bool>,
) -> Result<()> {
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
    let finder = Finder { template, conversation, turns: &turns, special_texts, stopped: RefCell::default() };
    let spans = if template.marks_generation() && blocks.len() == assistants.len() {
        let of_turns = assistants.iter().zip(blocks);
        of_turns.filter(|(index, _)| wanted.contains(index)).map(|(_, block)| block).collect()
    } else if template.marks_generation() && !all && assistants.ends_with(&wanted) {
        // The template leaves turns out or has several blocks in one: the last blocks belong to the last turns.
        let kept = if wanted.len() < assistants.len() { wanted.len() } else { blocks.len() };
        blocks[blocks.len().saturating_sub(kept)..].to_vec()
    } else if all {
        wanted.iter().map(|&index| finder.within(index, &full.text)).collect::<Result<Vec<_>>>()?
    } else {
        return finder.renderings(full, &wanted, take);
    };
    full.spans = if all { around(&spans, full.text.len()) } else { spans };
    take(full, turns.len()).map(drop)
}

/// What lies outside of some ranges that are in order.
fn around(ranges: &[Range<usize>], end: usize) -> Vec<Range<usize>> {
    let starts = std::iter::once(0).chain(ranges.iter().map(|range| range.end));
    let ends = ranges.iter().map(|range| range.start).chain([end]);
    starts.zip(ends).filter(|(start, end)| start < end).map(|(start, end)| start..end).collect()
}

/// A conversation rendered through one of its turns, and where that turn stands.
struct Turn {
    text: String,
    span: Range<usize>,
}

impl Turn {
    /// Whether `other` holds the turn and all that precedes it, to the letter.
    fn stands_in(&self, other: &str) -> bool {
        other.starts_with(&self.text[..self.span.end])
    }
}

/// Finds turns by rendering other versions of the conversation.
struct Finder<'a> {
    template: &'a ChatTemplate,
    conversation: &'a Conversation,
    turns: &'a Turns,
    special_texts: &'a [String],
    /// Why a probe failed for which the row is not to blame, such as a limit of the template's time.
    stopped: RefCell<Option<Error>>,
}

impl Finder<'_> {
    /// A rendering that may fail: what then comes of it is no border, unless the template itself is to blame.
    fn probe(&self, turns: &Turns, count: usize, prompt: bool) -> Option<String> {
        self.noted(self.template.render_marked(turns, count, prompt))
    }

    /// The same without the marks.
    fn probe_first(&self, count: usize, prompt: bool) -> Option<Rendered> {
        self.noted(self.template.render_first(self.turns, count, prompt))
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

    /// The fewest renderings that hold every wanted turn as it was written, from the last to the first; `full` is the
    /// first that may.
    fn renderings(
        &self,
        full: Rendered,
        wanted: &[usize],
        take: &mut dyn FnMut(Rendered, usize) -> Result<bool>,
    ) -> Result<()> {
        let (mut current, mut count) = (full, self.turns.len());
        for &index in wanted.iter().rev() {
            let turn = self.turn(index)?;
            if !turn.stands_in(&current.text) {
                let mut done = std::mem::replace(&mut current, Rendered { text: turn.text, spans: Vec::new() });
                done.spans.reverse();
                // A rendering that nothing is learned from is not needed.
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

    /// The conversation through message `index`, and what the assistant wrote of it.
    fn turn(&self, index: usize) -> Result<Turn> {
        let text = self.template.render_first(self.turns, index + 1, false)?.text;
        let start = self.start(index, &text).ok_or_else(|| self.unstable(index))?;
        let end = self.end(index, &text, start);
        Ok(Turn { text, span: start..end })
    }

    /// Where the assistant begins to write in `text`, which ends with its turn: after the prompt that a user of the
    /// model would give.
    fn start(&self, index: usize, text: &str) -> Option<usize> {
        let prompt = self.probe_first(index, true).filter(|_| index > 0);
        if let Some(prompt) = &prompt
            && text.starts_with(&prompt.text)
        {
            let said = self.conversation.messages[index - 1]["content"].as_str().unwrap_or_default().trim();
            // A template may write a message not before the next one (a system message within the first question).
            let late = if prompt.text.contains(said) { None } else { self.content_end(index - 1, index + 1, text) };
            return Some(prompt.text.len().max(late.unwrap_or(0)));
        }
        // The prompt differs: it opens a thought that the turn does not have, its system message is written only in
        // prompts, or an earlier message is written differently when it is the last one. The turn still begins behind
        // the same header.
        let others_end = self.others_end(index, text);
        let answer = self.turns.followed(index, &json!({ "role": "assistant", "content": self.mark() }));
        let plain = self.probe(&answer, index + 1, false);
        // What precedes the content of a plain answer: the header, and maybe an empty thought that the turn has too.
        let header = plain.as_ref().and_then(|plain| plain.split_once(self.turns.marks.0)).map(|(header, _)| header);
        let header = header.map(|header| (common_bytes(header, text), header.len()));
        if let Some(prompt) = &prompt
            && let Some((shared, length)) = header
            && (others_end.is_some() || shared == length)
            && let Some(start) = self.behind_header(index, &prompt.text, &text[..whole_characters(text, shared)])
            && start >= others_end.unwrap_or(0)
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

    /// Where the header of message `index` ends in `text`, which ends behind that header: the last place in it that reads as
    /// the end of `prompt` does. A thought that the prompt opens is left out where `text` does not have it.
    fn behind_header(&self, index: usize, prompt: &str, text: &str) -> Option<usize> {
        let before = self.probe_first(index, false)?.text;
        let asked = common_bytes(&before, prompt);
        let ends = self.boundaries(prompt);
        let candidates = ends.iter().rev().copied().filter(|&end| end > asked && end < prompt.len());
        std::iter::once(prompt.len()).chain(candidates).find_map(|end| {
            let begins = ends.iter().rev().copied().find(|&at| !prompt[at.min(end)..end].trim().is_empty());
            let piece = &prompt[begins.unwrap_or(0)..end];
            text.rfind(piece).filter(|_| !piece.trim().is_empty()).map(|at| at + piece.len())
        })
    }

    /// The places of `text` that end a line or a special token, in order.
    fn boundaries(&self, text: &str) -> Vec<usize> {
        let lines = text.match_indices('\n').map(|(at, _)| at + 1);
        let specials = self.special_texts.iter().filter(|special| !special.is_empty());
        let tokens = specials.flat_map(|special| text.match_indices(special.as_str()).map(|(at, it)| at + it.len()));
        let mut places: Vec<usize> = lines.chain(tokens).collect();
        places.sort_unstable();
        places.dedup();
        places
    }

    /// A place in `text`, which ends with message `index`, behind all that other messages say.
    fn others_end(&self, index: usize, text: &str) -> Option<usize> {
        let Some(previous) = index.checked_sub(1) else { return Some(0) };
        let before = self.probe_first(index, false)?.text;
        if text.starts_with(&before) { Some(before.len()) } else { self.content_end(previous, index + 1, text) }
    }

    /// The last place behind `from`, and not behind `to`, that ends a line or a special token; else one that ends what looks
    /// like a token.
    fn last_boundary(&self, text: &str, from: usize, to: usize) -> Option<usize> {
        let places = || (from + 1..=to).rev().filter(|&at| text.is_char_boundary(at));
        let ends = |&at: &usize| {
            let text = &text[..at];
            text.ends_with('\n') || self.special_texts.iter().any(|special| text.ends_with(special))
        };
        places().find(ends).or_else(|| places().find(|&at| text[..at].ends_with(['>', ']'])))
    }

    /// Where the turn ends that begins at `start` of `text`, which ends with it: behind its end-of-turn token. What
    /// follows that (a newline, an EOS that closes the text) is not the assistant's. Without a special token at its end
    /// the turn is all that the text has.
    fn end(&self, index: usize, text: &str, start: usize) -> usize {
        let tokens = self.final_tokens(text, start);
        let content = self.conversation.messages[index]["content"].as_str().unwrap_or_default().trim_end();
        // The content itself may end in what looks like a special token.
        let doubtful = tokens.len() > 1 || tokens.iter().any(|token| content.ends_with(&text[token.clone()]));
        let behind = |part: &str| tokens.iter().position(|token| text[..token.start].trim_end().ends_with(part));
        let first = match if doubtful { self.content_end(index, index + 1, text) } else { None } {
            Some(end) => tokens.partition_point(|token| token.start < end),
            None if content.is_empty() => 0,
            None => behind(content).unwrap_or(0),
        };
        match &tokens[first..] {
            [] => text.len(),
            [only] => only.end,
            // Several: the turn has those that stay when the conversation goes on.
            closing @ [one, ..] => {
                let stays = self.shared_with_next(index, text, one);
                let own = closing.iter().rev().find(|token| token.end <= stays);
                let fallback = if content.is_empty() { closing.last() } else { Some(one) };
                own.or(fallback).map_or(text.len(), |token| token.end)
            }
        }
    }

    /// The special tokens, with space between them, at the end of `text` and behind `start`, in order.
    fn final_tokens(&self, text: &str, start: usize) -> Vec<Range<usize>> {
        let mut tokens = Vec::new();
        let mut rest = text.trim_end();
        // Of tokens that end at the same place the longest is the one that the tokenizer takes.
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

    /// How far `text`, from the token `one` of its end, is written alike when a message follows.
    fn shared_with_next(&self, index: usize, text: &str, one: &Range<usize>) -> usize {
        let next = ["user", "tool"].into_iter().find_map(|role| {
            let next = self.turns.followed(index + 1, &json!({ "role": role, "content": self.mark() }));
            let next = self.probe(&next, index + 2, false)?;
            next.split_once(self.turns.marks.0).map(|(before, _)| before.to_owned())
        });
        let Some(next) = next else { return 0 };
        // Where earlier text is rewritten, the turn's end is the last that precedes the message.
        let place = if next.starts_with(&text[..one.start]) { Some(one.start) } else { next.rfind(&text[one.clone()]) };
        place.map_or(0, |place| one.start + common_bytes(&text[one.start..], &next[place..]))
    }

    /// A turn in `full`, the whole conversation, where it may be written otherwise than it was: its content with the
    /// special token right behind it.
    fn within(&self, index: usize, full: &str) -> Result<Range<usize>> {
        let turn = self.turn(index)?;
        if turn.stands_in(full) {
            return Ok(turn.span);
        }
        let begins = |mark, content: &str| [format!("{mark}{content}"), format!("{mark}{}", content.trim_start())];
        let all = self.turns.len();
        let content = self.marked_place(index, begins, all, full).zip(self.content_end(index, all, full));
        let (start, end) = content.filter(|(start, end)| start <= end).ok_or_else(|| self.unstable(index))?;
        let behind = full[end..].trim_start();
        let token = self.special_texts.iter().filter(|special| behind.starts_with(*special)).map(String::len).max();
        Ok(start..token.map_or(end, |length| full.len() - behind.len() + length))
    }

    /// Where the content of a message ends in `known`, which is the first `count` messages.
    fn content_end(&self, index: usize, count: usize, known: &str) -> Option<usize> {
        let ends = |mark, content: &str| [format!("{content}{mark}"), format!("{}{mark}", content.trim_end())];
        self.marked_place(index, ends, count, known)
    }

    /// Renders the first `count` messages with a marked content; without the mark it must be the text that is known.
    fn marked_place(
        &self,
        index: usize,
        marked: impl Fn(char, &str) -> [String; 2],
        count: usize,
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
            let Some(rendered) = self.probe(&turns, count, false) else { continue };
            if let Some((before, after)) = rendered.split_once(mark)
                && known.strip_prefix(before) == Some(after)
            {
                return Some(before.len());
            }
        }
        None
    }

    /// The content of a message that is looked for in a rendering.
    fn mark(&self) -> String {
        self.turns.marks.0.to_string()
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

/// The last place in `text`, not behind `end`, that ends a character.
fn whole_characters(text: &str, end: usize) -> usize {
    (0..=end).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// How many bytes two texts have in common at their beginning.
fn common_bytes(a: &str, b: &str) -> usize {
    a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count()
}
