//! Axolotl's configurations, as of version 0.18.
mod others;
mod rows;

use super::work::Act::{Lost, Needless, To, ToBut, Together, With};
use super::work::{Rule, Work, is_off};
use super::{names, ranks};
pub(super) use others::OTHERS;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Node;

const ATTENTION: &str = "there is one attention here, exact and fused";
const KERNEL: &str = "kernels are chosen by the processor";
const REACHED: &str = "every trained value takes part in each reduction, used or not";
const TRACKER: &str =
    "Weights & Biases, MLflow and Comet are not yet part of this version; TensorBoard and report.html are written";
const NO_LOADER: &str = "rows are tokenized before training, there is no data loader";
const UPLOAD: &str = "a run uploads nothing; `tunesmith export --push` does";
const TRUNCATION: &str = "data.truncation";
const CACHE: &str = "tokens are cached by content, in data.cache_dir";

macro_rules! rules {
    ($($key:literal => $act:expr,)*) => { &[$(Rule { key: $key, act: $act }),*] };
}

/// Every key of Axolotl that this import knows; rarer ones are in [`OTHERS`].
pub(super) const RULES: &[Rule] = rules! {
    "base_model" => To("model.name"),
    "base_model_config" => Lost("the model's own config.json counts"),
    "base_model_ignore_patterns" => Needless("only the files that are needed are fetched"),
    "revision_of_model" => To("model.revision"),
    "model_type" => Needless("the family is told by config.json"),
    "tokenizer_type" => Needless("the tokenizer is told by its files"),
    "tokenizer_config" => Lost("the tokenizer comes from the model's folder"),
    "tokenizer_use_fast" => Needless("there is one tokenizer"),
    "tokenizer_legacy" => Needless("tokenizer.json says how"),
    "is_llama_derived_model" => Needless("the family is told by config.json"),
    "is_mistral_derived_model" => Needless("the family is told by config.json"),
    "is_falcon_derived_model" => Lost("Falcon is not supported"),
    "trust_remote_code" => With(|work, key, node| match node {
        Node::Bool(true) => work.changed(key, "", "code that comes with a model is never run"),
        _ => work.needless(key, "off"),
    }),
    "overrides_of_model_config" => Lost("the model's own config.json counts"),
    "rope_scaling" => Lost("the model's own config.json says how"),
    "torch_dtype" => To("model.dtype"),
    "low_cpu_mem_usage" => Needless("weights are mapped, not copied"),
    "reinit_weights" => With(|work, key, node| match node {
        Node::Bool(true) => work.put(key, "model.init", Node::Str("random".into()), "drawn afresh"),
        _ => work.needless(key, "off"),
    }),
    "load_in_8bit" => Together,
    "load_in_4bit" => Together,
    "bnb_config_kwargs" => Together,
    "gptq" => Lost("a base that GPTQ has quantized is not yet part of this version"),
    "adapter" => Together,
    "lora_model_dir" => To("tuning.adapter"),
    "lora_r" => To("tuning.lora.r"),
    "lora_alpha" => To("tuning.lora.lora_alpha"),
    "lora_dropout" => To("tuning.lora.lora_dropout"),
    "lora_target_modules" => Together,
    "lora_target_linear" => Together,
    "lora_target_parameters" => To("tuning.lora.target_parameters"),
    "lora_modules_to_save" => To("tuning.lora.modules_to_save"),
    "lora_fan_in_fan_out" => Lost("no supported family stores its weights transposed"),
    "lora_on_cpu" => Needless("adapters are made where the model is"),
    "lora_mlp_kernel" => Needless(KERNEL),
    "lora_qkv_kernel" => Needless(KERNEL),
    "lora_o_kernel" => Needless(KERNEL),
    "lora_embedding_kernel" => Needless(KERNEL),
    "lora_rank_pattern" => To("tuning.lora.rank_pattern"),
    "lora_alpha_pattern" => To("tuning.lora.alpha_pattern"),
    "peft_use_dora" => To("tuning.lora.use_dora"),
    "peft_use_rslora" => To("tuning.lora.use_rslora"),
    "peft_ensure_weight_tying" => To("tuning.lora.ensure_weight_tying"),
    "peft_layers_to_transform" => To("tuning.lora.layers_to_transform"),
    "peft_layer_replication" => Lost("layers are not repeated"),
    "peft_init_lora_weights" => To("tuning.lora.init_lora_weights"),
    "peft" => Together,
    "loraplus_lr_ratio" => To("tuning.lora.loraplus_lr_ratio"),
    "loraplus_lr_embedding" => Lost("embeddings get no adapters; train.learning_rates sets the rate of those in modules_to_save"),
    "relora" => Lost("ReLoRA is not part of this version"),
    "relora_steps" => Lost("ReLoRA is not part of this version"),
    "relora_warmup_steps" => Lost("ReLoRA is not part of this version"),
    "relora_cpu_offload" => Lost("ReLoRA is not part of this version"),
    "merge_lora" => Lost("a step of its own: `tunesmith merge`"),
    "unfrozen_parameters" => Together,
    "special_tokens" => With(special_tokens),
    "tokens" => With(|work, key, node| match node {
        // An older form of special_tokens.
        Node::Map(_) => special_tokens(work, key, node),
        node => work.put(key, "tuning.new_tokens", node.clone(), ""),
    }),
    "mean_resizing_embeddings" => With(|work, key, node| match node {
        Node::Bool(true) => work.needless(key, "new rows start as the mean"),
        _ => work.changed(key, "", "new rows start as the mean of all rows"),
    }),
    "added_tokens_overrides" => Lost("reserved tokens cannot be renamed"),
    "resize_token_embeddings_to_32x" => Needless("the embedding grows by what is added"),
    "shrink_embeddings" => Lost("the embedding never shrinks"),
    "datasets" => Together,
    "test_datasets" => Together,
    "pretraining_dataset" => Together,
    "max_packed_sequence_len" => Lost("removed from Axolotl too; see sample_packing"),
    "generate_samples" => Together,
    "num_generation_samples" => Together,
    "generation_max_new_tokens" => Together,
    "generation_temperature" => Together,
    "generation_top_p" => Together,
    "generation_top_k" => Together,
    "generation_do_sample" => Together,
    "shuffle_merged_datasets" => To("data.shuffle"),
    "dataset_prepared_path" => Needless(CACHE),
    "push_dataset_to_hub" => Lost(UPLOAD),
    "dataset_processes" => To("data.num_proc"),
    "dataset_num_proc" => To("data.num_proc"),
    "curriculum_sampling" => With(|work, key, node| match node {
        Node::Bool(true) => work.put(key, "data.shuffle", Node::Bool(false), "the order of the files"),
        _ => work.needless(key, "off"),
    }),
    "dataset_keep_in_memory" => Needless("rows are read from disk as they are needed"),
    "dataset_shard_num" => Together,
    "dataset_shard_idx" => Together,
    "dataset_exact_deduplication" => With(|work, key, node| match node {
        Node::Bool(true) => work.put(key, "data.dedupe", Node::Str("exact".into()), ""),
        _ => work.needless(key, "off"),
    }),
    "skip_prepare_dataset" => Lost("rows are always prepared"),
    "streaming" => Needless("every set is streamed from disk"),
    "val_set_size" => Together,
    "sequence_len" => To("model.max_seq_len"),
    "eval_sequence_len" => Lost("validation has the same limit as training"),
    "excess_length_strategy" => Together,
    "min_sample_len" => To("data.min_length"),
    "pad_to_sequence_len" => Needless("there is no padding"),
    "sample_packing" => To("data.packing"),
    "eval_sample_packing" => Needless("validation has no padding either way"),
    "sample_packing_eff_est" => Needless("packing is counted, not estimated"),
    "sample_packing_group_size" => Needless("packing sees every row"),
    "sample_packing_bin_size" => Needless("packing sees every row"),
    "sample_packing_sequentially" => Needless("packing is the same in every run of one seed"),
    "total_num_tokens" => Needless("tokens are counted"),
    "multipack_real_batches" => Needless("there is no padding"),
    "group_by_length" => To("train.group_by_length"),
    "train_on_inputs" => Together,
    "roles_to_train" => Lost("set data.loss_on, or `train: false` in a message"),
    "chat_template" => With(|work, key, node| match node {
        Node::Str(word) if word == "jinja" => work.needless(key, "chat_template_jinja says which"),
        Node::Str(word) if word.starts_with("tokenizer_default_fallback_") => {
            work.changed(key, "", "the tokenizer's own template; there is no fallback");
        }
        node => names::template(work, key, node),
    }),
    "chat_template_jinja" => With(|work, key, node| match node {
        Node::Str(text) if text.contains("{%") => work.lost(key, "save it in a file and set data.template_path"),
        node => work.put(key, "data.template_path", node.clone(), ""),
    }),
    "default_system_message" => Lost("put a system message into the rows, or use another template"),
    "micro_batch_size" => To("train.batch_size"),
    "eval_batch_size" => To("train.eval_batch_size"),
    "batch_size" => Together,
    "gradient_accumulation_steps" => To("train.grad_accum"),
    "auto_find_batch_size" => Lost("set train.batch_size: auto, which measures before step 1"),
    "num_epochs" => To("train.num_train_epochs"),
    "max_steps" => To("train.max_steps"),
    "optimizer" => With(names::optimizer),
    "optim_args" => To("train.optim_args"),
    "optim_target_modules" => Lost("GaLore is not part of this version"),
    "learning_rate" => To("train.learning_rate"),
    "embedding_lr" => Together,
    "embedding_lr_scale" => Together,
    "lr_groups" => Together,
    "lr_scheduler" => Together,
    "lr_scheduler_kwargs" => To("train.lr_scheduler_kwargs"),
    "lr_quadratic_warmup" => Lost("a warm-up is a line"),
    "cosine_min_lr_ratio" => Together,
    "cosine_constant_lr_ratio" => Lost("use lr_scheduler_type: warmup_stable_decay"),
    "warmup_steps" => Together,
    "warmup_ratio" => Together,
    "weight_decay" => To("train.weight_decay"),
    "adam_beta1" => To("train.adam_beta1"),
    "adam_beta2" => To("train.adam_beta2"),
    "adam_epsilon" => To("train.adam_epsilon"),
    "max_grad_norm" => To("train.max_grad_norm"),
    "neftune_noise_alpha" => To("train.neftune_noise_alpha"),
    "noisy_embedding_alpha" => To("train.neftune_noise_alpha"),
    "label_smoothing_factor" => To("train.label_smoothing_factor"),
    "gradient_checkpointing" => With(|work, key, node| match node {
        Node::Str(_) => work.put(key, "train.gradient_checkpointing", Node::Bool(true), "there is one way to do it"),
        node => work.put(key, "train.gradient_checkpointing", node.clone(), ""),
    }),
    "gradient_checkpointing_kwargs" => Needless("there is one way to do it"),
    "activation_offloading" => Lost("activations stay in memory"),
    "bf16" => With(|work, key, node| match node {
        Node::Bool(_) => work.put(key, "train.bf16", node.clone(), ""),
        Node::Str(word) if word == "auto" || word == "full" => {
            work.put(key, "train.bf16", Node::Bool(true), "every processor can do it here");
        }
        _ => work.lost(key, "expected true, false or auto"),
    }),
    "bfloat16" => To("train.bf16"),
    "fp16" => Together,
    "float16" => Together,
    "fp8" => Lost("fp8 is not part of this version; products are computed in float32"),
    "tf32" => Needless("products are computed in float32"),
    "flash_attention" => Needless(ATTENTION),
    "flash_attn_cross_entropy" => Needless(KERNEL),
    "flash_attn_rms_norm" => Needless(KERNEL),
    "flash_attn_fuse_qkv" => Needless(KERNEL),
    "flash_attn_fuse_mlp" => Needless(KERNEL),
    "xformers_attention" => Needless(ATTENTION),
    "sdp_attention" => Needless(ATTENTION),
    "eager_attention" => Needless(ATTENTION),
    "flex_attention" => Needless(ATTENTION),
    "attn_implementation" => Needless(ATTENTION),
    "s2_attention" => Lost("shifted sparse attention is not part of this version"),
    "unsloth_lora_mlp" => Needless(KERNEL),
    "unsloth_lora_qkv" => Needless(KERNEL),
    "unsloth_lora_o" => Needless(KERNEL),
    "unsloth_cross_entropy_loss" => Needless(KERNEL),
    "liger_rope" => Needless(KERNEL),
    "liger_rms_norm" => Needless(KERNEL),
    "liger_glu_activation" => Needless(KERNEL),
    "liger_layer_norm" => Needless(KERNEL),
    "liger_fused_linear_cross_entropy" => Needless(KERNEL),
    "plugins" => Lost("there are no plugins"),
    "torch_compile" => Needless("there is nothing to compile"),
    "torch_compile_backend" => Needless("there is nothing to compile"),
    "deepspeed" => With(ranks::deepspeed),
    "fsdp" => Together,
    "fsdp_config" => Together,
    "fsdp_version" => Together,
    "fsdp_final_state_dict_type" => Together,
    "dp_shard_size" => With(shards),
    "dp_replicate_size" => Together,
    "ddp" => Needless(ranks::DDP),
    "ddp_timeout" => To("train.ddp_timeout"),
    "ddp_bucket_cap_mb" => To("train.ddp_bucket_cap_mb"),
    "ddp_broadcast_buffers" => Needless("models have no buffers that training changes"),
    "ddp_find_unused_parameters" => Needless(REACHED),
    "context_parallel_size" => With(split),
    "sequence_parallel_degree" => With(split),
    "tensor_parallel_size" => With(split),
    "expert_parallel_size" => With(split),
    "local_rank" => Needless(ranks::LAUNCHED),
    "device_map" => Needless("the model is computed on the CPU"),
    "device" => Needless("the model is computed on the CPU"),
    "gpu_memory_limit" => Needless("no graphics processor is used in this version"),
    "dataloader_num_workers" => Needless(NO_LOADER),
    "dataloader_pin_memory" => Needless(NO_LOADER),
    "dataloader_prefetch_factor" => Needless(NO_LOADER),
    "dataloader_drop_last" => Lost("the last, smaller batch of an epoch is always kept"),
    "output_dir" => To("train.output_dir"),
    "logging_steps" => To("train.logging_steps"),
    "saves_per_epoch" => Together,
    "save_strategy" => Together,
    "save_steps" => Together,
    "save_total_limit" => To("train.save_total_limit"),
    "save_safetensors" => Needless("everything is saved as safetensors"),
    "save_only_model" => With(|work, key, _| work.changed(key, "", "a checkpoint holds all that an exact resume needs")),
    "eval_strategy" => Together,
    "evaluation_strategy" => Together,
    "eval_steps" => Together,
    "evals_per_epoch" => Together,
    "eval_table_size" => Lost("set gen.num_samples: answers before and after stand in the report"),
    "eval_max_new_tokens" => To("train.generation_max_new_tokens"),
    "do_causal_lm_eval" => Together,
    "eval_causal_lm_metrics" => Together,
    "load_best_model_at_end" => Together,
    "early_stopping_patience" => Together,
    "metric_for_best_model" => To("train.metric_for_best_model"),
    "greater_is_better" => To("train.greater_is_better"),
    "resume_from_checkpoint" => To("train.resume_from_checkpoint"),
    "auto_resume_from_checkpoints" => Lost("say --resume when you go on"),
    "seed" => To("train.seed"),
    "use_tensorboard" => To("logging.tensorboard"),
    "hub_model_id" => Lost(UPLOAD),
    "hub_strategy" => Lost(UPLOAD),
    "hf_use_auth_token" => Needless("the hub's token is taken from HF_TOKEN"),
    "use_wandb" => Lost(TRACKER),
    "wandb_mode" => Lost(TRACKER),
    "wandb_project" => Lost(TRACKER),
    "wandb_entity" => Lost(TRACKER),
    "wandb_watch" => Lost(TRACKER),
    "wandb_name" => ToBut("logging.run_name", "the run's name, in TensorBoard and the report"),
    "wandb_run_id" => Lost(TRACKER),
    "wandb_log_model" => Lost(TRACKER),
    "mlflow_tracking_uri" => Lost(TRACKER),
    "mlflow_experiment_name" => Lost(TRACKER),
    "comet_project_name" => Lost(TRACKER),
    "use_comet" => Lost(TRACKER),
    "profiler_steps" => Lost("see `tunesmith bench`"),
    "loss_watchdog_threshold" => Lost("steps with NaN or infinity are skipped: train.max_nonfinite_steps"),
    "loss_watchdog_patience" => Lost("steps with NaN or infinity are skipped: train.max_nonfinite_steps"),
    "strict" => Needless("unknown keys are always refused"),
    "debug" => Needless("see `tunesmith data`"),
    "rl" => Together,
    "reward_model" => Together,
    "process_reward_model" => Together,
};

