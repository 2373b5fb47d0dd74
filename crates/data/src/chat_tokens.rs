//! Tokenizes a rendered conversation. Control tokens that its messages contain can become plain text
//! (`data.split_special_tokens`). [`super::control`] finds and renames them.
use super::control::{Match, differences};
use super::encoded::Encoded;
use super::jinja_limits::timed_out;
use super::messages::Conversation;
use super::report::Notes;
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use tunesmith_base::error::{Error, Result};

/// The token ids of a rendered conversation.
#[derive(Debug, Clone, Default)]
pub struct ChatTokens {
    /// The token ids, and the byte range of the text for each.
    pub encoded: Encoded,
    /// The control tokens that the messages contain, each once, in order of their first occurrence.
    pub written: Vec<String>,
}

impl ChatTokens {
    /// The notes for the data report. With `split`, the tokens in [`Self::written`] became plain text.
    pub(super) fn notes(&self, split: bool) -> Notes {
        if split {
            Notes { split_tokens: self.written.clone(), ..Notes::default() }
        } else {
            Notes { keeps_tokens: !self.written.is_empty(), ..Notes::default() }
        }
    }
}

impl ChatTemplate {
    /// Tokenizes `text`, which this template rendered from `conversation`, or from its messages up to and including one
    /// of its answers. The special token of the next message may follow. `add_generation_prompt` says whether `text`
    /// ends with the prompt of the next answer.
    ///
    /// With `split_special_tokens`, control tokens that a message contains become plain text. With `most`, only the
    /// first `most` tokens need to be right ([`Tokenizer::encode_first`]).
    ///
    /// # Errors
    /// The tokenizer fails; [`tunesmith_base::Kind::Data`]: the template changes the text around a control token, so
    /// that the tokens of a message cannot be told from its own.
    pub fn tokens(
        &self,
        tokenizer: &Tokenizer,
        conversation: &Conversation,
        text: &str,
        add_generation_prompt: bool,
        split_special_tokens: bool,
        most: Option<usize>,
    ) -> Result<ChatTokens> {
        let control = &self.control;
        let whole = || Ok(ChatTokens { encoded: tokenizer.encode_first(text, false, most)?, written: Vec::new() });
        let Some(altered) = control.altered(tokenizer, conversation) else { return whole() };
        let found = control.matches(tokenizer, text)?;
        if found.is_empty() {
            return whole();
        }
        // A rendering that fails shows nothing, unless the template exceeds its time limit.
        let render = |conversation: &Conversation, count: usize| {
            let messages = conversation.messages[..count].to_vec();
            let beginning = Conversation { messages, ..conversation.clone() };
            match self.render(&beginning, add_generation_prompt) {
                Ok(rendered) => Ok(Some(rendered.text)),
                Err(error) if timed_out() => Err(error),
                Err(_) => Ok(None),
            }
        };
        // The text may have only the first messages, up to and including an answer.
        let answers =
            (1..conversation.messages.len()).filter(|at| conversation.messages[at - 1]["role"] == "assistant");
        let mut other = None;
        for count in std::iter::once(conversation.messages.len()).chain(answers.rev()) {
            let Some(rendered) = render(conversation, count)? else { continue };
            // The token of the next message may end the text ([`super::mask`]).
            let Some(behind) = text.strip_prefix(&rendered) else { continue };
            if behind.is_empty() || tokenizer.special_texts().iter().any(|special| special == behind) {
                other = render(&altered, count)?.map(|other| other + behind);
                break;
            }
        }
        let Some(places) = other.as_deref().and_then(|other| differences(text, other)) else {
            let count = other.map_or(Ok(0), |other| control.matches(tokenizer, &other).map(|found| found.len()))?;
            if count == found.len() || !split_special_tokens {
                return whole();
            }
            return Err(Error::data(format!(
                "the chat template ({}) changes the text around special tokens in the messages, so they cannot be told from its own special tokens",
                self.origin()
            ))
            .hint("take them out of the row, or set data.split_special_tokens: false"));
        };
        let of_message = |found: &Match| places.iter().any(|place| found.range.contains(place));
        let (theirs, own): (Vec<Match>, Vec<Match>) = found.into_iter().partition(of_message);
        if theirs.is_empty() {
            return whole();
        }
        let mut written: Vec<String> = Vec::new();
        for Match { id, .. } in theirs {
            let token = &control.tokens[&id].content;
            if !written.contains(token) {
                written.push(token.clone());
            }
        }
        let encoded = if split_special_tokens {
            control.encode(tokenizer, text, &own, most)?
        } else {
            tokenizer.encode_first(text, false, most)?
        };
        Ok(ChatTokens { encoded, written })
    }
}
