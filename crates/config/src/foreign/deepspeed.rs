//! DeepSpeed's keys, one line each, and what becomes of them; as DeepSpeed 0.19 has them, with older ones that it names to
//! refuse them. Optimizer and schedule are read in `optimizer`.
use super::Act::{Always, To, Together, Unless, Warned, With};
use super::optimizer;
use super::walk::{Reader, Value};
use super::{Row, row, section};
use crate::option::Scalar::{self, Bool, Str};
use crate::value::Node;
use tunesmith_base::error::Result;

const TRUE: &[Scalar] = &[Bool(true)];
const OFF: &[Scalar] = &[];
const ONE: &[Scalar] = &[Str("1")];
const HOST: &str = "on the CPU everything lies in main memory";
const DISK: &str = "nothing is offloaded to a disk in this version";
const QUANTIZED: &str =
    "values travel between ranks as they are; model.quantization shrinks frozen weights, which travel as codes";
const CHECKPOINTING: &str =
    "train.gradient_checkpointing says which blocks are run again, and their inputs stay where they are";
const TOOLS: &str = "`tunesmith bench` shows where the time goes, metrics.jsonl what a run did";
const PARALLEL: &str = "models are not split within a layer or by layers; ranks share them as train.strategy says";
const RANGES: &str = "segments are gathered whole, the next one while the last is at work, and freed after use";
const GONE: &str = "DeepSpeed itself has removed it; remove the key";
const OTHER_TRACKER: &str = "only TensorBoard is part of this version: the section tensorboard, or logging.tensorboard";
const SUMS: &str = "sums are made in float32, from rank 0 on, and need no help";

