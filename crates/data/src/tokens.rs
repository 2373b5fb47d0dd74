//! Tokenized rows on disk. A set of rows is tokenized once, into a file. Only the place and length of each row are in
//! memory, so a set may be larger than memory; batches are read from the file when they are needed.
//!
//! The name of a cache file is the hash of everything that its content depends on. A damaged file is ignored. A
//! temporary file has no name.
//!
//! Layout, little-endian:
//!
//! ```text
//! header   magic, key [32]
//! rows     u32 words, per row:
//!            ids; bit 31: the token has no label; bit 30: an example begins (only in rows with several examples)
//!            labels, if any differs from its id
//!            the label of a classification or regression, if there is one
//!            the loss weight as f32, if it is not 1
//!            the references of a generation as JSON, filled up with spaces to a multiple of 4 bytes
//! sizes    per row two u32:
//!            tokens, 0 for a row that was left out; bit 31: has labels beside the ids; bit 30: has a loss weight;
//!              bit 29: has a label for classification or regression; bit 28: has several examples
//!            tokens with a label
//! counts   JSON: the counts; where rows have images or references, a list of them, the images by row, and pairs of a
//!            row and the words of its references
//! trailer  u64 each: words in rows, number of rows, bytes of JSON
//!          BLAKE3 of rows and sizes [32], BLAKE3 of all other parts [32]
//! ```
mod writer;

use std::fs::File;
use std::path::{Path, PathBuf};

use super::batch::{Example, IGNORE};
use super::pictures::Shown;
use super::report::Counts;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

pub use self::writer::TokenWriter;

const MAGIC: &[u8; 16] = b"tunesmith-data5\n";
const HEADER: usize = MAGIC.len() + 32;
const TRAILER: usize = 3 * 8 + 2 * 32;
const PIECE: usize = 1 << 20;
/// In an id: the token has no label.
const NO_LABEL: u32 = 1 << 31;
/// In an id of a row with several examples: an example begins here.
const EXAMPLE_START: u32 = 1 << 30;
/// In a count of tokens: labels are stored beside the ids.
const HAS_LABELS: u32 = 1 << 31;
/// In a count of tokens: the row has a loss weight.
const HAS_WEIGHT: u32 = 1 << 30;
/// In a count of tokens: the row has one label for a classification or regression.
const HAS_TARGET: u32 = 1 << 29;
/// In a count of tokens: the row has several examples.
const HAS_SEVERAL: u32 = 1 << 28;

/// The cache file of a key.
pub fn path(dir: &Path, key: &blake3::Hash) -> PathBuf {
    dir.join(format!("{}.tokens", key.to_hex()))
}

/// The size of a row, as the file stores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Size {
    /// The number of tokens, with the flags [`HAS_LABELS`], [`HAS_WEIGHT`], [`HAS_TARGET`] and [`HAS_SEVERAL`].
    tokens: u32,
    label_tokens: u32,
}

impl Size {
    const fn len(self) -> usize {
        (self.tokens & !(HAS_LABELS | HAS_WEIGHT | HAS_TARGET | HAS_SEVERAL)) as usize
    }

    /// The u32 words of the ids, and of labels beside them.
    const fn inner_words(self) -> u64 {
        (self.len() as u64) << (self.tokens >> 31)
    }

    const fn words(self) -> u64 {
        self.inner_words() + (self.tokens >> 30 & 1) as u64 + (self.tokens >> 29 & 1) as u64
    }
}

/// The number of a row, and the pictures of each of its examples.
pub type RowPictures = (u32, Vec<Vec<Shown>>);

/// The number of a row, and the u32 words that its references take in the file.
type RowReferences = (u32, u32);

/// The tokenized rows of an input, in the order of the files. Rows that were left out have no tokens.
#[derive(Debug)]
pub struct TokenSet {
    file: File,
    /// The path, for messages only: a temporary file has none.
    path: PathBuf,
    /// Where each row starts, in u32 words.
    starts: Vec<u64>,
    sizes: Vec<Size>,
    content: blake3::Hash,
    /// The tokens of the longest example among rows with several; 0 without such rows.
    longest_of_several: usize,
    /// The pictures of each row that has some, by its examples, in the order of the rows.
    pictures: Vec<RowPictures>,
    /// Each row with references, and how many words these take.
    references: Vec<RowReferences>,
}

