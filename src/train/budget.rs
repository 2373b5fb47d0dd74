//! From a configuration and a model's shape to what the prediction of memory starts from: what is trained, by the same rules
//! as the training itself, and what the optimizer holds.
use std::collections::BTreeSet;
use std::path::Path;

use super::prepare::Prepared;
use super::{shard, trained};
use crate::config::arch::Arch;
use crate::config::{Checkpointing, Config, Dtype, EvalStrategy, Init, Mode, Optim, SaveStrategy, Strategy};
use crate::data::Split;
use crate::error::Result;
use crate::model::targets::{self, Placement, Side, Targets};
use crate::model::weights::WeightFiles;
use crate::model::{freeze, quantize};
use crate::ops::quant::Format;
use crate::optim::optimizer::state_bytes;
use crate::optim::{Slot, registry};
use crate::plan::memory::{Adapter, Base, Breakdown, Device, Job, OptimizerBytes, Pass, Predictor, Storage, Trained};
use crate::plan::strategies::{self, Machine, Way};

/// What a tokenizer holds for an entry of its vocabulary, in bytes: of a BPE of 30,743 entries 686 were measured.
const TOKEN: u64 = 700;

/// The job that `config` describes for a model of this shape, with matrices `stored` so where `model.dtype` leaves it to the
/// checkpoint. `weights` are the model's files, where they are at hand: they may be quantized.
///
/// # Errors
/// [`crate::Kind::Config`]: what is to be trained or left out does not exist, or the optimizer has no such arguments.
pub fn job<'a>(config: &Config, arch: &'a Arch, stored: Storage, weights: Option<&WeightFiles>) -> Result<Job<'a>> {
    let placements = targets::placed(arch, &config.tuning)?;
    let tensors = trained::tensors(config, arch, &placements)?;
    let threads = config.train.num_threads.unwrap_or_else(rayon::current_num_threads);
    let pissa = config.tuning.mode == Mode::Lora && config.tuning.lora.init_lora_weights.is_pissa();
    let through_f32 = config.model.init == Init::Random || !config.tuning.adapters.is_empty();
    let (full, none) = match config.train.gradient_checkpointing {
        Checkpointing::Auto => (0, 0),
        Checkpointing::Blocks { full, none } => (full, none),
    };
    let adapter = |it: &Placement| {
        let adapter = match it.factors {
            Some(side) => Adapter::Factors { inputs: side == Side::Input },
            None => Adapter::Lora { rank: it.r, dora: it.dora },
        };
        (it.key.clone(), adapter)
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
            wide: if pissa { placements.iter().map(|it| it.module.clone()).collect() } else { BTreeSet::new() },
            through_f32,
        },
        trained: Trained {
            values: tensors.iter().map(|(_, shape)| trained::size(shape)).sum(),
            tensors: whole(config, arch, &placements)?,
            adapters: placements.iter().map(adapter).collect(),
            keeps_start: pissa,
        },
        optimizer: optimizer(config, tensors, threads)?,
        full,
        none,
        narrow: config.train.bf16 || config.train.fp16,
        rounds_gradients: config.train.fp16,
        dropout: config.tuning.mode == Mode::Lora && config.tuning.lora.lora_dropout > 0.0,
        threads,
        bucket: (config.train.ddp_bucket_cap_mb as u64) << 20,
        companions: 0,
    })
}

/// The names of the model's tensors that are trained in full.
fn whole(config: &Config, arch: &Arch, placements: &[Placement]) -> Result<BTreeSet<String>> {
    Ok(match config.tuning.mode {
        Mode::Full => arch.tensors().into_iter().map(|spec| spec.name).collect(),
        Mode::Freeze => freeze::trained_tensors(arch, &config.tuning.freeze)?.into_iter().collect(),
        Mode::Lora | Mode::Ia3 => {
            let targets = Targets::of(&config.tuning);
            let renamed = targets.renamed(arch, placements)?.into_iter().map(|(tensor, _)| tensor);
            targets.saved_tensors(arch)?.into_iter().chain(renamed).collect()
        }
    })
}

