//! Turns a row into token ids and labels. Labels come from byte ranges of the text, never from a search for token ids.
//! So `pad_token = eos_token` and repeated tokens cannot confuse them.
mod captions;

use std::collections::BTreeMap;
use std::ops::Range;
use std::slice::from_ref;
use std::sync::Arc;

use super::batch::{Example, IGNORE};
use super::classification_rows::ClassifierInput;
use super::encoded::Encoded;
use super::mask;
use super::messages::Conversation;
use super::pictures::{self, Pictures, Shown};
use super::report::Notes;
use super::row::Row;
use super::template::ChatTemplate;
use super::template_coverage;
use super::tokenizer::Tokenizer;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_config::arch::TextIds;
use tunesmith_config::{LossOn, Task, Truncation, nearest};

/// The most messages of a conversation under a template without `{% generation %}`. The conversation is rendered again
/// for each answer, so the time grows with the square of the messages.
const MAX_MESSAGES: usize = 2000;

/// The settings that decide which tokens and labels a row gets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct EncodeOptions {
    /// The most tokens of an example.
    pub max_seq_len: usize,
    /// What happens to longer examples.
    pub truncation: Truncation,
    /// Which tokens carry a loss.
    pub loss_on: LossOn,
    /// All token ids must be of these.
    pub text_ids: TextIds,
    /// Rows with fewer tokens are left out.
    pub min_length: Option<usize>,
    /// Rows with more tokens before truncation are left out.
    pub max_length: Option<usize>,
    /// The most tokens in all renderings of a conversation ([`mask::render`]), as a multiple of its longest rendering.
    pub max_turn_growth: f64,
    /// Whether special tokens in messages become plain text.
    pub split_special_tokens: bool,
    /// The task, which decides what labels are.
    pub task: Task,
    /// Whether rows with a picture that cannot be read are left out (`data.bad_images: skip`).
    pub skips_bad_images: bool,
    /// The pad token of a classification or regression. Transformers takes it for padding at the end of a row, so it is
    /// removed there.
    pub padding: Option<u32>,
}

impl EncodeOptions {
    /// How many tokens from the start of a row decide its outcome; `None` if all do.
    fn most_tokens(&self) -> Option<usize> {
        let cut = matches!(self.truncation, Truncation::Right | Truncation::Drop);
        cut.then(|| self.max_seq_len.max(self.min_length.unwrap_or(0)).max(self.max_length.unwrap_or(0)))
    }
}

/// How a row was used, or why it was not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The row can be trained on.
    Kept {
        /// One example for each rendering of a conversation; one for any other row.
        examples: Vec<Example>,
        /// The pictures that each example shows.
        pictures: Vec<Vec<Shown>>,
        /// The texts with which a generation is compared ([`Conversation::references`]).
        references: Vec<String>,
        /// Whether an example was truncated, or one of several was left out as too long.
        truncated: bool,
        /// Whether `max_turn_growth` leaves out the first turns of a conversation.
        limited: bool,
    },
    /// Left out: longer than the limit with `truncation: drop`, or where a cut would go through a picture.
    TooLong,
    /// Left out: a picture cannot be read, and `data.bad_images` is `skip`.
    BadImage,
    /// Left out: shorter than `min_length`.
    BelowMinimum,
    /// Left out: longer than `max_length`.
    AboveMaximum,
    /// Left out: no token carries a loss.
    Unlabeled {
        /// Whether truncation may have cut the labels off.
        truncated: bool,
    },
}

#[derive(Debug, Default)]
struct TokenizedRow {
    /// One example for each rendering of a conversation, already truncated; one for any other row, in full.
    examples: Vec<Example>,
    /// The tokens of the longest example before truncation, which `min_length` and `max_length` compare.
    longest: usize,
    /// Whether an example was truncated, or left out as too long.
    truncated: bool,
    /// Whether `max_turn_growth` leaves out first turns.
    limited: bool,
    /// Whether an example was left out because truncation would cut a picture.
    cuts_picture: bool,
    notes: Notes,
    /// The pictures of each example; empty if none shows any.
    pictures: Vec<Vec<Shown>>,
    /// As [`Outcome::Kept::references`].
    references: Vec<String>,
}

