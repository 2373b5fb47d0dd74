//! `VisionEncoderDecoderModel`: an image encoder, and a decoder whose blocks read its output by cross-attention.
use serde_json::Value;

use super::arch::{Arch, AttentionSpec, BranchSpec, CrossAttentionSpec, PartSpec};
use super::hf_json::Source;
use super::wrapped::ENCODER_DECODER;
use tunesmith_base::error::Result;

/// The only decoder that is known here.
const DECODER: &str = "gpt2";

impl<'a> Source<'a> {
    /// The part that describes the decoder. Its cross-attention is added by [`add_cross_attention`].
    pub(super) fn decoder_part(&self) -> Result<Source<'a>> {
        self.check_class(&[ENCODER_DECODER.class_name])?;
        if self.get("quantization_config").is_some() {
            return Err(self.not_yet(format!("quantization_config in a {} model", ENCODER_DECODER.model_type)));
        }
        let Some(Value::Object(map)) = self.get("decoder") else {
            return Err(self.mismatch("decoder", "an object that describes the decoder"));
        };
        let mut decoder = Source { origin: self.origin, map: map.clone(), prefix: "decoder.".into() };
        let kind = decoder.text("model_type")?.unwrap_or_default();
        if kind != DECODER {
            return Err(self
                .not_yet(format!("decoder.model_type {kind:?} in a {} model", ENCODER_DECODER.model_type))
                .hint(format!("decoders in this version: {DECODER}")));
        }
        decoder = decoder.renamed(DECODER);
        decoder.check_types(DECODER)?;
        if !decoder.flag("add_cross_attention", false)? {
            return Err(decoder.mismatch("add_cross_attention", "true: the decoder must read the encoder's output"));
        }
        // Names the class that the decoder was trained as.
        for key in ["add_cross_attention", "architectures"] {
            decoder.map.remove(key);
        }
        // What the whole model says counts where it generates.
        for key in ["bos_token_id", "eos_token_id"] {
            if let Some(value) = self.get(key) {
                decoder.map.insert(key.into(), value.clone());
            }
        }
        Ok(decoder)
    }
}

/// Gives each block a branch of cross-attention behind its attention: `transformers.models.gpt2`, with `add_cross_attention`.
pub(super) fn add_cross_attention(arch: &mut Arch) {
    for block in &mut arch.blocks {
        let Some(&AttentionSpec { num_heads, head_dim, .. }) = block.attention() else { continue };
        let part = PartSpec::CrossAttention(CrossAttentionSpec { num_heads, head_dim });
        block.branches.insert(1, BranchSpec { norm: Some(CrossAttentionSpec::NORM), part, post_norm: None });
    }
    // GPT-2's table has no row without a gradient, and the token that begins a text is often that of padding.
    arch.pad_token_id = None;
}
