//! The examples of a split (training, validation, test) as row numbers in token sets. Only these numbers are shuffled,
//! split, mixed and repeated; tokens stay on disk.
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::slice::from_ref;
use std::sync::Arc;

use rayon::prelude::*;

use super::batch::{Batch, Example, IGNORE, ImageRows};
use super::pictures::{Pictures, Shown};
use super::report::Counts;
use super::rng::shuffle;
use super::sampler::Step;
use super::tokenizer::Tokenizer;
use super::tokens::{TokenSet, TokenWriter};
use tunesmith_base::error::{Error, Result};
use tunesmith_vision::Pixels;

/// A row of a token set, or a piece of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowId {
    /// The index of the set.
    pub set: u32,
    /// The index of the row in the set, where rows that were left out count too.
    pub row: u32,
    /// The piece of the row ([`Split::cut`]); 0 for a whole row.
    pub piece: u32,
}

/// The examples of a split (training, validation or test), each by its place in the token sets.
#[derive(Debug, Clone, Default)]
pub struct Split {
    pub(super) sets: Vec<Arc<TokenSet>>,
    pub(super) rows: Vec<RowId>,
    /// The loss weight of each class; `None` if all are 1.
    pub(super) class_weights: Option<Arc<[f32]>>,
    /// The tokens per piece; `None` if rows are not cut.
    pub(super) piece_tokens: Option<usize>,
    /// Reads the pictures of rows; `None` without pictures.
    pub(super) pictures: Option<Arc<dyn Pictures>>,
}

/// The prompt and the answer of an example: the tokens before the last run of labels, and that run.
fn prompt_and_answer(example: Example) -> (Vec<u32>, Vec<u32>) {
    let Example { input_ids, mut labels } = example;
    // The label of a classification or regression is not an answer.
    labels.truncate(input_ids.len());
    let end = labels.iter().rposition(|&label| label != IGNORE).map_or(0, |last| last + 1);
    let start = labels[..end].iter().rposition(|&label| label == IGNORE).map_or(0, |last| last + 1);
    (input_ids[..start].to_vec(), input_ids[start..end].to_vec())
}

