//! Keys of Transformers' `TrainingArguments` (5.23, and what 4.57 has beside them), TRL's `SFTConfig` and SFT-Play that are not settings
//! of ours. They stand in our own configuration, under `train`, and those of [`ELSEWHERE`] also in the section where they belong.
use super::Act::{To, Unless, Warned, With};
use super::walk::{Reader, Value};
use super::{Row, row, section};
use crate::option::Scalar::{self, Bool, Null, Str};
use crate::suggest::nearest;
use crate::value::Node;
use tunesmith_base::error::Result;

const OFF: &[Scalar] = &[];
const LOADER: &str = "there is no data loader: rows are tokenized before training and read from a file";
const COMPILER: &str = "nothing is compiled while it runs";
const ONE_WAY: &str = "there is one way to run a block again";
const UPLOAD: &str = "`tunesmith export --push OWNER/NAME` uploads what a run has made";
const TRACKIO: &str = "Trackio is not part of this version, and nothing is sent to it";
const RANK_0: &str = "rank 0 alone writes and reports";
const UNUSED: &str = "every trained value takes part in each reduction, used or not";
const PRECISION: &str = "train.bf16 and train.fp16 say what activations are kept in, model.dtype how weights are";
const DEVICE: &str = "this version computes on the CPU";
const METRICS: &str = "eval.metrics says what is measured, and measures are summed row by row";
const EVERY_STEP: &str = "metrics.jsonl has every step, and train.logging_steps says how often a line is shown";
const NO_PADDING: &str = "rows are never padded";
const ATTENTION: &str = "there is one attention, which keeps no matrix of scores";
const PARALLEL: &str = "ranks share a model as train.strategy says; it is not split within a layer";

/// Keys that may also stand in these sections.
const ELSEWHERE: &[(&str, &[&str])] = &[
    (
        "data",
        &[
            "dataloader_drop_last",
            "dataloader_num_workers",
            "dataloader_persistent_workers",
            "dataloader_pin_memory",
            "dataloader_prefetch_factor",
            "dataset_batch_size",
            "dataset_kwargs",
            "dataset_text_field",
            "pad_to_multiple_of",
            "packing_strategy",
            "padding_free",
            "eval_packing",
            "remove_unused_columns",
            "assistant_only_loss",
            "completion_only_loss",
            "truncation_mode",
        ],
    ),
    ("logging", &["report_to", "logging_strategy", "logging_first_step", "log_level", "disable_tqdm", "backend"]),
    (
        "model",
        &[
            "attn_implementation",
            "device_map",
            "low_cpu_mem_usage",
            "trust_remote_code",
            "use_cache",
            "use_liger_kernel",
        ],
    ),
];

/// Keys with a place of their own, which is not `train`.
const PLACED: &[&str] = &["backend", "device_map", "low_cpu_mem_usage"];