/// Turns rows into examples. Many threads use one encoder.
#[derive(Debug)]
pub(super) struct Encoder {
    /// The model's tokenizer, with `tuning.new_tokens`.
    pub tokenizer: Tokenizer,
    /// The chat template, if there is one.
    pub template: Option<ChatTemplate>,
    /// Lengths, truncation and the task.
    pub options: EncodeOptions,
    /// The number of each class; empty unless the task is a classification.
    pub labels: BTreeMap<String, i32>,
    /// Reads the pictures of rows; `None` for a model that sees none.
    pub pictures: Option<Arc<dyn Pictures>>,
}

impl Encoder {
    /// Tokenizes, labels and truncates a row. Also returns notes for the data report.
    ///
    /// # Errors
    /// The template refuses the conversation or does not write its tool calls; there is no EOS to end plain text with;
    /// or an id is beyond the vocabulary.
    pub fn encode(&self, row: Row) -> Result<(Outcome, Notes)> {
        let target = match &row {
            Row::Labeled { label, .. } => Some(self.target(label)?),
            _ => None,
        };
        // `Split::cut` cuts texts into pieces later, when the training rows are known.
        let cut_later = self.options.truncation == Truncation::Split && matches!(row, Row::Text(_));
        let mut tokenized = match self.tokenize(row) {
            Ok(tokenized) => tokenized,
            Err(error) if pictures::is_bad_image(&error) && self.options.skips_bad_images => {
                return Ok((Outcome::BadImage, Notes::default()));
            }
            Err(error) => return Err(error),
        };
        tokenized.examples.iter().try_for_each(|example| self.check_ids(example))?;
        if tokenized.pictures.is_empty() && self.pictures.as_ref().is_some_and(|it| it.start_token().is_some()) {
            return Err(Error::data("a row without an image, and the model's decoder reads one beside each text")
                .hint("every row needs one image: {image, caption}"));
        }
        let notes = std::mem::take(&mut tokenized.notes);
        Ok((self.cut(tokenized, cut_later, target), notes))
    }

    /// What the last token of the row must predict: the number of the class, or the bits of the f32.
    fn target(&self, label: &str) -> Result<i32> {
        if self.options.task == Task::Regression {
            let number = label.trim().parse::<f32>().ok().filter(|number| number.is_finite());
            let number = number.ok_or_else(|| {
                Error::data(format!("the label is {label:?}, expected a number"))
                    .hint("labels are task: classification")
            })?;
            return Ok(number.to_bits().cast_signed());
        }
        self.labels.get(label).copied().ok_or_else(|| {
            let error =
                Error::data(format!("the label {label:?} is none of the {}", count(self.labels.len(), "label")));
            match nearest(label, self.labels.keys().map(String::as_str)) {
                Some(near) => {
                    error.hint(format!("is it {near:?}? Labels are those of the training rows, or data.labels"))
                }
                None => error.hint("labels are those of the training rows, or data.labels"),
            }
        })
    }

