//! Control tokens in messages. `<|im_end|>` in a user's message would end the user's turn. So control tokens that the
//! template writes stay tokens, and those in messages become plain text (`data.split_special_tokens`).
//!
//! To tell them apart, the conversation is rendered again, with one character changed wherever a message could
//! contribute to a control token. Places where the two texts differ come from a message. The template's own tokens are
//! then renamed, in the text and in a copy of the tokenizer that knows them by the new names only. This way the
//! tokenizer still sees the whole text at once.
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use tokenizers::{
    AddedToken, AddedVocabulary, Model as _, NormalizedString, Normalizer as _, OffsetReferential, OffsetType,
};

use super::bounded_tokenizer::BoundedTokenizer;
use super::catch_panic::isolated;
use super::encoded::Encoded;
use super::messages::Conversation;
use super::template_input::NONCHARACTERS;
use super::tokenizer::Tokenizer;
use tunesmith_base::error::{Error, Result};

/// How many characters at the start of a control token make a place suspicious: `<|i`, `</s`.
const OPENING: usize = 3;
/// Roles that templates know. Phi-3 writes `<|user|>` from the role, so the role `end` would become `<|end|>`.
const ROLES: [&str; 9] =
    ["system", "user", "assistant", "tool", "developer", "function", "ipython", "model", "tool_response"];

/// The control tokens of a tokenizer and a template.
#[derive(Debug, Default)]
pub(super) struct Control {
    /// The control tokens by id.
    pub(super) tokens: BTreeMap<u32, AddedToken>,
    /// Their first [`OPENING`] characters, each once.
    openings: Vec<String>,
    /// Their first characters, and their last ones.
    ends: [Vec<char>; 2],
    /// Whether the tokenizer matches some of them in normalized text.
    normalized: bool,
    /// Tokenizers with renamed tokens, by the character that the new names begin with.
    copies: Mutex<Vec<(char, Arc<RenamedTokenizer>)>>,
}

/// A copy of the tokenizer with renamed control tokens.
struct RenamedTokenizer {
    tokenizer: BoundedTokenizer,
    /// Ids of the model by the ids of the copy's added tokens.
    ids: BTreeMap<u32, u32>,
}

impl std::fmt::Debug for RenamedTokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RenamedTokenizer").finish_non_exhaustive()
    }
}

/// A control token in a rendered text.
#[derive(Debug, Clone)]
pub(super) struct Match {
    pub(super) id: u32,
    /// Its bytes in the text, with the white space that `lstrip` or `rstrip` includes.
    pub(super) range: Range<usize>,
}

impl Control {
    /// Collects the control tokens: special tokens, and added tokens of the form `<|…|>` that the template writes.
    /// Tokens around reasoning are not control tokens, because an answer may contain them.
    pub(super) fn new(tokenizer: &Tokenizer, template: &str) -> Self {
        let has_form = |text: &str| {
            let bars = [("<|", "|>"), ("<\u{ff5c}", "\u{ff5c}>")];
            bars.iter().any(|(open, close)| text.starts_with(open) && text.ends_with(close))
        };
        let is_control = |token: &AddedToken| {
            let text = token.content.as_str();
            let thought = ["think", "thought"].iter().any(|word| text.to_lowercase().contains(word));
            !text.trim().is_empty() && !thought && (token.special || has_form(text) && template.contains(text))
        };
        let tokens: BTreeMap<u32, AddedToken> =
            tokenizer.added_tokens().into_iter().filter(|(_, token)| is_control(token)).collect();
        let mut openings: Vec<String> =
            tokens.values().map(|token| token.content.chars().take(OPENING).collect()).collect();
        openings.sort_unstable();
        openings.dedup();
        let distinct = |letter: fn(&AddedToken) -> Option<char>| {
            let mut letters: Vec<char> = tokens.values().filter_map(letter).collect();
            letters.sort_unstable();
            letters.dedup();
            letters
        };
        let ends =
            [distinct(|token| token.content.chars().next()), distinct(|token| token.content.chars().next_back())];
        let normalized =
            tokenizer.bounded().inner.get_normalizer().is_some() && tokens.values().any(|token| token.normalized);
        Self { tokens, openings, ends, normalized, copies: Mutex::default() }
    }

    /// The conversation with one character changed wherever a message could contribute to a control token; `None` if
    /// there is no such place.
    pub(super) fn altered(&self, tokenizer: &Tokenizer, conversation: &Conversation) -> Option<Conversation> {
        let mut any = false;
        let mut altered = conversation.clone();
        for message in &mut altered.messages {
            any |= self.alter(tokenizer, message);
            // A template may write a token from the role and its own brackets.
            let role = message["role"].as_str().unwrap_or_default();
            let inside = |token: &AddedToken| token.content.contains(role);
            if !role.is_empty() && !ROLES.contains(&role) && self.tokens.values().any(inside) {
                message["role"] = changed(role, [0]).into();
                any = true;
            }
        }
        if let Some(tool) = &mut altered.tools {
            any |= self.alter(tokenizer, tool);
        }
        any.then_some(altered)
    }

