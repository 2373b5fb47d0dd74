//! The table of LLaMA-Factory's keys: for each, our key or the function that imports it, or why it is not needed or not
//! supported.
use crate::import::{Import, Rules};
use crate::names::{MEDIA, NO_LOADER, PIXELS, PREFERENCES, REACHED, UPLOAD};
use crate::{names, ranks};
use tunesmith_config::foreign::rules::Action::{NotNeeded, To, ToBut, Together, Unsupported, With};
use tunesmith_config::{Node, rules};

const KERNEL: &str = "there is one attention, and kernels are chosen for the processor";
const CACHE: &str = "tokens are cached by content: a changed set is another one";
const ACCURACY: &str = "a run measures the loss and scored answers; `tunesmith eval` tells token_accuracy too";
const OTHER: &str = "this way of training is not part of this version";
const OWN_STEP: &str = "a step of its own: `tunesmith merge` and `export`, `infer` and `chat`";
const TRACKER: &str =
    "Weights & Biases, SwanLab and others are not yet part of this version; TensorBoard and report.html are written";

/// Every key that this import knows.
pub(crate) const RULES: Rules = rules! {
    "model_name_or_path" => To("model.name"),
    "model_revision" => To("model.revision"),
    "adapter_name_or_path" | "create_new_adapter" => Together,
    "adapter_folder" => Unsupported("name the adapters in tuning.adapter"),
    "cache_dir" => Unsupported("the hub's cache is set by HF_HOME"),
    "use_fast_tokenizer" => NotNeeded("there is one tokenizer"),
    "split_special_tokens" => To("data.split_special_tokens"),
    "resize_vocab" => NotNeeded("the embedding grows with tuning.new_tokens"),
    "new_special_tokens" | "add_tokens" | "add_special_tokens" => With(tokens),
    "low_cpu_mem_usage" => NotNeeded("weights are mapped, not copied"),
    "rope_scaling" => Unsupported("the model's own config.json says how"),
    "flash_attn" => NotNeeded(KERNEL),
    "shift_attn" => Unsupported("shifted sparse attention is not part of this version"),
    "mixture_of_depths" => Unsupported(OTHER),
    "train_from_scratch" => With(|import, key, node| match node {
        Node::Bool(true) => import.put(key, "model.init", Node::Str("random".into()), ""),
        _ => import.not_needed(key, "off"),
    }),
    "use_unsloth" => NotNeeded(KERNEL),
    "use_unsloth_gc" => NotNeeded("see gradient_checkpointing"),
    "enable_liger_kernel" => NotNeeded(KERNEL),
    "moe_aux_loss_coef" => Unsupported("the model's config.json says how much of it there is"),
    "disable_gradient_checkpointing" => With(|import, key, node| {
        import.put(key, "train.gradient_checkpointing", Node::Bool(*node == Node::Bool(false)), "the same, negated");
    }),
    "gradient_checkpointing" => To("train.gradient_checkpointing"),
    "upcast_layernorm" => NotNeeded("norms are computed in float32"),
    "upcast_lmhead_output" => NotNeeded("the loss is computed in float32 and more"),
    "infer_backend" | "infer_dtype" => Unsupported(OWN_STEP),
    "offload_folder" => NotNeeded("nothing is offloaded"),
    "use_kv_cache" => NotNeeded("answers are made with a cache"),
    "hf_hub_token" => Unsupported("secrets do not belong in files; set the environment variable HF_TOKEN"),
    "ms_hub_token" => Unsupported("models come from the Hugging Face Hub or a folder"),
    "trust_remote_code" => With(names::trust_remote_code),
    "quantization_bit" | "quantization_method" | "quantization_type" | "double_quantization" | "stage" | "do_train" => Together,
    "do_eval" => NotNeeded("eval_strategy says when"),
    "do_predict" => Unsupported("a step of its own: `tunesmith eval` scores the answers to data.test_path"),
    "finetuning_type" => Together,
    "use_llama_pro" => Unsupported(OTHER),
    "lora_rank" => To("tuning.lora.r"),
    "lora_alpha" => To("tuning.lora.lora_alpha"),
    "lora_dropout" => To("tuning.lora.lora_dropout"),
    "lora_target" => Together,
    "loraplus_lr_ratio" => To("tuning.lora.loraplus_lr_ratio"),
    "loraplus_lr_embedding" => Unsupported("embeddings get no adapters; train.learning_rates sets the rate of those in modules_to_save"),
    "use_rslora" => To("tuning.lora.use_rslora"),
    "use_dora" => To("tuning.lora.use_dora"),
    "pissa_init" | "pissa_iter" => Together,
    "pissa_convert" => Unsupported("the base without the adapter's start is not written out"),
    "oft_rank" => To("tuning.oft.r"),
    "oft_block_size" => To("tuning.oft.oft_block_size"),
    "oft_target" | "additional_target" => Together,
    "module_dropout" => Unsupported("blocks are never left out"),
    "freeze_trainable_layers" | "freeze_trainable_modules" | "freeze_extra_modules" => Together,
    "freeze_vision_tower" => With(names::freeze_vision); "`true` is the default here too; `false`: `tuning.freeze_vision: false`",
    "freeze_multi_modal_projector" => With(names::freeze_connector); "`true` is the default here too; `false`: `tuning.freeze_connector: false`",
    "freeze_language_model" => To("tuning.freeze_language"),
    "use_galore" | "use_apollo" | "use_badam" | "use_adam_mini" => Unsupported(OTHER),
    "use_muon" => With(|import, key, node| match node {
        Node::Bool(true) => import.put(key, "train.optim", Node::Str("muon".into()), ""),
        _ => import.not_needed(key, "off"),
    }),
    "ref_model" | "pref_beta" | "pref_loss" => Unsupported("preference training is not part of this version"),
    "dataset" | "eval_dataset" | "dataset_dir" => Together,
    "media_dir" => To("data.image_dir"),
    "template" => With(names::template),
    "enable_thinking" => Unsupported("set data.chat_template_kwargs: {enable_thinking: …}, if the template reads it"),
    "default_system" => Unsupported("put a system message into the rows"),
    "cutoff_len" => ToBut("model.max_seq_len", "there the cut is shared by prompt and answer, here the end is cut (data.truncation)"),
    "train_on_prompt" | "mask_history" => Together,
    "streaming" => NotNeeded("every set is streamed from disk"),
    "buffer_size" => NotNeeded("the whole set is shuffled"),
    "mix_strategy" | "interleave_probs" => Together,
    "overwrite_cache" => NotNeeded(CACHE),
    "preprocessing_batch_size" => NotNeeded("batches are chosen by the processor's cores"),
    "preprocessing_num_workers" => To("data.num_proc"),
    "max_samples" => To("data.max_rows"),
    "val_size" | "packing" | "neat_packing" => Together,
    "tool_format" => Unsupported("the template writes tools"),
    "tokenized_path" => NotNeeded(CACHE),
    "data_shared_file_system" => NotNeeded("every rank reads the rows from data.cache_dir"),
    "ignore_pad_token_for_loss" => NotNeeded("there is no padding"),
    "eval_num_beams" => To("train.generation_num_beams"),
    "output_dir" => To("train.output_dir"),
    "overwrite_output_dir" => With(names::overwrite),
    "logging_steps" => To("train.logging_steps"),
    "logging_strategy" => NotNeeded("logging_steps says how often"),
    "logging_dir" => To("logging.logging_dir"),
    "logging_first_step" => NotNeeded("metrics.jsonl has every step"),
    "save_steps" | "save_strategy" => Together,
    "save_total_limit" => To("train.save_total_limit"),
    "save_only_model" => With(names::save_only_model),
    "save_safetensors" => NotNeeded("everything is saved as safetensors"),
    "plot_loss" => NotNeeded("report.html has the curves"),
    "include_num_input_tokens_seen" => NotNeeded("tokens are counted"),
    "include_tokens_per_second" => NotNeeded("tokens/s are shown"),
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
    "warmup_ratio" | "warmup_steps" => Together,
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
    "disable_shuffling" => With(|import, key, node| {
        import.put(key, "data.shuffle", Node::Bool(*node == Node::Bool(false)), "the same, negated");
    }),
    "seed" => To("train.seed"),
    "data_seed" => To("train.data_seed"),
    "bf16" => To("train.bf16"),
    "pure_bf16" => With(|import, key, node| match node {
        Node::Bool(true) => import.put(key, "train.bf16", Node::Bool(true), "trained weights stay in float32"),
        _ => import.not_needed(key, "off"),
    }),
    "fp16" => With(|import, key, node| match node {
        Node::Bool(true) if import.is_on("bf16") || import.is_on("pure_bf16") => import.not_needed(key, "bfloat16 takes precedence"),
        node => import.put(key, "train.fp16", node.clone(), ""),
    }),
    "tf32" => To("train.tf32"),
    "resume_from_checkpoint" => To("train.resume_from_checkpoint"),
    "eval_strategy" | "evaluation_strategy" | "eval_steps" => Together,
    "eval_on_start" => To("train.eval_on_start"),
    "eval_accumulation_steps" => To("train.eval_accumulation_steps"),
    "per_device_batch_size" => Unsupported("set train.batch_size"),
    "load_best_model_at_end" => Together,
    "metric_for_best_model" => To("train.metric_for_best_model"),
    "greater_is_better" => To("train.greater_is_better"),
    "early_stopping_steps" => ToBut("train.early_stopping_patience", "counted in validations"),
    "compute_accuracy" => Unsupported(ACCURACY),
    "predict_with_generate" => To("train.predict_with_generate"),
    "max_new_tokens" | "do_sample" | "temperature" | "top_p" | "top_k" | "num_beams" | "repetition_penalty"
    | "length_penalty" => Together,
    "deepspeed" => With(ranks::deepspeed),
    "fsdp" | "fsdp_config" => Together,
    "ddp_timeout" => To("train.ddp_timeout"),
    "ddp_find_unused_parameters" => NotNeeded(REACHED),
    "ray_run_name" | "ray_num_workers" => Unsupported(ranks::LAUNCHED),
    "dataloader_num_workers" | "dataloader_pin_memory" => NotNeeded(NO_LOADER),
    "dataloader_drop_last" => Unsupported("the last, smaller batch of an epoch is always kept"),
    "remove_unused_columns" => NotNeeded("fields without a name here are ignored"),
    "torch_compile" => NotNeeded("there is nothing to compile"),
    "push_to_hub" | "hub_model_id" => Unsupported(UPLOAD),
    "use_swanlab" | "swanlab_project" => Unsupported(TRACKER),
    "export_dir" | "export_size" | "export_device" | "export_legacy_format" => Unsupported(OWN_STEP),
    "use_v1_kernels" | "use_reentrant_gc" | "gradient_checkpointing_kwargs" | "kernel_config" => NotNeeded(KERNEL),
    "block_diag_attn" => NotNeeded("there is no padding; attention never crosses from row to row"),
    "include_effective_tokens_per_second" | "print_param_status" => NotNeeded("tokens/s are shown"),
    "compute_dtype" => NotNeeded("products are computed in float32"),
    "device_map" => With(names::device),
    "quantization_device_map" => NotNeeded("a base is quantized where it is computed"),
    "master_addr" | "master_port" => NotNeeded(ranks::LAUNCHED),
    "dataloader_*" => NotNeeded(NO_LOADER),
    "model_max_length" => NotNeeded("model.max_seq_len says it"),
    "eval_on_each_dataset" => Unsupported("validation rows are one set"),
    "preserve_thinking" => Unsupported("set data.chat_template_kwargs: {preserve_thinking: …}, if the template reads it"),
    "init_special_tokens" | "new_special_tokens_config" => Unsupported("new rows start as the mean of all rows"),
    "image_max_pixels" => ToBut("vision.max_pixels", "for models whose processor sizes images by their pixels (Qwen-VL)"),
    "image_min_pixels" => ToBut("vision.min_pixels", "for models whose processor sizes images by their pixels (Qwen-VL)"),
    "crop_to_patches" | "image_*" => Unsupported(PIXELS),
    "audio_*" | "use_audio_in_video" | "video_*" => Unsupported(MEDIA),
    "skip_special_tokens" => Unsupported("answers have no special tokens"),
    "max_length" => Unsupported("set max_new_tokens"),
    "fp8" | "fp8_*" => Unsupported("trained weights stay in float32; model.quantization: fp8 keeps a frozen base in FP8"),
    "use_asft_loss" | "use_dft_loss" | "use_eaft_loss" | "asft_*" | "eaft_*" => Unsupported("another loss is not part of this version"),
    "apollo_*" | "badam_*" | "galore_*" | "kt_*" | "use_kt" => Unsupported(OTHER),
    "dpo_*" | "kto_*" | "ld_alpha" | "ppo_*" | "pref_*" | "ref_model*" | "reward_model*" | "simpo_gamma" => Unsupported(PREFERENCES),
    "ray_*" => Unsupported(ranks::LAUNCHED),
    "context_parallel_size" | "expert_model_parallel_size" | "hyper_parallel_*" | "megatron_*"
    | "pipeline_model_parallel_size" | "sequence_parallel" | "tensor_model_parallel_size" | "use_hyper_parallel"
    | "use_mca" | "use_megatron_bridge" => Unsupported(ranks::SPLIT),
    "enable_torch_profiler" | "profile_modules" | "profiler_*" => Unsupported("see `tunesmith bench`"),
    "export_*" | "sglang_*" | "vllm_*" => Unsupported(OWN_STEP),
    "export_hub_model_id" => Unsupported(UPLOAD),
    "swanlab_*" => Unsupported(TRACKER),
    "om_hub_token" => Unsupported("models come from the Hugging Face Hub or a folder"),
};

/// `a,b` split into a list; any other value as it is.
pub(super) fn listed(node: &Node) -> Node {
    match node {
        Node::Str(text) => Node::List(
            text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(|part| Node::Str(part.into())).collect(),
        ),
        other => other.clone(),
    }
}

fn tokens(import: &mut Import, key: &str, node: &Node) {
    import.put(key, "tuning.new_tokens", listed(node), "");
}

fn report_to(import: &mut Import, key: &str, node: &Node) {
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
    import.put(key, "logging.tensorboard", Node::Bool(tensorboard), if others { TRACKER } else { "" });
}
