//! Every setting, defined once: name, type, default, aliases, bounds, documentation. The structs, the resolver,
//! `docs/configuration.md`, the JSON Schema and the environment names all come from this file. Those of `tuning.KIND` are in
//! `adapters`, those of `vision` in `vision_settings.rs`.
use super::adapters;
use super::arguments::Arguments;
use super::auto_values::{Auto, Bytes, Checkpointing};
use super::datasets::DatasetSpec;
use super::enums::{
    Backend, BadImages, BuiltinTemplate, Contamination, Dedupe, Dtype, EvalMetric, EvalStrategy, Format, GradDtype,
    Init, LossOn, LrScaling, LrScheduler, MixStrategy, Mode, Normalization, Optim, Quantization, RankBackend,
    SaveStrategy, Sharding, Strategy, Task, Truncation,
};
use super::foreign_values::{FileOrMapping, FsdpWords};
use super::interval::Interval;
use super::labels::{ClassWeights, Labels};
use super::mixed_values::{BeamStop, DeviceChoice, Resume};
use super::option::{self, Range, section};
use super::template_kwargs::TemplateKwargs;
use super::value::Patterns;
pub use super::vision_settings::{VisionConfig, WorldConfig};
use std::path::PathBuf;

/// The whole configuration. Field names are the YAML names, except `generation`, which YAML calls `gen`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Config {
    /// The keys outside of any section.
    pub top: TopConfig,
    /// The base model: section `model`.
    pub model: ModelConfig,
    /// How it sees images: section `vision`.
    pub vision: VisionConfig,
    /// What is trained: section `tuning`.
    pub tuning: TuningConfig,
    /// Optimization, checkpoints and ranks: section `train`.
    pub train: TrainConfig,
    /// Rows and how they become tokens: section `data`.
    pub data: DataConfig,
    /// Outputs besides checkpoints: section `logging`.
    pub logging: LoggingConfig,
    /// How answers are generated: section `gen`.
    pub generation: GenerationConfig,
    /// How answers are scored: section `eval`.
    pub eval: EvalConfig,
}

/// Environment variables that set a key besides the one that follows from its name.
pub static VARIABLES: [(&str, &str); 3] = [
    ("TUNESMITH_MEMORY_BUDGET", "train.memory_budget"),
    ("DEEPSPEED_CONFIG", "train.deepspeed"),
    ("ACCELERATE_CONFIG_FILE", "train.accelerate"),
];

impl Config {
    /// The top-level key `task`: what the model learns.
    pub const fn task(&self) -> Task {
        self.top.task
    }
}

/// A section with the settings that [`Config`] holds.
pub type Section = option::Section<Config>;
/// The definition of one setting of [`Config`].
pub type OptionDef = option::OptionDef<Config>;

/// Connects each section with its field of [`Config`].
macro_rules! places {
    ($( $constant:ident: $settings:ty = $($path:ident).+; )*) => { $(
        impl AsRef<$settings> for Config {
            fn as_ref(&self) -> &$settings {
                &self.$($path).+
            }
        }

        impl AsMut<$settings> for Config {
            fn as_mut(&mut self) -> &mut $settings {
                &mut self.$($path).+
            }
        }

        #[doc = concat!("The section with the settings of [`", stringify!($settings), "`].")]
        pub static $constant: Section = <$settings>::section();
    )* };
}
places! {
    TOP: TopConfig = top;
    MODEL: ModelConfig = model;
    VISION: VisionConfig = vision;
    WORLD: WorldConfig = vision.world;
    TUNING: TuningConfig = tuning;
    FREEZE: FreezeConfig = tuning.freeze;
    TRAIN: TrainConfig = train;
    DATA: DataConfig = data;
    LOGGING: LoggingConfig = logging;
    GENERATION: GenerationConfig = generation;
    EVAL: EvalConfig = eval;
}

/// Every key, in the order of the documentation.
pub fn options() -> impl Iterator<Item = &'static OptionDef> {
    SECTIONS.iter().flat_map(|section| section.options)
}

section! {
    /// Keys outside of any section.
    TopConfig = "" {
        /// What the model learns. `classification` and `regression` replace the language model's head by a small one. From the last
        /// token of a row `{text, label}` it gives a score for each label, or one number (`docs/guides/classification.md`).
        task: Task = Task::CausalLm;
    }
}

