//! Keys of Transformers' `TrainingArguments` (5.23, and further ones of 4.57), TRL's `SFTConfig` and SFT-Play that are not
//! our settings. They may appear in our own configuration under `train`, and those of [`ELSEWHERE`] also in the section
//! where they belong.
use super::Action::{NotNeeded, Only, To, Unsupported, With};
use super::reader::{Function, Reader, Rules};
use super::rules::{Rule, Translation as _, find_rule, key_names};
use super::value::Value;
use crate::option::Scalar::{Bool, Null, Str};
use crate::rules;
use crate::suggest::nearest;
use crate::value::Node;
use tunesmith_base::error::Result;

const LOADER: &str = "there is no data loader: rows are tokenized before training and read from a file";
const COMPILER: &str = "nothing is compiled at run time";
const ONE_WAY: &str = "there is only one way to recompute a block";
const UPLOAD: &str = "`tunesmith export --push OWNER/NAME` uploads the result of a run";
const TRACKIO: &str = "Trackio is not part of this version, and nothing is sent to it";
const RANK_0: &str = "only rank 0 writes and reports";
const UNUSED: &str = "gradients of all trained parameters are reduced, used or not";
const PRECISION: &str = "train.bf16 and train.fp16 set the type of activations, model.dtype that of frozen weights";
const METRICS: &str = "eval.metrics lists the metrics, which are computed row by row";
const EVERY_STEP: &str = "metrics.jsonl has every step, and train.logging_steps says how often a line is shown";
const NO_PADDING: &str = "rows are never padded";
const ATTENTION: &str = "there is one attention kernel, which stores no score matrix";
const PARALLEL: &str = "train.strategy says how ranks share a model; layers are not split";

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
pub(super) const RULES: Rules = rules! {
    "accelerator_config" => With(accelerator); "split_batches: true is refused; the other keys are not needed",
    "activation_checkpointing_kwargs" => With(every_block); "there is only one way to recompute a block",
    "adafactor" => With(adafactor); "true becomes train.optim: adafactor",
    "assistant_only_loss" => With(assistant_only); "true becomes data.loss_on: assistant, false data.loss_on: all",
    "auto_find_batch_size" => Unsupported("set train.batch_size: auto, which measures before step 1 and loses no step"),
    "average_tokens_across_devices" => Only(&[Bool(true)], "the loss is always divided by the label tokens of all ranks"),
    "batch_eval_metrics" => NotNeeded(METRICS),
    "bf16_full_eval" => NotNeeded("validation computes with the same precision as training"),
    "chars_per_token" => NotNeeded("lengths are counted in tokens"),
    "completion_only_loss" => With(completion_only); "true becomes data.loss_on: completion, false data.loss_on: all",
    "dataloader_drop_last" => Unsupported("the last, smaller step of an epoch is always trained; remove the key"),
    "dataloader_in_order" | "dataloader_multiprocessing_context" | "dataloader_num_workers"
    | "dataloader_persistent_workers" | "dataloader_pin_memory" | "dataloader_prefetch_factor" => NotNeeded(LOADER),
    "dataset_batch_size" => NotNeeded("rows are tokenized one by one, on data.num_proc threads"),
    "dataset_kwargs.*" => Unsupported("rows are always rendered by the chat template and tokenized; see data.format"),
    "dataset_text_field" => Only(&[Str("text")], "a row of raw text has the field `text`; rename the field"),
    "ddp_broadcast_buffers" => NotNeeded("the models have no buffers that training changes"),
    "ddp_find_unused_parameters" | "ddp_static_graph" => NotNeeded(UNUSED),
    "debug" => NotNeeded("non-finite steps are skipped and reported, and end the run after train.max_nonfinite_steps"),
    "device_map" => With(device_map); "model.device: auto and balanced become auto, a GPU or its number cuda:N, cpu cpu; a map of parts is refused",
    "disable_tqdm" => NotNeeded("a progress bar is shown on a terminal only"),
    "do_eval" => NotNeeded("train.eval_strategy says when a run validates; `tunesmith eval` measures a model"),
    "do_predict" => NotNeeded("`tunesmith eval` and `infer` answer rows"),
    "do_train" => NotNeeded("`tunesmith train` trains"),
    "enable_jit_checkpoint" => NotNeeded("SIGTERM always saves a checkpoint before the run ends"),
    "eos_token" => Unsupported("the tokenizer's files and the chat template name the token that ends a turn"),
    "eval_delay" => Only(&[Str("0")], "a delayed first validation is not part of this version; remove the key"),
    "eval_do_concat_batches" => NotNeeded(METRICS),
    "eval_packing" => NotNeeded("validation rows are not packed; the loss is the same"),
    "eval_use_gather_object" => NotNeeded(METRICS),
    "fp16_backend" => NotNeeded(PRECISION),
    "fp16_full_eval" => NotNeeded("validation computes with the same precision as training"),
    "fp16_opt_level" => NotNeeded(PRECISION),
    "fsdp_min_num_params" | "fsdp_transformer_layer_cls_to_wrap" => NotNeeded("weights are gathered block by block"),
    "full_determinism" => NotNeeded("two runs with the same seed and ranks give the same bits"),
    "generation_config.*" => Unsupported("set the section gen"),
    "generation_max_length" => Unsupported("set train.generation_max_new_tokens, the tokens of the answer alone"),
    "gradient_checkpointing_kwargs" => With(every_block); "there is only one way to recompute a block",
    "half_precision_backend" => NotNeeded(PRECISION),
    "hub_always_push" | "hub_model_id" | "hub_private_repo" | "hub_revision" | "hub_strategy" => NotNeeded(UPLOAD),
    "hub_token" => Unsupported("secrets do not belong in files; set the environment variable HF_TOKEN"),
    "ignore_data_skip" => Unsupported("a resumed run always continues with the next rows; remove the key"),
    "include_for_metrics" | "include_inputs_for_metrics" => NotNeeded(METRICS),
    "include_num_input_tokens_seen" => NotNeeded("metrics.jsonl has the tokens of every step"),
    "include_tokens_per_second" => NotNeeded("metrics.jsonl and the progress bar have the tokens per second"),
    "jit_mode_eval" => NotNeeded(COMPILER),
    "label_names" => NotNeeded("data.loss_on says which tokens are learned"),
    "length_column_name" => NotNeeded("lengths are counted while rows are tokenized"),
    "liger_kernel_config.*" => NotNeeded("the kernels are fused anyway"),
    "local_rank" => NotNeeded("the launcher says which rank a process is"),
    "log_level" => NotNeeded("there is only one log level"),
    "log_level_replica" | "log_on_each_node" => NotNeeded(RANK_0),
    "logging_first_step" => NotNeeded(EVERY_STEP),
    "logging_nan_inf_filter" => NotNeeded("a non-finite loss is shown, and its step is skipped"),
    "logging_strategy" => NotNeeded(EVERY_STEP),
    "loss_type" => Only(&[Str("nll"), Str("chunked_nll")], "the loss is the cross entropy of the labels (`nll`)"),
    "low_cpu_mem_usage" => NotNeeded("weights are read segment by segment"),
    "model_init_kwargs.*" => With(init); "dtype and revision become model.dtype and model.revision; what has no meaning here is not needed",
    "mp_parameters" => NotNeeded(PARALLEL),
    "no_cuda" => With(on_cpu); "true becomes model.device: cpu; false leaves it to model.device",
    "num_of_sequences" => NotNeeded("packed rows are as long as model.max_seq_len"),
    "optim_target_modules" => Unsupported("GaLore and APOLLO are not part of this version"),
    "overwrite_output_dir" => NotNeeded("`train --overwrite` starts over in a folder that holds a run"),
    "packing_strategy" => Only(&[Str("bfd")], "whole rows are packed; to cut raw texts set data.truncation: split"),
    "pad_to_multiple_of" | "pad_token" | "padding_free" => NotNeeded(NO_PADDING),
    "parallelism_config.*" => Unsupported(PARALLEL),
    "past_index" => Only(&[Str("-1")], "the models that use it are not supported"),
    "prediction_loss_only" => NotNeeded("train.predict_with_generate says whether validation generates answers"),
    "project" => NotNeeded(TRACKIO),
    "push_to_hub" => Unsupported(UPLOAD),
    "push_to_hub_model_id" | "push_to_hub_organization" => NotNeeded(UPLOAD),
    "push_to_hub_token" => Unsupported("secrets do not belong in files; set the environment variable HF_TOKEN"),
    "ray_scope" => NotNeeded("tunesmith does not search for hyperparameters"),
    "remove_unused_columns" => NotNeeded("fields that are not part of the row format are ignored"),
    "report_to" => With(report_to); "tensorboard, all and none become logging.tensorboard; others are refused",
    "restore_callback_states_from_checkpoint" => NotNeeded("a resumed run restores all of its state"),
    "router_aux_loss_coef" => Unsupported("the model's config.json sets router_aux_loss_coef"),
    "save_on_each_node" => NotNeeded(RANK_0),
    "save_only_model" => NotNeeded("a checkpoint always contains what a resume needs; the final model or adapter is saved separately"),
    "save_safetensors" => Only(&[Bool(true)], "weights are always written as safetensors; remove the key"),
    "shuffle_dataset" => NotNeeded("data.shuffle draws a new order in each epoch"),
    "skip_memory_metrics" => NotNeeded("metrics.jsonl has the memory of every step"),
    "sortish_sampler" => Unsupported("set train.group_by_length: true"),
    "torch_compile" | "torch_compile_backend" | "torch_compile_mode" => NotNeeded(COMPILER),
    "torch_empty_cache_steps" => NotNeeded("memory is returned as soon as it is free"),
    "torchdynamo" => NotNeeded(COMPILER),
    "tpu_metrics_debug" | "tpu_num_cores" => NotNeeded("there are no TPUs"),
    "trackio_bucket_id" | "trackio_space_id" | "trackio_static_space_id" => NotNeeded(TRACKIO),
    "train_sampling_strategy" => With(sampling); "sequential becomes data.shuffle: false, group_by_length train.group_by_length: true",
    "truncation_mode" => With(truncation); "keep_start and keep_end become data.truncation: right and left",
    "trust_remote_code" => NotNeeded("tunesmith never runs code that comes with a model"),
    "use_cache" => NotNeeded("training keeps no cache of keys and values"),
    "use_cpu" => With(on_cpu); "true becomes model.device: cpu; false leaves it to model.device",
    "use_legacy_prediction_loop" => NotNeeded(METRICS),
    "use_liger" | "use_liger_kernel" => NotNeeded("the kernels are fused anyway"),
    "use_mps_device" => NotNeeded("model.device chooses the CPU or an NVIDIA GPU"),
    "attn_implementation" => NotNeeded(ATTENTION),
    "backend" => With(report_to); "tensorboard and none become logging.tensorboard; others are refused",
    "model.type" => Only(&[Str("causal"), Str("causal_lm"), Null], "other kinds of model are not yet part of this version"),
    "data.split.val_ratio" => To("data.split"),
    "data.split.train_ratio" => NotNeeded("all rows that are not held out are trained on"),
    "data.split.test_ratio" => Only(&[Str("0"), Str("0.0")], "test rows come from data.test_path"),
    "data.streaming" => NotNeeded("data sets are read from disk while they are used, and may be larger than memory"),
};

