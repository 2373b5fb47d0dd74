//! DeepSpeed's keys, one line each, and what becomes of them; as DeepSpeed 0.19 has them, with older ones that it names to
//! refuse them. Optimizer and schedule are read in `optimizer`.
use super::Action::{Always, Becomes, NotNeeded, Only, To, Together, Unsupported, With};
use super::optimizer;
use super::reader::{Reader, Rules};
use super::rules::Translation as _;
use super::value::Value;
use crate::option::Scalar::{self, Bool, Str};
use crate::rules;
use crate::value::Node;
use tunesmith_base::error::Result;

const TRUE: &[Scalar] = &[Bool(true)];
const OFF: &[Scalar] = &[];
const ONE: &[Scalar] = &[Str("1")];
const SEGMENTS: &str = "host memory is pinned, and the GPU holds two blocks at a time";
/// What `train.offload_param` does beside what DeepSpeed's key does.
const FROZEN: &str = "trained weights stay on the GPU";
const HOST: &str = "gradients and momentum stay where the model is computed";
/// What `train.offload_optimizer` does without settings.
const PINNED: &str = "tunesmith pins host memory, and overlaps copies with the update, by itself";
const DISK: &str = "this version does not offload to disk";
const QUANTIZED: &str =
    "ranks exchange values unquantized; model.quantization quantizes frozen weights, also between ranks";
const CHECKPOINTING: &str =
    "train.gradient_checkpointing says which blocks are recomputed; their inputs stay in memory";
const TOOLS: &str = "`tunesmith bench` shows where the time goes, metrics.jsonl what a run did";
const PARALLEL: &str =
    "tensor, pipeline and sequence parallelism are not supported; train.strategy says how ranks share a model";
const RANGES: &str = "whole segments are gathered, each while the one before computes, and freed after use";
const GONE: &str = "DeepSpeed itself has removed it; remove the key";
const OTHER_TRACKER: &str = "only TensorBoard is part of this version: the section tensorboard, or logging.tensorboard";
const SUMS: &str = "gradients are summed in float32, in the order of the ranks";

