//! Puts numbers in the place of `auto`: those of the checkpoint to go on from, of an earlier probe of the same, or measured
//! now.
use super::budget;
use super::choose_batch::{self, Asked, Remembered, Sizes};
use super::measure_pass::Gauge;
use crate::load::{self, Loaded};
use crate::prepare::Parts;
use tunesmith_base::error::Result;
use tunesmith_base::memory;
use tunesmith_base::memory::limits;
use tunesmith_checkpoint::Checkpoint;
use tunesmith_comm::Collectives;
use tunesmith_config::{Auto, Checkpointing, Config};
use tunesmith_data::{Dataset, Sampler};
use tunesmith_ops::simd;
use tunesmith_optim::rule;
use tunesmith_parallel::ParallelPlan;
use tunesmith_parallel::fsdp::Gatherer;
use tunesmith_telemetry::machine::Machine;
use tunesmith_telemetry::progress::{Event, Observer};

/// Fills in what `parts.config` leaves to measurement and sizes the sampler's steps. Returns the model, fresh, where it was
/// loaded for that.
///
/// # Errors
/// Those of loading; [`tunesmith_base::Kind::Memory`]: not even one row fits; [`tunesmith_base::Kind::Config`]: `train.effective_batch`
/// cannot be made up.
pub fn sizes(
    parts: &mut Parts,
    dataset: &Dataset,
    sampler: &mut Sampler,
    comm: &dyn Collectives,
    observer: &dyn Observer,
) -> Result<Option<Loaded>> {
    let asked = Asked::of(&parts.config, &parts.arch, comm.world().size);
    if asked.given().is_some() {
        return Ok(None);
    }
    if let Some(sizes) = parts.resume.as_ref().and_then(|saved| of_checkpoint(&asked, saved)) {
        observer.event(&Event::Notice(&format!("sizes as in the checkpoint: {sizes}")));
        put(&mut parts.config, sampler, sizes, asked.world);
        return Ok(None);
    }
    let (sizes, model) = found(parts, dataset, sampler, &asked, comm, observer)?;
    put(&mut parts.config, sampler, sizes, asked.world);
    Ok(model)
}

/// Bytes that the run takes in this process when the model is loaded: the optimizer's state, a copy to save from, what is
/// on its way between ranks.
pub fn later(parts: &Parts, comm: &dyn Collectives) -> u64 {
    let Parts { config, optimizer, trainable, .. } = parts;
    let ranks = comm.world().size as u64;
    let shares = if budget::way(config, comm.world().size).strategy.shards_optimizer() { ranks } else { 1 };
    let state = (optimizer.state + optimizer.average).div_ceil(shares);
    let bucket = (config.train.ddp_bucket_cap_mb as u64) << 20;
    // What is shared is put together as it is written.
    let saving = if shares > 1 { 0 } else { optimizer.saving };
    let moving = if ranks > 1 && !comm.shares_memory() { 2 * bucket.min(4 * trainable) } else { 0 };
    let together = if comm.shares_memory() { ranks } else { 1 };
    together * (state + moving) + saving
}

fn put(config: &mut Config, sampler: &mut Sampler, sizes: Sizes, world: usize) {
    config.train.batch_size = Auto::Given(sizes.batch_size);
    config.train.grad_accum = Auto::Given(sizes.grad_accum);
    config.train.gradient_checkpointing = sizes.checkpointing;
    config.train.max_tokens_per_pass = sizes.max_tokens_per_pass;
    // A step has the micro-batches of all ranks.
    sampler.resize(sizes.batch_size, sizes.grad_accum * world);
}

