//! Predicts the memory of a run from its configuration and the model's shape, by the same rules as the training itself.
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use crate::ahead;
use crate::meta_engine::MetaEngine;
use crate::shown_pictures::ShownPictures;
use crate::trainable;
use crate::vision;
use serde::Serialize;
use tunesmith_base::error::Result;
use tunesmith_base::{files, memory};
use tunesmith_config::arch::{Arch, EMBEDDING, TensorSpec};
use tunesmith_config::{Checkpointing, Config, Dtype, GradDtype, Init, Mode, Optim, Quantization, SaveStrategy};
use tunesmith_data::{Dataset, Split};
use tunesmith_device as device;
use tunesmith_model::adapters::{self, Method};
use tunesmith_model::quantize::How;
use tunesmith_model::targets::{self, Placement, Targets};
use tunesmith_model::weights::WeightFiles;
use tunesmith_model::{freeze, offload, quantize};
use tunesmith_ops::quant::Format;
use tunesmith_optim::optimizer::{offloaded_bytes, state_bytes};
use tunesmith_optim::{self as optim, Slot};
use tunesmith_plan::human_bytes;
use tunesmith_plan::memory::{
    Base, Breakdown, CUDA_CONTEXT, Device, Job, OptimizerBytes, PROGRAM, Pass, Predictor, Storage, Trained,
};
use tunesmith_plan::strategies::{self, Machine, Strategy, Way};

/// The peak use of a memory budget of `budget` bytes, as label and text.
pub fn used_of_budget(budget: u64) -> (String, String) {
    let most = human_bytes(memory::highest());
    ("memory budget".to_owned(), format!("{most} of {} in use at most", human_bytes(budget)))
}

/// Bytes of a tokenizer for each entry of its vocabulary. Measured: 686 on a BPE of 30,743 entries.
const TOKEN: u64 = 700;

/// The [`Job`] of a configuration, the input of the prediction. `stored` is the type of the model's matrices on disk, for
/// `model.dtype: auto`. `weights` are the model's files if they are available; they may be quantized.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: a module to train or to skip does not exist, or the optimizer has no such arguments.
pub fn job<'a>(config: &Config, arch: &'a Arch, stored: Storage, weights: Option<&WeightFiles>) -> Result<Job<'a>> {
    job_showing(config, arch, stored, weights, None)
}

/// As [`job`], for rows that show images, where the model has an image encoder.
///
/// # Errors
/// As [`job`].
pub fn job_showing<'a>(
    config: &Config,
    arch: &'a Arch,
    stored: Storage,
    weights: Option<&WeightFiles>,
    shown: Option<&ShownPictures>,
) -> Result<Job<'a>> {
    vision::refuse_blind(arch, arch.vision.is_some() && shown.is_some())?;
    let placements = targets::placed(arch, &config.tuning)?;
    let tensors = trainable::tensors(config, arch, &placements)?;
    let threads = threads(config);
    let takes = adapters::of(&config.tuning).is_some_and(Method::takes_from_base);
    let through_f32 = config.model.init == Init::Random || !config.tuning.adapters.is_empty();
    let bitsandbytes = quantize::bitsandbytes(arch, config, weights);
    // Scales that bitsandbytes has stored stay as they are.
    let double = |how: How| bitsandbytes.as_ref().map_or(how.double, |stored| stored.double_quant);
    let whole = whole(config, arch, &placements)?;
    let offloaded = offload::tables(arch, config, &whole)?;
    let stays = |name: &&String| *name == EMBEDDING && offload::stays_in_files(arch, config);
    let (full, none) = blocks(config.train.gradient_checkpointing);
    let base = Base {
        matrices: match config.model.dtype {
            Dtype::Float32 => Storage::F32,
            Dtype::Bfloat16 => Storage::Bf16,
            Dtype::Auto if through_f32 => Storage::F32,
            Dtype::Auto => stored,
        },
        quantized: quantize::resolve(arch, config, weights)?.and_then(|how| match how.format {
            Format::Nf4 | Format::Fp4 => Some(Storage::FourBit { double: double(how) }),
            Format::Int8 => Some(Storage::Int8),
            Format::Fp8 => Some(Storage::Fp8),
            Format::Mxfp4 | Format::Fp8Tiles(_) | Format::Int4Groups | Format::Int8Groups | Format::Nvfp4 => None,
        }),
        quantized_tensors: quantize::coded(arch, config, weights)?.into(),
        stored: quantize::kept(arch, config, weights)?.into(),
        float32: match config.model.dtype {
            Dtype::Auto if !through_f32 => quantize::float32(arch, config, weights)?.into(),
            _ => Arc::default(),
        },
        wide: Arc::new(placements.iter().filter(|_| takes).map(|it| it.module.clone()).collect()),
        through_f32,
        on_host: config.train.offload_param,
    };
    let engine = MetaEngine::new(
        Arch { bitsandbytes, ..arch.clone() },
        config,
        shown.map(|shown| shown.pixels.clone()).unwrap_or_default(),
        &base,
    )?;
    Ok(Job {
        arch,
        base,
        trained: Trained {
            values: tensors.iter().map(|(_, shape)| trainable::size(shape)).sum(),
            tensors: whole,
            adapters: placements
                .iter()
                .map(|it| (it.key.trim_end_matches(".weight").to_owned(), it.adapter.footprint()))
                .collect(),
            keeps_start: takes,
        },
        optimizer: OptimizerState::new(tensors).bytes(config)?,
        full,
        none,
        narrow: config.train.bf16 || config.train.fp16,
        narrow_gradients: config.train.grad_dtype == GradDtype::Bfloat16,
        rounds_gradients: config.train.fp16,
        threads,
        companions: 0,
        bucket: (config.train.ddp_bucket_cap_mb as u64) << 20,
        in_files: offloaded.iter().filter(stays).cloned().collect(),
        offloaded,
        pictures: shown.map(|shown| shown.pictures),
        evaluation: None,
        engine: Arc::new(engine),
    })
}