/// Keys of ours for which `null` means the default, as Transformers' `None` does.
pub(crate) const NULL_IS_DEFAULT: &[&str] = &[
    "train.output_dir",
    "train.batch_size",
    "train.eval_batch_size",
    "train.bf16",
    "train.fp16",
    "train.tf32",
    "train.gradient_checkpointing",
    "train.ddp_bucket_cap_mb",
    "train.ddp_backend",
    "train.metric_for_best_model",
    "train.max_grad_norm",
    "model.max_seq_len",
];

/// The name in the table and the rule of a full key that has a place of its own or is a key of a section.
pub(super) fn find(spelled: &str) -> Option<(&'static str, &'static Rule<Function>)> {
    let (place, leaf) = spelled.rsplit_once('.')?;
    let here = match ELSEWHERE.iter().find(|(name, _)| *name == place) {
        Some((_, keys)) => keys.contains(&leaf),
        None => place == "train" && !PLACED.contains(&leaf),
    };
    find_rule(RULES, leaf).filter(|_| here)
}

pub(crate) fn names() -> impl Iterator<Item = String> {
    let keys = key_names(RULES);
    let alone = keys.clone().filter(|key| key.contains('.')).map(str::to_owned);
    let train = keys.filter(|key| !key.contains('.') && !PLACED.contains(key));
    let elsewhere = ELSEWHERE.iter().flat_map(|(place, keys)| keys.iter().map(move |key| format!("{place}.{key}")));
    alone.chain(train.map(|key| format!("train.{key}"))).chain(elsewhere)
}

