//! The families of encoders: each has one file, which turns its part of a `config.json` into an [`Encoder`], and one line here.
mod clip;
mod dinov2;
mod gemma4;
mod idefics3;
mod internvl;
mod pixtral;
mod qwen2_5_vl;
mod qwen2_vl;
mod qwen3_5;
mod qwen3_vl;
mod siglip;
mod siglip2;
mod vit;

use super::encoder::{BlockNames, Encoder, Feature, Interpolation, Names, Pointwise, StemNames, Windows};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

/// A family of image encoders: the `model_type`s that name it, and how its settings are read.
#[derive(Debug)]
pub struct EncoderFamily {
    /// Values of `model_type` of the encoder alone.
    pub model_types: &'static [&'static str],
    /// Values of `model_type` of models whose `vision_config` describes the encoder, and whose other parts are not used.
    pub wholes: &'static [&'static str],
    /// Known models of the family, for people.
    pub models: &'static str,
    /// Reads the part of `config.json` that describes the encoder.
    pub(super) read: fn(&Source<'_>) -> Result<Encoder>,
}

/// Every family of encoders that can be computed.
pub static ENCODERS: &[&EncoderFamily] = &[
    &clip::FAMILY,
    &dinov2::FAMILY,
    &gemma4::FAMILY,
    &idefics3::FAMILY,
    &internvl::FAMILY,
    &pixtral::FAMILY,
    &qwen2_vl::FAMILY,
    &qwen2_5_vl::FAMILY,
    &qwen3_vl::FAMILY,
    &qwen3_5::FAMILY,
    &qwen3_5::SPARSE,
    &siglip::FAMILY,
    &siglip2::FAMILY,
    &vit::FAMILY,
];

/// What a class of Transformers assumes where a key is absent.
pub(super) struct Defaults {
    /// `hidden_size`, `num_hidden_layers`, `num_attention_heads`, `image_size`, `patch_size`.
    pub(super) sizes: [usize; 5],
    pub(super) intermediate_size: usize,
    pub(super) activation: &'static str,
    pub(super) eps: f64,
}

/// The most blocks of an encoder, and the most patches of a side.
const MOST: usize = 4096;

/// The encoder that the shared keys describe, without class token, norm before the blocks, or layer scale; its output is that
/// after the last norm.
pub(super) fn encoder(
    source: &Source<'_>,
    family: &'static str,
    names: &Names,
    defaults: &Defaults,
) -> Result<Encoder> {
    for key in ["attention_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "dropout"] {
        if source.number(key)?.unwrap_or(0.0) != 0.0 {
            let key = format!("{}{key}", source.prefix);
            return Err(source.not_yet(format!("{key} other than 0")).hint("set it to 0.0 in config.json"));
        }
    }
    let [hidden, layers, heads, image, patch] = defaults.sizes;
    let hidden_size = source.size("hidden_size", Some(hidden))?;
    let num_heads = source.size("num_attention_heads", Some(heads))?;
    if !hidden_size.is_multiple_of(num_heads) {
        return Err(source.error(format!(
            "{}hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}",
            source.prefix
        )));
    }
    let num_hidden_layers = source.size_up_to("num_hidden_layers", Some(layers), MOST)?;
    let (image, patch_size) =
        (source.size("image_size", Some(image))?, source.size_up_to("patch_size", Some(patch), MOST)?);
    let side = image / patch_size;
    if !(1..=MOST).contains(&side) {
        return Err(source.error(format!(
            "{}image_size {image} and patch_size {patch_size} give {side} patches a side",
            source.prefix
        )));
    }
    let activation = source.text("hidden_act")?.unwrap_or(defaults.activation);
    let activation =
        Pointwise::parse(activation).ok_or_else(|| source.not_yet(format!("hidden_act {activation:?}")))?;
    Ok(Encoder {
        family,
        prefix: String::new(),
        names: *names,
        hidden_size,
        intermediate_size: source.size("intermediate_size", Some(defaults.intermediate_size))?,
        num_hidden_layers,
        num_heads,
        num_kv_heads: num_heads,
        head_dim: hidden_size / num_heads,
        channels: source.size_up_to("num_channels", Some(3), 16)?,
        patch_size,
        frames: None,
        grid: [side; 2],
        norm_eps: source.positive("layer_norm_eps", defaults.eps)?,
        activation,
        class_token: false,
        registers: 0,
        channels_last: false,
        centered: false,
        patch_bias: true,
        qkv_bias: true,
        bias: true,
        fused_qkv: false,
        gated_mlp: false,
        rms_norm: false,
        pre_norm: false,
        qk_norms: None,
        post_norms: None,
        clipped: false,
        layer_scale: false,
        interpolation: Some(Interpolation::Bicubic),
        rope_theta: None,
        rope_in_turns: false,
        rope_by_halves: false,
        pooled: false,
        windows: None,
        feature: Feature { blocks: num_hidden_layers, final_norm: true, drop_prefix: true },
        initializer_range: source.positive("initializer_range", 0.02)?,
    })
}

