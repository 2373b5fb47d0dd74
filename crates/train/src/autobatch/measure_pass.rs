//! Measures real forward and backward passes: the bytes that the process held at most, and the time. It changes nothing
//! that a run goes on from: weights, optimizer and data stay as they are, gradients are cleared by every step anyway, and
//! dropout masks are counted, not drawn.
use std::time::Instant;

use crate::memory_prediction::MemoryModel;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::memory::{self, Budget};
use tunesmith_comm::Collectives;
use tunesmith_comm::single::Single;
use tunesmith_config::Checkpointing;
use tunesmith_data::batch::IGNORE;
use tunesmith_data::{Batch, Sampler, Split};
use tunesmith_model::Model;
use tunesmith_plan::memory::Pass;
use tunesmith_plan::{grouped, human_bytes};

/// Of the budget so much is left for what no pass shows: the update, evaluations, the files of a checkpoint.
const MARGIN: u64 = 32;
/// A pass of fewer tokens tells nothing: activations come in panels of 16.
pub const LEAST: usize = 16;
/// A pass is made again until so many seconds are spent on it, or so many times.
const LONG: f64 = 3.0;
const ROUNDS: u32 = 3;

/// One measured pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Tokens of the pass, all with a label.
    pub tokens: usize,
    /// What blocks kept.
    pub checkpointing: Checkpointing,
    /// The most that the process held, with what the run adds later; nothing where that exceeds the budget.
    pub bytes: Option<u64>,
    /// Wall time; 0 where it did not fit.
    pub seconds: f64,
}

impl Measured {
    /// Whether it stays within the budget.
    pub const fn fits(&self) -> bool {
        self.bytes.is_some()
    }

    /// Tokens per second.
    pub fn speed(&self) -> f64 {
        if self.seconds > 0.0 { self.tokens as f64 / self.seconds } else { 0.0 }
    }
}

/// Bytes by tokens of a pass: `fixed + per_token * tokens`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Line {
    /// Weights, optimizer, gradients, data.
    pub fixed: f64,
    /// Activations.
    pub per_token: f64,
}

impl Line {
    /// Through the shortest and the longest pass that fit; nothing with fewer than two lengths.
    pub fn through(passes: &[Measured]) -> Option<Self> {
        let points = || passes.iter().filter_map(|pass| Some((pass.tokens as f64, pass.bytes? as f64)));
        let low = points().min_by(|one, other| one.0.total_cmp(&other.0))?;
        let high = points().max_by(|one, other| one.0.total_cmp(&other.0))?;
        (high.0 > low.0).then(|| {
            let per_token = ((high.1 - low.1) / (high.0 - low.0)).max(1.0);
            Self { fixed: low.1 - per_token * low.0, per_token }
        })
    }

    /// The most tokens whose pass stays within `bytes`.
    pub fn tokens_within(&self, bytes: u64) -> usize {
        ((bytes as f64 - self.fixed) / self.per_token).max(0.0) as usize
    }
}

/// Measures passes of the longest rows, on all ranks alike: what it tells is the worst of any rank, and the same on each.
pub struct PassMeasurer<'a> {
    model: &'a mut Model,
    split: &'a Split,
    sampler: &'a Sampler,
    comm: &'a dyn Collectives,
    /// Ranks of this process: their passes are held side by side.
    together: u64,
    /// The rows, longest first, with their tokens.
    rows: Vec<(u32, u32)>,
    /// Bytes that the run takes later, beside any pass.
    later: u64,
    /// What may be held, less `later` and the margin, while this one lives: on one rank of a process.
    _scope: Option<Budget>,
    /// What may be held in all.
    whole: u64,
    /// Every pass so far.
    pub passes: Vec<Measured>,
}

/// The memory budget, and the part of it that the run allocates later.
struct Bytes {
    whole: u64,
    later: u64,
}

impl<'a> PassMeasurer<'a> {
    /// For a model that is loaded, with the rows to train on in their order. `later` are the bytes that the run takes
    /// beside it and its passes, in the whole process. Every rank of `comm` makes one, and the same calls to it.
    ///
    /// # Errors
    /// [`Kind::Peer`]: a rank is gone.
    pub fn new(
        model: &'a mut Model,
        split: &'a Split,
        sampler: &'a Sampler,
        later: u64,
        comm: &'a dyn Collectives,
    ) -> Result<Self> {
        let together = if comm.shares_memory() { comm.world().size as u64 } else { 1 };
        let budgets = comm.collect(&[memory::budget().unwrap_or(u64::MAX)])?;
        let whole = budgets.into_iter().min().unwrap_or(u64::MAX);
        Ok(Self::made(model, split, sampler, comm, Bytes { whole, later }, together))
    }

    /// For one rank alone, whatever the others do; it shares its process with so many ranks, itself included.
    pub fn alone(model: &'a mut Model, split: &'a Split, sampler: &'a Sampler, together: u64) -> Self {
        let whole = memory::budget().unwrap_or(u64::MAX);
        Self::made(model, split, sampler, &Single, Bytes { whole, later: 0 }, together)
    }

