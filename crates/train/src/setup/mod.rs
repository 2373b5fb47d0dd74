//! Turns a configuration into the plan of a run. Checks the model's shape, the output directory, the data, the schedule, the
//! disk, and the checkpoint to resume. Bad input is refused here, before training, and leaves no files behind.
//!
//! [`open_locally`] does what a rank can do alone; [`Checked::plan`] decides the rest together with the other ranks.
use std::path::PathBuf;

mod as_used;
mod disk;
mod lr_scaling;
mod output_checks;
mod plan_parts;

use super::autobatch::batch_plan::{BatchPlan, BatchRequest};
use super::autobatch::choice_cache::CachedChoice;
use super::autobatch::sizes::{self, Measurement, later_bytes};
use super::autobatch::strategy_auto;
use super::engine;
use super::features::Compute;
use super::lock::DirLock;
use super::memory_prediction::{PassLimits, Peak, largest_evaluation, largest_pass};
use super::model_source::{Described, ModelSource};
use super::options::Options;
use super::prepared::Prepared;
use super::ranks::Seat;
use super::run_plan::{ChosenSizes, EarlyStoppingPlan, MemoryPlan, RanksPlan, RunPlan, SavingPlan};
use super::signals::Stop;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::memory::limits;
use tunesmith_base::words::count;
use tunesmith_checkpoint::{Checkpoint, TrainState};
use tunesmith_comm::Collectives;
use tunesmith_config::{Auto, Checkpointing, Config, EvalStrategy, Resolved, Source, Strategy, TrainConfig};
use tunesmith_data::{self as data, Dataset, Sampler};
use tunesmith_device::{Device, memory};
use tunesmith_model::device;
use tunesmith_ops::simd;
use tunesmith_optim::{OptimizerPlan, Schedule};
use tunesmith_parallel::ParallelPlan;
use tunesmith_plan::batches::{Batches, Request};
use tunesmith_plan::platform;
use tunesmith_plan::strategies::Way;
use tunesmith_telemetry::machine::{self, MachineInfo};
use tunesmith_telemetry::progress::{Event, Observer};
use tunesmith_telemetry::resolved_config;

/// A run that one rank has checked by itself: the model is open, and the data are read.
pub struct Checked {
    source: ModelSource,
    /// The configuration, completed from the model and its adapter.
    config: Config,
    lock: Option<DirLock>,
    resume: Option<Checkpoint>,
    /// Whether the checkpoint to resume is in the output directory.
    resumes_here: bool,
    dataset: Dataset,
    sampler: Sampler,
    ranks: String,
    platform: String,
}

/// Checks everything that needs neither loaded weights nor the other ranks.
///
/// # Errors
/// Those of the model folder, the data, the output directory, and the checkpoint.
pub fn open_locally(
    resolved: &Resolved,
    options: &Options,
    stop: &Stop,
    observer: &dyn Observer,
    seat: &Seat,
) -> Result<Checked> {
    let resumes = resolved.config.train.resume_from_checkpoint.is_some();
    if options.overwrite && resumes {
        return Err(Error::config("--overwrite contradicts train.resume_from_checkpoint").hint("remove one of them"));
    }
    if !options.allow.is_empty() && !resumes {
        return Err(Error::config("--allow has no effect without --resume")
            .hint("it accepts differences from a checkpoint's stamp"));
    }
    let described = Described::find(resolved, observer)?;
    // Checked before anything large is downloaded or read.
    let output_dir = &resolved.config.train.output_dir;
    output_checks::refuse_result_as_output(output_dir)?;
    for source in data::named_inputs(&resolved.config).iter().map(PathBuf::as_path).chain([described.dir()]) {
        output_checks::refuse_own_source(source, output_dir)?;
    }
    let locks = seat.world.is_first() && !options.plan_only;
    let lock = if locks { Some(stop.acquire(output_dir)?) } else { None };
    let resume = output_checks::find_checkpoint(&resolved.config, observer)?;
    let resumes_here = resume.as_ref().is_some_and(|resume| output_checks::is_inside(&resume.dir, output_dir));
    if lock.is_some() {
        if !resumes_here && !options.overwrite {
            output_checks::refuse_earlier_run(output_dir)?;
        }
        output_checks::refuse_foreign(&resolved.config, options.overwrite, resumes_here, observer)?;
    }
    let (source, config) = described.open(resolved, resume.as_ref(), observer)?;
    observer.event(&Event::Phase("reading the data"));
    let dataset = data::load(&config, &source.dir, source.arch.text_ids(), observer, source.pictures.as_ref())?;
    let sampler = dataset.sampler(&config);
    if seat.world.local_size > 1 && seat.world.local_rank == 0 {
        source.quantize_ahead(observer)?;
    }
    let host = machine::host();
    let threads = seat.threads(config.train.num_threads).unwrap_or(host.cores);
    let platform = platform::summary(&host, &device::describe(source.device), threads);
    let ranks = seat.described.clone();
    Ok(Checked { source, config, lock, resume, resumes_here, dataset, sampler, ranks, platform })
}

