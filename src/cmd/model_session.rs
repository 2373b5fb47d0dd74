//! What `infer` and `chat` share: the options that choose the model, the opened model, and how prompts become tokens.
use std::path::PathBuf;

use serde_json::{Value, json};

use super::args::ConfigArgs;
use super::download::Downloads;
use super::provenance;
use crate::checkpoint::loaded_adapter::score_head;
use crate::checkpoint::peft;
use crate::config::arch::Vocabulary;
use crate::config::{Config, Flag, Mode, Quantization, is_hub_name};
use crate::data::row::{Conversation, Row};
use crate::data::{ChatTemplate, Tokenizer};
use crate::error::{Error, Result};
use crate::eval::Settings;
use crate::export::merge::{Parts, idle};
use crate::hub::{self, Part};
use crate::model::adapters::{self, Method};
use crate::model::{Model, quantize};
use crate::train::output;
use crate::words::count;

/// Which model is asked, and how.
#[derive(Debug, Clone, clap::Args)]
pub struct AskArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// The base model or a merged one: a folder, or owner/name of the hub (with a configuration: its `model.name`)
    #[arg(long, value_name = "DIR|NAME")]
    model: Option<String>,
    /// The adapter: a folder, owner/name, or a checkpoint (with a configuration: the result of its run)
    #[arg(long, visible_alias = "checkpoint", value_name = "DIR|NAME", conflicts_with = "base")]
    adapter: Option<PathBuf>,
    /// Ask the base model of the configuration, not what was trained
    #[arg(long)]
    pub base: bool,
    /// Accept that the adapter was trained on another base than this one, as its backend.json says (`base_model`)
    #[arg(long, value_name = "FIELD")]
    allow: Vec<String>,
    /// What the system's turn says
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Prompts are plain text to be continued, without a chat template
    #[arg(long, conflicts_with = "system")]
    pub raw: bool,
    /// The longest answer in tokens (`gen.max_new_tokens`)
    #[arg(long, value_name = "N")]
    max_new_tokens: Option<String>,
    /// Draw tokens, with this temperature; 0 takes the most probable one. --top-k, --top-p, --min-p and --seed also switch on sampling
    #[arg(long, value_name = "T")]
    temperature: Option<String>,
    /// Draw from the so many most probable tokens only (`gen.top_k`)
    #[arg(long, value_name = "K")]
    top_k: Option<String>,
    /// Draw from the most probable tokens that together have this probability (`gen.top_p`)
    #[arg(long, value_name = "P")]
    top_p: Option<String>,
    /// Draw from tokens with this share of the largest probability (`gen.min_p`)
    #[arg(long, value_name = "P")]
    min_p: Option<String>,
    /// Make tokens of the text less probable (`gen.repetition_penalty`)
    #[arg(long, value_name = "X")]
    repetition_penalty: Option<String>,
    /// Beams of a beam search (`gen.num_beams`)
    #[arg(long, value_name = "N")]
    num_beams: Option<String>,
    /// The seed of the draws (`gen.seed`)
    #[arg(long, value_name = "N")]
    seed: Option<String>,
    /// A string that ends an answer; may be given more than once (`gen.stop_strings`)
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
}

/// An opened model with all that a generation needs.
pub struct ModelSession {
    /// The model.
    pub model: Model,
    /// The configuration.
    pub config: Config,
    /// The model's path or name, for messages.
    pub what: String,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat template; `None` with `--raw`, or if it has none.
    pub template: Option<ChatTemplate>,
    /// Tokens that end an answer.
    pub stop_ids: Vec<u32>,
    /// Values of the trainable tensors, of the base and with the adapter; `None` without an adapter.
    sides: Option<[Vec<f32>; 2]>,
}

/// The trained model to use with the base or instead of it.
enum Tuned {
    Nothing,
    Adapter(PathBuf),
    Model(PathBuf),
}