pub(super) const RULES: Rules = rules! {
    "train_batch_size" => Together; "rows of an optimizer step on all ranks: checked at the start against train.batch_size x train.grad_accum x ranks; if one of the two is missing, it is computed from this, as DeepSpeed does",
    "train_micro_batch_size_per_gpu" => To("train.batch_size"),
    "gradient_accumulation_steps" => To("train.grad_accum"),
    "gradient_clipping" => To("train.max_grad_norm"),
    "managed_gradient_accumulation" => Always(TRUE, "tunesmith accumulates gradients itself"),
    "steps_per_print" => NotNeeded("train.logging_steps says how often a line is shown"),
    "dump_state" => NotNeeded("`tunesmith config` shows every setting"),
    "wall_clock_breakdown" => NotNeeded(TOOLS),
    "memory_breakdown" => NotNeeded("`tunesmith memory-check` and `plan` show it"),
    "log_level" => NotNeeded("there is only one log level"),
    "disable_python_gc" => NotNeeded("there is no Python"),
    "disable_allgather" => NotNeeded("DeepSpeed no longer reads it"),
    "dataloader_drop_last" => Unsupported("the last, shorter step of an epoch is always trained"),
    "communication_data_type" => Always(&[Str("fp32")], "ranks exchange gradients in float32"),
    "seq_parallel_communication_data_type" => Always(&[Str("fp32")], PARALLEL),
    "sequence_parallel_size" => Only(ONE, PARALLEL),
    "use_data_before_expert_parallelism" => Unsupported(PARALLEL),
    "prescale_gradients" => NotNeeded(SUMS),
    "gradient_predivide_factor" => Always(&[Str("1")], SUMS),
    "gradient_allreduce_op" => Only(&[Str("mean")], "the loss is divided by the label tokens of all ranks, so gradients are a mean"),
    "zero_allow_untested_optimizer" => Always(&[Bool(true), Bool(false)], "an optimizer that does not work with a strategy is refused"),
    "zero_force_ds_cpu_optimizer" => Always(&[Bool(true), Bool(false)], "tunesmith has its own optimizers"),
    "optimizer.type" => Together; "train.optim: Adam and AdamW become adamw_torch, Lion lion, SGD sgd; others are refused",
    "optimizer.legacy_fusion" => NotNeeded("the optimizers are fused anyway"),
    "optimizer.params.lr" => To("train.learning_rate"),
    "optimizer.params.betas" => With(optimizer::betas); "train.adam_beta1 and train.adam_beta2",
    "optimizer.params.eps" => To("train.adam_epsilon"),
    "optimizer.params.weight_decay" => To("train.weight_decay"),
    "optimizer.params.momentum" | "optimizer.params.dampening" | "optimizer.params.nesterov" => With(optimizer::argument); "train.optim_args",
    "optimizer.params.bias_correction" => Only(TRUE, "AdamW always corrects the bias of its moments"),
    "optimizer.params.amsgrad" => Unsupported("this variant of Adam is not part of this version"),
    "optimizer.params.adam_w_mode" | "optimizer.params.adamw_mode"
    => Only(TRUE, "weight decay is decoupled, as DeepSpeed's own default; remove the key, or set weight_decay: 0"),
    "optimizer.params.torch_adam" => Always(&[Bool(true), Bool(false)], "there is one AdamW, equal to PyTorch's"),
    "optimizer.params.fp32_optimizer_states" => Always(TRUE, "states are float32; train.optim: adamw_8bit has smaller ones"),
    "optimizer.params.set_grad_none" => Always(&[Bool(true), Bool(false)], "gradients are in one buffer"),
    "optimizer.params.max_grad_norm" => Only(&[Str("0")], "DeepSpeed does not take it here either; set gradient_clipping"),
    "scheduler.type" => Together; "train.lr_scheduler_type: WarmupLR becomes constant_with_warmup, WarmupDecayLR linear, WarmupCosineLR cosine_with_min_lr; others are refused. Without warmup_type, DeepSpeed's logarithmic warm-up becomes linear, and a note says so",
    "scheduler.params.warmup_num_steps" => To("train.warmup_steps"),
    "scheduler.params.warmup_max_lr" => To("train.learning_rate"),
    "scheduler.params.warmup_min_lr" | "scheduler.params.warmup_min_ratio"
    => Only(&[Str("0")], "the rate rises from 0; see cosine_warmup_with_min_lr of train.lr_scheduler_type"),
    "scheduler.params.warmup_type" => Becomes(&[Str("linear")], "the warm-up is linear"),
    "scheduler.params.total_num_steps" => With(optimizer::total_steps); "train.max_steps: a schedule is as long as its run",
    "scheduler.params.cos_min_ratio" => Together; "train.lr_scheduler_kwargs: min_lr_rate",
    "scheduler.params.last_batch_iteration" => Only(&[Str("-1")], "a checkpoint knows its step; resume with --resume"),
    "scheduler.params.cycle_min_lr" | "scheduler.params.cycle_max_lr" | "scheduler.params.cycle_first_step_size"
    | "scheduler.params.cycle_second_step_size" | "scheduler.params.cycle_first_stair_count"
    | "scheduler.params.cycle_second_stair_count" | "scheduler.params.cycle_momentum"
    | "scheduler.params.cycle_min_mom" | "scheduler.params.cycle_max_mom" | "scheduler.params.decay_step_size"
    | "scheduler.params.decay_lr_rate" | "scheduler.params.decay_mom_rate" | "scheduler.params.lr_range_test_min_lr"
    | "scheduler.params.lr_range_test_step_size" | "scheduler.params.lr_range_test_step_rate"
    | "scheduler.params.lr_range_test_staircase" => Unsupported(optimizer::CYCLES),
    "fp16.enabled" => To("train.fp16"),
    "fp16.loss_scale" => With(scaling); "train.loss_scale, where fp16 is on",
    "fp16.initial_scale_power" => With(scaling); "train.initial_scale_power, where fp16 is on",
    "fp16.loss_scale_window" => With(scaling); "train.loss_scale_window, where fp16 is on",
    "fp16.hysteresis" => With(scaling); "train.hysteresis, where fp16 is on",
    "fp16.min_loss_scale" => With(scaling); "train.min_loss_scale, where fp16 is on",
    "fp16.auto_cast" => Always(&[Bool(true), Bool(false)], "the inputs are tokens, there is nothing to cast"),
    "fp16.consecutive_hysteresis" => Unsupported("as by DeepSpeed's default, the hysteresis is reset when the scale is doubled"),
    "fp16.fp16_master_weights_and_grads" => Unsupported("trained parameters are kept in float32"),
    "bf16.enabled" => To("train.bf16"),
    "bf16.check_grad_overflow" => Always(TRUE, "a step whose gradient is not finite is skipped"),
    "bf16.immediate_grad_update" => Always(&[Bool(true), Bool(false)], "gradients are accumulated in place"),
    "bf16.bf16_master_weights_and_grads" => Unsupported("trained parameters are kept in float32"),
    "bf16.bf16_optimizer_states" => Unsupported("states are float32; train.optim: adamw_8bit has smaller ones"),
    "torch_autocast.*" => Unsupported("set bf16 or fp16 instead"),
    "data_types.grad_accum_dtype" => With(grad_dtype); "train.grad_dtype",
    "data_types.param_dtype" => Only(&[Str("fp32")], "model.dtype says how frozen weights are kept; what is trained is float32"),
    "data_types.buffer_dtype" => Only(&[Str("fp32")], "the models have no buffers"),
    "data_types.keep_in_fp32_modules" => Always(OFF, "norms and routers are always float32"),
    "zero_optimization.stage" => With(stage); "train.strategy: 0 becomes ddp, 1 zero1, 2 zero2, 3 zero3",
    "zero_optimization.reduce_bucket_size" => With(bucket); "train.ddp_bucket_cap_mb: numbers become mebibytes of float32",
    "zero_optimization.allgather_bucket_size" => NotNeeded("train.ddp_bucket_cap_mb sets the size of gathered pieces"),
    "zero_optimization.use_multi_rank_bucket_allreduce" => Always(TRUE, "all ranks reduce a piece together"),
    "zero_optimization.contiguous_gradients" => Always(TRUE, "gradients are in one buffer"),
    "zero_optimization.reduce_scatter" => Always(TRUE, "each rank receives only its part"),
    "zero_optimization.allgather_partitions" => Always(TRUE, "updated parameters are gathered"),
    "zero_optimization.overlap_comm" => Always(TRUE, "gradients are reduced during the backward pass"),
    "zero_optimization.compute_grad_norm" => Always(TRUE, "the norm is computed in every step, and shown"),
    "zero_optimization.load_from_fp32_weights" => Always(TRUE, "checkpoints hold float32"),
    "zero_optimization.elastic_checkpoint" => Always(&[Bool(true), Bool(false)], "every checkpoint loads with any number of ranks"),
    "zero_optimization.offload_param.device" => With(offload_param); "cpu becomes train.offload_param: true; nvme is refused",
    "zero_optimization.offload_param.nvme_path" => NotNeeded(DISK),
    "zero_optimization.offload_param.buffer_count" | "zero_optimization.offload_param.buffer_size"
    | "zero_optimization.offload_param.max_in_cpu" | "zero_optimization.offload_param.pin_memory" => NotNeeded(SEGMENTS),
    "zero_optimization.offload_optimizer.device" => With(offload_optimizer); "cpu becomes train.offload_optimizer: true; nvme is refused",
    "zero_optimization.offload_optimizer.nvme_path" => NotNeeded(DISK),
    "zero_optimization.offload_optimizer.buffer_count" | "zero_optimization.offload_optimizer.pin_memory"
    | "zero_optimization.offload_optimizer.pipeline_read" | "zero_optimization.offload_optimizer.pipeline_write"
    | "zero_optimization.offload_optimizer.fast_init" | "zero_optimization.offload_optimizer.ratio"
    | "zero_optimization.offload_optimizer.super_offload" => NotNeeded(PINNED),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc" => NotNeeded("train.num_threads says how many threads a rank has"),
    "zero_optimization.cpu_offload" => To("train.offload_optimizer"),
    "zero_optimization.cpu_offload_param" => To("train.offload_param"),
    "zero_optimization.cpu_offload_use_pin_memory" => NotNeeded(PINNED),
    "zero_optimization.zenflow.*" => Unsupported("updates are whole steps, never a part of the gradients"),
    "zero_optimization.leaf_module.*" => NotNeeded(RANGES),
    "zero_optimization.sub_group_size" => NotNeeded("a rank updates its part at once"),
    "zero_optimization.stage3_prefetch_bucket_size" | "zero_optimization.stage3_param_persistence_threshold"
    | "zero_optimization.stage3_model_persistence_threshold" | "zero_optimization.stage3_max_live_parameters"
    | "zero_optimization.stage3_max_reuse_distance" | "zero_optimization.stage3_module_granularity_threshold"
    | "zero_optimization.stage3_use_all_reduce_for_fetch_params" | "zero_optimization.stage3_allgather_sequential" => NotNeeded(RANGES),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    | "zero_optimization.stage3_gather_fp16_weights_on_model_save" => Always(TRUE, "saved weights are whole"),
    "zero_optimization.ignore_unused_parameters" => Always(TRUE, "gradients of all trained parameters are reduced"),
    "zero_optimization.legacy_stage1" => Unsupported("there is one ZeRO-1"),
    "zero_optimization.round_robin_gradients" => NotNeeded(HOST),
    "zero_optimization.parameter_alignment" => NotNeeded("parameters are stored without gaps"),
    "zero_optimization.zero_hpz_partition_size" => Only(ONE, "for a second, smaller sharding set train.strategy: fsdp and train.fsdp_sharding_strategy: hybrid_shard"),
    "zero_optimization.zero_quantized_weights" | "zero_optimization.zero_quantized_nontrainable_weights"
    | "zero_optimization.zero_quantized_gradients" => Unsupported(QUANTIZED),
    "zero_optimization.memory_efficient_linear" => Always(&[Bool(true), Bool(false)], "linear layers keep no copy of gathered weights"),
    "zero_optimization.pipeline_loading_checkpoint" => NotNeeded("a checkpoint is loaded part by part anyway"),
    "zero_optimization.override_module_apply" => Always(TRUE, "there are no PyTorch modules"),
    "zero_optimization.log_trace_cache_warnings" => NotNeeded("the order of segments is fixed, so nothing is traced"),
    "zero_optimization.enable_sanity_checks" => NotNeeded("train.replica_check_steps compares the values of the ranks"),
    "zero_optimization.save_muon_momentum_buffer_in_memory" => NotNeeded(HOST),
    "zero_optimization.mics_shard_size" => Only(&[Str("-1")], GONE),
    "zero_optimization.mics_hierarchical_params_gather" | "zero_optimization.zeropp_loco_param.*" => Unsupported(GONE),
    "activation_checkpointing.partition_activations" | "activation_checkpointing.cpu_checkpointing"
    | "activation_checkpointing.contiguous_memory_optimization" | "activation_checkpointing.number_checkpoints"
    | "activation_checkpointing.synchronize_checkpoint_boundary" => NotNeeded(CHECKPOINTING),
    "activation_checkpointing.profile" => NotNeeded(TOOLS),
    "tensorboard.enabled" => To("logging.tensorboard"),
    "tensorboard.output_path" => With(tensorboard_text); "logging.logging_dir, where TensorBoard is on",
    "tensorboard.job_name" => With(tensorboard_text); "logging.run_name, where TensorBoard is on",
    "wandb.*" | "comet.*" => Unsupported(OTHER_TRACKER),
    "csv_monitor.*" => Unsupported("metrics.jsonl in train.output_dir has every step"),
    "flops_profiler.*" | "comms_logger.*" | "timers.*" => NotNeeded(TOOLS),
    "autotuning.*" => Unsupported("set train.batch_size: auto and train.gradient_checkpointing: auto, which measure before step 1"),
    "aio.*" => NotNeeded(DISK),
    "compile.*" => NotNeeded("there is nothing to compile"),
    "checkpoint.tag_validation" => NotNeeded("a checkpoint's stamp is always compared"),
    "checkpoint.load_universal" => Always(&[Bool(true), Bool(false)], "every checkpoint loads with any number of ranks"),
    "checkpoint.use_node_local_storage" => NotNeeded("rank 0 alone writes checkpoints, to train.output_dir"),
    "checkpoint.parallel_write.pipeline_stage" => NotNeeded("rank 0 alone writes checkpoints"),
    "checkpoint.checkpoint_serialization" => NotNeeded("checkpoints are safetensors"),
    "checkpoint.writer.*" => NotNeeded("train.save_async writes while training goes on"),
    "data_efficiency.*" => Unsupported("rows are drawn evenly; see data.datasets for a mix by weight"),
    "tensor_parallel.*" | "expert_parallel.*" | "pipeline.*" => Unsupported(PARALLEL),
    "hybrid_engine.*" => Unsupported("`tunesmith infer` and `eval` generate answers, outside of training"),
    "weight_quantization.*" => Unsupported("set model.quantization"),
    "datastates_ckpt.*" => Unsupported("train.save_async writes while training goes on; remove the section"),
    "nebula.*" | "compression_training.*" => Unsupported(GONE),
    "amp.*" => Unsupported("set bf16 or fp16 instead; DeepSpeed itself has removed it"),
    "quantize_training" | "sparse_gradients" | "eigenvalue.*" | "sparse_attention.*" | "elasticity.*"
    | "graph_harvesting" | "curriculum_learning.*" | "progressive_layer_drop.*" => Unsupported(GONE),
};