/// Every key.
pub(super) const ROWS: &[Row] = &[
    row(
        "train_batch_size",
        Together(
            "rows of an optimizer step on all ranks: checked at the start against train.batch_size x train.grad_accum x ranks; where one of the two is not given, it is made up from this, as DeepSpeed does",
        ),
    ),
    row("train_micro_batch_size_per_gpu", To("train.batch_size")),
    row("gradient_accumulation_steps", To("train.grad_accum")),
    row("gradient_clipping", To("train.max_grad_norm")),
    row("managed_gradient_accumulation", Always(TRUE, "steps are accumulated here, nobody else does it")),
    row("steps_per_print", Warned("train.logging_steps says how often a line is shown")),
    row("dump_state", Warned("`tunesmith config` shows every setting")),
    row("wall_clock_breakdown", Warned(TOOLS)),
    row("memory_breakdown", Warned("`tunesmith memory-check` and `plan` show it")),
    row("log_level", Warned("there is one level of messages")),
    row("disable_python_gc", Warned("there is no Python")),
    row("disable_allgather", Warned("DeepSpeed reads it no more")),
    row("dataloader_drop_last", Unless(OFF, "the last, shorter step of an epoch is always trained")),
    row("communication_data_type", Always(&[Str("fp32")], "gradients travel in float32")),
    row("seq_parallel_communication_data_type", Always(&[Str("fp32")], PARALLEL)),
    row("sequence_parallel_size", Unless(ONE, PARALLEL)),
    row("use_data_before_expert_parallelism", Unless(OFF, PARALLEL)),
    row("prescale_gradients", Warned(SUMS)),
    row("gradient_predivide_factor", Always(&[Str("1")], SUMS)),
    row(
        "gradient_allreduce_op",
        Unless(&[Str("mean")], "the loss is divided by the label tokens of all ranks, so that gradients are a mean"),
    ),
    row(
        "zero_allow_untested_optimizer",
        Always(&[Bool(true), Bool(false)], "each optimizer here works with each strategy, or is refused"),
    ),
    row("zero_force_ds_cpu_optimizer", Always(&[Bool(true), Bool(false)], "the optimizers are our own")),
    row(
        "optimizer.type",
        Together("train.optim: Adam and AdamW become adamw_torch, Lion lion, SGD sgd; others are refused"),
    ),
    row("optimizer.legacy_fusion", Warned("the optimizers are fused anyway")),
    row("optimizer.params.lr", To("train.learning_rate")),
    row("optimizer.params.betas", With(optimizer::betas, "train.adam_beta1 and train.adam_beta2")),
    row("optimizer.params.eps", To("train.adam_epsilon")),
    row("optimizer.params.weight_decay", To("train.weight_decay")),
    row("optimizer.params.momentum", With(optimizer::argument, "train.optim_args")),
    row("optimizer.params.dampening", With(optimizer::argument, "train.optim_args")),
    row("optimizer.params.nesterov", With(optimizer::argument, "train.optim_args")),
    row("optimizer.params.bias_correction", Unless(TRUE, "AdamW corrects its moments")),
    row("optimizer.params.amsgrad", Unless(OFF, "this variant of Adam is not part of this version")),
    row(
        "optimizer.params.adam_w_mode",
        Unless(TRUE, "weight decay is decoupled, as DeepSpeed's own default; remove the key, or set weight_decay: 0"),
    ),
    row(
        "optimizer.params.adamw_mode",
        Unless(TRUE, "weight decay is decoupled, as DeepSpeed's own default; remove the key, or set weight_decay: 0"),
    ),
    row("optimizer.params.torch_adam", Always(&[Bool(true), Bool(false)], "one AdamW, equal to PyTorch's")),
    row(
        "optimizer.params.fp32_optimizer_states",
        Always(TRUE, "states are float32; train.optim: adamw_8bit has smaller ones"),
    ),
    row("optimizer.params.set_grad_none", Always(&[Bool(true), Bool(false)], "gradients lie in one buffer")),
    row(
        "optimizer.params.max_grad_norm",
        Unless(&[Str("0")], "DeepSpeed does not take it here either; set gradient_clipping"),
    ),
    row(
        "scheduler.type",
        Together(
            "train.lr_scheduler_type: WarmupLR becomes constant_with_warmup, WarmupDecayLR linear, WarmupCosineLR cosine_with_min_lr; others are refused",
        ),
    ),
    row("scheduler.params.warmup_num_steps", To("train.warmup_steps")),
    row("scheduler.params.warmup_max_lr", To("train.learning_rate")),
    row(
        "scheduler.params.warmup_min_lr",
        Unless(&[Str("0")], "the rate rises from 0; see cosine_warmup_with_min_lr of train.lr_scheduler_type"),
    ),
    row(
        "scheduler.params.warmup_min_ratio",
        Unless(&[Str("0")], "the rate rises from 0; see cosine_warmup_with_min_lr of train.lr_scheduler_type"),
    ),
    row("scheduler.params.warmup_type", Always(&[Str("linear")], "the rate rises on a line")),
    row(
        "scheduler.params.total_num_steps",
        With(optimizer::total_steps, "train.max_steps: a schedule is as long as its run"),
    ),
    row("scheduler.params.cos_min_ratio", Together("train.lr_scheduler_kwargs: min_lr_rate")),
    row(
        "scheduler.params.last_batch_iteration",
        Unless(&[Str("-1")], "a checkpoint knows its step; resume with --resume"),
    ),
    row("scheduler.params.cycle_min_lr", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.cycle_max_lr", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.cycle_first_step_size", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.cycle_second_step_size", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.cycle_first_stair_count", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.cycle_second_stair_count", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.cycle_momentum", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.cycle_min_mom", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.cycle_max_mom", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.decay_step_size", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.decay_lr_rate", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.decay_mom_rate", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.lr_range_test_min_lr", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.lr_range_test_step_size", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.lr_range_test_step_rate", Unless(OFF, optimizer::CYCLES)),
    row("scheduler.params.lr_range_test_staircase", Unless(OFF, optimizer::CYCLES)),
    row("fp16.enabled", To("train.fp16")),
    row("fp16.loss_scale", With(scaling, "train.loss_scale, where fp16 is on")),
    row("fp16.initial_scale_power", With(scaling, "train.initial_scale_power, where fp16 is on")),
    row("fp16.loss_scale_window", With(scaling, "train.loss_scale_window, where fp16 is on")),
    row("fp16.hysteresis", With(scaling, "train.hysteresis, where fp16 is on")),
    row("fp16.min_loss_scale", With(scaling, "train.min_loss_scale, where fp16 is on")),
    row("fp16.auto_cast", Always(&[Bool(true), Bool(false)], "the inputs are tokens, there is nothing to cast")),
    row(
        "fp16.consecutive_hysteresis",
        Unless(OFF, "the hysteresis is refilled when the scale is doubled, as DeepSpeed's default"),
    ),
    row("fp16.fp16_master_weights_and_grads", Unless(OFF, "trained values are kept in float32")),
    row("bf16.enabled", To("train.bf16")),
    row("bf16.check_grad_overflow", Always(TRUE, "a step whose gradient is not finite is skipped")),
    row("bf16.immediate_grad_update", Always(&[Bool(true), Bool(false)], "gradients are added where they lie")),
    row("bf16.bf16_master_weights_and_grads", Unless(OFF, "trained values are kept in float32")),
    row("bf16.bf16_optimizer_states", Unless(OFF, "states are float32; train.optim: adamw_8bit has smaller ones")),
    section("torch_autocast", Unless(OFF, "set bf16 or fp16 instead")),
    row("data_types.grad_accum_dtype", With(grad_dtype, "train.grad_dtype")),
    row(
        "data_types.param_dtype",
        Unless(&[Str("fp32")], "model.dtype says how frozen weights are kept; what is trained is float32"),
    ),
    row("data_types.buffer_dtype", Unless(&[Str("fp32")], "the models have no buffers")),
    row("data_types.keep_in_fp32_modules", Always(OFF, "norms and routers are always float32")),
    row("zero_optimization.stage", With(stage, "train.strategy: 0 becomes ddp, 1 zero1, 2 zero2, 3 zero3")),
    row(
        "zero_optimization.reduce_bucket_size",
        With(bucket, "train.ddp_bucket_cap_mb: numbers become mebibytes of float32"),
    ),
    row(
        "zero_optimization.allgather_bucket_size",
        Warned("what is gathered goes in the pieces of train.ddp_bucket_cap_mb"),
    ),
    row("zero_optimization.use_multi_rank_bucket_allreduce", Always(TRUE, "a piece is reduced by all ranks at once")),
    row("zero_optimization.contiguous_gradients", Always(TRUE, "gradients lie in one buffer")),
    row("zero_optimization.reduce_scatter", Always(TRUE, "each rank receives its part only")),
    row("zero_optimization.allgather_partitions", Always(TRUE, "updated values are gathered")),
    row("zero_optimization.overlap_comm", Always(TRUE, "gradients travel while the backward pass goes on")),
    row("zero_optimization.compute_grad_norm", Always(TRUE, "the norm is computed in every step, and shown")),
    row("zero_optimization.load_from_fp32_weights", Always(TRUE, "checkpoints hold float32")),
    row(
        "zero_optimization.elastic_checkpoint",
        Always(&[Bool(true), Bool(false)], "every checkpoint loads with any number of ranks"),
    ),
    row(
        "zero_optimization.offload_param.device",
        With(offload, "nothing on the CPU, where it lies in main memory anyway; nvme is refused"),
    ),
    row("zero_optimization.offload_param.nvme_path", Warned(DISK)),
    row("zero_optimization.offload_param.buffer_count", Warned(HOST)),
    row("zero_optimization.offload_param.buffer_size", Warned(HOST)),
    row("zero_optimization.offload_param.max_in_cpu", Warned(HOST)),
    row("zero_optimization.offload_param.pin_memory", Warned(HOST)),
    row(
        "zero_optimization.offload_optimizer.device",
        With(offload, "nothing on the CPU, where it lies in main memory anyway; nvme is refused"),
    ),
    row("zero_optimization.offload_optimizer.nvme_path", Warned(DISK)),
    row("zero_optimization.offload_optimizer.buffer_count", Warned(HOST)),
    row("zero_optimization.offload_optimizer.pin_memory", Warned(HOST)),
    row("zero_optimization.offload_optimizer.pipeline_read", Warned(HOST)),
    row("zero_optimization.offload_optimizer.pipeline_write", Warned(HOST)),
    row("zero_optimization.offload_optimizer.fast_init", Warned(HOST)),
    row("zero_optimization.offload_optimizer.ratio", Warned(HOST)),
    row("zero_optimization.offload_optimizer.super_offload", Warned(HOST)),
    row(
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        Warned("train.num_threads says how many threads a rank has"),
    ),
    row("zero_optimization.cpu_offload", Warned(HOST)),
    row("zero_optimization.cpu_offload_param", Warned(HOST)),
    row("zero_optimization.cpu_offload_use_pin_memory", Warned(HOST)),
    section("zero_optimization.zenflow", Unless(OFF, "updates are whole steps, never a part of the gradients")),
    section("zero_optimization.leaf_module", Warned(RANGES)),
    row("zero_optimization.sub_group_size", Warned("the optimizer takes a rank's part at a time")),
    row("zero_optimization.stage3_prefetch_bucket_size", Warned(RANGES)),
    row("zero_optimization.stage3_param_persistence_threshold", Warned(RANGES)),
    row("zero_optimization.stage3_model_persistence_threshold", Warned(RANGES)),
    row("zero_optimization.stage3_max_live_parameters", Warned(RANGES)),
    row("zero_optimization.stage3_max_reuse_distance", Warned(RANGES)),
    row("zero_optimization.stage3_module_granularity_threshold", Warned(RANGES)),
    row("zero_optimization.stage3_use_all_reduce_for_fetch_params", Warned(RANGES)),
    row("zero_optimization.stage3_allgather_sequential", Warned(RANGES)),
    row("zero_optimization.stage3_gather_16bit_weights_on_model_save", Always(TRUE, "what is saved is whole")),
    row("zero_optimization.stage3_gather_fp16_weights_on_model_save", Always(TRUE, "what is saved is whole")),
    row("zero_optimization.ignore_unused_parameters", Always(TRUE, "every trained value takes part in each reduction")),
    row("zero_optimization.legacy_stage1", Unless(OFF, "there is one ZeRO-1")),
    row("zero_optimization.round_robin_gradients", Warned(HOST)),
    row("zero_optimization.parameter_alignment", Warned("values lie one behind the other")),
    row(
        "zero_optimization.zero_hpz_partition_size",
        Unless(
            ONE,
            "a second, smaller sharding is train.strategy: fsdp with train.fsdp_sharding_strategy: hybrid_shard",
        ),
    ),
    row("zero_optimization.zero_quantized_weights", Unless(OFF, QUANTIZED)),
    row("zero_optimization.zero_quantized_nontrainable_weights", Unless(OFF, QUANTIZED)),
    row("zero_optimization.zero_quantized_gradients", Unless(OFF, QUANTIZED)),
    row(
        "zero_optimization.memory_efficient_linear",
        Always(&[Bool(true), Bool(false)], "linear layers keep no copy of gathered weights"),
    ),
    row("zero_optimization.pipeline_loading_checkpoint", Warned("a checkpoint is loaded part by part anyway")),
    row("zero_optimization.override_module_apply", Always(TRUE, "there are no modules of PyTorch")),
    row("zero_optimization.log_trace_cache_warnings", Warned("the order of segments is known, nothing is traced")),
    row("zero_optimization.enable_sanity_checks", Warned("train.replica_check_steps compares what ranks hold")),
    row("zero_optimization.save_muon_momentum_buffer_in_memory", Warned(HOST)),
    row("zero_optimization.mics_shard_size", Unless(&[Str("-1")], GONE)),
    row("zero_optimization.mics_hierarchical_params_gather", Unless(OFF, GONE)),
    section("zero_optimization.zeropp_loco_param", Unless(OFF, GONE)),
    row("activation_checkpointing.partition_activations", Warned(CHECKPOINTING)),
    row("activation_checkpointing.cpu_checkpointing", Warned(CHECKPOINTING)),
    row("activation_checkpointing.contiguous_memory_optimization", Warned(CHECKPOINTING)),
    row("activation_checkpointing.number_checkpoints", Warned(CHECKPOINTING)),
    row("activation_checkpointing.synchronize_checkpoint_boundary", Warned(CHECKPOINTING)),
    row("activation_checkpointing.profile", Warned(TOOLS)),
    row("tensorboard.enabled", To("logging.tensorboard")),
    row("tensorboard.output_path", With(tensorboard_text, "logging.logging_dir, where TensorBoard is on")),
    row("tensorboard.job_name", With(tensorboard_text, "logging.run_name, where TensorBoard is on")),
    section("wandb", Unless(OFF, OTHER_TRACKER)),
    section("comet", Unless(OFF, OTHER_TRACKER)),
    section("csv_monitor", Unless(OFF, "metrics.jsonl in train.output_dir has every step")),
    section("flops_profiler", Warned(TOOLS)),
    section("comms_logger", Warned(TOOLS)),
    section("timers", Warned(TOOLS)),
    section(
        "autotuning",
        Unless(OFF, "set train.batch_size: auto and train.gradient_checkpointing: auto, which measure before step 1"),
    ),
    section("aio", Warned(DISK)),
    section("compile", Warned("there is nothing to compile")),
    row("checkpoint.tag_validation", Warned("a checkpoint's stamp is always compared")),
    row(
        "checkpoint.load_universal",
        Always(&[Bool(true), Bool(false)], "every checkpoint loads with any number of ranks"),
    ),
    row("checkpoint.use_node_local_storage", Warned("rank 0 alone writes checkpoints, to train.output_dir")),
    row("checkpoint.parallel_write.pipeline_stage", Warned("rank 0 alone writes checkpoints")),
    row("checkpoint.checkpoint_serialization", Warned("checkpoints are safetensors")),
    section("checkpoint.writer", Warned("train.save_async writes beside the steps")),
    section("data_efficiency", Unless(OFF, "rows are drawn evenly; see data.datasets for a mix by weight")),
    section("tensor_parallel", Unless(OFF, PARALLEL)),
    section("expert_parallel", Unless(OFF, PARALLEL)),
    section("pipeline", Unless(OFF, PARALLEL)),
    section("hybrid_engine", Unless(OFF, "answers are made by `tunesmith infer` and `eval`, outside of training")),
    section("weight_quantization", Unless(OFF, "set model.quantization")),
    section("datastates_ckpt", Unless(OFF, "train.save_async writes beside the steps; remove the section")),
    section("nebula", Unless(OFF, GONE)),
    section("compression_training", Unless(OFF, GONE)),
    section("amp", Unless(OFF, "set bf16 or fp16 instead; DeepSpeed itself has removed it")),
    row("quantize_training", Unless(OFF, GONE)),
    row("sparse_gradients", Unless(OFF, GONE)),
    section("eigenvalue", Unless(OFF, GONE)),
    section("sparse_attention", Unless(OFF, GONE)),
    section("elasticity", Unless(OFF, GONE)),
    row("graph_harvesting", Unless(OFF, GONE)),
    section("curriculum_learning", Unless(OFF, GONE)),
    section("progressive_layer_drop", Unless(OFF, GONE)),
];

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
    let mebibytes = (value.count(1)? * 4).div_ceil(1 << 20).min(65_536);
    reader.imply(value, ours, Node::Int(i128::from(mebibytes)), "mebibytes of float32")
}

