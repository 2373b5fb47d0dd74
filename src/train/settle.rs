//! Puts numbers in the place of `auto`: those of the checkpoint to go on from, of an earlier probe of the same, or measured
//! now.
use super::gauge::Gauge;
use super::machine::Machine;
use super::prepare::Parts;
use super::probe::{self, Asked, Remembered, Sizes};
use super::progress::{Event, Observer};
use super::{load, trained};
use crate::checkpoint::Checkpoint;
use crate::comm::Collectives;
use crate::config::{Auto, Checkpointing, Config};
use crate::data::{Dataset, Sampler};
use crate::error::Result;
use crate::memory;
use crate::memory::limits;
use crate::model::Model;
use crate::ops::simd;

/// Fills in what `parts.config` leaves to measurement and sizes the sampler's steps. Returns the model, fresh, where it was
/// loaded for that.
///
/// # Errors
/// Those of loading; [`crate::Kind::Memory`]: not even one row fits; [`crate::Kind::Config`]: `train.effective_batch`
/// cannot be made up.
pub fn sizes(
    parts: &mut Parts,
    dataset: &Dataset,
    sampler: &mut Sampler,
    comm: &dyn Collectives,
    observer: &dyn Observer,
) -> Result<Option<Model>> {
    let asked = Asked::of(&parts.config, comm.world().size);
    if asked.given().is_some() {
        return Ok(None);
    }
    if let Some(sizes) = parts.resume.as_ref().and_then(|saved| of_checkpoint(&asked, saved)) {
        observer.event(&Event::Notice(&format!("sizes as in the checkpoint: {sizes}")));
        put(&mut parts.config, sampler, sizes);
        return Ok(None);
    }
    let (sizes, model) = found(parts, dataset, sampler, &asked, comm, observer)?;
    put(&mut parts.config, sampler, sizes);
    Ok(model)
}

/// Bytes that the run takes when the model is loaded: the optimizer's state, and a copy to save from.
pub fn later(parts: &Parts) -> u64 {
    let copy = trained::copy_bytes(&parts.config, parts.trainable, parts.optimizer_bytes);
    parts.optimizer_bytes + copy.unwrap_or(0)
}

fn put(config: &mut Config, sampler: &mut Sampler, sizes: Sizes) {
    config.train.batch_size = Auto::Given(sizes.batch_size);
    config.train.grad_accum = Auto::Given(sizes.grad_accum);
    config.train.gradient_checkpointing = sizes.checkpointing;
    config.train.max_tokens_per_pass = sizes.max_tokens_per_pass;
    sampler.resize(sizes.batch_size, sizes.grad_accum);
}

/// The sizes that a checkpoint's run had. Its stamp is held against the run's later; numbers that are given stay.
fn of_checkpoint(asked: &Asked, saved: &Checkpoint) -> Option<Sizes> {
    let number = |given: Auto<usize>, key: &str| match given {
        Auto::Given(number) => Some(number),
        Auto::Auto => usize::try_from(saved.stamp.training.get(key)?.as_u64()?).ok().filter(|&number| number > 0),
    };
    let checkpointing = match asked.checkpointing {
        Checkpointing::Auto => probe::read_checkpointing(saved.state.gradient_checkpointing.as_ref()?)?,
        given @ Checkpointing::Blocks { .. } => given,
    };
    Some(Sizes {
        batch_size: number(asked.batch_size, "train.batch_size")?,
        grad_accum: number(asked.grad_accum, "train.grad_accum")?,
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
) -> Result<(Sizes, Option<Model>)> {
    let cache = dataset.cache_dir(&parts.config);
    let path = cache.map(|cache| Remembered::path(&cache, &fingerprint(parts, dataset, asked)));
    let budget = memory::budget().unwrap_or(u64::MAX);
    let remembered = path.as_deref().and_then(Remembered::read).and_then(|kept| kept.sizes(budget));
    // A rank that remembers and one that does not must not part ways.
    let all_remember = probe::minimum(comm, u64::from(remembered.is_some()))? == 1;
    if let (Some(sizes), true) = (remembered, all_remember) {
        let sizes = probe::agree(comm, asked, sizes)?;
        observer.event(&Event::Notice(&format!("sizes as an earlier probe of the same found them: {sizes}")));
        return Ok((sizes, None));
    }
    observer.event(&Event::Phase("loading the model"));
    let Parts { arch, weights, config, stack, adapter, .. } = parts;
    let mut model = load::fresh(arch, weights.as_ref(), config, stack, adapter.as_ref())?;
    observer.event(&Event::Phase("measuring passes"));
    let mut gauge = Gauge::new(&mut model, &dataset.train, sampler, later(parts));
    let mut found = probe::choose(&mut gauge, asked, config)?;
    drop(gauge);
    found.sizes = probe::agree(comm, asked, found.sizes)?;
    for line in probe::lines(&found.passes, &found.reasons, &found.sizes) {
        observer.event(&Event::Notice(&line));
    }
    if let Some(path) = path {
        Remembered::of(&found).write(&path);
    }
    Ok((found.sizes, Some(model)))
}

/// Of all that bytes and times depend on. What the machine has free changes from minute to minute: an earlier choice is
/// held against it when it is read, and here only what the machine has in all counts.
fn fingerprint(parts: &Parts, dataset: &Dataset, asked: &Asked) -> blake3::Hash {
    let Parts { config, arch, optimizer_bytes, .. } = parts;
    let (model, train, data) = (&config.model, &config.train, &config.data);
    let machine = Machine::detect();
    let memory = train.memory_budget.map_or_else(|| limits::total().unwrap_or(0), |bytes| bytes.0);
    let group = limits::group().map_or(0, |group| group.limit);
    let parts = [
        env!("CARGO_PKG_VERSION").to_owned(),
        format!("{arch:?} {:?} {:?} {:?}", config.tuning, model.dtype, model.init),
        format!("{} {} {} {optimizer_bytes} {}", train.bf16, train.fp16, train.optim, later(parts)),
        format!("{asked:?} {} {} {}", dataset.fingerprint, data.packing, model.max_seq_len),
        format!("{} {memory} {group} {} {:?}", machine.processor, rayon::current_num_threads(), simd::level()),
    ];
    blake3::hash(parts.join("\n").as_bytes())
}
