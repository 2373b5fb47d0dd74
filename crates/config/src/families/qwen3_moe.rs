//! Qwen3-MoE: Qwen3 with experts in some blocks.
use crate::arch::{Arch, QkNorm};
use crate::decoder_json::{Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "qwen3_moe",
    class_name: "Qwen3MoeForCausalLM",
    models: "Qwen3 30B-A3B and 235B-A22B, Qwen3-Coder 30B-A3B and 480B-A35B",
    features: "norms on each head of q and k, experts, an optional sliding window",
    sparse: true,
    classifier: Some("Qwen3MoeForSequenceClassification"),
    gguf: Some(Gguf::named("qwen3moe")),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let mut arch = source.decoder(&FAMILY, &Defaults { kv_heads: Some(4), ..Defaults::default() })?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.qk_norm = QkNorm::Head;
    if source.flag("use_sliding_window", false)? {
        let window = source.window(Some(4096))?;
        arch.attentions_mut().for_each(|attention| attention.window = window);
    }
    source.qwen_experts(&mut arch, None, ExpertDefaults { count: 128, per_token: 8, width: 768 })?;
    Ok(arch)
}
