//! A tokenizer with bounds on the time and memory that a text may take. Tokenizer files and texts are untrusted: a word
//! of many megabytes or a suspicious regular expression could take all memory, or hours.
use std::path::Path;
use std::time::{Duration, Instant};

use super::catch_panic::isolated;
use super::encoded::Encoded;
use super::fast_bpe::FastBpe;
use super::growth::{self, Growth, Words};
use super::thread_time::thread_time;
use tunesmith_base::error::{Error, Result};

/// A tokenizer of the `tokenizers` crate, and bounds on the work that it may do for a text.
pub(super) struct BoundedTokenizer {
    pub(super) inner: tokenizers::Tokenizer,
    pub(super) growth: Growth,
    /// The fast path to the same tokens; `None` if the tokenizer is not one for it.
    fast: Option<FastBpe>,
}

impl BoundedTokenizer {
    pub(super) fn new(inner: tokenizers::Tokenizer, growth: Growth) -> Self {
        let fast = if growth.slow { None } else { FastBpe::of(&inner) };
        Self { inner, growth, fast }
    }

    /// Parses the content of the `tokenizer.json` at `path`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the file is malformed, or the tokenizer could make texts too large (`growth`).
    pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let read = || {
            let growth = growth::check(bytes)?;
            let loaded = isolated("reading the tokenizer", || tokenizers::Tokenizer::from_bytes(bytes))?;
            Ok(Self::new(loaded.map_err(|error| Error::model(error.to_string()).caused_by(error))?, growth))
        };
        read().map_err(|error: Error| {
            let error = error.context(path.display()).with_kind(tunesmith_base::Kind::Model);
            error.hint("expected the tokenizer.json of a Hugging Face model")
        })
    }

    /// The ids of a text, including those that the post-processor adds, and for each id whether it was added. `most` is
    /// as in [`super::tokenizer::Tokenizer::encode_first`].
    pub(super) fn ids_first(&self, text: &str, most: Option<usize>) -> Result<(Vec<u32>, Vec<bool>)> {
        if self.growth.slow || most.is_some() && text.len() > MAX_RUN {
            return self.encode_first(text, true, most).map(|(encoded, added)| (encoded.ids, added));
        }
        check_length(text, self.growth)?;
        if let Some((encoded, added)) = self.fast(text, true)? {
            return Ok((encoded.ids, added));
        }
        // `encode_fast` omits offsets.
        let encoding = isolated("tokenizing", || self.inner.encode_fast(text, true))?.map_err(untokenized)?;
        Ok((encoding.get_ids().to_vec(), added(&encoding)))
    }

    /// Tokenizes a text by the fast path ([`FastBpe`]); `None` if there is none for this tokenizer or this text.
    fn fast(&self, text: &str, add_special: bool) -> Result<Option<(Encoded, Vec<bool>)>> {
        let Some(fast) = &self.fast else { return Ok(None) };
        isolated("tokenizing", || fast.encode(&self.inner, text, add_special))
    }

    /// Tokenizes a text. Also returns for each id whether the post-processor has added it. `most` is as in
    /// [`super::tokenizer::Tokenizer::encode_first`].
    pub(super) fn encode_first(
        &self,
        text: &str,
        add_special: bool,
        most: Option<usize>,
    ) -> Result<(Encoded, Vec<bool>)> {
        let Self { inner, growth, .. } = self;
        let encode = |text: &str| {
            check_length(text, *growth)?;
            if growth.slow {
                check_time(inner, text)?;
            }
            if let Some(found) = self.fast(text, add_special)? {
                return Ok(found);
            }
            let encoding = isolated("tokenizing", || inner.encode(text, add_special))?.map_err(untokenized)?;
            let encoded = Encoded { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() };
            Ok((encoded, added(&encoding)))
        };
        // Tokens of ordinary text have fewer than 16 bytes on average.
        let mut length = most.map_or(usize::MAX, |most| most.saturating_mul(16).saturating_add(2 * MARGIN));
        // A text with a word that is too long must be cut before the word. For any other, a longer beginning costs little.
        let long = most.is_some() && long_word(text, growth.words).is_some();
        let cut_from = if long { text.len() } else { text.len() / 2 };
        length = if long { length } else { length.max(SMALL) };
        while let Some(most) = most.filter(|_| length < cut_from) {
            let end = char_boundary(text, length);
            let last = char_boundary(text, end - MARGIN);
            // In most tokenizers no token crosses a space. The margin is for the others, and for very long words.
            let cut = text[last..end].rfind(char::is_whitespace).map_or(end, |space| last + space);
            let (mut encoded, mut added) = encode(&text[..cut])?;
            let sure = cut - MARGIN;
            let first = encoded.offsets.iter().position(|(start, end)| start < end && *end > sure).unwrap_or(0);
            if first > most {
                encoded.ids.truncate(first);
                encoded.offsets.truncate(first);
                added.truncate(first);
                return Ok((encoded, added));
            }
            length = length.saturating_mul(4);
        }
        encode(text)
    }
}

/// For each id, whether the post-processor has added it.
fn added(encoding: &tokenizers::Encoding) -> Vec<bool> {
    encoding.get_special_tokens_mask().iter().map(|&added| added != 0).collect()
}

