//! Settings that are one of a few words.
use super::enum_macro::choices;

choices! {
    /// The task, which decides the head and the loss.
    Task {
        /// Next-token prediction (causal language modelling).
        CausalLm = "causal_lm",
        /// Sequence classification: one label for each row.
        Classification = "classification",
        /// Regression: one number for each row.
        Regression = "regression",
    };

    /// Where the base model's weights come from.
    Init {
        /// From the model folder's safetensors.
        Pretrained = "pretrained",
        /// Random, with `config.json`'s `initializer_range`: pretraining from scratch.
        Random = "random",
    };

    /// Storage type of frozen weights. Matrix products are always computed in float32.
    Dtype {
        /// bfloat16 if the checkpoint stores bfloat16, which loses nothing; else float32.
        Auto = "auto",
        /// All in float32.
        Float32 = "float32" | "fp32",
        /// Matrices in bfloat16, rounded where the checkpoint is more precise.
        Bfloat16 = "bfloat16" | "bf16",
    };

    /// Storage type of gradients between the passes of an optimizer step. Within a pass they are summed in float32.
    GradDtype {
        /// In float32.
        Float32 = "float32" | "fp32",
        /// In bfloat16: half the memory; a step rounds a gradient once for each of its passes.
        Bfloat16 = "bfloat16" | "bf16",
    };

    /// Quantization of the base model's matrices, in bitsandbytes' formats, FP8, or MXFP4.
    Quantization {
        /// As in the checkpoint; `nf4` with `tuning.mode: qlora`.
        Auto = "auto",
        /// No quantization. A quantized checkpoint is dequantized.
        None = "none",
        /// 4 bits a number; its values are quantiles of a normal distribution.
        Nf4 = "nf4",
        /// 4 bits a number, as floating point.
        Fp4 = "fp4",
        /// 8 bits a number, with a scale for each row.
        Int8 = "int8",
        /// 8 bits a number, as floating point (E4M3), with a scale for each row. With `train.bf16` a GPU whose tensor cores
        /// take FP8 multiplies in it, and keeps each matrix twice.
        Fp8 = "fp8",
        /// 4 bits a number, as floating point with a power of two for each 32: as gpt-oss's checkpoints hold their experts. Other
        /// matrices stay as they are.
        Mxfp4 = "mxfp4",
    };

    /// Which kernels compute.
    Backend {
        /// Our kernels, with the widest vector instructions of the processor.
        Fused = "fused",
        /// The same operations without vector instructions: slow, for checks.
        Reference = "reference",
        /// SFT-Play's name for `fused`, on a base that is kept as `tuning.mode` says.
        Unsloth = "unsloth",
        /// SFT-Play's name for `fused`; with `tuning.mode: qlora` on bitsandbytes' NF4.
        Bnb = "bnb",
    };

    /// Which biases are trained beside the adapters.
    Bias {
        /// None.
        None = "none",
        /// All biases of the model.
        All = "all",
        /// Those of the modules that have an adapter.
        LoraOnly = "lora_only",
    };

    /// How several ranks share the work.
    Strategy {
        /// `single` with one rank. With several, the first of `ddp`, `zero1`, `zero2` and `fsdp` that fits in memory, or the one
        /// that needs least. With `dp_ranks`, `dp`.
        Auto = "auto",
        /// One process, and an error where a launcher has started several.
        Single = "single",
        /// `dp_ranks` ranks as threads of one process, each with its own copy of the model.
        Dp = "dp",
        /// One process for each rank, started by `tunesmith launch`, torchrun, mpirun or srun. Gradients are summed over NCCL or Gloo.
        Ddp = "ddp",
        /// As `ddp`, but each rank keeps only its share of the optimizer's state. With `dp_ranks`, ranks are threads.
        Zero1 = "zero1",
        /// As `zero1`, and each rank keeps only its share of the gradients, which are summed after every pass.
        Zero2 = "zero2",
        /// As `zero2`, and each rank keeps only its share of the weights. The weights of a segment are gathered while it computes.
        Zero3 = "zero3",
        /// As `zero3`, with the sharding of `fsdp_sharding_strategy`.
        Fsdp = "fsdp",
    };

    /// How FSDP shards the weights, as PyTorch's `ShardingStrategy`.
    Sharding {
        /// Each rank keeps a share. The weights of a segment are gathered for its forward pass, and again for its backward pass.
        FullShard = "full_shard",
        /// Each rank keeps a share outside of passes. Weights that are gathered for the forward pass stay until the backward pass.
        ShardGradOp = "shard_grad_op",
        /// Each rank keeps everything, as with `ddp`.
        NoShard = "no_shard",
        /// The ranks of a machine share the frozen weights, and gather them within the machine. Trained weights are shared as with
        /// `zero2`.
        HybridShard = "hybrid_shard",
    };

    /// How the learning rate is scaled with the rows of an optimizer step.
    LrScaling {
        /// Not scaled: `learning_rate` is used as it is.
        None = "none",
        /// It grows in proportion to the rows.
        Linear = "linear",
        /// It grows with the square root of the rows.
        Sqrt = "sqrt",
    };

    /// Communication library between ranks that are processes.
    RankBackend {
        /// NCCL where each rank computes on a GPU of its own and the library is there; else Gloo.
        Auto = "auto",
        /// Gloo over TCP, from and to main memory.
        Gloo = "gloo",
        /// NCCL; each rank needs a GPU of its own.
        Nccl = "nccl",
    } later ["mpi", "ccl", "hccl", "xccl"];

    /// When the validation loss is measured.
    EvalStrategy {
        /// Never.
        No = "no",
        /// Every `eval_steps` optimizer steps.
        Steps = "steps",
        /// At the end of each epoch.
        Epoch = "epoch",
    };

    /// When a checkpoint is written. The end of a run always writes one.
    SaveStrategy {
        /// Only at the end.
        No = "no",
        /// Every `save_steps` optimizer steps.
        Steps = "steps",
        /// At the end of each epoch.
        Epoch = "epoch",
    } later ["best"];

    /// A chat template that is built in.
    BuiltinTemplate {
        /// `<|im_start|>role … <|im_end|>`.
        Chatml = "chatml",
        /// Llama 3's header tokens.
        Llama3 = "llama3",
        /// Gemma's turns.
        Gemma = "gemma",
        /// `[INST] … [/INST]`.
        Mistral = "mistral",
        /// `<|user|> … <|end|>`.
        Phi = "phi",
        /// Images, a question, a line break, and an answer.
        Paligemma = "paligemma",
    };

    /// Which tokens carry the loss.
    LossOn {
        /// Every assistant turn.
        Assistant = "assistant",
        /// The last assistant turn, or the completion.
        Completion = "completion",
        /// Every token.
        All = "all",
    };

    /// What happens to a row longer than `model.max_seq_len`.
    Truncation {
        /// The end of the row is cut off.
        Right = "right",
        /// The beginning of the row is cut off.
        Left = "left",
        /// The row is left out.
        Drop = "drop",
        /// Raw text is cut into pieces of that length, so that every token is learned. The end of other rows is cut off.
        Split = "split",
    };

    /// Size of a mix of data sets by weight.
    MixStrategy {
        /// As large as possible without using a row twice.
        InterleaveUnder = "interleave_under",
        /// As small as possible with every row in it; rows of some sources repeat.
        InterleaveOver = "interleave_over",
    };

    /// Metrics of generated answers.
    EvalMetric {
        /// The answer equals the reference after normalization.
        ExactMatch = "exact_match" | "em",
        /// The answer contains the reference after normalization.
        Contains = "contains",
        /// ROUGE-1, -2, -L and -Lsum: mean F measure, 0 to 1, as in the package rouge-score.
        Rouge = "rouge",
        /// BLEU of the corpus, 0 to 100, as sacrebleu.
        Bleu = "bleu",
        /// chrF of the corpus, 0 to 100, as sacrebleu.
        Chrf = "chrf",
        /// chrF++ of the corpus, 0 to 100: chrF with word n-grams, as sacrebleu.
        ChrfPlusPlus = "chrf++",
        /// METEOR, 0 to 1, from equal words and stems; synonyms do not count.
        Meteor = "meteor",
        /// SARI of rewritten text, 0 to 100, from the source, the answer and the reference.
        Sari = "sari",
        /// Whether the answer is JSON, equals the reference's JSON, and satisfies `json_schema`.
        Json = "json",
        /// `CIDEr` of captions, 0 to 10, as pycocoevalcap.
        Cider = "cider",
        /// The accuracy of VQA v2, 0 to 1, by several people's answers.
        VqaAccuracy = "vqa_accuracy",
        /// Whether the answer chooses the reference's letter, such as B.
        Choice = "choice",
        /// Accuracy, precision, recall and F1 of yes, for answers that are yes or no.
        YesNo = "yes_no",
    } later ["accuracy", "f1", "bertscore", "comet", "ter"];

    /// What is done to an answer and its reference before they are compared.
    Normalization {
        /// White space at both ends is removed.
        Trim = "trim",
        /// As in the `SQuAD` benchmark: lower case, no punctuation, no `a`, `an`, `the`, single spaces.
        Squad = "squad",
    };

    /// Which training rows are dropped as duplicates.
    Dedupe {
        /// None.
        None = "none",
        /// Exact duplicates.
        Exact = "exact",
        /// Exact and near duplicates (`MinHash`, `dedupe_threshold`).
        Minhash = "minhash",
    };

    /// What happens to rows with an image that cannot be read.
    BadImages {
        /// The run ends before it starts.
        Refuse = "refuse",
        /// They are left out and counted; every image is decoded when rows are read.
        Skip = "skip",
    };

    /// What stands between an image encoder and the model that it is paired with.
    ConnectorChoice {
        /// A linear module with a bias.
        Linear = "linear",
        /// Two linear modules with GELU between them.
        Mlp = "mlp",
    };

    /// What of a second encoder's latents `[channels, rows, columns]` becomes one embedding of the model.
    WorldProjection {
        /// A place, with all of its channels: many embeddings.
        Spatial = "spatial",
        /// A channel, with all of its places: few embeddings.
        Channel = "channel",
    };

    /// The projector from a second encoder's latents to the model.
    ProjectionArchitecture {
        /// Two linear modules with GELU behind each.
        Mlp = "mlp",
        /// Two linear modules with GELU between them.
        MlpNoFinalGelu = "mlp_no_final_gelu",
        /// A linear module.
        Linear = "linear",
    };

    /// Whose rounding resizing of images has.
    ImageBackend {
        /// torchvision's, which Transformers takes where it is installed.
        Torchvision = "torchvision",
        /// Pillow's, which `use_fast=False` takes.
        Pil = "pil",
    };

    /// What happens to training rows that are also in the validation or test rows.
    Contamination {
        /// No check.
        Off = "off",
        /// Such rows are counted and reported.
        Warn = "warn",
        /// Such rows are left out of training.
        Drop = "drop",
    };
}

