//! `VisionEncoderDecoderModel`: the decoder reads the encoder's outputs by cross-attention, including the class token.
//! If the widths differ, a linear module converts between them.
use super::connector::{Connector, Step};
use super::encoder::{Encoder, Feature};
use crate::hf_json::Source;
use crate::wrapped::{ENCODER, ENCODER_DECODER, PROJECTION};
use tunesmith_base::error::Result;

/// The encoders that this class supports here, because their own classes give the outputs that it asks for.
const ENCODERS: [&str; 5] = ["clip_vision_model", "dinov2", "dinov2_with_registers", "siglip_vision_model", "vit"];
/// The key of the token that begins a text.
const START: &str = "decoder_start_token_id";

/// Refuses an encoder that is not in [`ENCODERS`].
pub(super) fn check(source: &Source<'_>, part: &Source<'_>) -> Result<()> {
    let kind = part.text("model_type")?.unwrap_or_default();
    if ENCODERS.contains(&kind) {
        return Ok(());
    }
    Err(source
        .not_yet(format!("encoder.model_type {kind:?} in a {} model", ENCODER_DECODER.model_type))
        .hint(format!("encoders in this version: {}", ENCODERS.join(", "))))
}

/// The encoder as the decoder reads it, and the connector to the decoder's width.
pub(super) fn parts(source: &Source<'_>, encoder: Encoder, decoder_size: usize) -> Result<(Encoder, Connector)> {
    let feature = Feature { drop_prefix: false, ..encoder.feature };
    let encoder = Encoder { prefix: ENCODER.to_owned(), feature, ..encoder };
    let width = encoder.hidden_size;
    let decoder = source.part("decoder")?;
    // With this key, the class leaves out the linear module. GPT-2's keys and values then fit only one width.
    if decoder.get("cross_attention_hidden_size").is_some() {
        let found = decoder.size("cross_attention_hidden_size", None)?;
        if found != width || width != decoder_size {
            let expected = format!("null, or {width}, the encoder's width, where the decoder is as wide");
            return Err(decoder.mismatch("cross_attention_hidden_size", &expected));
        }
    }
    let steps = if width == decoder_size {
        Vec::new()
    } else {
        vec![Step::linear(PROJECTION.to_owned(), [width, decoder_size], true)]
    };
    Ok((encoder, Connector { kind: "linear", encoder_size: width, decoder_size, steps, stored: true }))
}

/// The token that begins a text: that of `config.json`, which the class uses in training. `generate` uses that of
/// `generation_config.json`, so both must be the same.
pub(super) fn start_token(source: &Source<'_>, generation: Option<&Source<'_>>) -> Result<u32> {
    let id = |source: &Source<'_>| match source.token_ids(START)?[..] {
        [] => Ok(None),
        [id] => Ok(Some(id)),
        _ => Err(source.mismatch(START, "a token id")),
    };
    let of_generation = generation.map(id).transpose()?.flatten();
    match (id(source)?, of_generation) {
        (Some(own), Some(other)) if own != other => {
            Err(source.mismatch(START, &format!("{other}, as generation_config.json has it")))
        }
        (Some(id), _) | (None, Some(id)) => Ok(id),
        (None, None) => Err(source.mismatch(START, "the token that begins a text").hint(
            "often it is the tokenizer's bos_token_id or eos_token_id: set it in config.json as the model was trained",
        )),
    }
}
