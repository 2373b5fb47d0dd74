//! ViT: `transformers.models.vit`. Dosovitskiy et al., 2020.
use super::{BlockNames, Defaults, Encoder, EncoderFamily, Names, Source, VIT_STEM, encoder};
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily = EncoderFamily {
    model_types: &["vit"],
    wholes: &[],
    models: "ViT-B/16, ViT-L/16",
    read,
};

const NAMES: Names = Names {
    stem: VIT_STEM,
    blocks: "encoder.layer",
    block: BlockNames {
        norm1: "layernorm_before",
        query: "attention.attention.query",
        key: "attention.attention.key",
        value: "attention.attention.value",
        out: "attention.output.dense",
        norm2: "layernorm_after",
        fc1: "intermediate.dense",
        fc2: "output.dense",
        scale1: "",
        scale2: "",
    },
};

fn read(source: &Source<'_>) -> Result<Encoder> {
    let defaults = Defaults {
        sizes: [768, 12, 12, 224, 16],
        intermediate_size: 3072,
        activation: "gelu",
        eps: 1e-12,
    };
    let encoder = encoder(source, "vit", NAMES, &defaults)?;
    Ok(Encoder { class_token: true, qkv_bias: source.flag("qkv_bias", true)?, ..encoder })
}