section! {
    /// The base model: a folder as Hugging Face writes it, or a repository of the Hugging Face Hub.
    ModelConfig = "model" {
        /// The model: a folder with `config.json`, safetensors and tokenizer files, or `owner/name` on the Hugging Face Hub, which
        /// is downloaded into the cache (`docs/hub.md`).
        name: Option<String> = None;
        /// The branch, tag or commit of a model on the hub (`null`: `main`).
        revision: Option<String> = None;
        /// A folder to use instead of `name`.
        local_dir: Option<PathBuf> = None;
        /// The longest row in tokens. `data.truncation` says what happens to longer ones.
        /// It may be at most the model's context, to which the default is cut (`docs/inference.md`).
        max_seq_len: usize = 2048, aliases ["max_seq_length", "train.max_length", "train.max_seq_length"], range Range::within(2.0, 16_777_216.0);
        /// Where the base weights come from.
        /// `random` draws them from `config.json` alone, to pretrain from scratch.
        init: Init = Init::Pretrained;
        /// Where the model is kept and computed. `auto` is the first GPU that can be used, or else the CPU (docs/gpu.md).
        device: DeviceChoice = DeviceChoice::Cpu;
        /// How frozen weights are kept in memory. `train.bf16` and `train.fp16` say what they are multiplied in.
        dtype: Dtype = Dtype::Auto, aliases ["torch_dtype"];
        /// Quantize the base's linear layers in memory while adapters are trained on them. The head, embeddings, norms and routers
        /// are not quantized (`docs/quantization.md`).
        quantization: Quantization = Quantization::Auto;
        /// With `nf4` and `fp4`: quantize the scales of the blocks too, which saves 0.37 bits a number.
        double_quant: bool = true, aliases ["bnb_4bit_use_double_quant"];
        /// Linear layers that are not quantized, by the end or the beginning of their names.
        quantization_skip_modules: Vec<String> = Vec::new(), aliases ["llm_int8_skip_modules"];
    }
}

macro_rules! tuning {
    ($( $module:ident: $settings:ident = $mode:ident, $word:literal $( | $alias:literal ($alias_doc:literal) )?, $doc:literal; )*) => {
        section! {
            /// What is trained.
            TuningConfig = "tuning" {
                /// Which weights are trained. The section of the same name has the settings of each kind of adapter and of `freeze`.
                mode: Mode = Mode::Lora;
                /// Which kernels compute. A checkpoint stores the choice and can be resumed only with the same kernels.
                backend: Backend = Backend::Fused;
                /// A PEFT adapter to train further, instead of a new one: a folder, or `owner/name[@revision]` on the hub.
                adapter: Option<PathBuf> = None;
                /// Folders with PEFT adapters that are merged into the base in memory, in this order, and stay frozen. The new
                /// adapter is trained on top of them. Inference needs them again.
                adapters: Vec<PathBuf> = Vec::new();
                /// Tokens to add to the tokenizer. Embedding and head get a row for each. The row starts as the mean of all rows
                /// and is trained.
                new_tokens: Vec<String> = Vec::new();
                /// Keep the image encoder as it is.
                freeze_vision: bool = true, aliases ["freeze_vision_tower", "freeze_vit"];
                /// Keep the connector between image encoder and model as it is (`null`: only if the model's files have it).
                freeze_connector: Option<bool> = None, aliases ["freeze_multi_modal_projector", "freeze_aligner"];
                /// Keep the language model as it is, whatever `mode` says; only connector and encoder are trained.
                freeze_language: bool = false, aliases ["freeze_language_model", "freeze_llm"];
                /// With `freeze_vision: true`: train this many of the image encoder's last blocks nevertheless.
                vision_unfreeze_layers: usize = 0, range Range::within(0.0, 4096.0);
                /// Modules of the image encoder's blocks that get an adapter too, such as `q_proj`; `all-linear` for all linear ones.
                vision_target_modules: Vec<String> = Vec::new();
            }
            nested {
                $(
                    /// The section of an adapter's kind.
                    $module: adapters::$module::$settings;
                )*
                /// The section `tuning.freeze`.
                freeze: FreezeConfig;
            }
        }

        $(
            impl AsRef<adapters::$module::$settings> for Config {
                fn as_ref(&self) -> &adapters::$module::$settings {
                    &self.tuning.$module
                }
            }

            impl AsMut<adapters::$module::$settings> for Config {
                fn as_mut(&mut self) -> &mut adapters::$module::$settings {
                    &mut self.tuning.$module
                }
            }
        )*

        /// Every section with its keys.
        pub(crate) static SECTIONS: &[&Section] = &[
            &TOP, &MODEL, &VISION, &WORLD, &TUNING, $( &adapters::$module::$settings::section(), )* &FREEZE, &TRAIN, &DATA, &LOGGING, &GENERATION, &EVAL,
        ];
    };
}
tunesmith_base::registry::adapters!(tuning);