impl AskArgs {
    fn flags(&self) -> Result<Vec<Flag>> {
        let mut flags = Vec::new();
        let mut flag = |name: &'static str, key: &'static str, value: &Option<String>| {
            flags.extend(value.clone().map(|value| Flag { name, key, value }));
        };
        flag("--model", "model.name", &self.model);
        flag("--max-new-tokens", "gen.max_new_tokens", &self.max_new_tokens);
        flag("--top-k", "gen.top_k", &self.top_k);
        flag("--top-p", "gen.top_p", &self.top_p);
        flag("--min-p", "gen.min_p", &self.min_p);
        flag("--repetition-penalty", "gen.repetition_penalty", &self.repetition_penalty);
        flag("--num-beams", "gen.num_beams", &self.num_beams);
        flag("--seed", "gen.seed", &self.seed);
        let zero = self.temperature.as_ref().is_some_and(|value| value.parse() == Ok(0.0));
        if !zero {
            flag("--temperature", "gen.temperature", &self.temperature);
        }
        // Whoever says how to draw wants tokens to be drawn.
        let draws = [
            ("--temperature", &self.temperature),
            ("--top-k", &self.top_k),
            ("--top-p", &self.top_p),
            ("--min-p", &self.min_p),
            ("--seed", &self.seed),
        ];
        let given: Vec<&str> = draws.iter().filter(|(_, value)| value.is_some()).map(|(name, _)| *name).collect();
        if let (true, Some(other)) = (zero, given.get(1)) {
            return Err(Error::config(format!("{other} contradicts --temperature 0, which draws nothing"))
                .hint("leave one of them out"));
        }
        if let Some((name, _)) = draws.iter().find(|(_, value)| value.is_some()) {
            flag(name, "gen.do_sample", &Some((!zero).to_string()));
        }
        if !self.stop.is_empty() {
            let stops = serde_json::to_string(&self.stop)
                .map_err(|error| Error::config("cannot be written as JSON").caused_by(error))?;
            flag("--stop", "gen.stop_strings", &Some(stops));
        }
        Ok(flags)
    }

    /// Opens the model.
    ///
    /// # Errors
    /// [`crate::Kind::Config`]: nothing says which model; those of reading it.
    pub fn open(&self) -> Result<ModelSession> {
        provenance::check_allowed(&self.allow)?;
        let (resolved, from_file) = self.config.load_optional(&self.flags()?)?;
        let mut config = resolved.config;
        if self.model.is_some() {
            config.model.local_dir = None;
        }
        if config.model.name.is_none() && config.model.local_dir.is_none() {
            return Err(Error::config("nothing says which model to ask")
                .hint("give --model DIR, a configuration file, or model.name=…"));
        }
        let downloads = Downloads::default();
        let tuned = self.tuned(&config, from_file, &downloads)?;
        let mut model_dir = hub::model_dir(&config.model, Part::Whole, &downloads)?.dir;
        if let Tuned::Model(dir) = &tuned {
            model_dir.clone_from(dir);
        }
        // A merged or fully trained model has what lies below in it.
        let below = if matches!(tuned, Tuned::Model(_)) { &[][..] } else { &config.tuning.adapters };
        let parts = if let Tuned::Adapter(dir) = &tuned {
            let parts = Parts::open(&model_dir, below, &peft::vocabulary(dir)?)?;
            provenance::check_base(&parts, dir, &self.allow)?;
            parts
        } else {
            Parts::open(&model_dir, below, &Vocabulary::default())?
        };
        let Parts { mut arch, weights, below: stack, .. } = parts;
        let mut what = model_dir.display().to_string();
        let mut files = model_dir.clone();
        let mut values = None;
        if let Tuned::Adapter(dir) = &tuned {
            let (own, tensors) = peft::open_adapter(dir, &arch)?;
            if adapters::of(&own.tuning).is_some_and(Method::takes_from_base) {
                return Err(Error::checkpoint(format!(
                    "{}: an adapter in PiSSA's form, which fits a base that it has taken something out of",
                    dir.display()
                ))
                .hint("take the run's adapter/ folder, which is plain LoRA"));
            }
            if arch.score.is_none() {
                arch.score = score_head(dir)?;
            }
            config.tuning = own.settings(&arch, &config.tuning)?;
            peft::check_tensors(dir, &tensors, &own.tensors(&arch)?)?;
            values = Some(tensors);
            what = format!("{what} with {}", dir.display());
            if dir.join("tokenizer.json").is_file() {
                files.clone_from(dir);
            }
        } else {
            config.tuning.mode = Mode::Lora;
            config.tuning.lora = idle(&arch);
        }
        config.model.quantization =
            quantize::resolve(&config, Some(&weights))?.map_or(Quantization::None, quantize::How::setting);
        let mut model = Model::load_on(&arch, Some(&weights), &config, &stack)?;
        let sides = values.map(|tensors| {
            let base = model.params.values().to_vec();
            for spec in model.params.specs.clone() {
                if let Some((_, values)) = tensors.get(&spec.name) {
                    model.params.values_mut()[spec.range()].copy_from_slice(values);
                }
            }
            [base, model.params.values().to_vec()]
        });
        let new = if files == model_dir { config.tuning.new_tokens.as_slice() } else { &[] };
        let new = if matches!(tuned, Tuned::Adapter(_)) { new } else { &[] };
        let tokenizer = Tokenizer::load_with(&files, new)?;
        let (path, built_in) = (config.data.template_path.as_deref(), config.data.chat_template);
        let template = if self.raw { None } else { ChatTemplate::find(&files, &tokenizer, path, built_in)? };
        let mut stop_ids = [tokenizer.stop_ids(), &arch.eos_token_ids].concat();
        stop_ids.extend(template.as_ref().and_then(|template| end_of_turn(template, &tokenizer)));
        stop_ids.sort_unstable();
        stop_ids.dedup();
        Ok(ModelSession { model, config, what, tokenizer, template, stop_ids, sides })
    }

