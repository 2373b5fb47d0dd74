//! Decides which settings a resumed run must share with its checkpoint: those in [`COMPARED`]. A test lists every other
//! setting, so that a decision is made about each new one.
use tunesmith_config::OptionDef;
use tunesmith_model::adapters::KINDS;

/// A checkpoint of a run with `bnb` is not resumed with `unsloth` unless `--allow` names this setting, as in SFT-Play.
pub(super) const BACKEND_WORD: &str = "tuning.backend";

/// Settings that shape the training curve; each is compared. So are an adapter's settings that affect training alone
/// ([`tunesmith_model::adapters::About::training`]). The field `adapter` covers its other settings.
const COMPARED: &[&str] = &[
    "task",
    "data.labels",
    "train.class_weights",
    "model.max_seq_len",
    "train.loss_scale",
    "train.initial_scale_power",
    "train.loss_scale_window",
    "train.hysteresis",
    "train.grad_dtype",
    "train.min_loss_scale",
    // The value that was asked for. The stamp's field `backend` says which kernels have computed.
    BACKEND_WORD,
    "train.batch_size",
    "train.grad_accum",
    "train.learning_rate",
    "train.learning_rates",
    "train.optim",
    "train.optim_args",
    "train.weight_decay",
    "train.adam_beta1",
    "train.adam_beta2",
    "train.adam_epsilon",
    "train.decay_norms_and_bias",
    "train.lr_scheduler_type",
    "train.lr_scheduler_kwargs",
    "train.warmup_ratio",
    "train.warmup_steps",
    "train.max_grad_norm",
    "train.label_smoothing_factor",
    "train.z_loss",
    "train.neftune_noise_alpha",
    "train.ema_decay",
    "train.seed",
    "train.data_seed",
    "train.group_by_length",
    "data.shuffle",
    "data.packing",
    "data.split_special_tokens",
];

/// Settings that are also compared, but recorded only if they are not the default, because earlier checkpoints do not
/// have them.
const RECORDED_IF_SET: &[&str] = &[
    "vision.load",
    "vision.encoder",
    "vision.revision",
    "vision.connector",
    "vision.connector_hidden_size",
    "vision.connector_dropout",
    "vision.feature_layer",
    "vision.image_token",
    "vision.backend",
    "vision.min_pixels",
    "vision.max_pixels",
    "vision.world.encoder",
    "vision.world.projection_mode",
    "vision.world.projection_architecture",
    "vision.world.image_size",
    "tuning.freeze_vision",
    "tuning.freeze_connector",
    "tuning.freeze_language",
    "tuning.vision_unfreeze_layers",
    "tuning.vision_target_modules",
];

/// Fields for which `--allow` accepts no difference, because the tensors would not fit.
pub(super) const NEVER: &[&str] = &["mode", "adapter", "train.optim"];

/// Whether the stamp records the setting, so that a resumed run is compared with it.
pub(super) fn is_compared(option: &OptionDef) -> bool {
    let kind = KINDS.iter().find(|about| about.section.name == option.section);
    let path = option.path();
    let compared = || COMPARED.contains(&&*path) || is_recorded_if_set(&path);
    kind.map_or_else(compared, |about| about.training.contains(&option.name))
}

