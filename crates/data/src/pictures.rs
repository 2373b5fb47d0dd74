//! The pictures of rows: where their files are, and which tokens of an example stand for them.
//!
//! The decoder reads a picture as a number of rows of its input: positions `[tokens, hidden]` whose embeddings are
//! replaced by the output of the vision encoder and its connector. Only names and positions of pictures are in memory.
//! The encoder's input (pixels) is made from a file when a batch needs it.
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::batch::{Example, IGNORE};
use super::messages::Conversation;
use super::picture_places::PicturePlaces;
use super::picture_texts::{PictureRows, gemma3, idefics3, pixtral};
use super::template::{ChatTemplate, Rendered};
use super::tokenizer::Tokenizer;
use super::web_address::Came;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_config::vision::{ChatForm, ChatImages, PIXTRAL_TOKENS};
use tunesmith_vision::Pixels;

/// Reads the pictures that rows name. One value serves all threads. [`super::PictureFiles`] reads them from files.
pub trait Pictures: Debug + Send + Sync {
    /// The name under which the picture can be read as long as the run's data is kept. `name` is what a row says: a
    /// file, a web address or a `data:` URI. The content of a `data:` URI is written to a file, and a web address is
    /// fetched.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the URI has no valid base64; [`tunesmith_base::Kind::Io`]: the file cannot be
    /// written; the errors of [`Self::fetch`].
    fn keep(&self, name: String) -> Result<String>;

    /// Whether [`Self::keep`] may have to fetch this picture from the web.
    fn is_remote(&self, _name: &str) -> bool {
        false
    }

    /// Fetches a picture from the web before [`Self::keep`] needs it, and says whether it was in the cache. `None` if
    /// there is nothing to fetch, because the name is that of a file.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`] or [`tunesmith_base::Kind::Io`], with the web address: the picture cannot be
    /// fetched.
    fn fetch(&self, _name: &str) -> Result<Option<Came>> {
        Ok(None)
    }

    /// Whether [`Self::keep`] has written the file of this picture, and the file is gone.
    fn is_lost(&self, _name: &str) -> bool {
        false
    }

    /// Size and time of the last change of a picture's file, as a text. `None` if there is no such file, or if its name is the hash of its
    /// content.
    fn file_state(&self, _name: &str) -> Option<String> {
        None
    }

    /// The name of the same picture where it stands with others in one chat. Some processors cut a picture into tiles
    /// only where it is alone, so it takes other rows there.
    fn among_others(&self, name: String) -> String {
        name
    }

    /// How many rows of the decoder's input the picture takes.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`], with the name of the file: the file cannot be read, or is not an image.
    fn rows(&self, file: &str) -> Result<PictureRows>;

    /// The input of the vision encoder for the picture: its pixels, or features that were computed before.
    ///
    /// # Errors
    /// As [`Self::rows`].
    fn pixels(&self, file: &str) -> Result<Arc<Pixels>>;

    /// Announces which pictures [`Self::pixels`] will be asked for next, in this order; a name that occurs twice will
    /// be asked for twice. They may be read in the background. A new announcement replaces the previous one.
    fn read_ahead(&self, _files: Vec<String>) {}

    /// Computes again what [`Self::pixels`] reads from a cache and finds damaged. Returns whether any of these `files`
    /// was damaged.
    ///
    /// # Errors
    /// The data cannot be computed again.
    fn mend(&self, _files: &[&str]) -> Result<bool> {
        Ok(false)
    }

    /// Sets where the rows are that show the pictures. From now on, errors about a picture also name its rows.
    fn shown_in(&self, _places: PicturePlaces) {}

    /// Checks that a picture still takes `rows` rows of the decoder's input. If it does not, its file was replaced
    /// after the rows were tokenized.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`], with the file and the row that shows it: it takes another number of rows.
    fn check_rows(&self, _file: &str, _pixels: &Pixels, _rows: usize) -> Result<()> {
        Ok(())
    }

    /// A hash of a picture's file, and the picture's size.
    ///
    /// # Errors
    /// As [`Self::rows`].
    fn look(&self, file: &str) -> Result<PictureLook>;

