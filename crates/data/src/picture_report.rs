//! What `tunesmith data` reports about the pictures of a split and their answers: sizes, copies of the same file, and
//! captions that say little.
use std::collections::BTreeSet;

use rayon::prelude::*;
use serde::Serialize;

use super::answer_report::{AnswerCounter, AnswerReport};
use super::batch::{Example, IGNORE};
use super::pictures::{PictureLook, Pictures};
use super::split::Split;
use super::tokenizer::Tokenizer;
use tunesmith_base::error::Result;

/// The pictures of a split, and the answers of the rows that show them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PictureReport {
    /// How often pictures are shown. A picture in three rows counts three times.
    pub shown: usize,
    /// How many different names of pictures the rows have.
    pub files: usize,
    /// How many of these names belong to a file with the same content as another one's.
    pub copies: usize,
    /// Width and height in pixels, of the picture with the fewest pixels and of the one with the most.
    pub sizes: [[u32; 2]; 2],
    /// The fewest and the most tokens that a picture takes in the decoder's input.
    pub tokens: [usize; 2],
    /// The texts that the model learns to answer with.
    pub answers: AnswerReport,
    /// The hashes of the files, each once.
    #[serde(skip)]
    contents: BTreeSet<String>,
}

impl PictureReport {
    /// Reads every picture of a split; `None` if the split shows none.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: a picture or a row cannot be read.
    pub fn of(split: &Split, pictures: &dyn Pictures, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let (mut shown, mut names, mut tokens) = (0, BTreeSet::new(), [usize::MAX, 0]);
        let texts = |row: usize| -> Result<Vec<String>> {
            let text = |example: Example| {
                let learned = example.input_ids.iter().zip(&example.labels).filter(|(_, label)| **label != IGNORE);
                tokenizer.decode(&learned.map(|(id, _)| *id).collect::<Vec<_>>(), true)
            };
            split.sequences(row)?.0.into_iter().map(text).collect()
        };
        let mut answers = AnswerCounter::new()?;
        for index in 0..split.len() {
            let of_sequences = split.pictures(index);
            if of_sequences.iter().all(Vec::is_empty) {
                continue;
            }
            for picture in of_sequences.iter().flatten().filter(|picture| !picture.is_world()) {
                shown += 1;
                names.insert(picture.name());
                let taken = picture.runs.iter().map(std::ops::Range::len).sum();
                tokens = [tokens[0].min(taken), tokens[1].max(taken)];
            }
            for text in texts(index)? {
                answers.push(index, &text)?;
            }
        }
        if shown == 0 {
            return Ok(None);
        }
        let looks: Vec<PictureLook> = names.into_par_iter().map(|name| pictures.look(name)).collect::<Result<_>>()?;
        let contents: BTreeSet<String> = looks.iter().map(|look| look.content.clone()).collect();
        let pixels = |look: &&PictureLook| u64::from(look.width) * u64::from(look.height);
        let size = |look: Option<&PictureLook>| look.map_or([0; 2], |look| [look.width, look.height]);
        Ok(Some(Self {
            shown,
            files: looks.len(),
            copies: looks.len() - contents.len(),
            sizes: [size(looks.iter().min_by_key(pixels)), size(looks.iter().max_by_key(pixels))],
            tokens,
            answers: answers.finish(&texts)?,
            contents,
        }))
    }

    /// How many different files both splits show, for a warning about pictures that are in training and in validation.
    pub fn shared_with(&self, other: &Self) -> usize {
        self.contents.intersection(&other.contents).count()
    }
}