    /// Changes all strings and keys of a value. Returns whether there was anything to change.
    fn alter(&self, tokenizer: &Tokenizer, value: &mut Value) -> bool {
        match value {
            Value::String(text) => {
                let places = self.places(tokenizer, text);
                if !places.is_empty() {
                    *text = changed(text, places.iter().copied());
                }
                !places.is_empty()
            }
            Value::Array(items) => {
                items.iter_mut().map(|item| self.alter(tokenizer, item)).fold(false, |any, one| any | one)
            }
            Value::Object(fields) => {
                let changes = fields.values_mut().map(|item| self.alter(tokenizer, item));
                let mut any = changes.fold(false, |any, one| any | one);
                if fields.keys().any(|name| !self.places(tokenizer, name).is_empty()) {
                    any = true;
                    let renamed = std::mem::take(fields).into_iter().map(|(name, item)| {
                        let places = self.places(tokenizer, &name);
                        (changed(&name, places.iter().copied()), item)
                    });
                    *fields = renamed.collect();
                }
                any
            }
            _ => false,
        }
    }

    /// Byte offsets of characters that could be part of a control token. The token may be in the text as a whole, begin
    /// at its end, or end at its start.
    fn places(&self, tokenizer: &Tokenizer, text: &str) -> Vec<usize> {
        let mut places = self.raw_places(text);
        if let Some(normalizer) = tokenizer.bounded().inner.get_normalizer().filter(|_| self.normalized) {
            let mut normalized = NormalizedString::from(text);
            if normalizer.normalize(&mut normalized).is_ok() && normalized.get() != text {
                for place in self.raw_places(normalized.get()) {
                    let range = tokenizers::normalizer::Range::Normalized(place..=place);
                    places.extend(
                        normalized.convert_offsets(range).map(|range| range.start).filter(|at| *at < text.len()),
                    );
                }
            }
        }
        places.sort_unstable();
        places.dedup();
        places
    }

    fn raw_places(&self, text: &str) -> Vec<usize> {
        let mut places: Vec<usize> = Vec::new();
        for opening in &self.openings {
            places.extend(text.match_indices(opening.as_str()).map(|(at, _)| at));
        }
        let longest = self.tokens.values().map(|token| token.content.len()).max().unwrap_or(0);
        let known = |test: &dyn Fn(&str) -> bool| self.tokens.values().any(|token| test(&token.content));
        for text in [text, text.trim_end()] {
            let tail = text.char_indices().rev().take_while(|(at, _)| text.len() - at < longest);
            let begins = tail.filter(|(_, letter)| self.ends[0].contains(letter)).map(|(at, _)| at);
            places.extend(begins.filter(|at| known(&|token| token.starts_with(&text[*at..]))));
        }
        for from in [0, text.len() - text.trim_start().len()] {
            let text = &text[from..];
            let head = text.char_indices().take_while(|(at, _)| *at < longest);
            let ends = head.filter(|(_, letter)| self.ends[1].contains(letter));
            let ends = ends.filter(|(at, letter)| known(&|token| token.ends_with(&text[..at + letter.len_utf8()])));
            places.extend(ends.map(|(at, _)| from + at));
        }
        places
    }