fn word_put(reader: &mut Reader, value: &Value, key: &str, word: &str) -> Result<()> {
    reader.put(value, key, Node::Str(word.to_owned()), "")
}

/// `true`: the processor, even where there is a GPU.
pub(super) fn on_cpu(reader: &mut Reader, value: &Value) -> Result<()> {
    if value.flag()? {
        word_put(reader, value, "model.device", "cpu")
    } else {
        reader.same(value, "model.device says where a model is computed")
    }
}

/// Transformers' `device_map`, as far as it names one device for the whole model.
fn device_map(reader: &mut Reader, value: &Value) -> Result<()> {
    match one_device(&value.node) {
        Some(device) => word_put(reader, value, "model.device", &device),
        None => Err(value.refused(
            "a model is on one device; set model.device, and train.strategy: fsdp to share a large one among ranks",
        )),
    }
}

/// The `model.device` that a `device_map` of another toolkit means; nothing where it spreads a model.
pub fn one_device(node: &Node) -> Option<String> {
    match node {
        Node::Str(word) => match word.as_str() {
            "auto" | "balanced" | "balanced_low_0" | "sequential" => Some("auto".to_owned()),
            "cpu" | "cuda" => Some(word.clone()),
            word => {
                let number = word.strip_prefix("cuda:").unwrap_or(word);
                number.parse::<u8>().ok().map(|number| format!("cuda:{number}"))
            }
        },
        Node::Int(number) => u8::try_from(*number).ok().map(|number| format!("cuda:{number}")),
        Node::Map(entries) => match &entries[..] {
            [(module, device)] if module.is_empty() => one_device(device),
            _ => None,
        },
        _ => None,
    }
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
    let ours = if value.flag()? { "assistant" } else { "all" };
    word_put(reader, value, "data.loss_on", ours)
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
            "device_map" if one.node == Node::Null => {}
            "device_map" => device_map(reader, &one)?,
            "attn_implementation"
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
