//! `DINOv2`, with and without registers: `transformers.models.dinov2`, `dinov2_with_registers`. Oquab et al., 2023.
use super::{BlockNames, Defaults, Encoder, EncoderFamily, Interpolation, Names, Source, VIT_STEM, encoder};
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily = EncoderFamily {
    model_types: &["dinov2", "dinov2_with_registers"],
    wholes: &[],
    models: "DINOv2 S/14, B/14, L/14 (not giant)",
    read,
};

const NAMES: Names = Names {
    stem: VIT_STEM,
    blocks: "encoder.layer",
    block: BlockNames {
        norm1: "norm1",
        query: "attention.q_proj",
        key: "attention.k_proj",
        value: "attention.v_proj",
        out: "attention.o_proj",
        norm2: "norm2",
        fc1: "mlp.fc1",
        up: "",
        fc2: "mlp.fc2",
        scale1: "layer_scale1.lambda1",
        scale2: "layer_scale2.lambda1",
    },
    stored: &[
        ("attention.q_proj", "attention.attention.query"),
        ("attention.k_proj", "attention.attention.key"),
        ("attention.v_proj", "attention.attention.value"),
        ("attention.o_proj", "attention.output.dense"),
    ],
};

fn read(source: &Source<'_>) -> Result<Encoder> {
    if source.flag("use_swiglu_ffn", false)? {
        return Err(source.not_yet("use_swiglu_ffn, the gated MLP of DINOv2 giant"));
    }
    let registers = source.text("model_type")? == Some("dinov2_with_registers");
    let (family, registers, interpolation) = if registers {
        let count = source.size_up_to("num_register_tokens", Some(4), 4096)?;
        ("dinov2_with_registers", count, Interpolation::AntialiasedBicubic)
    } else {
        ("dinov2", 0, Interpolation::Bicubic)
    };
    let defaults = Defaults { sizes: [768, 12, 12, 224, 14], intermediate_size: 3072, activation: "gelu", eps: 1e-6 };
    let encoder = encoder(source, family, &NAMES, &defaults)?;
    let ratio = source.size_up_to("mlp_ratio", Some(4), 64)?;
    let intermediate_size = encoder.hidden_size * ratio;
    let qkv_bias = source.flag("qkv_bias", true)?;
    let interpolation = Some(interpolation);
    Ok(Encoder {
        class_token: true,
        layer_scale: true,
        registers,
        interpolation,
        intermediate_size,
        qkv_bias,
        ..encoder
    })
}
