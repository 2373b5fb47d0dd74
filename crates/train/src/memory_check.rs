//! Measures one step on the largest batch of a configuration and compares it with the prediction, for `memory-check`.
use super::autobatch::batch_plan::BatchRequest;
use super::autobatch::measure_pass::{Line, PassMeasurer};
use super::autobatch::sizes::later_bytes;
use super::engine;
use super::features::Compute;
use super::model_source::Described;
use super::step::{Attempt, attempt};
use tunesmith_base::error::Result;
use tunesmith_base::files::disk::RealDisk;
use tunesmith_checkpoint::Background;
use tunesmith_comm::World;
use tunesmith_comm::single::Single;
use tunesmith_config::{Checkpointing, Resolved};
use tunesmith_data as data;
use tunesmith_device::Device;
use tunesmith_device::memory::{self, Budget};
use tunesmith_model::device::{device, usable};
use tunesmith_optim::OptimizerPlan;
use tunesmith_parallel::{ParallelPlan, optimizer};
use tunesmith_plan::memory::{Breakdown, PROGRAM, Pass};
use tunesmith_plan::strategies::Way;
use tunesmith_telemetry::progress::Observer;

/// Bytes of a process during a step, by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepMemory {
    /// Weights, trained values and their gradients, tokenizer, and data.
    pub loaded: u64,
    /// Activations of the largest pass.
    pub activations: u64,
    /// The optimizer's state and averages, and the copy for saving checkpoints.
    pub optimizer: u64,
    /// Temporary buffers, while weights are read or the optimizer updates.
    pub moment: u64,
}

impl StepMemory {
    /// The sum of all parts.
    pub const fn total(&self) -> u64 {
        self.loaded + self.activations + self.optimizer + self.moment
    }

    /// The predicted bytes, without the program itself, which the CPU's allocator does not count.
    const fn of(rank: &Breakdown, on_gpu: bool) -> Self {
        let program = if on_gpu { rank.program } else { rank.program.saturating_sub(PROGRAM) };
        Self {
            loaded: rank.weights + rank.trained + rank.gradients + program,
            activations: rank.kept + rank.work + rank.head + rank.attention,
            optimizer: rank.optimizer + rank.saving,
            moment: rank.passing,
        }
    }
}

/// Memory of the largest step of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct LargestStep {
    /// Tokens of its largest pass; all have a label.
    pub tokens: usize,
    /// The memory that formulas predict for it.
    pub predicted: StepMemory,
    /// The memory counted by the allocator; `None` if the step does not fit.
    pub measured: Option<StepMemory>,
    /// Memory by tokens of a pass, from this pass and one of half its length.
    pub line: Option<Line>,
    /// The memory budget in bytes; `None` without a limit.
    pub budget: Option<u64>,
}

/// Loads the model of `resolved` and runs one step on the largest pass of its data, as a single rank. With
/// `batch_size: auto` a micro-batch counts as one row. Writes only the cache of tokens.
///
/// # Errors
/// Those of preparing and loading.
pub fn largest_step(resolved: &Resolved, observer: &dyn Observer) -> Result<LargestStep> {
    let device = device(resolved.config.model.device)?;
    let budget = resolved.config.train.memory_budget.map(|bytes| bytes.0).or_else(|| usable(device));
    let _budget = budget.map(|bytes| Budget::new(device, bytes));
    memory::guarded(|| {
        engine::choose(resolved.config.tuning.backend);
        let (mut source, config) = Described::find(resolved, observer)?.open(resolved, None, observer)?;
        let dataset = data::load(&config, &source.dir, source.arch.text_ids(), observer, source.pictures.as_ref())?;
        source.compute_features(&config, &dataset, Compute::Assume, observer)?;
        let sampler = dataset.sampler(&config);
        let parallel = ParallelPlan::new(&config.train, 1);
        memory::reset_peak(device);
        let mut model = source.load(None)?;
        model.params.zero_grads();
        let (loading, loaded) = (memory::peak(device), memory::live(device));
        let later = later_bytes(&source.optimizer, source.trained_parameters(), &parallel, &Single, device);
        let mut measurer =
            PassMeasurer::new(&mut model, &dataset.train, &sampler, (memory::budget(device), later), &Single)?;
        let request = BatchRequest::new(&config.train, &source.arch, 1);
        let lengths = measurer.lengths();
        let (longest, rows) = (measurer.longest(), request.batch_size.or(1));
        let whole: usize = lengths.iter().cycle().take(rows).sum();
        let tokens = request.max_tokens_per_pass.map_or(whole, |limit| whole.min(limit.max(longest)));
        let checkpointing = match request.checkpointing {
            Checkpointing::Auto => Checkpointing::CHEAP,
            given @ Checkpointing::Blocks { .. } => given,
        };
        measurer.limit_rows(rows);
        let fits = measurer.pass(tokens, checkpointing)?.fits();
        measurer.pass((tokens / 2).max(1), checkpointing)?;
        let line = Line::through(&measurer.passes);
        let before = memory::live(Device::Cpu);
        let batch = measurer.heaviest(tokens, checkpointing)?;
        // The batch's images can be large. On the CPU they count as activations below.
        let read = if device == Device::Cpu { memory::live(device).saturating_sub(before) } else { 0 };
        drop(measurer);
        let pass = Pass { tokens: tokens as u64, longest: longest.min(tokens) as u64, labelled: tokens as u64 };
        let way = Way::plain(parallel.strategy);
        let rank = source.memory().rank(way, config.train.gradient_checkpointing, 1, &pass)?;
        let predicted = StepMemory::of(&rank, matches!(device, Device::Cuda(_)));

        // One step as in a run; the updated weights are dropped.
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
            let before = memory::live(device);
            let state = before.saturating_sub(loaded);
            memory::reset_peak(device);
            model.forward_backward(&batch, 1.0 / batch.label_tokens().max(1) as f32, 1.0, 0)?;
            let activations = memory::peak(device).saturating_sub(before) + read;
            let done = attempt(&mut model, &mut optimizer, &Single, &mut sharing, &[batch], 1e-9, 1.0)?;
            let stepping = memory::peak(device).max(loading);
            if let Attempt::Done(_) = done {
                let moment = stepping.saturating_sub(loaded + state + activations);
                measured = Some(StepMemory { loaded, activations, optimizer: state, moment });
            }
        }
        Ok(LargestStep { tokens, predicted, measured, line, budget })
    })
}
