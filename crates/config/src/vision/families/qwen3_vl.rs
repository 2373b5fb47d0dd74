//! The image encoder of Qwen3-VL: `transformers.models.qwen3_vl`. As Qwen2-VL's, with learned positions too.
use super::{BlockNames, Defaults, Encoder, EncoderFamily, Interpolation, Names, QWEN_NAMES, Source, qwen_encoder};
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily = EncoderFamily {
    model_types: &["qwen3_vl_vision", "qwen3_vl"],
    wholes: &["qwen3_vl"],
    models: "inside Qwen3-VL",
    read: |source| as_family(source, "qwen3_vl_vision"),
};

const NAMES: Names =
    Names { block: BlockNames { fc1: "mlp.linear_fc1", fc2: "mlp.linear_fc2", ..QWEN_NAMES.block }, ..QWEN_NAMES };

/// The encoder of this family, whose class has the same keys and defaults.
pub(super) fn as_family(source: &Source<'_>, family: &'static str) -> Result<Encoder> {
    let defaults =
        Defaults { sizes: [1152, 27, 16, 16, 16], intermediate_size: 4304, activation: "gelu_pytorch_tanh", eps: 1e-6 };
    let encoder = qwen_encoder(source, family, &NAMES, &defaults, "hidden_size")?;
    let positions = source.size("num_position_embeddings", Some(2304))?;
    let side = positions.isqrt();
    if side * side != positions {
        return Err(source.mismatch("num_position_embeddings", "a square number"));
    }
    Ok(Encoder { grid: [side; 2], interpolation: Some(Interpolation::Bilinear), ..encoder })
}
