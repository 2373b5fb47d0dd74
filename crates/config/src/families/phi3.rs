//! Phi-3: Llama with q, k, v in one matrix, gate and up in another, rotary positions on a part of each head, and
//! `longrope`.
use crate::arch::{Arch, ModuleNames, RopeScaling};
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "phi3",
    class_name: "Phi3ForCausalLM",
    models: "Phi-3 mini 3.8B and medium 14B, Phi-3.5 mini 3.8B, Phi-4 14B, Phi-4 mini 3.8B",
    features: "q, k, v in one matrix, gate and up in another, partial rotary, longrope, an optional sliding window",
    sparse: false,
    classifier: Some("Phi3ForSequenceClassification"),
    gguf: Some(Gguf { windows: &[|_| true, |_| false], ropes: &["longrope", "partial"], ..Gguf::named("phi3") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults =
        Defaults { context: 4096, eps: 1e-5, pad: Some(32_000), partial_rotary: Some(1.0), ..Defaults::default() };
    let mut map = source.map.clone();
    map.entry("original_max_position_embeddings").or_insert_with(|| 4096.into());
    let source = &Source { origin: source.origin, map, prefix: source.prefix.clone() };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    if !matches!(arch.ropes[0].scaling, RopeScaling::None | RopeScaling::LongRope { .. }) {
        return Err(source.not_yet("a rope_type other than \"default\" and \"longrope\" in phi3"));
    }
    (arch.fused, arch.module_names) = (true, &ModuleNames::PHI3);
    let window = source.window(None)?;
    arch.attentions_mut().for_each(|attention| attention.window = window);
    Ok(arch)
}
