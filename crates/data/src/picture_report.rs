//! What `tunesmith data` says about the images of a split and the answers about them: sizes, copies, and captions that
//! say little.
use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;
use serde::Serialize;

use super::batch::IGNORE;
use super::pictures::{PictureLook, Pictures};
use super::split::Split;
use super::tokenizer::Tokenizer;
use tunesmith_base::error::Result;

/// The pictures of a split, and the answers of the rows that show them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PictureReport {
    /// How often a picture is shown.
    pub shown: usize,
    /// Number of different names of pictures.
    pub files: usize,
    /// Names whose file is a copy of another one's.
    pub copies: usize,
    /// Width and height of the picture with the fewest pixels, and of that with the most.
    pub sizes: [[u32; 2]; 2],
    /// The fewest and the most tokens that a picture takes.
    pub tokens: [usize; 2],
    /// What the rows are to answer.
    pub answers: AnswerReport,
    /// The contents of the files.
    #[serde(skip)]
    contents: BTreeSet<String>,
}

/// Answers about pictures, such as captions.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct AnswerReport {
    /// How many there are, and how many different ones.
    pub count: usize,
    /// Those that no other is equal to but for case and spaces count once.
    pub different: usize,
    /// The commonest one, and how often it is given.
    pub commonest: (String, usize),
    /// The fewest words, their mean, and the most.
    pub words: (usize, f64, usize),
    /// Different words, and those that occur once.
    pub vocabulary: (usize, usize),
}

impl PictureReport {
    /// Looks at every picture of a split; `None` if it shows none.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: a picture or a row cannot be read.
    pub fn of(split: &Split, pictures: &dyn Pictures, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let (mut shown, mut names, mut tokens) = (0, BTreeSet::new(), Vec::new());
        let mut texts = Vec::new();
        for index in 0..split.len() {
            let of_sequences = split.pictures(index);
            if of_sequences.iter().all(Vec::is_empty) {
                continue;
            }
            for picture in of_sequences.iter().flatten().filter(|picture| !picture.is_world()) {
                shown += 1;
                names.insert(picture.name());
                tokens.push(picture.runs.iter().map(std::ops::Range::len).sum());
            }
            for example in split.sequences(index)?.0 {
                let learned = example.input_ids.iter().zip(&example.labels).filter(|(_, label)| **label != IGNORE);
                texts.push(tokenizer.decode(&learned.map(|(id, _)| *id).collect::<Vec<_>>(), true)?);
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
            tokens: [tokens.iter().copied().min().unwrap_or(0), tokens.iter().copied().max().unwrap_or(0)],
            answers: AnswerReport::of(&texts),
            contents,
        }))
    }

    /// How many different pictures both show.
    pub fn shared_with(&self, other: &Self) -> usize {
        self.contents.intersection(&other.contents).count()
    }
}

impl AnswerReport {
    fn of(texts: &[String]) -> Self {
        let (mut answers, mut vocabulary) = (BTreeMap::<String, usize>::new(), BTreeMap::<String, usize>::new());
        let mut lengths = Vec::with_capacity(texts.len());
        for text in texts {
            let words: Vec<String> = text.split_whitespace().map(str::to_lowercase).collect();
            lengths.push(words.len());
            *answers.entry(words.join(" ")).or_default() += 1;
            for word in words {
                let bare = word.trim_matches(|letter: char| !letter.is_alphanumeric());
                if !bare.is_empty() {
                    *vocabulary.entry(bare.to_owned()).or_default() += 1;
                }
            }
        }
        let mean = lengths.iter().sum::<usize>() as f64 / lengths.len().max(1) as f64;
        let bounds = [lengths.iter().min(), lengths.iter().max()].map(|bound| bound.copied().unwrap_or(0));
        Self {
            count: texts.len(),
            different: answers.len(),
            commonest: answers.into_iter().max_by_key(|(_, times)| *times).unwrap_or_default(),
            words: (bounds[0], mean, bounds[1]),
            vocabulary: (vocabulary.len(), vocabulary.values().filter(|&&times| times == 1).count()),
        }
    }

    /// The share of rows that give the commonest answer, if it is so large that a model may learn that alone.
    pub fn constant(&self) -> Option<f64> {
        let share = self.commonest.1 as f64 / self.count.max(1) as f64;
        (self.count >= 10 && share > 0.5).then_some(share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_without_case_and_spaces() {
        let texts = ["A cat.", "a  cat.", "the dog", "a bird, a cat"].map(String::from);
        let report = AnswerReport::of(&texts);
        assert_eq!((report.count, report.different), (4, 3));
        assert_eq!(report.commonest, ("a cat.".to_owned(), 2));
        assert_eq!(report.words, (2, 2.5, 4));
        assert_eq!(report.vocabulary, (5, 3), "a, cat; the, dog, bird once");
        assert_eq!(report.constant(), None);
        let same = vec!["an image".to_owned(); 12];
        assert_eq!(AnswerReport::of(&same).constant(), Some(1.0));
        assert_eq!(AnswerReport::of(&[]), AnswerReport::default());
    }
}