/// ZeRO's stage. DeepSpeed's older `true` stood for 1.
fn stage(reader: &mut Reader, value: &Value) -> Result<()> {
    if value.is_auto() {
        return reader.auto(value, "train.strategy");
    }
    let strategy = match value.count(0)? {
        0 => "ddp",
        1 => "zero1",
        2 => "zero2",
        3 => "zero3",
        _ => return Err(value.expected("0, 1, 2 or 3")),
    };
    reader.put(value, "train.strategy", Node::Str(strategy.to_owned()), "")
}

/// Numbers at a time, as mebibytes of float32.
fn bucket(reader: &mut Reader, value: &Value) -> Result<()> {
    let ours = "train.ddp_bucket_cap_mb";
    if value.is_auto() {
        return reader.auto(value, ours);
    }
    let mebibytes = value.count(1)?.div_ceil(1 << 18).min(65_536);
    reader.put_if_unset(value, ours, Node::Int(i128::from(mebibytes)), "mebibytes of float32")
}

/// A key of the loss scale, which counts only with fp16.
fn scaling(reader: &mut Reader, value: &Value) -> Result<()> {
    let ours = value.key.replacen("fp16.", "train.", 1);
    if value.is_auto() {
        return reader.auto(value, &ours);
    }
    reader.put_if_on(value, &ours, "train.fp16")
}

