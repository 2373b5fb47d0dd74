//! The memory of a rank under each strategy for sharing a run among ranks, whether that fits, and which strategy to
//! take.
//!
//! `ddp` copies everything to every rank. `ZeRO` (Rajbhandari et al., 2020, <https://arxiv.org/abs/1910.02054>) gives
//! each rank a share of the optimizer's state (`zero1`), of the gradients too (`zero2`), or of all weights too
//! (`zero3`; `fsdp` is the same). Shared weights are gathered a segment at a time, the next one while the last
//! computes. What is offloaded lies in the host's memory instead of the device's.
use super::human_bytes;
use super::memory::{Base, Breakdown, Device, Job, NCCL, Pass, Predictor, Storage};
use serde::Serialize;

/// How ranks share a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// One rank.
    Single,
    /// A copy on each device of one process (`DataParallel`); the first device sums the gradients.
    Dp,
    /// A copy on each rank.
    Ddp,
    /// A copy on each rank, but a share of the optimizer's state.
    Zero1,
    /// As `zero1`, and a share of the gradients.
    Zero2,
    /// As `zero2`, and a share of the weights.
    Zero3,
    /// As `zero3`, under PyTorch's name.
    Fsdp,
}

impl Strategy {
    /// All, in the order of the table.
    pub const ALL: [Self; 7] = [Self::Single, Self::Dp, Self::Ddp, Self::Zero1, Self::Zero2, Self::Zero3, Self::Fsdp];

    /// As configurations write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Dp => "dp",
            Self::Ddp => "ddp",
            Self::Zero1 => "zero1",
            Self::Zero2 => "zero2",
            Self::Zero3 => "zero3",
            Self::Fsdp => "fsdp",
        }
    }

    /// The share of the devices' speed that remains, in 0..=1. These are published figures of others, not measurements:
    /// about 95 % where gradients alone travel, 85 % where weights do.
    pub const fn efficiency(self) -> f64 {
        match self {
            Self::Single => 1.0,
            Self::Dp => 0.80,
            Self::Ddp | Self::Zero1 | Self::Zero2 => 0.95,
            Self::Zero3 | Self::Fsdp => 0.85,
        }
    }

    const fn shards_weights(self) -> bool {
        matches!(self, Self::Zero3 | Self::Fsdp)
    }

    /// Whether each rank has a share of the optimizer's state.
    pub const fn shards_optimizer(self) -> bool {
        matches!(self, Self::Zero1 | Self::Zero2) || self.shards_weights()
    }
}

/// A strategy, and what it offloads to the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Way {
    /// The strategy.
    pub strategy: Strategy,
    /// The optimizer's state lies in the host's memory.
    pub offload_optimizer: bool,
    /// The weights, trained ones included, lie in the host's memory.
    pub offload_weights: bool,
}

impl Way {
    /// The strategy without offload.
    pub const fn plain(strategy: Strategy) -> Self {
        Self { strategy, offload_optimizer: false, offload_weights: false }
    }

    /// All ways that make sense on a machine, in the order of the table.
    fn all(machine: &Machine) -> Vec<Self> {
        let mut ways = Vec::new();
        for strategy in Strategy::ALL {
            let alone = machine.ranks == 1;
            if alone && !matches!(strategy, Strategy::Single | Strategy::Zero3) {
                continue;
            }
            let plain = Self::plain(strategy);
            if !(alone && strategy == Strategy::Zero3) {
                ways.push(plain);
            }
            // On the CPU the host's memory is the device's.
            if machine.device == Device::Cpu || strategy == Strategy::Dp {
                continue;
            }
            if alone || strategy != Strategy::Single {
                if !(alone && strategy == Strategy::Zero3) {
                    ways.push(Self { offload_optimizer: true, ..plain });
                }
                if strategy.shards_weights() {
                    ways.push(Self { offload_optimizer: true, offload_weights: true, ..plain });
                }
            }
        }
        ways
    }

    /// Its name in tables, such as `zero3 + offload`.
    pub fn name(self) -> String {
        let offload = match (self.offload_optimizer, self.offload_weights) {
            (_, true) => " + offload all",
            (true, false) => " + offload",
            _ => "",
        };
        format!("{}{offload}", self.strategy.name())
    }

