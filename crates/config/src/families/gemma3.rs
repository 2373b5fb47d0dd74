//! Gemma 3, text: Gemma 2 without its caps, with norms on each head of q and k; five blocks with a window and their own
//! rotary base between two without.
use super::gemma::{defaults, gemma};
use crate::arch::{Arch, NormPlacement, QkNorm};
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "gemma3_text",
    class_name: "Gemma3ForCausalLM",
    models: "Gemma 3 270M and 1B, and the text part of 4B, 12B and 27B",
    features: "GeGLU, four norms a block, norms on each head of q and k, a sliding window and its own rotary base in five of six blocks",
    sparse: false,
    classifier: Some("Gemma3TextForSequenceClassification"),
    gguf: Some(Gguf {
        wide: Some(62),
        windows: &[|block| block % 6 != 5],
        gelu: true,
        rooted_embedding: true,
        ..Gguf::named("gemma3")
    }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults { context: 131_072, theta: 1e6, two_ropes: true, ..defaults() };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    source.refuse_bidirectional()?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    gemma(&mut arch);
    arch.set_norms(NormPlacement::Sandwich);
    arch.qk_norm = QkNorm::Head;
    arch.attention_scale = source.positive("query_pre_attn_scalar", 256.0)?.powf(-0.5);
    if source.optional_positive("attn_logit_softcapping", None)?.is_some() {
        return Err(source
            .not_yet("attn_logit_softcapping in gemma3_text")
            .hint("the class in Transformers does not read it: set it to null"));
    }
    arch.logit_softcap = source.optional_positive("final_logit_softcapping", None)?;
    let window = source.window(Some(4096))?;
    let pattern = source.size("sliding_window_pattern", Some(6))?;
    source.layer_windows(&mut arch, window, |layer| (layer + 1) % pattern != 0)?;
    // The window's blocks turn by a base of their own.
    arch.ropes.push(source.local_rope(&arch, 1e4)?);
    for attention in arch.attentions_mut() {
        attention.rope = Some(usize::from(attention.window.is_some()));
    }
    Ok(arch)
}
