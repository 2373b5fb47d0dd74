//! Merges adapters into a base model, one tensor at a time, and compares its logits with those of the unmerged adapter.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tunesmith_base::error::{Error, Result};
use tunesmith_checkpoint::loaded_adapter::LoadedAdapter;
use tunesmith_checkpoint::stamp_check::{AdapterStamp, BASE_MODEL};
use tunesmith_checkpoint::{Hashed, Manifest, peft};
use tunesmith_config::adapters::lora::LoraConfig;
use tunesmith_config::arch::{Arch, TensorSpec, Vocabulary};
use tunesmith_config::vision::VisionArch;
use tunesmith_config::{Config, DeviceChoice, Mode, ModelConfig, Quantization, TargetModules};
use tunesmith_data::batch::Batch;
use tunesmith_model::quantize::{self, Held};
use tunesmith_model::stack::{Coded, Layer, Stack};
use tunesmith_model::weights::{Dtype, WeightFiles};
use tunesmith_model::{Model, Source};
use tunesmith_ops::dropout::key;
use tunesmith_ops::quant::Format;

/// A base model and the adapters merged below, onto which one more adapter can be put.
#[derive(Debug)]
pub struct Parts {
    /// The folder of the base model.
    pub base: PathBuf,
    /// Its shape, with room for the top adapter's new tokens.
    pub arch: Arch,
    /// The base model's tensors, read when they are needed.
    pub weights: WeightFiles,
    /// Adapters below the top one (`tuning.adapters`).
    pub below: Stack,
    /// Fingerprints of the adapters below, lowest first.
    below_hashes: Vec<String>,
    /// The device on which a merged model is compared with the unmerged adapter.
    pub device: DeviceChoice,
}

impl Parts {
    /// Opens a base model and the adapters `below`; `vocabulary` is that of the adapter on top
    /// ([`peft::vocabulary`]).
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the base cannot be read; [`tunesmith_base::Kind::Checkpoint`]: an adapter does not fit.
    pub fn open(base: &Path, below: &[PathBuf], vocabulary: &Vocabulary) -> Result<Self> {
        Manifest::check_model(base, Hashed::All)?;
        let mut arch = Arch::from_dir(base)?;
        let weights = WeightFiles::open_model(base, &arch, &arch.tensors())?;
        let (mut stack, mut below_hashes) = (Stack::default(), Vec::new());
        for dir in below {
            arch.separate_for(&peft::vocabulary(dir)?);
            stack.0.push(LoadedAdapter::open(dir, &arch)?.frozen(&arch)?.into());
            below_hashes.push(peft::open_weights(dir)?.fingerprint()?);
        }
        arch.fit(vocabulary)?;
        Ok(Self { base: base.to_owned(), arch, weights, below: stack, below_hashes, device: DeviceChoice::Cpu })
    }

    /// Checks the adapter in `dir` against the base in its run's `backend.json`. Returns one line per difference that `allow`
    /// accepts, or `None` without such a file.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`] with both sides: it was trained on another base.
    pub fn check_stamp(&self, dir: &Path, allow: &[String]) -> Result<Option<Vec<String>>> {
        let Some(origin) = AdapterStamp::of(dir)? else { return Ok(None) };
        origin.compare(dir, &[(BASE_MODEL, self.fingerprint()?)], allow).map(Some)
    }

    /// A hash of the base and the adapters below, as in a run's stamp.
    ///
    /// # Errors
    /// The files.
    pub fn fingerprint(&self) -> Result<String> {
        let base = self.weights.fingerprint()?;
        Ok(self.below_hashes.iter().fold(base, |base, adapter| format!("{base} + {adapter}")))
    }

    /// The unquantized linear modules of a base that is stored in 4 or 8 bits.
    ///
    /// # Errors
    /// The shape has no linear layers.
    pub fn dense_modules(&self) -> Result<Vec<String>> {
        if !self.is_quantized() {
            return Ok(Vec::new());
        }
        let all = quantize::matrices(&self.arch, &[])?;
        let dense = all.iter().filter(|name| self.weights.format_of(name).is_none());
        Ok(dense.map(|name| name.trim_end_matches(".weight").to_owned()).collect())
    }

