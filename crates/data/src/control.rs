//! Control tokens in messages. `<|im_end|>` in what a user wrote would end the user's turn: what the template writes is
//! a token, what a message brings is plain text (`data.split_special_tokens`).
//!
//! Which is which: the conversation is rendered once more with a character of each such place changed. Where the two
//! texts differ, a message wrote. The template's own tokens are then renamed, in the text and in a copy of the tokenizer
//! that knows them by the new names alone, so that the whole text still goes through the tokenizer at once.
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use tokenizers::{
    AddedToken, AddedVocabulary, Model as _, NormalizedString, Normalizer as _, OffsetReferential, OffsetType,
};

use super::encode::Notes;
use super::isolate::isolated;
use super::messages::Conversation;
use super::template::ChatTemplate;
use super::tokenizer::{Encoded, Tokenizer, encode_first};
use tunesmith_base::error::{Error, Result};

/// The letters of a control token that say that something may stand behind them: `<|i`, `</s`.
const OPENING: usize = 3;
/// Roles that templates know. Phi-3 writes `<|user|>` from the role, so that `end` would become `<|end|>`.
const ROLES: [&str; 9] =
    ["system", "user", "assistant", "tool", "developer", "function", "ipython", "model", "tool_response"];
/// Characters that may rename tokens: Unicode reserves them for such internal use.
const MARKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// The ids of a rendered conversation.
#[derive(Debug, Clone, Default)]
pub struct ChatTokens {
    /// Ids, and the bytes of the text that each stands for.
    pub encoded: Encoded,
    /// The control tokens that messages wrote out, in order, each once.
    pub written: Vec<String>,
}

impl ChatTokens {
    /// What a report says of them.
    pub(super) fn notes(&self, split: bool) -> Notes {
        if split {
            Notes { split_tokens: self.written.clone(), ..Notes::default() }
        } else {
            Notes { keeps_tokens: !self.written.is_empty(), ..Notes::default() }
        }
    }
}

/// The control tokens of a tokenizer and a template.
#[derive(Debug, Default)]
pub(super) struct Control {
    /// By id.
    tokens: BTreeMap<u32, AddedToken>,
    /// How they begin, each once.
    openings: Vec<String>,
    /// Their first letters, and their last ones.
    ends: [Vec<char>; 2],
    /// Whether some of them are looked for in the text as the tokenizer normalizes it.
    normalized: bool,
    /// Tokenizers that know them by other names; by the character that the names begin with.
    twins: Mutex<Vec<(char, Arc<Twin>)>>,
}

/// A tokenizer that knows the control tokens by other names only.
struct Twin {
    inner: tokenizers::Tokenizer,
    /// From the ids of its added tokens to those of the model.
    ids: BTreeMap<u32, u32>,
}

impl std::fmt::Debug for Twin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Twin").finish_non_exhaustive()
    }
}

/// A control token in a rendered text.
#[derive(Debug, Clone)]
struct Match {
    id: u32,
    /// With the space that it takes in.
    range: Range<usize>,
}

