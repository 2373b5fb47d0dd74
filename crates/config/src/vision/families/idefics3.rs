//! The image encoder of Idefics 3 and SmolVLM: SigLIP's with positions by share of the way. `transformers.models.idefics3`.
use super::{CLIP_NAMES, Defaults, Encoder, EncoderFamily, Interpolation, Source, encoder};
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily = EncoderFamily {
    model_types: &["idefics3_vision", "smolvlm_vision", "idefics3"],
    wholes: &[],
    models: "inside Idefics 3 and SmolVLM",
    read,
};

fn read(source: &Source<'_>) -> Result<Encoder> {
    let defaults = Defaults {
        sizes: [1152, 12, 16, 224, 32],
        intermediate_size: 3072,
        activation: "gelu_pytorch_tanh",
        eps: 1e-6,
    };
    let encoder = encoder(source, "idefics3_vision", &CLIP_NAMES, &defaults)?;
    Ok(Encoder { interpolation: Some(Interpolation::Nearest), ..encoder })
}
