//! Everything before the weights: the model's shape, the output directory, the data, the schedule, the disk, the
//! checkpoint to go on from. Bad input is refused here, where it costs seconds, and nothing is left behind.
use std::path::{Path, PathBuf};

use super::lock::DirLock;
use super::progress::{Downloads, Event, Observer};
use super::ranks::Seat;
use super::run::Options;
use super::signals::Stop;
use super::{adapter, budget, engine, output, settle, trained};
use crate::checkpoint::peft::Tensors;
use crate::checkpoint::{self, Checkpoint};
use crate::comm::Collectives;
use crate::config::arch::Arch;
use crate::config::resolve::{Setting, Source};
use crate::config::{Config, ConfigValue as _, Init, Mode, Quantization, Resolved, Resume, SaveStrategy};
use crate::data::{self, Dataset, Sampler};
use crate::error::{Error, Result};
use crate::hub::{self, Part, Snapshot};
use crate::memory;
use crate::model::Model;
use crate::model::stack::Stack;
use crate::model::targets::{self, Placement};
use crate::model::{quantize, weights::WeightFiles};
use crate::optim::Schedule;
use crate::plan::batches::{Batches, Request};
use crate::plan::memory::OptimizerBytes;
use crate::plan::rates::{Rate, rates};
use crate::plan::{bytes, grouped, human_bytes};

/// A run that has been found possible.
pub struct Prepared {
    /// The base model's folder.
    pub model_dir: PathBuf,
    /// Where on the hub it came from, if it did.
    pub snapshot: Option<Snapshot>,
    /// Its shape.
    pub arch: Arch,
    /// Its weights, opened and checked; nothing when they are drawn at random.
    pub weights: Option<WeightFiles>,
    /// The model as it is before step 1, where measuring has loaded it.
    pub loaded: Option<Model>,
    /// The configuration, with the settings of `tuning.adapter` where there is one, and with sizes in the place of `auto`.
    pub config: Config,
    /// The tensors of `tuning.adapter`.
    pub adapter: Option<Tensors>,
    /// The adapters of `tuning.adapters`.
    pub stack: Stack,
    /// What they are, for the stamp.
    pub stack_hashes: Vec<String>,
    /// Where adapters go; empty when every weight is trained.
    pub placements: Vec<Placement>,
    /// How many values are trained.
    pub trainable: u64,
    /// What the optimizer and the averages hold beside them.
    pub optimizer: OptimizerBytes,
    /// Holds the output directory; only the first rank does.
    pub lock: Option<DirLock>,
    /// How many ranks there are, and how they came about.
    pub ranks: (usize, String),
    /// How many of them are threads of this process.
    pub together: u64,
    /// The rows.
    pub dataset: Dataset,
    /// Their order.
    pub sampler: Sampler,
    /// Steps and epochs.
    pub batches: Batches,
    /// The learning rate of each step.
    pub schedule: Schedule,
    /// The checkpoint to go on from.
    pub resume: Option<Checkpoint>,
    /// Every setting as the run uses it.
    pub settings: Vec<Setting>,
}

/// The model that a configuration names, and what is trained of it: found and opened, not loaded.
pub struct Parts {
    /// The base model's folder.
    pub model_dir: PathBuf,
    /// Where on the hub it came from, if it did.
    pub snapshot: Option<Snapshot>,
    /// Its shape.
    pub arch: Arch,
    /// Its weights; nothing when they are drawn at random.
    pub weights: Option<WeightFiles>,
    /// The configuration, with the settings of `tuning.adapter` where there is one.
    pub config: Config,
    /// The tensors of `tuning.adapter`.
    pub adapter: Option<Tensors>,
    /// The adapters of `tuning.adapters`.
    pub stack: Stack,
    /// What they are, for the stamp.
    pub stack_hashes: Vec<String>,
    /// Where adapters go; empty when every weight is trained.
    pub placements: Vec<Placement>,
    /// How many values are trained.
    pub trainable: u64,
    /// What the optimizer and the averages hold beside them.
    pub optimizer: OptimizerBytes,
    /// The checkpoint to go on from.
    pub resume: Option<Checkpoint>,
}