section! {
    /// What `tuning.mode: freeze` trains; everything else stays as it is. At least one of the keys is needed.
    FreezeConfig = "tuning.freeze" {
        /// Number of decoder blocks to train: the last ones if above 0, the first ones if below 0. With 0, only what the other keys
        /// name is trained.
        trainable_layers: i64 = 0;
        /// Modules by name, such as `q_proj` or `self_attn`: in the blocks of `trainable_layers`, or in every block without it.
        /// `norms`, `embeddings` and `head` name all modules of a kind. Modules outside the blocks always count.
        trainable_modules: Vec<String> = Vec::new();
        /// Regular expressions that match the names of further tensors from the start, such as `model.layers.(30|31).mlp`.
        trainable_patterns: Vec<String> = Vec::new();
    }
}

section! {
    /// The optimization and the run; names and meaning are those of Hugging Face's `TrainingArguments`.
    TrainConfig = "train" {
        /// The folder for checkpoints, the adapter, metrics and the report.
        output_dir: PathBuf = PathBuf::from("runs/run");
        /// Number of passes over the training data.
        num_train_epochs: f64 = 3.0, aliases ["epochs"], range Range::greater_than(0.0);
        /// Stop after this many optimizer steps; overrides `num_train_epochs`. -1 lets the epochs decide.
        max_steps: i64 = -1, range Range::at_least(-1.0);
        /// Rows of a micro-batch. `auto`: the smallest number that trains at full speed, measured before step 1
        /// (`docs/auto-batch.md`).
        batch_size: Auto<usize> = Auto::Given(8), aliases ["per_device_train_batch_size", "per_gpu_train_batch_size"], range Range::within(1.0, 1e6);
        /// Micro-batches of an optimizer step: the effective batch is `batch_size` x `grad_accum` rows. `auto`: as many as
        /// `effective_batch` or `target_tokens_per_device_step` needs. With `batch_size: auto` that is the default.
        grad_accum: Auto<usize> = Auto::Given(1), aliases ["gradient_accumulation_steps"], range Range::within(1.0, 1e6);
        /// With `batch_size` or `grad_accum: auto`: rows of an optimizer step over all ranks (`null`: `target_tokens_per_device_step` decides).
        effective_batch: Option<usize> = None, range Range::within(1.0, 1e9);
        /// With `batch_size` or `grad_accum: auto`, and without `effective_batch`: approximate tokens of an optimizer step on each rank.
        target_tokens_per_device_step: usize = 16384, range Range::at_least(1.0);
        /// The most bytes that the process may hold, such as `12GiB`. Batches are split to stay below it, and `auto` sizes respect
        /// it (`null`: nine tenths of what the machine or its control group has free). Also read from `TUNESMITH_MEMORY_BUDGET`.
        memory_budget: Option<Bytes> = None;
        /// Rows of a validation batch.
        eval_batch_size: usize = 8, aliases ["per_device_eval_batch_size", "per_gpu_eval_batch_size"], range Range::within(1.0, 1e6);
        /// The highest learning rate of the schedule.
        learning_rate: f64 = 2e-4, aliases ["lr"], range Range::at_least(0.0);
        /// Learning rates for some tensors: a regular expression on the end of a tensor's or a module's name, then the highest
        /// rate. The first match counts.
        learning_rates: Patterns<f64> = Patterns::default(), range Range::at_least(0.0);
        /// Whether learning rates grow with the rows of an optimizer step. If they do and no warm-up is set, the rate rises during
        /// the first twentieth of the steps. The table before step 1 shows both.
        lr_scaling: LrScaling = LrScaling::None;
        /// With `lr_scaling`: the rows of a step that `learning_rate` is meant for. `null` means those of one rank, so the rate
        /// grows with the number of ranks.
        lr_scaling_batch: Option<usize> = None, range Range::within(1.0, 1e9);
        /// The optimizer. Brackets list what `optim_args` may set.
        optim: Optim = Optim::AdamW;
        /// Arguments of the optimizer: a mapping, or a string `momentum=0.9,nesterov=true`.
        optim_args: Arguments = Arguments::default();
        /// Weight decay, decoupled from the gradient. Only `sgd` adds it to the gradient.
        weight_decay: f64 = 0.0, range Range::at_least(0.0);
        /// Decay rate of Adam's first moment.
        adam_beta1: f64 = 0.9, range Range::from_to_below(0.0, 1.0);
        /// Decay rate of Adam's second moment.
        adam_beta2: f64 = 0.999, range Range::from_to_below(0.0, 1.0);
        /// Term added to Adam's denominator for numerical stability.
        adam_epsilon: f64 = 1e-8, range Range::greater_than(0.0);
        /// Apply weight decay to norm weights and biases too. The default leaves them out, as Hugging Face does.
        decay_norms_and_bias: bool = false;
        /// How the learning rate changes over the run. Brackets list what `lr_scheduler_kwargs` may set.
        lr_scheduler_type: LrScheduler = LrScheduler::Linear;
        /// Arguments of the schedule: a mapping, or a string `num_cycles=2`.
        lr_scheduler_kwargs: Arguments = Arguments::default();
        /// Warm-up, in which the learning rate rises from 0, as a share of all steps.
        warmup_ratio: f64 = 0.0, range Range::within(0.0, 1.0);
        /// Warm-up, in which the learning rate rises from 0, in steps.
        warmup_steps: u64 = 0;
        /// Gradient clipping: the largest global norm; 0 turns clipping off.
        max_grad_norm: f64 = 1.0, range Range::at_least(0.0);
        /// Label smoothing: the share of each label's probability that is spread evenly over the vocabulary.
        label_smoothing_factor: f64 = 0.0, range Range::from_to_below(0.0, 1.0);
        /// With `task: classification`: how much a row counts in the loss, by its label. The loss is divided by the sum of these
        /// weights, as with PyTorch's `CrossEntropyLoss(weight)`. `balanced`: rows / (labels x rows with the label), as in
        /// scikit-learn. A mapping from label to weight: labels that it leaves out count 1.
        class_weights: ClassWeights = ClassWeights::None, range Range::at_least(0.0);
        /// Factor of the z-loss: `log(Z)^2` is added to the loss of a token, where `Z` is the sum of its exponentials (`PaLM`:
        /// 1e-4).
        z_loss: f64 = 0.0, range Range::at_least(0.0);
        /// `NEFTune`: in training, uniform noise of at most `alpha / sqrt(tokens x width)` is added to a sequence's embeddings
        /// (`null`: none).
        neftune_noise_alpha: Option<f64> = None, range Range::at_least(0.0);
        /// Train without the dropout that `config.json` asks for in the base model, as TRL's key of this name does. Such a model is
        /// refused otherwise: its dropout is not implemented. `tuning.lora.lora_dropout` is another matter.
        disable_dropout: bool = false;
        /// Keep an exponential moving average of the trained weights with this decay; validation and the final weights use it
        /// (`null`: none).
        ema_decay: Option<f64> = None, range Range { above: Some(0.0), below: Some(1.0), ..Range::ANY };
        /// Activation checkpointing: what blocks keep for the backward pass. `false`: the results of matrix products; norms and
        /// activation functions are recomputed. `true`: nothing; the forward pass of each block is run again, which saves memory
        /// and takes a third more time. `none`: everything. `{full: N, none: M}`: `true` for the first N blocks, `none` for the
        /// last M. `auto`: the fastest that fits.
        gradient_checkpointing: Checkpointing = Checkpointing::CHEAP, aliases ["activation_checkpointing"];
        /// On a GPU: what blocks keep for the backward pass is in the host's memory. The copies overlap the computation
        /// (`docs/gpu.md`). Results are the same to the bit.
        activation_offloading: bool = false;
        /// On a GPU: the optimizer's state is in the host's memory, and goes through the GPU in parts as the weights are updated
        /// (`docs/gpu.md`). Results are the same to the bit. On the CPU it is there anyway.
        offload_optimizer: bool = false;
        /// On a GPU: the base's frozen weights are in the host's memory. They come to the GPU block by block, each while the one
        /// before is computed (`docs/gpu.md`). The GPU then holds two blocks at a time. Results are the same to the bit. Weights of
        /// a vision encoder stay on the GPU. On the CPU they are there anyway.
        offload_param: bool = false;
        /// On a GPU: tables of token embeddings that are not trained are in the host's memory, which looks up the rows of a batch
        /// (`docs/gpu.md`). The head's matrix stays on the GPU, and with it an embedding that it shares. Results are the same to
        /// the bit. On the CPU: the table stays in the model's files, and each pass reads the rows of its tokens (`docs/memory.md`).
        offload_embedding: bool = false;
        /// The most tokens of one forward and backward pass (`null`: no limit). A longer micro-batch is split by rows, with the
        /// same result and less memory. A single longer row stays whole. The load-balancing loss of experts is computed for each
        /// part. On a GPU there is no limit unless one is set here.
        max_tokens_per_pass: Option<usize> = Some(768), range Range::at_least(1.0);
        /// Steps between lines on the console and points in TensorBoard, or a share of all steps; `metrics.jsonl` has every step.
        logging_steps: Interval = Interval::Steps(1), aliases ["logging.log_interval"];
        /// When the validation loss is measured.
        eval_strategy: EvalStrategy = EvalStrategy::No, aliases ["evaluation_strategy"];
        /// Steps between validations, or a share of all steps; needed with `eval_strategy: steps`.
        eval_steps: Option<Interval> = None;
        /// Also validate before step 1. (A small trial validation is always made.)
        eval_on_start: bool = false;
        /// Also validate after the last step, whatever `eval_steps` says.
        final_eval: bool = true;
        /// Also generate answers to the validation rows, and compute `eval.metrics` on them.
        predict_with_generate: bool = false;
        /// The longest answer in a validation, in tokens (`null`: `gen.max_new_tokens`).
        generation_max_new_tokens: Option<usize> = None, range Range::within(1.0, 1e6);
        /// Number of beams for answers in a validation (`null`: `gen.num_beams`).
        generation_num_beams: Option<usize> = None, range Range::within(1.0, 256.0);
        /// Number of validation rows to answer, from the first (`null`: all). The loss always covers all rows.
        generation_rows: Option<usize> = None, range Range::at_least(1.0);
        /// The metric of the best checkpoint and of early stopping: `eval_loss`. With `predict_with_generate`, it may be a score
        /// such as `eval_exact_match`. With another `task`, it may be one of its metrics, such as `f1_macro`. The prefix `eval_`
        /// may be left out.
        metric_for_best_model: String = "eval_loss".to_owned();
        /// Whether a higher value of `metric_for_best_model` is better (`null`: as the metric says).
        greater_is_better: Option<bool> = None;
        /// Batches of `eval_batch_size` prompts that are in memory at once while a validation generates answers (`null`: 256 rows).
        /// Answers are scored as they end, and the scores stay the same.
        eval_accumulation_steps: Option<u64> = None, range Range::at_least(1.0);
        /// When a checkpoint is written.
        save_strategy: SaveStrategy = SaveStrategy::Steps;
        /// Steps between checkpoints, or a share of all steps.
        save_steps: Interval = Interval::Steps(500);
        /// Number of checkpoints to keep, besides the best one (`null`: all).
        save_total_limit: Option<usize> = Some(3), range Range::at_least(1.0);
        /// Write checkpoints while training continues, from a copy of the trained weights and the optimizer's state. Memory for the
        /// copy is taken before step 1. `false`: training waits for the checkpoint and needs no copy.
        save_async: bool = true;
        /// End with the weights of the best checkpoint by `metric_for_best_model`.
        load_best_model_at_end: bool = false;
        /// Stop after this many validations in a row without improvement; 0 never stops.
        early_stopping_patience: usize = 0;
        /// How much the metric must improve to count as an improvement.
        early_stopping_threshold: f64 = 0.0, range Range::at_least(0.0);
        /// Compute in bfloat16. Operands of products are rounded to bfloat16, and sums are float32. Activations for the backward
        /// pass are kept in bfloat16, in half the memory. A GPU multiplies on its tensor cores, and a processor with `AVX512_BF16`
        /// by its dot products. Any other processor multiplies in float32 (docs/precision.md).
        bf16: bool = false;
        /// Keep activations for the backward pass in float16 and round gradients between blocks to it, under a loss scale. It is
        /// more precise than bfloat16 and has a smaller range: about 1e-7 to 65504. Steps whose gradients overflow are skipped. A
        /// GPU keeps all activations in float16 and multiplies them on its tensor cores.
        fp16: bool = false;
        /// Let a GPU round the float32 operands of products to TF32 (10 bits of fraction), for its tensor cores. Sums stay in
        /// float32. The CPU does not.
        tf32: bool = false;
        /// Type of gradients between the passes of a step and its update. `bfloat16` halves their memory, which matters where all
        /// weights are trained.
        grad_dtype: GradDtype = GradDtype::Float32, aliases ["gradient_dtype"];
        /// With `fp16`: a fixed loss scale; 0 for a dynamic one.
        loss_scale: f64 = 0.0, range Range::at_least(0.0);
        /// The dynamic loss scale starts at 2 to this power.
        initial_scale_power: u64 = 16, range Range::within(0.0, 40.0);
        /// The dynamic loss scale is doubled after this many steps without overflow.
        loss_scale_window: u64 = 1000, range Range::at_least(1.0);
        /// The dynamic loss scale is first halved at this many overflows; the count restarts when it is doubled.
        hysteresis: u64 = 2, range Range::at_least(1.0);
        /// The lowest dynamic loss scale.
        min_loss_scale: f64 = 1.0, range Range::greater_than(0.0);
        /// Seed of adapter initialisation and dropout.
        seed: u64 = 42;
        /// Seed of shuffling and splitting (`null`: `seed`).
        data_seed: Option<u64> = None;
        /// Resume from a checkpoint: `latest`, its folder, or a file of a run that names one, such as `runs/my-run/best`.
        resume_from_checkpoint: Option<Resume> = None;
        /// Shuffle so that the rows of a batch have similar lengths.
        group_by_length: bool = false;
        /// Steps in a row with NaN or infinity, each skipped, before the run ends with exit code 8.
        max_nonfinite_steps: usize = 5, range Range::at_least(1.0);
        /// How several ranks share the work. Each takes its part of every step's micro-batches (`docs/distributed.md`).
        strategy: Strategy = Strategy::Auto;
        /// A configuration of DeepSpeed: a JSON file, which may have comments, or a mapping (`docs/foreign-configs.md`). Also read
        /// from `DEEPSPEED_CONFIG`.
        deepspeed: FileOrMapping = FileOrMapping::default();
        /// A configuration of Accelerate, as `accelerate config` writes it. Also read from `ACCELERATE_CONFIG_FILE`.
        accelerate: Option<PathBuf> = None;
        /// FSDP, as in Transformers: `true`, or words such as `full_shard auto_wrap`.
        fsdp: FsdpWords = FsdpWords::default();
        /// With `fsdp`: its settings, as in Transformers: a JSON file or a mapping.
        fsdp_config: FileOrMapping = FileOrMapping::default();
        /// With `strategy: fsdp`: which part of the weights each rank keeps.
        fsdp_sharding_strategy: Sharding = Sharding::FullShard;
        /// Number of ranks as threads of one process: with `strategy: dp`, and with `zero1`, `zero2`, `zero3` or `fsdp` if no launcher
        /// started processes.
        dp_ranks: Option<usize> = None, range Range::within(1.0, 1024.0);
        /// Communication library between ranks that are processes.
        ddp_backend: RankBackend = RankBackend::Auto;
        /// Mebibytes of gradients that are reduced over ranks at a time.
        ddp_bucket_cap_mb: usize = 25, range Range::within(1.0, 65536.0);
        /// Sum gradients over ranks after every pass and not once a step. `ddp` then adds in the order of `zero2`, and gives the
        /// same bits for any `grad_accum`.
        reduce_every_pass: bool = false;
        /// Seconds that an operation between ranks may take before the run ends with exit code 7.
        ddp_timeout: f64 = 600.0, range Range { above: Some(0.0), max: Some(1e9), ..Range::ANY };
        /// Steps between checks that the ranks' trained values are equal to the bit. A difference ends the run with exit code 8 (0:
        /// no checks).
        replica_check_steps: u64 = 100;
        /// CPU threads of a rank (`null`: one for each core, divided among the ranks of a machine).
        num_threads: Option<usize> = None, range Range::within(1.0, 1024.0);
    }
}

