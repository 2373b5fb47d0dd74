//! Loading the model, and a run's state with it: fresh, from an adapter, or from a checkpoint.
use std::time::Instant;

use super::prepare::{self, Parts, Prepared};
use super::run::Options;
use super::session::{Done, Session};
use super::signals::Stop;
use super::{output, save};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_checkpoint::peft::Tensors;
use tunesmith_checkpoint::{self as checkpoint, Background, TrainState, atomic, disk::RealDisk, store};
use tunesmith_comm::Collectives;
use tunesmith_config::{Checkpointing, Config, ConfigValue as _, Resolved};
use tunesmith_data as data;
use tunesmith_model::quantized_cache::Cache;
use tunesmith_model::weights::WeightFiles;
use tunesmith_model::{Model, Phases, quantize};
use tunesmith_optim::{OptimizerPlan, Schedule, rule};
use tunesmith_parallel::fsdp::Gatherer;
use tunesmith_parallel::{ParallelPlan, optimizer};
use tunesmith_telemetry::metrics::Metrics;
use tunesmith_telemetry::progress::{Event, Observer, Pace};
use tunesmith_telemetry::resolved_config;
use tunesmith_telemetry::tensorboard::EventWriter;

/// A model, and how its frozen weights are shared with other ranks, if they are.
pub struct Loaded {
    /// The model.
    pub model: Model,
    /// The way to the ranks that hold the rest of it.
    pub gatherer: Option<Gatherer>,
}

/// Codes the base where that is kept and has not been done: of the ranks of a machine the first does it, and the others, whose
/// turn comes after, find the copy.
///
/// # Errors
/// The weights cannot be read.
pub fn ahead(parts: &Parts, observer: &dyn Observer) -> Result<()> {
    let Parts { arch, weights: Some(weights), config, stack, .. } = parts else { return Ok(()) };
    let Some(cache) = cache(Some(weights), config)? else { return Ok(()) };
    observer.event(&Event::Phase("coding the base"));
    for note in quantize::keep(arch, weights, config, stack, cache)? {
        observer.event(&Event::Notice(&note));
    }
    Ok(())
}

/// The model as it is before step 1 of a new run.
///
/// # Errors
/// The weights cannot be read.
pub fn model(parts: &Parts, gatherer: Option<&Gatherer>) -> Result<Model> {
    let Parts { arch, weights, config, stack, adapter, .. } = parts;
    let weights = weights.as_ref();
    let cache = cache(weights, config)?;
    let shards = gatherer.map(Gatherer::shards).unwrap_or_default();
    let model = Model::load_with(arch, weights, config, stack, cache, shards)?;
    Ok(with_adapter(model, adapter.as_ref()))
}

/// Puts the values of `tuning.adapter` into the model.
fn with_adapter(mut model: Model, adapter: Option<&Tensors>) -> Model {
    if let Some(adapter) = adapter {
        let specs = model.params.specs.clone();
        for spec in specs {
            // The names and shapes were compared when the adapter was opened.
            if let Some((_, values)) = adapter.get(&spec.name) {
                model.params.put(&spec.range(), values);
            }
        }
    }
    model
}

/// Where quantized matrices are kept, if they are made from a checkpoint that is not.
fn cache<'a>(weights: Option<&'a WeightFiles>, config: &Config) -> Result<Option<Cache<'a>>> {
    let how = quantize::resolve(config, weights)?;
    let dense = weights.filter(|files| config.data.use_cache && files.quantization().is_none());
    let root = config.data.cache_dir.clone().or_else(data::cache_dir);
    match (how, dense, root) {
        (Some(how), Some(files), Some(root)) => Cache::new(&root, files, how).map(Some),
        _ => Ok(None),
    }
}

/// What is to be known of a run that goes on with another number of steps than it had: most learning rates follow from it.
fn other_length(prepared: &Prepared, state: &TrainState) -> Option<String> {
    let now = prepared.batches.total_steps;
    let before = state.total_steps.filter(|&before| before != now && before > 0)?;
    let what = format!("the run now has {} and not {before}", count(now, "step"));
    let old = Schedule::of(&prepared.config.train, prepared.batches.warmup_of(before), before);
    let Some(old) = old.ok().filter(|_| state.step < now) else { return Some(what) };
    // Behind its end a schedule has no rate of its own.
    let (old, rate) = (old.lr(state.step.min(before - 1)), prepared.schedule.lr(state.step));
    let step = state.step + 1;
    Some(if old.to_bits() == rate.to_bits() {
        format!("{what}: the learning rate of step {step} stays {rate:.4e}")
    } else {
        format!("{what}: the learning rate of step {step} is {rate:.4e} and not {old:.4e}")
    })
}

