//! LLaMA-Factory's configurations, as of version 0.9.5.
mod others;
mod rows;

use super::work::Act::{Lost, Needless, To, ToBut, Together, With};
use super::work::{Rule, Work, is_off};
use super::{names, ranks};
pub(super) use others::OTHERS;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Node;

const REACHED: &str = "every trained value takes part in each reduction, used or not";
const KERNEL: &str = "there is one attention, and kernels are chosen by the processor";
const NO_LOADER: &str = "rows are tokenized before training, there is no data loader";
const CACHE: &str = "tokens are cached by content: a changed set is another one";
const ACCURACY: &str = "a run measures the loss and scored answers; `tunesmith eval` tells token_accuracy too";
const OTHER: &str = "this way of training is not part of this version";
const OWN_STEP: &str = "a step of its own: `tunesmith merge` and `export`, `infer` and `chat`";
const UPLOAD: &str = "a run uploads nothing; `tunesmith export --push` does";
const TRACKER: &str =
    "Weights & Biases, SwanLab and others are not yet part of this version; TensorBoard and report.html are written";

macro_rules! rules {
    ($($key:literal => $act:expr,)*) => { &[$(Rule { key: $key, act: $act }),*] };
}

/// Every key of LLaMA-Factory that this import knows; rarer ones are in [`OTHERS`].
pub(super) const RULES: &[Rule] = rules! {
    "model_name_or_path" => To("model.name"),
    "model_revision" => To("model.revision"),
    "adapter_name_or_path" => Together,
    "create_new_adapter" => Together,
    "adapter_folder" => Lost("name the adapters in tuning.adapter"),
    "cache_dir" => Lost("the hub's cache is set by HF_HOME"),
    "use_fast_tokenizer" => Needless("there is one tokenizer"),
    "split_special_tokens" => To("data.split_special_tokens"),
    "resize_vocab" => Needless("the embedding grows with tuning.new_tokens"),
    "new_special_tokens" => With(tokens),
    "add_tokens" => With(tokens),
    "add_special_tokens" => With(tokens),
    "low_cpu_mem_usage" => Needless("weights are mapped, not copied"),
    "rope_scaling" => Lost("the model's own config.json says how"),
    "flash_attn" => Needless(KERNEL),
    "shift_attn" => Lost("shifted sparse attention is not part of this version"),
    "mixture_of_depths" => Lost(OTHER),
    "train_from_scratch" => With(|work, key, node| match node {
        Node::Bool(true) => work.put(key, "model.init", Node::Str("random".into()), ""),
        _ => work.needless(key, "off"),
    }),
    "use_unsloth" => Needless(KERNEL),
    "use_unsloth_gc" => Needless("see gradient_checkpointing"),
    "enable_liger_kernel" => Needless(KERNEL),
    "moe_aux_loss_coef" => Lost("the model's config.json says how much of it there is"),
    "disable_gradient_checkpointing" => With(|work, key, node| {
        work.put(key, "train.gradient_checkpointing", Node::Bool(*node == Node::Bool(false)), "the same, said the other way round");
    }),
    "gradient_checkpointing" => To("train.gradient_checkpointing"),
    "upcast_layernorm" => Needless("norms are computed in float32"),
    "upcast_lmhead_output" => Needless("the loss is computed in float32 and more"),
    "infer_backend" => Lost(OWN_STEP),
    "infer_dtype" => Lost(OWN_STEP),
    "offload_folder" => Needless("nothing is offloaded"),
    "use_kv_cache" => Needless("answers are made with a cache"),
    "hf_hub_token" => Lost("a secret does not belong into a file; set the environment variable HF_TOKEN"),
    "ms_hub_token" => Lost("models come from the Hugging Face Hub or a folder"),
    "trust_remote_code" => With(|work, key, node| match node {
        Node::Bool(true) => work.changed(key, "", "code that comes with a model is never run"),
        _ => work.needless(key, "off"),
    }),
    "quantization_bit" => Together,
    "quantization_method" => Together,
    "quantization_type" => Together,
    "double_quantization" => Together,
    "stage" => Together,
    "do_train" => Together,
    "do_eval" => Needless("eval_strategy says when"),
    "do_predict" => Lost("a step of its own: `tunesmith eval` scores the answers to data.test_path"),
    "finetuning_type" => Together,
    "use_llama_pro" => Lost(OTHER),
    "lora_rank" => To("tuning.lora.r"),
    "lora_alpha" => To("tuning.lora.lora_alpha"),
    "lora_dropout" => To("tuning.lora.lora_dropout"),
    "lora_target" => Together,
    "loraplus_lr_ratio" => To("tuning.lora.loraplus_lr_ratio"),
    "loraplus_lr_embedding" => Lost("embeddings get no adapters; train.learning_rates sets the rate of those in modules_to_save"),
    "use_rslora" => To("tuning.lora.use_rslora"),
    "use_dora" => To("tuning.lora.use_dora"),
    "pissa_init" => Together,
    "pissa_iter" => Together,
    "pissa_convert" => Lost("the base without the adapter's start is not written out"),
    "oft_rank" => To("tuning.oft.r"),
    "oft_block_size" => To("tuning.oft.oft_block_size"),
    "oft_target" => Together,
    "additional_target" => Together,
    "module_dropout" => Lost("blocks are never left out"),
    "freeze_trainable_layers" => Together,
    "freeze_trainable_modules" => Together,
    "freeze_extra_modules" => Together,
    "freeze_vision_tower" => Needless("text models only"),
    "freeze_multi_modal_projector" => Needless("text models only"),
    "use_galore" => Lost(OTHER),
    "use_apollo" => Lost(OTHER),
    "use_badam" => Lost(OTHER),
    "use_adam_mini" => Lost(OTHER),
    "use_muon" => With(|work, key, node| match node {
        Node::Bool(true) => work.put(key, "train.optim", Node::Str("muon".into()), ""),
        _ => work.needless(key, "off"),
    }),
    "ref_model" => Lost("preference training is not part of this version"),
    "pref_beta" => Lost("preference training is not part of this version"),
    "pref_loss" => Lost("preference training is not part of this version"),
    "dataset" => Together,
    "eval_dataset" => Together,
    "dataset_dir" => Together,
    "media_dir" => Needless("text models only"),
    "template" => With(names::template),
    "enable_thinking" => Lost("the template decides; write one with data.template_path"),
    "default_system" => Lost("put a system message into the rows"),
    "cutoff_len" => ToBut("model.max_seq_len", "there the cut is shared by prompt and answer, here the end is cut (data.truncation)"),
    "train_on_prompt" => Together,
    "mask_history" => Together,
    "streaming" => Needless("every set is streamed from disk"),
    "buffer_size" => Needless("the whole set is shuffled"),
    "mix_strategy" => Together,
    "interleave_probs" => Together,
    "overwrite_cache" => Needless(CACHE),
    "preprocessing_batch_size" => Needless("batches are chosen by the processor's cores"),
    "preprocessing_num_workers" => To("data.num_proc"),
    "max_samples" => To("data.max_rows"),
    "val_size" => Together,
    "packing" => Together,
    "neat_packing" => Together,
    "tool_format" => Lost("the template writes tools"),
    "tokenized_path" => Needless(CACHE),
    "data_shared_file_system" => Needless("every rank reads the rows from data.cache_dir"),
    "ignore_pad_token_for_loss" => Needless("there is no padding"),
    "eval_num_beams" => To("train.generation_num_beams"),
    "output_dir" => To("train.output_dir"),
    "overwrite_output_dir" => With(|work, key, node| match node {
        Node::Bool(true) => work.changed(key, "", "say --overwrite when you train"),
        _ => work.needless(key, "off"),
    }),
    "logging_steps" => To("train.logging_steps"),
    "logging_strategy" => Needless("logging_steps says how often"),
    "logging_dir" => To("logging.logging_dir"),
    "logging_first_step" => Needless("metrics.jsonl has every step"),
    "save_steps" => Together,
    "save_strategy" => Together,
    "save_total_limit" => To("train.save_total_limit"),
    "save_only_model" => With(|work, key, _| work.changed(key, "", "a checkpoint holds all that an exact resume needs")),
    "save_safetensors" => Needless("everything is saved as safetensors"),
    "plot_loss" => Needless("report.html has the curves"),
    "include_num_input_tokens_seen" => Needless("tokens are counted"),
    "include_tokens_per_second" => Needless("tokens/s are shown"),
    "report_to" => With(report_to),
    "run_name" => To("logging.run_name"),
    "per_device_train_batch_size" => To("train.batch_size"),
    "per_device_eval_batch_size" => To("train.eval_batch_size"),
    "gradient_accumulation_steps" => To("train.grad_accum"),
    "learning_rate" => To("train.learning_rate"),
    "num_train_epochs" => To("train.num_train_epochs"),
    "max_steps" => To("train.max_steps"),
    "lr_scheduler_type" => Together,
    "lr_scheduler_kwargs" => To("train.lr_scheduler_kwargs"),
    "warmup_ratio" => Together,
    "warmup_steps" => Together,
    "weight_decay" => To("train.weight_decay"),
    "adam_beta1" => To("train.adam_beta1"),
    "adam_beta2" => To("train.adam_beta2"),
    "adam_epsilon" => To("train.adam_epsilon"),
    "max_grad_norm" => To("train.max_grad_norm"),
    "optim" => With(names::optimizer),
    "optim_args" => To("train.optim_args"),
    "neftune_noise_alpha" => To("train.neftune_noise_alpha"),
    "label_smoothing_factor" => To("train.label_smoothing_factor"),
    "group_by_length" => To("train.group_by_length"),
    "disable_shuffling" => With(|work, key, node| {
        work.put(key, "data.shuffle", Node::Bool(*node == Node::Bool(false)), "the same, said the other way round");
    }),
    "seed" => To("train.seed"),
    "data_seed" => To("train.data_seed"),
    "bf16" => To("train.bf16"),
    "pure_bf16" => With(|work, key, node| match node {
        Node::Bool(true) => work.put(key, "train.bf16", Node::Bool(true), "what is trained stays in float32"),
        _ => work.needless(key, "off"),
    }),
    "fp16" => With(|work, key, node| match node {
        Node::Bool(true) if work.is_on("bf16") || work.is_on("pure_bf16") => work.needless(key, "bfloat16 wins"),
        node => work.put(key, "train.fp16", node.clone(), ""),
    }),
    "tf32" => Needless("products are computed in float32"),
    "resume_from_checkpoint" => To("train.resume_from_checkpoint"),
    "eval_strategy" => Together,
    "evaluation_strategy" => Together,
    "eval_steps" => Together,
    "eval_on_start" => To("train.eval_on_start"),
    "eval_accumulation_steps" => To("train.eval_accumulation_steps"),
    "per_device_batch_size" => Lost("set train.batch_size"),
    "load_best_model_at_end" => Together,
    "metric_for_best_model" => To("train.metric_for_best_model"),
    "greater_is_better" => To("train.greater_is_better"),
    "early_stopping_steps" => ToBut("train.early_stopping_patience", "counted in validations"),
    "compute_accuracy" => Lost(ACCURACY),
    "predict_with_generate" => To("train.predict_with_generate"),
    "max_new_tokens" => Together,
    "do_sample" => Together,
    "temperature" => Together,
    "top_p" => Together,
    "top_k" => Together,
    "num_beams" => Together,
    "repetition_penalty" => Together,
    "length_penalty" => Together,
    "deepspeed" => With(ranks::deepspeed),
    "fsdp" => Together,
    "fsdp_config" => Together,
    "ddp_timeout" => To("train.ddp_timeout"),
    "ddp_find_unused_parameters" => Needless(REACHED),
    "ray_run_name" => Lost(ranks::LAUNCHED),
    "ray_num_workers" => Lost(ranks::LAUNCHED),
    "dataloader_num_workers" => Needless(NO_LOADER),
    "dataloader_pin_memory" => Needless(NO_LOADER),
    "dataloader_drop_last" => Lost("the last, smaller batch of an epoch is always kept"),
    "remove_unused_columns" => Needless("fields that are not named are not read"),
    "torch_compile" => Needless("there is nothing to compile"),
    "push_to_hub" => Lost(UPLOAD),
    "hub_model_id" => Lost(UPLOAD),
    "use_swanlab" => Lost(TRACKER),
    "swanlab_project" => Lost(TRACKER),
    "export_dir" => Lost(OWN_STEP),
    "export_size" => Lost(OWN_STEP),
    "export_device" => Lost(OWN_STEP),
    "export_legacy_format" => Lost(OWN_STEP),
};

