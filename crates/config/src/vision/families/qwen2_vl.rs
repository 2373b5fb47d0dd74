//! The image encoder of Qwen2-VL: `transformers.models.qwen2_vl`. Rotary positions of rows and columns.
use super::{Defaults, Encoder, EncoderFamily, QWEN_NAMES, Source, qwen_encoder};
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily = EncoderFamily {
    model_types: &["qwen2_vl_vision", "qwen2_vl"],
    wholes: &["qwen2_vl"],
    models: "inside Qwen2-VL",
    read,
};

fn read(source: &Source<'_>) -> Result<Encoder> {
    let defaults =
        Defaults { sizes: [1280, 32, 16, 14, 14], intermediate_size: 5120, activation: "quick_gelu", eps: 1e-6 };
    let encoder = qwen_encoder(source, "qwen2_vl_vision", &QWEN_NAMES, &defaults, "embed_dim")?;
    let ratio = source.size_up_to("mlp_ratio", Some(4), 64)?;
    Ok(Encoder { patch_bias: false, intermediate_size: encoder.hidden_size * ratio, ..encoder })
}
