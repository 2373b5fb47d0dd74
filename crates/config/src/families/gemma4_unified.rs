//! Gemma 4 12B, text: as the dense sizes of Gemma 4, in a model that reads images without an encoder.
use super::{gemma, gemma4};
use crate::arch::Arch;
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "gemma4_unified_text",
    class_name: "Gemma4UnifiedForCausalLM",
    models: "the text part of Gemma 4 12B",
    features: "Gemma 4 without per-layer embeddings and without experts",
    sparse: false,
    classifier: None,
    gguf: Some(Gguf {
        score_scale: Some(1.0),
        rooted_embedding: true,
        gelu: true,
        listed_windows: true,
        ropes: &["proportional"],
        bare: true,
        uneven: true,
        ..Gguf::named("gemma4")
    }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults { context: 262_144, two_ropes: true, ..gemma::defaults() };
    gemma4::dense(source, &FAMILY, &defaults, 1024)
}
