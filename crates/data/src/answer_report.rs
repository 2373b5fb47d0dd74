//! Statistics about the answers of rows with pictures, such as captions: how many differ, how many nearly repeat
//! another one, how long they are, and which words are rare.
//!
//! The time is linear in the number of answers. The memory depends on the number of different answers, not on their
//! length: at most 60 bytes for each, and 50 more for each of the first [`COMPARED_ANSWERS`], which are compared with
//! each other. Their words are in a temporary file.
use std::collections::{BTreeMap, HashMap};
use std::slice::from_ref;

use serde::Serialize;
use tunesmith_base::error::{Error, Result};

use super::batch::Example;
use super::clusters::Clustering;
use super::minhash::{add_words, band_of_words, shared_words, word_sketch};
use super::report::{Counts, NAMED_ROWS};
use super::tokens::{TokenSet, TokenWriter};

/// Two answers are near-duplicates if their sets of words have at least this Jaccard similarity.
pub const NEAR: f64 = 0.8;
/// The number of bands, and of `MinHash` values in each. They find 95 % of the pairs with a similarity of 0.8, and all
/// but one in 10,000 of those with 0.9.
const BANDS: (usize, usize) = (16, 8);
/// How many earlier answers of a bucket an answer is compared with.
const COMPARED: usize = 64;
/// How many different answers are compared. Further ones are only counted.
const COMPARED_ANSWERS: usize = 1 << 22;
/// How many different words are counted. Further ones are ignored.
const COUNTED_WORDS: usize = 1 << 20;
/// The longest word that is counted, in bytes. Longer ones, such as web addresses, are ignored.
const LONGEST_WORD: usize = 64;

/// Answers about pictures, such as captions.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct AnswerReport {
    /// The number of answers.
    pub count: usize,
    /// The number of answers that differ from each other in more than case and white space.
    pub different: usize,
    /// The most frequent answer in lower case, and how often it occurs.
    pub commonest: (String, usize),
    /// Words per answer: the fewest, the mean, and the most.
    pub words: (usize, f64, usize),
    /// How many different words occur, and how many of them occur once. Words of more than 64 bytes are not counted,
    /// nor are those after the first 1,048,576 different ones.
    pub vocabulary: (usize, usize),
    /// The alphabetically first of the words that occur once, at most five.
    pub rare_words: Vec<String>,
    /// Different answers that share most of their words.
    pub near_duplicates: NearDuplicates,
}

/// Different answers that share at least 80 % of their words with another one, directly or over a chain of such
/// answers. The order of the words, and how often each occurs, do not count. If an answer has more than 256 different
/// words, a sample of 256 of them is compared.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct NearDuplicates {
    /// How many different answers nearly duplicate an earlier one.
    pub answers: usize,
    /// How many groups of near-duplicates there are.
    pub groups: usize,
    /// How many different answers were compared: the first ones, if there are more than 4,194,304.
    pub compared: usize,
    /// The first pairs, at most five, each with the earlier answer first.
    pub pairs: Vec<[String; 2]>,
}

/// Collects the statistics answer by answer. Call [`Self::push`] for each answer, then [`Self::finish`].
pub struct AnswerCounter {
    count: usize,
    /// The index of each different answer, by the hash of its normalized text.
    numbers: HashMap<u64, u32>,
    /// How often each different answer occurs, by its index.
    times: Vec<u32>,
    /// The first row that gives each different answer, by its index.
    firsts: Vec<u32>,
    /// Words of the shortest answer, of all answers together, and of the longest one.
    lengths: (usize, usize, usize),
    vocabulary: HashMap<String, u32>,
    sketches: TokenWriter,
    compared: usize,
}

/// The text in lower case, with one space between words.
fn normalized(text: &str) -> String {
    text.split_whitespace().map(str::to_lowercase).collect::<Vec<_>>().join(" ")
}

fn hash(normalized: &str) -> u64 {
    u64::from_le_bytes(*blake3::hash(normalized.as_bytes()).as_bytes().first_chunk().expect("32 bytes"))
}

impl AnswerCounter {
    /// Starts counting.
    ///
    /// # Errors
    /// The temporary file of words cannot be created.
    pub fn new() -> Result<Self> {
        let dir = std::env::temp_dir();
        Ok(Self {
            count: 0,
            numbers: HashMap::new(),
            times: Vec::new(),
            firsts: Vec::new(),
            lengths: (usize::MAX, 0, 0),
            vocabulary: HashMap::new(),
            sketches: TokenWriter::temporary(&dir).map_err(|error| Error::io("write to", &dir, &error))?,
            compared: 0,
        })
    }

