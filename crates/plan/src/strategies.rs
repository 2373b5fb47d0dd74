//! The memory that a rank needs under each strategy for sharing a run among ranks, whether it fits, and which strategy
//! is recommended.
//!
//! `ddp` copies everything to every rank. `ZeRO` (Rajbhandari et al., 2020, <https://arxiv.org/abs/1910.02054>) gives
//! each rank a share of the optimizer's state (`zero1`), of the gradients too (`zero2`), or of all weights too
//! (`zero3`; `fsdp` is the same). Shared weights are gathered a segment at a time, the next one while the last
//! computes. What is offloaded is in the host's memory instead of the device's.
mod strategy;

use super::human_bytes;
use super::memory::{Base, Breakdown, Device, Job, NCCL, OptimizerBytes, Pass, Predictor, Storage};
use serde::Serialize;
use std::sync::Arc;

pub use strategy::{Machine, Strategy, Way};

/// The micro-batches of a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Batch {
    /// Rows of a micro-batch.
    pub rows: u64,
    /// Tokens of a row.
    pub length: u64,
    /// The most tokens of a pass. A larger micro-batch is cut into several passes; `None` never cuts.
    pub most: Option<u64>,
}

impl Batch {
    /// The largest pass of a micro-batch.
    pub fn pass(&self) -> Pass {
        Pass::of(self.rows, self.length, self.most)
    }
}

/// Whether the needed memory fits the available memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fit {
    /// It fits, with at least 5 % to spare.
    Fits,
    /// It fits, with less than 5 % to spare.
    Tight,
    /// It does not fit.
    No,
    /// The memory is not known.
    Unknown,
}

impl Fit {
    /// Compares `need` bytes with `memory` bytes.
    pub fn of(need: u64, memory: u64) -> Self {
        match need {
            _ if memory == Machine::UNKNOWN => Self::Unknown,
            _ if need <= memory / 20 * 19 => Self::Fits,
            _ if need <= memory => Self::Tight,
            _ => Self::No,
        }
    }

    /// The word in tables, such as `tight`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fits => "fits",
            Self::Tight => "tight",
            Self::No => "no",
            Self::Unknown => "?",
        }
    }
}

/// The largest row or micro-batch that fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Limit {
    /// Not even the smallest one fits.
    Nothing,
    /// At most this many tokens or rows fit.
    UpTo(u64),
    /// Any number fits, because micro-batches are cut into passes.
    Any,
    /// The memory is not known.
    Unknown,
}

/// A line of the table: a way, and the memory that it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Row {
    /// Strategy and offload of this line.
    pub way: Way,
    /// The bytes of the fullest rank, part by part.
    pub rank: Breakdown,
    /// The bytes of the fullest rank in all.
    pub total: u64,
    /// Whether `total` fits the memory of a rank.
    pub fit: Fit,
    /// Tokens of the longest row that fits, alone in its pass.
    pub longest: Limit,
    /// The most rows of a micro-batch whose rows are as long as the configuration's.
    pub rows: Limit,
}

/// The table of all ways, and the recommended one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// A line for each way.
    pub rows: Vec<Row>,
    /// The index of the recommended way in `rows`; `None` if none fits.
    pub recommended: Option<usize>,
    /// A sentence that says why this way is recommended, or why none is.
    pub reason: String,
    /// If no way fits: single changes of the configuration that help, and the bytes that the smallest way needs with
    /// each of them.
    pub helps: Vec<(String, u64)>,
}

/// The largest row or micro-batch that is tried, in tokens.
const SEARCH: u64 = 1 << 22;

/// The largest number from 1 to `most` for which `fits` holds, or 0 if there is none. `fits` must hold for all smaller
/// numbers too.
fn greatest(most: u64, fits: impl Fn(u64) -> bool) -> u64 {
    // Tried first: often nothing fits, and the small passes at the end of a search take the longest to count.
    if !fits(1) {
        return 0;
    }
    let (mut yes, mut no) = (1, most + 1);
    while yes + 1 < no {
        let middle = u64::midpoint(yes, no);
        if fits(middle) { yes = middle } else { no = middle }
    }
    yes
}