    /// The control tokens that the tokenizer finds in a text.
    pub(super) fn matches(&self, tokenizer: &Tokenizer, text: &str) -> Result<Vec<Match>> {
        let inner = &tokenizer.bounded().inner;
        let split = || {
            let pieces = inner.get_added_vocabulary().extract_and_normalize(inner.get_normalizer(), text);
            let found = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte).into_iter();
            let found = found.filter_map(|(_, (start, end), tokens)| {
                let id = tokens.as_ref()?.first()?.id;
                self.tokens.contains_key(&id).then_some(Match { id, range: start..end })
            });
            found.collect()
        };
        isolated("tokenizing", split)
    }

    /// The copy of the tokenizer in which the names of control tokens begin with `mark`. It is built once.
    fn copy(&self, tokenizer: &Tokenizer, mark: char) -> Result<Arc<RenamedTokenizer>> {
        let mut copies = self.copies.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((_, copy)) = copies.iter().find(|(known, _)| *known == mark) {
            return Ok(copy.clone());
        }
        let build = || self.rename_tokens(tokenizer, mark);
        let copy = isolated("copying the tokenizer", build)?
            .map_err(|error| Error::model("cannot rename the tokenizer's special tokens").caused_by(error))?;
        let copy = Arc::new(copy);
        copies.push((mark, copy.clone()));
        Ok(copy)
    }

    fn rename_tokens(&self, tokenizer: &Tokenizer, mark: char) -> tokenizers::Result<RenamedTokenizer> {
        let mut inner = tokenizer.bounded().inner.clone();
        inner.with_added_vocabulary(AddedVocabulary::new());
        // Filler tokens take the unused ids up to the largest one, so renamed tokens get ids after them.
        let model = inner.get_model();
        let (size, largest) = (model.get_vocab_size() as u32, model.get_vocab().into_values().max().unwrap_or(0));
        inner.add_tokens((size..=largest).map(|id| AddedToken::from(format!("{mark}{mark}{id}"), true)))?;
        let mut added: Vec<(u32, AddedToken)> = tokenizer.added_tokens();
        added.sort_unstable_by_key(|(id, _)| *id);
        let mut renamed = Vec::with_capacity(added.len());
        for (id, mut token) in added {
            if self.tokens.contains_key(&id) {
                token.content.insert(0, mark);
            }
            renamed.push((id, token));
        }
        inner.add_tokens(renamed.iter().map(|(_, token)| token.clone()))?;
        let ids = renamed.iter().filter_map(|(id, token)| Some((inner.token_to_id(&token.content)?, *id))).collect();
        let tokenizer = BoundedTokenizer::new(inner, tokenizer.bounded().growth);
        Ok(RenamedTokenizer { tokenizer, ids })
    }

    /// Encodes a text in which the tokens of `own` stay tokens, and all other control tokens become plain text.
    pub(super) fn encode(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        own: &[Match],
        most: Option<usize>,
    ) -> Result<Encoded> {
        let mark = NONCHARACTERS.into_iter().find(|mark| !text.contains(*mark));
        let mark = mark.ok_or_else(|| Error::data("the conversation uses all noncharacters U+FDD0 to U+FDEF"))?;
        let copy = self.copy(tokenizer, mark)?;
        let (mut renamed, mut places, mut copied) = (String::with_capacity(text.len() + 64), Vec::new(), 0);
        for Match { id, range } in own {
            let stood = &text[range.clone()];
            let inside = stood.find(&self.tokens[id].content).unwrap_or(stood.len() - stood.trim_start().len());
            let at = range.start + inside;
            renamed.push_str(&text[copied..at]);
            places.push(renamed.len());
            renamed.push(mark);
            copied = at;
        }
        renamed.push_str(&text[copied..]);
        let back = |at: usize| at - mark.len_utf8() * places.partition_point(|place| *place < at);
        let (whole, _) = copy.tokenizer.encode_first(&renamed, false, most)?;
        let mut encoded = Encoded::default();
        let mut push = |id: u32, (start, end): (usize, usize)| {
            encoded.ids.push(id);
            encoded.offsets.push((back(start), back(end)));
        };
        let unknown = tokenizer.unknown_id();
        for (&id, &(start, end)) in whole.ids.iter().zip(&whole.offsets) {
            match copy.ids.get(&id) {
                Some(&id) => push(id, (start, end)),
                // The model's vocabulary may also have the token as a word: then its characters are encoded one by one.
                None if self.tokens.contains_key(&id) && Some(id) != unknown => {
                    for (at, letter) in renamed.get(start..end).unwrap_or_default().char_indices() {
                        let place = (start + at, start + at + letter.len_utf8());
                        let (single, _) = copy.tokenizer.encode_first(&letter.to_string(), false, None)?;
                        let plain = |id: &&u32| !self.tokens.contains_key(id) || Some(**id) == unknown;
                        single.ids.iter().filter(plain).for_each(|id| push(*id, place));
                    }
                }
                None => push(id, (start, end)),
            }
        }
        Ok(encoded)
    }
}

/// The text with another character at each of some byte offsets, which must be sorted.
fn changed(text: &str, places: impl IntoIterator<Item = usize>) -> String {
    let mut places = places.into_iter().peekable();
    let letters = text.char_indices().map(|(at, letter)| match places.next_if_eq(&at) {
        Some(_) if letter == 'x' => 'y',
        Some(_) => 'x',
        None => letter,
    });
    letters.collect()
}

/// Byte offsets of `text` at which `other` has another character, always `x` or `y`; `None` if they differ otherwise.
pub(super) fn differences(text: &str, other: &str) -> Option<Vec<usize>> {
    let (mut left, mut right) = (text.char_indices(), other.chars());
    let mut found = Vec::new();
    loop {
        match (left.next(), right.next()) {
            (Some((_, a)), Some(b)) if a == b => {}
            (Some((at, _)), Some('x' | 'y')) => found.push(at),
            (None, None) => return Some(found),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests;
