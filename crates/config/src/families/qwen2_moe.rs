//! Qwen2-MoE: Qwen2 with experts in some blocks, and one expert that every token goes through.
use crate::arch::Arch;
use crate::decoder_json::{Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "qwen2_moe",
    class_name: "Qwen2MoeForCausalLM",
    models: "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    features: "biases on q, k and v, experts with a shared one, an optional sliding window",
    sparse: true,
    classifier: Some("Qwen2MoeForSequenceClassification"),
    gguf: Some(Gguf { normalised: false, ..Gguf::named("qwen2moe") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let mut arch = source.decoder(&FAMILY, &Defaults { kv_heads: Some(16), ..Defaults::default() })?;
    arch.qkv_bias = source.flag("qkv_bias", true)?;
    source.early_windows(&mut arch)?;
    let shared = source.size("shared_expert_intermediate_size", Some(5632))?;
    source.qwen_experts(&mut arch, Some(shared), ExpertDefaults { count: 60, per_token: 4, width: 1408 })?;
    Ok(arch)
}
