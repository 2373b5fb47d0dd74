//! Everything before the weights: the model's shape, the output directory, the data, the schedule, the disk, the
//! checkpoint to go on from. Bad input is refused here, where it costs seconds, and nothing is left behind.
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};

use super::autobatch::{budget, resolve, strategy_auto};
use super::load::{self, Loaded};
use super::lock::DirLock;
use super::ranks::Seat;
use super::run::Options;
use super::signals::Stop;
use super::{adapter, classification_run, engine, output, output_checks, scaling, trainable};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::memory;
use tunesmith_base::words::count;
use tunesmith_checkpoint::adapter_config::copied;
use tunesmith_checkpoint::peft::Tensors;
use tunesmith_checkpoint::{self as checkpoint, Checkpoint};
use tunesmith_comm::Collectives;
use tunesmith_config::arch::Arch;
use tunesmith_config::{Config, ConfigValue as _, Init, Mode, Quantization, Resolved, SaveStrategy};
use tunesmith_config::{Setting, Source};
use tunesmith_data::{self as data, Dataset, Sampler};
use tunesmith_hub::{self as hub, Part, Snapshot};
use tunesmith_model::adapters::{self, KINDS, Method};
use tunesmith_model::quantize;
use tunesmith_model::stack::Stack;
use tunesmith_model::targets::{self, Placement, Targets};
use tunesmith_model::weights::{WeightFiles, Wrapping};
use tunesmith_optim::Schedule;
use tunesmith_plan::batches::{Batches, Request};
use tunesmith_plan::memory::OptimizerBytes;
use tunesmith_plan::rates::{Rate, rates};
use tunesmith_plan::{bytes, grouped, human_bytes, platform};
use tunesmith_telemetry::machine;
use tunesmith_telemetry::progress::{Downloads, Event, Observer};

/// A run that has been found possible.
pub struct Prepared {
    /// The model and what is trained of it, with sizes in the place of `auto`. What is said of a run is mostly said of these,
    /// so that they stand for it.
    pub parts: Parts,
    /// The model as it is before step 1, where measuring has loaded it.
    pub loaded: Option<Loaded>,
    /// Holds the output directory; only the first rank does.
    pub lock: Option<DirLock>,
    /// How many ranks there are, and how they came about.
    pub ranks: (usize, String),
    /// How many of them are threads of this process.
    pub together: u64,
    /// What the machine is used for, in a line.
    pub platform: String,
    /// How the learning rate was scaled, if it was.
    pub scaled: Option<String>,
    /// The rows.
    pub dataset: Dataset,
    /// Their order.
    pub sampler: Sampler,
    /// Steps and epochs.
    pub batches: Batches,
    /// The learning rate of each step.
    pub schedule: Schedule,
    /// Every setting as the run uses it.
    pub settings: Vec<Setting>,
}

