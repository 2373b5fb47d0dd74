//! The flags of `merge` and `export` that name a base model and adapters, and how these are opened.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::args::{ConfigArgs, check_model_folder};
use super::download::Downloads;
use super::numbers::{number, whole};
use super::provenance::{self, Checked, Texts};
use super::terminal::print_note;
use crate::checkpoint::loaded_adapter::{LoadedAdapter, score_head};
use crate::checkpoint::peft;
use crate::checkpoint::stamp_check;
use crate::config::arch::{Arch, Vocabulary};
use crate::config::vision::{VisionArch, has_encoder};
use crate::config::{Config, DeviceChoice, Mode, ModelConfig, Range};
use crate::data::{ChatTemplate, Tokenizer};
use crate::device::{Device, gpu};
use crate::error::{Error, Result};
use crate::export::blend::{self, BlendMethod, BlendRecipe};
use crate::export::merge::Parts;
use crate::files;
use crate::hub::{self, Part};
use crate::memory::human_bytes;
use crate::model::device;
use crate::model::quantize::Held;
use crate::train::output;
use crate::train::vision::{self, Seer};

/// Flags for a base model, adapters merged into it, and the adapter on top (or several to blend).
#[derive(Debug, Clone, clap::Args)]
pub struct PartsArgs {
    /// Use this base model: a folder, or OWNER/NAME on the hub (default: the configuration's)
    #[arg(long, value_name = "DIR|NAME")]
    pub base: Option<String>,
    /// Use this adapter: a folder, or OWNER/NAME on the hub (default: the configuration's run). Several are blended by --weights
    #[arg(long, value_name = "DIR|NAME")]
    pub adapter: Vec<PathBuf>,
    /// Merge this adapter into the base first (`tuning.adapters` of the training); may be given more than once, the lowest first
    #[arg(long, value_name = "DIR")]
    pub below: Vec<PathBuf>,
    /// Weight several adapters, such as 0.7,0.3 (default: 1 each)
    #[arg(long, value_name = "W,…", value_delimiter = ',', allow_hyphen_values = true, value_parser = number(Range::ANY))]
    pub weights: Vec<f64>,
    /// Blend several adapters as PEFT's `add_weighted_adapter` does; `cat` is exactly the sum of their updates
    #[arg(long, value_name = "cat|linear|ties|dare_linear|dare_ties|magnitude_prune", default_value = "cat")]
    pub combine: String,
    /// Keep this share of values with `ties`, `dare_*` and `magnitude_prune` (default: 0.5)
    #[arg(long, value_name = "SHARE", value_parser = number(Range { above: Some(0.0), max: Some(1.0), ..Range::ANY }))]
    pub density: Option<f64>,
    /// Seed the random choice of `dare_*` (default: 42)
    #[arg(long, value_name = "SEED", value_parser = whole::<u64>(Range::at_least(0.0)))]
    pub seed: Option<u64>,
    /// Accept that this field of the adapter's backend.json differs; `quantization` and `dtype` take the base as it is stored,
    /// whatever its form in training. May be given more than once
    #[arg(long, value_name = "FIELD")]
    pub allow: Vec<String>,
}

pub struct Opened {
    /// The base and the adapters below.
    pub parts: Parts,
    /// The adapter on top, or the blend; `None` for the base alone.
    pub top: Option<LoadedAdapter>,
    /// The folder with the tokenizer: the adapter's if it has one.
    pub tokenizer: PathBuf,
    /// The chat template that the configuration names.
    pub template: Option<String>,
    /// The configuration, if one was given.
    pub config: Option<Config>,
    /// The quantization of the base in the adapter's run.
    pub held: Option<Held>,
    /// Folders that are still read while the result is written.
    pub reads: Vec<PathBuf>,
}

impl Opened {
    /// A name for the result: that of the run's folder, the adapter's, or the base's.
    pub fn name(&self) -> String {
        let of = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let dir = match (&self.config, &self.top) {
            (Some(config), _) => config.train.output_dir.clone(),
            (None, Some(top)) => top.dir.clone(),
            (None, None) => self.parts.base.clone(),
        };
        of(&dir).or_else(|| of(&dir.canonicalize().ok()?)).unwrap_or_else(|| "model".to_owned())
    }
}

/// Chooses the device on which a merge is compared with its adapter: the one that the configuration names if the model fits
/// there in float32, else the CPU.
///
/// # Errors
/// [`crate::Kind::Device`]: a GPU was asked for, and it or a library is not there.
fn device_of_check(choice: DeviceChoice, parts: &Parts) -> Result<DeviceChoice> {
    let device = device::device(choice)?;
    let weights = parts.arch.tensors().iter().map(|spec| 4 * spec.len() as u64).sum::<u64>();
    // The activations of the few rows need little memory.
    let (needed, usable) = (weights + weights / 10 + gpu::WORKSPACE as u64, device::usable(device));
    if device != Device::Cpu && usable.is_some_and(|usable| usable < needed) {
        print_note(&format!(
            "the merge is checked on the CPU: in float32 the model takes {}, and {} has room for {}",
            human_bytes(needed),
            device::describe(device),
            human_bytes(usable.unwrap_or(0))
        ));
        return Ok(DeviceChoice::Cpu);
    }
    if let Some(chosen) = device::chosen(choice, device) {
        print_note(&format!("the merge is checked on {chosen}"));
    }
    Ok(choice)
}