impl TokenSet {
    /// Opens the cache file of a key; `None` if it does not exist or is damaged.
    pub fn open(path: &Path, key: &blake3::Hash) -> Option<(Self, Counts)> {
        let file = files::open_own(path).ok()?;
        let size = file.metadata().ok()?.len();
        let mut trailer = [0; TRAILER];
        read_at(&file, &mut trailer, size.checked_sub(TRAILER as u64)?).ok()?;
        let length = |at: usize| u64::from_le_bytes(trailer[at..at + 8].try_into().expect("eight bytes"));
        let (words, rows, counts) = (length(0), length(8), length(16));
        // Check lengths before any allocation: a damaged one could ask for all memory.
        let content_end = words.checked_mul(4)?.checked_add(rows.checked_mul(8)?)?.checked_add(HEADER as u64)?;
        if content_end.checked_add(counts)?.checked_add(TRAILER as u64)? != size {
            return None;
        }
        let mut header = [0; HEADER];
        read_at(&file, &mut header, 0).ok()?;
        if header[..MAGIC.len()] != MAGIC[..] || header[MAGIC.len()..] != key.as_bytes()[..] {
            return None;
        }
        let mut hasher = blake3::Hasher::new();
        let mut sizes = Vec::with_capacity(rows as usize);
        let numbers = HEADER as u64 + 4 * words;
        let mut piece = vec![0; PIECE];
        for (begin, end) in [(HEADER as u64, numbers), (numbers, content_end)] {
            let mut at = begin;
            while at < end {
                let piece = &mut piece[..(end - at).min(PIECE as u64) as usize];
                read_at(&file, piece, at).ok()?;
                hasher.update(piece);
                if begin == numbers {
                    sizes.extend(piece.as_chunks::<8>().0.iter().map(|bytes| Size {
                        tokens: u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
                        label_tokens: u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
                    }));
                }
                at += piece.len() as u64;
            }
        }
        let content = hasher.finalize();
        let mut json = vec![0; counts as usize];
        read_at(&file, &mut json, content_end).ok()?;
        let whole = hash_rest(key, &json, &trailer[..24], &content);
        if trailer[24..56] != content.as_bytes()[..] || trailer[56..] != whole.as_bytes()[..] {
            return None;
        }
        let (counts, pictures, references): (Counts, Vec<RowPictures>, Vec<RowReferences>) = match json.first() {
            Some(b'[') => serde_json::from_slice(&json).ok()?,
            _ => (serde_json::from_slice(&json).ok()?, Vec::new(), Vec::new()),
        };
        let longest_of_several = counts.turns.longest as usize;
        let (starts, all) = starts(&sizes, &references);
        if all != words {
            return None;
        }
        let set =
            Self { starts, file, path: path.to_owned(), sizes, content, longest_of_several, pictures, references };
        Some((set, counts))
    }

    /// The number of rows, including those that were left out.
    pub const fn rows(&self) -> usize {
        self.sizes.len()
    }

    /// The number of tokens in all examples of a row; 0 if it was left out.
    pub fn length(&self, row: u32) -> usize {
        self.sizes[row as usize].len()
    }

    /// Whether a row has several examples.
    pub fn has_several(&self, row: u32) -> bool {
        self.sizes[row as usize].tokens & HAS_SEVERAL != 0
    }

    /// An upper bound of the tokens of an example of this row.
    pub fn longest(&self, row: u32) -> usize {
        let length = self.length(row);
        if self.has_several(row) { length.min(self.longest_of_several) } else { length }
    }

    /// The number of tokens of a row that carry a loss.
    pub fn label_tokens(&self, row: u32) -> usize {
        self.sizes[row as usize].label_tokens as usize
    }

