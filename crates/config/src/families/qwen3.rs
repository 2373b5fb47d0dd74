//! Qwen3: Llama with RMS norms on each head of q and k, a head width of its own, and Qwen2's optional window.
use crate::arch::{Arch, QkNorm};
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "qwen3",
    class_name: "Qwen3ForCausalLM",
    models: "Qwen3 0.6B, 1.7B, 4B, 8B, 14B and 32B",
    features: "norms on each head of q and k; an optional sliding window in the later blocks",
    sparse: false,
    classifier: Some("Qwen3ForSequenceClassification"),
    gguf: Some(Gguf { ropes: &["llama3"], ..Gguf::named("qwen3") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let mut arch =
        source.decoder(&FAMILY, &Defaults { kv_heads: Some(32), head_dim: Some(128), ..Defaults::default() })?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.qk_norm = QkNorm::Head;
    source.late_windows(&mut arch)?;
    Ok(arch)
}