    fn tokenize(&self, row: Row) -> Result<TokenizedRow> {
        let loss_on_all = self.options.loss_on == LossOn::All;
        let most = self.options.most_tokens();
        let mut notes = Notes::default();
        let example = match row {
            Row::Chat(conversation) => {
                return self.conversation(expect_template(self.template.as_ref())?, conversation);
            }
            Row::Completion { prompt, completion } => {
                let text = prompt.clone() + &completion;
                let learned = if loss_on_all { 0..text.len() } else { prompt.len()..text.len() };
                let encoded = self.tokenizer.encode_first(&text, true, most)?;
                let mut written = encoded.ids.iter().zip(&encoded.offsets).filter(|(_, (start, end))| start < end);
                notes.keeps_tokens = written.any(|(id, _)| self.tokenizer.is_control(*id));
                self.with_eos(labeled(encoded, from_ref(&learned)))?
            }
            Row::Text(text) => {
                let (input_ids, added) = self.tokenizer.ids_first(&text, most)?;
                let mut written = input_ids.iter().zip(&added).filter(|(_, added)| !**added);
                notes.keeps_tokens = written.any(|(id, _)| self.tokenizer.is_control(*id));
                let label = |(&id, added)| if added { IGNORE } else { id as i32 };
                let labels = input_ids.iter().zip(added).map(label).collect();
                self.with_eos(Example { input_ids, labels })?
            }
            Row::Caption { image, captions } => return self.captions(image, captions),
            Row::Tokens { input_ids, labels } => Example { input_ids, labels },
            Row::Labeled { input, .. } => {
                let input_ids;
                (input_ids, notes) = classifier_input_ids(
                    &input,
                    &self.tokenizer,
                    self.template.as_ref(),
                    self.options.padding,
                    self.options.split_special_tokens,
                    most,
                )?;
                Example { labels: vec![IGNORE; input_ids.len()], input_ids }
            }
        };
        Ok(TokenizedRow { longest: example.input_ids.len(), examples: vec![example], notes, ..TokenizedRow::default() })
    }

    /// The renderings of a conversation, truncated. Renderings without labels are left out. So are the first ones, if
    /// all renderings have more than `max_turn_growth` times the tokens of the longest.
    fn conversation(&self, template: &ChatTemplate, conversation: Conversation) -> Result<TokenizedRow> {
        let (conversation, shown) = self.chat_pictures(template, conversation)?;
        let conversation = &conversation;
        let messages = conversation.messages.len();
        if messages > MAX_MESSAGES && !template.marks_generation() {
            return Err(Error::data(format!(
                "the conversation has {messages} messages, at most {MAX_MESSAGES} are allowed"
            ))
            .hint("split the row, or mark the assistant's text by {% generation %} in data.template_path"));
        }
        // What stands for pictures changes the text, so that the messages' own special tokens cannot be found in it.
        let split = self.options.split_special_tokens && shown.is_none();
        let mut row = TokenizedRow { references: conversation.references.to_vec(), ..TokenizedRow::default() };
        let (mut renderings, mut last) = (Vec::new(), None);
        let (mut tokens, mut longest) = (0, 0);
        let special_texts = self.tokenizer.special_texts();
        let most = self.options.most_tokens();
        mask::render_each(template, conversation, self.options.loss_on, special_texts, &mut |mut rendered, count| {
            // The template writes BOS itself, if the model wants it, so the tokenizer must not add it.
            let beginning = (count < messages).then(|| {
                let messages = conversation.messages[..count].to_vec();
                Conversation { messages, ..conversation.clone() }
            });
            let rendered_of = beginning.as_ref().unwrap_or(conversation);
            let pictures = shown.as_ref().map_or(Ok(0), |shown| shown.expand(&mut rendered, rendered_of))?;
            let found = template.tokens(&self.tokenizer, rendered_of, &rendered.text, false, split, most)?;
            row.notes.add(found.notes(split));
            let mut example = labeled(found.encoded, &rendered.spans);
            let too_long = self.is_too_long(&example);
            let pictures = match &shown {
                Some(shown) => shown.locate(&mut example, pictures, too_long)?,
                None => Vec::new(),
            };
            last.get_or_insert_with(|| rendered.text.clone());
            row.longest = row.longest.max(example.input_ids.len());
            row.truncated |= self.is_too_long(&example);
            row.cuts_picture |= self.cuts_picture(&example, &pictures);
            let Some(example) = self.kept(example, &pictures).filter(|example| example.label_tokens() > 0) else {
                return Ok(true);
            };
            tokens += example.input_ids.len();
            longest = longest.max(example.input_ids.len());
            row.limited = !renderings.is_empty() && tokens as f64 > self.options.max_turn_growth * longest as f64;
            if !row.limited {
                row.examples.push(example);
                row.pictures.extend(shown.is_some().then_some(pictures));
                renderings.push(rendered);
            }
            Ok(!row.limited)
        })?;
        row.examples.reverse();
        row.pictures.reverse();
        template_coverage::check_calls(template, conversation, &renderings)?;
        row.notes.undecided = conversation.undecided;
        row.notes.unwritten = template_coverage::unwritten(template, conversation, &last.unwrap_or_default());
        Ok(row)
    }