    /// Its place in the order from fast to slow: of those that fit, the lowest is recommended.
    const fn rank(self) -> u8 {
        let strategy = match self.strategy {
            Strategy::Single | Strategy::Ddp => 0,
            Strategy::Zero1 => 1,
            Strategy::Zero2 => 2,
            Strategy::Fsdp => 3,
            Strategy::Zero3 => 4,
            Strategy::Dp => 5,
        };
        strategy
            + if self.offload_weights {
                20
            } else if self.offload_optimizer {
                10
            } else {
                0
            }
    }
}

/// The devices that ranks run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Whether ranks compute on CPUs or on GPUs.
    pub device: Device,
    /// How many ranks; each has a device of its own.
    pub ranks: u64,
    /// Bytes of memory that each rank has.
    pub memory: u64,
}

/// The micro-batches of a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Batch {
    /// Rows of a micro-batch.
    pub rows: u64,
    /// Tokens of a row.
    pub length: u64,
    /// The most tokens of a pass: a larger micro-batch is cut into several passes. `None` never cuts.
    pub most: Option<u64>,
}

impl Batch {
    /// The largest pass of a micro-batch.
    pub fn pass(&self) -> Pass {
        Pass::of(self.rows, self.length, self.most)
    }
}

/// Whether a need fits the memory that there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fit {
    /// It fits, with at least 5 % to spare.
    Fits,
    /// It fits, with less than 5 % to spare.
    Tight,
    /// It does not fit.
    No,
}

impl Fit {
    fn of(need: u64, memory: u64) -> Self {
        match need {
            _ if need <= memory / 20 * 19 => Self::Fits,
            _ if need <= memory => Self::Tight,
            _ => Self::No,
        }
    }

    /// Its word in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fits => "fits",
            Self::Tight => "tight",
            Self::No => "no",
        }
    }
}

/// How far something can grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Limit {
    /// Not even the least fits.
    Nothing,
    /// Up to so many tokens or rows.
    UpTo(u64),
    /// Without limit: micro-batches are cut into passes.
    Any,
}

/// One line of the table: a way, and what it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The way.
    pub way: Way,
    /// The bytes of the fullest rank, part by part.
    pub rank: Breakdown,
    /// The bytes of the fullest rank in all.
    pub total: u64,
    /// Whether it fits.
    pub fit: Fit,
    /// Tokens of the longest row that fits, alone in its pass.
    pub longest: Limit,
    /// The largest micro-batch of rows as long as the configuration's.
    pub rows: Limit,
}

/// The table, and the recommended way.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// A line for each way.
    pub rows: Vec<Row>,
    /// The index of the recommended one in `rows`, if any fits.
    pub recommended: Option<usize>,
    /// Why that one is recommended, or why none is: a sentence.
    pub reason: String,
    /// Where none fits: single changes of the configuration that help, and the bytes that the smallest way needs with
    /// each.
    pub helps: Vec<(String, u64)>,
}

/// The search for longer rows and larger micro-batches ends here, in tokens.
const SEARCH: u64 = 1 << 22;

/// The greatest number from 1 to `most` for which `fits` holds, or 0; `fits` holds up to some number and not beyond.
fn greatest(most: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut yes, mut no) = (0, most + 1);
    while yes + 1 < no {
        let middle = u64::midpoint(yes, no);
        if fits(middle) { yes = middle } else { no = middle }
    }
    yes
}