    /// Whether the run with this `dtype` in its stamp rounded the base to bfloat16 (`model.dtype: bfloat16`): no matrix is stored
    /// in bfloat16.
    pub fn was_rounded(&self, dtype: Option<&str>) -> bool {
        let stored = |spec: &TensorSpec| spec.shape.len() > 1 && self.weights.is_bf16(&spec.name);
        dtype.is_some_and(|dtype| dtype.starts_with("base bfloat16")) && !self.arch.tensors().iter().any(stored)
    }

    /// Rounds the base's matrices to bfloat16 as a run with `model.dtype: bfloat16` did. Those that the run quantized (`held`) and
    /// those below the `apart` modules, which `PiSSA` keeps in float32, stay; so do tables of which it trained rows.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the list of modules that are left out of the quantization fits nothing.
    pub fn round(&mut self, held: Option<&Held>, apart: &[String]) -> Result<()> {
        let coded = held.map_or_else(|| Ok(BTreeSet::new()), |held| quantize::matrices(&self.arch, &held.skip))?;
        let apart: BTreeSet<&str> = apart.iter().map(String::as_str).collect();
        let rounds = |spec: &TensorSpec| {
            TensorSpec::is_matrix(&spec.shape)
                && !coded.contains(&spec.name)
                && self.arch.rows_of(&spec.name).is_empty()
                && !spec.name.strip_suffix(".weight").is_some_and(|module| apart.contains(module))
        };
        let names = self.arch.tensors().into_iter().filter(rounds).map(|spec| spec.name).collect();
        self.below.0.push(Layer::Rounded(names));
        Ok(())
    }

    /// Quantizes and dequantizes the base's matrices as a run with a quantized base did. Returns how many matrices this affects.
    /// Matrices that the checkpoint already stores in the run's format are affected only if adapters below have changed them.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the list of modules that are left out fits nothing.
    pub fn hold(&mut self, held: &Held) -> Result<usize> {
        let names = quantize::matrices(&self.arch, &held.skip)?;
        let stored = self.weights.quantization();
        // Single matrices of a maker's files may have other formats, such as FP8 with a scale for each row beside blocks.
        let kept = stored == Some(held.how.format);
        let coded = |name: &str| match self.weights.format_of(name) {
            Some(Format::Mxfp4) => false,
            Some(format) => !kept && format != held.how.format,
            // A run quantizes what the maker left dense, unless it keeps the maker's format.
            None => stored.is_none_or(Format::is_makers) && !held.how.format.is_makers(),
        };
        let widths: BTreeMap<String, usize> = self
            .arch
            .tensors()
            .into_iter()
            .filter(|spec| names.contains(&spec.name) && (coded(&spec.name) || self.below.changes(&spec.name)))
            .filter_map(|TensorSpec { name, shape }| Some((name, *shape.last()?)))
            .collect();
        let count = widths.len();
        self.below.0.push(Layer::Coded(Coded { how: held.how, widths }));
        Ok(count)
    }

    /// The model with the adapters below and, if given, the adapter `top` merged into it. Nothing is computed before a tensor is
    /// read.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: its settings do not fit the model.
    pub fn merged(self, top: Option<LoadedAdapter>) -> Result<Merged> {
        let frozen = top.map(|top| top.frozen(&self.arch)).transpose()?;
        let Self { base, arch, weights, mut below, device, .. } = self;
        below.0.extend(frozen.map(Layer::from));
        Ok(Merged { base, arch, weights, stack: below, device })
    }

    /// Whether the base is stored in 4 or 8 bits.
    pub fn is_quantized(&self) -> bool {
        self.weights.quantization().is_some()
    }

    /// Loads the model without an adapter on top. `model` says how it is kept in memory, such as its dtype and device.
    ///
    /// # Errors
    /// The weights.
    pub fn bare(&self, model: &ModelConfig) -> Result<Model> {
        let mut config = Config { model: model.clone(), ..Config::default() };
        config.tuning.lora = idle(&self.arch);
        Model::load_on(&self.arch, Some(&self.weights), &config, &self.below)
    }