/// Imports a whole configuration.
pub(super) fn read(work: &mut Work) -> Result<()> {
    for key in ["rl", "reward_model", "process_reward_model"] {
        match work.get(&[key]) {
            Some((_, Node::Bool(false))) => work.needless(key, "off"),
            Some((_, node)) => {
                return Err(Error::config(format!(
                    "{}: {key}: found {}: this is no supervised fine-tuning",
                    work.path.display(),
                    node.describe()
                ))
                .hint(
                    "preference data would be learned as if all of it were right; tunesmith has no such training yet",
                ));
            }
            None => {}
        }
    }
    if work.get(&["base_model"]).is_none() {
        return Err(Error::config(format!("{}: base_model is not set: this trains nothing", work.path.display()))
            .hint("is it a configuration of Axolotl's training?"));
    }
    work.follow();
    mode(work);
    precision(work);
    let kinds = rows::sets(work);
    let splits = names::validation(work, "val_set_size");
    let validates = splits || work.written("data.val_path").is_some();
    lengths(work, &kinds);
    batches(work);
    schedule(work);
    names::moments(work, "no", "epoch", validates);
    moments(work, validates);
    others::rates(work);
    others::answers(work, validates);
    ranks::fsdp(work, true);
    Ok(())
}

fn special_tokens(work: &mut Work, key: &str, node: &Node) {
    let Node::Map(tokens) = node else { return work.lost(key, "expected a mapping") };
    let others: Vec<&str> = tokens.iter().map(|(name, _)| name.as_str()).filter(|name| *name != "pad_token").collect();
    if others.is_empty() {
        work.needless(key, "there is no padding");
    } else {
        work.lost(key, &format!("{}: the tokenizer's own tokens are used", others.join(", ")));
    }
}