/// The sizes that a checkpoint's run had. Its stamp is held against the run's later; numbers that are given stay.
fn of_checkpoint(asked: &Asked, saved: &Checkpoint) -> Option<Sizes> {
    let number = |given: Auto<usize>, key: &str| match given {
        Auto::Given(number) => Some(number),
        Auto::Auto => usize::try_from(saved.stamp.training.get(key)?.as_u64()?).ok().filter(|&number| number > 0),
    };
    let grad_accum = match asked.grad_accum {
        Auto::Given(number) => number,
        Auto::Auto => {
            // Other ranks go on with the same rows a step, where they can share them evenly.
            let before = number(Auto::Auto, "train.grad_accum")?;
            let all = before.checked_mul(saved.stamp.world_size).filter(|&all| all > 0)?;
            if all.is_multiple_of(asked.world) { all / asked.world } else { before }
        }
    };
    let checkpointing = match asked.checkpointing {
        Checkpointing::Auto => choose_batch::read_checkpointing(saved.state.gradient_checkpointing.as_ref()?)?,
        given @ Checkpointing::Blocks { .. } => given,
    };
    Some(Sizes {
        batch_size: number(asked.batch_size, "train.batch_size")?,
        grad_accum,
        checkpointing,
        max_tokens_per_pass: saved.state.max_tokens_per_pass.into_iter().chain(asked.max_tokens_per_pass).min(),
    })
}

/// From the cache, or measured.
fn found(
    parts: &Parts,
    dataset: &Dataset,
    sampler: &Sampler,
    asked: &Asked,
    comm: &dyn Collectives,
    observer: &dyn Observer,
) -> Result<(Sizes, Option<Loaded>)> {
    let cache = dataset.cache_dir(&parts.config);
    let path = cache.map(|cache| Remembered::path(&cache, &fingerprint(parts, dataset, asked, comm)));
    let budget = memory::budget().unwrap_or(u64::MAX);
    let remembered = path.as_deref().and_then(Remembered::read);
    let sizes = remembered.as_ref().and_then(|kept| kept.sizes(budget));
    // Ranks that do not all remember the same must not part ways.
    let own = remembered.as_ref().filter(|_| sizes.is_some()).map_or(0, Remembered::hash);
    let alike = comm.collect(&[own])?.into_iter().all(|hash| hash == own);
    if let Some(sizes) = sizes.filter(|_| alike) {
        observer.event(&Event::Notice(&format!("sizes as an earlier probe of the same found them: {sizes}")));
        return Ok((sizes, None));
    }
    observer.event(&Event::Phase("loading the model"));
    let (config, weights) = (&parts.config, &parts.weights);
    let parallel = ParallelPlan::new(&config.train, comm.world().size);
    let gatherer = Gatherer::new(&parallel, &rule(&config.train)?.into(), comm)?;
    let mut model = load::model(parts, gatherer.as_ref())?;
    observer.event(&Event::Phase("measuring passes"));
    let mut gauge = Gauge::new(&mut model, (&dataset.train, sampler), later(parts, comm), comm)?;
    let found = choose_batch::choose(&mut gauge, asked, (config, weights.as_ref()))?;
    drop(gauge);
    // The budget is whole again before any rank goes on.
    comm.barrier()?;
    for line in choose_batch::lines(&found.passes, &found.reasons, &found.sizes) {
        observer.event(&Event::Notice(&line));
    }
    if let Some(path) = path.filter(|_| comm.world().local_rank == 0) {
        Remembered::of(&found).write(&path);
    }
    Ok((found.sizes, Some(Loaded { model, gatherer })))
}

/// Of all that bytes and times depend on. What the machine has free changes from minute to minute: an earlier choice is
/// held against it when it is read, and here only what the machine has in all counts.
fn fingerprint(parts: &Parts, dataset: &Dataset, asked: &Asked, comm: &dyn Collectives) -> blake3::Hash {
    let Parts { config, arch, optimizer, .. } = parts;
    let (model, train, data) = (&config.model, &config.train, &config.data);
    let machine = Machine::detect();
    let memory = train.memory_budget.map_or_else(|| limits::total().unwrap_or(0), |bytes| bytes.0);
    let group = limits::group().map_or(0, |group| group.limit);
    let parts = [
        env!("CARGO_PKG_VERSION").to_owned(),
        format!("{arch:?} {:?} {:?} {:?}", config.tuning, model.dtype, model.init),
        format!("{} {} {} {optimizer:?} {}", train.bf16, train.fp16, train.optim, later(parts, comm)),
        format!("{} {} {}", train.strategy, comm.name(), comm.world().local_size),
        format!("{asked:?} {} {} {}", dataset.fingerprint, data.packing, model.max_seq_len),
        format!("{} {memory} {group} {} {:?}", machine.processor, rayon::current_num_threads(), simd::level()),
    ];
    blake3::hash(parts.join("\n").as_bytes())
}