/// Whether the stamp records the setting only where it is not the default.
pub(super) fn is_recorded_if_set(path: &str) -> bool {
    RECORDED_IF_SET.contains(&path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_config::schema;

    /// Settings that are not compared themselves: a field of the stamp shows their effect (base model, dtype, backend, data,
    /// adapter), or they matter only at step 0.
    const COVERED: &[&str] = &[
        "model.device",
        "model.dtype",
        "train.bf16",
        "train.fp16",
        "train.tf32",
        // In `train.learning_rate` and the warm-up, which are compared as they are used.
        "train.lr_scaling",
        "train.lr_scaling_batch",
        "model.name",
        "model.revision",
        "model.local_dir",
        "model.init",
        "model.quantization",
        "model.double_quant",
        "model.quantization_skip_modules",
        "tuning.mode",
        "tuning.adapter",
        "tuning.adapters",
        "tuning.new_tokens",
        "tuning.freeze.trainable_layers",
        "tuning.freeze.trainable_modules",
        "tuning.freeze.trainable_patterns",
        "data.train_path",
        "data.datasets",
        "data.mix_strategy",
        "data.format",
        "data.template_path",
        "data.chat_template",
        "data.template_date",
        "data.chat_template_kwargs",
        "data.split",
        "data.min_length",
        "data.max_length",
        "data.dedupe",
        "data.dedupe_threshold",
        "data.contamination",
        "data.loss_on",
        "data.truncation",
        "data.max_turn_growth",
        "data.image_dir",
        "data.bad_images",
        "data.allow_image_urls",
        "data.max_rows",
        "data.val_path",
        "data.test_path",
    ];

    /// Settings that may change on resume: how long to train, what to measure, keep and write, how to use the machine. With a
    /// decaying schedule, another length changes the learning rate from this step on, and the run says so.
    const FREE: &[&str] = &[
        "vision.cache_features",
        "vision.feature_cache_size",
        "data.image_cache_size",
        "eval.metrics",
        "eval.normalization",
        "eval.rouge_stemmer",
        "eval.json_schema",
        "eval.scorer",
        "eval.scorer_timeout",
        "eval.confidence",
        "eval.bootstrap_samples",
        "train.output_dir",
        "train.disable_dropout",
        "train.num_train_epochs",
        "train.max_steps",
        "train.eval_batch_size",
        "train.gradient_checkpointing",
        "train.activation_offloading",
        "train.offload_optimizer",
        "train.offload_param",
        "train.offload_embedding",
        "train.effective_batch",
        "train.target_tokens_per_device_step",
        "train.memory_budget",
        "train.max_tokens_per_pass",
        "train.logging_steps",
        "train.eval_strategy",
        "train.eval_steps",
        "train.eval_on_start",
        "train.final_eval",
        "train.predict_with_generate",
        "train.generation_max_new_tokens",
        "train.generation_num_beams",
        "train.generation_rows",
        "train.metric_for_best_model",
        "train.greater_is_better",
        "train.eval_accumulation_steps",
        "train.save_strategy",
        "train.save_steps",
        "train.save_total_limit",
        "train.save_async",
        "train.load_best_model_at_end",
        "train.early_stopping_patience",
        "train.early_stopping_threshold",
        "train.resume_from_checkpoint",
        "train.max_nonfinite_steps",
        "train.num_threads",
        "train.strategy",
        "train.deepspeed",
        "train.accelerate",
        "train.fsdp",
        "train.fsdp_config",
        "train.dp_ranks",
        "train.fsdp_sharding_strategy",
        "train.ddp_bucket_cap_mb",
        "train.reduce_every_pass",
        "train.ddp_backend",
        "train.ddp_timeout",
        "train.replica_check_steps",
        "data.num_proc",
        "data.cache_dir",
        "data.use_cache",
        "logging.tensorboard",
        "logging.logging_dir",
        "logging.run_name",
        "logging.report",
        "logging.timeline_step",
        "gen.max_new_tokens",
        "gen.num_samples",
        "gen.do_sample",
        "gen.temperature",
        "gen.top_k",
        "gen.top_p",
        "gen.min_p",
        "gen.seed",
        "gen.repetition_penalty",
        "gen.min_new_tokens",
        "gen.no_repeat_ngram_size",
        "gen.num_beams",
        "gen.length_penalty",
        "gen.early_stopping",
        "gen.prompt_lookup_num_tokens",
        "gen.max_matching_ngram_size",
        "gen.batch_size",
        "gen.quantize_head",
        "gen.stop_strings",
    ];

    #[test]
    fn every_setting_is_compared_covered_or_free() {
        let mut listed: Vec<_> = [COMPARED, RECORDED_IF_SET, COVERED, FREE].concat();
        let of_adapter = |section: &str| KINDS.iter().any(|about| about.section.name == section);
        let mut known: Vec<_> =
            schema::options().filter(|option| !of_adapter(option.section)).map(OptionDef::path).collect();
        listed.sort_unstable();
        known.sort();
        assert_eq!(listed, known, "a new setting must be put into one of the four lists");
    }
}
