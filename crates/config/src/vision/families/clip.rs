//! CLIP's image encoder: `transformers.models.clip`. A class token, a norm before the blocks, and none after the patches' last.
use super::{CLIP_NAMES, Defaults, Encoder, EncoderFamily, Feature, Source, encoder};
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily =
    EncoderFamily { model_types: &["clip_vision_model"], wholes: &["clip"], models: "CLIP ViT-B/32, B/16, L/14", read };

fn read(source: &Source<'_>) -> Result<Encoder> {
    let defaults =
        Defaults { sizes: [768, 12, 12, 224, 32], intermediate_size: 3072, activation: "quick_gelu", eps: 1e-5 };
    let encoder = encoder(source, "clip_vision_model", &CLIP_NAMES, &defaults)?;
    // The last norm is on the class token alone.
    let feature = Feature { final_norm: false, ..encoder.feature };
    Ok(Encoder { class_token: true, patch_bias: false, pre_norm: true, feature, ..encoder })
}
