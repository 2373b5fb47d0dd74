//! Decodes tokens to text while they arrive: never half a character, and never text that a later token changes.
use tunesmith_base::error::Result;
use tunesmith_data::Tokenizer;

/// The text of an answer while it grows.
#[derive(Debug, Default)]
pub struct TextStream {
    ids: Vec<u32>,
    /// The index of the first id to decode the next piece with, because a decoder also looks at the token before.
    context: usize,
    /// The number of ids in the text.
    taken: usize,
    text: String,
    /// Whether the text has special tokens.
    keeps_special: bool,
}

impl TextStream {
    /// A stream whose text has special tokens.
    pub fn with_special_tokens() -> Self {
        Self { keeps_special: true, ..Self::default() }
    }

    /// Adds a token and returns the new text that no later token can change; it may be empty.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<&str> {
        self.ids.push(id);
        let before = tokenizer.decode(&self.ids[self.context..self.taken], !self.keeps_special)?;
        let now = tokenizer.decode(&self.ids[self.context..], !self.keeps_special)?;
        let start = self.text.len();
        // An incomplete character decodes to the replacement character.
        if now.len() > before.len() && !now.ends_with('\u{fffd}') && now.is_char_boundary(before.len()) {
            self.text.push_str(&now[before.len()..]);
            (self.context, self.taken) = (self.taken, self.ids.len());
        }
        Ok(&self.text[start..])
    }

    /// All text so far that no later token can change.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// The position of the first stop string in `text`.
pub(crate) fn first_stop(text: &str, stops: &[String]) -> Option<usize> {
    stops.iter().filter(|stop| !stop.is_empty()).filter_map(|stop| text.find(stop.as_str())).min()
}

/// The number of bytes of `text` that can be shown now. The possible beginning of a stop string waits.
pub fn certain(text: &str, stops: &[String]) -> usize {
    if let Some(start) = first_stop(text, stops) {
        return start;
    }
    let waits = |stop: &String| {
        let begins = |&at: &usize| stop.starts_with(&text[at..]);
        text.char_indices().map(|(at, _)| at).filter(|&at| text.len() - at < stop.len()).find(begins)
    };
    stops.iter().filter(|stop| !stop.is_empty()).filter_map(waits).min().unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_become_a_stop_string_waits() {
        let stops = ["User:".to_owned(), "\n\n".to_owned(), String::new()];
        assert_eq!(certain("Hello", &stops), 5);
        assert_eq!(certain("Hello Us", &stops), 6);
        assert_eq!(certain("Hello Use it", &stops), 12);
        assert_eq!(certain("Hello\n", &stops), 5);
        assert_eq!(certain("Hello User: x", &stops), 6);
        assert_eq!(certain("né", &stops), 3);
        assert_eq!(first_stop("a\n\nUser:", &stops), Some(1));
        assert_eq!(first_stop("a\nUser", &stops), None);
    }
}