/// The trained tensors of a run as its optimizer sees them.
#[derive(Debug)]
pub struct OptimizerState(Vec<Slot>);

impl OptimizerState {
    /// For trained tensors of these names and shapes.
    pub(crate) fn new(tensors: Vec<(String, Vec<usize>)>) -> Self {
        let slot = |(name, shape)| Slot { name, shape, decay: true, lr_scale: 1.0, vision: false };
        Self(tensors.into_iter().map(slot).collect())
    }

    /// For the tensors that `config` trains.
    ///
    /// # Errors
    /// As [`job`].
    pub fn of(config: &Config, arch: &Arch) -> Result<Self> {
        let placements = targets::placed(arch, &config.tuning)?;
        Ok(Self::new(trainable::tensors(config, arch, &placements)?))
    }

    /// The bytes that the optimizer of `config` needs for them.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: an argument that the optimizer cannot have.
    pub fn bytes(&self, config: &Config) -> Result<OptimizerBytes> {
        let rule = optim::rule(&config.train)?;
        let values = 4 * self.0.iter().map(|slot| slot.count() as u64).sum::<u64>();
        // Each thread updates one tensor at a time.
        let mut scratch: Vec<u64> = self.0.iter().map(|slot| rule.scratch(slot)).collect();
        scratch.sort_unstable_by(|one, other| other.cmp(one));
        let state = state_bytes(rule.as_ref(), &self.0);
        let average = if config.train.ema_decay.is_some() { values } else { 0 };
        let publishing = if rule.averages() { values } else { 0 };
        let saves = config.train.save_async && config.train.save_strategy != SaveStrategy::No;
        Ok(OptimizerBytes {
            state,
            average,
            scratch: scratch.into_iter().take(threads(config)).sum(),
            publishing,
            saving: if saves { values + state + average + publishing } else { 0 },
            in_flight: offloaded_bytes(rule.as_ref(), &self.0),
            offloaded: config.train.offload_optimizer,
        })
    }
}

/// Numbers of blocks that are recomputed in the backward pass, and that save all activations.
const fn blocks(checkpointing: Checkpointing) -> (usize, usize) {
    match checkpointing {
        Checkpointing::Auto => (0, 0),
        Checkpointing::Blocks { full, none } => (full, none),
    }
}

/// Number of threads of a rank.
pub(crate) fn threads(config: &Config) -> usize {
    config.train.num_threads.unwrap_or_else(tunesmith_ops::par::threads)
}

/// The names of the model's tensors that are trained in full.
fn whole(config: &Config, arch: &Arch, placements: &[Placement]) -> Result<BTreeSet<String>> {
    Ok(match config.tuning.mode {
        Mode::Full => arch.parameters().into_iter().map(|spec| spec.name).collect(),
        Mode::Freeze => freeze::trained_tensors(arch, &config.tuning.freeze)?.into_iter().collect(),
        _ => {
            let targets = Targets::of(&config.tuning);
            let renamed = targets.renamed(arch, placements)?.into_iter().map(|(tensor, _)| tensor);
            targets.saved_tensors(arch)?.into_iter().chain(renamed).collect()
        }
    })
}

/// The type of the matrices of a model folder, by its `config.json`: bfloat16, or float32 for every other type.
pub fn stored(dir: &Path) -> Storage {
    let text = files::read_text(&if dir.is_dir() { dir.join("config.json") } else { dir.to_owned() }, files::SMALL);
    text.map_or(Storage::F32, |text| stored_by(&text))
}

