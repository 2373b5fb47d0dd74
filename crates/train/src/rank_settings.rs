//! Settings that must be equal on all ranks of a run, in addition to those of the stamp.

/// Settings that decide when ranks communicate: to compare, to evaluate, to stop. A resume may change them.
pub const COMMUNICATION: &[&str] = &[
    "train.strategy",
    "train.fsdp_sharding_strategy",
    "train.reduce_every_pass",
    "train.logging_steps",
    "train.replica_check_steps",
    "train.ddp_bucket_cap_mb",
    "train.max_nonfinite_steps",
    "train.eval_strategy",
    "train.eval_steps",
    "train.eval_batch_size",
    "train.eval_on_start",
    "train.final_eval",
    "train.predict_with_generate",
    "train.generation_rows",
    "train.metric_for_best_model",
    "train.greater_is_better",
    "train.early_stopping_patience",
    "train.early_stopping_threshold",
];

/// Settings that decide what ranks measure together before step 1. The measured sizes are in the stamp.
pub const SIZES: &[&str] = &[
    "tuning.mode",
    "train.batch_size",
    "train.grad_accum",
    "train.effective_batch",
    "train.target_tokens_per_device_step",
    "train.max_tokens_per_pass",
    "train.gradient_checkpointing",
];