/// The enums of what `tunesmith_base::registry` lists.
macro_rules! optim {
    ($($name:ident = $module:ident, $word:literal $(| $alias:literal)*, $doc:literal $(, $trait:ident)?;)+) => {
        choices! {
            /// The optimizer.
            Optim { $( #[doc = $doc] $name = $word $(| $alias)*, )+ }
            later *tunesmith_base::registry::OTHER_OPTIMIZERS;
        }

        impl Optim {
            /// Whether it is schedule-free: it averages weights instead of following a learning-rate schedule.
            pub fn averages(self) -> bool {
                [$( $( (Self::$name, stringify!($trait)), )? )+].contains(&(self, "averages"))
            }
        }
    };
}
tunesmith_base::registry::optimizers!(optim);

macro_rules! lr_scheduler {
    ($($name:ident = $module:ident, $word:literal, $doc:literal;)+) => {
        choices! {
            /// The learning-rate schedule.
            LrScheduler { $( #[doc = $doc] $name = $word, )+ } later ["reduce_lr_on_plateau", "greedy"];
        }
    };
}
tunesmith_base::registry::schedules!(lr_scheduler);

macro_rules! row_format {
    ($($name:ident = $module:ident, $word:literal, $doc:literal;)+) => {
        choices! {
            /// The format of a data row.
            Format {
                /// Recognised by the names of the first row's fields; the file's name says whether it is JSON or CSV.
                Auto = "auto" | "chat" | "jsonl" | "json" | "csv",
                $( #[doc = $doc] $name = $word, )+
            };
        }
    };
}
tunesmith_base::registry::row_forms!(row_format);

macro_rules! modes {
    ($( $module:ident: $settings:ident = $mode:ident, $word:literal $( | $alias:literal ($alias_doc:literal) )?, $doc:literal; )*) => {
        choices! {
            /// What is trained.
            Mode {
                $( #[doc = $doc] $mode = $word $( | $alias ($alias_doc) )?, )*
                /// Every weight.
                Full = "full",
                /// The weights that `tuning.freeze` names.
                Freeze = "freeze",
            };
        }

        impl Mode {
            /// Whether an adapter is trained on a frozen base.
            pub const fn adapts(self) -> bool {
                matches!(self, $( Self::$mode )|*)
            }
        }
    };
}
tunesmith_base::registry::adapters!(modes);