/// As [`stored`], from the text of a `config.json`.
pub fn stored_by(text: &str) -> Storage {
    let json: Option<serde_json::Value> = serde_json::from_str(text).ok();
    let dtype = json.as_ref().and_then(|json| json.get("dtype").or_else(|| json.get("torch_dtype")));
    if dtype.and_then(serde_json::Value::as_str) == Some("bfloat16") { Storage::Bf16 } else { Storage::F32 }
}

/// Approximate bytes of a tokenizer with `vocabulary` entries in memory.
pub const fn tokenizer(vocabulary: usize) -> u64 {
    vocabulary as u64 * TOKEN
}

/// The type of the matrices in a model's files, bfloat16 if any is; float32 for random weights.
fn stored_in(weights: Option<&WeightFiles>, arch: &Arch) -> Storage {
    let narrow = |files: &WeightFiles| {
        arch.tensors().iter().any(|spec| TensorSpec::is_matrix(&spec.shape) && files.is_bf16(&spec.name))
    };
    if weights.is_some_and(narrow) { Storage::Bf16 } else { Storage::F32 }
}

/// The predicted peak of a run, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Peak {
    /// The rank that needs the most, part by part.
    pub rank: Breakdown,
    /// Number of ranks that are threads of one process.
    pub ranks_in_process: u64,
    /// Whether the bytes are those of a GPU; else of the process.
    pub on_gpu: bool,
}

impl Peak {
    /// Bytes of the process with all its ranks. The program counts once, and only one rank has a copy for saving.
    pub const fn process(&self) -> u64 {
        let others = self.ranks_in_process - 1;
        let program = if self.on_gpu { self.rank.program } else { PROGRAM };
        self.rank.total() + others * (self.rank.total() - program - self.rank.saving)
    }
}

/// The settings that limit the size of a pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PassLimits {
    /// Rows of a micro-batch.
    pub batch_size: usize,
    /// Rows of a validation batch; `None` without validation.
    pub eval_batch_size: Option<usize>,
    /// Maximum tokens of a pass; a longer sequence is a pass of its own.
    pub max_tokens_per_pass: Option<usize>,
    /// Tokens of a packed row; `None` without packing.
    pub packing: Option<usize>,
}

/// The largest pass of training that a data set leads to.
pub(crate) fn largest_pass(dataset: &Dataset, limits: &PassLimits) -> Pass {
    // A row of several sequences can be split between them, as a micro-batch can between rows.
    let row = longest(&dataset.train);
    let (row, sequence) = match limits.packing {
        Some(length) => (row.max(length as u64), length as u64),
        None => (row, dataset.train.longest_sequence() as u64),
    };
    limits.pass(row, sequence, limits.batch_size)
}

/// The largest pass of a validation; `None` without validation.
pub(crate) fn largest_evaluation(dataset: &Dataset, limits: &PassLimits) -> Option<Pass> {
    let (split, rows) = dataset.validation.as_ref().zip(limits.eval_batch_size)?;
    Some(limits.pass(longest(split), split.longest_sequence() as u64, rows.min(split.len())))
}

/// Tokens of a split's longest row.
fn longest(split: &Split) -> u64 {
    split.lengths().into_iter().max().unwrap_or(1) as u64
}

impl PassLimits {
    /// The largest pass of micro-batches of `rows` rows as long as `row`, whose longest sequence is `sequence`.
    fn pass(&self, row: u64, sequence: u64, rows: usize) -> Pass {
        let most = self.max_tokens_per_pass.map_or(u64::MAX, |most| most as u64);
        let tokens = (rows as u64 * row).min(most.max(sequence)).max(1);
        Pass { tokens, longest: sequence.max(1), labelled: tokens }
    }
}

/// Predicts the memory of training a model with a configuration.
#[derive(Clone, Copy)]
pub struct MemoryModel<'a> {
    config: &'a Config,
    arch: &'a Arch,
    weights: Option<&'a WeightFiles>,
    device: Device,
    evaluation: Option<Pass>,
    shown: Option<&'a ShownPictures>,
    /// Whether images of the next step are read while one computes.
    reads_ahead: bool,
}

/// The kind of device whose memory is predicted for a model on `device`. The meta device counts as the CPU.
pub const fn kind(device: device::Device) -> Device {
    match device {
        device::Device::Cpu | device::Device::Meta => Device::Cpu,
        device::Device::Cuda(_) => Device::Gpu,
    }
}

impl<'a> MemoryModel<'a> {
    /// Predicts for `arch`, trained with `config`. `weights` are the model's files; `None` for random weights. `on` is the
    /// device that the model will be on.
    pub const fn new(config: &'a Config, arch: &'a Arch, weights: Option<&'a WeightFiles>, on: device::Device) -> Self {
        Self { config, arch, weights, device: kind(on), evaluation: None, shown: None, reads_ahead: false }
    }