    /// Adds one answer of a row. A row may have several answers, such as captions.
    ///
    /// # Errors
    /// The temporary file of words cannot be written.
    pub fn push(&mut self, row: usize, text: &str) -> Result<()> {
        let text = normalized(text);
        let mut length = 0;
        for word in text.split(' ').filter(|word| !word.is_empty()) {
            length += 1;
            let bare = word.trim_matches(|letter: char| !letter.is_alphanumeric());
            if bare.is_empty() || bare.len() > LONGEST_WORD {
                continue;
            }
            if let Some(times) = self.vocabulary.get_mut(bare) {
                *times = times.saturating_add(1);
            } else if self.vocabulary.len() < COUNTED_WORDS {
                self.vocabulary.insert(bare.to_owned(), 1);
            }
        }
        self.count += 1;
        self.lengths = (self.lengths.0.min(length), self.lengths.1 + length, self.lengths.2.max(length));
        let next = self.times.len() as u32;
        let number = *self.numbers.entry(hash(&text)).or_insert(next);
        if number < next {
            self.times[number as usize] += 1;
            return Ok(());
        }
        self.times.push(1);
        self.firsts.push(row as u32);
        if self.compared == COMPARED_ANSWERS {
            return Ok(());
        }
        self.compared += 1;
        let mut words = Vec::new();
        add_words(&text, &mut words);
        let sketch = word_sketch(&words);
        let labels = sketch.iter().map(|&word| word as i32).collect();
        let stored = Example { input_ids: sketch, labels };
        self.sketches.push((!stored.input_ids.is_empty()).then(|| (from_ref(&stored), 1.0)))
    }

    /// Computes the report. `texts` returns the answers of a row again, because only their hashes are kept.
    ///
    /// # Errors
    /// The errors of `texts`; the temporary file cannot be read.
    pub fn finish(self, texts: &dyn Fn(usize) -> Result<Vec<String>>) -> Result<AnswerReport> {
        let Self { count, numbers, times, firsts, lengths: (least, all, most), vocabulary, sketches, compared } = self;
        let text_of = |number: usize| -> Result<String> {
            let answers = texts(firsts[number] as usize)?;
            let is_it = |text: &String| numbers.get(&hash(&normalized(text))) == Some(&(number as u32));
            Ok(answers.into_iter().find(is_it).unwrap_or_default())
        };
        let commonest = (0..times.len()).rev().max_by_key(|&number| times[number]);
        let commonest =
            commonest.map(|number| Ok((normalized(&text_of(number)?), times[number] as usize))).transpose()?;
        let mut once: Vec<&String> =
            vocabulary.iter().filter(|(_, times)| **times == 1).map(|(word, _)| word).collect();
        once.sort_unstable();
        let mean = all as f64 / count.max(1) as f64;
        Ok(AnswerReport {
            count,
            different: times.len(),
            commonest: commonest.unwrap_or_default(),
            words: (least.min(most), mean, most),
            vocabulary: (vocabulary.len(), once.len()),
            rare_words: once.into_iter().take(NAMED_ROWS).cloned().collect(),
            near_duplicates: near_duplicates(&sketches.finish(&Counts::default())?, compared, &text_of)?,
        })
    }
}

fn near_duplicates(
    sketches: &TokenSet,
    compared: usize,
    text_of: &dyn Fn(usize) -> Result<String>,
) -> Result<NearDuplicates> {
    let clustering = Clustering {
        bands: BANDS.0,
        compared: COMPARED,
        read: |row: u32| {
            let examples = sketches.read(row)?.0.into_iter();
            Ok(examples.flat_map(|one| one.input_ids).collect::<Vec<u32>>())
        },
        key: |words: &Vec<u32>, band| band_of_words(words, band, BANDS.1),
        alike: |one: &Vec<u32>, other: &Vec<u32>| shared_words(one, other) >= NEAR,
    };
    let usable: Vec<u32> = sketches.usable().collect();
    // Pairs by the index of the later answer. Only the first few are kept for the report.
    let mut first = BTreeMap::new();
    let roots = clustering.roots(sketches.rows(), &usable, &mut |earlier, later| {
        first.entry(later).or_insert(earlier);
        if first.len() > NAMED_ROWS {
            first.pop_last();
        }
    })?;
    let mut repeated: Vec<u32> = (0..).zip(&roots).filter(|(row, root)| row != *root).map(|(_, root)| *root).collect();
    let answers = repeated.len();
    repeated.sort_unstable();
    repeated.dedup();
    let pair = |(later, earlier): (u32, u32)| Ok([text_of(earlier as usize)?, text_of(later as usize)?]);
    let pairs = first.into_iter().map(pair).collect::<Result<_>>()?;
    Ok(NearDuplicates { answers, groups: repeated.len(), compared, pairs })
}