impl Checked {
    /// Computes the features of the run's pictures, if that is to be done. All ranks of a machine call this at once and share the work.
    ///
    /// # Errors
    /// Those of [`ModelSource::compute_features`].
    pub fn features(&mut self, options: &Options, observer: &dyn Observer) -> Result<()> {
        let compute = if options.plan_only { Compute::Assume } else { Compute::AsConfigured };
        let features = self.source.compute_features(&self.config, &self.dataset, compute, observer)?;
        if let Some(features) = features.filter(|features| features.computed > 0) {
            observer.event(&Event::Notice(&features.described()));
        }
        Ok(())
    }

    /// Makes the plan together with the other ranks. If sizes are `auto`, loads the model and measures passes.
    ///
    /// # Errors
    /// Those of the schedule and the disk. [`tunesmith_base::Kind::Memory`]: not even one row fits into the memory budget.
    /// [`tunesmith_base::Kind::Peer`]: a rank is gone.
    pub fn plan(
        mut self,
        resolved: &Resolved,
        options: &Options,
        comm: &dyn Collectives,
        observer: &dyn Observer,
    ) -> Result<Prepared> {
        let ranks = comm.world().size;
        let output_dir = self.config.train.output_dir.clone();
        output_checks::resume_together(comm, self.resume.as_ref(), &output_dir)?;
        let strategy = self.strategy(comm, observer)?;
        let train = TrainConfig { strategy, ..self.config.train.clone() };
        let parallel = ParallelPlan::new(&train, ranks);
        let way = Way::plain(parallel.strategy);

        let request = BatchRequest::new(&train, &self.source.arch, ranks);
        let later =
            later_bytes(&self.source.optimizer, self.source.trained_parameters(), &parallel, comm, self.source.device);
        let measurement = Measurement {
            source: &self.source,
            dataset: &self.dataset,
            sampler: &self.sampler,
            parallel: &parallel,
            rule: &tunesmith_optim::rule(&train)?.into(),
            later,
            cached: self
                .dataset
                .cache_dir(&self.config)
                .map(|cache| CachedChoice::path(&cache, &self.fingerprint(&request, strategy, later, comm))),
            comm,
        };
        let (batch, loaded) = sizes::find(&request, self.resume.as_ref(), &measurement, observer)?;
        // A step contains the micro-batches of all ranks.
        self.sampler.resize(batch.batch_size, batch.grad_accum * ranks);

        let train = TrainConfig {
            batch_size: Auto::Given(batch.batch_size),
            grad_accum: Auto::Given(batch.grad_accum),
            gradient_checkpointing: batch.checkpointing,
            max_tokens_per_pass: batch.max_tokens_per_pass,
            ..train
        };
        let config = Config { train, ..self.config.clone() };
        let settings = as_used::settings(resolved, &config);
        let has_warmup = ["train.warmup_ratio", "train.warmup_steps"];
        let has_warmup = has_warmup.iter().any(|key| *resolved.source(key) != Source::Default);
        let rows = batch.batch_size * batch.grad_accum;
        let (config, lr_scaling) = match lr_scaling::scaled(&config.train, rows * ranks, rows, has_warmup) {
            Some((train, text)) => (Config { train, ..config }, Some(text)),
            None => (config, None),
        };

        let steps = self.steps(&config.train, &batch, ranks)?;
        if steps.warmup_steps > 0 && steps.warmup_steps >= steps.total_steps {
            observer.event(&Event::Notice(&format!(
                "warning: train.warmup_steps: {}, and this run has {}: the learning rate does not reach its peak",
                steps.warmup_steps,
                count(steps.total_steps, "step")
            )));
        }
        let schedule = Schedule::of(&config.train, steps.warmup_steps, steps.total_steps)?;
        let loraplus = config.tuning.lora.loraplus_lr_ratio;
        let optimizer = OptimizerPlan::new(&config.train, loraplus, &self.source.trained)?;
        if self.lock.is_some() {
            // Files that this run has already written, or removes before step 1, need no additional space.
            let reuses = self.resumes_here || options.overwrite;
            disk::check(&config, &self.source, &steps, reuses)?;
        }
        let engine = engine::plan(&config, &self.source)?;
        let in_process = if comm.shares_memory() { ranks as u64 } else { 1 };
        let limits = pass_limits(&config, batch.batch_size);
        let pass = largest_pass(&self.dataset, &limits);
        let memory = self.source.memory().reading_ahead().evaluating(largest_evaluation(&self.dataset, &limits));
        let rank = memory.rank(way, batch.checkpointing, ranks, &pass).ok();
        // A scorer and SARI compare with the text of the prompts; only the rank that scores reads it.
        let generates = config.train.predict_with_generate && self.dataset.validation.is_some();
        if comm.world().is_first() && generates && config.eval.reads_sources() {
            self.dataset.read_validation_sources(&config)?;
        }
        let plan = RunPlan {
            model: plan_parts::model(&config, &self.source)?,
            stamp: plan_parts::stamp(&config, &engine, &self.source, &self.dataset, ranks)?,
            engine,
            ranks: RanksPlan { count: ranks, in_process, summary: self.ranks, platform: self.platform },
            parallel,
            batch,
            chosen: ChosenSizes {
                checkpointing: resolved.config.train.gradient_checkpointing == Checkpointing::Auto,
                max_tokens_per_pass: batch.max_tokens_per_pass != self.config.train.max_tokens_per_pass,
            },
            steps,
            schedule,
            lr_scaling,
            optimizer_name: config.train.optim,
            optimizer_on_host: matches!(self.source.device, Device::Cuda(_))
                && !tunesmith_optim::rule(&config.train)?.takes_found_factor(),
            optimizer,
            replica_check_steps: config.train.replica_check_steps,
            max_nonfinite_steps: config.train.max_nonfinite_steps as u64,
            evaluation: plan_parts::evaluation(&config, &self.source, &self.dataset, ranks, steps.total_steps)?,
            early_stopping: EarlyStoppingPlan {
                patience: config.train.early_stopping_patience as u64,
                threshold: config.train.early_stopping_threshold,
            },
            saving: SavingPlan {
                when: plan_parts::saving(&config.train, steps.total_steps)?,
                keep_last: config.train.save_total_limit,
                load_best_at_end: config.train.load_best_model_at_end,
                in_background: config.train.save_async,
                copy_bytes: self.source.optimizer.saving,
            },
            logging: plan_parts::logging(&config, steps.total_steps),
            samples: plan_parts::samples(&config, &self.source, &self.dataset)?,
            memory: MemoryPlan {
                configured: config.train.memory_budget.map(|bytes| bytes.0),
                budget: memory::budget(self.source.device),
                optimizer_state: self.source.optimizer.state + self.source.optimizer.average,
                predicted: rank.map(|rank| Peak {
                    rank,
                    ranks_in_process: in_process,
                    on_gpu: matches!(self.source.device, Device::Cuda(_)),
                }),
            },
            seed: config.train.seed,
            data_seed: config.train.data_seed.unwrap_or(config.train.seed),
            output_dir,
            resolved_yaml: resolved_config::resolved_yaml(&resolved.path, &settings, &resolved.config),
            settings,
        };
        let resume_note = self
            .resume
            .as_ref()
            .and_then(|saved| resume_note(&config.train, &plan.steps, &plan.schedule, &saved.state));
        let Self { source, lock, resume, dataset, sampler, .. } = self;
        Ok(Prepared { plan, source, dataset, sampler, resume, resume_note, loaded, lock })
    }