    /// A small PNG copy of the picture as a `data:` URI, for reports.
    ///
    /// # Errors
    /// As [`Self::rows`].
    fn thumbnail(&self, file: &str) -> Result<String>;

    /// How chats show pictures to this model; `None` if the model reads pictures only in front of captions.
    fn chat(&self) -> Option<ChatImages>;

    /// The token that begins a text, for a model whose decoder reads pictures by cross-attention: their rows are not in
    /// the text, and each text belongs to one picture. `None` if the rows of pictures are part of the text.
    fn start_token(&self) -> Option<u32> {
        None
    }

    /// What a second vision encoder adds to the decoder's input for each picture; `None` without a second encoder.
    fn world(&self) -> Option<WorldRows> {
        None
    }

    /// A text with everything that [`Self::rows`] depends on besides the files. It is part of the cache key of
    /// tokenized rows.
    fn key(&self) -> String;
}

/// What [`Pictures::look`] finds about a picture's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PictureLook {
    /// The BLAKE3 hash of the file, in hex.
    pub content: String,
    /// The width in pixels.
    pub width: u32,
    /// The height in pixels.
    pub height: u32,
}

/// What a second vision encoder adds to the decoder's input for each picture: rows between two tokens. In a chat they
/// stand after BOS, or first if the text has no BOS; in front of a caption they come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorldRows {
    /// The ids of the tokens before and after the rows.
    pub tokens: [u32; 2],
    /// Rows of the decoder's input for each picture, without the two tokens.
    pub rows: usize,
}

/// A picture of an example, and the tokens in whose place it is read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    /// The name from [`Pictures::keep`]. A control character at the end marks a variant: a picture among others, or one
    /// for the second encoder. [`Self::name`] is the name without these marks.
    pub file: String,
    /// The positions of its rows among the tokens of the example, as ascending ranges.
    pub runs: Vec<Range<usize>>,
}

/// Ends the name of a picture that is shown differently because it stands with others. No name from [`Pictures::keep`]
/// has a control character, so the mark is unambiguous.
pub(crate) const AMONG_OTHERS: char = '\0';

/// Ends the name of a picture for the second encoder.
const WORLD: char = '\u{1}';

/// The name without the mark of the second encoder, and whether it had this mark.
pub fn split_world(name: &str) -> (&str, bool) {
    name.strip_suffix(WORLD).map_or((name, false), |file| (file, true))
}

impl Shown {
    /// The picture's name from [`Pictures::keep`], without marks.
    pub fn name(&self) -> &str {
        self.file.trim_end_matches([AMONG_OTHERS, WORLD])
    }

    /// Whether these are rows of the second encoder. The rows of the first encoder for the same picture are another
    /// [`Shown`].
    pub fn is_world(&self) -> bool {
        split_world(&self.file).1
    }

    /// The name, and which encoder reads the picture, for messages.
    pub fn label(&self) -> String {
        format!("{}{}", self.name(), if self.is_world() { ", second encoder" } else { "" })
    }
}

/// The beginning of every error about a picture. [`is_bad_image`] recognizes such errors by it.
const BAD_IMAGE: &str = "image ";

/// Adds the name of the picture's file to an error.
pub(crate) fn bad_image(file: &str, error: Error) -> Error {
    error.context(format!("{BAD_IMAGE}{file}"))
}

/// Whether an error is about a picture's file. With `data.bad_images: skip`, such an error leaves out its row, and any
/// other error ends the run.
pub(crate) fn is_bad_image(error: &Error) -> bool {
    error.message().starts_with(BAD_IMAGE)
}

/// The pictures of a conversation, and the texts that stand for them in the rendered template.
#[derive(Debug)]
pub struct ChatPictures {
    files: Vec<String>,
    /// How many rows of the decoder's input each picture takes.
    rows: Vec<usize>,
    /// The text that replaces `place` for each picture: its image tokens, and what the processor of the model writes
    /// around them.
    texts: Vec<String>,
    /// What the chat template writes for a picture.
    place: String,
    token: u32,
    world: Option<WorldRows>,
    /// The id of BOS, if the tokenizer has one.
    bos: Option<u32>,
}

