//! Shared by `infer` and `chat`: options that choose the model, the loaded model, and the tokens of prompts.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};

use super::args::{ConfigArgs, check_model_folder};
use super::download::Downloads;
use super::generation_flags::GenerationFlags;
use super::provenance;
use super::terminal::print_note;
use super::trained::{Trained, open_base};
use crate::checkpoint::loaded_adapter::LoadedAdapter;
use crate::checkpoint::peft;
use crate::config::arch::Vocabulary;
use crate::config::vision::has_encoder;
use crate::config::{Config, Flag, Mode, Quantization, Source, is_hub_name};
use crate::data::batch::{Example, ImageRows};
use crate::data::row::{Conversation, Row};
use crate::data::{ChatPictures, ChatTemplate, Pictures, ReasoningForm, Shown, Tokenizer, before_caption, is_link};
use crate::error::{Error, Result};
use crate::eval::{Answer, AnswerDecoder, Settings, SplitAnswer};
use crate::export::merge::{Parts, idle, set_adapter};
use crate::files;
use crate::hub::{self, Part};
use crate::model::{Model, device, quantize};
use crate::train::vision::{Seer, Sight, names_encoder, of_result};
use crate::words::count;

/// Which model answers, and how.
#[derive(Debug, Clone, clap::Args)]
pub struct AskArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Use this base or merged model: a folder, or OWNER/NAME on the hub (default: the configuration's `model.name`)
    #[arg(long, value_name = "DIR|NAME")]
    model: Option<String>,
    /// Use this adapter or checkpoint: a folder, or OWNER/NAME on the hub (default: the result of the configuration's run)
    #[arg(long, visible_alias = "checkpoint", value_name = "DIR|NAME", conflicts_with = "base")]
    adapter: Option<PathBuf>,
    /// Use the configuration's base model, not the result of its run
    #[arg(long)]
    pub base: bool,
    /// Accept an adapter that was trained on another base model: `--allow base_model`
    #[arg(long, value_name = "FIELD")]
    allow: Vec<String>,
    /// Begin with this system message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Continue prompts as plain text, without a chat template
    #[arg(long, conflicts_with = "system")]
    pub raw: bool,
    #[command(flatten)]
    reasoning: ReasoningArgs,
    #[command(flatten)]
    generation: GenerationFlags,
}

/// The usual variables of templates that know reasoning.
#[derive(Debug, Clone, clap::Args)]
struct ReasoningArgs {
    /// Let the model reason before it answers: `enable_thinking: true` in `data.chat_template_kwargs`
    #[arg(long, conflicts_with = "raw")]
    thinking: bool,
    /// Answer without reasoning: `enable_thinking: false` in `data.chat_template_kwargs`
    #[arg(long, conflicts_with_all = ["raw", "thinking"])]
    no_thinking: bool,
    /// Set how much the model reasons (gpt-oss: low, medium, high): `reasoning_effort` in `data.chat_template_kwargs`
    #[arg(long, value_name = "LEVEL", conflicts_with = "raw")]
    reasoning_effort: Option<String>,
}

/// The tokens of a prompt, and its images.
#[derive(Debug, Default)]
pub struct Prompt {
    pub ids: Vec<u32>,
    pub images: Vec<ImageRows>,
}

/// A loaded model with its tokenizer, chat template and settings.
pub struct ModelSession {
    pub model: Model,
    pub config: Config,
    /// The model's path or name, for messages.
    pub what: String,
    pub tokenizer: Tokenizer,
    /// Its chat template; `None` with `--raw`, or if it has none.
    pub template: Option<ChatTemplate>,
    /// How this template writes reasoning; `None` if answers have none.
    pub reasoning: Option<ReasoningForm>,
    /// Tokens that end an answer.
    pub stop_ids: Vec<u32>,
    /// Reads images; `None` if the model has no image encoder.
    pub pictures: Option<Arc<dyn Pictures>>,
    /// The values to switch between base and adapter with; `None` without an adapter.
    values: Option<BothValues>,
}

/// The values of the trainable tensors, for the base model alone and with the adapter.
struct BothValues {
    base: Vec<f32>,
    tuned: Vec<f32>,
}

/// Whether a session loads the model's image encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadEncoder {
    /// If images are given, the settings ask for it, the adapter was trained with it, or the model is a pair of both.
    IfNeeded,
    /// As well if the model has one that can be opened: images may come later.
    IfPossible,
    /// Always: there are images.
    Needed,
}