/// Finds and opens the model and the adapters of a configuration. `claim` takes the output directory and finds the
/// checkpoint to go on from, before anything large is fetched or read.
///
/// # Errors
/// Whatever is wrong with their folders, or with what is to be trained.
pub fn parts(
    resolved: &Resolved,
    observer: &dyn Observer,
    claim: impl FnOnce(&Config, &Path) -> Result<Option<Checkpoint>>,
) -> Result<Parts> {
    let mut config = resolved.config.clone();
    // Of a model on the hub first what describes it: it may be refused before gigabytes are fetched.
    let downloads = Downloads(observer);
    let hub::Found { dir: model_dir, snapshot } = hub::model_dir(&config.model, Part::Description, &downloads)?;
    let mut arch = Arch::from_dir(&model_dir)?;
    let stored = arch.tensors();
    // Finished adapters belong to the model as it is on disk.
    let (stack, stack_hashes) = adapter::stack(&config.tuning.adapters, &arch)?;
    config.model.max_seq_len = max_seq_len(resolved, &arch)?;
    let resume = claim(&config, &model_dir)?;
    let source = adapter::source(&config, resume.as_ref(), &downloads, observer)?;
    arch.grow(adapter::new_tokens(&config, &model_dir, source.as_deref(), arch.vocab_size)?);
    let mut adapter = None;
    if let Some(dir) = &source {
        let (tuning, tensors) = adapter::open(dir, resolved, &arch)?;
        if config.train.resume_from_checkpoint.is_none() {
            config.tuning.adapter = Some(dir.clone());
        }
        (config.tuning.lora, config.tuning.ia3, adapter) = (tuning.lora, tuning.ia3, Some(tensors));
    }
    let placements = targets::placed(&arch, &config.tuning)?;
    let tensors = trained::tensors(&config, &arch, &placements)?;
    let trainable = tensors.iter().map(|(_, shape)| trained::size(shape)).sum();
    trained::check_rates(&config, &tensors)?;
    let optimizer = budget::optimizer(&config, tensors, budget::threads(&config))?;
    hub::fetch_paths(&mut config.data, &downloads)?;
    if let Some(snapshot) = &snapshot {
        config.model.revision = Some(snapshot.commit.clone());
        if config.model.init == Init::Pretrained {
            hub::model_dir(&config.model, Part::Whole, &downloads)?;
        }
    }
    let weights = match config.model.init {
        Init::Pretrained => Some(WeightFiles::open(&model_dir, &stored)?),
        Init::Random => None,
    };
    config.model.quantization = quantization(&config, &arch, weights.as_ref())?;
    Ok(Parts {
        model_dir,
        snapshot,
        arch,
        weights,
        config,
        adapter,
        stack,
        stack_hashes,
        placements,
        trainable,
        optimizer,
        resume,
    })
}

/// A run that has been found possible, but for sizes that may have to be measured.
pub struct Found {
    parts: Parts,
    lock: Option<DirLock>,
    /// The checkpoint to go on from is one of the output directory's own.
    goes_on_here: bool,
    dataset: Dataset,
    sampler: Sampler,
    ranks: (usize, String),
}

