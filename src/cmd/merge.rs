//! `tunesmith merge`: merges an adapter into its base and checks that the logits agree, or blends several adapters into one.
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::args::ConfigArgs;
use super::download::Downloads;
use super::provenance::{self, Texts};
use super::terminal::{self, print_note};
use crate::checkpoint::loaded_adapter::{LoadedAdapter, score_head};
use crate::checkpoint::stamp_check;
use crate::checkpoint::{Manifest, atomic, peft};
use crate::config::arch::{Arch, Vocabulary};
use crate::config::{Config, Mode, ModelConfig};
use crate::data::{ChatTemplate, Tokenizer};
use crate::error::{Error, Result};
use crate::export::blend::{self, Method, Recipe};
use crate::export::folder::{self, Form, Written};
use crate::export::merge::{Comparison, Merged, Parts, compare, plain_model, sample_logits, widened};
use crate::export::requantize::Coding;
use crate::files::disk::RealDisk;
use crate::files::output::check_output_folder;
use crate::files::temporary;
use crate::hub::{self, Part};
use crate::model::quantize::{Held, How};
use crate::model::weights::Dtype;
use crate::ops::quant::Format;
use crate::plan::human_bytes;
use crate::train::output;
use crate::words::count;

/// Write a model with an adapter merged into it.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    parts: PartsArgs,
    /// The new folder (with a configuration: `merged` in its output folder)
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// The dtype of the new weights; `auto`: as the base has them
    #[arg(long, value_name = "auto|float32|bfloat16|float16", default_value = "auto")]
    dtype: String,
    /// Write the matrices of linear layers in 4 or 8 bits, as bitsandbytes stores them, and say what that loses;
    /// `model.double_quant` and `model.quantization_skip_modules` as in the configuration or in training
    #[arg(long, value_name = "nf4|fp4|int8", conflicts_with = "adapter_only")]
    requantize: Option<String>,
    /// The most GB of a file of weights
    #[arg(long, value_name = "GB", default_value_t = 5.0)]
    shard_size: f64,
    /// The largest difference of a logit, in float32 and by the largest logit, with which the result is accepted
    #[arg(long, value_name = "X", default_value_t = MAX_DIFFERENCE)]
    max_difference: f32,
    /// Write the blend of several adapters as an adapter, and merge nothing
    #[arg(long)]
    adapter_only: bool,
    /// Replace the output folder if it is there
    #[arg(long)]
    overwrite: bool,
}

/// The usual limit of a merge: float32 keeps 7 digits, of which sums in another order cost some.
pub const MAX_DIFFERENCE: f32 = 1e-5;

/// What is put together: a base, adapters below, and the adapter on top or several that are blended.
#[derive(Debug, Clone, clap::Args)]
pub struct PartsArgs {
    /// The base model: a folder, or a name of the hub
    #[arg(long, value_name = "DIR|NAME")]
    pub base: Option<String>,
    /// The adapter: a folder, or a name of the hub. May be given more than once: they are blended by --weights
    #[arg(long, value_name = "DIR|NAME")]
    pub adapter: Vec<PathBuf>,
    /// An adapter that lies below (tuning.adapters of its training); may be given more than once, the lowest first
    #[arg(long, value_name = "DIR")]
    pub below: Vec<PathBuf>,
    /// The weights of several adapters, such as 0.7,0.3 (one each; the default is 1 for all)
    #[arg(long, value_name = "W,…", value_delimiter = ',', allow_hyphen_values = true)]
    pub weights: Vec<f64>,
    /// How several adapters are blended, as in PEFT's `add_weighted_adapter`; `cat` is exactly the sum of their updates
    #[arg(long, value_name = "cat|linear|ties|dare_linear|dare_ties|magnitude_prune", default_value = "cat")]
    pub combine: String,
    /// The share of values that ties, dare and `magnitude_prune` keep
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    pub density: f64,
    /// The seed of dare's choice
    #[arg(long, value_name = "SEED", default_value_t = 42)]
    pub seed: u64,
    /// Accept that this field of the adapter's backend.json differs; `quantization`: the base as it is stored, whatever it was
    /// held in while the adapter was trained. May be given more than once
    #[arg(long, value_name = "FIELD")]
    pub allow: Vec<String>,
}

