//! The image encoder of SigLIP 2 NaFlex, whose images keep their shape: `transformers.models.siglip2`. An image has as
//! many rows and columns of patches as it needs; positions are resized to them.
use super::{CLIP_NAMES, Defaults, Encoder, EncoderFamily, Interpolation, MOST, Source, encoder};
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily =
    EncoderFamily { model_types: &["siglip2_vision_model"], wholes: &["siglip2"], models: "SigLIP 2 NaFlex", read };

fn read(source: &Source<'_>) -> Result<Encoder> {
    let patches = source.size_up_to("num_patches", Some(256), MOST * MOST)?;
    let side = patches.isqrt();
    if side * side != patches {
        return Err(source.mismatch("num_patches", "a square"));
    }
    let patch = source.size_up_to("patch_size", Some(16), MOST)?;
    let mut plain = Source { origin: source.origin, map: source.map.clone(), prefix: source.prefix.clone() };
    plain.map.insert("image_size".into(), (side * patch).into());
    let defaults =
        Defaults { sizes: [768, 12, 12, 224, 16], intermediate_size: 3072, activation: "gelu_pytorch_tanh", eps: 1e-6 };
    let encoder = encoder(&plain, "siglip2_vision_model", &CLIP_NAMES, &defaults)?;
    Ok(Encoder { channels_last: true, interpolation: Some(Interpolation::AntialiasedBilinear), ..encoder })
}
