//! Keys that other toolkits have and a later version will read: refused by name, never accepted and ignored.

const LOADER: &str = "rows are tokenized before training, there is no data loader; remove the key";
const DAPT: &str = "for raw text set data.format: text and data.packing: true, and data.truncation: split; a block is model.max_seq_len tokens long \
     (docs/guides/dapt.md)";
const SECRET: &str = "a secret does not belong into a file; set the environment variable HF_TOKEN";
const QUANT: &str =
    "set model.quantization: nf4 or fp4, or tuning.mode: qlora; model.double_quant codes the scales too";

/// Full keys (or sections) and why they are refused.
pub(super) const LATER: &[(&str, &str)] = &[
    ("train.local_rank", "the launcher says which rank a process is; remove the key"),
    ("train.dataloader_num_workers", LOADER),
    ("train.dataloader_pin_memory", LOADER),
    ("train.dataloader_drop_last", "the last, smaller batch of an epoch is always kept; remove the key"),
    ("train.auto_find_batch_size", "set train.batch_size: auto, which measures before step 1 and loses no step"),
    (
        "train.gradient_checkpointing_layers",
        "set train.gradient_checkpointing: {full: N}: the first N blocks are run again",
    ),
    ("train.eval_delay", "a delayed first validation is not yet part of this version"),
    ("train.report_to", "set logging.tensorboard instead"),
    ("train.logging_dir", "set logging.logging_dir instead"),
    ("train.run_name", "set logging.run_name instead"),
    (
        "train.activation_offloading",
        "activations lie in main memory already; moving them there belongs to an engine for GPUs, which is not part of this version",
    ),
    (
        "train.weight_dtype",
        "what is trained is kept in float32 (docs/precision.md); model.dtype says how frozen weights are kept, train.grad_dtype how gradients",
    ),
    ("train.tf32", "this version computes in float32 on the CPU; remove the key"),
    ("train.torch_compile", "there is nothing to compile; remove the key"),
    ("train.mode", DAPT),
    ("train.block_size", DAPT),
    ("train.pack_factor", DAPT),
    ("data.block_size", DAPT),
    ("data.pack_factor", DAPT),
    ("data.name", "set data.datasets: [{name: owner/name}], or data.train_path: hf://datasets/owner/name/file"),
    ("model.token", SECRET),
    ("model.hub_token", SECRET),
    ("model.use_auth_token", SECRET),
    ("model.hf_token", SECRET),
    ("train.hub_token", SECRET),
    ("model.attn_implementation", "there is one attention in this version; remove the key"),
    ("model.load_in_4bit", QUANT),
    ("model.load_in_8bit", "set model.quantization: int8"),
    ("model.bnb_4bit_quant_type", QUANT),
    ("model.bnb_4bit_compute_dtype", "products are computed in float32; remove the key"),
    ("model.bnb_4bit_quant_storage", "codes are kept in bytes; remove the key"),
    ("model.llm_int8_threshold", "8-bit weights are widened, so that no outlier is lost; remove the key"),
    ("tuning.bnb", QUANT),
    ("tuning.lora.layers_pattern", "layers are always counted along model.layers; use layers_to_transform"),
    (
        "tuning.lora.trainable_token_indices",
        "training the embeddings of tokens that exist is not yet part of this version; see tuning.new_tokens",
    ),
    ("tuning.lora.loftq_config", "set tuning.lora.init_lora_weights: loftq, and tuning.lora.loftq_iter"),
    ("tuning.lora.lora_bias", "a bias on B is not yet part of this version; tuning.lora.bias trains the base's biases"),
    ("tuning.lora.task_type", "the task says it: set task, and remove the key"),
    ("logging.wandb", "Weights & Biases is not yet part of this version"),
    ("logging.mlflow", "MLflow is not yet part of this version"),
    (
        "distributed",
        "such a section is not yet part of this version; set train.strategy, `tunesmith launch` starts the ranks (docs/distributed.md)",
    ),
    ("deepspeed", "set train.deepspeed: FILE, or DEEPSPEED_CONFIG=FILE (docs/foreign-configs.md)"),
    ("accelerate", "set train.accelerate: FILE, or ACCELERATE_CONFIG_FILE=FILE (docs/foreign-configs.md)"),
    ("infer", "settings of answers are in gen; flags of `tunesmith infer` set them too"),
    ("dapt", DAPT),
    ("mode", DAPT),
    ("block_size", DAPT),
    ("pack_factor", DAPT),
    ("datasets", "set data.datasets; `tunesmith import FILE` turns an Axolotl configuration into ours"),
];

/// Variables of the shell that other toolkits read, the value that asks for nothing, and why others are refused.
pub(super) const LATER_VARIABLES: &[(&str, &str, &str)] = &[(
    "NUM_GPUS",
    "1",
    "one process has one rank: `tunesmith launch -- train CONFIG` with NUM_GPUS=N starts N (scripts/just train-distributed)",
)];
