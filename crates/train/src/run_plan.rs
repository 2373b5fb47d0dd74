//! The plan of a run: every decision about training, evaluation, and saving.
//!
//! [`Config`](tunesmith_config::Config) is what the user wrote, with `auto` and defaults that depend on the model, the data, or the machine.
//! The module `setup` turns it into a [`RunPlan`] once, before step 1. Nothing changes the plan afterwards. `None` in it means
//! that a run does not have something, never that a decision is open.
use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Value, json};
use tunesmith_checkpoint::{AdapterConfig, Stamp};
use tunesmith_config::{Backend, EvalConfig, Mode, Optim, Quantization, Setting};
use tunesmith_device::Device;
use tunesmith_eval::Settings as GenerationSettings;
use tunesmith_optim::{OptimizerPlan, Schedule};
use tunesmith_parallel::ParallelPlan;
use tunesmith_plan::batches::Batches;

use super::autobatch::batch_plan::BatchPlan;
use super::memory_prediction::Peak;

/// The decisions of a run, made once by the module `setup`. Training, evaluation, autobatch and saving read nothing else; the model loads
/// itself from its `ModelSource`, which keeps the settings that loading needs.
pub struct RunPlan {
    /// The model and its trained part.
    pub model: ModelPlan,
    pub engine: EnginePlan,
    /// The ranks and the hardware they use.
    pub ranks: RanksPlan,
    /// How the ranks shard weights, gradients, and the optimizer's state.
    pub parallel: ParallelPlan,
    /// How a step is split into micro-batches and passes.
    pub batch: BatchPlan,
    /// Which of these sizes the run chose itself.
    pub chosen: ChosenSizes,
    pub steps: Batches,
    /// The learning rate of each step.
    pub schedule: Schedule,
    /// How the learning rate was scaled to the rows of a step, in words; `None` if it was not.
    pub lr_scaling: Option<String>,
    pub optimizer_name: Optim,
    /// Whether the model is on a GPU and the optimizer, which has no kernel there, computes on the host.
    pub optimizer_on_host: bool,
    /// The optimizer with its settings per tensor.
    pub optimizer: OptimizerPlan,
    /// Steps between comparisons of the trained values of all ranks; 0 means never.
    pub replica_check_steps: u64,
    /// After this many non-finite steps in a row the run ends.
    pub max_nonfinite_steps: u64,
    /// Validation during training; `None` without validation rows or with `eval_strategy: "no"`.
    pub evaluation: Option<EvaluationPlan>,
    /// When the run ends for lack of improvement.
    pub early_stopping: EarlyStoppingPlan,
    /// When checkpoints are written and which are kept.
    pub saving: SavingPlan,
    /// Metrics, TensorBoard, and the report.
    pub logging: LoggingPlan,
    /// The generations before and after training that the report shows.
    pub samples: SamplesPlan,
    /// The memory budget and the predicted memory.
    pub memory: MemoryPlan,
    /// The seed of adapter initialization and dropout, as checkpoints save it.
    pub seed: u64,
    /// The seed of shuffling and splitting.
    pub data_seed: u64,
    /// The folder that the run writes to.
    pub output_dir: PathBuf,
    /// Every setting as the run uses it, with its source. A run with these settings is the same run.
    pub settings: Vec<Setting>,
    pub resolved_yaml: String,
    /// The stamp of the run's checkpoints, still without `base_model`: the base is hashed when it is loaded.
    pub stamp: Stamp,
}

/// The model of a run.
#[derive(Debug, Clone, Serialize)]
pub struct ModelPlan {
    /// The model in one line: its path or name, its family, and how many values are trained.
    pub summary: String,
    /// The folder or the name on the hub, as PEFT's `base_model_name_or_path`.
    pub name: String,
    /// Maximum tokens of a row.
    pub max_seq_len: usize,
    /// The value of `tuning.mode`.
    #[serde(serialize_with = "word")]
    pub mode: Mode,
    /// Tokens to add to the tokenizer.
    pub new_tokens: Vec<String>,
    /// Whether the chat template of the configuration is saved with the tokenizer.
    pub saves_chat_template: bool,
    /// The `adapter_config.json` for PEFT; `None` if weights of the model itself are trained.
    #[serde(skip)]
    pub adapter: Option<AdapterConfig>,
    /// Adapters to merge into the base in memory.
    pub merged_adapters: Vec<PathBuf>,
    pub trained_parameters: u64,
    /// Number of all parameters, with those of adapters.
    pub all_parameters: u64,
    /// Tensors that are trained in full: next to adapters, or by `mode: freeze`.
    #[serde(serialize_with = "count")]
    pub trained_in_full: Vec<String>,
}

/// The kernels and data types of a run.
#[derive(Debug, Clone, Serialize)]
pub struct EnginePlan {
    /// The value of `tuning.backend`.
    #[serde(serialize_with = "word")]
    pub backend: Backend,
    /// The kernels of the backend: `fused` or `reference`.
    pub kernels: &'static str,
    /// The vector instruction set in use, or the GPU and its libraries.
    pub simd: String,
    /// Where the model is kept and computed, as `model.device` chose it.
    #[serde(serialize_with = "debug")]
    pub device: Device,
    /// The device in words, with the reason if `model.device: auto` chose it; `None` with `model.device: cpu`.
    pub device_name: Option<String>,
    /// The type of the base's matrices in memory.
    pub base_dtype: &'static str,
    /// The type of saved activations.
    pub activations: &'static str,
    /// How the base is quantized, in words; `none` if it is not.
    pub quantization: String,
    /// The format of the quantized base; `None` if it is not quantized.
    #[serde(skip)]
    pub quantized: Option<Quantization>,
}

