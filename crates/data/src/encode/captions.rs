//! Rows with a picture and its captions: no template, no BOS.
use std::iter;

use super::{Encoder, Example, IGNORE, TokenizedRow};
use crate::pictures::Shown;
use tunesmith_base::error::{Error, Result};

impl Encoder {
    /// An example for each caption: the picture's rows, the caption, EOS. There is no BOS, and the last of the picture's
    /// rows predicts the first token. The ids of the picture's rows mean nothing.
    pub(super) fn captions(&self, file: String, captions: &[String]) -> Result<TokenizedRow> {
        let pictures = self.pictures.as_ref().ok_or_else(|| {
            Error::data("the row has a picture, but the model has no image encoder")
                .hint("set data.format: text to train on its text alone")
        })?;
        let rows = pictures.rows(&file)?;
        let mut row = TokenizedRow {
            pictures: vec![Shown { file, runs: iter::once(0..rows).collect() }],
            ..TokenizedRow::default()
        };
        for caption in captions {
            let encoded = self.tokenizer.encode_first(caption, false, self.options.most_tokens())?;
            row.notes.keeps_tokens |= encoded.ids.iter().any(|id| self.tokenizer.is_control(*id));
            let labels = encoded.ids.iter().map(|&id| id as i32).collect();
            let caption = self.with_eos(Example { input_ids: encoded.ids, labels })?;
            let placeholder = caption.input_ids.last().copied().unwrap_or_default();
            let example = Example {
                input_ids: [vec![placeholder; rows], caption.input_ids].concat(),
                labels: [vec![IGNORE; rows], caption.labels].concat(),
            };
            row.longest = row.longest.max(example.input_ids.len());
            row.examples.push(example);
        }
        Ok(row)
    }
}