impl AskArgs {
    /// Opens the model, with its image encoder as `encoder` says. Images of web addresses are fetched before the model is loaded.
    ///
    /// # Errors
    /// [`crate::Kind::Config`]: no model is named; those of reading it, and of [`Pictures::keep`].
    pub fn open(&self, encoder: LoadEncoder, images: &[String]) -> Result<ModelSession> {
        self.open_beside(encoder, images, None)
    }

    /// As [`AskArgs::open`], for the rows of the file `rows`: names of their images are relative to its folder, unless `data.image_dir` is set.
    ///
    /// # Errors
    /// As there.
    pub fn open_beside(&self, encoder: LoadEncoder, images: &[String], rows: Option<&Path>) -> Result<ModelSession> {
        let encoder = if images.is_empty() { encoder } else { LoadEncoder::Needed };
        provenance::check_allowed(&self.allow)?;
        let mut flags = self.generation.flags()?;
        if let Some(model) = &self.model {
            check_model_folder("--model", model)?;
            flags.push(Flag { name: "--model", key: "model.name", value: model.clone() });
        }
        let (resolved, from_file) = self.config.load_optional(&flags).map_err(GenerationFlags::explained)?;
        let no_length = *resolved.source("model.max_seq_len") == Source::Default;
        let mut config = resolved.config;
        if self.model.is_some() {
            config.model.local_dir = None;
        }
        if let Some(folder) = rows.and_then(Path::parent) {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            config.data.image_dir.get_or_insert_with(|| folder.to_owned());
        }
        if encoder == LoadEncoder::Needed && config.vision.load == Some(false) {
            return Err(Error::config("vision.load: false, and images are given").hint("remove one of them"));
        }
        let kwargs = &mut config.data.chat_template_kwargs.0;
        let ReasoningArgs { thinking, no_thinking, reasoning_effort } = &self.reasoning;
        if *thinking || *no_thinking {
            kwargs.insert("enable_thinking".to_owned(), (*thinking).into());
        }
        if let Some(level) = reasoning_effort {
            kwargs.insert("reasoning_effort".to_owned(), level.as_str().into());
        }
        if config.model.name.is_none() && config.model.local_dir.is_none() {
            return Err(
                Error::config("no model is named").hint("give --model DIR, a configuration file, or model.name=…")
            );
        }
        let downloads = Downloads::default();
        let trained = self.trained(&config, from_file, &downloads)?;
        let model_dir = match &trained {
            Some(Trained::Model(dir)) => dir.clone(),
            _ => hub::model_dir(&config.model, Part::Whole, &downloads)?.dir,
        };
        let (mut what, mut tokenizer_dir) = (model_dir.display().to_string(), model_dir.clone());
        let sight;
        let (parts, adapter) = match &trained {
            Some(Trained::Adapter(dir)) => {
                what = format!("{what} with {}", dir.display());
                if files::is_there(&dir.join("tokenizer.json")) {
                    tokenizer_dir.clone_from(dir);
                }
                let mut parts = open_base(&model_dir, &config.tuning.adapters, dir, &self.allow)?;
                let seer = Seer { dir: &model_dir, tokenizer: &tokenizer_dir, hidden_size: parts.arch.hidden_size };
                let always = sees_always(&parts) || peft::changes_encoder(dir)?;
                let found = look(&config, seer, if always { LoadEncoder::Needed } else { encoder }, &downloads)?;
                sight = found.map(|sight| sight.of_adapter(dir)).transpose()?;
                parts.arch.vision = sight.as_ref().map(|sight| Arc::clone(&sight.arch));
                let adapter = LoadedAdapter::open(dir, &parts.arch)?;
                config.tuning = adapter.config.settings(&parts.arch, &config.tuning)?;
                (parts, Some(adapter))
            }
            other => {
                // A merged or fully trained model contains the adapters below.
                let below = if other.is_some() { &[][..] } else { &config.tuning.adapters };
                let mut parts = Parts::open(&model_dir, below, &Vocabulary::default())?;
                let seer = Seer { dir: &model_dir, tokenizer: &tokenizer_dir, hidden_size: parts.arch.hidden_size };
                let encoder = if sees_always(&parts) { LoadEncoder::Needed } else { encoder };
                sight = look(&of_result(&config, &model_dir), seer, encoder, &downloads)?;
                parts.arch.vision = sight.as_ref().map(|sight| Arc::clone(&sight.arch));
                config.tuning.mode = Mode::Lora;
                config.tuning.lora = idle(&parts.arch);
                (parts, None)
            }
        };
        let Parts { arch, weights, below, .. } = parts;
        // As in training, longer texts than the context are read only where they are asked for.
        if no_length {
            config.model.max_seq_len = config.model.max_seq_len.min(arch.reach());
        }
        config.model.quantization =
            quantize::resolve(&arch, &config, Some(&weights))?.map_or(Quantization::None, quantize::How::setting);
        if let Some(sight) = &sight {
            let pictures = sight.pictures();
            images
                .iter()
                .filter(|image| is_link(image))
                .try_for_each(|image| pictures.keep(image.clone()).map(drop))?;
        }
        let mut model = Model::load_for_inference(&arch, Some(&weights), &config, &below)?;
        if let Some(chosen) = device::chosen(config.model.device, model.device()) {
            print_note(&format!("the device is {chosen}"));
        }
        let new_tokens = match &adapter {
            Some(_) if tokenizer_dir == model_dir => config.tuning.new_tokens.as_slice(),
            _ => &[],
        };
        let values = adapter.map(|adapter| {
            let base = model.params.values().read();
            set_adapter(&mut model, &adapter);
            BothValues { base, tuned: model.params.values().read() }
        });
        let tokenizer = Tokenizer::load_with(&tokenizer_dir, new_tokens)?;
        let template = if self.raw { None } else { ChatTemplate::of(&tokenizer_dir, &tokenizer, &config.data)? };
        let pictures = sight.as_ref().map(Sight::pictures);
        // A captioner gets no text, and a classifier needs no template.
        let chats = model.arch.score.is_none() && pictures.as_ref().is_none_or(|pictures| pictures.chat().is_some());
        if chats && template.is_none() && !self.raw {
            print_note("the model has no chat template: it continues the prompt as plain text, as with --raw");
        }
        let mut stop_ids = [tokenizer.stop_ids(), &arch.eos_token_ids].concat();
        stop_ids.extend(template.as_ref().and_then(|template| end_of_turn(template, &tokenizer)));
        stop_ids.sort_unstable();
        stop_ids.dedup();
        let reasoning = template.as_ref().and_then(ReasoningForm::of);
        Ok(ModelSession { model, config, what, tokenizer, template, reasoning, stop_ids, pictures, values })
    }

