//! Loads the model and, on a resume, the state of the run; then opens the output directory.
use std::time::Instant;

use super::model_source::Loaded;
use super::options::Options;
use super::prepared::Prepared;
use super::session::{Done, Session};
use super::signals::Stop;
use super::{output, save};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::disk::RealDisk;
use tunesmith_checkpoint::{self as checkpoint, Background, Stamp, TrainState, own_files, store};
use tunesmith_comm::Collectives;
use tunesmith_config::ConfigValue as _;
use tunesmith_model::Phases;
use tunesmith_parallel::fsdp::Gatherer;
use tunesmith_parallel::optimizer;
use tunesmith_telemetry::metrics::MetricsWriter;
use tunesmith_telemetry::progress::{Event, Observer, Throughput};
use tunesmith_telemetry::resolved_config;
use tunesmith_telemetry::tensorboard::EventWriter;

impl<'a> Session<'a> {
    /// Loads the model and, on a resume, the checkpoint. Writes nothing.
    ///
    /// # Errors
    /// The weights cannot be read, or the checkpoint is damaged or belongs to another run.
    pub fn load(
        options: &Options,
        stop: &'a Stop,
        observer: &'a dyn Observer,
        prepared: Prepared,
        comm: Box<dyn Collectives>,
    ) -> Result<Self> {
        let Prepared { plan, source, dataset, mut sampler, resume, resume_note, loaded, lock } = prepared;
        observer.event(&Event::Phase("hashing the model"));
        let hashing = Instant::now();
        let stamp = Stamp { base_model: source.fingerprint()?, ..plan.stamp.clone() };
        let mut done = Done { device: source.device, hashing: hashing.elapsed(), ..Done::default() };
        if let Some(saved) = &resume {
            done.hashing += saved.hashing;
            for note in saved.stamp.compare(&stamp, &options.allow, &saved.dir)? {
                observer.event(&Event::Notice(&note));
            }
        }
        observer.event(&Event::Phase("loading the model"));
        let Loaded { mut model, gatherer } = if let Some(measured) = loaded {
            measured
        } else {
            let gatherer = Gatherer::new(&plan.parallel, &plan.optimizer.rule, &*comm)?;
            Loaded { model: source.load(gatherer.as_ref())?, gatherer }
        };
        for note in &model.notes {
            observer.event(&Event::Notice(note));
        }
        model.phases = Phases::default();
        model.set_checkpointing(plan.batch.checkpointing);
        let (mut optimizer, sharing) =
            optimizer::shared(&plan.optimizer, &plan.parallel, &mut model.params, comm.world())?;
        let mut ema = optimizer::average(&plan.optimizer, &model.params, &sharing);
        let mut state = TrainState { seed: plan.seed, data_seed: plan.data_seed, ..TrainState::default() };
        if plan.chosen.max_tokens_per_pass {
            state.max_tokens_per_pass = plan.batch.max_tokens_per_pass;
        }
        if plan.chosen.checkpointing {
            state.gradient_checkpointing = Some(plan.batch.checkpointing.to_json());
        }
        if let Some(saved) = &resume {
            let specs = model.params.specs.clone();
            let kept = model.params.ranges();
            saved.restore_kept(&specs, model.params.values_mut(), &kept, &mut optimizer, ema.as_mut())?;
            let TrainState { max_tokens_per_pass, gradient_checkpointing, .. } = state;
            state = saved.state.clone();
            state.max_tokens_per_pass = state.max_tokens_per_pass.or(max_tokens_per_pass);
            state.gradient_checkpointing = gradient_checkpointing;
            let position = serde_json::from_value(state.sampler.clone()).ok();
            if !position.is_some_and(|position| sampler.restore(position)) {
                return Err(Error::checkpoint(format!(
                    "{}: its position in the data does not fit this run",
                    saved.dir.display()
                ))
                .hint(
                    "the data, the batch size or the seed have changed; start a new run in another train.output_dir",
                ));
            }
        }
        if let Some(note) = resume_note {
            observer.event(&Event::Notice(&note));
        }
        state.total_steps = Some(plan.steps.total_steps);
        let mut saver = Background::new(&RealDisk);
        if comm.world().is_first() && !sharing.shares_state() && plan.saving.copy_bytes > 0 {
            let values = model.params.values();
            let apart = (ema.is_some() || optimizer.averages()).then_some(values);
            saver.reserve(values, apart, &optimizer.tensors());
        }
        let pace = Throughput::new(state.step, plan.steps.total_steps);
        Ok(Self {
            stop,
            observer,
            comm,
            gatherer,
            model,
            checkpointing: plan.batch.checkpointing,
            optimizer,
            ema,
            sharing,
            saver,
            saved: state.step,
            begun: state.step,
            unsettled: None,
            overflows_in_a_row: 0,
            save_is_owed: false,
            state,
            metrics: None,
            replaced_file: None,
            events: None,
            right_of_rows: [0; 2],
            pace,
            done,
            stamp,
            plan,
            source,
            dataset,
            sampler,
            lock,
        })
    }

    /// Starts to write to the output directory.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn open(&mut self, options: &Options, began: Instant) -> Result<()> {
        let output_dir = &self.plan.output_dir;
        let Some(lock) = &mut self.lock else {
            self.done.preparing = began.elapsed();
            return Ok(());
        };
        lock.keep();
        if options.overwrite {
            output::clear(output_dir)?;
            let left = output::outputs_of_weights(output_dir);
            if !left.is_empty() {
                let text = format!(
                    "note: {} in {} stay as they are: they were made from the weights of the earlier run",
                    left.join(", "),
                    output_dir.display()
                );
                self.observer.event(&Event::Notice(&text));
            }
        }
        checkpoint::clean_stale(output_dir)?;
        let here = store::checkpoint_dir(output_dir, self.state.step);
        let best = save::best_dir(self).filter(|dir| store::is_whole(dir));
        checkpoint::write_pointers(output_dir, here.is_dir().then_some(here.as_path()), best.as_deref())?;
        for aside in output::set_aside_later(output_dir, self.state.step)? {
            let text = format!("later checkpoint renamed to {}: its steps are repeated", aside.display());
            self.observer.event(&Event::Notice(&text));
        }
        let path = output_dir.join(output::METRICS);
        self.metrics = Some(match self.state.step {
            0 => MetricsWriter::create(&path)?,
            step => MetricsWriter::resume(&path, step, self.state.evaluated_step)?,
        });
        own_files::replace_file(&RealDisk, &output_dir.join(output::CONFIG), &self.plan.resolved_yaml)?;
        if let Some(dir) = &self.plan.logging.events_dir {
            let mut events = EventWriter::create(dir, self.state.step)?;
            events.text(self.state.step, "config", &resolved_config::settings_table(&self.plan.settings))?;
            self.events = Some(events);
        }
        self.done.preparing = began.elapsed();
        Ok(())
    }
}