    fn made(
        model: &'a mut Model,
        split: &'a Split,
        sampler: &'a Sampler,
        comm: &'a dyn Collectives,
        Bytes { whole, later }: Bytes,
        together: u64,
    ) -> Self {
        let tokens = |row: usize| sampler.row(row).iter().map(|&part| split.length(part)).sum::<usize>();
        let mut rows: Vec<(u32, u32)> = (0..sampler.rows()).map(|row| (row as u32, tokens(row) as u32)).collect();
        rows.sort_unstable_by_key(|&(row, tokens)| (std::cmp::Reverse(tokens), row));
        // The budget is the process's: of ranks that share one, the first holds it.
        let holds = !comm.shares_memory() || comm.world().is_first();
        let scope = holds.then(|| Budget::new(whole.saturating_sub(whole / MARGIN).saturating_sub(later)));
        Self { model, split, sampler, comm, together, rows, later, _scope: scope, whole, passes: Vec::new() }
    }

    /// Tokens of every row, longest first.
    pub fn lengths(&self) -> Vec<usize> {
        self.rows.iter().map(|&(_, tokens)| tokens as usize).collect()
    }

    /// Tokens of the longest sequence, which no pass cuts.
    pub fn longest(&self) -> usize {
        self.split.longest_sequence()
    }

    /// Decoder blocks of the model.
    pub const fn blocks(&self) -> usize {
        self.model.blocks()
    }

    /// The most that a pass may hold in all, in bytes.
    pub const fn limit(&self) -> u64 {
        self.whole.saturating_sub(self.whole / MARGIN)
    }

    /// One forward and backward over `tokens` tokens of the longest rows, every one labelled: no pass of so many tokens
    /// holds more. Again where that takes little time, so that the time is one of a warm pass. Of ranks that share a process
    /// the first walks alone for the bytes, which are then counted for each of them, and all together for the time.
    ///
    /// # Errors
    /// The data cannot be read, or a rank is gone; not that it does not fit.
    pub fn pass(&mut self, tokens: usize, checkpointing: Checkpointing) -> Result<Measured> {
        let known = |pass: &&Measured| pass.tokens == tokens && pass.checkpointing == checkpointing;
        if let Some(known) = self.passes.iter().find(known) {
            return Ok(*known);
        }
        let batch = self.worst(tokens)?;
        self.model.release();
        self.model.set_checkpointing(checkpointing);
        self.model.params.zero_grads();
        let (most, apart) = (self.limit(), self.comm.shares_memory());
        let within = |bytes: u64, later: u64| bytes.saturating_add(later) <= most;
        let mut found = self.round(&batch, apart)?.filter(|&(bytes, _)| within(bytes, self.later));
        // The fastest of some that are warm; where one takes long, two tell no more than one.
        let (mut spent, mut fastest) = (0.0, f64::INFINITY);
        for round in 0..ROUNDS {
            let Some((bytes, seconds)) = found else { break };
            // A rank of several threads alone tells nothing of the time.
            fastest = if apart && round == 0 { f64::INFINITY } else { fastest.min(seconds) };
            spent += seconds;
            if spent >= LONG && fastest.is_finite() {
                break;
            }
            let again = self.round(&batch, false)?;
            found = again.map(|(more, seconds)| (if apart { bytes } else { bytes.max(more) }, seconds));
            found = found.filter(|&(bytes, _)| within(bytes, self.later));
        }
        let found = found.map(|(bytes, seconds)| (bytes, fastest.min(seconds)));
        self.model.release();
        let (bytes, seconds) = found.unzip();
        let bytes = bytes.map(|bytes| bytes + self.later);
        let measured = Measured { tokens, checkpointing, bytes, seconds: seconds.unwrap_or(0.0) };
        self.passes.push(measured);
        Ok(measured)
    }

    /// A pass on every rank at once, or on the first alone: the most bytes that a process holds while each of its ranks is
    /// where a pass is fullest, and the longest time; nothing where it does not fit on some rank.
    fn round(&mut self, batch: &Batch, first_alone: bool) -> Result<Option<(u64, f64)>> {
        self.comm.barrier()?;
        let first = self.comm.world().is_first();
        let mut own = [0.0, 0.0];
        if first || !first_alone {
            let before = memory::live();
            if first || !self.comm.shares_memory() {
                memory::reset_peak();
            }
            own = self.timed(batch)?.map_or([f64::INFINITY; 2], |seconds| {
                let grown = memory::peak().saturating_sub(before);
                [(before + self.together * grown) as f64, seconds]
            });
        }
        // Where weights are shared, the others may still be at a pass that did not fit here.
        self.model.stand_by()?;
        let all = self.comm.collect(&own)?;
        let worst = |at: usize| all.chunks_exact(2).map(|rank| rank[at]).fold(0.0, f64::max);
        Ok(worst(0).is_finite().then(|| (worst(0) as u64, worst(1))))
    }