/// The memory of the fullest rank in `pass` under `way`, part by part. `predictor` knows what a rank needs that trains
/// alone.
pub fn rank(predictor: &Predictor<'_>, machine: &Machine, way: Way, pass: &Pass) -> Breakdown {
    let mut rank = predictor.predict(pass);
    let share = |bytes: u64| bytes.div_ceil(machine.ranks.max(1));
    let (gradients, strategy) = (rank.gradients, way.strategy);
    // A bucket that is sent, and one that arrives.
    let bucket = predictor.job.bucket;
    let on_its_way = 2 * bucket.min(gradients);
    let segments = predictor.segments();
    // The buffers of weights that come from the host's memory.
    let brought = std::mem::take(&mut rank.collectives);
    match strategy {
        // On the CPU the copies are threads of one process, which read each other's memory. On GPUs the first device
        // adds up the gradients.
        Strategy::Dp if machine.device == Device::Gpu => rank.collectives = gradients,
        Strategy::Single | Strategy::Dp => {}
        _ => rank.collectives = on_its_way,
    }
    let offloads = machine.device == Device::Gpu && (way.offload_optimizer || predictor.job.optimizer.offloaded);
    if offloads {
        let OptimizerBytes { state, in_flight, .. } = predictor.job.optimizer;
        rank.optimizer -= state;
        rank.host += if strategy.shards_optimizer() { share(state) } else { state };
        rank.passing = rank.passing.max(in_flight.min(3 * state));
    }
    if strategy.shards_optimizer() {
        // The shares are joined while they are written, so there is no copy of them.
        (rank.optimizer, rank.saving) = (share(rank.optimizer), 0);
    }
    let whole = 4 * predictor.job.trained.values;
    let sums = if predictor.job.narrow_gradients { whole / 2 } else { whole };
    let shares = strategy == Strategy::Zero2 || strategy.shards_weights();
    if shares || predictor.job.narrow_gradients && machine.ranks > 1 && strategy != Strategy::Single {
        // The gradients of a segment are whole until they are reduced, while the backward pass fills those of the next
        // one. Those of a matrix that the head shares wait until the embedding has its gradient too.
        let trained: Vec<u64> = segments.iter().map(|segment| segment.trained).collect();
        let (waits, rest) = if predictor.job.arch.ties_head() { trained.split_at(1) } else { trained.split_at(0) };
        let two = rest.windows(2).map(|pair| pair[0] + pair[1]).max().unwrap_or(0);
        let kept = if shares { share(sums) } else { sums };
        rank.gradients = kept + (two + waits.iter().sum::<u64>()).min(whole);
        if strategy != Strategy::Dp {
            rank.collectives = 2 * bucket.min(trained.into_iter().max().unwrap_or(0));
        }
    }
    if strategy.shards_weights() && machine.ranks > 1 {
        let gathered = segments.windows(2).map(|pair| pair.iter().map(|it| it.frozen + it.trained).sum::<u64>());
        rank.collectives += gathered.max().unwrap_or(0);
        // Every rank needs these constants for all rows.
        let constants = predictor.constants.min(rank.weights);
        (rank.weights, rank.trained) = (share(rank.weights - constants) + constants, share(rank.trained));
        rank.host -= predictor.offloaded() - share(predictor.offloaded());
        let optimizer = &predictor.job.optimizer;
        let scratch = if machine.device == Device::Cpu { optimizer.scratch } else { 0 };
        let in_flight = if offloads { optimizer.in_flight } else { 0 };
        rank.passing = share(scratch.max(optimizer.publishing)).max(in_flight);
    } else {
        rank.collectives += brought;
    }
    if machine.device == Device::Gpu {
        // On GPUs, the copy for checkpoints is in the host's memory.
        rank.host += std::mem::take(&mut rank.saving);
    }
    if machine.device == Device::Gpu && machine.ranks > 1 && strategy != Strategy::Single {
        rank.program += NCCL;
    }
    rank
}

