//! Qwen3.5 with experts, text: Qwen3.5's blocks with experts in the place of the MLP, and one that every token goes through.
use super::qwen3_5::{defaults, mixers};
use crate::arch::{Arch, BlockSpec, DeltaNetNames, Experts, SharedExpert};
use crate::decoder_json::{Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "qwen3_5_moe_text",
    class_name: "Qwen3_5MoeForCausalLM",
    models: "Qwen3.5 35B-A3B, 122B-A10B and 397B-A17B, Qwen3.6 35B-A3B",
    features: "linear attention by the gated delta rule in three of four blocks, a gate on the output of the other attention, a \
               quarter of each head rotated, experts with a shared one",
    sparse: true,
    classifier: None,
    gguf: Some(Gguf {
        ropes: &["partial"],
        sections: true,
        bare: true,
        ffn_norm: "post_attention_norm",
        ..Gguf::named("qwen35moe")
    }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let width = source.size("moe_intermediate_size", Some(512))?;
    let defaults = Defaults { kv_heads: Some(2), intermediate: Some(width), ..defaults() };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    // It has no MLP of another width, whatever the file says.
    arch.intermediate_size = width;
    mixers(source, &mut arch, DeltaNetNames::Qwen)?;
    if !source.flag("norm_topk_prob", true)? {
        return Err(source.not_yet("norm_topk_prob false").hint("the class in Transformers does not read it"));
    }
    let shared = source.size("shared_expert_intermediate_size", Some(512))?;
    let experts = ExpertDefaults { count: 256, per_token: 8, width: 512 };
    arch.experts = Some(Experts {
        shared: Some(SharedExpert { width: shared, gated: true }),
        ..source.experts("num_experts", "moe_intermediate_size", experts)?
    });
    arch.predicts_ahead = true;
    arch.blocks.iter_mut().for_each(BlockSpec::set_experts);
    Ok(arch)
}