/// The ranks of a run.
#[derive(Debug, Clone, Serialize)]
pub struct RanksPlan {
    pub count: usize,
    /// Number of ranks that are threads of one process; 1 if each rank is a process.
    pub in_process: u64,
    /// How the ranks were started and where they meet, in words.
    pub summary: String,
    /// The hardware that the run uses, in words.
    pub platform: String,
}

/// Which sizes of [`BatchPlan`] the run chose itself. The run may change them when memory runs out, and saves them in
/// checkpoints.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ChosenSizes {
    /// Whether `train.gradient_checkpointing` was `auto`.
    pub checkpointing: bool,
    /// Whether measuring has lowered `train.max_tokens_per_pass`.
    pub max_tokens_per_pass: bool,
}

/// How often to evaluate or to save.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// Not regularly.
    Never,
    /// Every N steps.
    Steps(u64),
    /// After every epoch.
    Epochs,
}

impl When {
    /// Whether the evaluation or checkpoint is due after `step`, counted from 1.
    pub fn is_due(self, step: u64, steps: &Batches) -> bool {
        match self {
            Self::Never => false,
            Self::Steps(every) => step.is_multiple_of(every),
            Self::Epochs => steps.ends_epoch(step),
        }
    }
}

/// When a run validates, on batches of which size, and which metric decides.
#[derive(Debug, Clone, Serialize)]
pub struct EvaluationPlan {
    pub when: When,
    /// Whether to validate before step 1, too.
    pub on_start: bool,
    /// Whether to validate after the last step, too.
    pub at_end: bool,
    /// Rows of a validation batch.
    pub batch_size: usize,
    /// The metric that decides which checkpoint is best.
    pub metric: MetricPlan,
    /// How to generate and score; `None` without `train.predict_with_generate`.
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

/// How validation generates answers and scores them (`train.predict_with_generate`).
#[derive(Debug, Clone, Serialize)]
pub struct EvalGenerationPlan {
    #[serde(serialize_with = "debug")]
    pub settings: GenerationSettings,
    /// Strings that end a generation.
    pub stop_strings: Vec<String>,
    /// Maximum number of validation rows to generate for.
    pub rows: usize,
    /// Maximum number of prompts in memory.
    pub prompts_at_once: usize,
    /// The metrics of the generations.
    #[serde(skip)]
    pub metrics: EvalConfig,
}

/// When a run ends for lack of improvement.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct EarlyStoppingPlan {
    /// The run ends after this many validations in a row without improvement; 0 means never.
    pub patience: u64,
    /// The minimum improvement of the metric that counts.
    pub threshold: f64,
}

/// When checkpoints are written and which are kept.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct SavingPlan {
    pub when: When,
    /// Number of newest checkpoints to keep besides the best; `None` keeps all.
    pub keep_last: Option<usize>,
    /// Whether the best checkpoint is kept and the run ends with its weights.
    pub load_best_at_end: bool,
    /// Whether a thread writes checkpoints from a copy.
    pub in_background: bool,
    /// Bytes of that copy; 0 without one.
    pub copy_bytes: u64,
}

/// Metrics, TensorBoard, and the report.
#[derive(Debug, Clone, Serialize)]
pub struct LoggingPlan {
    /// Steps between two printed lines and between two points in TensorBoard.
    pub steps: u64,
    /// The folder of TensorBoard's event files; `None` without TensorBoard.
    pub events_dir: Option<PathBuf>,
    pub report: bool,
    /// The name of the run, the title of the report.
    pub run_name: String,
    /// The step whose timeline is printed, if any.
    pub timeline_step: Option<u64>,
}

/// The generations on held-out rows that the report shows.
#[derive(Debug, Clone, Serialize)]
pub struct SamplesPlan {
    /// Number of rows to generate for.
    pub rows: usize,
    #[serde(serialize_with = "debug")]
    pub settings: GenerationSettings,
    /// Strings that end a generation.
    pub stop_strings: Vec<String>,
}

/// The memory budget and the predicted memory.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct MemoryPlan {
    /// `train.memory_budget` in bytes; `None` if the budget follows from the free memory.
    pub configured: Option<u64>,
    /// Bytes that the process may use; `None` if the system has no limit.
    pub budget: Option<u64>,
    /// Bytes of the optimizer's state and of averages, summed over all shards.
    pub optimizer_state: u64,
    /// The predicted peak; `None` if it cannot be predicted.
    pub predicted: Option<Peak>,
}

impl RunPlan {
    /// The plan as JSON, by group, without lists that grow with the model.
    pub fn to_json(&self) -> Value {
        let Batches { effective_batch, steps_per_epoch, total_steps, warmup_steps, .. } = self.steps;
        json!({
            "model": self.model,
            "engine": self.engine,
            "ranks": self.ranks,
            "parallel": {
                "strategy": self.parallel.strategy.name(),
                "shards_weights": self.parallel.weights.is_some(),
                "shards_trained_parameters": self.parallel.shards_values(),
                "shards_optimizer": self.parallel.shards_optimizer(),
                "reduce_every_pass": self.parallel.reduce_every_pass,
                "bucket_bytes": self.parallel.bucket_bytes,
                "replica_check_steps": self.replica_check_steps,
            },
            "batch": self.batch,
            "chosen": self.chosen,
            "steps": {
                "total": total_steps,
                "per_epoch": steps_per_epoch,
                "warmup": warmup_steps,
                "effective_batch": effective_batch,
                "max_nonfinite": self.max_nonfinite_steps,
            },
            "learning_rate": {
                "scaling": self.lr_scaling,
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

fn count<S: serde::Serializer>(names: &[String], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(names.len() as u64)
}
