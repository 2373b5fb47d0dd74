//! The image encoder of Qwen2.5-VL: `transformers.models.qwen2_5_vl`. As Qwen2-VL's, with `RMSNorm`, a gated MLP, and attention
//! within windows in most blocks.
use super::{BlockNames, Defaults, Encoder, EncoderFamily, Names, QWEN_NAMES, Source, Windows, qwen_encoder};
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily = EncoderFamily {
    model_types: &["qwen2_5_vl_vision", "qwen2_5_vl"],
    wholes: &["qwen2_5_vl"],
    models: "inside Qwen2.5-VL",
    read,
};

const NAMES: Names = Names {
    block: BlockNames { fc1: "mlp.gate_proj", up: "mlp.up_proj", fc2: "mlp.down_proj", ..QWEN_NAMES.block },
    ..QWEN_NAMES
};

fn read(source: &Source<'_>) -> Result<Encoder> {
    let defaults = Defaults { sizes: [3584, 32, 16, 14, 14], intermediate_size: 3420, activation: "silu", eps: 1e-6 };
    let encoder = qwen_encoder(source, "qwen2_5_vl_vision", &NAMES, &defaults, "hidden_size")?;
    let merged = source.size_up_to("spatial_merge_size", Some(2), 64)?;
    let pixels = source.size("window_size", Some(112))?;
    let side = pixels / merged / encoder.patch_size * merged;
    if side == 0 {
        return Err(source.mismatch("window_size", "as many pixels as the patches of a row, or more"));
    }
    let full = source.indexes("fullatt_block_indexes", &[7, 15, 23, 31])?;
    let windows = Some(Windows { side, full });
    Ok(Encoder { patch_bias: false, gated_mlp: true, rms_norm: true, windows, ..encoder })
}
