//! SigLIP's image encoder, and that of SigLIP 2 with pictures of one size: `transformers.models.siglip`.
use super::{CLIP_NAMES, Defaults, Encoder, EncoderFamily, Source, encoder};
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily = EncoderFamily {
    model_types: &["siglip_vision_model"],
    wholes: &["siglip"],
    models: "SigLIP, SigLIP 2 of one size",
    read,
};

fn read(source: &Source<'_>) -> Result<Encoder> {
    let defaults =
        Defaults { sizes: [768, 12, 12, 224, 16], intermediate_size: 3072, activation: "gelu_pytorch_tanh", eps: 1e-6 };
    encoder(source, "siglip_vision_model", &CLIP_NAMES, &defaults)
}