impl ChatPictures {
    /// Prepares the pictures that a conversation names: keeps their files and counts their rows.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: a picture cannot be read, or this model reads no pictures in chats;
    /// [`tunesmith_base::Kind::Model`]: the tokenizer lacks a token that stands for pictures.
    pub fn of(pictures: &dyn Pictures, tokenizer: &Tokenizer, names: &[String]) -> Result<Self> {
        let ChatImages { token, form } = pictures.chat().ok_or_else(|| {
            if pictures.start_token().is_some() {
                return Error::data("a chat shows an image, but this model's decoder writes captions alone")
                    .hint("write rows {image, caption}");
            }
            Error::data("a chat shows an image, but this model has no token for images")
                .hint("set vision.image_token and tuning.new_tokens: [\"<image>\"]; or write rows {image, caption}")
        })?;
        let text_of = |id: u32| text_of(tokenizer, id);
        let image = text_of(token)?;
        let place = match form {
            ChatForm::Gemma3 { begin, .. } => text_of(begin)?,
            _ => image.clone(),
        };
        if form == ChatForm::Pixtral
            && let Some(token) = PIXTRAL_TOKENS.into_iter().find(|token| tokenizer.id(token).is_none())
        {
            return Err(Error::model(format!(
                "the tokenizer has no token {token}, which stands behind a line of an image"
            ))
            .hint("config.json and tokenizer.json must belong to one model"));
        }
        let (mut files, mut rows, mut texts) = (Vec::new(), Vec::new(), Vec::new());
        for name in names {
            let file = pictures.keep(name.clone())?;
            let file = if names.len() > 1 { pictures.among_others(file) } else { file };
            let found = pictures.rows(&file)?;
            texts.push(match form {
                ChatForm::Bare | ChatForm::AnyRes => image.repeat(found.tiles.iter().sum()),
                ChatForm::Gemma3 { begin, end } => gemma3(&found, &image, [&text_of(begin)?, &text_of(end)?]),
                ChatForm::Gemma4 { begin, end } => {
                    format!("{}{}{}", text_of(begin)?, image.repeat(found.tiles.iter().sum()), text_of(end)?)
                }
                ChatForm::Idefics3 => idefics3(&found, &image),
                ChatForm::Pixtral => pixtral(&found, &image),
                ChatForm::InternVl => format!("<img>{}</img>", image.repeat(found.tiles.iter().sum())),
            });
            rows.push(found.tiles.iter().sum());
            files.push(file);
        }
        let world = pictures.world();
        world.map_or(Ok(()), |world| world.check(tokenizer))?;
        Ok(Self { files, rows, texts, place, token, world, bos: bos(tokenizer) })
    }

    /// The conversation in a form that the template can read. If the template does not write pictures from a list of
    /// parts, each list becomes one text, with the text of a place for each picture.
    pub fn readable(&self, template: &ChatTemplate, mut conversation: Conversation) -> Conversation {
        if template.shows_pictures(&self.place) {
            return conversation;
        }
        for message in &mut conversation.messages {
            if let Value::Array(parts) = &message["content"] {
                let text = |part: &Value| match part["type"].as_str() {
                    Some("image") => Some(self.place.clone()),
                    _ => part["text"].as_str().map(str::to_owned),
                };
                message["content"] = parts.iter().filter_map(text).collect::<String>().into();
            }
        }
        conversation
    }

