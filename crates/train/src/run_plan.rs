//! The plan of a run: every decision that training, evaluation and saving go by.
//!
//! [`Config`] is what the user wrote, with `auto` and defaults that depend on the model, the data or the machine.
//! [`crate::setup`] turns it into a [`RunPlan`] once, before step 1. Nothing changes the plan afterwards: an `Option` in it
//! means that a run does without something, never that a decision is open.
use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Value, json};
use tunesmith_checkpoint::{AdapterConfig, Stamp};
use tunesmith_config::{Backend, EvalConfig, Mode, Optim, Quantization, Setting, Strategy};
use tunesmith_eval::Settings as GenerationSettings;
use tunesmith_optim::{OptimizerPlan, Schedule};
use tunesmith_parallel::ParallelPlan;
use tunesmith_plan::batches::Batches;

use super::autobatch::batch_plan::BatchPlan;
use super::memory_prediction::Peak;

/// What a run does. Made once by [`crate::setup`].
pub struct RunPlan {
    /// The model, and what is trained of it.
    pub model: ModelPlan,
    /// The kernels and the types that they compute with.
    pub engine: EnginePlan,
    /// The ranks.
    pub ranks: RanksPlan,
    /// How the ranks share weights, gradients and the optimizer's state.
    pub parallel: ParallelPlan,
    /// How a step is cut into micro-batches and passes.
    pub batch: BatchPlan,
    /// Which of these sizes the run chose itself.
    pub chosen: ChosenSizes,
    /// Steps, epochs and warm-up.
    pub steps: Batches,
    /// The learning rate of each step.
    pub schedule: Schedule,
    /// How the learning rate was scaled to the rows of a step, in words.
    pub lr_scaling: Option<String>,
    /// The name of the optimizer.
    pub optimizer_name: Optim,
    /// The optimizer.
    pub optimizer: OptimizerPlan,
    /// Steps in a row that are not finite before the run ends.
    pub max_nonfinite_steps: u64,
    /// Validation during training; none without validation rows or with `eval_strategy: "no"`.
    pub evaluation: Option<EvaluationPlan>,
    /// When a run without improvement ends.
    pub early_stopping: EarlyStopping,
    /// Checkpoints.
    pub saving: SavingPlan,
    /// Metrics, TensorBoard and the report.
    pub logging: LoggingPlan,
    /// The generations before and after training that the report shows.
    pub samples: SamplesPlan,
    /// Memory.
    pub memory: MemoryPlan,
    /// Seed of adapter initialisation and dropout.
    pub seed: u64,
    /// Seed of shuffling and splitting.
    pub data_seed: u64,
    /// The folder that the run writes to.
    pub output_dir: PathBuf,
    /// Every setting as the run uses it, with its source. Training from them again is the same run.
    pub settings: Vec<Setting>,
    /// The text of `config.resolved.yaml`.
    pub resolved_yaml: String,
    /// The stamp of the run's checkpoints, but for `base_model`: the base weights are hashed when they are loaded.
    pub stamp: Stamp,
}

/// The model of a run.
#[derive(Debug, Clone, Serialize)]
pub struct ModelPlan {
    /// The model in a line: its place, its family, how much of it is trained.
    pub summary: String,
    /// The folder or the name on the hub, as PEFT's `base_model_name_or_path`.
    pub name: String,
    /// The longest row in tokens.
    pub max_seq_len: usize,
    /// What is trained.
    #[serde(serialize_with = "word")]
    pub mode: Mode,
    /// Tokens that are added to the tokenizer.
    pub new_tokens: Vec<String>,
    /// The configuration names a chat template, which is saved with the tokenizer.
    pub saves_chat_template: bool,
    /// What PEFT must know of the adapter; none where weights of the model itself are trained.
    #[serde(skip)]
    pub adapter: Option<AdapterConfig>,
    /// Adapters that are merged into the base in memory.
    pub merged_adapters: Vec<PathBuf>,
    /// Values that are trained.
    pub trained_values: u64,
    /// Values of the whole model.
    pub all_values: u64,
    /// Tensors that are trained in full beside adapters, or alone with `mode: freeze`.
    pub trained_in_full: Vec<String>,
}

/// What computes.
#[derive(Debug, Clone, Serialize)]
pub struct EnginePlan {
    /// `tuning.backend`.
    #[serde(serialize_with = "word")]
    pub backend: Backend,
    /// The kernels behind that name: `fused` or `reference`.
    pub kernels: &'static str,
    /// The vector instructions in use.
    pub simd: &'static str,
    /// The type that holds the base's matrices.
    pub base_dtype: &'static str,
    /// The type that holds activations for the backward pass.
    pub activations: &'static str,
    /// How the base is quantized, in words; `none` where it is not.
    pub quantization: String,
    /// The format of the quantized base.
    #[serde(skip)]
    pub quantized: Option<Quantization>,
}

/// The ranks of a run.
#[derive(Debug, Clone, Serialize)]
pub struct RanksPlan {
    /// How many there are.
    pub count: usize,
    /// How many are threads of one process; 1 where each is a process.
    pub in_process: u64,
    /// How they were started and meet, in words.
    pub summary: String,
    /// What is used of the machine, in words.
    pub platform: String,
    /// How they share the work.
    #[serde(serialize_with = "word")]
    pub strategy: Strategy,
}

/// Which sizes of [`BatchPlan`] the run chose itself. It may change them when memory runs out, and saves them in checkpoints.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ChosenSizes {
    /// `train.gradient_checkpointing` was `auto`.
    pub checkpointing: bool,
    /// `train.max_tokens_per_pass` was lowered by measuring.
    pub max_tokens_per_pass: bool,
}