/// Checks all that can be checked without loading weights and without the other ranks.
///
/// # Errors
/// Whatever is wrong with the model folder, the data, the output directory or the checkpoint.
pub fn find(
    resolved: &Resolved,
    options: &Options,
    stop: &Stop,
    observer: &dyn Observer,
    seat: &Seat,
) -> Result<Found> {
    if options.overwrite && resolved.config.train.resume_from_checkpoint.is_some() {
        return Err(Error::config("--overwrite contradicts train.resume_from_checkpoint").hint("leave one of them out"));
    }
    if !options.allow.is_empty() && resolved.config.train.resume_from_checkpoint.is_none() {
        return Err(
            Error::config("--allow has no meaning without --resume").hint("it lets a checkpoint's stamp differ")
        );
    }
    let mut claimed = None;
    let parts = parts(resolved, observer, |config, model_dir| {
        let output_dir = &config.train.output_dir;
        for source in [model_dir].into_iter().chain(config.tuning.adapter.as_deref()) {
            refuse_own_source(source, output_dir)?;
        }
        for source in &config.tuning.adapters {
            refuse_own_source(source, output_dir)?;
        }
        let lock = if seat.world.is_first() { Some(DirLock::acquire(output_dir)?) } else { None };
        if let Some(lock) = &lock {
            stop.leaves_behind(lock.leftovers());
        }
        let resume = find_checkpoint(config, observer)?;
        let goes_on_here = resume.as_ref().is_some_and(|resume| is_inside(&resume.dir, output_dir));
        if lock.is_some() && !goes_on_here && !options.overwrite {
            refuse_earlier_run(output_dir)?;
        }
        claimed = Some((lock, goes_on_here));
        Ok(resume)
    })?;
    let (lock, goes_on_here) = claimed.ok_or_else(|| Error::config("the output directory was not looked at"))?;
    observer.event(&Event::Phase("reading the data"));
    let dataset = data::load(&parts.config, &parts.model_dir, parts.arch.vocab_size, observer)?;
    let sampler = dataset.sampler(&parts.config, seat.world.size);
    let ranks = (seat.world.size, seat.described.clone());
    Ok(Found { parts, lock, goes_on_here, dataset, sampler, ranks })
}

impl Found {
    /// Checks the rest; where sizes are left to measurement, loads and measures, with the other ranks.
    ///
    /// # Errors
    /// Whatever is wrong with the schedule or the disk; [`crate::Kind::Memory`]: not even one row fits into the memory
    /// budget; [`crate::Kind::Peer`]: a rank is gone.
    pub fn settle(
        self,
        resolved: &Resolved,
        options: &Options,
        comm: &dyn Collectives,
        observer: &dyn Observer,
    ) -> Result<Prepared> {
        let Self { mut parts, lock, goes_on_here, dataset, mut sampler, ranks } = self;
        let loaded = settle::sizes(&mut parts, &dataset, &mut sampler, comm, observer)?;
        let Parts {
            model_dir,
            snapshot,
            arch,
            weights,
            config,
            adapter,
            stack,
            stack_hashes,
            placements,
            trainable,
            optimizer,
            resume,
        } = parts;
        let batches = batches(&config, &dataset, &sampler, ranks.0)?;
        let schedule = Schedule::of(&config.train, batches.warmup_steps, batches.total_steps)?;
        // What is there already of this run, or goes before the first step, needs no further room.
        let held = if goes_on_here || options.overwrite { output::bytes_of_runs(&config.train.output_dir) } else { 0 };
        // Where averages are published, the trained values stand beside them in a checkpoint.
        let state = optimizer.state + optimizer.average + optimizer.publishing;
        if lock.is_some() {
            check_disk(&config, &arch, &model_dir, (trainable, state), &batches, held)?;
        }
        let settings = effective(resolved, &config);
        let together = if comm.shares_memory() { ranks.0 as u64 } else { 1 };
        Ok(Prepared {
            model_dir,
            snapshot,
            arch,
            weights,
            loaded,
            config,
            adapter,
            stack,
            stack_hashes,
            placements,
            trainable,
            optimizer,
            lock,
            ranks,
            together,
            dataset,
            sampler,
            batches,
            schedule,
            resume,
            settings,
        })
    }
}

/// How the base is coded, as the checkpoint and the configuration say together.
fn quantization(config: &Config, arch: &Arch, weights: Option<&WeightFiles>) -> Result<Quantization> {
    let how = quantize::resolve(config, weights)?;
    quantize::matrices(arch, &config.model.quantization_skip_modules)?;
    Ok(how.map_or(Quantization::None, quantize::How::setting))
}

/// `model.max_seq_len`; the default gives way to a model that sees fewer tokens.
fn max_seq_len(resolved: &Resolved, arch: &Arch) -> Result<usize> {
    let (asked, limit) = (resolved.config.model.max_seq_len, arch.max_position_embeddings);
    match resolved.source("model.max_seq_len") {
        _ if asked <= limit => Ok(asked),
        Source::Default => Ok(limit),
        source => Err(Error::config(format!(
            "{source}: model.max_seq_len = {asked} is longer than the model's max_position_embeddings = {limit}"
        ))
        .hint(format!("set model.max_seq_len to at most {limit}"))),
    }
}