/// Computes the table for a machine, and recommends the fastest way that fits. `longest` is the most tokens that the
/// model allows for a row.
pub fn plan(predictor: &Predictor<'_>, machine: &Machine, batch: &Batch, longest: u64) -> Plan {
    let need = |way, pass: &Pass| rank(predictor, machine, way, pass).total();
    let fits = |way, pass: &Pass| need(way, pass) <= machine.memory;
    let row = |way: Way| {
        let pass = batch.pass();
        let rank = rank(predictor, machine, way, &pass);
        let total = rank.total();
        if machine.memory == Machine::UNKNOWN {
            let unknown = Limit::Unknown;
            return Row { way, rank, total, fit: Fit::Unknown, longest: unknown, rows: unknown };
        }
        let long = greatest(longest.min(SEARCH), |length| fits(way, &Pass::of(1, length, None)));
        let cut = batch.most.map(|most| (most / batch.length).max(1));
        let many = greatest(cut.unwrap_or(SEARCH / batch.length.max(1)).max(1), |rows| {
            fits(way, &Pass::of(rows, batch.length, None))
        });
        Row {
            way,
            rank,
            total,
            fit: Fit::of(total, machine.memory),
            longest: if long == 0 { Limit::Nothing } else { Limit::UpTo(long) },
            rows: match many {
                0 => Limit::Nothing,
                _ if cut == Some(many) => Limit::Any,
                _ => Limit::UpTo(many),
            },
        }
    };
    let rows: Vec<Row> = Way::all(machine, predictor.job.optimizer.offloaded).into_iter().map(row).collect();
    let candidates =
        || rows.iter().enumerate().filter(|(_, row)| machine.ranks == 1 || row.way.strategy != Strategy::Single);
    let fitting = |fit| candidates().filter(|(_, row)| row.fit == fit).min_by_key(|(_, row)| row.way.rank());
    let recommended = fitting(Fit::Fits).or_else(|| fitting(Fit::Tight)).map(|(at, _)| at);
    let (mut reason, mut helps) = (String::new(), Vec::new());
    if let Some(at) = recommended {
        reason = why(&rows, at, machine);
    } else if machine.memory == Machine::UNKNOWN {
        let each = candidates().map(|(_, row)| format!("{} {}", row.way.name(), least_memory(row.total)));
        reason = format!("the memory of a GPU is not known here. It fits: {}", each.collect::<Vec<_>>().join(", "));
    } else if let Some((_, smallest)) = candidates().min_by_key(|(_, row)| row.total) {
        reason = format!(
            "nothing fits: the smallest, {}, needs {} a rank, and there are {}",
            smallest.way.name(),
            human_bytes(smallest.total),
            human_bytes(machine.memory)
        );
        helps = help(predictor, machine, smallest.way, batch);
    }
    Plan { rows, recommended, reason, helps }
}

/// The memory of GPUs on the market, in GiB.
const SOLD: [u64; 13] = [4, 6, 8, 11, 12, 16, 20, 24, 32, 40, 48, 80, 141];

/// The smallest GPU on which `need` bytes fit, such as `from 24 GiB`.
fn least_memory(need: u64) -> String {
    let least = SOLD.into_iter().find(|gib| Fit::of(need, gib << 30) == Fit::Fits);
    least.map_or_else(|| "nowhere".to_owned(), |gib| format!("from {gib} GiB"))
}