/// The bytes of the fullest rank in `pass` under `way`, part by part. `predictor` knows what a rank alone needs.
pub fn rank(predictor: &Predictor<'_>, machine: &Machine, way: Way, pass: &Pass) -> Breakdown {
    let mut rank = predictor.predict(pass);
    let share = |bytes: u64| bytes.div_ceil(machine.ranks.max(1));
    let (gradients, strategy) = (rank.gradients, way.strategy);
    // What is sent, and what arrives.
    let bucket = predictor.job.bucket;
    let on_its_way = 2 * bucket.min(gradients);
    let segments = predictor.segments();
    match strategy {
        // Threads of a process look into each other's memory; on GPUs the first device sums.
        Strategy::Dp if machine.device == Device::Gpu => rank.collectives = gradients,
        Strategy::Single | Strategy::Dp => {}
        _ => rank.collectives = on_its_way,
    }
    if strategy.shards_optimizer() {
        // The shares are put together as they are written: there is no copy to write from.
        (rank.optimizer, rank.saving) = (share(rank.optimizer), 0);
    }
    let whole = 4 * predictor.job.trained.values;
    let sums = if predictor.job.narrow_gradients { whole / 2 } else { whole };
    let shares = strategy == Strategy::Zero2 || strategy.shards_weights();
    if shares || predictor.job.narrow_gradients && machine.ranks > 1 && strategy != Strategy::Single {
        // A segment's gradients are whole until they are summed, while backward fills the next; those of a table that the
        // head shares wait for the embedding's.
        let trained: Vec<u64> = segments.iter().map(|segment| segment.trained).collect();
        let (waits, rest) = if predictor.job.arch.ties_head() { trained.split_at(1) } else { trained.split_at(0) };
        let two = rest.windows(2).map(|pair| pair[0] + pair[1]).max().unwrap_or(0);
        let kept = if shares { share(sums) } else { sums };
        rank.gradients = kept + (two + waits.iter().sum::<u64>()).min(whole);
        if strategy != Strategy::Dp {
            rank.collectives = 2 * bucket.min(trained.into_iter().max().unwrap_or(0));
        }
    }
    if strategy.shards_weights() && (machine.ranks > 1 || way.offload_weights) {
        let gathered = segments.windows(2).map(|pair| pair.iter().map(|it| it.frozen + it.trained).sum::<u64>());
        rank.collectives += gathered.max().unwrap_or(0);
        // Every rank needs the constants of all rows.
        let constants = predictor.job.constants();
        (rank.weights, rank.trained) = (share(rank.weights - constants) + constants, share(rank.trained));
        let optimizer = &predictor.job.optimizer;
        rank.passing = share(optimizer.scratch.max(optimizer.publishing));
    }
    if way.offload_optimizer {
        rank.collectives += 2 * bucket.min(rank.optimizer);
        rank.host += std::mem::take(&mut rank.optimizer);
    }
    if way.offload_weights {
        rank.host += std::mem::take(&mut rank.weights) + std::mem::take(&mut rank.trained);
    }
    if machine.device == Device::Gpu {
        // Checkpoints are copied to the host.
        rank.host += std::mem::take(&mut rank.saving);
    }
    if machine.device == Device::Gpu && machine.ranks > 1 && strategy != Strategy::Single {
        rank.program += NCCL;
    }
    rank
}