/// Imports a whole configuration.
pub(super) fn read(work: &mut Work) -> Result<()> {
    let pretrains = match work.word("stage").as_deref() {
        Some("sft") | None => false,
        Some("pt") => true,
        Some(other) => {
            return Err(Error::config(format!(
                "{}: stage: {other:?}: this is no supervised fine-tuning",
                work.path.display()
            ))
            .hint("stages sft and pt can be imported; preference data would be learned as if all of it were right"));
        }
    };
    if work.get(&["model_name_or_path"]).is_none() {
        let error = Error::config(format!("{}: model_name_or_path is not set", work.path.display()));
        return Err(if work.get(&["train_dataset", "dist_config"]).is_some() {
            error.hint("this is the form of its new trainer (v1), which is not read")
        } else {
            error.hint("is it a configuration of LLaMA-Factory's training?")
        });
    }
    if work.get(&["do_train", "dataset", "stage"]).is_none() {
        return Err(Error::config(format!(
            "{}: no do_train, stage or dataset: this trains nothing",
            work.path.display()
        ))
        .hint("evaluation, prediction and export are not configured so"));
    }
    if let Some((key, Node::Bool(false))) = work.get(&["do_train"]) {
        return Err(Error::config(format!("{}: {key}: false: there is nothing to train", work.path.display()))
            .hint("`tunesmith eval`, `infer`, `merge` and `export` do the rest"));
    }
    if work.get(&["do_train"]).is_some() {
        work.needless("do_train", "`tunesmith train` trains");
    }
    work.follow();
    mode(work);
    rows::sets(work, pretrains);
    objective(work, pretrains);
    let splits = names::validation(work, "val_size");
    let validates = splits || work.written("data.val_path").is_some();
    names::schedule(work, "linear");
    names::moments(work, "no", "steps", validates);
    defaults(work);
    answers(work);
    ranks::fsdp(work, false);
    Ok(())
}