    /// The value of `train.strategy`. With `auto` and several ranks, chooses by predicted memory.
    fn strategy(&self, comm: &dyn Collectives, observer: &dyn Observer) -> Result<Strategy> {
        let (train, ranks) = (&self.config.train, comm.world().size);
        if ranks == 1 || train.strategy != Strategy::Auto {
            return Ok(train.strategy);
        }
        let candidates = strategy_auto::CANDIDATES.map(|strategy| {
            (strategy, Way::plain(ParallelPlan::new(&TrainConfig { strategy, ..train.clone() }, ranks).strategy))
        });
        // `batch_size: auto` is not measured yet and counts as one row.
        let pass = largest_pass(&self.dataset, &pass_limits(&self.config, train.batch_size.or(1)));
        let (strategy, why) =
            strategy_auto::choose(&self.source, &candidates, train.gradient_checkpointing, &pass, comm)?;
        observer.event(&Event::Notice(&why));
        Ok(strategy)
    }

    fn steps(&self, train: &TrainConfig, batch: &BatchPlan, ranks: usize) -> Result<Batches> {
        let steps = Batches::new(Request {
            rows: self.sampler.rows() as u64,
            tokens: self.dataset.train.tokens() as u64,
            label_tokens: self.dataset.train.label_tokens() as u64,
            batch_size: batch.batch_size as u64,
            grad_accum: batch.grad_accum as u64,
            world: ranks as u64,
            epochs: train.num_train_epochs,
            max_steps: train.max_steps,
            warmup_steps: train.warmup_steps,
            warmup_ratio: train.warmup_ratio,
        })?;
        debug_assert_eq!(steps.steps_per_epoch, self.sampler.steps_per_epoch() as u64);
        Ok(steps)
    }

