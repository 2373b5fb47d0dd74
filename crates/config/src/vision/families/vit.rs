//! ViT: `transformers.models.vit`. Dosovitskiy et al., 2020.
use super::{BlockNames, Defaults, Encoder, EncoderFamily, Names, Source, VIT_STEM, encoder};
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily =
    EncoderFamily { model_types: &["vit"], wholes: &[], models: "ViT-B/16, ViT-L/16", read };

const NAMES: Names = Names {
    stem: VIT_STEM,
    blocks: "layers",
    block: BlockNames {
        norm1: "layernorm_before",
        query: "attention.q_proj",
        key: "attention.k_proj",
        value: "attention.v_proj",
        out: "attention.o_proj",
        norm2: "layernorm_after",
        fc1: "mlp.fc1",
        up: "",
        fc2: "mlp.fc2",
        scale1: "",
        scale2: "",
    },
    stored: &[
        ("attention.q_proj", "attention.attention.query"),
        ("attention.k_proj", "attention.attention.key"),
        ("attention.v_proj", "attention.attention.value"),
        ("attention.o_proj", "attention.output.dense"),
        ("mlp.fc1", "intermediate.dense"),
        ("mlp.fc2", "output.dense"),
        ("layers.", "encoder.layer."),
    ],
};

fn read(source: &Source<'_>) -> Result<Encoder> {
    let defaults = Defaults { sizes: [768, 12, 12, 224, 16], intermediate_size: 3072, activation: "gelu", eps: 1e-12 };
    let encoder = encoder(source, "vit", &NAMES, &defaults)?;
    Ok(Encoder { class_token: true, qkv_bias: source.flag("qkv_bias", true)?, ..encoder })
}