    /// Finds the trained model that the options name, if any.
    fn tuned(&self, config: &Config, from_file: bool, downloads: &Downloads) -> Result<Tuned> {
        let named = match &self.adapter {
            _ if self.base => return Ok(Tuned::Nothing),
            Some(dir) => dir.clone(),
            None if from_file && self.model.is_none() => {
                let root = &config.train.output_dir;
                let results = [output::ADAPTER, output::MODEL].map(|name| root.join(name));
                let found = results.into_iter().find(|dir| dir.is_dir());
                return match found {
                    Some(dir) if dir.ends_with(output::ADAPTER) => Ok(Tuned::Adapter(dir)),
                    Some(dir) => Ok(Tuned::Model(dir)),
                    None => Err(Error::checkpoint(format!(
                        "train.output_dir = {} holds no result of a run",
                        root.display()
                    ))
                    .hint("train first, name --adapter DIR, or ask the base model with --base")),
                };
            }
            None => return Ok(Tuned::Nothing),
        };
        let is_hub = named.to_str().is_some_and(is_hub_name);
        let dir = if is_hub { hub::adapter_dir(&named, downloads)? } else { named };
        if dir.join(peft::CONFIG_FILE).is_file() {
            Ok(Tuned::Adapter(dir))
        } else if dir.join("config.json").is_file() {
            Ok(Tuned::Model(dir))
        } else {
            Err(Error::checkpoint(format!("{}: neither an adapter nor a model", dir.display()))
                .hint("a folder with adapter_config.json or config.json; a checkpoint of mode freeze holds only a part: take the run's model/"))
        }
    }
}

/// The special token that ends the assistant's turn, if the template writes one.
fn end_of_turn(template: &ChatTemplate, tokenizer: &Tokenizer) -> Option<u32> {
    const ANSWER: &str = "Certainly";
    let turns = vec![json!({"role": "user", "content": "Question"}), json!({"role": "assistant", "content": ANSWER})];
    let text = template.render(&conversation(turns), false).ok()?.text;
    let tail = &text[text.rfind(ANSWER)? + ANSWER.len()..];
    let ids = tokenizer.encode(tail, false).ok()?.ids;
    let special: Vec<u32> = tokenizer.special_texts().iter().filter_map(|text| tokenizer.id(text)).collect();
    ids.into_iter().find(|id| special.contains(id))
}

fn conversation(messages: Vec<Value>) -> Conversation {
    Conversation { messages, tools: None, first_supervised: 0, unlearned: Vec::new() }
}

impl ModelSession {
    /// The settings of a generation.
    pub fn settings(&self) -> Settings {
        Settings::new(&self.config, self.model.arch.max_position_embeddings, self.stop_ids.clone())
    }

    /// Whether the base can be compared with an adapter.
    pub const fn has_sides(&self) -> bool {
        self.sides.is_some()
    }

    /// Switches to the adapter (`tuned`) or to the base alone.
    pub fn take_side(&mut self, tuned: bool) {
        if let Some(sides) = &self.sides {
            self.model.params.values_mut().copy_from_slice(&sides[usize::from(tuned)]);
        }
    }