    /// Seconds of one pass; nothing if it does not fit.
    fn timed(&mut self, batch: &Batch) -> Result<Option<f64>> {
        let scale = 1.0 / batch.label_tokens().max(1) as f32;
        let began = Instant::now();
        match self.model.forward_backward(batch, scale, 1.0, 0) {
            Ok(_) => Ok(Some(began.elapsed().as_secs_f64())),
            Err(error) if error.kind() == Kind::Memory => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The longest rows, the last of them cut, to `tokens` tokens in all.
    ///
    /// # Errors
    /// The data cannot be read.
    pub fn worst(&self, tokens: usize) -> Result<Batch> {
        let mut worst = Batch { cu_seqlens: vec![0], ..Batch::default() };
        for &(row, _) in self.rows.iter().cycle() {
            let rest = tokens - worst.tokens.len();
            if rest == 0 {
                break;
            }
            for batch in self.split.batches(&vec![vec![self.sampler.row(row as usize)]])? {
                for ends in batch.cu_seqlens.windows(2) {
                    let ids = &batch.tokens[ends[0]..ends[1]];
                    let ids = &ids[..ids.len().min(tokens - worst.tokens.len())];
                    let mut labels: Vec<i32> = ids.iter().map(|&id| i32::try_from(id).unwrap_or(IGNORE)).collect();
                    if self.model.arch.score.is_some() {
                        // Only a row's last token has a label, whatever it is.
                        labels.fill(IGNORE);
                        labels.push(0);
                    }
                    worst.push(ids, &labels);
                }
            }
        }
        Ok(worst)
    }

    /// The error for a row of `tokens` tokens that does not fit even alone, with what would help, in numbers.
    ///
    /// # Errors
    /// The data cannot be read, or a rank is gone.
    pub fn too_long(&mut self, tokens: usize, checkpointing: Checkpointing, memory: &MemoryModel<'_>) -> Result<Error> {
        let mut help = Vec::new();
        let full = self.pass(tokens, Checkpointing::FULL)?;
        if let Some(bytes) = full.bytes.filter(|_| checkpointing != Checkpointing::FULL) {
            help.push(format!("train.gradient_checkpointing: true (then {} at most, measured)", human_bytes(bytes)));
        }
        // Shorter and shorter, until two lengths fit and tell the rest.
        let fitting = |passes: &[Measured]| -> Vec<Measured> {
            passes.iter().filter(|pass| pass.checkpointing == checkpointing && pass.fits()).copied().collect()
        };
        let mut length = tokens / 2;
        while length >= LEAST && fitting(&self.passes).len() < 2 {
            self.pass(length, checkpointing)?;
            length /= 2;
        }
        let line = Line::through(&fitting(&self.passes));
        let (mut needs, mut over) = (String::from("more than that"), u64::MAX);
        if let Some(line) = line {
            let bytes = (line.fixed + line.per_token * tokens as f64) as u64;
            needs = format!(
                "about {}: {} fixed and {} a token",
                human_bytes(bytes),
                human_bytes(line.fixed.max(0.0) as u64),
                human_bytes(line.per_token as u64)
            );
            over = bytes.saturating_sub(self.limit());
            let longest = line.tokens_within(self.limit());
            if longest >= LEAST {
                help.push(format!("model.max_seq_len: {longest}"));
            }
        }
        let pass = Pass { tokens: tokens as u64, longest: tokens as u64, labelled: tokens as u64 };
        for (change, bytes) in memory.savings(checkpointing, &pass)? {
            // Each rank of a process saves it.
            let bytes = bytes * self.together;
            let enough = if bytes >= over { ", enough alone" } else { "" };
            help.push(format!("{change} (saves about {}{enough})", human_bytes(bytes)));
        }
        let budget = human_bytes(self.whole);
        Ok(Error::memory(format!(
            "a row of {} tokens does not fit into the memory budget of {budget}: it needs {needs}",
            grouped(tokens as u64)
        ))
        .hint(format!("what helps: {}; or a larger train.memory_budget", help.join("; "))))
    }
}

impl Drop for PassMeasurer<'_> {
    fn drop(&mut self) {
        self.model.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_leads_through_what_fits() {
        let pass = |tokens, bytes| Measured { tokens, checkpointing: Checkpointing::CHEAP, bytes, seconds: 0.5 };
        let line = Line::through(&[pass(100, Some(1_200)), pass(50, Some(1_100)), pass(400, None)]).unwrap();
        assert_eq!((line.fixed, line.per_token), (1_000.0, 2.0));
        assert_eq!(line.tokens_within(1_700), 350);
        assert_eq!(line.tokens_within(10), 0);
        assert_eq!(Line::through(&[pass(100, Some(5)), pass(200, None)]), None);
        assert_eq!(pass(100, None).speed(), 200.0);
    }
}
