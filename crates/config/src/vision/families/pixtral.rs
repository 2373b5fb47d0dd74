//! The image encoder of Pixtral 12B, Mistral Small 3, and Ministral 3: `transformers.models.pixtral`. Images of any shape, positions that
//! turn, `RMSNorm` with one before the blocks too, a gated MLP, no biases.
use super::{BlockNames, Defaults, Encoder, EncoderFamily, Feature, Names, Source, StemNames, encoder};
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily = EncoderFamily {
    model_types: &["pixtral"],
    wholes: &[],
    models: "inside Pixtral 12B, Mistral Small 3, Ministral 3",
    read,
};

const NAMES: Names = Names {
    stem: StemNames {
        patch: "patch_conv",
        class_token: "",
        class_dimensions: 0,
        registers: "",
        positions: "",
        positions_batched: false,
        pre_norm: "ln_pre",
        final_norm: "",
    },
    blocks: "transformer.layers",
    block: BlockNames {
        norm1: "attention_norm",
        query: "attention.q_proj",
        key: "attention.k_proj",
        value: "attention.v_proj",
        out: "attention.o_proj",
        norm2: "ffn_norm",
        fc1: "feed_forward.gate_proj",
        up: "feed_forward.up_proj",
        fc2: "feed_forward.down_proj",
        scale1: "",
        scale2: "",
    },
    stored: &[],
};

fn read(source: &Source<'_>) -> Result<Encoder> {
    let defaults = Defaults { sizes: [1024, 24, 16, 16, 16], intermediate_size: 4096, activation: "gelu", eps: 1e-5 };
    let mut plain = Source { origin: source.origin, map: source.map.clone(), prefix: source.prefix.clone() };
    // Its class reads neither: positions need no size, and norms have one epsilon.
    plain.map.remove("layer_norm_eps");
    plain.map.insert("image_size".into(), source.size("patch_size", Some(16))?.into());
    let encoder = encoder(&plain, "pixtral", &NAMES, &defaults)?;
    let head = encoder.hidden_size / encoder.num_heads;
    if !head.is_multiple_of(4) {
        return Err(source.error(format!("{}hidden_size: a head's width is not a multiple of 4", source.prefix)));
    }
    if source.get("head_dim").is_some() && source.size("head_dim", None)? != head {
        return Err(source.mismatch("head_dim", &format!("{head}, hidden_size over num_attention_heads")));
    }
    Ok(Encoder {
        grid: [0; 2],
        patch_bias: false,
        qkv_bias: false,
        bias: false,
        gated_mlp: true,
        rms_norm: true,
        pre_norm: true,
        interpolation: None,
        rope_theta: Some(theta(source)?),
        rope_in_turns: true,
        feature: Feature { final_norm: false, ..encoder.feature },
        ..encoder
    })
}

/// The base of the frequencies, where newer files and older ones have it.
fn theta(source: &Source<'_>) -> Result<f64> {
    let scaled = source.get("rope_scaling").is_some();
    let key = if scaled { "rope_scaling" } else { "rope_parameters" };
    let outer = source.positive("rope_theta", 10_000.0)?;
    if source.get(key).is_none() {
        return Ok(outer);
    }
    let rope = source.part(key)?;
    let kind = rope.text("rope_type")?.or(rope.text("type")?).unwrap_or("default");
    if !["axial", "default"].contains(&kind) {
        return Err(rope.mismatch("rope_type", "\"axial\""));
    }
    rope.positive("rope_theta", outer)
}