/// What TensorBoard's section says beside its switch; DeepSpeed's empty path stands for its own default.
fn tensorboard_text(reader: &mut Reader, value: &Value) -> Result<()> {
    let ours = if value.key.ends_with("job_name") { "logging.run_name" } else { "logging.logging_dir" };
    match &value.node {
        Node::Str(text) if text.is_empty() || text == "auto" => reader.auto(value, ours),
        _ => reader.put_if_on(value, ours, "logging.tensorboard"),
    }
}

pub(super) fn offload_param(reader: &mut Reader, value: &Value) -> Result<()> {
    offload(reader, value, |reader| reader.put(value, "train.offload_param", Node::Bool(true), FROZEN))
}

pub(super) fn offload_optimizer(reader: &mut Reader, value: &Value) -> Result<()> {
    offload(reader, value, |reader| reader.put(value, "train.offload_optimizer", Node::Bool(true), ""))
}

/// Where a state lies that DeepSpeed would keep off the GPU. `cpu`: what that word does.
fn offload(reader: &mut Reader, value: &Value, cpu: impl FnOnce(&mut Reader) -> Result<()>) -> Result<()> {
    match value.word()?.as_str() {
        "none" => reader.same(value, "already so"),
        "cpu" => cpu(reader),
        "nvme" => Err(value.refused(DISK)),
        _ => Err(value.expected("none, cpu or nvme")),
    }
}

