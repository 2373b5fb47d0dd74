//! LLaMA-Factory's rarer keys, grouped by outcome. A name that ends with `*` stands for all keys that begin so.
use super::{KERNEL, NO_LOADER, OTHER, OWN_STEP, TRACKER, UPLOAD};
use crate::ranks::{LAUNCHED, SPLIT};
use crate::work::Act::{self, Lost, Needless};

const TEXT: &str = "text models only";
const PREFERENCES: &str = "preference and reinforcement training are not part of this version";

/// Keys, grouped by their outcome.
pub(crate) const OTHERS: &[(Act, &[&str])] = &[
    (Needless(KERNEL), &["use_v1_kernels", "use_reentrant_gc", "gradient_checkpointing_kwargs", "kernel_config"]),
    (Needless("there is no padding; attention never crosses from row to row"), &["block_diag_attn"]),
    (Needless("tokens/s are shown"), &["include_effective_tokens_per_second", "print_param_status"]),
    (Needless("products are computed in float32"), &["compute_dtype"]),
    (Needless("the model is computed on the CPU"), &["device_map", "quantization_device_map"]),
    (Needless(LAUNCHED), &["master_addr", "master_port"]),
    (Needless(NO_LOADER), &["dataloader_*"]),
    (Needless("model.max_seq_len says it"), &["model_max_length"]),
    (Lost("validation rows are one set"), &["eval_on_each_dataset"]),
    (Lost("the template decides; write one with data.template_path"), &["preserve_thinking"]),
    (Lost("new rows start as the mean of all rows"), &["init_special_tokens", "new_special_tokens_config"]),
    (Lost(TEXT), &["audio_*", "crop_to_patches", "freeze_language_model", "image_*", "use_audio_in_video", "video_*"]),
    (Lost("answers have no special tokens"), &["skip_special_tokens"]),
    (Lost("set max_new_tokens"), &["max_length"]),
    (Lost("fp8 is not part of this version"), &["fp8", "fp8_*"]),
    (
        Lost("another loss is not part of this version"),
        &["use_asft_loss", "use_dft_loss", "use_eaft_loss", "asft_*", "eaft_*"],
    ),
    (Lost(OTHER), &["apollo_*", "badam_*", "galore_*", "kt_*", "use_kt"]),
    (
        Lost(PREFERENCES),
        &["dpo_*", "kto_*", "ld_alpha", "ppo_*", "pref_*", "ref_model*", "reward_model*", "simpo_gamma"],
    ),
    (Lost(LAUNCHED), &["ray_*"]),
    (
        Lost(SPLIT),
        &[
            "context_parallel_size",
            "expert_model_parallel_size",
            "hyper_parallel_*",
            "megatron_*",
            "pipeline_model_parallel_size",
            "sequence_parallel",
            "tensor_model_parallel_size",
            "use_hyper_parallel",
            "use_mca",
            "use_megatron_bridge",
        ],
    ),
    (Lost("see `tunesmith bench`"), &["enable_torch_profiler", "profile_modules", "profiler_*"]),
    (Lost(OWN_STEP), &["export_*", "sglang_*", "vllm_*"]),
    (Lost(UPLOAD), &["export_hub_model_id"]),
    (Lost(TRACKER), &["swanlab_*"]),
    (Lost("models come from the Hugging Face Hub or a folder"), &["om_hub_token"]),
];