    /// Replaces the places of pictures in a rendered text by the texts that stand for them, and moves the spans. The
    /// text was rendered from `conversation`, which may have only the first messages of the whole one. Returns how many
    /// pictures it shows.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the text has more or fewer places than the conversation has pictures.
    pub fn expand(&self, rendered: &mut Rendered, conversation: &Conversation) -> Result<usize> {
        let places: Vec<usize> = rendered.text.match_indices(&self.place).map(|(at, _)| at).collect();
        let parts = |message: &Value| match &message["content"] {
            Value::Array(parts) => parts.iter().filter(|part| part["type"] == "image").count(),
            Value::String(text) => text.matches(&self.place).count(),
            _ => 0,
        };
        let wanted: usize = conversation.messages.iter().map(parts).sum();
        if places.len() != wanted || wanted > self.texts.len() {
            return Err(Error::data(format!(
                "the text has {} for images ({:?}), the row {}",
                count(places.len(), "place"),
                self.place,
                count(wanted.min(self.texts.len()), "image")
            ))
            .hint(
                "no message may contain the token that stands for an image, and the chat template must show each one",
            ));
        }
        let mut text = String::with_capacity(rendered.text.len() + self.texts.iter().map(String::len).sum::<usize>());
        let mut from = 0;
        // The end of each place in the old text, and how much longer the new text is up to there.
        let mut grown = Vec::with_capacity(places.len());
        for (&at, picture) in places.iter().zip(&self.texts) {
            text.push_str(&rendered.text[from..at]);
            text.push_str(picture);
            from = at + self.place.len();
            grown.push((from, text.len() - from));
        }
        text.push_str(&rendered.text[from..]);
        let moved = |at: usize| {
            let before = grown.partition_point(|(end, _)| *end <= at);
            at + before.checked_sub(1).map_or(0, |last| grown[last].1)
        };
        for span in &mut rendered.spans {
            *span = moved(span.start)..moved(span.end);
        }
        rendered.text = text;
        Ok(wanted)
    }

    /// Finds the rows of the first `pictures` pictures among the tokens of an example, and sets their labels to
    /// [`IGNORE`]. With `cut`, the text was cut before it was tokenized, so rows may be missing at its end. Rows of a
    /// second encoder are inserted after BOS, or first without BOS.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the text has more image tokens than the pictures take, or fewer although it was
    /// not `cut`.
    pub fn locate(&self, example: &mut Example, pictures: usize, cut: bool) -> Result<Vec<Shown>> {
        let mut places = Vec::new();
        for (at, &id) in example.input_ids.iter().enumerate() {
            if id == self.token {
                places.push(at);
                if let Some(label) = example.labels.get_mut(at) {
                    *label = IGNORE;
                }
            }
        }
        let wanted: usize = self.rows[..pictures].iter().sum();
        if places.len() != wanted && !(cut && places.len() < wanted) {
            return Err(Error::data(format!(
                "the images have {}, the text has {} that stand for them",
                count(wanted, "embedding"),
                count(places.len(), "token")
            ))
            .hint("no message may contain the token that stands for an image"));
        }
        let mut places = places.into_iter();
        let shown = self.files.iter().zip(&self.rows).take(pictures).map(|(file, &rows)| {
            let mut runs: Vec<Range<usize>> = Vec::new();
            // Rows that were cut off get positions behind the last token.
            let own: Vec<usize> = places.by_ref().take(rows).collect();
            let missing = rows - own.len();
            for at in own {
                match runs.last_mut().filter(|run| run.end == at) {
                    Some(run) => run.end += 1,
                    None => runs.push(at..at + 1),
                }
            }
            let end = example.input_ids.len();
            runs.extend((missing > 0).then_some(end..end + missing));
            Shown { file: file.clone(), runs }
        });
        let shown = shown.collect();
        let first = usize::from(self.bos.is_some() && example.input_ids.first().copied() == self.bos);
        Ok(match self.world {
            Some(world) => world.put(example, first, shown),
            None => shown,
        })
    }
}

/// The tokens in front of a caption, and the picture's positions in them. The picture takes one position per row, each
/// with the id `placeholder`, which has no meaning. The rows of a second encoder come before them. If the decoder reads
/// pictures by cross-attention, the only token is [`Pictures::start_token`]. None of these tokens has a label.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`]: the picture cannot be read; [`tunesmith_base::Kind::Model`]: the tokenizer lacks a token.
pub fn before_caption(
    pictures: &dyn Pictures,
    tokenizer: &Tokenizer,
    image: String,
    placeholder: u32,
) -> Result<(Vec<u32>, Vec<Shown>)> {
    let file = pictures.keep(image)?;
    let rows: usize = pictures.rows(&file)?.tiles.iter().sum();
    let placeholder = pictures.start_token().unwrap_or(placeholder);
    let mut example = Example { input_ids: vec![placeholder; rows], labels: Vec::new() };
    let mut shown = vec![Shown { file, runs: std::iter::once(0..rows).collect() }];
    if let Some(world) = pictures.world() {
        world.check(tokenizer)?;
        shown = world.put(&mut example, 0, shown);
    }
    Ok((example.input_ids, shown))
}

