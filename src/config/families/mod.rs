//! The decoder families: one file each, which reads its `config.json` into an [`Arch`], and one line here.
use std::fmt;

use super::arch::Arch;
use super::hf_json::Source;
use crate::error::Result;

mod gemma;
mod gemma2;
mod gemma3;
mod granite;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod smollm3;

/// Every family that is implemented.
pub static FAMILIES: [&Family; 14] = [
    &llama::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &gemma::FAMILY,
    &gemma2::FAMILY,
    &gemma3::FAMILY,
    &mistral::FAMILY,
    &phi3::FAMILY,
    &smollm3::FAMILY,
    &olmo2::FAMILY,
    &granite::FAMILY,
    &mixtral::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3_moe::FAMILY,
];

/// A family of decoders that share one form of `config.json`.
pub struct Family {
    /// The `model_type` of `config.json`.
    pub model_type: &'static str,
    /// The entry of `architectures` that this family has as a causal language model.
    pub class_name: &'static str,
    /// Models that come in this form, as people call them.
    pub models: &'static str,
    /// What tells it from Llama.
    pub features: &'static str,
    /// Whether blocks have experts.
    pub sparse: bool,
    /// Reads a `config.json` of this family.
    pub(super) read: fn(&Source<'_>) -> Result<Arch>,
}

impl Family {
    /// The entry of `architectures` that Transformers has for it with a head of scores, if it has one.
    pub fn classifier(&self) -> Option<String> {
        let name = match self.model_type {
            "granite" => return None,
            "gemma3_text" => "Gemma3Text",
            _ => self.class_name.trim_end_matches("ForCausalLM"),
        };
        Some(format!("{name}ForSequenceClassification"))
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.model_type)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.model_type == other.model_type
    }
}