/// Every key; one with a dot is accepted as it stands alone.
pub(super) const ROWS: &[Row] = &[
    row("accelerator_config", With(accelerator, "split_batches: true is refused; the other keys are not needed")),
    row("activation_checkpointing_kwargs", With(every_block, ONE_WAY)),
    row(
        "activation_offloading",
        Unless(OFF, "activations lie in main memory already; there is nothing to move them from"),
    ),
    row("adafactor", With(adafactor, "true becomes train.optim: adafactor")),
    row(
        "assistant_only_loss",
        With(assistant_only, "true becomes data.loss_on: assistant; false leaves it to data.loss_on"),
    ),
    row(
        "auto_find_batch_size",
        Unless(OFF, "set train.batch_size: auto, which measures before step 1 and loses no step"),
    ),
    row(
        "average_tokens_across_devices",
        Unless(&[Bool(true)], "the loss is always divided by the label tokens of all ranks"),
    ),
    row("batch_eval_metrics", Warned(METRICS)),
    row("bf16_full_eval", Warned("a validation computes as training does")),
    row("chars_per_token", Warned("lengths are counted in tokens")),
    row(
        "completion_only_loss",
        With(completion_only, "true becomes data.loss_on: completion, false data.loss_on: all"),
    ),
    row("dataloader_drop_last", Unless(OFF, "the last, smaller step of an epoch is always trained; remove the key")),
    row("dataloader_in_order", Warned(LOADER)),
    row("dataloader_multiprocessing_context", Warned(LOADER)),
    row("dataloader_num_workers", Warned(LOADER)),
    row("dataloader_persistent_workers", Warned(LOADER)),
    row("dataloader_pin_memory", Warned(LOADER)),
    row("dataloader_prefetch_factor", Warned(LOADER)),
    row("dataset_batch_size", Warned("rows are tokenized one by one, on data.num_proc threads")),
    section(
        "dataset_kwargs",
        Unless(OFF, "rows are always rendered by the chat template and tokenized; see data.format"),
    ),
    row("dataset_text_field", Unless(&[Str("text")], "a row of raw text has the field `text`; rename the field")),
    row("ddp_broadcast_buffers", Warned("the models have no buffers that training changes")),
    row("ddp_find_unused_parameters", Warned(UNUSED)),
    row("ddp_static_graph", Warned(UNUSED)),
    row("debug", Warned("a step that is not finite is skipped and named, and train.max_nonfinite_steps ends the run")),
    row("device_map", Warned(DEVICE)),
    row("disable_tqdm", Warned("a progress bar is shown on a terminal only")),
    row("do_eval", Warned("train.eval_strategy says when a run validates; `tunesmith eval` measures a model")),
    row("do_predict", Warned("`tunesmith eval` and `infer` answer rows")),
    row("do_train", Warned("`tunesmith train` trains")),
    row("enable_jit_checkpoint", Warned("SIGTERM always saves a checkpoint before the run ends")),
    row("eos_token", Unless(OFF, "the tokenizer's files and the chat template name the token that ends a turn")),
    row("eval_delay", Unless(&[Str("0")], "a delayed first validation is not part of this version; remove the key")),
    row("eval_do_concat_batches", Warned(METRICS)),
    row("eval_packing", Warned("each validation row is measured by itself, with the same loss")),
    row("eval_use_gather_object", Warned(METRICS)),
    row("fp16_backend", Warned(PRECISION)),
    row("fp16_full_eval", Warned("a validation computes as training does")),
    row("fp16_opt_level", Warned(PRECISION)),
    row("fsdp_min_num_params", Warned("weights are gathered block by block")),
    row("fsdp_transformer_layer_cls_to_wrap", Warned("weights are gathered block by block")),
    row("full_determinism", Warned("two runs with the same seed and ranks give the same bits")),
    section("generation_config", Unless(OFF, "set the section gen")),
    row("generation_max_length", Unless(OFF, "set train.generation_max_new_tokens, the tokens of the answer alone")),
    row("gradient_checkpointing_kwargs", With(every_block, ONE_WAY)),
    row("half_precision_backend", Warned(PRECISION)),
    row("hub_always_push", Warned(UPLOAD)),
    row("hub_model_id", Warned(UPLOAD)),
    row("hub_private_repo", Warned(UPLOAD)),
    row("hub_revision", Warned(UPLOAD)),
    row("hub_strategy", Warned(UPLOAD)),
    row("hub_token", Unless(OFF, "a secret does not belong into a file; set the environment variable HF_TOKEN")),
    row("ignore_data_skip", Unless(OFF, "a resumed run always goes on with the rows that are next; remove the key")),
    row("include_for_metrics", Warned(METRICS)),
    row("include_inputs_for_metrics", Warned(METRICS)),
    row("include_num_input_tokens_seen", Warned("metrics.jsonl has the tokens of every step")),
    row("include_tokens_per_second", Warned("metrics.jsonl and the progress bar have the tokens per second")),
    row("jit_mode_eval", Warned(COMPILER)),
    row("label_names", Warned("data.loss_on says which tokens are learned")),
    row("length_column_name", Warned("lengths are counted while rows are tokenized")),
    section("liger_kernel_config", Warned("the kernels are fused anyway")),
    row("local_rank", Warned("the launcher says which rank a process is")),
    row("log_level", Warned("there is one level of messages")),
    row("log_level_replica", Warned(RANK_0)),
    row("log_on_each_node", Warned(RANK_0)),
    row("logging_first_step", Warned(EVERY_STEP)),
    row("logging_nan_inf_filter", Warned("a loss that is not finite is shown as such, and its step skipped")),
    row("logging_strategy", Warned(EVERY_STEP)),
    row("loss_type", Unless(&[Str("nll"), Str("chunked_nll")], "the loss is the cross entropy of the labels (`nll`)")),
    row("low_cpu_mem_usage", Warned("weights are read segment by segment")),
    section(
        "model_init_kwargs",
        With(init, "dtype and revision become model.dtype and model.revision; what has no meaning here is not needed"),
    ),
    row("mp_parameters", Warned(PARALLEL)),
    row("no_cuda", Warned(DEVICE)),
    row("num_of_sequences", Warned("packed rows are as long as model.max_seq_len")),
    row("optim_target_modules", Unless(OFF, "GaLore and APOLLO are not part of this version")),
    row("overwrite_output_dir", Warned("`train --overwrite` starts over in a folder that holds a run")),
    row(
        "packing_strategy",
        Unless(&[Str("bfd")], "whole rows are packed; to cut raw texts set data.truncation: split"),
    ),
    row("pad_to_multiple_of", Warned(NO_PADDING)),
    row("pad_token", Warned(NO_PADDING)),
    row("padding_free", Warned(NO_PADDING)),
    section("parallelism_config", Unless(OFF, PARALLEL)),
    row("past_index", Unless(&[Str("-1")], "the models that use it are not supported")),
    row("prediction_loss_only", Warned("train.predict_with_generate says whether a validation answers rows")),
    row("project", Warned(TRACKIO)),
    row("push_to_hub", Unless(OFF, UPLOAD)),
    row("push_to_hub_model_id", Warned(UPLOAD)),
    row("push_to_hub_organization", Warned(UPLOAD)),
    row(
        "push_to_hub_token",
        Unless(OFF, "a secret does not belong into a file; set the environment variable HF_TOKEN"),
    ),
    row("ray_scope", Warned("`tunesmith` does not search for settings")),
    row("remove_unused_columns", Warned("fields that the form of a row does not have are not read")),
    row("report_to", With(report_to, "tensorboard, all and none become logging.tensorboard; others are refused")),
    row("restore_callback_states_from_checkpoint", Warned("a resumed run restores all of its state")),
    row("router_aux_loss_coef", Unless(OFF, "the model's config.json says it: router_aux_loss_coef")),
    row("save_on_each_node", Warned(RANK_0)),
    row(
        "save_only_model",
        Warned("a checkpoint always has what a resume needs; the final model or adapter stands beside them"),
    ),
    row("save_safetensors", Unless(&[Bool(true)], "weights are always written as safetensors; remove the key")),
    row("shuffle_dataset", Warned("data.shuffle draws a new order in each epoch")),
    row("skip_memory_metrics", Warned("metrics.jsonl has the memory of every step")),
    row("sortish_sampler", Unless(OFF, "set train.group_by_length: true")),
    row("tf32", Warned("products are computed in float32")),
    row("torch_compile", Warned(COMPILER)),
    row("torch_compile_backend", Warned(COMPILER)),
    row("torch_compile_mode", Warned(COMPILER)),
    row("torch_empty_cache_steps", Warned("memory is given back as soon as it is free")),
    row("torchdynamo", Warned(COMPILER)),
    row("tpu_metrics_debug", Warned("there are no TPUs")),
    row("tpu_num_cores", Warned("there are no TPUs")),
    row("trackio_bucket_id", Warned(TRACKIO)),
    row("trackio_space_id", Warned(TRACKIO)),
    row("trackio_static_space_id", Warned(TRACKIO)),
    row(
        "train_sampling_strategy",
        With(sampling, "sequential becomes data.shuffle: false, group_by_length train.group_by_length: true"),
    ),
    row("truncation_mode", With(truncation, "keep_start and keep_end become data.truncation: right and left")),
    row("trust_remote_code", Warned("tunesmith never runs code that comes with a model")),
    row("use_cache", Warned("training keeps no cache of keys and values")),
    row("use_cpu", Warned(DEVICE)),
    row("use_legacy_prediction_loop", Warned(METRICS)),
    row("use_liger", Warned("the kernels are fused anyway")),
    row("use_liger_kernel", Warned("the kernels are fused anyway")),
    row("use_mps_device", Warned(DEVICE)),
    row(
        "offload_optimizer",
        Unless(
            OFF,
            "on the CPU it lies in main memory anyway; there is nothing to offload it from until a GPU is supported",
        ),
    ),
    row("attn_implementation", Warned(ATTENTION)),
    row("backend", With(tracker, "tensorboard and none become logging.tensorboard; others are refused")),
    row(
        "model.type",
        Unless(&[Str("causal"), Str("causal_lm"), Null], "other kinds of model are not yet part of this version"),
    ),
    row("data.split.val_ratio", To("data.split")),
    row("data.split.train_ratio", Warned("the rows that are not set apart are trained on")),
    row("data.split.test_ratio", Unless(&[Str("0"), Str("0.0")], "test rows come from data.test_path")),
    row("data.streaming", Warned("every set is read from disk while it is used, and may be larger than memory")),
];