/// A degree of parallelism; 1 asks for nothing.
fn split(work: &mut Work, key: &str, node: &Node) {
    if is_off(node) || *node == Node::Int(1) {
        work.needless(key, "off");
    } else {
        work.lost(key, ranks::SPLIT);
    }
}

fn shards(work: &mut Work, key: &str, node: &Node) {
    match node {
        Node::Int(ranks) if *ranks > 1 => {
            work.changed(key, "", &format!("as many ranks as are started: `tunesmith launch --nproc {ranks}`"));
        }
        _ => work.needless(key, "off"),
    }
}

/// The training mode (`adapter`), and the precision of the base model.
fn mode(work: &mut Work) {
    let quantized = work.is_on("load_in_4bit");
    let mode = |work: &mut Work, word: &str, why: &str| match work.get(&["adapter"]) {
        Some((key, _)) => work.put(&key, "tuning.mode", Node::Str(word.into()), why),
        None => work.implied("tuning.mode", Node::Str(word.into()), "no adapter: every weight is trained"),
    };
    match (work.word("adapter").as_deref(), work.get(&["unfrozen_parameters"])) {
        (Some("lora"), _) if quantized => mode(work, "qlora", "adapter: lora with load_in_4bit"),
        (Some(word), _) => mode(work, word, ""),
        (None, Some((key, patterns))) => {
            work.implied("tuning.mode", Node::Str("freeze".into()), "unfrozen_parameters is given");
            let slices = matches!(&patterns, Node::List(items)
                if items.iter().any(|item| matches!(item, Node::Str(text) if text.ends_with(']') && text.contains(':'))));
            if slices {
                work.lost(&key, "ranges of rows, as in name[:100], are not part of this version");
            } else {
                work.put(&key, "tuning.freeze.trainable_patterns", patterns, "");
            }
        }
        (None, None) => mode(work, "full", ""),
    }
    match (work.get(&["load_in_4bit"]), work.word("adapter")) {
        (Some((key, Node::Bool(true))), Some(_)) => work.needless(&key, "mode: qlora says so"),
        (Some((key, Node::Bool(true))), None) => work.put(&key, "model.quantization", Node::Str("nf4".into()), ""),
        (Some((key, _)), _) => work.needless(&key, "off"),
        (None, _) => {}
    }
    match work.get(&["load_in_8bit"]) {
        Some((key, Node::Bool(true))) => work.put(&key, "model.quantization", Node::Str("int8".into()), ""),
        Some((key, _)) => work.needless(&key, "off"),
        None => {}
    }
    others::quantization(work);
    match (work.is_on("lora_target_linear"), work.get(&["lora_target_modules"])) {
        (true, modules) => {
            work.put("lora_target_linear", "tuning.lora.target_modules", Node::Str("auto".into()), "");
            if let Some((key, _)) = modules {
                work.needless(&key, "lora_target_linear takes them all");
            }
        }
        (false, Some((key, modules))) => work.put(&key, "tuning.lora.target_modules", modules, ""),
        (false, None) => {}
    }
    if let Some((key, Node::Bool(false))) = work.get(&["lora_target_linear"]) {
        work.needless(&key, "off");
    }
}

