//! The image encoder of `InternVL` in Transformers' form: `transformers.models.internvl`. ViT's with layer scale.
use super::{BlockNames, Defaults, Encoder, EncoderFamily, Feature, Names, Source, VIT_STEM, encoder};
use serde_json::Value;
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily = EncoderFamily {
    model_types: &["internvl_vision"],
    wholes: &["internvl"],
    models: "inside InternVL (InternViT-300M, not 6B)",
    read,
};

const NAMES: Names = Names {
    stem: VIT_STEM,
    blocks: "encoder.layer",
    block: BlockNames {
        norm1: "layernorm_before",
        query: "attention.q_proj",
        key: "attention.k_proj",
        value: "attention.v_proj",
        out: "attention.projection_layer",
        norm2: "layernorm_after",
        fc1: "mlp.fc1",
        up: "",
        fc2: "mlp.fc2",
        scale1: "lambda_1",
        scale2: "lambda_2",
    },
    stored: &[],
};

fn read(source: &Source<'_>) -> Result<Encoder> {
    for (key, value) in [("use_qk_norm", true), ("use_absolute_position_embeddings", false)] {
        if source.flag(key, !value)? == value {
            return Err(source.not_yet(format!("{key}: {value} of an image encoder")));
        }
    }
    let mut square = Source { origin: source.origin, map: source.map.clone(), prefix: source.prefix.clone() };
    // Sides may stand as two equal numbers.
    for key in ["image_size", "patch_size"] {
        if let Some(Value::Array(sides)) = source.get(key) {
            match sides.as_slice() {
                [one, other] if one == other => square.map.insert(key.into(), one.clone()),
                _ => return Err(source.mismatch(key, "a number, or two equal ones")),
            };
        }
    }
    let rms_norm = match source.text("norm_type")? {
        None | Some("layer_norm") => false,
        Some("rms_norm") => true,
        Some(_) => return Err(source.mismatch("norm_type", "\"layer_norm\" or \"rms_norm\"")),
    };
    let defaults = Defaults { sizes: [1024, 24, 16, 448, 14], intermediate_size: 4096, activation: "gelu", eps: 1e-6 };
    let encoder = encoder(&square, "internvl_vision", &NAMES, &defaults)?;
    let final_norm = !source.flag("use_mean_pooling", true)?;
    let feature = Feature { final_norm, ..encoder.feature };
    let qkv_bias = source.flag("attention_bias", false)?;
    Ok(Encoder { class_token: true, layer_scale: true, rms_norm, qkv_bias, feature, ..encoder })
}