/// Keys of ours for which `null` means the default, as Transformers' `None` does.
pub(crate) const NULL_IS_DEFAULT: &[&str] = &[
    "train.output_dir",
    "train.batch_size",
    "train.eval_batch_size",
    "train.bf16",
    "train.fp16",
    "train.gradient_checkpointing",
    "train.ddp_bucket_cap_mb",
    "train.ddp_backend",
    "train.metric_for_best_model",
    "train.max_grad_norm",
    "model.max_seq_len",
];

/// The line for a full key.
pub(crate) fn find(spelled: &str) -> Option<&'static Row> {
    if let Some(row) = ROWS.iter().find(|row| row.key.contains('.') && row.key == spelled) {
        return Some(row);
    }
    let (place, leaf) = spelled.rsplit_once('.')?;
    let here = match ELSEWHERE.iter().find(|(name, _)| *name == place) {
        Some((_, keys)) => keys.contains(&leaf),
        None => place == "train" && !PLACED.contains(&leaf),
    };
    ROWS.iter().find(|row| here && row.key == leaf)
}

/// Every full key.
pub(crate) fn names() -> impl Iterator<Item = String> {
    let alone = ROWS.iter().map(|row| row.key).filter(|key| key.contains('.')).map(str::to_owned);
    let train = ROWS.iter().map(|row| row.key).filter(|key| !key.contains('.') && !PLACED.contains(key));
    let elsewhere = ELSEWHERE.iter().flat_map(|(place, keys)| keys.iter().map(move |key| format!("{place}.{key}")));
    alone.chain(train.map(|key| format!("train.{key}"))).chain(elsewhere)
}