impl AnswerReport {
    /// The share of the most frequent answer among all answers, if it is over half of at least ten answers. A model may
    /// then learn to give only this answer. `None` otherwise.
    pub fn constant(&self) -> Option<f64> {
        let share = self.commonest.1 as f64 / self.count.max(1) as f64;
        (self.count >= 10 && share > 0.5).then_some(share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn report(texts: &[String]) -> AnswerReport {
        let mut counter = AnswerCounter::new().unwrap();
        for (row, text) in texts.iter().enumerate() {
            counter.push(row, text).unwrap();
        }
        counter.finish(&|row| Ok(vec![texts[row].clone()])).unwrap()
    }

    #[test]
    fn answers_are_counted_without_case_and_spaces() {
        let texts = ["A cat.", "a  cat.", "the dog", "a bird, a cat"].map(String::from);
        let found = report(&texts);
        assert_eq!((found.count, found.different), (4, 3));
        assert_eq!(found.commonest, ("a cat.".to_owned(), 2));
        assert_eq!(found.words, (2, 2.5, 4));
        assert_eq!(found.vocabulary, (5, 3), "a, cat; the, dog, bird once");
        assert_eq!(found.rare_words, ["bird", "dog", "the"]);
        assert_eq!(found.constant(), None);
        let same = vec!["an image".to_owned(); 12];
        assert_eq!(report(&same).constant(), Some(1.0));
        assert_eq!(report(&[]), AnswerReport::default());
    }

    /// A text of drawn words. With 20,000 words, no two texts of 12 share most of them.
    fn drawn(state: &mut u64) -> Vec<String> {
        let mut word = || {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            format!("word{}", (*state >> 33) % 20_000)
        };
        (0..12).map(|_| word()).collect()
    }

    #[test]
    fn near_duplicates_are_found_among_others() {
        let mut rng = 7;
        let mut texts: Vec<Vec<String>> = (0..3000).map(|_| drawn(&mut rng)).collect();
        let before = report(&texts.iter().map(|words| words.join(" ")).collect::<Vec<_>>());
        assert_eq!(before.near_duplicates, NearDuplicates { compared: 3000, ..NearDuplicates::default() });
        // One word of twelve is another: 11 of 13 are shared. Or a word more: 12 of 13.
        for row in 0..200 {
            let mut words = texts[row * 3].clone();
            if row % 2 == 0 {
                words[5] = format!("other{row}");
            } else {
                words.push(format!("more{row}"));
            }
            texts.push(words);
        }
        let texts: Vec<String> = texts.iter().map(|words| words.join(" ")).collect();
        let found = report(&texts).near_duplicates;
        // Every pair that truly shares so much, by comparing all.
        let sets: Vec<BTreeSet<&str>> = texts.iter().map(|text| text.split(' ').collect()).collect();
        let shared = |one: &BTreeSet<&str>, other: &BTreeSet<&str>| {
            let both = one.intersection(other).count();
            both as f64 / (one.len() + other.len() - both) as f64
        };
        let truly = (0..sets.len()).filter(|&row| sets[..row].iter().any(|other| shared(&sets[row], other) >= NEAR));
        let truly = truly.count();
        assert_eq!(truly, 200);
        assert!(found.answers <= truly && found.answers >= truly * 95 / 100, "{} of {truly}", found.answers);
        assert_eq!((found.groups, found.compared), (found.answers, 3200));
        assert_eq!(found.pairs.len(), NAMED_ROWS);
        for [one, other] in &found.pairs {
            let [one, other] = [one, other].map(|text| text.split(' ').collect());
            assert!(shared(&one, &other) >= NEAR);
        }
    }

    #[test]
    fn punctuation_and_order_alone_make_near_duplicates() {
        let texts = ["A cat on a mat", "a cat, on a mat!", "on a mat, a cat", "a dog in a car", "...", "!"];
        let found = report(&texts.map(String::from));
        assert_eq!(found.different, 6);
        let near = found.near_duplicates;
        assert_eq!((near.answers, near.groups), (2, 1));
        assert!(near.pairs.contains(&["A cat on a mat".to_owned(), "a cat, on a mat!".to_owned()]), "{:?}", near.pairs);
    }

    #[test]
    fn long_answers_are_compared_by_a_sample_of_their_words() {
        let text = |from: usize| (from..from + 2000).map(|word| format!("w{word}")).collect::<Vec<_>>().join(" ");
        let near = report(&[text(0), text(50), text(1000)]).near_duplicates;
        assert_eq!((near.answers, near.groups), (1, 1), "1950 of 2050 words are shared, and 1000 of 3000");
    }
}