    /// The rows that were not left out.
    pub fn usable(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.rows() as u32).filter(|&row| self.length(row) > 0)
    }

    /// The pictures of a row, by its examples; empty if it has none.
    pub fn pictures(&self, row: u32) -> &[Vec<Shown>] {
        let found = self.pictures.binary_search_by_key(&row, |(row, _)| *row);
        found.map_or(&[], |place| &self.pictures[place].1)
    }

    /// The pictures of all rows that have some.
    pub fn all_pictures(&self) -> &[RowPictures] {
        &self.pictures
    }

    /// The texts with which a generation for a row is compared; empty if it has only its own answer.
    ///
    /// # Errors
    /// Those of [`TokenSet::read`].
    pub fn references(&self, row: u32) -> Result<Vec<String>> {
        let Ok(place) = self.references.binary_search_by_key(&row, |(row, _)| *row) else { return Ok(Vec::new()) };
        let mut json = vec![0; 4 * self.references[place].1 as usize];
        let start = self.starts[row as usize] + self.sizes[row as usize].words();
        read_at(&self.file, &mut json, HEADER as u64 + 4 * start)
            .and_then(|()| Ok(serde_json::from_slice(&json)?))
            .map_err(|error| Error::io("read tokenized data from", &self.path, &error))
    }

    /// BLAKE3 of rows and sizes.
    pub const fn content(&self) -> &blake3::Hash {
        &self.content
    }

    /// Reads the examples of a row, at least one, and the factor of its loss.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the file cannot be read.
    pub fn read(&self, row: u32) -> Result<(Vec<Example>, f32)> {
        let size = self.sizes[row as usize];
        let mut bytes = vec![0; 4 * size.words() as usize];
        read_at(&self.file, &mut bytes, HEADER as u64 + 4 * self.starts[row as usize])
            .map_err(|error| Error::io("read tokenized data from", &self.path, &error))?;
        let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let weight = words.last().filter(|_| size.tokens & HAS_WEIGHT != 0).map_or(1.0, |&word| f32::from_bits(word));
        let (first, rest) = words.split_at(size.len());
        let whole = || {
            let place = size.inner_words() as usize;
            words.get(place).filter(|_| size.tokens & HAS_TARGET != 0).map(|&word| word as i32)
        };
        if size.tokens & HAS_LABELS != 0 {
            let labels = rest.iter().take(size.len()).map(|&word| word as i32).chain(whole()).collect();
            return Ok((vec![Example { input_ids: first.to_vec(), labels }], weight));
        }
        let several = size.tokens & HAS_SEVERAL != 0;
        let flags = if several { NO_LABEL | EXAMPLE_START } else { NO_LABEL };
        let label = |&word: &u32| if word & NO_LABEL == 0 { (word & !flags) as i32 } else { IGNORE };
        let example = |words: &[u32]| Example {
            input_ids: words.iter().map(|word| word & !flags).collect(),
            labels: words.iter().map(label).chain(whole()).collect(),
        };
        let examples = first.chunk_by(|_, word| !several || word & EXAMPLE_START == 0).map(example).collect();
        Ok((examples, weight))
    }

    /// The label of a classification or regression row; `None` for any other row.
    ///
    /// # Errors
    /// Those of [`TokenSet::read`].
    pub fn target(&self, row: u32) -> Result<Option<i32>> {
        let size = self.sizes[row as usize];
        if size.tokens & HAS_TARGET == 0 {
            return Ok(None);
        }
        let mut bytes = [0; 4];
        read_at(&self.file, &mut bytes, HEADER as u64 + 4 * (self.starts[row as usize] + size.inner_words()))
            .map_err(|error| Error::io("read tokenized data from", &self.path, &error))?;
        Ok(Some(i32::from_le_bytes(bytes)))
    }
}

/// Where each row starts, and the number of all words.
fn starts(sizes: &[Size], references: &[RowReferences]) -> (Vec<u64>, u64) {
    let (mut next, mut references) = (0, references.iter().peekable());
    let starts = sizes.iter().zip(0..).map(|(size, row)| {
        let here = next;
        let beside = references.next_if(|(of, _)| *of == row).map_or(0, |&(_, words)| u64::from(words));
        next += size.words() + beside;
        here
    });
    (starts.collect(), next)
}

fn hash_rest(key: &blake3::Hash, counts: &[u8], lengths: &[u8], content: &blake3::Hash) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for part in [&MAGIC[..], key.as_bytes(), counts, lengths, content.as_bytes()] {
        hasher.update(part);
    }
    hasher.finalize()
}