impl Deref for Prepared {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl DerefMut for Prepared {
    fn deref_mut(&mut self) -> &mut Parts {
        &mut self.parts
    }
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
    /// Of a multimodal model what its language model is wrapped in.
    pub wrapping: Option<Wrapping>,
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
    let (stack, stack_hashes) = adapter::stack(&config.tuning.adapters, &mut arch)?;
    let (length, note) = resolved.max_seq_len(arch.max_position_embeddings, arch.reach(), false)?;
    config.model.max_seq_len = length;
    if let Some(note) = note {
        observer.event(&Event::Notice(&note));
    }
    let resume = claim(&config, &model_dir)?;
    let source = adapter::source(&config, resume.as_ref(), &downloads, observer)?;
    adapter::grow(&config, &model_dir, source.as_deref(), &mut arch)?;
    arch.separate(Targets::of(&config.tuning).apart());
    hub::fetch_paths(&mut config.data, &downloads)?;
    classification_run::set_head(&mut config, &mut arch, source.as_deref(), observer)?;
    let mut adapter = None;
    if let Some(dir) = &source {
        let (tuning, tensors) = adapter::open(dir, resolved, &arch)?;
        if config.train.resume_from_checkpoint.is_none() {
            config.tuning.adapter = Some(dir.clone());
        }
        if let Some(about) = adapters::of(&tuning).map(Method::about) {
            config.tuning = copied(about, |_| true, &tuning, &config.tuning);
        }
        adapter = Some(tensors);
    }
    let placements = targets::placed(&arch, &config.tuning)?;
    let tensors = trainable::tensors(&config, &arch, &placements)?;
    let trainable = tensors.iter().map(|(_, shape)| trainable::size(shape)).sum();
    trainable::check_rates(&config, &tensors)?;
    if let Some(note) = trainable::beyond_peft(&arch, &tensors) {
        observer.event(&Event::Notice(note));
    }
    let optimizer = budget::optimizer(&config, tensors, budget::threads(&config))?;
    if let Some(snapshot) = &snapshot {
        config.model.revision = Some(snapshot.commit.clone());
        if config.model.init == Init::Pretrained {
            hub::model_dir(&config.model, Part::Whole, &downloads)?;
        }
    }
    let weights = match config.model.init {
        Init::Pretrained => Some(WeightFiles::open_model(&model_dir, &arch, &stored)?),
        Init::Random => {
            if let Some(wrapper) = arch.wrapper {
                return Err(Error::config(format!(
                    "model.init: random, and {} describes a multimodal model ({})",
                    model_dir.join("config.json").display(),
                    wrapper.model_type
                ))
                .hint("take a config.json of the language model alone: what its text_config holds"));
            }
            None
        }
    };
    let wrapping = weights.as_ref().and_then(WeightFiles::wrapping);
    config.model.quantization = quantization(&config, &arch, weights.as_ref())?;
    Ok(Parts {
        model_dir,
        snapshot,
        arch,
        weights,
        wrapping,
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
    /// What the machine is used for, in a line.
    platform: String,
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
        for source in data::named_inputs(config).iter().map(PathBuf::as_path).chain([model_dir]) {
            output_checks::refuse_own_source(source, output_dir)?;
        }
        let lock = if seat.world.is_first() { Some(stop.acquire(output_dir)?) } else { None };
        let resume = output_checks::find_checkpoint(config, observer)?;
        let goes_on_here = resume.as_ref().is_some_and(|resume| output_checks::is_inside(&resume.dir, output_dir));
        if lock.is_some() && !goes_on_here && !options.overwrite {
            output_checks::refuse_earlier_run(output_dir)?;
        }
        if lock.is_some() {
            output_checks::refuse_foreign(config, options.overwrite, goes_on_here, observer)?;
        }
        claimed = Some((lock, goes_on_here));
        Ok(resume)
    })?;
    let (lock, goes_on_here) = claimed.ok_or_else(|| Error::config("the output directory was not looked at"))?;
    observer.event(&Event::Phase("reading the data"));
    let dataset = data::load(&parts.config, &parts.model_dir, parts.arch.vocab_size, observer)?;
    let sampler = dataset.sampler(&parts.config, seat.world.size);
    let ranks = (seat.world.size, seat.described.clone());
    if seat.world.local_size > 1 && seat.world.local_rank == 0 {
        load::ahead(&parts, observer)?;
    }
    let host = machine::host();
    let threads = seat.threads(parts.config.train.num_threads).unwrap_or(host.cores);
    let choices = platform::choose(&host, seat.layout(), platform::Engine::Cpu);
    let platform = platform::summary(&host, &choices, threads);
    Ok(Found { parts, lock, goes_on_here, dataset, sampler, ranks, platform })
}

impl Found {
    /// Checks the rest; where sizes are left to measurement, loads and measures, with the other ranks.
    ///
    /// # Errors
    /// Whatever is wrong with the schedule or the disk; [`tunesmith_base::Kind::Memory`]: not even one row fits into the memory
    /// budget; [`tunesmith_base::Kind::Peer`]: a rank is gone.
    pub fn settle(
        self,
        resolved: &Resolved,
        options: &Options,
        comm: &dyn Collectives,
        observer: &dyn Observer,
    ) -> Result<Prepared> {
        let Self { mut parts, lock, goes_on_here, dataset, mut sampler, ranks, platform } = self;
        output_checks::go_on_together(comm, parts.resume.as_ref(), &parts.config.train.output_dir)?;
        if let Some((strategy, why)) = strategy_auto::choose(&parts, &dataset, comm)? {
            parts.config.train.strategy = strategy;
            observer.event(&Event::Notice(&why));
        }
        let loaded = resolve::sizes(&mut parts, &dataset, &mut sampler, comm, observer)?;
        let settings = effective(resolved, &parts.config);
        let warms = ["train.warmup_ratio", "train.warmup_steps"].map(|key| *resolved.source(key) != Source::Default);
        let scaled = scaling::scale(&mut parts.config.train, ranks.0, warms.contains(&true));
        let Parts { config, arch, model_dir, trainable, optimizer, .. } = &parts;
        let batches = batches(config, &dataset, &sampler, ranks.0)?;
        let schedule = Schedule::of(&config.train, batches.warmup_steps, batches.total_steps)?;
        // What is there already of this run, or goes before the first step, needs no further room.
        let held = if goes_on_here || options.overwrite { output::bytes_of_runs(&config.train.output_dir) } else { 0 };
        // Where averages are published, the trained values stand beside them in a checkpoint.
        let state = optimizer.state + optimizer.average + optimizer.publishing;
        if lock.is_some() {
            check_disk(config, arch, model_dir, (*trainable, state), &batches, held)?;
        }
        let together = if comm.shares_memory() { ranks.0 as u64 } else { 1 };
        Ok(Prepared {
            parts,
            loaded,
            lock,
            ranks,
            together,
            platform,
            scaled,
            dataset,
            sampler,
            batches,
            schedule,
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
        let section = setting.key.rsplit_once('.').map_or("", |(section, _)| section);
        let shapes = KINDS.iter().any(|about| about.section.name == section);
        let of_adapter = config.tuning.adapter.is_some() && shapes;
        setting.key != "train.resume_from_checkpoint" && !(of_adapter && setting.source == Source::Default)
    });
    for setting in &mut settings {
        match setting.key.as_str() {
            "model.max_seq_len" => setting.value = config.model.max_seq_len.into(),
            "data.labels" => setting.value = config.data.labels.to_json(),
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
        Mode::Freeze => trainable::values(arch).saturating_sub(trainable),
        _ if adapters::of(&config.tuning).is_some_and(Method::takes_from_base) => trainable,
        _ => 0,
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
        facts.push(("platform".to_owned(), self.platform.clone()));
        facts.push(("kernels".to_owned(), engine::describe(&self.config)));
        if self.ranks.0 > 1 {
            facts.push(("ranks".to_owned(), self.ranks.1.clone()));
        }
        let state = human_bytes(self.optimizer.state + self.optimizer.average);
        let average = if train.ema_decay.is_some() { " and a moving average" } else { "" };
        let shared = budget::way(&self.config, self.ranks.0).strategy.shards_optimizer();
        let among = if shared { format!(", shared among {} ranks", self.ranks.0) } else { String::new() };
        facts.push(("optimizer".to_owned(), format!("{}{average} · {state} of state{among}", train.optim)));
        if self.optimizer.saving > 0 && !shared {
            let text = format!(
                "{} kept so that saving runs in the background (train.save_async)",
                human_bytes(self.optimizer.saving)
            );
            facts.push(("checkpoint copy".to_owned(), text));
        }
        facts.extend(trainable::facts(self));
        facts.extend(classification_run::facts(&self.dataset));
        if let Some(budget) = memory::budget() {
            let asked = if train.memory_budget.is_some() { "" } else { ": 90 % of what is free" };
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
        let (rates, scaled) = (&rate_table(self), self.scaled.as_deref());
        observer.event(&Event::Plan { facts: &facts, batches: &self.batches, rates, scaled, resumed_at });
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
    let tuning = &prepared.config.tuning;
    let what = match adapters::of(tuning) {
        Some(method) => {
            let kind = if tuning.lora.use_dora { "DoRA" } else { method.about().title };
            let coded = prepared.config.model.quantization != Quantization::None;
            let q = if coded && tuning.mode == Mode::Lora { "Q" } else { "" };
            format!("{q}{kind} on {} modules", prepared.placements.len())
        }
        None if tuning.mode == Mode::Full => "every weight".to_owned(),
        None => "some weights".to_owned(),
    };
    let head = match &prepared.arch.score {
        Some(head) if head.is_number() => " and a head for a number".to_owned(),
        Some(head) => format!(" and a head for {}", count(head.labels.len(), "label")),
        None => String::new(),
    };
    let family = format!("{:?}", prepared.arch.family);
    let name = prepared.snapshot.as_ref().map_or_else(|| prepared.model_dir.display().to_string(), Snapshot::label);
    format!("{name} · {family} · {what}{head} · {} values trained", grouped(prepared.trainable))
}

/// Where event files go.
pub fn events_dir(config: &Config) -> PathBuf {
    config.logging.logging_dir.clone().unwrap_or_else(|| config.train.output_dir.join(output::EVENTS))
}