section! {
    /// Where rows come from and how they become tokens and labels.
    DataConfig = "data" {
        /// Training rows: JSONL, JSON, CSV or TSV files (also `.gz`, `.zst`), Parquet, Arrow; patterns such as `data/*.jsonl`;
        /// files on the hub as `hf://datasets/owner/name/file`.
        train_path: Vec<PathBuf> = Vec::new();
        /// Validation rows.
        val_path: Vec<PathBuf> = Vec::new();
        /// Test rows.
        test_path: Vec<PathBuf> = Vec::new();
        /// The folder that names of images in rows are relative to (`null`: that of the first training file). Names may not lead out of it.
        image_dir: Option<PathBuf> = None, aliases ["media_dir"];
        /// What happens to rows with an image that cannot be read.
        bad_images: BadImages = BadImages::Refuse;
        /// Whether rows, `infer --image`, and `/image` in `chat` may name images by web address (`http`, `https`). They are fetched before
        /// the run, from public hosts only, into `cache_dir`, where later runs and other ranks find them.
        allow_image_urls: bool = false;
        /// The most disk space that images of web addresses may take in `cache_dir`.
        image_cache_size: Bytes = Bytes(50 << 30);
        /// Training rows from several sources, instead of `train_path`: a list of `{path, weight, format}`, or of `{name, config,
        /// split, revision, weight, format}` for data sets on the hub. Without weights every row is used once.
        datasets: Vec<DatasetSpec> = Vec::new();
        /// Size of a mix by weight.
        mix_strategy: MixStrategy = MixStrategy::InterleaveUnder;
        /// The format of a row.
        format: Format = Format::Auto;
        /// A Jinja file to use as the chat template.
        template_path: Option<PathBuf> = None, aliases ["train.chat_template_path"];
        /// A built-in chat template (`null`: the tokenizer's own).
        chat_template: Option<BuiltinTemplate> = None;
        /// The date that chat templates insert as today's, such as `2025-07-26` (`null`: today).
        template_date: Option<String> = None;
        /// Variables for the chat template, as in Transformers and vLLM: `{enable_thinking: false}`, `{reasoning_effort: high}`,
        /// `{preserve_thinking: true}`. Each template has its own; one that it does not read is refused. A row's own
        /// `chat_template_kwargs` replace them.
        chat_template_kwargs: TemplateKwargs = TemplateKwargs::default();
        /// Treat special tokens that a message, a tool or a prompt contains (`<|im_end|>`) as plain text. Those that the template
        /// writes stay tokens. `false`: all of them are tokens, as in Transformers. Rows of plain text and `--raw` prompts always
        /// keep them.
        split_special_tokens: bool = true;
        /// With `task: classification`: the labels, in the order of their numbers (empty: those of the training rows, sorted). A
        /// row with any other label is an error.
        labels: Labels = Labels::default();
        /// Share of the training rows that is held out for validation; 0 for none. With labels, the split is stratified.
        split: f64 = 0.0, range Range::from_to_below(0.0, 1.0);
        /// Which tokens carry the loss.
        loss_on: LossOn = LossOn::Assistant;
        /// Shuffle rows anew each epoch; `false` keeps the order of the files.
        shuffle: bool = true;
        /// Pack several rows into one of up to `model.max_seq_len` tokens; attention never crosses row boundaries.
        packing: bool = false, aliases ["train.packing"];
        /// What happens to rows that are too long.
        truncation: Truncation = Truncation::Right;
        /// Rows with fewer tokens are left out.
        min_length: Option<usize> = None, range Range::at_least(1.0);
        /// Rows with more tokens, before any truncation, are left out.
        max_length: Option<usize> = None, range Range::at_least(1.0);
        /// Some chat templates rewrite earlier turns: they drop reasoning or move the tools. Such a row is rendered once for each
        /// turn that a later rendering changes. This limits the tokens of all renderings, as a multiple of those of the longest
        /// one. Beyond it the first turns are not learned, and the data report counts such rows. A higher limit learns more turns
        /// and takes more tokens.
        max_turn_growth: f64 = 8.0, range Range::at_least(1.0);
        /// Leave out training rows that repeat an earlier one.
        dedupe: Dedupe = Dedupe::None;
        /// How similar two rows must be to count as near-duplicates: the share of their sequences of five words that both contain.
        dedupe_threshold: f64 = 0.8, range Range::within(0.1, 1.0);
        /// What happens to training rows that are also in the validation or test rows.
        contamination: Contamination = Contamination::Off;
        /// Threads that tokenize (`null`: one for each core).
        num_proc: Option<usize> = None, aliases ["dataset_num_proc", "train.dataset_num_proc"], range Range::within(1.0, 1024.0);
        /// The folder for tokenized data, about 4 bytes a token (`null`: `~/.cache/tunesmith`).
        cache_dir: Option<PathBuf> = None;
        /// Keep tokenized data for the next run, keyed by content; `false` removes it when the run ends.
        use_cache: bool = true;
        /// Use only this many rows of each file set, or of each source.
        max_rows: Option<usize> = None, range Range::at_least(1.0);
    }
}

