//! Writes tokenized rows in the layout of the parent module.
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use super::{
    EXAMPLE_START, HAS_LABELS, HAS_SEVERAL, HAS_TARGET, HAS_WEIGHT, MAGIC, NO_LABEL, PIECE, RowPictures, RowReferences,
    Size, TokenSet, hash_rest, starts,
};
use crate::batch::{Example, IGNORE};
use crate::pictures::Shown;
use crate::report::Counts;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::atomic::AtomicFile;
use tunesmith_base::files::temporary;

/// Writes a set row by row. If it is dropped before [`Self::finish`], the file is removed.
pub struct TokenWriter {
    file: BufWriter<File>,
    path: PathBuf,
    key: blake3::Hash,
    /// The unfinished cache file; `None` for a temporary file, which has no name.
    unfinished: Option<AtomicFile<'static>>,
    hasher: blake3::Hasher,
    sizes: Vec<Size>,
    record: Vec<u8>,
    pictures: Vec<RowPictures>,
    references: Vec<RowReferences>,
    /// JSON of the references of the row that is pushed next.
    next_references: Vec<u8>,
}

impl TokenWriter {
    /// Starts the cache file `target` of a key.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn cached(target: &Path, key: &blake3::Hash) -> std::io::Result<Self> {
        if let Some(dir) = target.parent() {
            fs::create_dir_all(dir)?;
            temporary::sweep_folder(dir);
        }
        let unfinished = AtomicFile::create(target)?;
        Self::begin(unfinished.file().try_clone()?, target.to_owned(), *key, Some(unfinished))
    }

    /// Starts a temporary file in `dir`, which lasts as long as its set.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn temporary(dir: &Path) -> std::io::Result<Self> {
        let path = dir.join("tunesmith-tokens");
        Self::begin(temporary::unnamed(&path)?, path, blake3::Hash::from_bytes([0; 32]), None)
    }

    fn begin(
        file: File,
        path: PathBuf,
        key: blake3::Hash,
        unfinished: Option<AtomicFile<'static>>,
    ) -> std::io::Result<Self> {
        let mut writer = Self {
            file: BufWriter::with_capacity(PIECE, file),
            path,
            key,
            unfinished,
            hasher: blake3::Hasher::new(),
            sizes: Vec::new(),
            record: Vec::new(),
            pictures: Vec::new(),
            references: Vec::new(),
            next_references: Vec::new(),
        };
        writer.file.write_all(MAGIC)?;
        writer.file.write_all(key.as_bytes())?;
        Ok(writer)
    }

    /// Appends the examples of a row with the factor of its loss; `None` for a row that is left out. With several
    /// examples, each label must be its token or [`IGNORE`].
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the file cannot be written. [`tunesmith_base::Kind::Data`]: more than 4 billion
    /// rows, or 260 million tokens in a row.
    pub fn push(&mut self, row: Option<(&[Example], f32)>) -> Result<()> {
        let references = std::mem::take(&mut self.next_references);
        let Some((examples, weight)) = row else {
            self.sizes.push(Size::default());
            return Ok(());
        };
        let tokens: usize = examples.iter().map(|example| example.input_ids.len()).sum();
        if self.sizes.len() >= u32::MAX as usize || tokens >= HAS_SEVERAL as usize {
            return Err(Error::data("more than 4 billion rows, or 260 million tokens in a row")
                .hint("split the set, or set data.max_rows"));
        }
        self.record.clear();
        let mut flags = 0;
        if let [Example { input_ids, labels }] = examples {
            let plain = |(&id, &label): (&u32, &i32)| id < NO_LABEL && (label == IGNORE || label as u32 == id);
            let (labels, whole) = labels.split_at(labels.len().min(input_ids.len()));
            if input_ids.iter().zip(labels).all(plain) {
                self.record
                    .extend(input_ids.iter().zip(labels).flat_map(|(&id, &label)| word(id, label).to_le_bytes()));
            } else {
                flags |= HAS_LABELS;
                self.record.extend(input_ids.iter().flat_map(|id| id.to_le_bytes()));
                self.record.extend(labels.iter().flat_map(|label| label.to_le_bytes()));
            }
            self.record.extend(whole.iter().flat_map(|label| label.to_le_bytes()));
            flags |= if whole.is_empty() { 0 } else { HAS_TARGET };
        } else {
            flags |= HAS_SEVERAL;
            for Example { input_ids, labels } in examples {
                if input_ids.iter().any(|&id| id >= EXAMPLE_START) {
                    return Err(Error::data(format!(
                        "a token id is {EXAMPLE_START} or larger in a row of several renderings"
                    )));
                }
                let words = input_ids.iter().zip(labels).map(|(&id, &label)| word(id, label)).enumerate();
                let marked = words.map(|(index, word)| if index == 0 { word | EXAMPLE_START } else { word });
                self.record.extend(marked.flat_map(u32::to_le_bytes));
            }
        }
        if weight != 1.0 {
            flags |= HAS_WEIGHT;
            self.record.extend(weight.to_le_bytes());
        }
        if !references.is_empty() {
            self.references.push((self.sizes.len() as u32, (references.len() / 4) as u32));
            self.record.extend(references);
        }
        let label_tokens = examples.iter().map(Example::label_tokens).sum::<usize>() as u32;
        self.sizes.push(Size { tokens: tokens as u32 | flags, label_tokens });
        self.hasher.update(&self.record);
        self.file.write_all(&self.record).map_err(|error| self.failed(&error))
    }

    /// The pictures of the row that is pushed next, by its examples.
    pub fn show(&mut self, pictures: Vec<Vec<Shown>>) {
        if pictures.iter().any(|of_example| !of_example.is_empty()) {
            self.pictures.push((self.sizes.len() as u32, pictures));
        }
    }

    /// The texts with which a generation for the row that is pushed next is compared; empty if it has only its own answer.
    pub fn compare_with(&mut self, references: &[String]) {
        if !references.is_empty() {
            let mut json = serde_json::to_vec(references).expect("texts are JSON");
            json.resize(json.len().next_multiple_of(4), b' ');
            self.next_references = json;
        }
    }

    fn failed(&self, error: &std::io::Error) -> Error {
        Error::io("write tokenized data to", &self.path, error)
            .hint("it takes about 4 bytes a token; free some space, or set data.cache_dir")
    }

    /// Completes the file. `counts` are stored in it.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the file cannot be written.
    pub fn finish(mut self, counts: &Counts) -> Result<TokenSet> {
        let sizes = std::mem::take(&mut self.sizes);
        let pictures = std::mem::take(&mut self.pictures);
        let references = std::mem::take(&mut self.references);
        let (starts, words) = starts(&sizes, &references);
        let written = (|| {
            let mut numbers = Vec::with_capacity(PIECE);
            for piece in sizes.chunks(PIECE / 8) {
                numbers.clear();
                numbers.extend(
                    piece
                        .iter()
                        .flat_map(|size| (u64::from(size.tokens) | u64::from(size.label_tokens) << 32).to_le_bytes()),
                );
                self.hasher.update(&numbers);
                self.file.write_all(&numbers)?;
            }
            let content = self.hasher.finalize();
            let json = if pictures.is_empty() && references.is_empty() {
                serde_json::to_vec(counts)?
            } else {
                serde_json::to_vec(&(counts, &pictures, &references))?
            };
            let lengths: Vec<u8> =
                [words, sizes.len() as u64, json.len() as u64].iter().flat_map(|length| length.to_le_bytes()).collect();
            let whole = hash_rest(&self.key, &json, &lengths, &content);
            for part in [&json[..], &lengths, content.as_bytes(), whole.as_bytes()] {
                self.file.write_all(part)?;
            }
            self.file.flush()?;
            let file = self.file.get_ref().try_clone()?;
            if let Some(unfinished) = self.unfinished.take() {
                unfinished.commit_without_sync()?; // after a loss of power, the hash reveals a damaged file
            }
            Ok((file, content))
        })();
        let (file, content) = written.map_err(|error| self.failed(&error))?;
        let longest_of_several = counts.turns.longest as usize;
        Ok(TokenSet { file, path: self.path.clone(), starts, sizes, content, longest_of_several, pictures, references })
    }
}

/// A token id, with [`NO_LABEL`] if it has no label.
const fn word(id: u32, label: i32) -> u32 {
    if label == IGNORE { id | NO_LABEL } else { id }
}
