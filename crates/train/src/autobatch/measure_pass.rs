//! Measures the peak memory and the time of real forward and backward passes.
//!
//! Measuring does not change the run: weights, optimizer, and data stay as they are. Every step clears the gradients anyway,
//! and dropout masks depend on counters, not on the state of a generator.
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::memory_prediction::MemoryModel;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_comm::Collectives;
use tunesmith_comm::single::Single;
use tunesmith_config::Checkpointing;
use tunesmith_data::batch::{IGNORE, ImageRows};
use tunesmith_data::{Batch, Sampler, Split};
use tunesmith_device::memory::{self, Budget};
use tunesmith_model::Model;
use tunesmith_plan::memory::Pass;
use tunesmith_plan::{grouped, human_bytes};

/// The reciprocal of the share of the budget that passes leave free for the update, evaluations, and checkpoint files.
const MARGIN: u64 = 32;
/// Tokens of the shortest pass that is worth measuring: activations come in panels of 16 tokens.
pub(crate) const MIN_TOKENS: usize = 16;
/// Seconds after which a pass is not repeated any more.
const ENOUGH_SECONDS: f64 = 3.0;
/// Maximum repetitions of a pass.
const ROUNDS: u32 = 3;

/// Peak memory and time of one forward and backward pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Tokens of the pass; all have a label.
    pub tokens: usize,
    /// Which activations blocks saved for the backward pass.
    pub checkpointing: Checkpointing,
    /// Peak bytes of the process, including what the run allocates later; `None` if they exceed the budget.
    pub bytes: Option<u64>,
    /// Wall time; 0 if the pass did not fit.
    pub seconds: f64,
}

impl Measured {
    /// Whether the pass stays within the budget.
    pub const fn fits(&self) -> bool {
        self.bytes.is_some()
    }

    /// Tokens per second; 0 if the pass did not fit.
    pub fn speed(&self) -> f64 {
        if self.seconds > 0.0 { self.tokens as f64 / self.seconds } else { 0.0 }
    }
}

/// Memory of a pass by its tokens: `fixed + per_token * tokens` bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Line {
    /// Bytes of weights, optimizer, gradients, and data.
    pub fixed: f64,
    /// Bytes of activations per token.
    pub per_token: f64,
}

impl Line {
    /// The line through the shortest and the longest pass that fit; `None` with fewer than two lengths.
    pub fn through(passes: &[Measured]) -> Option<Self> {
        let points = || passes.iter().filter_map(|pass| Some((pass.tokens as f64, pass.bytes? as f64)));
        let low = points().min_by(|one, other| one.0.total_cmp(&other.0))?;
        let high = points().max_by(|one, other| one.0.total_cmp(&other.0))?;
        (high.0 > low.0).then(|| {
            let per_token = ((high.1 - low.1) / (high.0 - low.0)).max(1.0);
            Self { fixed: low.1 - per_token * low.0, per_token }
        })
    }

    /// The maximum tokens of a pass that stays within `bytes`.
    pub(crate) fn tokens_within(&self, bytes: u64) -> usize {
        ((bytes as f64 - self.fixed) / self.per_token).max(0.0) as usize
    }
}

/// Measures passes over the longest rows on all ranks. Every rank gets the same result: the worst of all ranks.
pub struct PassMeasurer<'a> {
    model: &'a mut Model,
    split: &'a Split,
    sampler: &'a Sampler,
    comm: &'a dyn Collectives,
    /// Ranks of this process, whose passes need memory at the same time.
    together: u64,
    /// Index and tokens of each row, longest first.
    rows: Vec<(u32, u32)>,
    /// See [`ImageRow::orders`].
    image_rows: [Vec<ImageRow>; 2],
    /// Maximum rows of a pass.
    most_rows: usize,
    /// The passes that need the most memory with more images than the longest rows have.
    of_images: Vec<(usize, Checkpointing)>,
    /// Bytes that the run allocates later, in addition to any pass.
    later: u64,
    /// Lowers the memory budget of the process by `later` and the margin until the measurer is dropped. Only one rank of each
    /// process holds it.
    _scope: Option<Budget>,
    /// The whole budget, in bytes.
    whole: u64,
    /// Every pass that was measured so far.
    pub passes: Vec<Measured>,
}

