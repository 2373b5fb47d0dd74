//! The table of Axolotl's keys: for each, our key or the function that imports it, or why it is not needed or not supported.
use crate::import::{Import, Rules, is_off_or_zero};
use crate::names::{NO_LOADER, PIXELS, PREFERENCES, REACHED, UPLOAD};
use crate::{names, ranks};
use tunesmith_config::foreign::rules::Action::{NotNeeded, To, ToBut, Together, Unsupported, With};
use tunesmith_config::{Node, rules};

const ATTENTION: &str = "there is one attention here, exact and fused";
const KERNEL: &str = "kernels are chosen for the processor";
const TRACKER: &str =
    "Weights & Biases, MLflow and Comet are not yet part of this version; TensorBoard and report.html are written";
const CACHE: &str = "tokens are cached by content, in data.cache_dir";
const WIDE: &str = "products are computed in float32, and trained weights are kept in it";
const PADDING: &str = "there is no padding; packing sees every row";

/// Every key that this import knows.
pub(crate) const RULES: Rules = rules! {
    "base_model" => To("model.name"),
    "base_model_config" => Unsupported("the model's own config.json counts"),
    "base_model_ignore_patterns" => NotNeeded("only the files that are needed are fetched"),
    "revision_of_model" => To("model.revision"),
    "model_type" => NotNeeded("config.json names the family"),
    "tokenizer_type" => NotNeeded("the tokenizer's files describe it"),
    "tokenizer_config" => Unsupported("the tokenizer comes from the model's folder"),
    "tokenizer_use_fast" => NotNeeded("there is one tokenizer"),
    "tokenizer_legacy" => NotNeeded("tokenizer.json says how"),
    "is_llama_derived_model" | "is_mistral_derived_model" => NotNeeded("config.json names the family"),
    "is_falcon_derived_model" => Unsupported("Falcon is not supported"),
    "trust_remote_code" => With(names::trust_remote_code),
    "overrides_of_model_config" => Unsupported("the model's own config.json counts"),
    "rope_scaling" => Unsupported("the model's own config.json says how"),
    "torch_dtype" => To("model.dtype"),
    "low_cpu_mem_usage" => NotNeeded("weights are mapped, not copied"),
    "reinit_weights" => With(|import, key, node| match node {
        Node::Bool(true) => import.put(key, "model.init", Node::Str("random".into()), "random weights"),
        _ => import.not_needed(key, "off"),
    }),
    "load_in_8bit" | "load_in_4bit" | "bnb_config_kwargs" => Together,
    "gptq" => Unsupported("a base that GPTQ has quantized is not yet part of this version"),
    "adapter" => Together,
    "lora_model_dir" => To("tuning.adapter"),
    "lora_r" => To("tuning.lora.r"),
    "lora_alpha" => To("tuning.lora.lora_alpha"),
    "lora_dropout" => To("tuning.lora.lora_dropout"),
    "lora_target_modules" | "lora_target_linear" => Together,
    "lora_target_parameters" => To("tuning.lora.target_parameters"),
    "lora_modules_to_save" => To("tuning.lora.modules_to_save"),
    "lora_fan_in_fan_out" => NotNeeded("it follows from the model's family"),
    "lora_on_cpu" => NotNeeded("adapters are made where the model is"),
    "lora_mlp_kernel" | "lora_qkv_kernel" | "lora_o_kernel" | "lora_embedding_kernel" => NotNeeded(KERNEL),
    "lora_rank_pattern" => To("tuning.lora.rank_pattern"),
    "lora_alpha_pattern" => To("tuning.lora.alpha_pattern"),
    "peft_use_dora" => To("tuning.lora.use_dora"),
    "peft_use_rslora" => To("tuning.lora.use_rslora"),
    "peft_ensure_weight_tying" => To("tuning.lora.ensure_weight_tying"),
    "peft_layers_to_transform" => To("tuning.lora.layers_to_transform"),
    "peft_layer_replication" => Unsupported("layers are not repeated"),
    "peft_init_lora_weights" => To("tuning.lora.init_lora_weights"),
    "peft" => Together,
    "loraplus_lr_ratio" => To("tuning.lora.loraplus_lr_ratio"),
    "loraplus_lr_embedding" => Unsupported("embeddings get no adapters; train.learning_rates sets the rate of those in modules_to_save"),
    "relora" | "relora_steps" | "relora_warmup_steps" | "relora_cpu_offload" => Unsupported("ReLoRA is not part of this version"),
    "merge_lora" => Unsupported("a step of its own: `tunesmith merge`"),
    "unfrozen_parameters" => Together,
    "special_tokens" => With(special_tokens),
    "tokens" => With(|import, key, node| match node {
        // The older form, in which `tokens` is a mapping like `special_tokens`.
        Node::Map(_) => special_tokens(import, key, node),
        node => import.put(key, "tuning.new_tokens", node.clone(), ""),
    }),
    "mean_resizing_embeddings" => With(|import, key, node| match node {
        Node::Bool(true) => import.not_needed(key, "new rows start as the mean"),
        _ => import.changed(key, "", "new rows start as the mean of all rows"),
    }),
    "added_tokens_overrides" => Unsupported("reserved tokens cannot be renamed"),
    "resize_token_embeddings_to_32x" => NotNeeded("the embedding grows by what is added"),
    "shrink_embeddings" => Unsupported("the embedding never shrinks"),
    "datasets" | "test_datasets" | "pretraining_dataset" => Together,
    "max_packed_sequence_len" => Unsupported("removed from Axolotl too; see sample_packing"),
    "generate_samples" | "num_generation_samples" | "generation_max_new_tokens" | "generation_temperature"
    | "generation_top_p" | "generation_top_k" | "generation_do_sample" => Together,
    "shuffle_merged_datasets" => To("data.shuffle"),
    "dataset_prepared_path" => NotNeeded(CACHE),
    "push_dataset_to_hub" => Unsupported(UPLOAD),
    "dataset_processes" | "dataset_num_proc" => To("data.num_proc"),
    "curriculum_sampling" => With(|import, key, node| match node {
        Node::Bool(true) => import.put(key, "data.shuffle", Node::Bool(false), "the order of the files"),
        _ => import.not_needed(key, "off"),
    }),
    "dataset_keep_in_memory" => NotNeeded("rows are read from disk as they are needed"),
    "dataset_shard_num" | "dataset_shard_idx" => Together,
    "dataset_exact_deduplication" => With(|import, key, node| match node {
        Node::Bool(true) => import.put(key, "data.dedupe", Node::Str("exact".into()), ""),
        _ => import.not_needed(key, "off"),
    }),
    "skip_prepare_dataset" => Unsupported("rows are always prepared"),
    "streaming" => NotNeeded("every set is streamed from disk"),
    "val_set_size" => Together,
    "sequence_len" => To("model.max_seq_len"),
    "eval_sequence_len" => Unsupported("validation has the same limit as training"),
    "excess_length_strategy" => Together,
    "min_sample_len" => To("data.min_length"),
    "pad_to_sequence_len" => NotNeeded("there is no padding"),
    "sample_packing" => To("data.packing"),
    "eval_sample_packing" => NotNeeded("validation has no padding either way"),
    "sample_packing_eff_est" => NotNeeded("packing is counted, not estimated"),
    "sample_packing_group_size" | "sample_packing_bin_size" => NotNeeded("packing sees every row"),
    "sample_packing_sequentially" => NotNeeded("packing is the same in every run of one seed"),
    "total_num_tokens" => NotNeeded("tokens are counted"),
    "multipack_real_batches" => NotNeeded("there is no padding"),
    "group_by_length" => To("train.group_by_length"),
    "train_on_inputs" => Together,
    "roles_to_train" => Unsupported("set data.loss_on, or `train: false` in a message"),
    "chat_template" => With(|import, key, node| match node {
        Node::Str(word) if word == "jinja" => import.not_needed(key, "chat_template_jinja says which"),
        Node::Str(word) if word.starts_with("tokenizer_default_fallback_") => {
            import.changed(key, "", "the tokenizer's own template; there is no fallback");
        }
        node => names::template(import, key, node),
    }),
    "chat_template_jinja" => With(|import, key, node| match node {
        Node::Str(text) if text.contains("{%") => import.unsupported(key, "save it in a file and set data.template_path"),
        node => import.put(key, "data.template_path", node.clone(), ""),
    }),
    "default_system_message" => Unsupported("put a system message into the rows, or use another template"),
    "micro_batch_size" => To("train.batch_size"),
    "eval_batch_size" => To("train.eval_batch_size"),
    "batch_size" => Together,
    "gradient_accumulation_steps" => To("train.grad_accum"),
    "auto_find_batch_size" => Unsupported("set train.batch_size: auto, which measures before step 1"),
    "num_epochs" => To("train.num_train_epochs"),
    "max_steps" => To("train.max_steps"),
    "optimizer" => With(names::optimizer),
    "optim_args" => To("train.optim_args"),
    "optim_target_modules" => Unsupported("GaLore is not part of this version"),
    "learning_rate" => To("train.learning_rate"),
    "embedding_lr" | "embedding_lr_scale" | "lr_groups" | "lr_scheduler" => Together,
    "lr_scheduler_kwargs" => To("train.lr_scheduler_kwargs"),
    "lr_quadratic_warmup" => Unsupported("a warm-up is a line"),
    "cosine_min_lr_ratio" => Together,
    "cosine_constant_lr_ratio" => Unsupported("use lr_scheduler_type: warmup_stable_decay"),
    "warmup_steps" | "warmup_ratio" => Together,
    "weight_decay" => To("train.weight_decay"),
    "adam_beta1" => To("train.adam_beta1"),
    "adam_beta2" => To("train.adam_beta2"),
    "adam_epsilon" => To("train.adam_epsilon"),
    "max_grad_norm" => To("train.max_grad_norm"),
    "neftune_noise_alpha" | "noisy_embedding_alpha" => To("train.neftune_noise_alpha"),
    "label_smoothing_factor" => To("train.label_smoothing_factor"),
    "gradient_checkpointing" => With(|import, key, node| match node {
        Node::Str(_) => import.put(key, "train.gradient_checkpointing", Node::Bool(true), "there is one way to do it"),
        node => import.put(key, "train.gradient_checkpointing", node.clone(), ""),
    }),
    "gradient_checkpointing_kwargs" => NotNeeded("there is one way to do it"),
    "activation_offloading" => With(|import, key, node| match node {
        Node::Str(word) if word == "disk" => import.unsupported(key, "activations go to main memory, not to disk"),
        Node::Str(_) => import.put(key, "train.activation_offloading", Node::Bool(true), "there is one way to do it"),
        node => import.put(key, "train.activation_offloading", node.clone(), ""),
    }),
    "bf16" => With(|import, key, node| match node {
        Node::Bool(_) => import.put(key, "train.bf16", node.clone(), ""),
        Node::Str(word) if word == "auto" || word == "full" => {
            import.put(key, "train.bf16", Node::Bool(true), "every processor supports it");
        }
        _ => import.unsupported(key, "expected true, false or auto"),
    }),
    "bfloat16" => To("train.bf16"),
    "fp16" | "float16" => Together,
    "fp8" => Unsupported("trained weights stay in float32; model.quantization: fp8 keeps a frozen base in FP8"),
    "tf32" => To("train.tf32"),
    "flash_attention" => NotNeeded(ATTENTION),
    "flash_attn_cross_entropy" | "flash_attn_rms_norm" | "flash_attn_fuse_qkv" | "flash_attn_fuse_mlp" => NotNeeded(KERNEL),
    "xformers_attention" | "sdp_attention" | "eager_attention" | "flex_attention" | "attn_implementation" => NotNeeded(ATTENTION),
    "s2_attention" => Unsupported("shifted sparse attention is not part of this version"),
    "unsloth_lora_mlp" | "unsloth_lora_qkv" | "unsloth_lora_o" | "unsloth_cross_entropy_loss" | "liger_rope"
    | "liger_rms_norm" | "liger_glu_activation" | "liger_layer_norm" | "liger_fused_linear_cross_entropy" => NotNeeded(KERNEL),
    "plugins" => Unsupported("there are no plugins"),
    "torch_compile" | "torch_compile_backend" => NotNeeded("there is nothing to compile"),
    "deepspeed" => With(ranks::deepspeed),
    "fsdp" | "fsdp_config" | "fsdp_version" | "fsdp_final_state_dict_type" => Together,
    "dp_shard_size" => With(shards),
    "dp_replicate_size" => Together,
    "ddp" => NotNeeded(ranks::DDP),
    "ddp_timeout" => To("train.ddp_timeout"),
    "ddp_bucket_cap_mb" => To("train.ddp_bucket_cap_mb"),
    "ddp_broadcast_buffers" => NotNeeded("models have no buffers that training changes"),
    "ddp_find_unused_parameters" => NotNeeded(REACHED),
    "context_parallel_size" | "sequence_parallel_degree" | "tensor_parallel_size" | "expert_parallel_size" => With(split),
    "local_rank" => NotNeeded(ranks::LAUNCHED),
    "device_map" | "device" => With(names::device),
    "gpu_memory_limit" => NotNeeded("90 % of what is free on the GPU is used; train.memory_budget sets another limit"),
    "dataloader_num_workers" | "dataloader_pin_memory" | "dataloader_prefetch_factor" => NotNeeded(NO_LOADER),
    "dataloader_drop_last" => Unsupported("the last, smaller batch of an epoch is always kept"),
    "output_dir" => To("train.output_dir"),
    "logging_steps" => To("train.logging_steps"),
    "saves_per_epoch" | "save_strategy" | "save_steps" => Together,
    "save_total_limit" => To("train.save_total_limit"),
    "save_safetensors" => NotNeeded("everything is saved as safetensors"),
    "save_only_model" => With(names::save_only_model),
    "eval_strategy" | "evaluation_strategy" | "eval_steps" | "evals_per_epoch" => Together,
    "eval_table_size" => Unsupported("set gen.num_samples: the report shows answers before and after"),
    "eval_max_new_tokens" => To("train.generation_max_new_tokens"),
    "do_causal_lm_eval" | "eval_causal_lm_metrics" | "load_best_model_at_end" | "early_stopping_patience" => Together,
    "metric_for_best_model" => To("train.metric_for_best_model"),
    "greater_is_better" => To("train.greater_is_better"),
    "resume_from_checkpoint" => To("train.resume_from_checkpoint"),
    "auto_resume_from_checkpoints" => Unsupported("say --resume when you go on"),
    "seed" => To("train.seed"),
    "use_tensorboard" => To("logging.tensorboard"),
    "hub_model_id" | "hub_strategy" => Unsupported(UPLOAD),
    "hf_use_auth_token" => NotNeeded("the hub's token is taken from HF_TOKEN"),
    "use_wandb" | "wandb_mode" | "wandb_project" | "wandb_entity" | "wandb_watch" => Unsupported(TRACKER),
    "wandb_name" => ToBut("logging.run_name", "the run's name, in TensorBoard and the report"),
    "wandb_run_id" | "wandb_log_model" | "mlflow_tracking_uri" | "mlflow_experiment_name" | "comet_project_name"
    | "use_comet" => Unsupported(TRACKER),
    "profiler_steps" => Unsupported("see `tunesmith bench`"),
    "loss_watchdog_threshold" | "loss_watchdog_patience" => Unsupported("steps with NaN or infinity are skipped: train.max_nonfinite_steps"),
    "strict" => NotNeeded("unknown keys are always refused"),
    "debug" => NotNeeded("see `tunesmith data`"),
    "rl" | "reward_model" | "process_reward_model" => Together,
    "remove_unused_columns" => NotNeeded("fields without a name here are ignored"),
    "is_qwen_derived_model" | "type_of_model" => NotNeeded("config.json names the family"),
    "include_tokens_per_second" | "include_tkps" => NotNeeded("tokens/s are shown"),
    "total_supervised_tokens" => NotNeeded("tokens are counted"),
    "gc_steps" | "gc_collect_steps" | "torch_empty_cache_steps" => NotNeeded("memory is returned as soon as it is free"),
    "max_memory" | "experimental_skip_move_to_device" => NotNeeded("memory is measured: train.memory_budget"),
    "world_size" => NotNeeded(ranks::LAUNCHED),
    "qlora_sharded_model_loading" | "torchdistx_path" => NotNeeded("weights are mapped, not copied"),
    "shuffle_before_merging_datasets" | "streaming_multipack_buffer_size" => NotNeeded("the whole set is shuffled"),
    "num_dataset_shards_to_save" | "is_preprocess" | "preprocess_iterable" | "axolotl_config_path" => NotNeeded(CACHE),
    "gradio_*" => NotNeeded("no page is served"),
    "float32" | "fp32_norms" | "fp32_norm_classes" | "embeddings_skip_upcast" | "peft_autocast_adapter_dtype" => NotNeeded(WIDE),
    "batch_flattening" | "pad_to_multiple_of" | "pretrain_multipack_attn" | "pretrain_multipack_buffer_size"
    | "pretraining_sample_concatenation" | "sample_packing_mp_start_method" | "sample_packing_seq_len_multiplier" => NotNeeded(PADDING),
    "chunked_cross_entropy*" | "cut_cross_entropy" | "experts_implementation" | "flash_attn_d512" | "flash_optimum"
    | "flex_attn_compile_kwargs" | "fused_attn_kernel" | "gemma4_hybrid_attn_impl" | "large_head_attention" | "liger_*"
    | "llama4_linearized_experts" | "sage_attention" | "sdpa_varlen" | "tiled_mlp*" | "use_dsv4_kernels"
    | "use_glm_dsa_kernels" | "use_kernels" | "use_scattermoe" | "use_sonicmoe" => NotNeeded(KERNEL),
    "torch_compile_*" | "deepcompile" => NotNeeded("there is nothing to compile"),
    "accelerator_config" => Unsupported("each rank takes its part of every step's micro-batches; train.batch_size is per rank"),
    "expert_parallel_*" | "heads_k_stride" | "ring_attn_func" => Unsupported(ranks::SPLIT),
    "use_ray" | "ray_*" | "resources_per_worker" => Unsupported(ranks::LAUNCHED),
    "fp8_enable_fsdp_*" => Unsupported("ranks exchange values in float32"),
    "processor_type" => NotNeeded("the checkpoint's files say which processor it has"),
    "freeze_mm_modules" => With(names::freeze_both); "`true` is the default here too; `false`: `tuning.freeze_vision: false` and `tuning.freeze_connector: false`",
    "processor_*" | "image_*" => Unsupported(PIXELS),
    "role_boundaries" => Unsupported("the template marks what the assistant says"),
    "center_rewards_coefficient" | "cpo_alpha" | "dpo_*" | "ebft" | "kto_*" | "max_prompt_len" | "orpo_alpha"
    | "precompute_ref_log_probs" | "rl_beta" | "rpo_alpha" | "simpo_gamma" | "trl" | "vllm" => Unsupported(PREFERENCES),
    "gptq_*" | "model_quantization_*" | "nvfp4_merge_aware" | "qat" | "quantization" | "quantize_moe_experts"
    | "llmcompressor" | "use_onebitllms" => Unsupported("other ways to quantize than bitsandbytes' are not part of this version"),
    "diffusion" | "use_eaft" | "eaft_*" => Unsupported("another loss is not part of this version"),
    "model_config" | "cls_model_config" | "overrides_of_model_kwargs" => Unsupported("the model's own config.json counts"),
    "num_labels" => Unsupported("a classification head is task: classification, for rows {text, label}"),
    "tokenizer_use_mistral_common" | "tokenizer_save_jinja_files" => Unsupported("the tokenizer is that of tokenizer.json"),
    "eot_tokens" => Unsupported("the end of each learned turn is learned, as the template writes it"),
    "chat_template_kwargs" => Unsupported("set data.chat_template_kwargs"),
    "fix_untrained_tokens" => Unsupported("untrained tokens are left as they are"),
    "peft_trainable_token_*" => Unsupported("training the embeddings of tokens that exist is not yet part of this version"),
    "peft_layers_pattern" => Unsupported("layers are always counted along model.layers"),
    "adam_beta3" | "adam_epsilon2" | "dion_*" | "qgalore_*" => Unsupported("the optimizer it belongs to is not part of this version"),
    "lr_div_factor" | "jagged_restart_*" => Unsupported("the schedule it belongs to is not part of this version"),
    "relora_*" | "lisa_*" => Unsupported("ReLoRA and LISA are not part of this version"),
    "use_pose" | "pose_*" => Unsupported("longer contexts by skipped positions are not part of this version"),
    "scaling_softmax*" => Unsupported("another attention is not part of this version"),
    "selective_checkpointing" => Unsupported("whole blocks are recomputed: train.gradient_checkpointing: {full: N}"),
    "layer_offloading" => Unsupported("nothing is offloaded"),
    "dynamic_checkpoint" | "save_first_step" => Unsupported("a signal at any time saves a checkpoint; train.save_steps says when else"),
    "trainer_cls" => Unsupported("there is one trainer"),
    "profiler_*" => Unsupported("see `tunesmith bench`"),
    "bench_*" | "do_bench_eval" => Unsupported("benchmarks are not part of a run; train.predict_with_generate scores answers"),
    "generation_prompt_ratio" => Unsupported("whole prompts are answered"),
    "merge_method" => Unsupported("a step of its own: `tunesmith merge`"),
    "hub_revision" => Unsupported(UPLOAD),
    "comet_*" | "hf_mlflow_log_artifacts" | "mlflow_*" | "otel_*" | "swanlab_*" | "trackio_*" | "use_mlflow"
    | "use_otel_metrics" | "use_swanlab" | "use_trackio" => Unsupported(TRACKER),
};

fn special_tokens(import: &mut Import, key: &str, node: &Node) {
    let Node::Map(tokens) = node else { return import.unsupported(key, "expected a mapping") };
    let others: Vec<&str> = tokens.iter().map(|(name, _)| name.as_str()).filter(|name| *name != "pad_token").collect();
    if others.is_empty() {
        import.not_needed(key, "there is no padding");
    } else {
        import.unsupported(key, &format!("{}: the tokenizer's own tokens are used", others.join(", ")));
    }
}

/// A degree of parallelism; 1 has no effect.
fn split(import: &mut Import, key: &str, node: &Node) {
    if is_off_or_zero(node) || *node == Node::Int(1) {
        import.not_needed(key, "off");
    } else {
        import.unsupported(key, ranks::SPLIT);
    }
}

fn shards(import: &mut Import, key: &str, node: &Node) {
    match node {
        Node::Int(ranks) if *ranks > 1 => {
            import.changed(key, "", &format!("as many ranks as are started: `tunesmith launch --nproc {ranks}`"));
        }
        _ => import.not_needed(key, "off"),
    }
}
