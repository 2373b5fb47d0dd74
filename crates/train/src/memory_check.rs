//! One measured step on a configuration's largest batch beside what was predicted of it, for `memory-check`.
use super::autobatch::batch_plan::BatchRequest;
use super::autobatch::measure_pass::{Line, PassMeasurer};
use super::autobatch::sizes::later_bytes;
use super::engine;
use super::model_source::Described;
use super::step::{Attempt, attempt};
use tunesmith_base::error::Result;
use tunesmith_base::files::disk::RealDisk;
use tunesmith_base::memory::{self, Budget, limits};
use tunesmith_checkpoint::Background;
use tunesmith_comm::World;
use tunesmith_comm::single::Single;
use tunesmith_config::{Checkpointing, Resolved};
use tunesmith_data as data;
use tunesmith_optim::OptimizerPlan;
use tunesmith_parallel::{ParallelPlan, optimizer};
use tunesmith_plan::memory::{Breakdown, PROGRAM, Pass};
use tunesmith_plan::strategies::Way;
use tunesmith_telemetry::progress::Observer;

/// Bytes of a process while it makes a step, by what they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    /// Weights, trained values and their gradients, tokenizer, data.
    pub loaded: u64,
    /// Activations of the largest pass.
    pub activations: u64,
    /// The optimizer's state and averages, and the copy from which checkpoints are written.
    pub optimizer: u64,
    /// What is there for a moment: while weights are read, while the optimizer updates.
    pub moment: u64,
}

impl Held {
    /// All.
    pub const fn total(&self) -> u64 {
        self.loaded + self.activations + self.optimizer + self.moment
    }

    /// As predicted, without the program itself, which the allocator does not count.
    const fn of(rank: &Breakdown) -> Self {
        Self {
            loaded: rank.weights + rank.trained + rank.gradients + rank.program.saturating_sub(PROGRAM),
            activations: rank.kept + rank.work + rank.head + rank.attention,
            optimizer: rank.optimizer + rank.saving,
            moment: rank.passing,
        }
    }
}

/// What the largest step of a run holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Largest {
    /// Tokens of its largest pass, all with a label.
    pub tokens: usize,
    /// What was predicted.
    pub predicted: Held,
    /// What the allocator counted; nothing where it does not fit.
    pub measured: Option<Held>,
    /// Bytes by tokens of a pass, from this one and one of half its length.
    pub line: Option<Line>,
    /// What may be held.
    pub budget: Option<u64>,
}

/// Loads what `resolved` trains and makes a step on the largest pass that its data can make; with `batch_size: auto` that
/// of one row, or of `max_tokens_per_pass`. Of several ranks it is one. Writes nothing but the cache of tokens.
///
/// # Errors
/// Those of preparing and loading.
pub fn largest(resolved: &Resolved, observer: &dyn Observer) -> Result<Largest> {
    let budget = resolved.config.train.memory_budget.map(|bytes| bytes.0).or_else(limits::usable);
    let _budget = budget.map(Budget::new);
    memory::guarded(|| {
        engine::choose(resolved.config.tuning.backend);
        let (source, config) = Described::find(resolved, observer)?.open(resolved, None, observer)?;
        let dataset = data::load(&config, &source.dir, source.arch.vocab_size, observer)?;
        let sampler = dataset.sampler(&config);
        let parallel = ParallelPlan::new(&config.train, 1);
        memory::reset_peak();
        let mut model = source.load(None)?;
        model.params.zero_grads();
        let (loading, loaded) = (memory::peak(), memory::live());
        let later = later_bytes(&source.optimizer, source.trained_values(), &parallel, &Single);
        let mut measurer = PassMeasurer::new(&mut model, &dataset.train, &sampler, later, &Single)?;
        let request = BatchRequest::new(&config.train, &source.arch, 1);
        let lengths = measurer.lengths();
        let (longest, rows) = (measurer.longest(), request.batch_size.or(1));
        let whole: usize = lengths.iter().cycle().take(rows).sum();
        let tokens = request.max_tokens_per_pass.map_or(whole, |limit| whole.min(limit.max(longest)));
        let checkpointing = match request.checkpointing {
            Checkpointing::Auto => Checkpointing::CHEAP,
            given @ Checkpointing::Blocks { .. } => given,
        };
        let fits = measurer.pass(tokens, checkpointing)?.fits();
        measurer.pass((tokens / 2).max(1), checkpointing)?;
        let line = Line::through(&measurer.passes);
        let batch = measurer.worst(tokens)?;
        drop(measurer);
        let pass = Pass { tokens: tokens as u64, longest: longest.min(tokens) as u64, labelled: tokens as u64 };
        let predicted = Held::of(&source.memory().rank(
            Way::plain(parallel.strategy),
            config.train.gradient_checkpointing,
            1,
            &pass,
        )?);

        // A step as a run makes it, on weights that go nowhere.
        let mut measured = None;
        if fits {
            model.set_checkpointing(checkpointing);
            let ratio = config.tuning.lora.loraplus_lr_ratio;
            let plan = OptimizerPlan::new(&config.train, ratio, &source.trained)?;
            let (mut optimizer, mut sharing) = optimizer::shared(&plan, &parallel, &mut model.params, World::ALONE)?;
            let average = optimizer::average(&plan, &model.params, &sharing);
            let mut saver = Background::new(&RealDisk);
            if source.optimizer.saving > 0 {
                let values = model.params.values();
                let apart = (average.is_some() || optimizer.averages()).then_some(values);
                saver.reserve(values, apart, &optimizer.tensors());
            }
            let before = memory::live();
            let state = before.saturating_sub(loaded);
            memory::reset_peak();
            model.forward_backward(&batch, 1.0 / batch.label_tokens().max(1) as f32, 1.0, 0)?;
            let activations = memory::peak().saturating_sub(before);
            let done = attempt(&mut model, &mut optimizer, &Single, &mut sharing, &[batch], 1e-9, 1.0)?;
            let stepping = memory::peak().max(loading);
            if let Attempt::Done(_) = done {
                let moment = stepping.saturating_sub(loaded + state + activations);
                measured = Some(Held { loaded, activations, optimizer: state, moment });
            }
        }
        Ok(Largest { tokens, predicted, measured, line, budget })
    })
}