/// The memory budget, and the part of it that the run allocates later.
struct Bytes {
    whole: u64,
    later: u64,
}

/// A row with images.
#[derive(Debug, Clone, Copy)]
struct ImageRow {
    row: u32,
    tokens: u32,
    /// How many of its tokens are its images', at least one.
    of_images: u32,
}

impl ImageRow {
    /// The rows with images in two orders: by the share of their tokens that are images', and by their number.
    fn orders(split: &Split, sampler: &Sampler, rows: &[(u32, u32)]) -> [Vec<Self>; 2] {
        if !split.has_pictures() {
            return Default::default();
        }
        let shows = |&(row, tokens): &(u32, u32)| {
            let parts = sampler.row(row as usize);
            let shown = parts.iter().flat_map(|&part| split.pictures(part)).flatten();
            let of_images: usize = shown.map(|shown| shown.runs.iter().map(Range::len).sum::<usize>().max(1)).sum();
            (of_images > 0).then_some(Self { row, tokens, of_images: of_images as u32 })
        };
        let mut by_number: Vec<Self> = rows.iter().filter_map(shows).collect();
        by_number.sort_by_key(|row| Reverse(row.of_images));
        let mut by_share = by_number.clone();
        let share = |row: &Self| f64::from(row.of_images) / f64::from(row.tokens.max(1));
        by_share.sort_by(|one, other| share(other).total_cmp(&share(one)));
        [by_share, by_number]
    }

    /// The first rows that have at most `tokens` tokens together, but no more than `most`, and how many tokens are images'.
    fn fitting(order: &[Self], most: usize, tokens: usize) -> (Vec<Self>, usize) {
        let mut rest = tokens;
        let fits = |row: &&Self| {
            let fits = row.tokens as usize <= rest;
            rest -= if fits { row.tokens as usize } else { 0 };
            fits
        };
        let rows: Vec<Self> = order.iter().filter(fits).take(most).copied().collect();
        let of_images = rows.iter().map(|row| row.of_images as usize).sum();
        (rows, of_images)
    }
}

impl<'a> PassMeasurer<'a> {
    /// Creates a measurer for a loaded model. `budget` are the bytes that the process may hold, without a limit if `None`; `later`
    /// are those that it will allocate besides the model and its passes. Every rank of `comm` creates a measurer and makes the same calls to it.
    ///
    /// # Errors
    /// [`Kind::Peer`]: a rank is gone.
    pub fn new(
        model: &'a mut Model,
        split: &'a Split,
        sampler: &'a Sampler,
        (budget, later): (Option<u64>, u64),
        comm: &'a dyn Collectives,
    ) -> Result<Self> {
        let together = if comm.shares_memory() { comm.world().size as u64 } else { 1 };
        let budgets = comm.collect(&[budget.unwrap_or(u64::MAX)])?;
        let whole = budgets.into_iter().min().unwrap_or(u64::MAX);
        Ok(Self::made(model, split, sampler, comm, Bytes { whole, later }, together))
    }

    /// Creates a measurer for one rank that does not communicate. `together` is the number of ranks in its process, itself
    /// included.
    pub fn alone(model: &'a mut Model, split: &'a Split, sampler: &'a Sampler, together: u64) -> Self {
        let whole = memory::budget(model.device()).unwrap_or(u64::MAX);
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
        rows.sort_unstable_by_key(|&(row, tokens)| (Reverse(tokens), row));
        let image_rows = ImageRow::orders(split, sampler, &rows);
        // The budget belongs to the process: of ranks that share one, only the first lowers it.
        let holds = !comm.shares_memory() || comm.world().is_first();
        let budget = whole.saturating_sub(whole / MARGIN).saturating_sub(later);
        let scope = holds.then(|| Budget::new(model.device(), budget));
        Self {
            model,
            split,
            sampler,
            comm,
            together,
            rows,
            image_rows,
            most_rows: 1,
            of_images: Vec::new(),
            later,
            _scope: scope,
            whole,
            passes: Vec::new(),
        }
    }

