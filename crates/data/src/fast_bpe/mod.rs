//! A fast path for byte-level BPE tokenizers, the kind that most models since GPT-2 have. It returns exactly the ids
//! and offsets of the `tokenizers` crate. That crate tracks each character through every step. Here a text is cut into
//! words by byte ranges, and the crate's BPE model tokenizes most words only once, because every thread remembers words
//! that it has seen.
//!
//! The crate itself handles a tokenizer with a part that this module does not know ([`FastBpe::of`] returns `None`),
//! and a text that normalization may change.
mod added;
mod nfc;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;
use tokenizers::{Model as _, ModelWrapper};

use self::added::AddedTokens;
use self::steps::{Searches, Split};
use super::encoded::Encoded;

/// The longest word that is remembered, in bytes.
const LONGEST_WORD: usize = 64;
/// How many words a thread remembers. They and their tokens take a few MiB.
const MOST_WORDS: usize = 1 << 15;

/// The parts of a byte-level BPE tokenizer around its model.
#[derive(Debug)]
pub(super) struct FastBpe {
    /// Added tokens that are searched for in the text itself, and then those that are searched for in the normalized
    /// text.
    added: [AddedTokens; 2],
    /// Whether the tokenizer normalizes texts by NFC.
    normalizes: bool,
    /// The steps that cut a text into words, in order.
    splits: Vec<Split>,
    /// The ids that the post-processor puts before and after a text.
    around: [Vec<u32>; 2],
    /// The letter that stands for each byte in the model's vocabulary.
    letters: [char; 256],
    /// What threads remember, for those that tokenize nothing now. A thread takes one value and gives it back.
    idle: Mutex<Vec<Memory>>,
}

/// A token of a word, with its byte range in the word.
#[derive(Debug, Clone, Copy)]
struct Piece {
    id: u32,
    start: u32,
    end: u32,
}

/// What a thread remembers between texts.
#[derive(Debug)]
struct Memory {
    searches: Searches,
    words: Words,
}

/// Words and their tokens, as a thread has seen them.
#[derive(Debug, Default)]
struct Words {
    /// For each word, the range of its tokens in `pieces`.
    places: HashMap<Box<str>, Range<u32>, ahash::RandomState>,
    pieces: Vec<Piece>,
}