impl WorldRows {
    /// Checks that the tokenizer has the two tokens around the rows.
    fn check(&self, tokenizer: &Tokenizer) -> Result<()> {
        self.tokens.iter().try_for_each(|&token| text_of(tokenizer, token).map(drop))
    }

    /// Inserts the rows of the second encoder for each of these pictures in front of token `first`, each between the
    /// two tokens. Moves the positions of the pictures by as much, and returns all: first those of the second encoder.
    fn put(self, example: &mut Example, first: usize, mut shown: Vec<Shown>) -> Vec<Shown> {
        let Self { tokens: [begin, end], rows } = self;
        let (mut ids, mut all) = (Vec::new(), Vec::with_capacity(2 * shown.len()));
        for picture in &shown {
            let start = first + ids.len() + 1;
            ids.extend(std::iter::once(begin).chain(std::iter::repeat_n(begin, rows)).chain([end]));
            let runs = std::iter::once(start..start + rows).collect();
            all.push(Shown { file: format!("{}{WORLD}", picture.name()), runs });
        }
        let added = ids.len();
        if !example.labels.is_empty() {
            example.labels.splice(first..first, std::iter::repeat_n(IGNORE, added));
        }
        example.input_ids.splice(first..first, ids);
        for run in shown.iter_mut().flat_map(|picture| &mut picture.runs) {
            *run = run.start + added..run.end + added;
        }
        all.append(&mut shown);
        all
    }
}

/// The text of a token that stands for pictures, or an error if the tokenizer lacks it.
fn text_of(tokenizer: &Tokenizer, id: u32) -> Result<String> {
    tokenizer.token(id).ok_or_else(|| {
        Error::model(format!("the tokenizer has no token {id}, which stands for images"))
            .hint("config.json and tokenizer.json must belong to one model")
    })
}