    /// Hashes everything that the memory and the time of passes depend on. Only the device's total memory counts here. Free
    /// memory changes all the time, so it is compared with a cached choice when that is read.
    fn fingerprint(
        &self,
        request: &BatchRequest,
        strategy: Strategy,
        later: u64,
        comm: &dyn Collectives,
    ) -> blake3::Hash {
        let Config { model, train, data, tuning, .. } = &self.config;
        let ModelSource { model_arch, optimizer, .. } = &self.source;
        let machine = MachineInfo::detect();
        let total = || device::total(self.source.device).unwrap_or(0);
        let memory = train.memory_budget.map_or_else(total, |bytes| bytes.0);
        let group = limits::group().map_or(0, |group| group.limit);
        let parts = [
            env!("CARGO_PKG_VERSION").to_owned(),
            format!("{model_arch:?} {tuning:?} {:?} {:?}", model.dtype, model.init),
            format!("{} {} {} {optimizer:?} {later}", train.bf16, train.fp16, train.optim),
            format!("{strategy} {} {}", comm.name(), comm.world().local_size),
            format!("{request:?} {} {} {}", self.dataset.fingerprint, data.packing, model.max_seq_len),
            format!("{} {memory} {group} {} {:?}", machine.processor, tunesmith_ops::par::threads(), simd::level()),
            format!("{:?} {:?}", self.source.device, device::kernels(self.source.device, &self.config)),
        ];
        blake3::hash(parts.join("\n").as_bytes())
    }
}

/// The pass limits of a configuration with micro-batches of `batch_size` rows.
fn pass_limits(config: &Config, batch_size: usize) -> PassLimits {
    let train = &config.train;
    PassLimits {
        batch_size,
        eval_batch_size: (train.eval_strategy != EvalStrategy::No).then_some(train.eval_batch_size),
        max_tokens_per_pass: train.max_tokens_per_pass,
        packing: config.data.packing.then_some(config.model.max_seq_len),
    }
}

/// A note for a run that is resumed with another number of steps, which changes most learning rates.
fn resume_note(train: &TrainConfig, steps: &Batches, schedule: &Schedule, state: &TrainState) -> Option<String> {
    let now = steps.total_steps;
    let before = state.total_steps.filter(|&before| before != now && before > 0)?;
    let what = format!("note: the run now has {} and not {before}", count(now, "step"));
    let old = Schedule::of(train, steps.warmup_of(before), before);
    let Some(old) = old.ok().filter(|_| state.step < now) else { return Some(what) };
    // A schedule has no rates after its last step.
    let (old, rate) = (old.lr(state.step.min(before - 1)), schedule.lr(state.step));
    let step = state.step + 1;
    Some(if old.to_bits() == rate.to_bits() {
        format!("{what}: the learning rate of step {step} stays {rate:.4e}")
    } else {
        format!("{what}: the learning rate of step {step} is {rate:.4e} and not {old:.4e}")
    })
}