/// Names that CLIP, SigLIP and Idefics 3 share.
pub(super) const CLIP_NAMES: Names = Names {
    stem: StemNames {
        patch: "embeddings.patch_embedding",
        class_token: "embeddings.class_embedding",
        class_dimensions: 0,
        registers: "",
        positions: "embeddings.position_embedding.weight",
        positions_batched: false,
        pre_norm: "pre_layrnorm", // sic
        final_norm: "post_layernorm",
    },
    blocks: "encoder.layers",
    block: BlockNames {
        norm1: "layer_norm1",
        query: "self_attn.q_proj",
        key: "self_attn.k_proj",
        value: "self_attn.v_proj",
        out: "self_attn.out_proj",
        norm2: "layer_norm2",
        fc1: "mlp.fc1",
        up: "",
        fc2: "mlp.fc2",
        scale1: "",
        scale2: "",
    },
    stored: &[],
};

/// Names that ViT and `DINOv2` share, but for a block's.
pub(super) const VIT_STEM: StemNames = StemNames {
    patch: "embeddings.patch_embeddings.projection",
    class_token: "embeddings.cls_token",
    class_dimensions: 2,
    registers: "embeddings.register_tokens",
    positions: "embeddings.position_embeddings",
    positions_batched: true,
    pre_norm: "",
    final_norm: "layernorm",
};

/// Names that the encoders of Qwen's models share, but for the MLP's.
pub(super) const QWEN_NAMES: Names = Names {
    stem: StemNames {
        patch: "patch_embed.proj",
        class_token: "",
        class_dimensions: 0,
        registers: "",
        positions: "pos_embed.weight",
        positions_batched: false,
        pre_norm: "",
        final_norm: "",
    },
    blocks: "blocks",
    block: BlockNames {
        norm1: "norm1",
        query: "attn.qkv",
        key: "",
        value: "",
        out: "attn.proj",
        norm2: "norm2",
        fc1: "mlp.fc1",
        up: "",
        fc2: "mlp.fc2",
        scale1: "",
        scale2: "",
    },
    stored: &[],
};

/// What the encoders of Qwen's models share: patches of several frames, one module for q, k and v, positions that turn, no norm
/// after the blocks. `hidden_size` is the key of the width.
pub(super) fn qwen_encoder(
    source: &Source<'_>,
    family: &'static str,
    names: &Names,
    defaults: &Defaults,
    hidden_size: &str,
) -> Result<Encoder> {
    let [_, _, _, _, patch] = defaults.sizes;
    let patch_size = source.size_up_to("patch_size", Some(patch), MOST)?;
    let mut plain = Source { origin: source.origin, map: source.map.clone(), prefix: source.prefix.clone() };
    let renamed = [
        (hidden_size, "hidden_size"),
        ("depth", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("in_chans", "num_channels"),
        ("in_channels", "num_channels"),
    ];
    // No keys of these classes.
    for other in ["layer_norm_eps", "num_hidden_layers", "num_attention_heads", "num_channels"] {
        plain.map.remove(other);
    }
    for (theirs, ours) in renamed {
        match source.get(theirs) {
            Some(value) => plain.map.insert(ours.into(), value.clone()),
            None if theirs == hidden_size => plain.map.remove(ours),
            None => None,
        };
    }
    plain.map.insert("image_size".into(), patch_size.into());
    let encoder = encoder(&plain, family, names, defaults)?;
    if !encoder.hidden_size.is_multiple_of(4 * encoder.num_heads) {
        return Err(source.error(format!("{}{hidden_size}: a head's width is not a multiple of 4", source.prefix)));
    }
    let frames = source.size_up_to("temporal_patch_size", Some(2), 64)?;
    let feature = Feature { final_norm: false, ..encoder.feature };
    let theta = match source.get("rope_parameters") {
        Some(serde_json::Value::Object(rope)) => rope.get("rope_theta").and_then(serde_json::Value::as_f64),
        Some(_) => return Err(source.mismatch("rope_parameters", "an object")),
        None => None,
    };
    let (fused_qkv, rope_theta) = (true, Some(theta.unwrap_or(10_000.0)));
    Ok(Encoder { frames: Some(frames), grid: [0; 2], interpolation: None, fused_qkv, rope_theta, feature, ..encoder })
}