/// What the configuration's optimizer holds for tensors of these names and shapes.
///
/// # Errors
/// [`crate::Kind::Config`]: arguments that it does not have.
pub fn optimizer(config: &Config, tensors: Vec<(String, Vec<usize>)>, threads: usize) -> Result<OptimizerBytes> {
    let rule = registry::rule(&config.train)?;
    let slot = |(name, shape)| Slot { name, shape, decay: true, lr_scale: 1.0 };
    let slots: Vec<Slot> = tensors.into_iter().map(slot).collect();
    let values = 4 * slots.iter().map(|slot| slot.count() as u64).sum::<u64>();
    // Each thread updates a tensor at a time.
    let mut scratch: Vec<u64> = slots.iter().map(|slot| scratch(config.train.optim, slot)).collect();
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

/// Bytes that the update of one tensor takes for a moment.
fn scratch(optim: Optim, slot: &Slot) -> u64 {
    let count = slot.count() as u64;
    match (optim, slot.shape.as_slice()) {
        (Optim::Adafactor, _) => 4 * count,
        // The iterate, its copy in panels, the next one as panels and as rows; three products of the shorter side.
        (Optim::Muon, [rows, cols]) => 4 * (4 * count + 3 * (*rows.min(cols) as u64).pow(2)),
        _ => 0,
    }
}

/// How a model folder's checkpoint stores its matrices, by its `config.json`: bfloat16, or what becomes float32 in memory.
pub fn stored(dir: &Path) -> Storage {
    let text = std::fs::read_to_string(if dir.is_dir() { dir.join("config.json") } else { dir.to_owned() });
    let json: Option<serde_json::Value> = text.ok().and_then(|text| serde_json::from_str(&text).ok());
    let dtype = json.as_ref().and_then(|json| json.get("dtype").or_else(|| json.get("torch_dtype")));
    if dtype.and_then(serde_json::Value::as_str) == Some("bfloat16") { Storage::Bf16 } else { Storage::F32 }
}

/// What a tokenizer of this many entries holds.
pub const fn tokenizer(vocabulary: usize) -> u64 {
    vocabulary as u64 * TOKEN
}

/// The most memory of a rank of a run that is prepared: with the rows that it has.
///
/// # Errors
/// As [`job`].
pub fn peak(prepared: &Prepared) -> Result<Breakdown> {
    let (predictor, pass) = predictor(prepared)?;
    let machine = Machine { device: Device::Cpu, ranks: prepared.ranks.0 as u64, memory: 0 };
    let shares_values = shard::shares_values(&prepared.config.train);
    let strategy = match prepared.config.train.strategy {
        _ if machine.ranks == 1 => strategies::Strategy::Single,
        Strategy::Zero1 => strategies::Strategy::Zero1,
        Strategy::Zero2 => strategies::Strategy::Zero2,
        Strategy::Zero3 | Strategy::Fsdp if shares_values => strategies::Strategy::Fsdp,
        _ => strategies::Strategy::Ddp,
    };
    let way = Way { strategy, offload_optimizer: false, offload_weights: false };
    Ok(strategies::rank(&predictor, &machine, way, &pass))
}

/// What predicts the memory of a run that is prepared, and its largest pass.
///
/// # Errors
/// As [`job`].
pub fn predictor(prepared: &Prepared) -> Result<(Predictor<'_>, Pass)> {
    let (config, arch, dataset) = (&prepared.config, &prepared.arch, &prepared.dataset);
    let first = arch.tensors().into_iter().find(|spec| spec.shape.len() > 1);
    let narrow = prepared.weights.as_ref().zip(first).is_some_and(|(files, spec)| files.is_bf16(&spec.name));
    let stored = if narrow { Storage::Bf16 } else { Storage::F32 };
    let mut job = job(config, arch, stored, prepared.weights.as_ref())?;
    job.companions = tokenizer(arch.vocab_size);
    let longest = |split: &Split| split.lengths().into_iter().max().unwrap_or(1) as u64;
    let train = if config.data.packing { config.model.max_seq_len as u64 } else { longest(&dataset.train) };
    let evaluates = config.train.eval_strategy != EvalStrategy::No;
    let validation = dataset.validation.as_ref().filter(|_| evaluates);
    // Training then has the larger buffers of validation too.
    let most = config.train.max_tokens_per_pass.map_or(u64::MAX, |most| most as u64);
    let tokens = |(longest, rows): (u64, usize)| (rows as u64 * longest).min(most.max(longest));
    let validation = validation.map(|split| (longest(split), config.train.eval_batch_size));
    let batches = [(train, config.train.batch_size.or(1))].into_iter().chain(validation);
    let tokens = batches.map(tokens).max().unwrap_or(1).max(1);
    let pass = Pass { tokens, longest: train.max(1), labelled: tokens };
    Ok((Predictor::new(job, Device::Cpu), pass))
}
