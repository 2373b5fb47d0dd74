//! From a configuration and a model's shape to what the prediction of memory starts from: what is trained, by the same rules
//! as the training itself, and what the optimizer holds.
use std::collections::BTreeSet;
use std::path::Path;

use crate::prepare::{Parts, Prepared};
use crate::trainable;
use tunesmith_base::error::Result;
use tunesmith_base::files;
use tunesmith_base::memory;
use tunesmith_config::arch::Arch;
use tunesmith_config::{
    Checkpointing, Config, Dtype, EvalStrategy, GradDtype, Init, Mode, Optim, Quantization, SaveStrategy,
};
use tunesmith_data::{Dataset, Split};
use tunesmith_model::adapters::{self, Method};
use tunesmith_model::targets::{self, Placement, Targets};
use tunesmith_model::weights::WeightFiles;
use tunesmith_model::{freeze, quantize};
use tunesmith_ops::quant::Format;
use tunesmith_optim::optimizer::state_bytes;
use tunesmith_optim::{self as optim, Slot};
use tunesmith_parallel::ParallelPlan;
use tunesmith_plan::human_bytes;
use tunesmith_plan::memory::{
    Base, Breakdown, Device, Job, OptimizerBytes, PROGRAM, Pass, Predictor, Storage, Trained,
};
use tunesmith_plan::strategies::{self, Machine, Way};

/// How much of the memory budget was in use at most, as it counts: label and text, where the configuration sets one.
pub fn used(config: &Config) -> Option<(String, String)> {
    let budget = config.train.memory_budget?.0;
    let most = human_bytes(memory::highest());
    Some(("memory budget".to_owned(), format!("{most} of {} in use at most", human_bytes(budget))))
}

/// What a tokenizer holds for an entry of its vocabulary, in bytes: of a BPE of 30,743 entries 686 were measured.
const TOKEN: u64 = 700;

/// The job that `config` describes for a model of this shape, with matrices `stored` so where `model.dtype` leaves it to the
/// checkpoint. `weights` are the model's files, where they are at hand: they may be quantized.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: what is to be trained or left out does not exist, or the optimizer has no such arguments.
pub fn job<'a>(config: &Config, arch: &'a Arch, stored: Storage, weights: Option<&WeightFiles>) -> Result<Job<'a>> {
    let placements = targets::placed(arch, &config.tuning)?;
    let tensors = trainable::tensors(config, arch, &placements)?;
    let threads = threads(config);
    let takes = adapters::of(&config.tuning).is_some_and(Method::takes_from_base);
    let through_f32 = config.model.init == Init::Random || !config.tuning.adapters.is_empty();
    let (full, none) = match config.train.gradient_checkpointing {
        Checkpointing::Auto => (0, 0),
        Checkpointing::Blocks { full, none } => (full, none),
    };
    Ok(Job {
        arch,
        base: Base {
            matrices: match config.model.dtype {
                Dtype::Float32 => Storage::F32,
                Dtype::Bfloat16 => Storage::Bf16,
                Dtype::Auto if through_f32 => Storage::F32,
                Dtype::Auto => stored,
            },
            quantized: quantize::resolve(config, weights)?.map(|how| match how.format {
                Format::Nf4 | Format::Fp4 => Storage::FourBit { double: how.double },
                Format::Int8 => Storage::Int8,
            }),
            coded: quantize::matrices(arch, &config.model.quantization_skip_modules)?,
            wide: if takes { placements.iter().map(|it| it.module.clone()).collect() } else { BTreeSet::new() },
            through_f32,
        },
        trained: Trained {
            values: tensors.iter().map(|(_, shape)| trainable::size(shape)).sum(),
            tensors: whole(config, arch, &placements)?,
            adapters: placements
                .iter()
                .map(|it| (it.key.trim_end_matches(".weight").to_owned(), it.adapter.footprint()))
                .collect(),
            keeps_start: takes,
        },
        optimizer: optimizer(config, tensors, threads)?,
        full,
        none,
        narrow: config.train.bf16 || config.train.fp16,
        narrow_gradients: config.train.grad_dtype == GradDtype::Bfloat16,
        rounds_gradients: config.train.fp16,
        dropout: adapters::of(&config.tuning).is_some_and(|method| method.dropout() > 0.0),
        threads,
        companions: 0,
        bucket: (config.train.ddp_bucket_cap_mb as u64) << 20,
    })
}