fn grad_dtype(reader: &mut Reader, value: &Value) -> Result<()> {
    let ours = "train.grad_dtype";
    if value.is_auto() {
        return reader.auto(value, ours);
    }
    let word = match value.word()?.as_str() {
        "fp32" | "float32" => "float32",
        "bf16" | "bfloat16" => "bfloat16",
        _ => return Err(value.expected("fp32 or bf16: sums of gradients are kept in no other type")),
    };
    reader.put(value, ours, Node::Str(word.to_owned()), "")
}

/// What is read together: sizes, the optimizer and the schedule.
pub(super) fn finish(reader: &mut Reader) -> Result<()> {
    sizes(reader)?;
    optimizer::optimizer(reader)?;
    optimizer::scheduler(reader)
}

/// DeepSpeed's rule: of rows in all, of a micro-batch, and micro-batches, what is missing follows from the others.
fn sizes(reader: &mut Reader) -> Result<()> {
    let given = |key: &str| reader.get(key);
    let (total, micro, accum) =
        (given("train_batch_size"), given("train_micro_batch_size_per_gpu"), given("gradient_accumulation_steps"));
    let Some(total) = total else { return Ok(()) };
    if total.is_auto() {
        return reader.auto(&total, "train.effective_batch");
    }
    let rows = total.count(1)? as usize;
    reader.claims.rows = Some((rows, total.source.clone()));
    reader.checked(&total, "rows of a step: checked against batch_size x grad_accum x ranks when the ranks are known");
    let auto = || Node::Str("auto".to_owned());
    match (micro, accum) {
        (Some(_), None) => {
            reader.claims.derives = true;
            reader.put_if_unset(&total, "train.grad_accum", auto(), "computed from train_batch_size")
        }
        (None, Some(_)) => {
            reader.claims.derives = true;
            reader.put_if_unset(&total, "train.batch_size", auto(), "computed from train_batch_size")
        }
        (None, None) => {
            reader.claims.derives = true;
            reader.put_if_unset(&total, "train.grad_accum", Node::Int(1), "DeepSpeed's default")?;
            reader.put_if_unset(&total, "train.batch_size", auto(), "computed from train_batch_size")
        }
        (Some(_), Some(_)) => Ok(()),
    }
}