/// The checkpoint that the configuration asks to go on from. `latest` in a directory without one starts a new run.
fn find_checkpoint(config: &Config, observer: &dyn Observer) -> Result<Option<Checkpoint>> {
    let output_dir = &config.train.output_dir;
    match &config.train.resume_from_checkpoint {
        None => Ok(None),
        Some(Resume::Dir(directory)) if !directory.exists() => {
            Err(Error::checkpoint(format!("{}: no such folder to resume from", directory.display()))
                .hint("name a checkpoint-… folder, a run's file `latest` or `best`, or `latest` alone"))
        }
        Some(Resume::Dir(directory)) => checkpoint::load(directory).map(Some),
        Some(Resume::Latest) => {
            let (newest, damaged) = checkpoint::newest_complete(output_dir)?;
            for (path, error) in &damaged {
                observer.event(&Event::Notice(&format!(
                    "{} is damaged and left out: {}",
                    path.display(),
                    error.message()
                )));
            }
            if newest.is_none() {
                if let Some((path, error)) = damaged.into_iter().next() {
                    return Err(error.context(format!("no complete checkpoint, and {} is damaged", path.display())));
                }
                let text = format!("no checkpoint in {}: starting at step 1", output_dir.display());
                observer.event(&Event::Notice(&text));
            }
            newest.map(checkpoint::open).transpose()
        }
    }
}

/// Whether a checkpoint is one of the output directory's own.
fn is_inside(checkpoint: &Path, output_dir: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    real(checkpoint).parent() == Some(real(output_dir).as_path())
}

/// What a run reads must not lie where it writes and tidies up.
fn refuse_own_source(source: &Path, output_dir: &Path) -> Result<()> {
    let (Ok(real), Ok(output)) = (source.canonicalize(), output_dir.canonicalize()) else { return Ok(()) };
    let inside = real.strip_prefix(&output).ok().and_then(|inside| inside.iter().next()?.to_str());
    if !inside.is_some_and(output::is_ours) {
        return Ok(());
    }
    let message =
        format!("{} lies where train.output_dir = {} keeps its results", source.display(), output_dir.display());
    Err(Error::config(message).hint("set another train.output_dir, so that what is read is never replaced"))
}

/// The settings as the run uses them, such that training from them again is the same run: a length that gave way to
/// the model's is the one that holds, sizes are those that were measured, an adapter to start from speaks for itself, and going on is not part of it.
fn effective(resolved: &Resolved, config: &Config) -> Vec<Setting> {
    let mut settings = resolved.settings.clone();
    // What measuring was to aim at has become numbers.
    let train = &resolved.config.train;
    let measured = train.batch_size.given().is_none() || train.grad_accum.given().is_none();
    let aims = ["train.effective_batch", "train.target_tokens_per_device_step"];
    settings.retain(|setting| !(measured && aims.contains(&setting.key.as_str())));
    settings.retain(|setting| {
        let shapes = ["tuning.lora.", "tuning.ia3."].iter().any(|section| setting.key.starts_with(section));
        let of_adapter = config.tuning.adapter.is_some() && shapes;
        setting.key != "train.resume_from_checkpoint" && !(of_adapter && setting.source == Source::Default)
    });
    for setting in &mut settings {
        match setting.key.as_str() {
            "model.max_seq_len" => setting.value = config.model.max_seq_len.into(),
            "train.batch_size" => setting.value = config.train.batch_size.to_json(),
            "train.grad_accum" => setting.value = config.train.grad_accum.to_json(),
            "train.gradient_checkpointing" => setting.value = config.train.gradient_checkpointing.to_json(),
            "train.max_tokens_per_pass" => setting.value = config.train.max_tokens_per_pass.to_json(),
            // A branch moves on; the run belongs to the commit.
            "model.revision" => setting.value = config.model.revision.clone().into(),
            _ => {}
        }
    }
    settings
}

fn refuse_earlier_run(output_dir: &Path) -> Result<()> {
    let earlier = output::earlier_run(output_dir);
    let Some(first) = earlier.first() else { return Ok(()) };
    let more = if earlier.len() > 1 { format!(" and {} more", earlier.len() - 1) } else { String::new() };
    Err(Error::config(format!(
        "train.output_dir = {} holds an earlier run ({}{more})",
        output_dir.display(),
        first.file_name().unwrap_or_default().to_string_lossy(),
    ))
    .hint("go on with it: --resume; start over: --overwrite (removes it); keep it: set another train.output_dir"))
}