/// Compute precision. Axolotl's default is `bf16: auto`, unless `fp16` is asked for.
fn precision(work: &mut Work) {
    let bf16 = work.get(&["bf16"]);
    let auto = matches!(&bf16, Some((_, Node::Str(word))) if word == "auto");
    let bfloat = work.is_on("bfloat16") || (bf16.is_some() && !auto && !matches!(bf16, Some((_, Node::Bool(false)))));
    let mut half = false;
    for key in ["fp16", "float16"] {
        match work.get(&[key]) {
            Some((_, Node::Bool(true))) if bfloat => work.needless(key, "bfloat16 wins"),
            Some((_, Node::Bool(true))) => {
                half = true;
                work.put(key, "train.fp16", Node::Bool(true), "");
                if auto {
                    work.put("bf16", "train.bf16", Node::Bool(false), "float16 is asked for");
                }
            }
            Some(_) => work.needless(key, "off"),
            None => {}
        }
    }
    let other = ["bf16", "bfloat16", "float32"].iter().any(|key| work.get(&[key]).is_some());
    if !half && !other {
        work.implied("train.bf16", Node::Bool(true), "bf16: auto is its default");
    }
}

fn lengths(work: &mut Work, kinds: &rows::Kinds) {
    let excess = work.get(&["excess_length_strategy"]);
    if kinds.text {
        let why = match (&excess, kinds.others) {
            (_, false) => "raw text is cut into pieces of sequence_len",
            (Some((_, Node::Str(word))), true) if word == "truncate" => {
                "raw text is cut into pieces of sequence_len, of other rows the end is cut off"
            }
            (_, true) => {
                "raw text is cut into pieces of sequence_len; other rows that are too long are left out there, here their end is cut off"
            }
        };
        match excess {
            Some((key, _)) => work.put(&key, TRUNCATION, Node::Str("split".into()), why),
            None => work.implied(TRUNCATION, Node::Str("split".into()), why),
        }
    } else {
        match excess {
            Some((key, Node::Str(word))) if word == "raise" => {
                work.put(&key, TRUNCATION, Node::Str("drop".into()), "left out and counted, not refused");
            }
            Some((key, Node::Str(word))) if word == "truncate" => {
                work.put(&key, TRUNCATION, Node::Str("right".into()), "");
            }
            Some((key, node)) => work.put(&key, TRUNCATION, node, ""),
            None => work.implied(TRUNCATION, Node::Str("drop".into()), "rows that are too long are left out"),
        }
    }
    if work.written("model.max_seq_len").is_none() {
        work.implied("model.max_seq_len", Node::Int(512), "its default");
    }
    match work.get(&["train_on_inputs"]) {
        Some((key, Node::Bool(true))) => work.put(&key, "data.loss_on", Node::Str("all".into()), ""),
        Some((key, _)) => work.put(&key, "data.loss_on", Node::Str("assistant".into()), ""),
        None => {}
    }
}