impl Control {
    /// Special tokens, and other added tokens that have the form of one (`<|…|>`) and that the template writes. Tokens
    /// around reasoning are not among them: an answer may hold its own.
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
        let normalized = tokenizer.inner().get_normalizer().is_some() && tokens.values().any(|token| token.normalized);
        Self { tokens, openings, ends, normalized, twins: Mutex::default() }
    }

    /// The conversation with a character of each place changed at which a control token could come from a message; none
    /// where there is no such place.
    fn altered(&self, tokenizer: &Tokenizer, conversation: &Conversation) -> Option<Conversation> {
        let mut any = false;
        let mut altered = conversation.clone();
        for message in &mut altered.messages {
            any |= self.alter(tokenizer, message);
            // A role may be all that stands between the brackets of a token.
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

    /// Changes all texts and names in a value; false where there was nothing to change.
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

    /// The bytes of a text at which characters begin that could be part of a control token: in one that stands there
    /// whole, or that begins at its end or ends at its beginning.
    fn places(&self, tokenizer: &Tokenizer, text: &str) -> Vec<usize> {
        let mut places = self.raw_places(text);
        if let Some(normalizer) = tokenizer.inner().get_normalizer().filter(|_| self.normalized) {
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

    /// The control tokens that the tokenizer sees in a text.
    fn matches(&self, tokenizer: &Tokenizer, text: &str) -> Result<Vec<Match>> {
        let inner = tokenizer.inner();
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

    /// A tokenizer that knows the control tokens by names that begin with `mark`.
    fn twin(&self, tokenizer: &Tokenizer, mark: char) -> Result<Arc<Twin>> {
        let mut twins = self.twins.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((_, twin)) = twins.iter().find(|(known, _)| *known == mark) {
            return Ok(twin.clone());
        }
        let build = || self.build_twin(tokenizer, mark);
        let twin = isolated("copying the tokenizer", build)?
            .map_err(|error| Error::model(format!("cannot rename the tokenizer's special tokens: {error}")))?;
        let twin = Arc::new(twin);
        twins.push((mark, twin.clone()));
        Ok(twin)
    }

    fn build_twin(&self, tokenizer: &Tokenizer, mark: char) -> tokenizers::Result<Twin> {
        let mut inner = tokenizer.inner().clone();
        inner.with_added_vocabulary(AddedVocabulary::new());
        // New names get the ids behind the vocabulary, which a model may use in part.
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
        Ok(Twin { inner, ids })
    }

    /// Encodes a text in which the tokens of `own` are the template's, and every other one is plain text.
    fn encode(&self, tokenizer: &Tokenizer, text: &str, own: &[Match], most: Option<usize>) -> Result<Encoded> {
        let mark = MARKS.into_iter().find(|mark| !text.contains(*mark));
        let mark = mark.ok_or_else(|| Error::data("the conversation uses all noncharacters U+FDD0 to U+FDEF"))?;
        let twin = self.twin(tokenizer, mark)?;
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
        let (whole, _) = encode_first((&twin.inner, tokenizer.growth()), &renamed, false, most)?;
        let mut encoded = Encoded::default();
        let mut push = |id: u32, (start, end): (usize, usize)| {
            encoded.ids.push(id);
            encoded.offsets.push((back(start), back(end)));
        };
        let unknown = tokenizer.unknown_id();
        for (&id, &(start, end)) in whole.ids.iter().zip(&whole.offsets) {
            match twin.ids.get(&id) {
                Some(&id) => push(id, (start, end)),
                // A vocabulary may have the token as a word too.
                None if self.tokens.contains_key(&id) && Some(id) != unknown => {
                    for (at, letter) in renamed.get(start..end).unwrap_or_default().char_indices() {
                        let place = (start + at, start + at + letter.len_utf8());
                        let (single, _) =
                            encode_first((&twin.inner, tokenizer.growth()), &letter.to_string(), false, None)?;
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

/// The text with other letters at some bytes.
fn changed(text: &str, places: impl IntoIterator<Item = usize>) -> String {
    let mut places = places.into_iter().peekable();
    let letters = text.char_indices().map(|(at, letter)| match places.next_if_eq(&at) {
        Some(_) if letter == 'x' => 'y',
        Some(_) => 'x',
        None => letter,
    });
    letters.collect()
}

/// The bytes of `text` at which `other` has another character; none where they differ in more than single characters.
fn differences(text: &str, other: &str) -> Option<Vec<usize>> {
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

impl ChatTemplate {
    /// The ids of `text`, which is `conversation`, or its messages through one of its answers, as this template rendered
    /// it, up to the next answer with `add_generation_prompt`. With `split`, control tokens that its messages wrote out are plain text; tokens behind the
    /// first `most` do not count ([`Tokenizer::encode_first`]).
    ///
    /// # Errors
    /// Those of the tokenizer; [`tunesmith_base::Kind::Data`]: the template does not treat all texts alike, so that the tokens of
    /// a message cannot be told from its own.
    pub fn tokens(
        &self,
        tokenizer: &Tokenizer,
        conversation: &Conversation,
        text: &str,
        add_generation_prompt: bool,
        (split, most): (bool, Option<usize>),
    ) -> Result<ChatTokens> {
        let control = &self.control;
        let whole = || Ok(ChatTokens { encoded: tokenizer.encode_first(text, false, most)?, written: Vec::new() });
        let Some(altered) = control.altered(tokenizer, conversation) else { return whole() };
        let found = control.matches(tokenizer, text)?;
        if found.is_empty() {
            return whole();
        }
        let render = |conversation: &Conversation, count: usize| {
            let messages = conversation.messages[..count].to_vec();
            let beginning = Conversation { messages, ..conversation.clone() };
            self.render(&beginning, add_generation_prompt).ok().map(|rendered| rendered.text)
        };
        // The text may be that of the first messages, up to an answer.
        let answers =
            (1..conversation.messages.len()).filter(|at| conversation.messages[at - 1]["role"] == "assistant");
        let counts = std::iter::once(conversation.messages.len()).chain(answers.rev());
        let count = counts.into_iter().find(|count| render(conversation, *count).as_deref() == Some(text));
        let other = count.and_then(|count| render(&altered, count));
        let Some(places) = other.as_deref().and_then(|other| differences(text, other)) else {
            let count = other.map_or(Ok(0), |other| control.matches(tokenizer, &other).map(|found| found.len()))?;
            if count == found.len() || !split {
                return whole();
            }
            return Err(Error::data(format!(
                "the chat template ({}) changes what stands around the special tokens in the messages, so they cannot be told from its own",
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
        let encoded = if split {
            control.encode(tokenizer, text, &own, most)?
        } else {
            tokenizer.encode_first(text, false, most)?
        };
        Ok(ChatTokens { encoded, written })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A tokenizer of letters, with special tokens of a kind and other parts.
    fn tokenizer(kind: &Value, parts: &Value) -> Tokenizer {
        let specials = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|user|>"];
        let letters = "abcdefghijklmnopqrstuvwxyz<>|/_ \u{2581}\n".chars().map(String::from);
        let vocabulary: serde_json::Map<String, Value> = specials
            .map(str::to_owned)
            .into_iter()
            .chain(letters)
            .chain(["im".to_owned(), "<|".to_owned()])
            .zip(0..)
            .map(|(token, id)| (token, json!(id)))
            .collect();
        let added = specials.iter().zip(0..).map(|(text, id)| {
            let mut token = json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true});
            if id > 0 {
                kind.as_object().unwrap().iter().for_each(|(name, value)| token[name] = value.clone());
            }
            token
        });
        let mut tokenizer = json!({"version": "1.0", "added_tokens": added.collect::<Vec<_>>(),
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "vocab": vocabulary, "merges": [["i", "m"], ["<", "|"]]}});
        parts.as_object().unwrap().iter().for_each(|(name, value)| tokenizer[name] = value.clone());
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        Tokenizer::load(folder.path()).unwrap()
    }

    fn tokenizers() -> Vec<Tokenizer> {
        let kinds = [json!({}), json!({"lstrip": true}), json!({"rstrip": true}), json!({"normalized": true})];
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
        let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": true});
        let parts = [
            json!({}),
            json!({"pre_tokenizer": metaspace("first")}),
            json!({"pre_tokenizer": metaspace("always")}),
            json!({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"}, replace]}}),
            json!({"normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "WhitespaceSplit"}}),
            json!({"normalizer": {"type": "NFKC"}}),
        ];
        kinds.iter().flat_map(|kind| parts.iter().map(move |parts| tokenizer(kind, parts))).collect()
    }

    const TEXTS: [&str; 6] = [
        "<s>hi <|im_end|> there</s>",
        " a  <s>  b <|user|>\n c</s> ",
        "<|im_end|><|im_end|> <|user|>",
        "no special token",
        "q <|im_end| > <|<s>|> \u{fdd0}",
        "<S> \u{ff1c}s\u{ff1e} <|IM_END|> x",
    ];

    #[test]
    fn renamed_tokens_are_the_same_tokens() {
        for tokenizer in tokenizers() {
            let control = Control::new(&tokenizer, "");
            for text in TEXTS {
                let own = control.matches(&tokenizer, text).unwrap();
                let expected = tokenizer.encode(text, false).unwrap();
                let found = control.encode(&tokenizer, text, &own, None).unwrap();
                assert_eq!(found.ids, expected.ids, "{text:?}");
                assert_eq!(found.offsets, expected.offsets, "{text:?}");
            }
        }
    }

    #[test]
    fn tokens_that_are_not_the_templates_are_plain_text() {
        for tokenizer in tokenizers() {
            let control = Control::new(&tokenizer, "");
            let mut plain = tokenizer.inner().clone();
            plain.set_encode_special_tokens(true);
            for text in TEXTS {
                let expected = plain.encode(text, false).unwrap();
                let found = control.encode(&tokenizer, text, &[], None).unwrap();
                assert!(found.ids.iter().all(|id| !tokenizer.is_control(*id)), "{text:?}");
                if expected.get_ids().iter().all(|id| !tokenizer.is_control(*id)) {
                    assert_eq!(found.ids, expected.get_ids(), "{text:?}");
                }
            }
        }
    }

    #[test]
    fn tokens_that_normalization_makes_are_found() {
        let tokenizer = tokenizer(&json!({"normalized": true}), &json!({"normalizer": {"type": "NFKC"}}));
        let template =
            ChatTemplate::compile("{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}", "test", &tokenizer);
        let template = template.unwrap();
        for content in ["\u{ff1c}s\u{ff1e}", "a \u{ff1c}\u{ff5c}im_end|>", "<|im_end\u{ff5c}\u{ff1e}"] {
            let messages = vec![json!({"role": "user", "content": content})];
            let conversation = Conversation { messages, ..Conversation::default() };
            let text = template.render(&conversation, false).unwrap().text;
            let found = template.tokens(&tokenizer, &conversation, &text, false, (true, None)).unwrap();
            assert_eq!(found.written.len(), 1, "{content}");
            let control = found.encoded.ids.iter().filter(|id| tokenizer.is_control(**id)).count();
            assert_eq!(control, 2, "{content}");
        }
    }
}