    /// Loads the model with the unmerged adapter `top`. `model` says how the base is kept in memory, such as its dtype and
    /// device.
    ///
    /// # Errors
    /// The weights.
    pub fn adapted(&self, top: &LoadedAdapter, model: &ModelConfig) -> Result<Model> {
        let mut config = Config { model: model.clone(), ..Config::default() };
        config.tuning = top.config.settings(&self.arch, &config.tuning)?;
        let mut model = Model::load_on(&self.arch, Some(&self.weights), &config, &self.below)?;
        set_adapter(&mut model, top);
        Ok(model)
    }
}

/// Copies an adapter's values into a model that was loaded with the adapter's settings and shape.
pub fn set_adapter(model: &mut Model, adapter: &LoadedAdapter) {
    for spec in model.params.specs.clone() {
        // The names and shapes were compared when the adapter was opened.
        if let Some((_, values)) = adapter.tensors.get(&spec.name) {
            model.params.put(&spec.range(), values);
        }
    }
}

/// A merged model, whose tensors are computed when they are read.
#[derive(Debug)]
pub struct Merged {
    /// The base model's folder, whose companion files are copied.
    pub base: PathBuf,
    /// The shape, with new tokens.
    pub arch: Arch,
    /// The base model's tensors, before the merge.
    pub weights: WeightFiles,
    stack: Stack,
    /// Where [`Merged::model`] loads it to.
    pub device: DeviceChoice,
}

impl Merged {
    /// The values of a tensor, in float32.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the files; [`tunesmith_base::Kind::Checkpoint`]: an adapter that does not fit.
    pub fn values(&self, spec: &TensorSpec) -> Result<Vec<f32>> {
        let config = Config::default();
        let source = Source { arch: &self.arch, weights: Some(&self.weights), config: &config, stack: &self.stack };
        source.values(&spec.name, spec.len())
    }

    /// Whether the adapter changes a tensor.
    pub fn changes(&self, name: &str) -> bool {
        self.stack.changes(name)
    }

    /// Tensors of the image encoder and the connector that the adapter changes.
    pub fn changed_beside(&self) -> Vec<TensorSpec> {
        let tensors = self.arch.vision.iter().flat_map(|vision| vision.tensors());
        tensors.filter(|spec| self.stack.changes(&spec.name)).collect()
    }

    /// The merged model in memory, all in float32.
    ///
    /// # Errors
    /// As [`Merged::values`].
    pub fn model(&self) -> Result<Model> {
        Model::load_on(&self.arch, Some(&self.weights), &frozen_config(&self.arch, self.device), &self.stack)
    }
}

/// Settings of an adapter of rank 1 on one module, whose B is zero. It stands for no adapter: a loaded model needs a
/// trainable tensor, and a quantized base has no other.
pub fn idle(arch: &Arch) -> LoraConfig {
    let first = arch.linear_modules().into_iter().next().map(|module| module.name);
    LoraConfig { r: 1, target_modules: TargetModules::List(first.into_iter().collect()), ..LoraConfig::default() }
}

/// Settings that load a quantized base as dense matrices.
pub fn dequantized() -> ModelConfig {
    ModelConfig { quantization: Quantization::None, ..ModelConfig::default() }
}

/// A configuration to load a model without training it. A loaded model needs a trainable tensor: here it is only the final
/// norm. Quantized matrices are dequantized.
fn frozen_config(arch: &Arch, device: DeviceChoice) -> Config {
    let mut config = Config { model: ModelConfig { device, ..dequantized() }, ..Config::default() };
    config.tuning.mode = Mode::Freeze;
    config.tuning.freeze.trainable_patterns = vec![arch.final_norm()];
    config
}

