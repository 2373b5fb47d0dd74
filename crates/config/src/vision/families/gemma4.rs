//! The image encoder of Gemma 4: `transformers.models.gemma4`. Images of any shape, a table of positions for each axis, positions that turn
//! too, `RMSNorm` before and behind each branch and on each head, a gated MLP, no biases.
use super::{
    BlockNames, Defaults, Encoder, EncoderFamily, Feature, Interpolation, MOST, Names, Source, StemNames, encoder,
};
use crate::hf_json::MAX_SIZE;
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily = EncoderFamily {
    model_types: &["gemma4_vision"],
    wholes: &[],
    models: "inside Gemma 4 E2B, E4B, 26B-A4B and 31B",
    read,
};

const NAMES: Names = Names {
    stem: StemNames {
        patch: "patch_embedder.input_proj",
        class_token: "",
        class_dimensions: 0,
        registers: "",
        positions: "patch_embedder.position_embedding_table",
        positions_batched: false,
        pre_norm: "",
        final_norm: "",
    },
    blocks: "encoder.layers",
    block: BlockNames {
        norm1: "input_layernorm",
        query: "self_attn.q_proj.linear",
        key: "self_attn.k_proj.linear",
        value: "self_attn.v_proj.linear",
        out: "self_attn.o_proj.linear",
        norm2: "pre_feedforward_layernorm",
        fc1: "mlp.gate_proj.linear",
        up: "mlp.up_proj.linear",
        fc2: "mlp.down_proj.linear",
        scale1: "",
        scale2: "",
    },
    stored: &[],
};

fn read(source: &Source<'_>) -> Result<Encoder> {
    let defaults =
        Defaults { sizes: [768, 16, 12, 16, 16], intermediate_size: 3072, activation: "gelu_pytorch_tanh", eps: 1e-6 };
    let mut plain = Source { origin: source.origin, map: source.map.clone(), prefix: source.prefix.clone() };
    // Its class has other names for these, and no size of images.
    for (theirs, ours) in
        [("rms_norm_eps", "layer_norm_eps"), ("hidden_activation", "hidden_act"), ("", "num_channels")]
    {
        match source.get(theirs) {
            Some(value) => plain.map.insert(ours.into(), value.clone()),
            None => plain.map.remove(ours),
        };
    }
    plain.map.insert("image_size".into(), source.size("patch_size", Some(16))?.into());
    let encoder = encoder(&plain, "gemma4_vision", &NAMES, &defaults)?;
    let num_kv_heads = source.size("num_key_value_heads", Some(12))?;
    if !encoder.num_heads.is_multiple_of(num_kv_heads) {
        return Err(source.mismatch("num_key_value_heads", &format!("a divisor of {}", encoder.num_heads)));
    }
    let head_dim = source.size_up_to("head_dim", Some(64), MOST)?;
    if !head_dim.is_multiple_of(4) {
        return Err(source.mismatch("head_dim", "a multiple of 4"));
    }
    let places = source.size_up_to("position_embedding_size", Some(10 * 1024), MAX_SIZE)?;
    Ok(Encoder {
        num_kv_heads,
        head_dim,
        grid: [2, places],
        channels_last: true,
        centered: true,
        patch_bias: false,
        qkv_bias: false,
        bias: false,
        gated_mlp: true,
        rms_norm: true,
        qk_norms: Some(["self_attn.q_norm", "self_attn.k_norm"]),
        post_norms: Some(["post_attention_layernorm", "post_feedforward_layernorm"]),
        clipped: source.flag("use_clipped_linears", false)?,
        interpolation: Some(Interpolation::Axes),
        rope_theta: Some(theta(source)?),
        rope_by_halves: true,
        pooled: true,
        feature: Feature { final_norm: false, ..encoder.feature },
        ..encoder
    })
}

/// The base of the frequencies.
fn theta(source: &Source<'_>) -> Result<f64> {
    if source.get("rope_parameters").is_none() {
        return Ok(100.0);
    }
    let rope = source.part("rope_parameters")?;
    if rope.text("rope_type")?.unwrap_or("axial") != "axial" {
        return Err(rope.mismatch("rope_type", "\"axial\""));
    }
    rope.positive("rope_theta", 100.0)
}