    /// The tokens of a prompt: messages through the chat template, up to where the answer begins.
    ///
    /// # Errors
    /// [`crate::Kind::Data`]: the template refuses them, there is none, or the prompt leaves no room for an answer.
    pub fn tokens(&self, messages: &Conversation) -> Result<Vec<u32>> {
        let template = self.template.as_ref().ok_or_else(|| {
            Error::data("the model has no chat template").hint("set data.chat_template: chatml, or ask with --raw")
        })?;
        let text = template.render(messages, true)?.text;
        let split = self.config.data.split_special_tokens;
        let most = Some(self.model.arch.max_position_embeddings);
        self.fits(template.tokens(&self.tokenizer, messages, &text, true, (split, most))?.encoded.ids, text.len())
    }

    /// The tokens of plain text.
    ///
    /// # Errors
    /// [`crate::Kind::Data`]: it leaves no room for an answer.
    pub fn plain(&self, text: &str) -> Result<Vec<u32>> {
        let most = Some(self.model.arch.max_position_embeddings);
        self.fits(self.tokenizer.encode_first(text, true, most)?.ids, text.len())
    }

    /// The ids of a prompt of `bytes`, of which there may be more if there are too many.
    fn fits(&self, ids: Vec<u32>, bytes: usize) -> Result<Vec<u32>> {
        let limit = self.model.arch.max_position_embeddings;
        match ids.len() {
            0 => Err(Error::data("the prompt is empty")),
            length if length < limit => Ok(ids),
            length => Err(Error::data(format!(
                "the prompt of {} has {} or more, the model's context {limit}: there is no room for an answer",
                count(bytes, "byte"),
                count(length, "token")
            ))),
        }
    }

    /// The tokens of what a user says, after a system's turn if there is one.
    ///
    /// # Errors
    /// As [`ModelSession::tokens`].
    pub fn turn(&self, system: Option<&str>, text: &str) -> Result<Vec<u32>> {
        if self.template.is_none() {
            return match system {
                None => self.plain(text),
                Some(_) => self.tokens(&conversation(Vec::new())),
            };
        }
        let mut messages: Vec<Value> =
            system.map(|text| json!({"role": "system", "content": text})).into_iter().collect();
        messages.push(json!({"role": "user", "content": text}));
        self.tokens(&conversation(messages))
    }

    /// The tokens of all messages so far.
    ///
    /// # Errors
    /// As [`ModelSession::tokens`].
    pub fn messages(&self, messages: &[Value]) -> Result<Vec<u32>> {
        self.tokens(&conversation(messages.to_vec()))
    }

    /// The tokens that a row of a file asks with: its last answer, if it has one, is left out. A text is what a user says.
    ///
    /// # Errors
    /// As [`ModelSession::tokens`]; the row has no known form.
    pub fn row(&self, system: Option<&str>, row: &Value) -> Result<Vec<u32>> {
        const ANSWER: &str = "answer";
        let mut fields = match row {
            Value::String(text) => return self.turn(system, text),
            Value::Object(fields) => fields.clone(),
            _ => return Err(Error::data("found neither an object nor a string")),
        };
        if let Some(messages) = fields.get("prompt").filter(|prompt| prompt.is_array()).cloned() {
            fields.clear();
            fields.insert("messages".to_owned(), messages);
        }
        // A question alone has the form of a question with an answer, less the answer.
        let detected = crate::data::row::Form::detect(&fields);
        if detected.is_none() {
            fields.insert(ANSWER.to_owned(), "".into());
        }
        let form = crate::data::row::Form::detect(&fields).ok_or_else(|| {
            let names: Vec<&str> = fields.keys().map(String::as_str).filter(|name| *name != ANSWER).collect();
            Error::data(format!("found the fields [{}], expected messages, a question or a prompt", names.join(", ")))
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
                    return self.tokens(&conversation);
                }
                match conversation.messages.as_slice() {
                    [only] if only["content"].is_string() => self.plain(only["content"].as_str().unwrap_or_default()),
                    _ => self.tokens(&conversation),
                }
            }
            Row::Completion { prompt, .. } | Row::Text(prompt) => self.plain(&prompt),
            Row::Tokens { .. } | Row::Labeled { .. } => Err(Error::data("the row is tokenized, expected text")),
        }
    }
}
