//! Qwen2: Llama with biases on q, k and v, and a window in the later blocks where it is switched on.
use crate::arch::Arch;
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "qwen2",
    class_name: "Qwen2ForCausalLM",
    models: "Qwen2 0.5B, 1.5B, 7B and 72B, Qwen2.5 0.5B, 1.5B, 3B, 7B, 14B, 32B and 72B, Qwen2.5-Coder 0.5B to 32B, DeepSeek-R1-Distill-Qwen 1.5B to 32B",
    features: "biases on q, k and v; an optional sliding window in the later blocks",
    sparse: false,
    classifier: Some("Qwen2ForSequenceClassification"),
    gguf: Some(Gguf { ropes: &["llama3"], ..Gguf::named("qwen2") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let mut arch = source.decoder(&FAMILY, &Defaults { kv_heads: Some(32), ..Defaults::default() })?;
    arch.qkv_bias = true;
    source.late_windows(&mut arch)?;
    Ok(arch)
}