    /// The trained model to use on top of the base or in its place; `None` for the base alone.
    fn trained(&self, config: &Config, from_file: bool, downloads: &Downloads) -> Result<Option<Trained>> {
        match &self.adapter {
            _ if self.base => Ok(None),
            Some(name) if name.to_str().is_some_and(is_hub_name) => {
                Trained::at(hub::adapter_dir(name, downloads)?).map(Some)
            }
            Some(dir) => Trained::at(dir.clone()).map(Some),
            None if from_file && self.model.is_none() => Trained::of_run(&config.train.output_dir).map(Some),
            None => Ok(None),
        }
    }
}

/// Whether the model reads an image beside each text.
fn sees_always(parts: &Parts) -> bool {
    parts.arch.reads_images_across()
}

/// The image encoder, if `encoder`, the settings, or files of its own in the model's folder ask for it.
fn look(config: &Config, seer: Seer<'_>, encoder: LoadEncoder, downloads: &Downloads) -> Result<Option<Sight>> {
    let load = config.vision.load.unwrap_or_else(|| has_encoder(seer.dir));
    let open = || Sight::open(config, seer, Part::Whole, downloads);
    if encoder == LoadEncoder::Needed || names_encoder(config) || load {
        return open().map(Some);
    }
    // A text model has none, and a model whose images are not read can still answer texts.
    Ok(if encoder == LoadEncoder::IfPossible && config.vision.load.is_none() { open().ok() } else { None })
}

/// The special token that ends the assistant's turn: the first special token after the answer, even if it begins the next
/// message.
fn end_of_turn(template: &ChatTemplate, tokenizer: &Tokenizer) -> Option<u32> {
    [false, true].into_iter().find_map(|followed| {
        let (text, end) = template.one_answer(followed)?;
        let ids = tokenizer.encode(&text[end..], false).ok()?.ids;
        ids.into_iter().find(|id| tokenizer.is_special(*id))
    })
}

fn conversation(messages: Vec<Value>) -> Conversation {
    Conversation { messages, ..Conversation::default() }
}

impl ModelSession {
    /// The settings of a generation.
    pub fn settings(&self) -> Settings {
        Settings::new(&self.config, self.model.arch.reach(), self.stop_ids.clone())
    }

    /// Whether an adapter is loaded, which can be switched off.
    pub const fn has_adapter(&self) -> bool {
        self.values.is_some()
    }

