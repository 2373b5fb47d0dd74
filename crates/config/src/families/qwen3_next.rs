//! Qwen3-Next: Qwen3.5's attention with other projections in its linear part, and experts with a shared one.
use super::qwen3_5::{defaults, mixers};
use crate::arch::{Arch, DeltaNetNames};
use crate::decoder_json::{Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "qwen3_next",
    class_name: "Qwen3NextForCausalLM",
    models: "Qwen3-Next 80B-A3B, Qwen3-Coder-Next 80B-A3B",
    features: "linear attention by the gated delta rule in three of four blocks, a gate on the output of the other attention, a \
               quarter of each head rotated, experts with a shared one",
    sparse: true,
    classifier: Some("Qwen3NextForSequenceClassification"),
    gguf: Some(Gguf { ropes: &["partial"], bare: true, ffn_norm: "post_attention_norm", ..Gguf::named("qwen3next") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults { kv_heads: Some(2), ..defaults() };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    mixers(source, &mut arch, DeltaNetNames::QwenNext)?;
    let shared = source.size("shared_expert_intermediate_size", Some(512))?;
    source.qwen_experts(&mut arch, Some(shared), ExpertDefaults { count: 512, per_token: 10, width: 512 })?;
    if source.get("norm_topk_prob").is_none() {
        arch.experts.iter_mut().for_each(|experts| experts.normalised = true);
    }
    arch.predicts_ahead = true;
    Ok(arch)
}