/// A key of the loss scale, which counts only with fp16.
fn scaling(reader: &mut Reader, value: &Value) -> Result<()> {
    let ours = value.key.replacen("fp16.", "train.", 1);
    if value.is_auto() {
        return reader.auto(value, &ours);
    }
    reader.put_with(value, &ours, "train.fp16")
}

/// What TensorBoard's section says beside its switch; DeepSpeed's empty path stands for its own default.
fn tensorboard_text(reader: &mut Reader, value: &Value) -> Result<()> {
    let ours = if value.key.ends_with("job_name") { "logging.run_name" } else { "logging.logging_dir" };
    match &value.node {
        Node::Str(text) if text.is_empty() || text == "auto" => reader.auto(value, ours),
        _ => reader.put_with(value, ours, "logging.tensorboard"),
    }
}

/// Where a state lies that DeepSpeed would keep off the GPU.
fn offload(reader: &mut Reader, value: &Value) -> Result<()> {
    match value.word()?.as_str() {
        "none" => reader.same(value, "already so"),
        "cpu" => reader.same(value, HOST),
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
    reader.expected.rows = Some((rows, total.source.clone()));
    reader
        .checked(&total, "rows of a step: checked against batch_size x grad_accum x ranks when the ranks are known")?;
    let auto = || Node::Str("auto".to_owned());
    match (micro, accum) {
        (Some(_), None) => {
            reader.expected.derives = true;
            reader.imply(&total, "train.grad_accum", auto(), "made up from train_batch_size")
        }
        (None, Some(_)) => {
            reader.expected.derives = true;
            reader.imply(&total, "train.batch_size", auto(), "made up from train_batch_size")
        }
        (None, None) => {
            reader.expected.derives = true;
            reader.imply(&total, "train.grad_accum", Node::Int(1), "DeepSpeed's default")?;
            reader.imply(&total, "train.batch_size", auto(), "made up from train_batch_size")
        }
        (Some(_), Some(_)) => Ok(()),
    }
}