impl<'a> Session<'a> {
    /// Loads the model and, where the run goes on, the checkpoint. Writes nothing.
    ///
    /// # Errors
    /// The weights, or a checkpoint that is damaged or belongs to another run.
    pub fn load(
        resolved: &'a Resolved,
        options: &Options,
        stop: &'a Stop,
        observer: &'a dyn Observer,
        mut prepared: Prepared,
        comm: Box<dyn Collectives>,
    ) -> Result<Self> {
        let saved = prepared.resume.take();
        observer.event(&Event::Phase("hashing the model"));
        let hashing = Instant::now();
        let stamp = prepared.stamp()?;
        let mut done = Done { hashing: hashing.elapsed(), ..Done::default() };
        if let Some(saved) = &saved {
            done.hashing += saved.hashing;
            for note in saved.stamp.compare(&stamp, &options.allow, &saved.dir)? {
                observer.event(&Event::Notice(&note));
            }
        }
        observer.event(&Event::Phase("loading the model"));
        let parallel = ParallelPlan::new(&prepared.config.train, comm.world().size);
        let Loaded { mut model, gatherer } = if let Some(measured) = prepared.loaded.take() {
            measured
        } else {
            let gatherer = Gatherer::new(&parallel, &rule(&prepared.config.train)?.into(), &*comm)?;
            Loaded { model: model(&prepared, gatherer.as_ref())?, gatherer }
        };
        for note in &model.notes {
            observer.event(&Event::Notice(note));
        }
        let train = &prepared.config.train;
        model.phases = Phases::default();
        model.set_checkpointing(train.gradient_checkpointing);
        let ratio = prepared.config.tuning.lora.loraplus_lr_ratio;
        let plan = OptimizerPlan::new(train, ratio, &optimizer::tensors(&model.params.specs))?;
        let (mut optimizer, sharing) = optimizer::shared(&plan, &parallel, &mut model.params, comm.world())?;
        let mut ema = optimizer::average(&plan, &model.params, &sharing);
        let mut state =
            TrainState { seed: train.seed, data_seed: train.data_seed.unwrap_or(train.seed), ..TrainState::default() };
        let asked = &resolved.config.train;
        if train.max_tokens_per_pass != asked.max_tokens_per_pass {
            state.max_tokens_per_pass = train.max_tokens_per_pass;
        }
        if asked.gradient_checkpointing == Checkpointing::Auto {
            state.gradient_checkpointing = Some(train.gradient_checkpointing.to_json());
        }
        if let Some(saved) = &saved {
            let specs = model.params.specs.clone();
            let kept = model.params.ranges();
            saved.restore_kept(&specs, (model.params.values_mut(), &kept), &mut optimizer, ema.as_mut())?;
            let TrainState { max_tokens_per_pass, gradient_checkpointing, .. } = state;
            state = saved.state.clone();
            state.max_tokens_per_pass = state.max_tokens_per_pass.or(max_tokens_per_pass);
            state.gradient_checkpointing = gradient_checkpointing;
            let position = serde_json::from_value(state.sampler.clone()).ok();
            if !position.is_some_and(|position| prepared.sampler.restore(position)) {
                return Err(Error::checkpoint(format!(
                    "{}: its position in the data is not one of this run",
                    saved.dir.display()
                ))
                .hint(
                    "the data, the batch size or the seed have changed; start a new run in another train.output_dir",
                ));
            }
        }
        if let Some(note) = other_length(&prepared, &state) {
            observer.event(&Event::Notice(&note));
        }
        state.total_steps = Some(prepared.batches.total_steps);
        let mut saver = Background::new(&RealDisk);
        if comm.world().is_first() && !sharing.shares_state() && prepared.optimizer.saving > 0 {
            let values = model.params.values();
            let apart = (ema.is_some() || optimizer.averages()).then_some(values);
            saver.reserve(values, apart, &optimizer.tensors());
        }
        let pace = Pace::new(state.step, prepared.batches.total_steps);
        Ok(Self {
            resolved,
            stop,
            observer,
            comm,
            gatherer,
            model,
            optimizer,
            ema,
            sharing,
            saver,
            saved: state.step,
            begun: state.step,
            overflows_in_a_row: 0,
            save_is_owed: false,
            state,
            metrics: None,
            displaced: None,
            events: None,
            found: [0; 2],
            pace,
            done,
            stamp,
            prepared,
        })
    }

    /// Starts to write: the output directory is this run's from here on.
    ///
    /// # Errors
    /// The disk.
    pub fn open(&mut self, options: &Options, began: Instant) -> Result<()> {
        let config = &self.resolved.config;
        let output_dir = &config.train.output_dir;
        let Some(lock) = &mut self.prepared.lock else {
            self.done.preparing = began.elapsed();
            return Ok(());
        };
        lock.keep();
        if options.overwrite {
            output::clear(output_dir)?;
        }
        checkpoint::clean_stale(output_dir)?;
        let here = store::checkpoint_dir(output_dir, self.state.step);
        let best = save::best_dir(self).filter(|dir| store::is_whole(dir));
        checkpoint::point(output_dir, here.is_dir().then_some(here.as_path()), best.as_deref())?;
        for aside in output::set_aside_later(output_dir, self.state.step)? {
            let text = format!("of steps that will be done again: set aside as {}", aside.display());
            self.observer.event(&Event::Notice(&text));
        }
        let path = output_dir.join(output::METRICS);
        self.metrics = Some(match self.state.step {
            0 => Metrics::create(&path)?,
            step => Metrics::resume(&path, step, self.state.evaluated_step)?,
        });
        let resolved_yaml = resolved_config::resolved_yaml(&self.resolved.path, &self.prepared.settings, config);
        atomic::replace_file(&RealDisk, &output_dir.join(output::CONFIG), &resolved_yaml)?;
        if config.logging.tensorboard {
            let mut events = EventWriter::create(&prepare::events_dir(config), self.state.step)?;
            events.text(self.state.step, "config", &resolved_config::settings_table(&self.prepared.settings))?;
            self.events = Some(events);
        }
        self.done.preparing = began.elapsed();
        Ok(())
    }
}