impl PartsArgs {
    /// Opens the base and the adapters. A configuration in `words` supplies what the flags leave open. If `whole`, a run without
    /// an adapter supplies its model as the base.
    ///
    /// # Errors
    /// [`crate::Kind::Config`]: nothing names the base; those of reading it all.
    pub fn open(&self, words: &ConfigArgs, whole: bool) -> Result<Opened> {
        stamp_check::check_allowed(&self.allow, &stamp_check::MAY_DIFFER)?;
        self.check_blend()?;
        let with_config = !words.words.is_empty() || std::env::var_os("CONFIG").is_some_and(|file| !file.is_empty());
        let config = if with_config { Some(words.load_partial()?.config) } else { None };
        let trained = config
            .as_ref()
            .filter(|config| matches!(config.tuning.mode, Mode::Full | Mode::Freeze) && self.adapter.is_empty())
            .map(|config| config.train.output_dir.join(output::MODEL))
            .filter(|dir| whole && dir.is_dir() && self.base.is_none());
        let adapters = if trained.is_some() { Vec::new() } else { self.adapters(config.as_ref())? };
        let downloads = Downloads::default();
        let base = match (&self.base, &config) {
            _ if trained.is_some() => trained.clone().unwrap_or_default(),
            (Some(name), _) => {
                check_model_folder("--base", name)?;
                let model = if Path::new(name).is_dir() {
                    ModelConfig { local_dir: Some(name.into()), ..ModelConfig::default() }
                } else {
                    ModelConfig { name: Some(name.clone()), ..ModelConfig::default() }
                };
                hub::model_dir(&model, Part::Whole, &downloads)?.dir
            }
            (None, Some(config)) => hub::model_dir(&config.model, Part::Whole, &downloads)?.dir,
            (None, None) => {
                let error = Error::config("no base model is named: give --base DIR or a configuration");
                let recorded = adapters.first().and_then(|dir| peft::load_adapter(dir).ok()?.0.base_model_name_or_path);
                return Err(match recorded {
                    Some(name) => error.hint(format!("the adapter was trained on {name}: --base {name}")),
                    None => error.hint("the adapter does not say what it was trained on"),
                });
            }
        };
        let below = match &config {
            Some(_) if trained.is_some() => &Vec::new(),
            Some(config) if self.below.is_empty() => &config.tuning.adapters,
            _ => &self.below,
        };
        let adapters: Vec<PathBuf> =
            adapters.iter().map(|dir| hub::adapter_dir(dir, &downloads)).collect::<Result<_>>()?;
        let mut vocabularies: Vec<Vocabulary> =
            adapters.iter().map(|dir| peft::vocabulary(dir)).collect::<Result<_>>()?;
        let vocabulary = match vocabularies.as_mut_slice() {
            [one] => std::mem::take(one),
            // The blend refuses adapters that change the vocabulary.
            several => {
                let apart = several.iter().flat_map(|one| one.apart.clone()).collect();
                Vocabulary { apart, ..Vocabulary::default() }
            }
        };
        let mut reads = [&adapters[..], below].concat();
        let mut parts = Parts::open(&base, below, &vocabulary)?;
        if let Some(config) = config.as_ref().filter(|_| !adapters.is_empty()) {
            parts.device = device_of_check(config.model.device, &parts)?;
        }
        if let [one] = adapters.as_slice() {
            let named = config.as_ref().filter(|config| vision::names_encoder(config));
            let hidden_size = parts.arch.hidden_size;
            let vision = match named {
                Some(config) => {
                    let tokenizer = if files::is_there(&one.join("tokenizer.json")) { one } else { &base };
                    let seer = Seer { dir: &base, tokenizer, hidden_size };
                    let first = match config.vision.encoder {
                        Some(_) => vision::of_pair(config, seer, &downloads)?,
                        None => VisionArch::of_model(&base, hidden_size)?,
                    };
                    Some(vision::with_world(config, seer, first)?)
                }
                None if peft::changes_encoder(one)? || has_encoder(&base) => {
                    Some(VisionArch::of_model(&base, hidden_size)?)
                }
                None => None,
            };
            if let Some(vision) = vision {
                let training = peft::vision_training(one, &vision)?;
                parts.arch.vision = Some(Arc::new(VisionArch { training, ..vision }));
            }
        } else if adapters.is_empty() && has_encoder(&base) {
            parts.arch.vision = Some(Arc::new(VisionArch::of_model(&base, parts.arch.hidden_size)?));
        }
        if parts.arch.reads_images_across() && parts.arch.vision.is_none() {
            parts.arch.vision = Some(Arc::new(VisionArch::of_model(&base, parts.arch.hidden_size)?));
        }
        if let ([one], None) = (adapters.as_slice(), &parts.arch.score) {
            parts.arch.score = score_head(one)?;
        }
        let tokenizer =
            adapters.first().filter(|dir| files::is_there(&dir.join("tokenizer.json"))).unwrap_or(&parts.base).clone();
        let template = match &config {
            Some(config) if config.data.template_path.is_some() || config.data.chat_template.is_some() => {
                let (path, built_in) = (config.data.template_path.as_deref(), config.data.chat_template);
                let own = Tokenizer::load_with(&tokenizer, &[])?;
                ChatTemplate::find(&tokenizer, &own, path, built_in)?.map(|template| template.source().to_owned())
            }
            _ => None,
        };
        let texts = Texts::of(&tokenizer, template.as_deref())?;
        let Checked { adapters: mut opened, held, rounded_but } =
            provenance::check(&parts, &adapters, config.as_ref(), &texts, &self.allow)?;
        if let Some(wide) = rounded_but {
            parts.round(held.as_ref(), &wide)?;
            print_note(
                "the base's matrices are rounded to bfloat16, as in training, before the adapter is merged \
                 (--allow dtype takes the base as it is stored)",
            );
        }
        if let Some(held) = &held
            && parts.hold(held)? > 0
        {
            print_note(&format!(
                "the base's matrices are quantized to {} and dequantized, as in training, before the adapter is merged \
                 (--allow quantization takes the base as it is stored)",
                held.in_words()
            ));
        }
        let blends = !self.weights.is_empty() || self.combine != "cat";
        if opened.len() < 2 && blends {
            return Err(Error::config("--weights and --combine blend several adapters, but at most one is named")
                .hint("give each with --adapter, or leave them out"));
        }
        let top = if opened.len() > 1 { Some(self.blend(&opened, &parts.arch)?) } else { opened.pop() };
        reads.extend([parts.base.clone(), tokenizer.clone()]);
        Ok(Opened { parts, top, tokenizer, template, config, held, reads })
    }