    /// No pass will have more than `rows` rows; without this call, none has more than one. It matters only to rows with
    /// images: a few more tokens would be a few more images.
    pub const fn limit_rows(&mut self, rows: usize) {
        self.most_rows = rows;
    }

    /// Tokens of every row, longest first.
    pub fn lengths(&self) -> Vec<usize> {
        self.rows.iter().map(|&(_, tokens)| tokens as usize).collect()
    }

    /// Tokens of the longest sequence. A pass has at least one whole sequence.
    pub(crate) fn longest(&self) -> usize {
        self.split.longest_sequence()
    }

    /// Decoder blocks of the model.
    pub(crate) const fn blocks(&self) -> usize {
        self.model.blocks()
    }

    /// Maximum bytes of the process during a pass.
    pub const fn limit(&self) -> u64 {
        self.whole.saturating_sub(self.whole / MARGIN)
    }

    /// Measures a forward and backward pass over `tokens` tokens of the longest rows, all with a label. No pass with as many
    /// tokens needs much more memory: where other rows show more images, a pass over these counts too.
    ///
    /// Short passes are repeated, so that the time is that of a warm pass. If ranks share a process, the first rank alone
    /// measures the memory, which then counts once for each of them. For the time all run together.
    ///
    /// # Errors
    /// The data cannot be read, or a rank is gone. A pass that does not fit is not an error.
    pub fn pass(&mut self, tokens: usize, checkpointing: Checkpointing) -> Result<Measured> {
        let known = |pass: &&Measured| pass.tokens == tokens && pass.checkpointing == checkpointing;
        if let Some(known) = self.passes.iter().find(known) {
            return Ok(*known);
        }
        let batch = self.longest_rows(tokens)?;
        self.model.release();
        self.model.set_checkpointing(checkpointing);
        self.model.params.zero_grads();
        let (most, apart) = (self.limit(), self.comm.shares_memory());
        let within = |bytes: u64, later: u64| bytes.saturating_add(later) <= most;
        let mut found = self.round(&batch, apart)?.filter(|&(bytes, _)| within(bytes, self.later));
        // The fastest of a few warm passes counts; a long pass need not be repeated.
        let (mut spent, mut fastest) = (0.0, f64::INFINITY);
        for round in 0..ROUNDS {
            let Some((bytes, seconds)) = found else { break };
            // The time of a rank that runs alone is not that of all ranks together.
            fastest = if apart && round == 0 { f64::INFINITY } else { fastest.min(seconds) };
            spent += seconds;
            if spent >= ENOUGH_SECONDS && fastest.is_finite() {
                break;
            }
            let again = self.round(&batch, false)?;
            found = again.map(|(more, seconds)| (if apart { bytes } else { bytes.max(more) }, seconds));
            found = found.filter(|&(bytes, _)| within(bytes, self.later));
        }
        if let (Some((bytes, seconds)), Some(shows_more)) = (found, self.most_images(tokens, &batch)?) {
            self.model.release();
            let mut needs = Some(0);
            // The second pass finds buffers of the first and may need a little more.
            for _ in 0..2 {
                let Some(most) = needs else { break };
                needs = self.round(&shows_more, apart)?.map(|(more, _)| more.max(most));
                needs = needs.filter(|&bytes| within(bytes, self.later));
            }
            if needs.is_none_or(|more| more > bytes) {
                self.of_images.push((tokens, checkpointing));
            }
            found = needs.map(|more| (bytes.max(more), seconds));
        }
        let found = found.map(|(bytes, seconds)| (bytes, fastest.min(seconds)));
        self.model.release();
        let (bytes, seconds) = found.unzip();
        let bytes = bytes.map(|bytes| bytes + self.later);
        let measured = Measured { tokens, checkpointing, bytes, seconds: seconds.unwrap_or(0.0) };
        self.passes.push(measured);
        Ok(measured)
    }