    fn is_too_long(&self, example: &Example) -> bool {
        example.input_ids.len() > self.options.max_seq_len
    }

    /// Whether truncation would cut through a picture, or cut one off.
    fn cuts_picture(&self, example: &Example, pictures: &[Shown]) -> bool {
        let limit = self.options.max_seq_len;
        let cuts = match self.options.truncation {
            Truncation::Left => !pictures.is_empty(),
            _ => pictures.iter().any(|shown| shown.runs.iter().any(|run| run.end > limit)),
        };
        cuts && self.is_too_long(example)
    }

    /// As [`Self::shortened`]; `None` also where that would cut a picture.
    fn kept(&self, example: Example, pictures: &[Shown]) -> Option<Example> {
        if self.cuts_picture(&example, pictures) { None } else { self.shortened(example) }
    }

    /// The truncated example; `None` if `truncation: drop` leaves it out.
    fn shortened(&self, example: Example) -> Option<Example> {
        let (length, limit) = (example.input_ids.len(), self.options.max_seq_len);
        if !self.is_too_long(&example) {
            return Some(example);
        }
        let kept = match self.options.truncation {
            Truncation::Right | Truncation::Split => 0..limit,
            Truncation::Left => length - limit..length,
            Truncation::Drop => return None,
        };
        Some(Example { input_ids: example.input_ids[kept.clone()].to_vec(), labels: example.labels[kept].to_vec() })
    }

    /// Adds EOS to plain text, with a label.
    fn with_eos(&self, mut example: Example) -> Result<Example> {
        let eos = self.tokenizer.eos_id().ok_or_else(|| {
            Error::data("plain text must end with EOS, but the tokenizer names no eos_token")
                .hint("add \"eos_token\" to tokenizer_config.json")
        })?;
        if example.input_ids.last() == Some(&eos) {
            example.labels.pop();
        } else {
            example.input_ids.push(eos);
        }
        example.labels.push(eos as i32);
        Ok(example)
    }

    fn check_ids(&self, example: &Example) -> Result<()> {
        let TextIds { vocab_size, media_ids } = self.options.text_ids;
        let labels = example.labels.iter().filter(|&&label| label != IGNORE).map(|&label| label as u32);
        let Some(id) = example.input_ids.iter().copied().chain(labels).max() else { return Ok(()) };
        let token = || self.tokenizer.token(id).map_or(String::new(), |token| format!(" ({token:?})"));
        if id as usize >= vocab_size {
            return Err(Error::data(format!(
                "vocabulary mismatch: found token id {id}{}, but the model's vocabulary has {vocab_size} entries",
                token()
            ))
            .hint("use the tokenizer that belongs to the model"));
        }
        match media_ids.filter(|&first| id as usize >= first) {
            Some(first) => Err(Error::data(format!(
                "found token id {id}{} in a text, but ids from {first} on stand for images and sounds",
                token()
            ))
            .hint("this model trains on text only: take it out of the row, or leave the row out")),
            None => Ok(()),
        }
    }

