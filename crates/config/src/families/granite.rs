//! Granite: Llama with four constants: on embeddings, scores, residual branches and logits.
use crate::arch::Arch;
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "granite",
    class_name: "GraniteForCausalLM",
    models: "Granite 3.0 to 3.3 2B and 8B (dense)",
    features: "constants on embeddings, scores, residual branches and logits",
    sparse: false,
    classifier: None,
    gguf: Some(Gguf { pairs: true, scales: true, ..Gguf::named("granite") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let mut arch = source.decoder(&FAMILY, &Defaults { context: 2048, ..Defaults::default() })?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.mlp_bias = source.flag("mlp_bias", false)?;
    source.granite_constants(&mut arch)?;
    Ok(arch)
}

impl Source<'_> {
    /// Granite's constants.
    pub(super) fn granite_constants(&self, arch: &mut Arch) -> Result<()> {
        arch.embedding_scale = self.positive("embedding_multiplier", 1.0)?;
        arch.embedding_scaled_outside = true;
        arch.attention_scale = self.positive("attention_multiplier", 1.0)?;
        arch.residual_scale = self.positive("residual_multiplier", 1.0)?;
        arch.logit_scale = 1.0 / self.positive("logits_scaling", 1.0)?;
        Ok(())
    }
}