section! {
    /// What a run writes besides checkpoints.
    LoggingConfig = "logging" {
        /// Write TensorBoard event files.
        tensorboard: bool = true;
        /// Folder of TensorBoard event files (`null`: `tb` in `train.output_dir`).
        logging_dir: Option<PathBuf> = None, aliases ["train.logging_dir"];
        /// The run's name in TensorBoard and the report.
        run_name: Option<String> = None, aliases ["train.run_name"];
        /// Write `report.html` at the end.
        report: bool = true;
        /// The optimizer step for which rank 0 records a timeline of its passes and of the sums of gradients over ranks
        /// (`docs/distributed.md`).
        timeline_step: Option<u64> = None, range Range::at_least(1.0);
    }
}

section! {
    /// How answers are generated: for the report, for `train.predict_with_generate`, and by `tunesmith infer` and `chat`.
    /// Names and meaning are those of Transformers' `GenerationConfig`.
    GenerationConfig = "gen" {
        /// The longest answer in tokens.
        max_new_tokens: usize = 64, range Range::within(1.0, 1e6);
        /// The model ends no answer before it has so many tokens; 0 for any length. `stop_strings` end an answer all the same.
        min_new_tokens: usize = 0, range Range::within(0.0, 1e6);
        /// Number of answers in the report, from before and after training side by side; 0 for none.
        num_samples: usize = 8, range Range::within(0.0, 10_000.0);
        /// Sample each token; `false` takes the most probable one (greedy), so that runs can be compared.
        do_sample: bool = false;
        /// With `do_sample`: softmax temperature; below 1, probable tokens become more probable.
        temperature: f64 = 1.0, range Range::greater_than(0.0);
        /// With `do_sample`: sample only from this many most probable tokens; 0 for all.
        top_k: usize = 50;
        /// With `do_sample`: sample only from the most probable tokens whose probabilities sum to at least this.
        top_p: f64 = 1.0, range Range { above: Some(0.0), max: Some(1.0), ..Range::ANY };
        /// With `do_sample`: sample only from tokens with at least this share of the largest probability; 0 for all.
        min_p: f64 = 0.0, range Range::within(0.0, 1.0);
        /// Seed of sampling (`null`: `train.seed`).
        seed: Option<u64> = None;
        /// Above 1, tokens that already occurred become less probable.
        repetition_penalty: f64 = 1.0, range Range::greater_than(0.0);
        /// No sequence of so many tokens occurs twice in prompt and answer together; 0 for no such rule.
        no_repeat_ngram_size: usize = 0, range Range::within(0.0, 1e6);
        /// Number of beams; 1 for no beam search.
        num_beams: usize = 1, range Range::within(1.0, 256.0);
        /// With beams: a finished answer's log-probability is divided by its length to this power; above 0 favours long ones.
        length_penalty: f64 = 1.0;
        /// With beams: when the search ends.
        early_stopping: BeamStop = BeamStop::False;
        /// Prompt lookup decoding: guess up to this many next tokens, and read them in one pass; 0 for none.
        /// A guess is what followed the last tokens where they occurred before, in the prompt or in the answer. Answers stay the
        /// same, on a GPU within rounding. Extracts and rewrites get faster, free texts hardly. More than 14 are never guessed.
        prompt_lookup_num_tokens: usize = 0, range Range::within(0.0, 1e6);
        /// With `prompt_lookup_num_tokens`: look for this many last tokens, then for one fewer, down to one.
        max_matching_ngram_size: usize = 2, range Range::within(1.0, 1e6);
        /// Texts that are answered side by side (`null`: 16 on the CPU, 128 on a GPU). A beam counts as a text. If memory runs short,
        /// half of them wait.
        batch_size: Option<usize> = None, range Range::within(1.0, 1e6);
        /// For `infer` and `chat`: hold the head in the format of `model.quantization` too, which makes a step of decoding faster.
        /// This rounds the logits. If the base is in a maker's format, the head is in int8. If the head is also the embedding, the
        /// embedding stays as it is, beside the quantized copy. A head that was trained itself is not quantized.
        quantize_head: bool = false;
        /// Strings that end an answer; the answer does not include them.
        stop_strings: Vec<String> = Vec::new(), aliases ["stop"];
    }
}