    fn cut(&self, row: TokenizedRow, cut_later: bool, target: Option<i32>) -> Outcome {
        let TokenizedRow { examples, longest, mut truncated, limited, pictures, references, cuts_picture, .. } = row;
        if self.options.min_length.is_some_and(|minimum| longest < minimum) {
            return Outcome::BelowMinimum;
        }
        if self.options.max_length.is_some_and(|maximum| longest > maximum) {
            return Outcome::AboveMaximum;
        }
        truncated |= !cut_later && examples.iter().any(|example| self.is_too_long(example));
        let mut cuts_picture = cuts_picture;
        let (mut kept, mut shown) = (Vec::new(), Vec::new());
        for (number, example) in examples.into_iter().enumerate() {
            let of_example = pictures.get(number).map_or(&[][..], Vec::as_slice);
            cuts_picture |= !cut_later && self.cuts_picture(&example, of_example);
            let example = if cut_later { Some(example) } else { self.kept(example, of_example) };
            let Some(mut example) = example else { continue };
            example.labels.extend(target);
            if example.label_tokens() > 0 {
                kept.push(example);
                shown.extend((!pictures.is_empty()).then(|| of_example.to_vec()));
            }
        }
        match kept.is_empty() {
            true if truncated && (cuts_picture || self.options.truncation == Truncation::Drop) => Outcome::TooLong,
            true => Outcome::Unlabeled { truncated },
            false => Outcome::Kept { examples: kept, pictures: shown, references, truncated, limited },
        }
    }
}

fn expect_template(template: Option<&ChatTemplate>) -> Result<&ChatTemplate> {
    template.ok_or_else(|| {
        Error::data("the row is a conversation, but the model folder has no chat template")
            .hint("set data.chat_template: chatml, or data.template_path")
    })
}

/// The token ids of a text or conversation that gets a label: a text with the tokens that the tokenizer adds, a
/// conversation through the chat template without a generation prompt.
///
/// Transformers takes `padding` tokens at the end for padding and classifies by the token before them, so they are
/// removed here. With `split_special_tokens`, special tokens in messages become plain text. With `most`, only the first `most` tokens
/// need to be right ([`Tokenizer::encode_first`]).
///
/// # Errors
/// The tokenizer or the template fails, or there are no tokens.
pub fn classifier_input_ids(
    input: &ClassifierInput,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    padding: Option<u32>,
    split_special_tokens: bool,
    most: Option<usize>,
) -> Result<(Vec<u32>, Notes)> {
    let (mut ids, notes) = match input {
        ClassifierInput::Text(text) => {
            let (ids, added) = tokenizer.ids_first(text, most)?;
            let keeps_tokens = ids.iter().zip(added).any(|(id, added)| !added && tokenizer.is_control(*id));
            (ids, Notes { keeps_tokens, ..Notes::default() })
        }
        ClassifierInput::Chat(conversation) => {
            let template = expect_template(template)?;
            let text = template.render(conversation, false)?.text;
            let tokens = template.tokens(tokenizer, conversation, &text, false, split_special_tokens, most)?;
            let notes = tokens.notes(split_special_tokens);
            (tokens.encoded.ids, notes)
        }
    };
    while ids.len() > 1 && ids.last().copied() == padding {
        ids.pop();
    }
    if ids.is_empty() {
        return Err(Error::data("the text is empty: it has no token to look at").hint("remove the row"));
    }
    Ok((ids, notes))
}

/// Labels every token from the first to the last one that overlaps a span, as Transformers does. A token across the
/// start of a span gets a label too. Spans must be in the order of the text.
pub fn labeled(encoded: Encoded, spans: &[Range<usize>]) -> Example {
    let Encoded { ids, offsets } = encoded;
    let mut labels = vec![IGNORE; ids.len()];
    let mut cursor = 0;
    // An empty span has no text, and a token across its place belongs to the text around it.
    for span in spans.iter().filter(|span| !span.is_empty()) {
        let touches = |&index: &usize| {
            let (start, end) = offsets[index];
            start < end && start < span.end && end > span.start
        };
        let beyond = |&index: &usize| offsets[index].0 >= span.end && offsets[index].1 > offsets[index].0;
        let Some(first) = (cursor..ids.len()).find(touches) else { continue };
        let past = (first..ids.len()).find(beyond).unwrap_or(ids.len());
        let last = (first..past).rev().find(touches).unwrap_or(first);
        for index in first..=last {
            labels[index] = ids[index] as i32;
        }
        cursor = last;
    }
    Example { input_ids: ids, labels }
}
