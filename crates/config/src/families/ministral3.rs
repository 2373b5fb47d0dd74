//! Ministral 3: Mistral whose queries are scaled by their position.
use crate::arch::Arch;
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "ministral3",
    class_name: "Ministral3ForCausalLM",
    models: "Ministral 3 3B, 8B and 14B",
    features: "queries scaled by their position beyond the original context, an optional sliding window",
    sparse: false,
    classifier: Some("Ministral3ForSequenceClassification"),
    gguf: Some(Gguf { pairs: true, yarn_log: Some(1.0), ..Gguf::named("mistral3") }),
};

/// The rope parameters of a file without any.
const YARN: &str = r#"{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1}"#;

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults {
        kv_heads: Some(8),
        head_dim: Some(128),
        context: 262_144,
        eps: 1e-5,
        pad: Some(11),
        ..Defaults::default()
    };
    let source = &source.with_rope(YARN);
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    let window = source.window(None)?;
    arch.attentions_mut().for_each(|attention| attention.window = window);
    arch.query_scaling = Some(source.query_scaling(&arch.ropes[0])?);
    Ok(arch)
}
