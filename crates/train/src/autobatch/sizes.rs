//! Fills in the sizes that are `auto`: from the checkpoint to resume, from the cache of an earlier measurement, or by
//! measuring now.
use super::batch_plan::{BatchPlan, BatchRequest};
use super::choice_cache::{CachedChoice, read_checkpointing};
use super::choose_batch;
use super::measure_pass::PassMeasurer;
use crate::model_source::{Loaded, ModelSource};
use std::path::PathBuf;
use std::sync::Arc;
use tunesmith_base::error::Result;
use tunesmith_checkpoint::Checkpoint;
use tunesmith_comm::Collectives;
use tunesmith_config::{Auto, Checkpointing};
use tunesmith_data::{Dataset, Sampler};
use tunesmith_device::{Device, memory};
use tunesmith_optim::UpdateRule;
use tunesmith_parallel::ParallelPlan;
use tunesmith_parallel::fsdp::Gatherer;
use tunesmith_plan::memory::OptimizerBytes;
use tunesmith_telemetry::progress::{Event, Observer};

/// The model, data, and ranks to measure with.
pub struct Measurement<'a> {
    pub source: &'a ModelSource,
    pub dataset: &'a Dataset,
    /// Gives the rows; their order does not matter here.
    pub sampler: &'a Sampler,
    pub parallel: &'a ParallelPlan,
    /// The optimizer's update rule, which decides where tensors may be split between ranks.
    pub rule: &'a Arc<dyn UpdateRule>,
    /// Bytes that the run allocates after loading; see [`later_bytes`].
    pub later: u64,
    /// The file of the cached choice; `None` without a cache folder.
    pub cached: Option<PathBuf>,
    pub comm: &'a dyn Collectives,
}

/// Finds the sizes of a run. Also returns the model as it is before step 1, if it was loaded to measure them.
///
/// # Errors
/// Those of loading; [`tunesmith_base::Kind::Memory`]: not even one row fits; [`tunesmith_base::Kind::Config`]:
/// `train.effective_batch` cannot be met.
pub fn find(
    request: &BatchRequest,
    resume: Option<&Checkpoint>,
    measurement: &Measurement<'_>,
    observer: &dyn Observer,
) -> Result<(BatchPlan, Option<Loaded>)> {
    if let Some(given) = request.given() {
        return Ok((given, None));
    }
    if let Some(sizes) = resume.and_then(|saved| of_checkpoint(request, saved)) {
        observer.event(&Event::Notice(&format!("sizes as in the checkpoint: {sizes}")));
        return Ok((sizes, None));
    }
    measurement.choose(request, observer)
}

/// Bytes that a process allocates on its device after the model is loaded there: the optimizer's state, the copy for saving, and the buffers of
/// gradients between ranks.
pub fn later_bytes(
    optimizer: &OptimizerBytes,
    trained_parameters: u64,
    parallel: &ParallelPlan,
    comm: &dyn Collectives,
    device: Device,
) -> u64 {
    let ranks = comm.world().size as u64;
    let shares = if parallel.shards_optimizer() { ranks } else { 1 };
    let state = (optimizer.state + optimizer.average).div_ceil(shares);
    // Sharded state is gathered while it is written, without a copy. A GPU's is copied to the host.
    let saving = if shares > 1 || device != Device::Cpu { 0 } else { optimizer.saving };
    let moving = if ranks > 1 && !comm.shares_memory() {
        2 * (parallel.bucket_bytes as u64).min(4 * trained_parameters)
    } else {
        0
    };
    let in_process = if comm.shares_memory() { ranks } else { 1 };
    in_process * (state + moving) + saving
}

/// The sizes of the run that wrote the checkpoint; configured sizes take precedence. The stamps are compared later.
fn of_checkpoint(request: &BatchRequest, saved: &Checkpoint) -> Option<BatchPlan> {
    let number = |given: Auto<usize>, key: &str| match given {
        Auto::Given(number) => Some(number),
        Auto::Auto => usize::try_from(saved.stamp.training.get(key)?.as_u64()?).ok().filter(|&number| number > 0),
    };
    let grad_accum = match request.grad_accum {
        Auto::Given(number) => number,
        Auto::Auto => {
            // With another number of ranks a step keeps its rows, if they divide evenly.
            let before = number(Auto::Auto, "train.grad_accum")?;
            let all = before.checked_mul(saved.stamp.world_size).filter(|&all| all > 0)?;
            if all.is_multiple_of(request.world) { all / request.world } else { before }
        }
    };
    let checkpointing = match request.checkpointing {
        Checkpointing::Auto => read_checkpointing(saved.state.gradient_checkpointing.as_ref()?)?,
        given @ Checkpointing::Blocks { .. } => given,
    };
    Some(BatchPlan {
        batch_size: number(request.batch_size, "train.batch_size")?,
        grad_accum,
        checkpointing,
        max_tokens_per_pass: saved.state.max_tokens_per_pass.into_iter().chain(request.max_tokens_per_pass).min(),
    })
}

impl Measurement<'_> {
    /// Takes the sizes from the cache, or measures them.
    fn choose(&self, request: &BatchRequest, observer: &dyn Observer) -> Result<(BatchPlan, Option<Loaded>)> {
        let comm = self.comm;
        let budget = memory::budget(self.source.device);
        let cached = self.cached.as_deref().and_then(CachedChoice::read);
        let sizes = cached.as_ref().and_then(|cached| cached.sizes(budget.unwrap_or(u64::MAX)));
        // Ranks with different caches must not choose differently.
        let own = cached.as_ref().filter(|_| sizes.is_some()).map_or(0, CachedChoice::hash);
        let alike = comm.collect(&[own])?.into_iter().all(|hash| hash == own);
        if let Some(sizes) = sizes.filter(|_| alike) {
            observer.event(&Event::Notice(&format!("sizes from an earlier probe: {sizes}")));
            return Ok((sizes, None));
        }
        observer.event(&Event::Phase("loading the model"));
        let gatherer = Gatherer::new(self.parallel, self.rule, comm)?;
        let mut model = self.source.load(gatherer.as_ref())?;
        observer.event(&Event::Phase("measuring passes"));
        let mut measurer =
            PassMeasurer::new(&mut model, &self.dataset.train, self.sampler, (budget, self.later), comm)?;
        let choice = choose_batch::choose(&mut measurer, request, &self.source.memory())?;
        drop(measurer);
        // The measurer of every rank has restored the budget before any rank continues.
        comm.barrier()?;
        for line in choose_batch::lines(budget, &choice.passes, &choice.reasons, &choice.sizes) {
            observer.event(&Event::Notice(&line));
        }
        if let Some(path) = self.cached.as_deref().filter(|_| comm.world().local_rank == 0) {
            CachedChoice::new(&choice).write(path);
        }
        Ok((choice.sizes, Some(Loaded { model, gatherer })))
    }
}
