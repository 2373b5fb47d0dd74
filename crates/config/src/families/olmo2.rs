//! OLMo 2: norms after attention and MLP only, and norms over the whole width of q and k.
use crate::arch::{Arch, NormPlacement, QkNorm};
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "olmo2",
    class_name: "Olmo2ForCausalLM",
    models: "OLMo 2 1B, 7B, 13B and 32B",
    features: "norms after attention and MLP only, norms over the whole width of q and k",
    sparse: false,
    classifier: Some("Olmo2ForSequenceClassification"),
    gguf: Some(Gguf::named("olmo2")),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults { context: 2048, eps: 1e-5, pad: Some(1), ..Defaults::default() };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.set_norms(NormPlacement::Post);
    arch.qk_norm = QkNorm::Whole;
    Ok(arch)
}