impl Split {
    /// Stores examples that are not from files, in an unnamed temporary file.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the folder for temporary files cannot be written.
    pub fn from_examples<'a>(examples: impl IntoIterator<Item = &'a Example>) -> Result<Self> {
        let dir = std::env::temp_dir();
        let mut writer =
            TokenWriter::temporary(&dir).map_err(|error| Error::io("write tokenized data to", &dir, &error))?;
        for example in examples {
            writer.push(Some((from_ref(example), 1.0)))?;
        }
        Ok(Self::of(vec![Arc::new(writer.finish(&Counts::default())?)]))
    }

    /// All usable rows of the sets, set after set.
    pub(super) fn of(sets: Vec<Arc<TokenSet>>) -> Self {
        let rows = sets
            .iter()
            .zip(0..)
            .flat_map(|(set, number)| set.usable().map(move |row| RowId { set: number, row, piece: 0 }));
        Self { rows: rows.collect(), sets, class_weights: None, piece_tokens: None, pictures: None }
    }

    /// The number of examples. A row that is cut has several.
    pub const fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are no examples.
    pub const fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    fn at(&self, index: usize) -> (&TokenSet, u32) {
        let RowId { set, row, .. } = self.rows[index];
        (&self.sets[set as usize], row)
    }

    /// Cuts rows with more than `most` tokens into pieces, each an example of its own. Returns how many rows were cut,
    /// and the number of their pieces.
    pub fn cut(&mut self, most: usize) -> (usize, usize) {
        let (mut rows, mut cut, mut pieces) = (Vec::with_capacity(self.len()), 0, 0);
        for (index, &id) in self.rows.iter().enumerate() {
            let (set, row) = self.at(index);
            let count = if set.has_several(row) { 1 } else { self.length(index).div_ceil(most) };
            rows.extend((0..count as u32).map(|piece| RowId { piece, ..id }));
            if count > 1 {
                (cut, pieces) = (cut + 1, pieces + count);
            }
        }
        (self.rows, self.piece_tokens) = (rows, Some(most));
        (cut, pieces)
    }

    /// The range of its row's tokens that an example has: the whole row, or one piece of it.
    fn window(&self, index: usize) -> Range<usize> {
        let ((set, row), piece) = (self.at(index), self.rows[index].piece);
        let length = set.length(row);
        let cut = self.piece_tokens.filter(|most| length > *most && !set.has_several(row));
        let Some(most) = cut else { return 0..length };
        let (begin, end) = (piece as usize * most, (piece as usize + 1) * most);
        // A single last token would have nothing to predict it, so this piece also gets the last token of the piece
        // before.
        let alone = length % most == 1;
        (begin - usize::from(alone && begin + 1 == length))..(end - usize::from(alone && end + 1 == length)).min(length)
    }

    /// The number of tokens of an example, in all renderings of a conversation.
    pub fn length(&self, index: usize) -> usize {
        self.window(index).len()
    }

    /// An upper bound on the tokens of a sequence: an example, or one rendering of a conversation.
    pub fn longest_sequence(&self) -> usize {
        let longest = |index| {
            let (set, row) = self.at(index);
            self.length(index).min(set.longest(row))
        };
        (0..self.len()).map(longest).max().unwrap_or(0)
    }

    /// Reads the sequences of an example, and the factor of its loss. There is one sequence, or one per rendering if
    /// the template rewrites earlier turns ([`super::mask::render`]).
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the tokens cannot be read from disk.
    pub fn sequences(&self, index: usize) -> Result<(Vec<Example>, f32)> {
        let (set, row) = self.at(index);
        let (mut examples, weight) = set.read(row)?;
        let window = self.window(index);
        if let [Example { input_ids, labels }] = examples.as_mut_slice()
            && window.len() < input_ids.len()
        {
            (*input_ids, *labels) = (input_ids[window.clone()].to_vec(), labels[window].to_vec());
        }
        Ok((examples, weight))
    }

    /// The length of each example in tokens.
    pub fn lengths(&self) -> Vec<usize> {
        (0..self.len()).map(|index| self.length(index)).collect()
    }

    /// The number of tokens of all examples.
    pub fn tokens(&self) -> usize {
        (0..self.len()).map(|index| self.length(index)).sum()
    }

    /// The number of tokens that carry a loss.
    pub fn label_tokens(&self) -> usize {
        let count = |index: usize| {
            let (set, row) = self.at(index);
            let (length, labelled, here) = (set.length(row), set.label_tokens(row), self.length(index));
            if here == length {
                return labelled;
            }
            // Only plain text is cut. All of it carries a loss, except the tokens that the tokenizer adds at the start,
            // and the first token of a piece.
            let before = if self.rows[index].piece == 0 { length - 1 - labelled } else { 0 };
            here.saturating_sub(1 + before)
        };
        (0..self.len()).map(count).sum()
    }

    /// Reads an example. Of a conversation with several renderings it reads the last one, which has the last turn.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the tokens cannot be read from disk.
    pub fn example(&self, index: usize) -> Result<Example> {
        Ok(self.sequences(index)?.0.pop().unwrap_or_default())
    }

    /// The UTF-8 bytes of the text of all labels, for bits per byte. The first token of an example has no label.
    ///
    /// # Errors
    /// Those of [`Self::example`]; the tokenizer's decoder fails.
    pub fn label_bytes(&self, tokenizer: &Tokenizer) -> Result<u64> {
        (0..self.len()).into_par_iter().map(|index| self.label_bytes_of(index, tokenizer)).sum()
    }

    /// The UTF-8 bytes of the text of one example's labels.
    ///
    /// # Errors
    /// Those of [`Self::label_bytes`].
    pub fn label_bytes_of(&self, index: usize, tokenizer: &Tokenizer) -> Result<u64> {
        let bytes = |example: &Example| Ok(tokenizer.decode(&example.predicted(), true)?.len() as u64);
        self.sequences(index)?.0.iter().map(bytes).sum()
    }

    /// The prompt and the answer of an example: the tokens before its last run of labels, and that run.
    ///
    /// # Errors
    /// As [`Self::example`].
    pub fn prompt(&self, index: usize) -> Result<(Vec<u32>, Vec<u32>)> {
        self.example(index).map(prompt_and_answer)
    }

    /// The texts with which a generation is compared: a row's references, such as several people's answers; all captions
    /// of a picture, that of [`Self::prompt`] first; or the one answer of any other row.
    ///
    /// # Errors
    /// Those of [`Self::example`]; the tokenizer's decoder fails.
    pub fn references(&self, index: usize, tokenizer: &Tokenizer) -> Result<Vec<String>> {
        let (set, row) = self.at(index);
        let references = set.references(row)?;
        if !references.is_empty() {
            return Ok(references);
        }
        let examples = self.sequences(index)?.0.into_iter().rev();
        let mut parts = examples.map(prompt_and_answer);
        let Some((prompt, answer)) = parts.next() else { return Ok(Vec::new()) };
        let shows = self.shows(index);
        // Other renderings of a conversation have other prompts, so only captions share one.
        let others = parts.filter(|(other, _)| shows && *other == prompt).map(|(_, answer)| answer);
        std::iter::once(answer).chain(others).map(|ids| tokenizer.decode(&ids, true)).collect()
    }

    /// The label of a classification or regression example: a class, or the bits of an f32.
    ///
    /// # Errors
    /// As [`Self::example`].
    pub fn target(&self, index: usize) -> Result<Option<i32>> {
        let (set, row) = self.at(index);
        set.target(row)
    }

    /// As [`Self::target`], with the factor of the example's loss.
    ///
    /// # Errors
    /// As [`Self::example`].
    pub fn labelled(&self, index: usize) -> Result<Option<(i32, f32)>> {
        let batch = self.batch([index])?;
        let end = batch.tokens.len().saturating_sub(1);
        Ok(batch.targets.last().copied().filter(|&target| target != IGNORE).map(|target| (target, batch.weight(end))))
    }

    /// Whether an example shows a picture.
    pub fn shows(&self, index: usize) -> bool {
        let (set, row) = self.at(index);
        !set.pictures(row).is_empty()
    }

    /// The names of the pictures that an example shows, as [`Pictures::keep`] gave them. Of several renderings, the
    /// last one counts.
    pub fn picture_files(&self, index: usize) -> Vec<&str> {
        let (set, row) = self.at(index);
        let shown = set.pictures(row).last().into_iter().flatten();
        shown.filter(|shown| !shown.is_world()).map(Shown::name).collect()
    }

    /// The pictures of an example's sequences.
    pub fn pictures(&self, index: usize) -> &[Vec<Shown>] {
        let (set, row) = self.at(index);
        set.pictures(row)
    }

    /// How many pictures all sequences show, and how many tokens these take.
    pub fn picture_tokens(&self) -> (usize, usize) {
        let shown = (0..self.len()).flat_map(|index| self.pictures(index)).flatten();
        shown.fold((0, 0), |(count, tokens), shown| {
            (count + usize::from(!shown.is_world()), tokens + shown.runs.iter().map(Range::len).sum::<usize>())
        })
    }

    /// Small copies of the pictures of an example's first sequence, as `data:` URIs.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: a picture cannot be read.
    pub fn thumbnails(&self, index: usize) -> Result<Vec<String>> {
        let Some(pictures) = &self.pictures else { return Ok(Vec::new()) };
        let shown = self.pictures(index).first().into_iter().flatten().filter(|shown| !shown.is_world());
        shown.map(|shown| pictures.thumbnail(&shown.file)).collect()
    }

    /// Whether any row of the token sets shows a picture, including rows that are not in this split.
    pub fn has_pictures(&self) -> bool {
        self.sets.iter().any(|set| !set.all_pictures().is_empty())
    }

    /// Reads the pictures of examples, on all threads. Returns them for each example and each of its sequences; their
    /// positions count from the first token of the sequence. Damaged features are computed again.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: a picture cannot be read.
    pub fn images(&self, indices: &[usize]) -> Result<Vec<Vec<Vec<ImageRows>>>> {
        let Some(pictures) = &self.pictures else { return Ok(vec![Vec::new(); indices.len()]) };
        let of = |&index: &usize| {
            let (set, row) = self.at(index);
            let mut read: BTreeMap<&str, Arc<Pixels>> = BTreeMap::new();
            let mut images = Vec::new();
            for shown in set.pictures(row) {
                let mut of_sequence = Vec::with_capacity(shown.len());
                for Shown { file, runs } in shown {
                    let pixels = match read.get(file.as_str()) {
                        Some(pixels) => Arc::clone(pixels),
                        None => pictures.pixels(file)?,
                    };
                    pictures.check_rows(file, &pixels, runs.iter().map(Range::len).sum())?;
                    read.insert(file, Arc::clone(&pixels));
                    of_sequence.push(ImageRows { runs: runs.clone(), pixels });
                }
                images.push(of_sequence);
            }
            Ok(images)
        };
        // `of` must not use parallel iterators itself: a thread that waits there could be one that others wait for.
        let read = || -> Result<Vec<Vec<Vec<ImageRows>>>> { indices.par_iter().map(of).collect() };
        read().or_else(|error| {
            let shown = indices.iter().flat_map(|&index| self.pictures(index)).flatten();
            let files: BTreeSet<&str> = shown.map(|shown| shown.file.as_str()).collect();
            if pictures.mend(&files.into_iter().collect::<Vec<_>>())? { read() } else { Err(error) }
        })
    }

    /// Announces the examples whose pictures [`Self::images`] will be asked for next, so that they are read in the
    /// background.
    pub fn read_ahead(&self, indices: &[usize]) {
        let Some(pictures) = &self.pictures else { return };
        let of = |&index: &usize| {
            let files: BTreeSet<&str> =
                self.pictures(index).iter().flatten().map(|shown| shown.file.as_str()).collect();
            files.into_iter().map(str::to_owned)
        };
        let files: Vec<String> = indices.iter().flat_map(of).collect();
        if !files.is_empty() {
            pictures.read_ahead(files);
        }
    }

    /// The pictures in the prompts of examples ([`Self::prompt`]): those whose rows are all in the prompt.
    ///
    /// # Errors
    /// As [`Self::images`].
    pub fn prompt_images(&self, indices: &[usize]) -> Result<Vec<Vec<ImageRows>>> {
        let images = self.images(indices)?;
        let prompts = indices.iter().zip(images).map(|(&index, mut images)| {
            let mut shown = images.pop().unwrap_or_default();
            if !shown.is_empty() {
                let tokens = self.prompt(index)?.0.len();
                shown.retain(|image| image.runs.iter().all(|run| run.end <= tokens));
            }
            Ok(shown)
        });
        prompts.collect()
    }

    /// Reads examples into one batch.
    ///
    /// # Errors
    /// As [`Self::example`].
    pub fn batch(&self, indices: impl IntoIterator<Item = usize>) -> Result<Batch> {
        let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
        let indices: Vec<usize> = indices.into_iter().collect();
        let images = self.images(&indices)?;
        for (index, images) in indices.into_iter().zip(images) {
            let (examples, weight) = self.sequences(index)?;
            for (number, example) in examples.iter().enumerate() {
                self.push(&mut batch, example, weight, images.get(number).map_or(&[], Vec::as_slice));
            }
        }
        Ok(batch)
    }

    /// Appends a sequence and its pictures to a batch. `weight` is the factor of its row's loss; the class weight
    /// multiplies it.
    pub fn push(&self, batch: &mut Batch, example: &Example, weight: f32, images: &[ImageRows]) {
        let first = batch.tokens.len();
        batch.images.extend(images.iter().map(|image| image.moved(first)));
        batch.push(&example.input_ids, &example.labels);
        let class = example.labels.get(example.input_ids.len()).map_or(0, |&class| class as usize);
        let of_class = self.class_weights.as_ref().and_then(|weights| weights.get(class));
        batch.weigh_last(weight * of_class.unwrap_or(&1.0));
    }

    /// Reads the micro-batches of a step, and sets [`Batch::first_row`] in each.
    ///
    /// # Errors
    /// As [`Self::example`].
    pub fn batches(&self, step: &Step) -> Result<Vec<Batch>> {
        let mut first_row = 0;
        let batch = |micro_batch: &Vec<Vec<usize>>| {
            let mut batch = self.batch(micro_batch.iter().flatten().copied())?;
            batch.first_row = first_row;
            first_row += batch.tokens.len() as u64;
            Ok(batch)
        };
        step.iter().map(batch).collect()
    }

    /// Moves a random share of the examples to a new split. Both parts keep their order. At least one example moves.
    #[must_use]
    pub fn take_share(&mut self, share: f64, seed: u64) -> Self {
        const STREAM: u64 = u64::MAX - 1;
        let count = ((self.len() as f64 * share).round() as usize).max(1).min(self.len());
        let mut order: Vec<u32> = (0..self.len() as u32).collect();
        shuffle(&mut order, seed, STREAM);
        self.take(order[..count].iter().copied())
    }

    /// As [`Self::take_share`], but with the same share of each class (stratified). Fractions go to the classes with
    /// the largest remainders. At least one row of a class stays.
    ///
    /// # Errors
    /// As [`Self::example`].
    pub fn take_share_of_each(&mut self, share: f64, seed: u64, classes: usize) -> Result<Self> {
        const STREAM: u64 = u64::MAX - 1;
        let mut of_class: Vec<Vec<u32>> = vec![Vec::new(); classes];
        let mut order: Vec<u32> = (0..self.len() as u32).collect();
        shuffle(&mut order, seed, STREAM);
        for index in order {
            if let Some(rows) = self.target(index as usize)?.and_then(|class| of_class.get_mut(class as usize)) {
                rows.push(index);
            }
        }
        let count = ((self.len() as f64 * share).round() as usize).max(1);
        let exact: Vec<f64> = of_class.iter().map(|rows| rows.len() as f64 * share).collect();
        let most = |class: usize| of_class[class].len().saturating_sub(1);
        let mut counts: Vec<usize> = (0..classes).map(|class| (exact[class] as usize).min(most(class))).collect();
        let mut by_rest: Vec<usize> = (0..classes).collect();
        by_rest.sort_by(|&one, &other| exact[other].fract().total_cmp(&exact[one].fract()).then(one.cmp(&other)));
        let mut missing = count.saturating_sub(counts.iter().sum());
        for class in by_rest {
            if missing > 0 && counts[class] < most(class) {
                counts[class] += 1;
                missing -= 1;
            }
        }
        let taken: Vec<u32> =
            of_class.iter().zip(counts).flat_map(|(rows, count)| rows[..count].iter().copied()).collect();
        Ok(self.take(taken))
    }

    /// Moves examples to a new split. Both parts keep their order.
    fn take(&mut self, indices: impl IntoIterator<Item = u32>) -> Self {
        let mut moves = vec![false; self.len()];
        indices.into_iter().for_each(|index| moves[index as usize] = true);
        let mut moves = moves.into_iter();
        let taken = self.rows.extract_if(.., |_| moves.next() == Some(true)).collect();
        Self {
            sets: self.sets.clone(),
            rows: taken,
            class_weights: None,
            piece_tokens: self.piece_tokens,
            pictures: self.pictures.clone(),
        }
    }

    /// Hashes the content of the sets, and which rows are in this split.
    pub(super) fn hash_into(&self, hasher: &mut blake3::Hasher) {
        hasher.update(&(self.sets.len() as u64).to_le_bytes());
        for set in &self.sets {
            hasher.update(set.content().as_bytes());
            for (row, pictures) in set.all_pictures() {
                hasher.update(format!("{row} {pictures:?}").as_bytes());
            }
        }
        hasher.update(&(self.len() as u64).to_le_bytes());
        for piece in self.rows.chunks(1 << 14) {
            let bytes = piece.iter().flat_map(|id| (u64::from(id.set) << 32 | u64::from(id.row)).to_le_bytes());
            hasher.update(&bytes.collect::<Vec<u8>>());
            if self.piece_tokens.is_some() {
                hasher.update(&piece.iter().flat_map(|id| id.piece.to_le_bytes()).collect::<Vec<u8>>());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_rows_become_pieces_in_which_every_token_stands_once() {
        for (length, pieces) in
            [(3, vec![3]), (4, vec![4]), (5, vec![3, 2]), (8, vec![4, 4]), (9, vec![4, 3, 2]), (10, vec![4, 4, 2])]
        {
            let ids: Vec<u32> = (0..length).collect();
            // The first token is one that a tokenizer adds, such as BOS.
            let labels = ids.iter().map(|&id| if id == 0 { IGNORE } else { id as i32 }).collect();
            let example = Example { input_ids: ids.clone(), labels };
            let mut split = Split::from_examples([&example]).unwrap();
            let whole = split.label_tokens();
            let cut = split.cut(4);
            assert_eq!(split.lengths(), pieces, "{length} tokens");
            assert_eq!(cut, if pieces.len() > 1 { (1, pieces.len()) } else { (0, 0) });
            let read: Vec<Example> = (0..split.len()).map(|index| split.example(index).unwrap()).collect();
            assert_eq!(read.iter().flat_map(|piece| piece.input_ids.clone()).collect::<Vec<_>>(), ids);
            assert_eq!(split.label_tokens(), read.iter().map(Example::label_tokens).sum::<usize>());
            assert_eq!(split.label_tokens(), whole + 1 - pieces.len(), "a piece's first token has nothing before it");
            assert_eq!(split.batch(0..split.len()).unwrap().label_tokens(), split.label_tokens());
        }
    }
}