/// The threads of a rank.
pub fn threads(config: &Config) -> usize {
    config.train.num_threads.unwrap_or_else(rayon::current_num_threads)
}

/// The names of the model's tensors that are trained in full.
fn whole(config: &Config, arch: &Arch, placements: &[Placement]) -> Result<BTreeSet<String>> {
    Ok(match config.tuning.mode {
        Mode::Full => arch.tensors().into_iter().map(|spec| spec.name).collect(),
        Mode::Freeze => freeze::trained_tensors(arch, &config.tuning.freeze)?.into_iter().collect(),
        _ => {
            let targets = Targets::of(&config.tuning);
            let renamed = targets.renamed(arch, placements)?.into_iter().map(|(tensor, _)| tensor);
            targets.saved_tensors(arch)?.into_iter().chain(renamed).collect()
        }
    })
}

/// What the configuration's optimizer holds for tensors of these names and shapes.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: arguments that it does not have.
pub fn optimizer(config: &Config, tensors: Vec<(String, Vec<usize>)>, threads: usize) -> Result<OptimizerBytes> {
    let rule = optim::rule(&config.train)?;
    let slot = |(name, shape)| Slot { name, shape, decay: true, lr_scale: 1.0 };
    let slots: Vec<Slot> = tensors.into_iter().map(slot).collect();
    let values = 4 * slots.iter().map(|slot| slot.count() as u64).sum::<u64>();
    // Each thread updates a tensor at a time.
    let mut scratch: Vec<u64> = slots.iter().map(|slot| rule.scratch(slot)).collect();
    scratch.sort_unstable_by(|one, other| other.cmp(one));
    let state = state_bytes(rule.as_ref(), &slots);
    let average = if config.train.ema_decay.is_some() { values } else { 0 };
    let publishing = if rule.averages() { values } else { 0 };
    let saves = config.train.save_async && config.train.save_strategy != SaveStrategy::No;
    Ok(OptimizerBytes {
        state,
        average,
        scratch: scratch.into_iter().take(threads).sum(),
        publishing,
        saving: if saves { values + state + average + publishing } else { 0 },
    })
}

/// How a model folder's checkpoint stores its matrices, by its `config.json`: bfloat16, or what becomes float32 in memory.
pub fn stored(dir: &Path) -> Storage {
    let text = files::read_text(&if dir.is_dir() { dir.join("config.json") } else { dir.to_owned() }, files::SMALL);
    text.map_or(Storage::F32, |text| stored_by(&text))
}

/// As [`stored`], by the text of a `config.json`.
pub fn stored_by(text: &str) -> Storage {
    let json: Option<serde_json::Value> = serde_json::from_str(text).ok();
    let dtype = json.as_ref().and_then(|json| json.get("dtype").or_else(|| json.get("torch_dtype")));
    if dtype.and_then(serde_json::Value::as_str) == Some("bfloat16") { Storage::Bf16 } else { Storage::F32 }
}

/// What a tokenizer of this many entries holds.
pub const fn tokenizer(vocabulary: usize) -> u64 {
    vocabulary as u64 * TOKEN
}

/// How the matrices of a model's files are stored, or where there are none, what is drawn: float32.
fn stored_in(weights: Option<&WeightFiles>, arch: &Arch) -> Storage {
    let first = arch.tensors().into_iter().find(|spec| spec.shape.len() > 1);
    let narrow = weights.zip(first).is_some_and(|(files, spec)| files.is_bf16(&spec.name));
    if narrow { Storage::Bf16 } else { Storage::F32 }
}

/// The way in which a run of so many ranks shares its memory among them.
pub fn way(config: &Config, ranks: usize) -> Way {
    Way::plain(ParallelPlan::new(&config.train, ranks).strategy)
}

