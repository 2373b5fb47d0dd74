//! GLM-4: neighbouring features of half of each head rotated together, gate and up in one matrix, norms before and after attention
//! and MLP.
use crate::arch::{Arch, ModuleNames, PartSpec};
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "glm4",
    class_name: "Glm4ForCausalLM",
    models: "GLM-4-0414 9B and 32B, GLM-Z1 9B and 32B",
    features: "biases on q, k and v, half of each head rotated by neighbouring pairs, gate and up in one matrix, four norms a block",
    sparse: false,
    classifier: Some("Glm4ForSequenceClassification"),
    gguf: Some(Gguf { ropes: &["partial"], bare: true, ..Gguf::named("glm4") }),
};

/// Tokens that end a generation where the file names none.
const ENDS: [u32; 3] = [151_329, 151_336, 151_338];

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults {
        kv_heads: Some(2),
        head_dim: Some(128),
        context: 131_072,
        eps: 1.5625e-7,
        pad: Some(151_329),
        partial_rotary: Some(0.5),
        ..Defaults::default()
    };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    source.refuse_window()?;
    arch.qkv_bias = source.flag("attention_bias", true)?;
    arch.module_names = &ModuleNames::PHI3;
    arch.ropes.iter_mut().for_each(|rope| rope.interleaved = true);
    if source.get("eos_token_id").is_none() {
        arch.eos_token_ids = ENDS.to_vec();
    }
    for branch in arch.blocks.iter_mut().flat_map(|block| &mut block.branches) {
        (branch.norm, branch.post_norm) = match branch.part {
            PartSpec::Mlp { .. } => (Some("post_attention_layernorm"), Some("post_mlp_layernorm")),
            _ => (Some("input_layernorm"), Some("post_self_attn_layernorm")),
        };
    }
    Ok(arch)
}