/// The id of BOS, if the tokenizer has one.
fn bos(tokenizer: &Tokenizer) -> Option<u32> {
    tokenizer.id(tokenizer.special_tokens().get("bos_token")?.as_str()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dataset, Silent};
    use std::fs;
    use std::path::Path;
    use std::slice::from_ref;
    use tunesmith_base::error::{Error, Kind};
    use tunesmith_config::{Config, Truncation};

    /// A picture takes as many rows as its name has letters; its pixels are the name's bytes.
    #[derive(Debug)]
    struct Named(&'static str);

    impl Pictures for Named {
        fn keep(&self, name: String) -> Result<String> {
            Ok(name)
        }

        fn rows(&self, file: &str) -> Result<PictureRows> {
            if file == "broken" {
                return Err(bad_image(file, Error::data("no image")));
            }
            Ok(PictureRows { tiles: vec![file.len()], split: None, columns: file.len() })
        }

        fn look(&self, file: &str) -> Result<PictureLook> {
            Ok(PictureLook { content: file.to_owned(), width: 1, height: file.len() as u32 })
        }

        fn thumbnail(&self, file: &str) -> Result<String> {
            Ok(format!("data:,{file}"))
        }

        fn pixels(&self, file: &str) -> Result<Arc<Pixels>> {
            Ok(Arc::new(Pixels { patches: file.bytes().map(f32::from).collect(), ..Pixels::default() }))
        }

        fn chat(&self) -> Option<ChatImages> {
            None
        }

        fn key(&self) -> String {
            self.0.to_owned()
        }
    }

    const ROWS: &str = r#"{"image": "cat", "caption": "a cat"}
{"image": "horse", "caption": ["a horse", "the brown horse"]}
"#;

    fn load(dir: &Path, rows: &str, key: &'static str, change: impl Fn(&mut Config)) -> Result<Dataset> {
        let file = dir.join("rows.jsonl");
        fs::write(&file, rows).unwrap();
        let mut config = Config::default();
        config.data.train_path = vec![file];
        config.data.cache_dir = Some(dir.to_owned());
        change(&mut config);
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/quickstart/model");
        crate::load(&config, &model, (1 << 20).into(), &Silent, Some(&(Arc::new(Named(key)) as Arc<dyn Pictures>)))
    }

    #[test]
    fn each_caption_stands_behind_the_rows_of_its_picture_and_batches_carry_them() {
        let dir = tempfile::tempdir().unwrap();
        let data = load(dir.path(), ROWS, "", |_| ()).unwrap();
        let eos = data.tokenizer.eos_id().unwrap();
        let ids = |text: &str| [data.tokenizer.encode(text, false).unwrap().ids, vec![eos]].concat();
        let captions = [ids("a cat"), ids("a horse"), ids("the brown horse")];
        let batch = data.train.batch([0, 1]).unwrap();
        let mut first = 0;
        for ((rows, name), (number, caption)) in
            [(3, "cat"), (5, "horse"), (5, "horse")].into_iter().zip(captions.iter().enumerate())
        {
            let image = &batch.images[number];
            assert_eq!(image.runs, from_ref(&(first..first + rows)));
            assert_eq!(image.pixels.patches, name.bytes().map(f32::from).collect::<Vec<_>>());
            assert_eq!(batch.tokens[first + rows..first + rows + caption.len()], caption[..], "no BOS, and EOS");
            // The last of the picture's rows predicts the first token.
            let unlabelled = vec![IGNORE; rows - 1].into_iter();
            let expected = unlabelled.chain(caption.iter().map(|&id| id as i32)).chain([IGNORE]);
            let end = first + rows + caption.len();
            assert_eq!(batch.targets[first..end], expected.collect::<Vec<_>>()[..]);
            assert_eq!(batch.cu_seqlens[number..number + 2], [first, end]);
            first = end;
        }
        assert_eq!(batch.tokens.len(), first, "rows of images count as tokens");
        assert_eq!(data.train.lengths(), [3 + captions[0].len(), 10 + captions[1].len() + captions[2].len()]);
        assert_eq!(data.train.longest_sequence(), 5 + captions[2].len());
        let (prompt, answer) = data.question(&data.train, 0).unwrap().unwrap();
        assert_eq!((prompt.len(), &answer), (3, &captions[0]), "an image is a question");
    }

    #[test]
    fn the_cache_keeps_pictures_and_a_run_knows_them_apart() {
        let dir = tempfile::tempdir().unwrap();
        let [new, kept, other] = ["a", "a", "b"].map(|key| load(dir.path(), ROWS, key, |_| ()).unwrap());
        assert_eq!([&new, &kept, &other].map(|data| data.report.from_cache), [false, true, false]);
        assert_eq!(kept.train.batch([0, 1]).unwrap(), new.train.batch([0, 1]).unwrap());
        assert_eq!(kept.fingerprint, new.fingerprint);
        let renamed = load(dir.path(), &ROWS.replace("\"cat\"", "\"dog\""), "a", |_| ()).unwrap();
        assert_ne!(renamed.fingerprint, new.fingerprint, "another image with as many rows");
    }

    #[test]
    fn a_picture_is_never_cut_and_a_broken_one_is_refused_with_its_row() {
        let dir = tempfile::tempdir().unwrap();
        let long = format!("{ROWS}{}", r#"{"image": "hippopotamuses", "caption": "it is too long to be seen here"}"#);
        for (truncation, left_out) in [(Truncation::Right, 0), (Truncation::Left, 1), (Truncation::Drop, 1)] {
            let cut = |config: &mut Config| (config.model.max_seq_len, config.data.truncation) = (16, truncation);
            let data = load(dir.path(), &long, "", cut).unwrap();
            assert_eq!((data.report.train.too_long, data.train.len() as u64), (left_out, 3 - left_out), "{truncation}");
            let batch = data.train.batch(0..data.train.len()).unwrap();
            assert!(batch.images.iter().all(|image| image.rows() == image.pixels.patches.len()));
            assert!(batch.cu_seqlens.windows(2).all(|ends| ends[1] - ends[0] <= 16));
        }
        let error = load(dir.path(), r#"{"image": "broken", "caption": "x"}"#, "", |_| ()).unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        assert!(error.message().contains("rows.jsonl:1") && error.message().contains("broken"), "{error}");
    }
}
