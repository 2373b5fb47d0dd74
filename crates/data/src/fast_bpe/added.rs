//! Finds added tokens, such as `<|im_end|>`, in a text before it is cut into words.
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};

/// Added tokens that are searched for together.
#[derive(Debug)]
pub(super) struct AddedTokens {
    /// `None` if there are no such tokens.
    search: Option<AhoCorasick>,
    tokens: Vec<Token>,
}

#[derive(Debug)]
struct Token {
    id: u32,
    /// Whether the token includes the white space before it (`lstrip`), and the white space after it (`rstrip`).
    strips: [bool; 2],
}

impl AddedTokens {
    /// The added tokens that are searched for in the text itself, and those for the normalized text. `None` if a token
    /// is found by more than its text (`single_word`), or if NFC may change the token. `normalizes` says whether the
    /// tokenizer normalizes by NFC.
    pub(super) fn of(vocabulary: &tokenizers::AddedVocabulary, normalizes: bool) -> Option<[Self; 2]> {
        let mut tokens: Vec<_> = vocabulary.get_added_tokens_decoder().iter().collect();
        tokens.sort_unstable_by_key(|(id, _)| **id);
        let unknown = |token: &tokenizers::AddedToken| {
            token.single_word || token.normalized && normalizes && !super::nfc::stays(&token.content)
        };
        if tokens.iter().any(|(_, token)| unknown(token)) {
            return None;
        }
        let [plain, normalized] = [false, true].map(|normalized| {
            let some: Vec<_> = tokens.iter().filter(|(_, token)| token.normalized == normalized).collect();
            let search = AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(some.iter().map(|(_, token)| &token.content));
            let tokens =
                some.iter().map(|(id, token)| Token { id: **id, strips: [token.lstrip, token.rstrip] }).collect();
            Some(Self { search: if some.is_empty() { None } else { Some(search.ok()?) }, tokens })
        });
        Some([plain?, normalized?])
    }

    /// Passes each non-empty part of `text[range]` to `then`, in order: an added token with its id, or the text between
    /// two of them with `None`. Stops with `None` as soon as `then` returns `None`.
    pub(super) fn each(
        &self,
        text: &str,
        range: Range<usize>,
        then: &mut dyn FnMut(Option<u32>, Range<usize>) -> Option<()>,
    ) -> Option<()> {
        let (begin, part) = (range.start, &text[range]);
        let mut done = 0;
        for found in self.search.iter().flat_map(|search| search.find_iter(part)) {
            let Token { id, strips: [left, right] } = self.tokens[found.pattern().as_usize()];
            let (mut start, mut end) = (found.start(), found.end());
            if left {
                // The token before it may have taken this white space.
                start = part[..start].trim_end().len().max(done);
            }
            if right {
                end = part.len() - part[end..].trim_start().len();
            }
            if done < start {
                then(None, begin + done..begin + start)?;
            }
            then(Some(id), begin + start..begin + end)?;
            done = end;
        }
        if done < part.len() { then(None, begin + done..begin + part.len()) } else { Some(()) }
    }
}