/// Texts up to this size, in bytes, are always tokenized as a whole.
const SMALL: usize = 1 << 20;
/// The longest text that is tokenized as a whole, in bytes. Each byte takes about 30 bytes of memory.
const MAX_WHOLE: usize = 128 << 20;
/// How long a tokenizer with suspicious regular expressions may take for a short text, and for each 64 KiB of a longer
/// one.
const PATIENCE: Duration = Duration::from_millis(250);
/// When only the beginning of a text is tokenized, tokens within this many bytes of its end may be wrong.
const MARGIN: usize = 64 << 10;

/// The longest run of letters and digits, of white space or of other characters, in bytes. Tokenizers treat it as one
/// word, which takes about 160 bytes of memory per byte.
const MAX_RUN: usize = 256 << 10;
/// The longest word, in bytes, of a tokenizer whose words can be longer than such runs. Legitimate text without spaces
/// may be long; 8 MiB take about a gigabyte of memory and 15 seconds.
const MAX_WORD: usize = 8 << 20;

/// The first word of `text` that is too long, and how many bytes it may have.
fn long_word(text: &str, words: Words) -> Option<(std::ops::Range<usize>, usize)> {
    if let Some(run) = Some(text).filter(|text| text.len() > MAX_RUN).and_then(long_run) {
        return Some((run, MAX_RUN));
    }
    let text = Some(text).filter(|text| text.len() > MAX_WORD)?;
    let word = match words {
        Words::Runs => None,
        Words::Text => Some(0..text.len()),
        Words::Spaced => {
            let start = |word: &str| word.as_ptr() as usize - text.as_ptr() as usize;
            let long = text.split_whitespace().find(|word| word.len() > MAX_WORD);
            long.map(|word| start(word)..start(word) + word.len())
        }
    };
    word.map(|word| (word, MAX_WORD))
}

/// The first run of `text` of more than [`MAX_RUN`] bytes.
fn long_run(text: &str) -> Option<std::ops::Range<usize>> {
    let class = |letter: char| match letter {
        _ if letter.is_alphanumeric() => 0,
        _ if letter.is_whitespace() => 1,
        _ => 2,
    };
    let (mut start, mut current) = (0, None);
    let mut letters = text.char_indices().map(|(at, letter)| (at, Some(class(letter)))).chain([(text.len(), None)]);
    letters.find_map(|(at, class)| {
        if class == current {
            return None;
        }
        let run = std::mem::replace(&mut start, at)..at;
        current = class;
        (run.len() > MAX_RUN).then_some(run)
    })
}

/// Refuses a text with a word that is too long.
fn check_words(text: &str, words: Words) -> Result<()> {
    let Some((word, most)) = long_word(text, words) else { return Ok(()) };
    let (length, most) = (word.len() >> 10, most >> 10);
    let place = word.start + 1;
    if words == Words::Text && word == (0..text.len()) && most == MAX_WORD >> 10 {
        return Err(Error::data(format!(
            "the text has {length} KiB, and this tokenizer takes it for one word, which is too long (at most {most} KiB)"
        ))
        .hint("split the row; with data.truncation: right only the beginning of a text is read"));
    }
    Err(Error::data(format!(
        "the text has a word of {length} KiB from its byte {place} on, which is too long to be tokenized (at most {most} KiB)"
    ))
    .hint("divide the word by spaces or take it out; with data.truncation: right only the beginning of a text is read"))
}

/// Refuses a text that is too long.
fn check_length(text: &str, growth: Growth) -> Result<()> {
    let longest = text.len().saturating_mul(growth.factor);
    if longest > MAX_WHOLE.saturating_add(text.len().saturating_mul(8)) {
        return Err(Error::model(format!(
            "the tokenizer can make a text {} times longer, which is too much for one of {} bytes",
            growth.factor,
            text.len()
        ))
        .hint("look at the normalizer in tokenizer.json"));
    }
    if text.len() <= MAX_WHOLE {
        return check_words(text, growth.words);
    }
    let (length, most) = (text.len() >> 20, MAX_WHOLE >> 20);
    Err(Error::data(format!("the text has {length} MiB, which is too long to be tokenized whole (at most {most} MiB)"))
        .hint("split the row, or set data.truncation: right, which reads only the beginning"))
}

/// The last character boundary of `text` up to `at`.
fn char_boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// Refuses a tokenizer that takes too long for the beginning of a text.
fn check_time(inner: &tokenizers::Tokenizer, text: &str) -> Result<()> {
    let mut length = 256;
    while length < text.len() {
        let end = char_boundary(text, length);
        let (began, before) = (Instant::now(), thread_time());
        isolated("tokenizing", || inner.encode_fast(&text[..end], false))?.map_err(untokenized)?;
        let spent = before.and_then(|before| thread_time()?.checked_sub(before)).unwrap_or_else(|| began.elapsed());
        let allowed = PATIENCE + PATIENCE * u32::try_from(length / (64 << 10)).unwrap_or(u32::MAX);
        if spent > allowed {
            return Err(Error::model(format!(
                "the tokenizer takes {:.1} s for the first {end} bytes of a text",
                spent.as_secs_f64()
            ))
            .hint("simplify the regular expressions in tokenizer.json: one repeats a part that repeats already"));
        }
        length *= 2;
    }
    Ok(())
}

pub(crate) fn untokenized(error: tokenizers::Error) -> Error {
    Error::data("cannot tokenize").caused_by(error)
}
