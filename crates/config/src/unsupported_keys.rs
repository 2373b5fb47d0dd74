//! Keys and words of other toolkits that this version refuses, each with what to write instead. Keys of Transformers' and TRL's
//! arguments are in `foreign::trainer`.

const DAPT: &str = "for raw text set data.format: text and data.packing: true, and data.truncation: split; a block is model.max_seq_len tokens long \
     (docs/guides/dapt.md)";
const SECRET: &str = "secrets do not belong in files; set the environment variable HF_TOKEN";
const QUANT: &str =
    "set model.quantization: nf4 or fp4, or tuning.mode: qlora; model.double_quant quantizes the scales too";

const OF_THE_ADAPTER: &str = "tunesmith writes it into adapter_config.json by itself; remove the key";
const PREFERENCES: &str = "preference training and reinforcement learning are not part of this version";

/// A key, a word that other toolkits accept for it, and what to write instead.
pub(super) const WORDS: &[(&str, &str, &str)] = &[
    ("tuning.mode", "dora", "set tuning.mode: lora and tuning.lora.use_dora: true; qlora goes with it too"),
    ("tuning.mode", "qdora", "set tuning.mode: qlora and tuning.lora.use_dora: true"),
    ("tuning.mode", "rslora", "set tuning.mode: lora and tuning.lora.use_rslora: true"),
    ("tuning.mode", "pissa", "set tuning.mode: lora and tuning.lora.init_lora_weights: pissa"),
    ("tuning.mode", "loftq", "set tuning.mode: qlora and tuning.lora.init_lora_weights: loftq"),
    ("tuning.mode", "lora+", "set tuning.mode: lora and tuning.lora.loraplus_lr_ratio"),
    ("tuning.mode", "loraplus", "set tuning.mode: lora and tuning.lora.loraplus_lr_ratio"),
    ("tuning.mode", "boft", "set tuning.mode: oft, whose blocks do not overlap"),
    ("tuning.mode", "dpo", PREFERENCES),
    ("tuning.mode", "orpo", PREFERENCES),
    ("tuning.mode", "kto", PREFERENCES),
    ("tuning.mode", "ppo", PREFERENCES),
    ("tuning.mode", "grpo", PREFERENCES),
    ("train.optim", "adamw_hf", "set train.optim: adamw_torch"),
    ("train.lr_scheduler_type", "wsd", "set train.lr_scheduler_type: warmup_stable_decay"),
    ("model.device", "gpu", "set model.device: cuda"),
    ("model.device", "mps", "of GPUs, only NVIDIA's are supported: set model.device: cpu"),
    ("tuning.mode", "sft", "set task: causal_lm, which is the default; tuning.mode says which parameters are trained"),
];

/// Full keys or sections, and what to do instead.
pub(super) const LATER: &[(&str, &str)] = &[
    (
        "train.gradient_checkpointing_layers",
        "set train.gradient_checkpointing: {full: N}: the first N blocks are run again",
    ),
    (
        "train.weight_dtype",
        "what is trained is kept in float32 (docs/precision.md); model.dtype says how frozen weights are kept, train.grad_dtype how gradients",
    ),
    ("train.model_name_or_path", "set model.name"),
    ("train.use_peft", "set tuning.mode: lora"),
    ("train.dataset_name", "set data.datasets: [{name: owner/name}]"),
    ("train.load_in_4bit", QUANT),
    ("train.load_in_8bit", "set model.quantization: int8"),
    ("train.lora_r", "set tuning.lora.r"),
    ("train.lora_alpha", "set tuning.lora.lora_alpha"),
    ("train.lora_dropout", "set tuning.lora.lora_dropout"),
    ("train.lora_target_modules", "set tuning.lora.target_modules"),
    ("lora_r", "set tuning.lora.r"),
    ("lora_alpha", "set tuning.lora.lora_alpha"),
    ("lora_dropout", "set tuning.lora.lora_dropout"),
    ("lora_target_modules", "set tuning.lora.target_modules"),
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
    ("model.load_in_4bit", QUANT),
    ("model.load_in_8bit", "set model.quantization: int8"),
    ("model.bnb_4bit_quant_type", QUANT),
    ("model.bnb_4bit_compute_dtype", "products are computed in float32; remove the key"),
    ("model.bnb_4bit_quant_storage", "codes are kept in bytes; remove the key"),
    ("model.llm_int8_threshold", "8-bit weights are dequantized, so no outlier is lost; remove the key"),
    ("tuning.bnb", QUANT),
    ("tuning.lora.layers_pattern", "layers are always counted along model.layers; use layers_to_transform"),
    (
        "tuning.lora.trainable_token_indices",
        "training the embeddings of tokens that exist is not yet part of this version; see tuning.new_tokens",
    ),
    ("tuning.lora.loftq_config", "set tuning.lora.init_lora_weights: loftq, and tuning.lora.loftq_iter"),
    (
        "tuning.lora.lora_bias",
        "a bias on B is not yet part of this version; set tuning.lora.bias: lora_only to train the biases of adapted modules",
    ),
    ("tuning.lora.fan_in_fan_out", OF_THE_ADAPTER),
    ("tuning.lora.inference_mode", OF_THE_ADAPTER),
    ("tuning.lora.auto_mapping", OF_THE_ADAPTER),
    ("tuning.lora.base_model_name_or_path", "set model.name"),
    ("tuning.lora.peft_type", "set tuning.mode: lora, ia3 or oft"),
    ("gen.max_length", "set gen.max_new_tokens, which does not count the prompt"),
    ("gen.eos_token_id", "the model's files say it; gen.stop_strings ends answers at other texts"),
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