    /// Switches the adapter on or off.
    pub fn use_adapter(&mut self, on: bool) {
        if let Some(values) = &self.values {
            self.model.params.values_mut().write(if on { &values.tuned } else { &values.base });
        }
    }

    /// Decodes answers of this model.
    pub fn decoder(&self) -> AnswerDecoder<'_> {
        AnswerDecoder { tokenizer: &self.tokenizer, stop_strings: &self.config.generation.stop_strings }
    }

    /// The reasoning of an answer, which is empty if there is none, and the answer up to the first stop string.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn parts(&self, answer: &Answer) -> Result<(String, String)> {
        let split = SplitAnswer::of(self.reasoning.as_ref(), &self.tokenizer, &answer.tokens)?;
        if split.reasoning().is_empty() && self.reasoning.as_ref().is_none_or(|form| form.head.is_empty()) {
            return Ok((String::new(), self.decoder().text(answer)?));
        }
        Ok((split.reasoning().to_owned(), self.decoder().cut(split.answer())))
    }

    /// The tokens of a prompt: messages through the chat template, up to where the answer begins.
    ///
    /// # Errors
    /// [`crate::Kind::Data`]: the template refuses them, there is none, or the prompt leaves no room for an answer.
    pub fn tokens(&self, messages: Conversation) -> Result<Prompt> {
        let template = self.template.as_ref().ok_or_else(|| {
            if messages.images.is_empty() {
                return Error::data("the model has no chat template")
                    .hint("set data.chat_template: chatml, or ask with --raw");
            }
            Error::data("no chat template says where the images are").hint("leave --raw out, or set data.chat_template")
        })?;
        let most = Some(self.model.arch.reach());
        if messages.images.is_empty() {
            let text = template.render(&messages, true)?.text;
            let split = self.config.data.split_special_tokens;
            let ids = template.tokens(&self.tokenizer, &messages, &text, true, split, most)?.encoded.ids;
            return self.fits(ids, text.len());
        }
        let pictures = self.sees()?;
        let shown = ChatPictures::of(pictures, &self.tokenizer, &messages.images)?;
        let messages = shown.readable(template, messages);
        let mut rendered = template.render(&messages, true)?;
        let count = shown.expand(&mut rendered, &messages)?;
        let ids = self.tokenizer.encode_first(&rendered.text, false, most)?.ids;
        let Prompt { ids, .. } = self.fits(ids, rendered.text.len())?;
        let mut example = Example { input_ids: ids, labels: Vec::new() };
        let shown = shown.locate(&mut example, count, false)?;
        let Prompt { ids, .. } = self.fits(example.input_ids, rendered.text.len())?;
        Ok(Prompt { images: read(pictures, shown)?, ids })
    }

    fn sees(&self) -> Result<&dyn Pictures> {
        self.pictures.as_deref().ok_or_else(|| {
            Error::data("the prompt has an image, but the image encoder is not loaded").hint("add vision.load=true")
        })
    }

    /// The prompt for a captioner, which gets only an image and no text.
    fn picture(&self, name: &str) -> Result<Prompt> {
        let pictures = self.sees()?;
        let (ids, shown) = before_caption(pictures, &self.tokenizer, name.to_owned(), 0)?;
        let Prompt { ids, .. } = self.fits(ids, 0)?;
        Ok(Prompt { images: read(pictures, shown)?, ids })
    }

    /// The tokens of plain text.
    ///
    /// # Errors
    /// [`crate::Kind::Data`]: it leaves no room for an answer.
    pub fn plain(&self, text: &str) -> Result<Prompt> {
        let most = Some(self.model.arch.reach());
        self.fits(self.tokenizer.encode_first(text, true, most)?.ids, text.len())
    }

    /// Checks that a prompt leaves room for an answer. Of a text that is too long, `ids` may hold only the beginning; `bytes` is
    /// the length of the whole text.
    fn fits(&self, ids: Vec<u32>, bytes: usize) -> Result<Prompt> {
        let limit = self.model.arch.reach();
        match ids.len() {
            0 => Err(Error::data("the prompt is empty")),
            length if length < limit => Ok(Prompt { ids, images: Vec::new() }),
            length => Err(Error::data(format!(
                "the prompt of {} has {} or more, the model's context {limit}: there is no room for an answer",
                count(bytes, "byte"),
                count(length, "token")
            ))),
        }
    }

    /// The tokens of a user turn with images, after an optional system message.
    ///
    /// # Errors
    /// As [`ModelSession::tokens`].
    pub fn turn(&self, system: Option<&str>, text: &str, images: &[String]) -> Result<Prompt> {
        let captions = self.pictures.as_ref().is_some_and(|pictures| pictures.chat().is_none());
        if let (true, [first, rest @ ..]) = (captions, images) {
            if !rest.is_empty() || !text.is_empty() || system.is_some() {
                return Err(Error::config("this model writes a caption for one image, and takes no question")
                    .hint("give one --image, and no --prompt"));
            }
            return self.picture(first);
        }
        if !images.is_empty() {
            let places = images.iter().map(|_| json!({ "type": "image" }));
            let text = (!text.is_empty()).then(|| json!({ "type": "text", "text": text }));
            let asked = json!({ "role": "user", "content": places.chain(text).collect::<Vec<_>>() });
            let first = system.map(|text| json!({ "role": "system", "content": text }));
            let messages = first.into_iter().chain([asked]).collect();
            return self.tokens(Conversation { images: images.to_vec(), ..conversation(messages) });
        }
        if self.template.is_none() {
            return match system {
                None => self.plain(text),
                Some(_) => self.tokens(conversation(Vec::new())),
            };
        }
        let mut messages: Vec<Value> =
            system.map(|text| json!({"role": "system", "content": text})).into_iter().collect();
        messages.push(json!({"role": "user", "content": text}));
        self.tokens(conversation(messages))
    }

    /// The tokens of all messages so far, whose parts of type `image` stand for `images`.
    ///
    /// # Errors
    /// As [`ModelSession::tokens`].
    pub fn messages(&self, messages: &[Value], images: &[String]) -> Result<Prompt> {
        self.tokens(Conversation { images: images.to_vec(), ..conversation(messages.to_vec()) })
    }

    /// The tokens of a row's prompt. Its last answer is left out; a string is a user turn.
    ///
    /// # Errors
    /// As [`ModelSession::tokens`]; the row has no known form.
    pub fn row(&self, system: Option<&str>, row: &Value) -> Result<Prompt> {
        // The field that a row without an answer may lack: the answer to a question, or the caption of an image. A caption must
        // not be empty.
        const ANSWERS: [(&str, &str); 2] = [("answer", ""), ("caption", "?")];
        let mut fields = match row {
            Value::String(text) => return self.turn(system, text, &[]),
            Value::Object(fields) => fields.clone(),
            _ => return Err(Error::data("found neither an object nor a string")),
        };
        if let Some(messages) = fields.get("prompt").filter(|prompt| prompt.is_array()).cloned() {
            fields.clear();
            fields.insert("messages".to_owned(), messages);
        }
        // To recognize the form of a row without an answer, one is added.
        let with = |(name, answer): &(&str, &str)| {
            let mut fields = fields.clone();
            fields.insert((*name).to_owned(), (*answer).into());
            crate::data::row::Form::detect(&fields).map(|form| (form, fields))
        };
        let detected = crate::data::row::Form::detect(&fields).map(|form| (form, fields.clone()));
        let (form, fields) = detected.or_else(|| ANSWERS.iter().find_map(with)).ok_or_else(|| {
            let names: Vec<&str> = fields.keys().map(String::as_str).collect();
            let names = names.join(", ");
            Error::data(format!("found the fields [{names}], expected messages, a question, a prompt, or an image"))
        })?;
        match Row::parse(Value::Object(fields), &[form])? {
            Row::Chat(mut conversation) => {
                if conversation.messages.last().is_some_and(|message| message["role"] == "assistant") {
                    conversation.messages.pop();
                }
                let first = conversation.messages.first();
                if let Some(text) = system.filter(|_| first.is_none_or(|message| message["role"] != "system")) {
                    conversation.messages.insert(0, json!({"role": "system", "content": text}));
                }
                if self.template.is_some() {
                    return self.tokens(conversation);
                }
                match conversation.messages.as_slice() {
                    [only] if only["content"].is_string() => self.plain(only["content"].as_str().unwrap_or_default()),
                    _ => self.tokens(conversation),
                }
            }
            Row::Completion { prompt, .. } | Row::Text(prompt) => self.plain(&prompt),
            Row::Caption { image, .. } => self.turn(None, "", &[image]),
            Row::Tokens { .. } | Row::Labeled { .. } => Err(Error::data("the row is tokenized, expected text")),
        }
    }
}

/// The pictures of a prompt as the encoders read them.
fn read(pictures: &dyn Pictures, shown: Vec<Shown>) -> Result<Vec<ImageRows>> {
    let of = |Shown { file, runs }| Ok(ImageRows { runs, pixels: pictures.pixels(&file)? });
    shown.into_iter().map(of).collect()
}