    fn adapters(&self, config: Option<&Config>) -> Result<Vec<PathBuf>> {
        match config {
            Some(config) if self.adapter.is_empty() => {
                let dir = config.train.output_dir.join(output::ADAPTER);
                if matches!(config.tuning.mode, Mode::Full | Mode::Freeze) {
                    let model = config.train.output_dir.join(output::MODEL);
                    return Err(Error::config(format!("tuning.mode: {} has no adapter to merge", config.tuning.mode))
                        .hint(format!("its result is already a model: {}", model.display())));
                }
                if !dir.is_dir() {
                    return Err(Error::checkpoint(format!("{}: no such folder", dir.display()))
                        .hint("train first, or name an adapter: --adapter DIR"));
                }
                Ok(vec![dir])
            }
            _ => Ok(self.adapter.clone()),
        }
    }

    /// Refuses flags of a blend that could give no useful result, and flags that would have no effect.
    ///
    /// # Errors
    /// [`crate::Kind::Config`], naming the flag.
    fn check_blend(&self) -> Result<()> {
        let combine = self.combine.as_str();
        if self.density.is_some() && ["cat", "linear"].contains(&combine) {
            let error =
                Error::config(format!("--density has no effect with --combine {combine}, which keeps all values"));
            return Err(
                error.hint("choose ties, dare_linear, dare_ties or magnitude_prune with --combine, or leave it out")
            );
        }
        if self.seed.is_some() && ["cat", "linear", "ties", "magnitude_prune"].contains(&combine) {
            let error = Error::config(format!("--seed has no effect with --combine {combine}, which draws nothing"));
            return Err(error.hint("choose dare_linear or dare_ties with --combine, or leave it out"));
        }
        Ok(())
    }

    fn blend(&self, adapters: &[LoadedAdapter], arch: &Arch) -> Result<LoadedAdapter> {
        let method = match self.combine.as_str() {
            "cat" => BlendMethod::Cat,
            "linear" => BlendMethod::Linear,
            "ties" => BlendMethod::Ties,
            "dare_linear" => BlendMethod::DareLinear,
            "dare_ties" => BlendMethod::DareTies,
            "magnitude_prune" => BlendMethod::MagnitudePrune,
            other => {
                return Err(Error::config(format!(
                    "--combine {other}: expected cat, linear, ties, dare_linear, dare_ties or magnitude_prune"
                )));
            }
        };
        let weights = if self.weights.is_empty() { vec![1.0; adapters.len()] } else { self.weights.clone() };
        let recipe =
            BlendRecipe { method, weights, density: self.density.unwrap_or(0.5), seed: self.seed.unwrap_or(42) };
        blend::finished(adapters, &recipe, arch)
    }
}
