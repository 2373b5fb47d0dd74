//! Llama: the form that the others are described against.
use crate::arch::Arch;
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "llama",
    class_name: "LlamaForCausalLM",
    models: "Llama 2 7B, 13B and 70B, 3 and 3.1 8B and 70B, 3.1 405B, 3.2 1B and 3B, 3.3 70B; SmolLM2 135M, 360M and 1.7B, TinyLlama 1.1B, Yi 6B, 9B and 34B, and others in the same form",
    features: "RMS norms before attention and MLP, SwiGLU, rotary positions, grouped-query attention",
    sparse: false,
    classifier: Some("LlamaForSequenceClassification"),
    gguf: Some(Gguf { pairs: true, ropes: &["llama3"], ..Gguf::named("llama") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    // Llama's code never reads the keys of a window: where a file sets them, somebody means another model.
    source.refuse_window()?;
    let mut arch = source.decoder(&FAMILY, &Defaults { context: 2048, ..Defaults::default() })?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.mlp_bias = source.flag("mlp_bias", false)?;
    Ok(arch)
}