impl FastBpe {
    /// Reads the parts of a tokenizer. `None` if its model is not BPE, or if it has a step that only the crate knows.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        let plain =
            model.dropout.is_none() && tokenizer.get_truncation().is_none() && tokenizer.get_padding().is_none();
        let vocabulary = tokenizer.get_added_vocabulary();
        if !plain || vocabulary.get_encode_special_tokens() {
            return None;
        }
        let normalizes = match json(tokenizer.get_normalizer()) {
            Value::Null => false,
            normalizer if normalizer["type"] == "NFC" => true,
            _ => return None,
        };
        let splits = steps::splits(&json(tokenizer.get_pre_tokenizer()))?;
        let around = steps::around(&json(tokenizer.get_post_processor()))?;
        let added = AddedTokens::of(vocabulary, normalizes)?;
        Some(Self { added, normalizes, splits, around, letters: letters(), idle: Mutex::default() })
    }

    /// The ids and offsets of `text`, as [`tokenizers::Tokenizer::encode`] returns them, and for each id whether the
    /// post-processor has added it. `None` if the crate must tokenize this text. `tokenizer` is the one that `self` was
    /// made from.
    pub(super) fn encode(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        text: &str,
        add_special: bool,
    ) -> Option<(Encoded, Vec<bool>)> {
        if self.normalizes && !nfc::stays(text) {
            return None;
        }
        let mut memory =
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_else(|| self.memory());
        let [before, behind] = &self.around;
        let mut encoded = Encoded::default();
        if add_special {
            encoded.ids.extend(before);
        }
        let first = encoded.ids.len();
        encoded.offsets.resize(first, (0, 0));
        let done = self.pieces(tokenizer.get_model(), text, &mut memory, &mut encoded);
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        done?;
        let last = encoded.ids.len();
        if add_special {
            encoded.ids.extend(behind);
        }
        encoded.offsets.resize(encoded.ids.len(), (0, 0));
        let added = (0..encoded.ids.len()).map(|at| !(first..last).contains(&at)).collect();
        Some((encoded, added))
    }

    fn memory(&self) -> Memory {
        Memory { searches: Searches::of(&self.splits), words: Words::default() }
    }

    /// Appends the tokens of `text` to `encoded`; `None` if the crate must tokenize it.
    fn pieces(&self, model: &ModelWrapper, text: &str, memory: &mut Memory, encoded: &mut Encoded) -> Option<()> {
        let [first, second] = &self.added;
        first.each(text, 0..text.len(), &mut |found, range| match found {
            Some(id) => {
                encoded.push(id, range);
                Some(())
            }
            None => second.each(text, range, &mut |found, range| {
                if let Some(id) = found {
                    encoded.push(id, range);
                    return Some(());
                }
                let Memory { searches, words } = memory;
                steps::each_word(&self.splits, searches, text, range, &mut |word| {
                    self.word(model, &text[word.clone()], word.start, words, encoded)
                })
            }),
        })
    }

    /// Appends the tokens of a word that begins at byte `at` of the text, and remembers them.
    fn word(
        &self,
        model: &ModelWrapper,
        word: &str,
        at: usize,
        Words { places, pieces }: &mut Words,
        encoded: &mut Encoded,
    ) -> Option<()> {
        let known = places.get(word).cloned();
        let range = if let Some(range) = &known {
            range.clone()
        } else {
            let start = pieces.len() as u32;
            self.tokenize(model, word, pieces)?;
            start..pieces.len() as u32
        };
        for piece in &pieces[range.start as usize..range.end as usize] {
            encoded.push(piece.id, at + piece.start as usize..at + piece.end as usize);
        }
        if known.is_none() && word.len() <= LONGEST_WORD && places.len() < MOST_WORDS {
            places.insert(word.into(), range);
        } else if known.is_none() {
            pieces.truncate(range.start as usize);
        }
        Some(())
    }

    /// Appends the tokens of a word, computed by the BPE model, to `pieces`.
    fn tokenize(&self, model: &ModelWrapper, word: &str, pieces: &mut Vec<Piece>) -> Option<()> {
        let mut written = String::with_capacity(2 * word.len());
        // For each byte of `written` where a letter begins: the index of the byte of `word` that the letter stands for.
        let mut bytes = vec![0; 2 * word.len() + 1];
        for (index, &byte) in word.as_bytes().iter().enumerate() {
            bytes[written.len()] = index;
            written.push(self.letters[byte as usize]);
        }
        bytes[written.len()] = word.len();
        for token in model.tokenize(&written).ok()? {
            let (start, end) = (*bytes.get(token.offsets.0)?, *bytes.get(token.offsets.1)?);
            // A token that has one byte of a character covers the whole character.
            let start = (0..=start).rev().find(|&at| word.is_char_boundary(at))?;
            let end = (end..=word.len()).find(|&at| word.is_char_boundary(at))?;
            pieces.push(Piece { id: token.id, start: start as u32, end: end as u32 });
        }
        Some(())
    }
}

impl Encoded {
    fn push(&mut self, id: u32, bytes: Range<usize>) {
        self.ids.push(id);
        self.offsets.push((bytes.start, bytes.end));
    }
}

/// A part of a tokenizer in the form of `tokenizer.json`; null if the tokenizer does not have it.
fn json<T: serde::Serialize>(part: Option<&T>) -> Value {
    part.and_then(|part| serde_json::to_value(part).ok()).unwrap_or_default()
}

/// The letter for each byte: printable ones stand for themselves, the others for letters from U+0100 on, in order
/// (`bytes_to_unicode` of GPT-2).
fn letters() -> [char; 256] {
    let mut next = 256;
    std::array::from_fn(|byte| {
        let byte = byte as u32;
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let letter = if printable { byte } else { next };
        next += u32::from(!printable);
        char::from_u32(letter).unwrap_or_default()
    })
}
