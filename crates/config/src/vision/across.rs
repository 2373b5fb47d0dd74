//! `VisionEncoderDecoderModel`: the decoder reads the encoder's rows by cross-attention, class token included. A linear module brings them
//! to its width where the two differ.
use super::connector::{Connector, Step};
use super::encoder::{Encoder, Feature};
use crate::hf_json::Source;
use crate::wrapped::{ENCODER, ENCODER_DECODER, PROJECTION};
use tunesmith_base::error::Result;

/// Encoders whose class gives its rows as this model's class asks for them.
const ENCODERS: [&str; 5] = ["clip_vision_model", "dinov2", "dinov2_with_registers", "siglip_vision_model", "vit"];
/// The token that begins a text.
const START: &str = "decoder_start_token_id";

/// Refuses an encoder whose class is another.
pub(super) fn check(source: &Source<'_>, part: &Source<'_>) -> Result<()> {
    let kind = part.text("model_type")?.unwrap_or_default();
    if ENCODERS.contains(&kind) {
        return Ok(());
    }
    Err(source
        .not_yet(format!("encoder.model_type {kind:?} in a {} model", ENCODER_DECODER.model_type))
        .hint(format!("encoders in this version: {}", ENCODERS.join(", "))))
}

/// The encoder as the decoder reads it, and what brings its rows to the decoder's width.
pub(super) fn parts(source: &Source<'_>, encoder: Encoder, decoder_size: usize) -> Result<(Encoder, Connector)> {
    let feature = Feature { drop_prefix: false, ..encoder.feature };
    let encoder = Encoder { prefix: ENCODER.to_owned(), feature, ..encoder };
    let width = encoder.hidden_size;
    let decoder = source.part("decoder")?;
    // With the key, the class leaves the linear module out; GPT-2's keys and values then fit one width alone.
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

/// The token that begins a text: that of `config.json`, with which the class trains. `generate` takes that of
/// `generation_config.json`, so that both must be the same.
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