/// When something is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// Only where another rule asks for it.
    Never,
    /// After every so many steps.
    Steps(u64),
    /// After every epoch.
    Epochs,
}

impl When {
    /// Whether it is due after `step`, counted from 1.
    pub fn is_due(self, step: u64, steps: &Batches) -> bool {
        match self {
            Self::Never => false,
            Self::Steps(every) => step.is_multiple_of(every),
            Self::Epochs => steps.ends_epoch(step),
        }
    }
}

/// Validation during training.
#[derive(Debug, Clone, Serialize)]
pub struct EvaluationPlan {
    /// When.
    pub when: When,
    /// Before step 1, too.
    pub on_start: bool,
    /// After the last step, too.
    pub at_end: bool,
    /// Rows of a batch.
    pub batch_size: usize,
    /// What makes one checkpoint better than another.
    pub metric: MetricPlan,
    /// Answers that are generated and scored; none where only the loss is measured.
    pub generation: Option<EvalGenerationPlan>,
}

/// The metric of the best checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MetricPlan {
    /// `loss`, or the name of a score, without the prefix `eval_`.
    pub name: String,
    /// Whether a higher value is better.
    pub greater_is_better: bool,
}

/// `train.predict_with_generate`.
#[derive(Debug, Clone, Serialize)]
pub struct EvalGenerationPlan {
    /// How answers are generated.
    #[serde(serialize_with = "debug")]
    pub settings: GenerationSettings,
    /// Strings that end an answer.
    pub stop_strings: Vec<String>,
    /// Validation rows that are answered, at most.
    pub rows: usize,
    /// Prompts that are in memory at once.
    pub prompts_at_once: usize,
    /// The metrics of answers.
    #[serde(skip)]
    pub metrics: EvalConfig,
}

/// When a run ends early.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct EarlyStopping {
    /// Validations in a row without improvement; 0 never stops.
    pub patience: u64,
    /// How much the metric must improve to count.
    pub threshold: f64,
}

/// Checkpoints.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct SavingPlan {
    /// When.
    pub when: When,
    /// How many are kept besides the best; none keeps all.
    pub keep_last: Option<usize>,
    /// The best is kept, and the run ends with its weights.
    pub load_best_at_end: bool,
    /// They are written by a thread, from a copy.
    pub in_background: bool,
    /// Bytes of that copy; 0 without one.
    pub copy_bytes: u64,
}

/// What a run reports.
#[derive(Debug, Clone, Serialize)]
pub struct LoggingPlan {
    /// Steps between two lines and two points in TensorBoard.
    pub steps: u64,
    /// Where TensorBoard's event files go; none without TensorBoard.
    pub events_dir: Option<PathBuf>,
    /// `report.html` is written.
    pub report: bool,
    /// The run's name.
    pub run_name: String,
    /// The step whose timeline is printed.
    pub timeline_step: Option<u64>,
    /// Steps between comparisons of the ranks' trained values; 0 never compares.
    pub replica_check_steps: u64,
}

/// Sample generations on held-out rows.
#[derive(Debug, Clone, Serialize)]
pub struct SamplesPlan {
    /// How many; 0 for none.
    pub rows: usize,
    /// How they are generated.
    #[serde(serialize_with = "debug")]
    pub settings: GenerationSettings,
    /// Strings that end an answer.
    pub stop_strings: Vec<String>,
}

/// The memory of the process.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct MemoryPlan {
    /// `train.memory_budget`; none where the budget is what the machine has free.
    pub configured: Option<u64>,
    /// Bytes that the process may hold; none where the system states no limit.
    pub budget: Option<u64>,
    /// Bytes of the optimizer's state and of averages, over all ranks that share them.
    pub optimizer_state: u64,
    /// The predicted peak; none where it cannot be predicted.
    pub predicted: Option<Peak>,
}

impl RunPlan {
    /// Every decision as JSON, by group. Lists that grow with the model are left out.
    pub fn to_json(&self) -> Value {
        let Batches { effective_batch, steps_per_epoch, total_steps, warmup_steps, .. } = self.steps;
        json!({
            "model": self.model,
            "engine": self.engine,
            "ranks": self.ranks,
            "parallel": {
                "strategy": self.parallel.strategy.name(),
                "shards_weights": self.parallel.shards_values(),
                "shards_optimizer": self.parallel.shards_optimizer(),
                "reduce_every_pass": self.parallel.reduce_every_pass,
                "bucket_bytes": self.parallel.bucket_bytes,
            },
            "batch": self.batch,
            "steps": {
                "total": total_steps,
                "per_epoch": steps_per_epoch,
                "warmup": warmup_steps,
                "effective_batch": effective_batch,
                "max_nonfinite": self.max_nonfinite_steps,
            },
            "learning_rate": {
                "first": self.schedule.lr(0),
                "after_warmup": self.schedule.lr(warmup_steps),
                "last": self.schedule.lr(total_steps.saturating_sub(1)),
            },
            "optimizer": {
                "name": self.optimizer_name.to_string(),
                "max_grad_norm": self.optimizer.max_grad_norm,
                "ema_decay": self.optimizer.ema_decay,
                "loss_scale": self.optimizer.loss_scale.map(|scale| scale.initial),
            },
            "evaluation": self.evaluation,
            "early_stopping": self.early_stopping,
            "saving": self.saving,
            "logging": self.logging,
            "samples": self.samples,
            "memory": self.memory,
            "seed": self.seed,
            "data_seed": self.data_seed,
            "output_dir": self.output_dir,
        })
    }
}

fn word<T: std::fmt::Display, S: serde::Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

fn debug<T: std::fmt::Debug, S: serde::Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{value:?}"))
}