fn batches(config: &Config, dataset: &Dataset, sampler: &Sampler, world: usize) -> Result<Batches> {
    let train = &config.train;
    let batches = Batches::new(Request {
        rows: sampler.rows() as u64,
        tokens: dataset.train.tokens() as u64,
        label_tokens: dataset.train.label_tokens() as u64,
        batch_size: train.batch_size.or(1) as u64,
        grad_accum: train.grad_accum.or(1) as u64,
        world: world as u64,
        epochs: train.num_train_epochs,
        max_steps: train.max_steps,
        warmup_steps: train.warmup_steps,
        warmup_ratio: train.warmup_ratio,
    })?;
    debug_assert_eq!(batches.steps_per_epoch, sampler.steps_per_epoch() as u64);
    Ok(batches)
}

/// A disk that cannot hold the run is refused now and not after hours. `held` bytes of it are there already.
fn check_disk(
    config: &Config,
    arch: &Arch,
    model_dir: &Path,
    (trainable, state): (u64, u64),
    batches: &Batches,
    held: u64,
) -> Result<()> {
    let train = &config.train;
    let saves = match train.save_strategy {
        SaveStrategy::No => 1,
        SaveStrategy::Steps => batches.total_steps.div_ceil(train.save_steps),
        SaveStrategy::Epoch => batches.epochs().ceil() as u64,
    };
    let best = u64::from(train.load_best_model_at_end);
    let keep = train.save_total_limit.map(|limit| limit as u64 + best);
    let tokenizer = output::size_of(&output::tokenizer_files(model_dir));
    let needed = bytes::run(trainable, state, tokenizer, saves, keep);
    // What the final weights hold beside the trained values.
    let beside = match config.tuning.mode {
        Mode::Freeze => trained::values(arch).saturating_sub(trainable),
        Mode::Lora if config.tuning.lora.init_lora_weights.is_pissa() => trainable,
        Mode::Lora | Mode::Full | Mode::Ia3 => 0,
    };
    let folders = keep.map_or(saves, |keep| saves.min(keep + 1)) + 2;
    checkpoint::preflight(&train.output_dir, (needed + 4 * beside).saturating_sub(held), folders * checkpoint::FILES)
}

impl Prepared {
    /// The most memory that the process should need, as text.
    fn predicted(&self) -> Option<String> {
        let peak = budget::peak(self).ok()?;
        let rank = peak.rank;
        let each = match peak.together {
            1 => String::new(),
            ranks => format!("{ranks} ranks in one process, of {} each: ", human_bytes(rank.total())),
        };
        Some(format!(
            "{} at most, predicted: {each}{} of weights, {} of activations (`tunesmith plan` shows the parts)",
            human_bytes(peak.process()),
            human_bytes(rank.weights),
            human_bytes(rank.kept + rank.work)
        ))
    }

    /// Tells what will be done, and what should be known of the data.
    pub fn announce(&self, observer: &dyn Observer) {
        let train = &self.config.train;
        let mut facts =
            vec![("model".to_owned(), describe(self)), ("output".to_owned(), train.output_dir.display().to_string())];
        facts.push(("kernels".to_owned(), engine::describe(&self.config)));
        if self.ranks.0 > 1 {
            facts.push(("ranks".to_owned(), self.ranks.1.clone()));
        }
        let state = human_bytes(self.optimizer.state + self.optimizer.average);
        let average = if train.ema_decay.is_some() { " and a moving average" } else { "" };
        facts.push(("optimizer".to_owned(), format!("{}{average} · {state} of state", train.optim)));
        if self.optimizer.saving > 0 {
            let text = format!("{}, to save beside the steps (train.save_async)", human_bytes(self.optimizer.saving));
            facts.push(("checkpoint copy".to_owned(), text));
        }
        facts.extend(trained::facts(self));
        if let Some(budget) = memory::budget() {
            let asked = if train.memory_budget.is_some() { "" } else { ", what the machine has free less a tenth" };
            facts.push(("memory budget".to_owned(), format!("{}{asked}", human_bytes(budget))));
        }
        if let Some(validation) = &self.dataset.validation {
            facts.push(("validation rows".to_owned(), grouped(validation.len() as u64)));
        }
        if let Some(text) = self.predicted() {
            facts.push(("memory".to_owned(), text));
        }
        if let Some(resume) = &self.resume {
            facts.push(("goes on from".to_owned(), resume.dir.display().to_string()));
        }
        let resumed_at = self.resume.as_ref().map_or(0, |resume| resume.state.step);
        observer.event(&Event::Plan { facts: &facts, batches: &self.batches, rates: &rate_table(self), resumed_at });
        if let Some(remark) = engine::remark(self) {
            observer.event(&Event::Notice(&remark));
        }
        for warning in &self.dataset.report.warnings {
            observer.event(&Event::Notice(&format!("note: {warning}")));
        }
    }
}