/// `a,b` split into a list; any other value as it is.
fn listed(node: &Node) -> Node {
    match node {
        Node::Str(text) => Node::List(
            text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(|part| Node::Str(part.into())).collect(),
        ),
        other => other.clone(),
    }
}

fn tokens(work: &mut Work, key: &str, node: &Node) {
    work.put(key, "tuning.new_tokens", listed(node), "");
}

fn report_to(work: &mut Work, key: &str, node: &Node) {
    let words: Vec<String> = match listed(node) {
        Node::List(items) => items
            .into_iter()
            .filter_map(|item| match item {
                Node::Str(word) => Some(word),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    };
    let tensorboard = words.iter().any(|word| word == "tensorboard" || word == "all");
    let others = words.iter().any(|word| word != "tensorboard" && word != "none");
    work.put(key, "logging.tensorboard", Node::Bool(tensorboard), if others { TRACKER } else { "" });
}

/// The training mode (`finetuning_type`).
fn mode(work: &mut Work) {
    let bits = match work.get(&["quantization_bit"]) {
        Some((_, Node::Int(bits))) => bits,
        _ => 0,
    };
    let kind = work.word("finetuning_type").unwrap_or_else(|| "lora".to_owned());
    let why = if bits == 4 && kind == "lora" { "with quantization_bit: 4" } else { "" };
    let ours = if why.is_empty() { kind.as_str() } else { "qlora" };
    if work.get(&["finetuning_type"]).is_some() {
        work.put("finetuning_type", "tuning.mode", Node::Str(ours.into()), why);
    } else {
        work.implied("tuning.mode", Node::Str(ours.into()), "its default");
    }
    match (bits, ours) {
        (4, "qlora") => work.needless("quantization_bit", "mode: qlora says so"),
        (4, "oft") => work.put("quantization_bit", "model.quantization", Node::Str("nf4".into()), ""),
        (8, _) => work.put("quantization_bit", "model.quantization", Node::Str("int8".into()), ""),
        (0, _) => {}
        _ => work.put("quantization_bit", "model.quantization", Node::Int(bits), ""),
    }
    for key in ["quantization_method", "quantization_type", "double_quantization"] {
        match (work.get(&[key]), key) {
            (None, _) => {}
            (Some(_), _) if bits == 0 => work.needless(key, "the base is not quantized"),
            (Some(_), "quantization_method") => work.needless(key, "weights are coded as bitsandbytes does it"),
            (Some(_), _) if bits != 4 => work.needless(key, "it belongs to 4 bits"),
            (Some((_, node)), "quantization_type") => work.put(key, "model.quantization", node, ""),
            (Some((_, node)), _) => work.put(key, "model.double_quant", node, ""),
        }
    }
    match kind.as_str() {
        "lora" => lora(work),
        "oft" => adapter(work, "oft"),
        "freeze" => freeze(work),
        _ => {}
    }
}

/// Target modules, modules that are trained in full, and existing adapters.
fn adapter(work: &mut Work, kind: &str) {
    let to = format!("tuning.{kind}.target_modules");
    match work.get(&[format!("{kind}_target").as_str()]) {
        Some((key, Node::Str(all))) if all == "all" => work.put(&key, &to, Node::Str("auto".into()), ""),
        Some((key, node)) => work.put(&key, &to, listed(&node), ""),
        None => work.implied(&to, Node::Str("auto".into()), "its default"),
    }
    if let Some((key, node)) = work.get(&["additional_target"]) {
        work.put(&key, &format!("tuning.{kind}.modules_to_save"), listed(&node), "");
    }
    existing(work);
}

fn lora(work: &mut Work) {
    adapter(work, "lora");
    let rank = if let Some(Node::Int(rank)) = work.written("tuning.lora.r") {
        *rank
    } else {
        work.implied("tuning.lora.r", Node::Int(8), "its default");
        8
    };
    if work.written("tuning.lora.lora_alpha").is_none() {
        work.implied("tuning.lora.lora_alpha", Node::Int(2 * rank), "twice the rank");
    }
    if work.is_on("pissa_init") {
        let start = match work.get(&["pissa_iter"]) {
            Some((_, Node::Int(-1))) => "pissa".to_owned(),
            Some((_, Node::Int(rounds))) => format!("pissa_niter_{rounds}"),
            _ => "pissa_niter_16".to_owned(),
        };
        work.put("pissa_init", "tuning.lora.init_lora_weights", Node::Str(start), "");
        if work.get(&["pissa_iter"]).is_some() {
            work.needless("pissa_iter", "in init_lora_weights");
        }
    }
}

fn existing(work: &mut Work) {
    if let Some((key, node)) = work.get(&["adapter_name_or_path"]) {
        let mut folders = match listed(&node) {
            Node::List(items) => items,
            other => vec![other],
        };
        let fresh = work.is_on("create_new_adapter");
        let last = if fresh { None } else { folders.pop() };
        if !folders.is_empty() {
            work.put(&key, "tuning.adapters", Node::List(folders), "");
        }
        if let Some(last) = last {
            work.put(&key, "tuning.adapter", last, "");
        }
    }
    if work.get(&["create_new_adapter"]).is_some() {
        work.needless("create_new_adapter", "tuning.adapters lie below a new one, tuning.adapter is gone on with");
    }
}

fn freeze(work: &mut Work) {
    match work.get(&["freeze_trainable_layers"]) {
        Some((key, node)) => work.put(&key, "tuning.freeze.trainable_layers", node, ""),
        None => work.implied("tuning.freeze.trainable_layers", Node::Int(2), "its default"),
    }
    match work.get(&["freeze_trainable_modules"]) {
        Some((key, Node::Str(all))) if all == "all" => work.needless(&key, "the whole blocks"),
        Some((key, node)) => work.put(&key, "tuning.freeze.trainable_modules", listed(&node), ""),
        None => {}
    }
    if let Some((key, node)) = work.get(&["freeze_extra_modules"]) {
        let Node::List(names) = listed(&node) else { return work.lost(&key, "expected names") };
        let pattern = |name: Node| match name {
            Node::Str(name) => Node::Str(format!(r"(.*\.)?{}(\..*)?", name.replace('.', r"\."))),
            other => other,
        };
        let patterns = names.into_iter().map(pattern).collect();
        work.put(&key, "tuning.freeze.trainable_patterns", Node::List(patterns), "a pattern for each name");
    }
}

/// Which tokens carry the loss, and packing.
fn objective(work: &mut Work, pretrains: bool) {
    if work.get(&["stage"]).is_some() {
        if pretrains {
            work.changed("stage", "data.loss_on: all", "raw text, every token is learned");
        } else {
            work.needless("stage", "that is what is done");
        }
    }
    if pretrains {
        work.implied("data.loss_on", Node::Str("all".into()), "stage: pt");
        work.implied("data.truncation", Node::Str("split".into()), "stage: pt lets long texts fill several blocks");
    }
    let learned = [("train_on_prompt", "all"), ("mask_history", "completion")];
    for (key, word) in learned {
        match work.get(&[key]) {
            Some((_, Node::Bool(true))) => work.put(key, "data.loss_on", Node::Str(word.into()), ""),
            Some(_) => work.needless(key, "off"),
            None => {}
        }
    }
    match (work.is_on("neat_packing"), work.get(&["packing"])) {
        (true, packing) => {
            work.put("neat_packing", "data.packing", Node::Bool(true), "");
            if packing.is_some() {
                work.needless("packing", "neat_packing packs");
            }
        }
        (false, Some((key, Node::Bool(true)))) => {
            work.put(&key, "data.packing", Node::Bool(true), "attention never crosses from row to row here");
        }
        (false, Some((key, node))) => work.put(&key, "data.packing", node, ""),
        (false, None) if pretrains => work.implied("data.packing", Node::Bool(true), "stage: pt packs"),
        (false, None) => {}
    }
    if let Some((key, Node::Bool(false))) = work.get(&["neat_packing"]) {
        work.needless(&key, "off");
    }
}

/// Defaults of LLaMA-Factory that differ from ours.
fn defaults(work: &mut Work) {
    if work.written("train.learning_rate").is_none() {
        work.implied("train.learning_rate", Node::Float(5e-5), "its default");
    }
    let checkpointing = ["gradient_checkpointing", "disable_gradient_checkpointing"];
    if work.get(&checkpointing).is_none() {
        work.implied(
            "train.gradient_checkpointing",
            Node::Bool(true),
            "its default; off is faster and takes more memory",
        );
    }
    if work.get(&["save_total_limit"]).is_none() {
        work.implied("train.save_total_limit", Node::Null, "every checkpoint is kept");
    }
}

/// Generation settings. Where answers to validation rows are generated, LLaMA-Factory's defaults differ from ours.
fn answers(work: &mut Work) {
    let predicts = work.written("train.predict_with_generate").is_some_and(|node| *node == Node::Bool(true));
    let settings = [
        ("max_new_tokens", "gen.max_new_tokens", Some(Node::Int(1024))),
        ("do_sample", "gen.do_sample", Some(Node::Bool(true))),
        ("temperature", "gen.temperature", Some(Node::Float(0.95))),
        ("top_p", "gen.top_p", Some(Node::Float(0.7))),
        ("top_k", "gen.top_k", None),
        ("num_beams", "gen.num_beams", None),
        ("repetition_penalty", "gen.repetition_penalty", None),
        ("length_penalty", "gen.length_penalty", None),
    ];
    let draws = match work.get(&["do_sample"]) {
        Some((_, node)) => !is_off(&node),
        None => predicts,
    };
    for (key, ours, default) in settings {
        let drawing = ["gen.temperature", "gen.top_p", "gen.top_k"].contains(&ours);
        match (work.get(&[key]), default) {
            (Some(_), _) if drawing && !draws => work.needless(key, "answers are greedy"),
            (Some((_, node)), _) => work.put(key, ours, node, ""),
            (None, Some(default)) if predicts && (draws || !drawing) => work.implied(ours, default, "its default"),
            (None, _) => {}
        }
    }
}
