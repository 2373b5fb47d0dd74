//! Gemma (the first): GeGLU, norm weights counted from 1, embeddings scaled by the root of the width.
use crate::arch::{Arch, HiddenAct};
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "gemma",
    class_name: "GemmaForCausalLM",
    models: "Gemma 2B and 7B, CodeGemma 2B and 7B",
    features: "GeGLU, norm weights counted from 1, scaled embeddings",
    sparse: false,
    classifier: Some("GemmaForSequenceClassification"),
    gguf: Some(Gguf { tied: true, gelu: true, rooted_embedding: true, ..Gguf::named("gemma") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults { kv_heads: Some(16), activation_key: "hidden_act", ..defaults() };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    gemma(&mut arch);
    Ok(arch)
}

/// What the classes of all Gemmas assume.
pub(super) fn defaults() -> Defaults {
    Defaults {
        kv_heads: Some(4),
        head_dim: Some(256),
        context: 8192,
        tied: true,
        pad: Some(0),
        activation_key: "hidden_activation",
        activation: HiddenAct::GeluTanh,
        ..Defaults::default()
    }
}

pub(super) fn gemma(arch: &mut Arch) {
    arch.norm_offset = 1.0;
    arch.embedding_scale = (arch.hidden_size as f64).sqrt();
}