    /// Runs one pass on every rank, or on the first alone. Returns the peak bytes of a process, as if all its ranks reached
    /// their peak at the same time, and the longest time; `None` if the pass does not fit on some rank.
    fn round(&mut self, batch: &Batch, first_alone: bool) -> Result<Option<(u64, f64)>> {
        self.comm.barrier()?;
        let first = self.comm.world().is_first();
        let mut own = [0.0, 0.0];
        if first || !first_alone {
            let device = self.model.device();
            let before = memory::live(device);
            if first || !self.comm.shares_memory() {
                memory::reset_peak(device);
            }
            own = self.timed(batch)?.map_or([f64::INFINITY; 2], |seconds| {
                let grown = memory::peak(device).saturating_sub(before);
                [(before + self.together * grown) as f64, seconds]
            });
        }
        // With sharded weights, other ranks may still run a pass that did not fit here.
        self.model.stand_by()?;
        let all = self.comm.collect(&own)?;
        let worst = |at: usize| all.chunks_exact(2).map(|rank| rank[at]).fold(0.0, f64::max);
        Ok(worst(0).is_finite().then(|| (worst(0) as u64, worst(1))))
    }

    /// Seconds of one pass; `None` if it does not fit.
    fn timed(&mut self, batch: &Batch) -> Result<Option<f64>> {
        let scale = 1.0 / batch.label_tokens().max(1) as f32;
        let began = Instant::now();
        match self.model.forward_backward(batch, scale, 1.0, 0) {
            Ok(_) => Ok(Some(began.elapsed().as_secs_f64())),
            Err(error) if error.kind() == Kind::Memory => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The batch of a measured pass that needed the most memory.
    ///
    /// # Errors
    /// The data cannot be read.
    pub fn heaviest(&self, tokens: usize, checkpointing: Checkpointing) -> Result<Batch> {
        let longest = self.longest_rows(tokens)?;
        let of_images = self.of_images.contains(&(tokens, checkpointing));
        Ok(if of_images { self.most_images(tokens, &longest)?.unwrap_or(longest) } else { longest })
    }

    /// A batch of the longest rows with `tokens` tokens in total; the last row is cut.
    fn longest_rows(&self, tokens: usize) -> Result<Batch> {
        self.filled(tokens, &mut self.rows.iter().map(|&(row, _)| row).cycle())
    }

    /// A batch of as many tokens that shows the most images: rows with many images, and then the longest ones. `None` if
    /// `longest`, the batch of the longest rows, shows as many.
    fn most_images(&self, tokens: usize, longest: &Batch) -> Result<Option<Batch>> {
        if self.image_rows[0].is_empty() {
            return Ok(None);
        }
        let found = self.image_rows.iter().map(|order| ImageRow::fitting(order, self.most_rows, tokens));
        let Some((mut rows, _)) = found.max_by_key(|(_, of_images)| *of_images) else { return Ok(None) };
        // A row of several sequences may be longer than a pass, which then shows a part of its images.
        let cut = self.image_rows[0].first().filter(|_| rows.is_empty());
        rows.extend(cut);
        let others = self.rows.iter().map(|&(row, _)| row).take(self.most_rows - rows.len());
        let batch = self.filled(tokens, &mut rows.iter().map(|row| row.row).chain(others))?;
        let shown = |batch: &Batch| batch.images.iter().map(|image| image.rows().max(1)).sum::<usize>();
        Ok((shown(&batch) > shown(longest)).then_some(batch))
    }

    /// A batch of these rows with at most `tokens` tokens in total; the last row is cut.
    fn filled(&self, tokens: usize, rows: &mut dyn Iterator<Item = u32>) -> Result<Batch> {
        let mut worst = Batch { cu_seqlens: vec![0], ..Batch::default() };
        for row in rows {
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
                        // Only the last token of a row has a label; any label will do.
                        labels.fill(IGNORE);
                        labels.push(0);
                    }
                    let (first, kept) = (worst.tokens.len(), ends[0]..ends[0] + ids.len());
                    let whole = |image: &&ImageRows| {
                        image.runs.iter().all(|run| run.start >= kept.start && run.end <= kept.end)
                    };
                    let shown = batch.images.iter().filter(whole).map(|image| ImageRows {
                        runs: image
                            .runs
                            .iter()
                            .map(|run| run.start - ends[0] + first..run.end - ends[0] + first)
                            .collect(),
                        pixels: Arc::clone(&image.pixels),
                    });
                    worst.images.extend(shown);
                    worst.push(ids, &labels);
                }
            }
        }
        Ok(worst)
    }

    /// The error for a row of `tokens` tokens that does not fit even alone, with the settings that would help.
    ///
    /// # Errors
    /// The data cannot be read, or a rank is gone.
    pub(crate) fn too_long(
        &mut self,
        tokens: usize,
        checkpointing: Checkpointing,
        memory: &MemoryModel<'_>,
    ) -> Result<Error> {
        let mut help = Vec::new();
        let full = self.pass(tokens, Checkpointing::FULL)?;
        if let Some(bytes) = full.bytes.filter(|_| checkpointing != Checkpointing::FULL) {
            help.push(format!("train.gradient_checkpointing: true (then {} at most, measured)", human_bytes(bytes)));
        }
        // Halves the length until two lengths fit, which give the line.
        let fitting = |passes: &[Measured]| -> Vec<Measured> {
            passes.iter().filter(|pass| pass.checkpointing == checkpointing && pass.fits()).copied().collect()
        };
        let mut length = tokens / 2;
        while length >= MIN_TOKENS && fitting(&self.passes).len() < 2 {
            self.pass(length, checkpointing)?;
            length /= 2;
        }
        let line = Line::through(&fitting(&self.passes));
        let (mut needs, mut over) = (String::from("more than that"), u64::MAX);
        if let Some(line) = line {
            let bytes = (line.fixed + line.per_token * tokens as f64) as u64;
            needs = format!(
                "about {}: {} fixed and {} per token",
                human_bytes(bytes),
                human_bytes(line.fixed.max(0.0) as u64),
                human_bytes(line.per_token as u64)
            );
            over = bytes.saturating_sub(self.limit());
            let longest = line.tokens_within(self.limit());
            if longest >= MIN_TOKENS {
                help.push(format!("model.max_seq_len: {longest}"));
            }
        }
        let pass = Pass { tokens: tokens as u64, longest: tokens as u64, labelled: tokens as u64 };
        for (change, bytes) in memory.savings(checkpointing, &pass)? {
            // Each rank of the process saves as much.
            let bytes = bytes * self.together;
            let enough = if bytes >= over { ", enough alone" } else { "" };
            help.push(format!("{change} (saves about {}{enough})", human_bytes(bytes)));
        }
        let budget = human_bytes(self.whole);
        Ok(Error::memory(format!(
            "a row of {} tokens does not fit into the memory budget of {budget}: it needs {needs}",
            grouped(tokens as u64)
        ))
        .hint(format!("use one of these: {}; or a larger train.memory_budget", help.join("; "))))
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
    fn a_line_goes_through_the_passes_that_fit() {
        let pass = |tokens, bytes| Measured { tokens, checkpointing: Checkpointing::CHEAP, bytes, seconds: 0.5 };
        let line = Line::through(&[pass(100, Some(1_200)), pass(50, Some(1_100)), pass(400, None)]).unwrap();
        assert_eq!((line.fixed, line.per_token), (1_000.0, 2.0));
        assert_eq!(line.tokens_within(1_700), 350);
        assert_eq!(line.tokens_within(10), 0);
        assert_eq!(Line::through(&[pass(100, Some(5)), pass(200, None)]), None);
        assert_eq!(pass(100, None).speed(), 200.0);
    }
}