/// Fills `bytes` from offset `at` of the file, without moving its position.
fn read_at(file: &File, bytes: &mut [u8], at: u64) -> std::io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, bytes, at);
    #[cfg(windows)]
    {
        use std::os::windows::fs::FileExt as _;
        let mut done = 0;
        while done < bytes.len() {
            match file.seek_read(&mut bytes[done..], at + done as u64)? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                read => done += read,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::slice::from_ref;

    use super::*;

    #[test]
    fn rows_come_back_as_they_were_whatever_their_labels() {
        let rows = [
            Example { input_ids: vec![1, 2, 3], labels: vec![IGNORE, 2, 3] },
            Example { input_ids: vec![7, 8], labels: vec![9, IGNORE] },
            Example { input_ids: vec![NO_LABEL | 5, 6], labels: vec![IGNORE, 6] },
            Example { input_ids: vec![5, 6], labels: vec![IGNORE, IGNORE, 3] },
            Example { input_ids: vec![5], labels: vec![8, (-0.5f32).to_bits() as i32] },
        ];
        let weights = [1.0, 0.5, 0.0, 1.0, 2.0];
        let folder = tempfile::tempdir().unwrap();
        let mut writer = TokenWriter::temporary(folder.path()).unwrap();
        for (row, weight) in rows.iter().zip(weights) {
            writer.push(Some((from_ref(row), weight))).unwrap();
            writer.push(None).unwrap();
        }
        let set = writer.finish(&Counts::default()).unwrap();
        assert_eq!(set.usable().collect::<Vec<_>>(), [0, 2, 4, 6, 8]);
        let targets: Vec<_> = set.usable().map(|row| set.target(row).unwrap()).collect();
        assert_eq!(targets, [None, None, None, Some(3), Some((-0.5f32).to_bits() as i32)]);
        for (row, (expected, weight)) in rows.iter().zip(weights).enumerate() {
            assert_eq!(set.read(2 * row as u32).unwrap(), (vec![expected.clone()], weight));
            assert_eq!(set.length(2 * row as u32), expected.input_ids.len());
            assert_eq!(set.label_tokens(2 * row as u32), expected.label_tokens());
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "a scratch file has no name");
    }

    #[test]
    fn a_row_of_several_examples_comes_back_as_them() {
        let example = |ids: [u32; 2]| Example { input_ids: ids.to_vec(), labels: vec![IGNORE, ids[1] as i32] };
        let row = [example([1, 2]), example([1, 3]), example([1, 4])];
        let folder = tempfile::tempdir().unwrap();
        let mut writer = TokenWriter::temporary(folder.path()).unwrap();
        writer.push(Some((&row[..1], 1.0))).unwrap();
        writer.push(Some((&row, 0.5))).unwrap();
        let mut counts = Counts::default();
        counts.turns.longest = 2;
        let set = writer.finish(&counts).unwrap();
        assert_eq!(set.read(0).unwrap(), (row[..1].to_vec(), 1.0));
        assert_eq!(set.read(1).unwrap(), (row.to_vec(), 0.5));
        assert_eq!((set.length(1), set.longest(1), set.label_tokens(1)), (6, 2, 3));
        assert_eq!((set.has_several(0), set.has_several(1)), (false, true));
    }

    #[test]
    fn references_stay_with_their_row() {
        let row = |id: u32| Example { input_ids: vec![id, id + 1], labels: vec![IGNORE, id as i32 + 1] };
        let folder = tempfile::tempdir().unwrap();
        let key = blake3::hash(b"key");
        let target = path(folder.path(), &key);
        let mut writer = TokenWriter::cached(&target, &key).unwrap();
        let references =
            [vec![], vec!["net".to_owned(), "\u{fffd} \"n\u{e9}t\"\n".to_owned()], vec![], vec![String::new()], vec![]];
        for (number, texts) in (0..).zip(&references) {
            writer.compare_with(texts);
            writer.push(Some((from_ref(&row(10 * number)), 0.5))).unwrap();
            writer.push(None).unwrap();
        }
        let written = writer.finish(&Counts::default()).unwrap();
        let (opened, _) = TokenSet::open(&target, &key).unwrap();
        for set in [written, opened] {
            for (number, texts) in (0..).zip(&references) {
                assert_eq!(set.read(2 * number).unwrap(), (vec![row(10 * number)], 0.5));
                assert_eq!(set.references(2 * number).unwrap(), *texts);
                assert!(set.references(2 * number + 1).unwrap().is_empty());
            }
        }
    }

    #[test]
    fn a_file_that_is_not_finished_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let key = blake3::hash(b"key");
        drop(TokenWriter::cached(&path(folder.path(), &key), &key).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