/// The schedule's turning points.
pub fn rate_table(prepared: &Prepared) -> Vec<Rate> {
    let Batches { total_steps, warmup_steps, .. } = prepared.batches;
    rates(total_steps, warmup_steps, |step| prepared.schedule.lr(step))
}

/// The model in a line: where it is, what it is, how much of it is trained.
pub fn describe(prepared: &Prepared) -> String {
    let what = match prepared.config.tuning.mode {
        Mode::Lora => {
            let kind = if prepared.config.tuning.lora.use_dora { "DoRA" } else { "LoRA" };
            let q = if prepared.config.model.quantization == Quantization::None { "" } else { "Q" };
            format!("{q}{kind} on {} modules", prepared.placements.len())
        }
        Mode::Ia3 => format!("(IA)³ on {} modules", prepared.placements.len()),
        Mode::Full => "every weight".to_owned(),
        Mode::Freeze => "some weights".to_owned(),
    };
    let family = format!("{:?}", prepared.arch.family);
    let name = prepared.snapshot.as_ref().map_or_else(|| prepared.model_dir.display().to_string(), Snapshot::label);
    format!("{name} · {family} · {what} · {} values trained", grouped(prepared.trainable))
}

/// What the data came to: label and value.
pub fn data_facts(dataset: &Dataset) -> Vec<(String, String)> {
    let Dataset { train, validation, test, report, .. } = dataset;
    let mut facts = Vec::new();
    let mut fact = |label: &str, value: String| facts.push((label.to_owned(), value));
    let count = |number: usize| grouped(number as u64);
    fact("training rows", count(train.len()));
    for (label, split) in [("validation rows", validation), ("test rows", test)] {
        if let Some(split) = split {
            fact(label, count(split.len()));
        }
    }
    let lengths = train.lengths();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let share = 100.0 * train.label_tokens() as f64 / train.tokens().max(1) as f64;
    fact("training tokens", count(train.tokens()));
    fact("with a label", format!("{} ({share:.1} %)", count(train.label_tokens())));
    fact(
        "tokens a row",
        format!("{:.1} on average, {longest} at most", train.tokens() as f64 / train.len().max(1) as f64),
    );
    for (label, number) in [
        ("rows read", report.train.rows),
        ("rows cut", report.train.truncated),
        ("rows left out as too long", report.train.too_long),
        ("rows left out without labels", report.train.unlabeled),
    ] {
        fact(label, grouped(number));
    }
    for (label, number) in [
        ("rows left out for their length", report.train.below_min_length + report.train.above_max_length),
        ("rows left out as duplicates", report.train.duplicates.rows + report.train.near_duplicates.rows),
        ("rows also in the evaluation rows", report.train.contaminated.rows),
    ] {
        if number > 0 {
            fact(label, grouped(number));
        }
    }
    for share in &report.mix {
        fact(
            &format!("rows from {}", share.source),
            format!("{} of {}", grouped(share.used), grouped(share.available)),
        );
    }
    facts
}

/// Where event files go.
pub fn events_dir(config: &Config) -> PathBuf {
    config.logging.logging_dir.clone().unwrap_or_else(|| config.train.output_dir.join(output::EVENTS))
}