fn word_put(reader: &mut Reader, value: &Value, key: &str, word: &str) -> Result<()> {
    reader.put(value, key, Node::Str(word.to_owned()), "")
}

fn accelerator(reader: &mut Reader, value: &Value) -> Result<()> {
    const KEYS: [&str; 8] = [
        "split_batches",
        "dispatch_batches",
        "even_batches",
        "use_seedable_sampler",
        "non_blocking",
        "gradient_accumulation_kwargs",
        "use_configured_state",
        "data_seed",
    ];
    let Node::Map(entries) = &value.node else { return Err(value.expected("keys, indented below it")) };
    for (key, node) in entries {
        match key.as_str() {
            "split_batches" if *node == Node::Bool(true) => {
                return Err(value.refused("train.batch_size is that of each rank; remove split_batches"));
            }
            key if KEYS.contains(&key) => {}
            key => {
                let error = value.expected(&format!("one of {}", KEYS.join(", ")));
                return Err(match nearest(key, KEYS) {
                    Some(near) => error.hint(format!("{key}: did you mean {near}?")),
                    None => error.hint(format!("{key} is none of them")),
                });
            }
        }
    }
    reader.same(value, LOADER)
}

fn adafactor(reader: &mut Reader, value: &Value) -> Result<()> {
    if value.flag()? {
        word_put(reader, value, "train.optim", "adafactor")
    } else {
        reader.same(value, "train.optim says which optimizer")
    }
}