    /// Also counts validations, whose largest pass is `evaluation`.
    #[must_use]
    pub(crate) const fn evaluating(self, evaluation: Option<Pass>) -> Self {
        Self { evaluation, ..self }
    }

    /// Also counts the images that rows show.
    #[must_use]
    pub const fn showing(self, shown: Option<&'a ShownPictures>) -> Self {
        Self { shown, ..self }
    }

    /// Also counts the images of the next step, which a run reads while a step computes.
    #[must_use]
    pub(crate) const fn reading_ahead(self) -> Self {
        Self { reads_ahead: true, ..self }
    }

    /// Peak bytes of one of `ranks` ranks, part by part, if `pass` is its largest pass. On the CPU this includes the tokenizer.
    /// On a GPU it leaves out CUDA's context, because the memory that is free there does not include it either.
    ///
    /// # Errors
    /// As [`job`].
    pub fn rank(&self, way: Way, checkpointing: Checkpointing, ranks: usize, pass: &Pass) -> Result<Breakdown> {
        let stored = stored_in(self.weights, self.arch);
        let mut job = job_showing(self.config, self.arch, stored, self.weights, self.shown)?;
        (job.full, job.none) = blocks(checkpointing);
        job.companions = tokenizer(self.arch.vocab_size);
        if let Some(pictures) = job.pictures.filter(|_| self.reads_ahead) {
            let step = self.config.train.grad_accum.or(1) as u64 * pictures.read(pass);
            job.companions += step.min(ahead::MOST_BYTES as u64);
        }
        // On a GPU only the larger of the training and the validation pass counts, as if either had a backward pass.
        let on_gpu = self.evaluation.filter(|_| self.device == Device::Gpu);
        let pass = on_gpu.as_ref().filter(|evaluation| evaluation.tokens > pass.tokens).unwrap_or(pass);
        job.evaluation = self.evaluation.filter(|_| self.device == Device::Cpu);
        let machine = Machine { device: self.device, ranks: ranks as u64, memory: u64::MAX };
        let mut rank = strategies::rank(&Predictor::new(job, self.device), &machine, way, pass);
        if self.device == Device::Gpu {
            rank.program = rank.program.saturating_sub(CUDA_CONTEXT);
        }
        Ok(rank)
    }

    /// Single settings that would save memory on one rank, with the bytes they save, largest first. The prediction uses
    /// `checkpointing` instead of the configured value.
    ///
    /// # Errors
    /// As [`job`].
    pub(crate) fn savings(&self, checkpointing: Checkpointing, pass: &Pass) -> Result<Vec<(String, u64)>> {
        let need = |config: &Config| {
            let alone = Way::plain(Strategy::Single);
            MemoryModel { config, ..*self }.rank(alone, checkpointing, 1, pass).map(|rank| rank.total())
        };
        let now = need(self.config)?;
        let mut others: Vec<(String, Config)> = Vec::new();
        let mut other = |text: &str, change: &dyn Fn(&mut Config)| {
            let mut other = self.config.clone();
            change(&mut other);
            others.push((text.to_owned(), other));
        };
        let config = self.config;
        let (train, mode) = (&config.train, config.tuning.mode);
        if config.model.dtype != Dtype::Bfloat16 {
            other("model.dtype: bfloat16", &|config| config.model.dtype = Dtype::Bfloat16);
        }
        if matches!(mode, Mode::Full | Mode::Freeze) {
            other("tuning.mode: lora", &|config| config.tuning.mode = Mode::Lora);
        }
        if matches!(config.model.quantization, Quantization::None | Quantization::Auto)
            && (mode == Mode::Lora || !mode.adapts())
        {
            other("tuning.mode: qlora", &|config| {
                (config.tuning.mode, config.model.quantization) = (Mode::Lora, Quantization::Nf4);
            });
        }
        let half = config.tuning.lora.r / 2;
        if mode == Mode::Lora && half > 0 {
            other(&format!("tuning.lora.r: {half}"), &|config| config.tuning.lora.r = half);
        }
        if train.optim == Optim::AdamW {
            other("train.optim: adamw_8bit", &|config| config.train.optim = Optim::AdamW8bit);
        }
        if !(train.bf16 || train.fp16) {
            other("train.bf16: true", &|config| config.train.bf16 = true);
        }
        other("train.save_async: false", &|config| config.train.save_async = false);
        // Leaves out changes that this model or its files do not allow.
        let saved = |(text, other): (String, Config)| Some((text, now.saturating_sub(need(&other).ok()?)));
        let mut saved: Vec<(String, u64)> =
            others.into_iter().filter_map(saved).filter(|(_, bytes)| *bytes > 0).collect();
        saved.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        Ok(saved)
    }
}