/// The predicted memory of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peak {
    /// Of its fullest rank, part by part.
    pub rank: Breakdown,
    /// Ranks that are threads of one process.
    pub together: u64,
}

impl Peak {
    /// Of the process: of all ranks that are its threads. The program is there once, and one rank saves.
    pub const fn process(&self) -> u64 {
        let others = self.together - 1;
        self.rank.total() + others * (self.rank.total() - PROGRAM - self.rank.saving)
    }
}

/// The most memory of a run that is prepared: with the rows that it has.
///
/// # Errors
/// As [`job`].
pub fn peak(prepared: &Prepared) -> Result<Peak> {
    let Prepared { parts: Parts { config, arch, weights, .. }, dataset, ranks, together, .. } = prepared;
    let rank = held(config, arch, weights.as_ref(), (ranks.0, largest(config, dataset)))?;
    Ok(Peak { rank, together: *together })
}

/// The largest pass of a run with these rows.
pub fn largest(config: &Config, dataset: &Dataset) -> Pass {
    let longest = |split: &Split| split.lengths().into_iter().max().unwrap_or(1) as u64;
    let longest_row = longest(&dataset.train);
    let train = if config.data.packing { longest_row.max(config.model.max_seq_len as u64) } else { longest_row };
    // A row of several renderings is cut between them, as a micro-batch is between rows.
    let whole = |split: &Split| split.longest_sequence() as u64;
    let sequence = if config.data.packing { train.min(config.model.max_seq_len as u64) } else { whole(&dataset.train) };
    let evaluates = config.train.eval_strategy != EvalStrategy::No;
    let validation = dataset.validation.as_ref().filter(|_| evaluates);
    // Training then has the larger buffers of validation too.
    let most = config.train.max_tokens_per_pass.map_or(u64::MAX, |most| most as u64);
    let tokens = |(row, sequence, rows): (u64, u64, usize)| (rows as u64 * row).min(most.max(sequence));
    let validation = validation.map(|split| (longest(split), whole(split), config.train.eval_batch_size));
    let batches = [(train, sequence, config.train.batch_size.or(1))].into_iter().chain(validation);
    let tokens = batches.map(tokens).max().unwrap_or(1).max(1);
    Pass { tokens, longest: sequence.max(1), labelled: tokens }
}

/// What one of so many ranks holds at most, part by part, with its tokenizer, in passes like this.
///
/// # Errors
/// As [`job`].
pub fn held(
    config: &Config,
    arch: &Arch,
    weights: Option<&WeightFiles>,
    (ranks, pass): (usize, Pass),
) -> Result<Breakdown> {
    let mut job = job(config, arch, stored_in(weights, arch), weights)?;
    job.companions = tokenizer(arch.vocab_size);
    let machine = Machine { device: Device::Cpu, ranks: ranks as u64, memory: u64::MAX };
    Ok(strategies::rank(&Predictor::new(job, Device::Cpu), &machine, way(config, ranks), &pass))
}

/// Single settings that would make a rank smaller, and by how much, the most helpful first. `weights` are the model's files,
/// where it is not drawn.
///
/// # Errors
/// As [`job`].
pub fn savings(config: &Config, arch: &Arch, weights: Option<&WeightFiles>, pass: &Pass) -> Result<Vec<(String, u64)>> {
    let need = |config: &Config| held(config, arch, weights, (1, *pass)).map(|held| held.total());
    let now = need(config)?;
    let mut others: Vec<(String, Config)> = Vec::new();
    let mut other = |text: &str, change: &dyn Fn(&mut Config)| {
        let mut other = config.clone();
        change(&mut other);
        others.push((text.to_owned(), other));
    };
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
    // A change that this model or these files refuse helps nobody.
    let saved = |(text, other): (String, Config)| Some((text, now.saturating_sub(need(&other).ok()?)));
    let mut saved: Vec<(String, u64)> = others.into_iter().filter_map(saved).filter(|(_, bytes)| *bytes > 0).collect();
    saved.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
    Ok(saved)
}