fn every_block(reader: &mut Reader, value: &Value) -> Result<()> {
    if let Node::Map(entries) = &value.node
        && let Some((_, node)) = entries.iter().find(|(key, _)| key == "every_n_layers")
        && *node != Node::Int(1)
    {
        return Err(value.refused("set train.gradient_checkpointing: {full: N}: the first N blocks are run again"));
    }
    reader.same(value, ONE_WAY)
}

fn assistant_only(reader: &mut Reader, value: &Value) -> Result<()> {
    if value.flag()? {
        return word_put(reader, value, "data.loss_on", "assistant");
    }
    reader.same(value, "data.loss_on says which tokens are learned")
}

fn completion_only(reader: &mut Reader, value: &Value) -> Result<()> {
    let ours = if value.flag()? { "completion" } else { "all" };
    word_put(reader, value, "data.loss_on", ours)
}

fn sampling(reader: &mut Reader, value: &Value) -> Result<()> {
    match value.word()?.as_str() {
        "random" => reader.same(value, "data.shuffle draws a new order in each epoch"),
        "sequential" => reader.put(value, "data.shuffle", Node::Bool(false), ""),
        "group_by_length" => reader.put(value, "train.group_by_length", Node::Bool(true), ""),
        "batch_rebalance" => reader.same(value, NO_PADDING),
        _ => Err(value.expected("one of random, sequential, group_by_length, batch_rebalance")),
    }
}

fn truncation(reader: &mut Reader, value: &Value) -> Result<()> {
    match value.word()?.as_str() {
        "keep_start" => word_put(reader, value, "data.truncation", "right"),
        "keep_end" => word_put(reader, value, "data.truncation", "left"),
        _ => Err(value.expected("keep_start or keep_end")),
    }
}

const OTHER_TRACKER: &str =
    "TensorBoard, report.html and metrics.jsonl are written; other trackers are not part of this version";

fn report_to(reader: &mut Reader, value: &Value) -> Result<()> {
    let names = match &value.node {
        Node::List(items) => items.clone(),
        Node::Str(words) => words.split(',').map(|word| Node::Str(word.trim().to_owned())).collect(),
        node => vec![node.clone()],
    };
    let mut tensorboard = false;
    for name in names {
        let one = Value { node: name, ..value.clone() };
        match one.word()?.as_str() {
            "tensorboard" | "all" => tensorboard = true,
            "none" | "no" => {}
            _ => return Err(one.refused(OTHER_TRACKER)),
        }
    }
    reader.put(value, "logging.tensorboard", Node::Bool(tensorboard), "")
}

fn tracker(reader: &mut Reader, value: &Value) -> Result<()> {
    report_to(reader, value)
}

/// What `from_pretrained` gets.
fn init(reader: &mut Reader, value: &Value) -> Result<()> {
    let Node::Map(entries) = &value.node else { return Err(value.expected("keys, indented below it")) };
    for (key, node) in entries {
        let one = Value { node: node.clone(), ..value.clone() };
        match key.as_str() {
            "dtype" | "torch_dtype" => match &one.node {
                Node::Str(word) => {
                    let word = word.strip_prefix("torch.").unwrap_or(word).to_owned();
                    reader.put(&one, "model.dtype", Node::Str(word), "")?;
                }
                _ => return Err(one.expected("a word for dtype, such as bfloat16")),
            },
            "revision" => reader.put(&one, "model.revision", node.clone(), "")?,
            "attn_implementation"
            | "device_map"
            | "low_cpu_mem_usage"
            | "trust_remote_code"
            | "use_cache"
            | "use_kernels"
            | "use_safetensors"
            | "cache_dir" => {}
            "quantization_config" | "load_in_4bit" | "load_in_8bit" => {
                return Err(value.refused("set model.quantization: nf4, fp4 or int8, or tuning.mode: qlora"));
            }
            other => {
                return Err(value.refused(&format!("{other} has no counterpart; the section model has what there is")));
            }
        }
    }
    reader.same(value, ATTENTION)
}