/// The sentence that says why the row at `at` is recommended.
fn why(rows: &[Row], at: usize, machine: &Machine) -> String {
    let (row, spare) = (&rows[at], machine.memory - rows[at].total);
    let whole = rows.iter().find(|row| matches!(row.way.strategy, Strategy::Ddp | Strategy::Single));
    let whole = whole.map_or(row.total, |row| row.total);
    let fact = match row.way {
        Way { offload_optimizer: true, .. } => {
            format!(
                "it fits with train.offload_optimizer: true; the optimizer's {} go to host memory",
                human_bytes(row.rank.host)
            )
        }
        Way { strategy: Strategy::Single | Strategy::Ddp, .. } if machine.ranks == 1 => "it fits as it is".to_owned(),
        Way { strategy: Strategy::Ddp | Strategy::Single | Strategy::Dp, .. } => {
            "a whole copy fits each device, so that nothing but gradients travels".to_owned()
        }
        Way { strategy: Strategy::Zero1, .. } => {
            format!("a whole copy needs {}; a share of the optimizer's state each is enough", human_bytes(whole))
        }
        Way { strategy: Strategy::Zero2, .. } => {
            format!("a whole copy needs {}; shares of optimizer and gradients are enough", human_bytes(whole))
        }
        Way { strategy: Strategy::Zero3 | Strategy::Fsdp, .. } => {
            format!("a whole copy needs {}; weights have to be shared too", human_bytes(whole))
        }
    };
    let tight = if row.fit == Fit::Tight { "; less than 5 % is left: a longer row may be too much" } else { "" };
    format!("{}: {fact} ({} of {} stay free){tight}", row.way.name(), human_bytes(spare), human_bytes(machine.memory))
}

/// Single changes of the configuration that lower the need of this way, each with the new need in bytes, the most
/// helpful first.
fn help(predictor: &Predictor<'_>, machine: &Machine, way: Way, batch: &Batch) -> Vec<(String, u64)> {
    let (job, pass) = (&predictor.job, batch.pass());
    let now = rank(predictor, machine, way, &pass).total();
    let mut changes: Vec<(String, Job<'_>, Pass)> = Vec::new();
    let mut change = |text: &str, change: &dyn Fn(&mut Job<'_>)| {
        let mut other = job.clone();
        change(&mut other);
        changes.push((text.to_owned(), other, pass));
    };
    if job.full < job.arch.num_hidden_layers {
        change("train.gradient_checkpointing: true", &|job| job.full = usize::MAX);
    }
    if !job.narrow && machine.device == Device::Cpu {
        change("train.bf16: true", &|job| job.narrow = true);
    }
    if job.base.quantized.is_none() && !job.trained.adapters.is_empty() {
        let quantized = Some(Storage::FourBit { double: true });
        change("tuning.mode: qlora", &|job| job.base = Base { quantized, ..job.base.clone() });
    }
    if machine.device == Device::Gpu && !job.base.on_host && predictor.segments().iter().any(|it| it.frozen > 0) {
        change("train.offload_param: true", &|job| job.base.on_host = true);
    }
    let wide = job.base.matrices == Storage::F32 || !job.base.float32.is_empty();
    if wide && !job.trained.tensors.contains("model.layers.0.self_attn.q_proj.weight") {
        let base = || Base { matrices: Storage::Bf16, float32: Arc::default(), ..job.base.clone() };
        change("model.dtype: bfloat16", &|job| job.base = base());
    }
    if batch.pass().tokens > batch.length {
        changes.push(("train.batch_size: 1".to_owned(), job.clone(), Pass::of(1, batch.length, batch.most)));
    }
    let half = batch.length / 2;
    changes.push((format!("model.max_seq_len: {half}"), job.clone(), Pass::of(batch.rows, half, batch.most)));
    let need = |(text, job, pass): (String, Job<'_>, Pass)| {
        (text, rank(&predictor.with_job(job), machine, way, &pass).total())
    };
    let mut helps: Vec<(String, u64)> = changes.into_iter().map(need).filter(|(_, total)| *total < now).collect();
    helps.sort_by_key(|(_, total)| *total);
    helps
}

#[cfg(test)]
mod tests;