section! {
    /// How generated answers are scored (`docs/evaluation.md`).
    EvalConfig = "eval" {
        /// The metrics of generated answers. Loss and perplexity of the references are always measured.
        metrics: Vec<EvalMetric> = vec![EvalMetric::ExactMatch, EvalMetric::Contains, EvalMetric::Rouge, EvalMetric::Bleu, EvalMetric::Chrf];
        /// What is done to both texts before `exact_match` and `contains` compare them.
        normalization: Normalization = Normalization::Trim;
        /// Compare words by their stems in ROUGE.
        rouge_stemmer: bool = false;
        /// A JSON Schema that answers must satisfy, for the metric `json`.
        json_schema: Option<PathBuf> = None;
        /// Your own program that scores answers, with its arguments, as a list. It reads and writes JSON lines.
        scorer: Vec<String> = Vec::new();
        /// Seconds that `scorer` may take for a row.
        scorer_timeout: f64 = 60.0, range Range { above: Some(0.0), max: Some(86_400.0), ..Range::ANY };
        /// Confidence level of intervals, such as 0.95.
        confidence: f64 = 0.95, range Range { above: Some(0.0), below: Some(1.0), ..Range::ANY };
        /// Bootstrap samples for confidence intervals; 0 for none.
        bootstrap_samples: usize = 1000, range Range::within(0.0, 100_000.0);
    }
}

impl EvalConfig {
    /// Whether a metric needs the question besides the answer and its reference.
    pub fn reads_sources(&self) -> bool {
        self.metrics.contains(&EvalMetric::Sari) || !self.scorer.is_empty()
    }
}