fn batches(work: &mut Work) {
    if let Some((key, whole)) = work.get(&["batch_size"]) {
        let micro = work.written("train.batch_size").cloned();
        match (whole, micro) {
            (Node::Int(whole), Some(Node::Int(micro))) if micro > 0 && whole % micro == 0 => {
                work.put(&key, "train.grad_accum", Node::Int(whole / micro), "the whole batch, in micro-batches");
            }
            _ => work.lost(&key, "the whole batch: set train.batch_size and train.grad_accum"),
        }
    }
    let micro = work.written("train.batch_size").cloned().unwrap_or_else(|| {
        work.implied("train.batch_size", Node::Int(1), "its default");
        Node::Int(1)
    });
    if work.written("train.eval_batch_size").is_none() {
        work.implied("train.eval_batch_size", micro, "micro_batch_size");
    }
    if work.written("train.num_train_epochs").is_none() && work.written("train.max_steps").is_none() {
        work.implied("train.num_train_epochs", Node::Int(1), "its default");
    }
}

fn schedule(work: &mut Work) {
    let floor = work.get(&["cosine_min_lr_ratio"]);
    names::schedule(work, "cosine");
    let name = match work.written("train.lr_scheduler_type") {
        Some(Node::Str(name)) => name.clone(),
        _ => String::new(),
    };
    if let Some((key, rate)) = floor {
        if name == "cosine" {
            let why = "with cosine_min_lr_ratio, the cosine ends there";
            match work.get(&["lr_scheduler"]) {
                Some((from, _)) => {
                    work.put(&from, "train.lr_scheduler_type", Node::Str("cosine_with_min_lr".into()), why);
                }
                None => work.implied("train.lr_scheduler_type", Node::Str("cosine_with_min_lr".into()), why),
            }
            work.put(&key, "train.lr_scheduler_kwargs", Node::Map(vec![("min_lr_rate".into(), rate)]), "");
        } else if name == "rex" {
            work.put(&key, "train.lr_scheduler_kwargs", Node::Map(vec![("min_lr_rate".into(), rate)]), "");
        } else {
            work.needless(&key, "it belongs to the schedules `cosine` and `rex`");
        }
    }
    if work.get(&["warmup_steps", "warmup_ratio"]).is_none() && name != "constant" {
        work.implied("train.warmup_ratio", Node::Float(0.03), "its default, there with at most 100 steps");
    }
}

fn moments(work: &mut Work, validates: bool) {
    for (key, ours) in [("saves_per_epoch", "train.save_strategy"), ("evals_per_epoch", "train.eval_strategy")] {
        let Some((_, node)) = work.get(&[key]) else { continue };
        match node {
            Node::Int(0) => work.put(key, ours, Node::Str("no".into()), ""),
            _ if ours == "train.eval_strategy" && !validates => work.needless(key, "there are no validation rows"),
            Node::Int(1) => work.put(key, ours, Node::Str("epoch".into()), ""),
            _ => work.put(key, ours, Node::Str("epoch".into()), "once an epoch; for more, set the strategy to steps"),
        }
    }
    if work.written("train.save_total_limit").is_none() {
        work.implied("train.save_total_limit", Node::Int(4), "its default");
    }
    match work.get(&["early_stopping_patience"]) {
        Some((key, _)) if !validates => work.changed(&key, "", "there are no validation rows"),
        Some((key, node)) => work.put(&key, "train.early_stopping_patience", node, ""),
        None => {}
    }
}