/// What [`PartsArgs`] came to.
pub struct Opened {
    /// The base and the adapters below.
    pub parts: Parts,
    /// The adapter on top, or the blend; none for the base alone.
    pub top: Option<LoadedAdapter>,
    /// The folder with the tokenizer: the adapter's if it has one.
    pub tokenizer: PathBuf,
    /// The chat template that the configuration names.
    pub template: Option<String>,
    /// The configuration, if one was given.
    pub config: Option<Config>,
    /// In what form the adapter's run held the matrices of its base.
    pub held: Option<Held>,
    /// The folders that all this is read from, to the end.
    pub reads: Vec<PathBuf>,
}

impl Opened {
    /// What to call it: the run's folder, the adapter's, or the base's.
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

impl PartsArgs {
    /// Opens everything; `words` may name a configuration, which then says what the flags do not. The result of a run that has
    /// no adapter is taken as the base where `whole` models will do.
    ///
    /// # Errors
    /// [`crate::Kind::Config`]: nothing names the base; those of reading it all.
    pub fn open(&self, words: &ConfigArgs, whole: bool) -> Result<Opened> {
        stamp_check::check_allowed(&self.allow, &stamp_check::MAY_DIFFER)?;
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
                let model = if Path::new(name).is_dir() {
                    ModelConfig { local_dir: Some(name.into()), ..ModelConfig::default() }
                } else {
                    ModelConfig { name: Some(name.clone()), ..ModelConfig::default() }
                };
                hub::model_dir(&model, Part::Whole, &downloads)?.dir
            }
            (None, Some(config)) => hub::model_dir(&config.model, Part::Whole, &downloads)?.dir,
            (None, None) => {
                let error = Error::config("no base model is named: --base DIR, or a configuration");
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
            // What changes the vocabulary cannot be blended, which is said where they are blended.
            several => {
                let apart = several.iter().flat_map(|one| one.apart.clone()).collect();
                Vocabulary { apart, ..Vocabulary::default() }
            }
        };
        let mut reads = [&adapters[..], below].concat();
        let mut parts = Parts::open(&base, below, &vocabulary)?;
        if let ([one], None) = (adapters.as_slice(), &parts.arch.score) {
            parts.arch.score = score_head(one)?;
        }
        let tokenizer =
            adapters.first().filter(|dir| dir.join("tokenizer.json").is_file()).unwrap_or(&parts.base).clone();
        let template = match &config {
            Some(config) if config.data.template_path.is_some() || config.data.chat_template.is_some() => {
                let (path, built_in) = (config.data.template_path.as_deref(), config.data.chat_template);
                let own = Tokenizer::load_with(&tokenizer, &[])?;
                ChatTemplate::find(&tokenizer, &own, path, built_in)?.map(|template| template.source().to_owned())
            }
            _ => None,
        };
        let texts = Texts::of(&tokenizer, template.as_deref())?;
        let (held, mut opened) = provenance::check(&parts, &adapters, config.as_ref(), &texts, &self.allow)?;
        if let Some(held) = &held
            && parts.hold(held)? > 0
        {
            print_note(&format!(
                "the base's matrices are taken in {}, as they were held in training: their codes are widened, then the adapter \
                 is put on them (--allow quantization takes the base as it is stored)",
                Held::describe(Some(held))
            ));
        }
        let blends = !self.weights.is_empty() || self.combine != "cat";
        if opened.len() < 2 && blends {
            return Err(Error::config("--weights and --combine blend several adapters, here is one at most")
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
                        .hint(format!("its result is a model already: {}", model.display())));
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

    fn blend(&self, adapters: &[LoadedAdapter], arch: &Arch) -> Result<LoadedAdapter> {
        let method = match self.combine.as_str() {
            "cat" => Method::Cat,
            "linear" => Method::Linear,
            "ties" => Method::Ties,
            "dare_linear" => Method::DareLinear,
            "dare_ties" => Method::DareTies,
            "magnitude_prune" => Method::MagnitudePrune,
            other => {
                return Err(Error::config(format!(
                    "--combine {other}: expected cat, linear, ties, dare_linear, dare_ties or magnitude_prune"
                )));
            }
        };
        if !(self.density > 0.0 && self.density <= 1.0) {
            return Err(Error::config(format!("--density {}: expected a share above 0, at most 1", self.density)));
        }
        let weights = if self.weights.is_empty() { vec![1.0; adapters.len()] } else { self.weights.clone() };
        let recipe = Recipe { method, weights, density: self.density, seed: self.seed };
        blend::finished(adapters, &recipe, arch)
    }
}

/// Runs the subcommand.
///
/// # Errors
/// Everything that reading and writing can fail with; [`crate::Kind::Numeric`]: the merged model's logits are not the adapter's.
pub fn run(args: &Args) -> Result<()> {
    let dtype = parse_dtype(&args.dtype)?;
    let opened = args.parts.open(&args.config, false)?;
    let coding = args.requantize.as_deref().map(|word| coding(word, &opened)).transpose()?;
    let Opened { parts, top, tokenizer, template, config, reads, .. } = opened;
    let output = output_dir(args.output.as_deref(), config.as_ref(), "merged")?;
    claim(&output, args.overwrite, &reads)?;
    let top = top.ok_or_else(|| {
        Error::config("no adapter is named: --adapter DIR, or a configuration whose run has trained one")
    })?;
    let shard_bytes = (args.shard_size * 1e9) as u64;
    if shard_bytes == 0 {
        return Err(Error::config(format!("--shard-size {}: expected more than 0 GB", args.shard_size)));
    }
    if args.adapter_only {
        if args.parts.adapter.len() < 2 {
            return Err(Error::config("--adapter-only writes a blend: name at least two adapters"));
        }
        let tensors: Vec<_> =
            top.tensors.iter().map(|(name, (shape, values))| (name.clone(), shape.clone(), &values[..])).collect();
        atomic::publish(&RealDisk, &output, |staging| {
            peft::stage(staging, &top.config, &tensors)?;
            let source = crate::checkpoint::folder::Source {
                dir: &tokenizer,
                grown: None,
                template: template.as_deref(),
                own_head: None,
                wrapping: None,
            };
            crate::checkpoint::folder::stage_companions(staging, source)
        })?;
        return terminal::print(&format!("adapter  {}\n", output.display()));
    }
    let (mut text, merged) = check_merge(parts, top, args.max_difference)?;
    let form = Form {
        dtype,
        shard_bytes,
        tokenizer: &tokenizer,
        template: template.as_deref(),
        card: None,
        coding: coding.as_ref(),
    };
    let Written { bytes, loss } = folder::write(&output, &merged.model, &form)?;
    if let Some(coding) = &coding {
        let _ = writeln!(
            text,
            "requantized     {}, {}: a weight changes by {:.2e} at most, by {:.2e} on average (weights reach {:.2})",
            coding.describe(),
            count(loss.matrices, "matrix"),
            loss.largest,
            loss.mean(),
            loss.scale
        );
    }
    let mut plain = plain_model(&output)?;
    // So that the sample rows are the same ones.
    plain.arch.token_rows.clone_from(&merged.model.arch.token_rows);
    let written = compare(&merged.logits, &sample_logits(&plain)?, merged.model.arch.outputs());
    if dtype == Some(Dtype::F32) && coding.is_none() {
        refuse(&written, args.max_difference).inspect_err(|_| drop(std::fs::remove_dir_all(&output)))?;
    }
    let _ = writeln!(text, "as written      {}", show(&written)); // a String never fails
    let _ = writeln!(text, "model           {} ({})", output.display(), human_bytes(bytes));
    let class = merged.model.arch.auto_class();
    let _ = writeln!(text, "use it          Transformers: {class}.from_pretrained(\"{}\")", output.display());
    terminal::print(&text)
}

/// How `--requantize` asks for matrices to be coded: the scales, and what is left out, as in the configuration, else as in
/// training.
fn coding(word: &str, opened: &Opened) -> Result<Coding> {
    let format = [Format::Nf4, Format::Fp4, Format::Int8].into_iter().find(|format| format.name() == word);
    let Some(format) = format else {
        return Err(Error::config(format!("--requantize {word}: expected nf4, fp4 or int8")));
    };
    let default = ModelConfig::default();
    let (double, skip) = match (&opened.config, &opened.held) {
        (Some(config), _) => (config.model.double_quant, config.model.quantization_skip_modules.clone()),
        (None, Some(held)) if held.how.format != Format::Int8 => (held.how.double, held.skip.clone()),
        (None, Some(held)) => (default.double_quant, held.skip.clone()),
        (None, None) => (default.double_quant, opened.parts.dense_modules()?),
    };
    Coding::new(&opened.parts.arch, Held { how: How { format, double }, skip })
}

/// A merge that was found to be right.
pub struct Checked {
    /// The model to write.
    pub model: Merged,
    /// Logits of the adapter at work, on the sample rows.
    pub logits: Vec<f32>,
}

/// Merges `top`, and holds the logits of the merged model in float32 against those of the adapter at work. One model is in
/// memory at a time.
///
/// # Errors
/// [`crate::Kind::Numeric`]: they differ by more than `limit`.
pub fn check_merge(parts: Parts, top: LoadedAdapter, limit: f32) -> Result<(String, Checked)> {
    let vocabulary = parts.arch.outputs();
    let logits = sample_logits(&parts.adapted(&top, &widened())?)?;
    let model = parts.merged(Some(top))?;
    let comparison = compare(&logits, &sample_logits(&model.model()?)?, vocabulary);
    refuse(&comparison, limit)?;
    Ok((format!("merged, float32 {}\n", show(&comparison)), Checked { model, logits }))
}

fn show(comparison: &Comparison) -> String {
    let Comparison { largest, scale, agreeing, positions } = comparison;
    format!(
        "largest difference of a logit from the adapter's: {largest:.2e} (logits reach {scale:.3}); same best token at \
         {agreeing} of {}",
        count(positions, "position")
    )
}

fn refuse(comparison: &Comparison, limit: f32) -> Result<()> {
    // A float32 keeps so many digits, not so many places: the same rounding is twice as large on logits twice as large.
    let accepted = limit * comparison.scale;
    if comparison.largest <= accepted {
        return Ok(());
    }
    Err(Error::numeric(format!(
        "the merged model is not the adapter: {}; at most {accepted:.2e} is accepted, {limit:e} of the largest logit",
        show(comparison)
    ))
    .hint("nothing was written; --max-difference accepts more"))
}

/// The dtype of a flag; none for `auto`.
///
/// # Errors
/// [`crate::Kind::Config`]: another word.
pub fn parse_dtype(word: &str) -> Result<Option<Dtype>> {
    match word {
        "auto" => Ok(None),
        "float32" | "fp32" | "f32" => Ok(Some(Dtype::F32)),
        "bfloat16" | "bf16" => Ok(Some(Dtype::BF16)),
        "float16" | "fp16" | "f16" => Ok(Some(Dtype::F16)),
        other => Err(Error::config(format!("--dtype {other}: expected auto, float32, bfloat16 or float16"))
            .hint("--requantize nf4, fp4 or int8 writes codes; tunesmith export --gguf writes q8_0 and q4_0")),
    }
}

/// The folder to write to.
///
/// # Errors
/// [`crate::Kind::Config`]: nothing names it.
pub fn output_dir(flag: Option<&Path>, config: Option<&Config>, name: &str) -> Result<PathBuf> {
    match (flag, config) {
        (Some(output), _) => Ok(output.to_owned()),
        (None, Some(config)) => Ok(config.train.output_dir.join(name)),
        (None, None) => Err(Error::config("no output is named").hint("--output DIR")),
    }
}

/// Refuses to write over something, or into what is read; clears what a killed process has left of the folder.
///
/// # Errors
/// Those of [`check_output_folder`]; [`crate::Kind::Io`]: nothing can be written there.
pub fn claim(output: &Path, overwrite: bool, reads: &[PathBuf]) -> Result<()> {
    let written = |dir: &Path| Some(Manifest::read(dir).ok()?.names());
    atomic::recover(&RealDisk, output)?;
    check_output_folder(output, overwrite, reads, written)?;
    if let Some(parent) = output.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent).map_err(|source| Error::io("create", parent, &source))?;
    }
    // What cannot be written is said before all the work.
    temporary::unnamed(output).map(drop).map_err(|source| Error::io("write", output, &source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_in_proportion_to_the_logits() {
        let of = |largest, scale| Comparison { largest, scale, agreeing: 1, positions: 1 };
        for (largest, scale) in [(9e-6, 1.0), (9e-9, 1e-3), (0.9, 1e5), (0.0, 0.0)] {
            refuse(&of(largest, scale), MAX_DIFFERENCE).unwrap();
        }
        for (largest, scale) in [(2e-5, 1.0), (5e-5, 1e-3), (2.0, 1e5), (1e-9, 0.0), (f32::INFINITY, 1.0)] {
            let error = refuse(&of(largest, scale), MAX_DIFFERENCE).unwrap_err();
            assert_eq!(error.kind(), crate::Kind::Numeric, "{largest} of {scale}");
        }
    }
}