/// Loads a model folder to `device` for inference, dequantized, with the encoder and connector of `vision`.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: it cannot be read.
pub fn plain_model(dir: &Path, vision: Option<Arc<VisionArch>>, device: DeviceChoice) -> Result<Model> {
    Manifest::check_model(dir, Hashed::All)?;
    let mut arch = Arch::from_dir(dir)?;
    let weights = WeightFiles::open_model(dir, &arch, &arch.tensors())?;
    arch.vision = match vision {
        None if arch.reads_images_across() => Some(Arc::new(VisionArch::of_model(dir, arch.hidden_size)?)),
        vision => vision,
    };
    Model::load(&arch, Some(&weights), &frozen_config(&arch, device))
}

/// Rows of tokens in [`sample_logits`].
const ROWS: usize = 4;
/// Tokens per row in [`sample_logits`].
const TOKENS: usize = 32;
/// Positions per row whose logits are compared: the last ones.
const POSITIONS: usize = 8;

/// Logits of a few rows of random tokens, `[positions, vocabulary]`, to compare two models with. The same tokens are drawn
/// for every model of a vocabulary; the first row begins with the token rows that an adapter trains.
///
/// # Errors
/// The engine.
pub fn sample_logits(model: &Model) -> Result<Vec<f32>> {
    let arch = &model.arch;
    let length = TOKENS.min(arch.max_position_embeddings);
    let draw = |row: usize, at: usize| (key(42, row as u64, at as u64) % arch.vocab_size as u64) as u32;
    let mut logits = Vec::new();
    for row in 0..ROWS {
        let trained = arch.token_rows.ids().into_iter().filter(|_| row == 0);
        let tokens: Vec<u32> = trained.chain((0..).map(|at| draw(row, at))).take(length).collect();
        // Every token has a label. A row without labels would be a prompt, whose tokens see each other in PaliGemma, but only if
        // the encoder is loaded.
        let targets = vec![0; length];
        // If each text needs an image, it gets one of random numbers from -1 to 1.
        let number = |at: usize| key(43, row as u64, at as u64) as f32 / u64::MAX as f32 * 2.0 - 1.0;
        let images = if arch.reads_images_across() { model.image_of(number) } else { Vec::new() };
        let batch = Batch { cu_seqlens: vec![0, length], tokens, targets, images, ..Batch::default() };
        let rows: Vec<usize> = (length.saturating_sub(POSITIONS)..length).collect();
        logits.extend(model.logits(&batch, &rows)?);
    }
    Ok(logits)
}

/// How far two models' logits are apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// The largest absolute difference of a logit.
    pub largest: f32,
    /// The largest absolute logit of the first model.
    pub scale: f32,
    /// Positions where both models have the same most probable token.
    pub agreeing: usize,
    /// Token positions compared, of all rows.
    pub positions: usize,
}

/// Compares two models' logits, both `[positions, vocabulary]`.
pub fn compare(left: &[f32], right: &[f32], vocabulary: usize) -> Comparison {
    let top = |row: &[f32]| row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(at, _)| at);
    let pairs = || left.chunks(vocabulary).zip(right.chunks(vocabulary));
    let mut largest = 0.0f32;
    for (left, right) in left.iter().zip(right) {
        // NaN against a number counts as an infinite difference.
        let difference = (left - right).abs();
        largest = if difference.is_nan() { f32::INFINITY } else { largest.max(difference) };
    }
    Comparison {
        largest: if left.len() == right.len() { largest } else { f32::INFINITY },
        scale: left.iter().fold(0.0f32, |most, value| most.max(value.abs())),
        agreeing: pairs().filter(|(left, right)| top(left) == top(right)).count(),
        positions: pairs().count(),
    }
}

/// Checks that all values of a tensor are finite in `dtype`, and returns them.
///
/// # Errors
/// [`tunesmith_base::Kind::Numeric`], naming the tensor.
pub fn fits(name: &str, values: Vec<f32>, dtype: Dtype) -> Result<Vec<f32>> {
    let Some(index) = dtype.first_overflow(&values) else { return Ok(values) };
    Err(Error::numeric(format!(
        "tensor {name:?} has {} at index {index}, which is not finite in {}: nothing is written",
        values[index],
        dtype.name()
    ))
    .hint("write another dtype, such as bfloat16"))
}
