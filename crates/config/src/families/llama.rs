//! Llama: the form that the others are described against.
use crate::arch::Arch;
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "llama",
    class_name: "LlamaForCausalLM",
    models: "Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2, TinyLlama, Yi, and others in the same form",
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
