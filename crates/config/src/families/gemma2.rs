//! Gemma 2: norms before and after attention and MLP, soft caps on scores and logits, a window in every other block.
use super::gemma::{defaults, gemma};
use crate::arch::{Arch, NormPlacement};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "gemma2",
    class_name: "Gemma2ForCausalLM",
    models: "Gemma 2 2B, 9B and 27B",
    features: "GeGLU, four norms a block, soft caps on scores and logits, a sliding window in every other block",
    sparse: false,
    classifier: Some("Gemma2ForSequenceClassification"),
    gguf: Some(Gguf {
        wide: Some(46),
        windows: &[|block| block % 2 == 0],
        tied: true,
        gelu: true,
        rooted_embedding: true,
        ..Gguf::named("gemma2")
    }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let mut arch = source.decoder(&FAMILY, &defaults())?;
    source.refuse_bidirectional()?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    gemma(&mut arch);
    arch.set_norms(NormPlacement::Sandwich);
    arch.attention_scale = source.positive("query_pre_attn_scalar", 256.0)?.powf(-0.5);
    arch.attention_softcap = source.optional_positive("attn_logit_softcapping", Some(50.0))?;
    arch.logit_softcap = source.optional_positive("final_logit_softcapping", Some(30.0))?;
    let window = source.window(Some(4096))?;
    source.layer_windows(&mut arch, window, |layer| layer % 2 == 0)?;
    Ok(arch)
}