/// Plans every way on a machine, and recommends the fastest that fits. `longest` is the most tokens of a row that the
/// model allows.
pub fn plan(predictor: &Predictor<'_>, machine: &Machine, batch: &Batch, longest: u64) -> Plan {
    let need = |way, pass: &Pass| rank(predictor, machine, way, pass).total();
    let fits = |way, pass: &Pass| need(way, pass) <= machine.memory;
    let row = |way: Way| {
        let pass = batch.pass();
        let rank = rank(predictor, machine, way, &pass);
        let long = greatest(longest.min(SEARCH), |length| fits(way, &Pass::of(1, length, None)));
        let cut = batch.most.map(|most| (most / batch.length).max(1));
        let many = greatest(cut.unwrap_or(SEARCH / batch.length.max(1)).max(1), |rows| {
            fits(way, &Pass::of(rows, batch.length, None))
        });
        Row {
            way,
            rank,
            total: rank.total(),
            fit: Fit::of(rank.total(), machine.memory),
            longest: if long == 0 { Limit::Nothing } else { Limit::UpTo(long) },
            rows: match many {
                0 => Limit::Nothing,
                _ if cut == Some(many) => Limit::Any,
                _ => Limit::UpTo(many),
            },
        }
    };
    let rows: Vec<Row> = Way::all(machine).into_iter().map(row).collect();
    let candidates =
        || rows.iter().enumerate().filter(|(_, row)| machine.ranks == 1 || row.way.strategy != Strategy::Single);
    let fitting = |fit| candidates().filter(|(_, row)| row.fit == fit).min_by_key(|(_, row)| row.way.rank());
    let recommended = fitting(Fit::Fits).or_else(|| fitting(Fit::Tight)).map(|(at, _)| at);
    let (mut reason, mut helps) = (String::new(), Vec::new());
    if let Some(at) = recommended {
        reason = why(&rows, at, machine);
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

/// The sentence that says why the row at `at` is recommended.
fn why(rows: &[Row], at: usize, machine: &Machine) -> String {
    let (row, spare) = (&rows[at], machine.memory - rows[at].total);
    let whole = rows.iter().find(|row| matches!(row.way.strategy, Strategy::Ddp | Strategy::Single));
    let whole = whole.map_or(row.total, |row| row.total);
    let fact = match row.way {
        Way { offload_weights: true, .. } => {
            format!(
                "a rank's share of everything needs more; with weights and optimizer in host memory it needs {}",
                human_bytes(row.total)
            )
        }
        Way { offload_optimizer: true, .. } => {
            format!("without offload it does not fit; the optimizer's {} go to host memory", human_bytes(row.rank.host))
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

/// Single changes of the configuration, and what the way needs with each, the most helpful first.
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
    if job.base.matrices == Storage::F32 && !job.trained.tensors.contains("model.layers.0.self_attn.q_proj.weight") {
        change("model.dtype: bfloat16", &|job| job.base.matrices = Storage::Bf16);
    }
    if batch.pass().tokens > batch.length {
        changes.push(("train.batch_size: 1".to_owned(), job.clone(), Pass::of(1, batch.length, batch.most)));
    }
    let half = batch.length / 2;
    changes.push((format!("model.max_seq_len: {half}"), job.clone(), Pass::of(batch.rows, half, batch.most)));
    let need = |(text, job, pass): (String, Job<'_>, Pass)| {
        (text, rank(&Predictor::new(job, machine.device), machine, way, &pass).total())
    };
    let mut helps: Vec<(String, u64)> = changes.into_iter().map(need).filter(|(_, total)| *total < now).collect();
    helps.sort_by_key(|(_, total)| *total);
    helps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::testing::{arch, job};

    fn planned(memory: u64, full: bool) -> Plan {
        let arch = arch();
        let machine = Machine { device: Device::Gpu, ranks: 4, memory };
        let batch = Batch { rows: 2, length: 128, most: None };
        plan(&Predictor::new(job(&arch, full), Device::Gpu), &machine, &batch, 4096)
    }

    fn total(plan: &Plan, name: &str) -> u64 {
        plan.rows.iter().find(|row| row.way.name() == name).map_or(0, |row| row.total)
    }

    #[test]
    fn what_is_shared_shrinks_and_the_fastest_that_fits_is_taken() {
        let all = planned(1 << 40, true);
        let ways = ["ddp", "zero1", "zero2", "zero3", "zero3 + offload", "zero3 + offload all"];
        assert!(total(&all, "ddp + offload") < total(&all, "ddp"));
        let totals = ways.map(|name| total(&all, name));
        assert!(totals.windows(2).all(|pair| pair[0] > pair[1] && pair[1] > 0), "{totals:?}");
        assert_eq!(total(&all, "fsdp"), total(&all, "zero3"));
        for (name, need) in ways.into_iter().zip(totals) {
            let taken = planned(need + need / 10, true);
            let chosen = taken.recommended.map(|at| taken.rows[at].way.name()).unwrap_or_default();
            let same = chosen == name || chosen == name.replace("zero3", "fsdp");
            assert!(same || total(&taken, &chosen) > need, "{name} needs {need}: {chosen}, {}", taken.reason);
        }
    }

    #[test]
    fn where_nothing_fits_it_says_what_would_help() {
        let none = planned(650 << 20, false);
        assert_eq!(none.recommended, None);
        assert!(none.reason.starts_with("nothing fits"), "{}", none.reason);
        assert!(none.helps.windows(2).all(|pair| pair[0].1 <= pair[1].1) && !none.helps.is_empty(), "{:?}", none.helps);
    }

    #[test]
    fn the_greatest_that_fits_is_found() {
        assert_eq!([0, 1, 7, 100].map(|most| greatest(64, |it| it <= most)), [0, 1, 7, 64]);
    }
}
