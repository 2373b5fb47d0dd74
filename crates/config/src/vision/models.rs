//! From `config.json` to a [`VisionArch`]: composite checkpoints, and encoders in folders of their own.
use std::path::Path;

use serde_json::{Map, Value};

use super::chat::{ChatForm, ChatImages};
use super::connector::{Connector, ConnectorKind, Pairing};
use super::encoder::{Encoder, Feature, Pointwise};
use super::families::{ENCODERS, EncoderFamily};
use super::{VisionArch, VisionTraining};
use crate::hf_json::{Source, read_text};
use tunesmith_base::error::{Error, Result};

/// Where a composite class has its encoder.
const TOWER: &str = "model.vision_tower.";
/// Keys of the token that stands for a row of a picture.
const IMAGE: [&str; 2] = ["image_token_id", "image_token_index"];
/// And its connector.
const PROJECTOR: &str = "model.multi_modal_projector.";

fn open<'a>(dir: &Path, path: &'a Path) -> Result<Source<'a>> {
    let text = read_text(path)?.ok_or_else(|| {
        Error::model(format!("{}: no such file", path.display()))
            .hint(format!("{} must be a model's folder in Hugging Face's form", dir.display()))
    })?;
    Source::parse(&text, path)
}

/// The object under `key`.
fn inner<'a>(source: &Source<'a>, key: &str) -> Result<Source<'a>> {
    match source.get(key) {
        Some(Value::Object(map)) => {
            Ok(Source { origin: source.origin, map: map.clone(), prefix: format!("{}{key}.", source.prefix) })
        }
        _ => Err(source.mismatch(key, "an object that describes the image encoder")),
    }
}

/// The encoder that `source` describes; `class` is taken where that does not say which it is.
fn encoder(source: &Source<'_>, class: Option<&str>) -> Result<Encoder> {
    let kind = source.text("model_type")?.or(class).unwrap_or_default().to_owned();
    let known = |family: &&&EncoderFamily| family.model_types.contains(&kind.as_str());
    let family = ENCODERS.iter().find(known).ok_or_else(|| {
        let known: Vec<_> = ENCODERS.iter().flat_map(|family| family.model_types).copied().collect();
        source
            .not_yet(format!("{}model_type {kind:?}, an image encoder", source.prefix))
            .hint(format!("image encoders in this version: {}", known.join(", ")))
    })?;
    (family.read)(source)
}

/// The output number `index` of an encoder's `hidden_states`, of which -1 is the last block's.
fn feature_layer(source: &Source<'_>, key: &str, index: i64, encoder: &Encoder) -> Result<Feature> {
    let outputs = encoder.num_hidden_layers as i64 + 1;
    let at = if index < 0 { outputs + index } else { index };
    match usize::try_from(at).ok().filter(|at| (1..=encoder.num_hidden_layers).contains(at)) {
        Some(blocks) => Ok(Feature { blocks, final_norm: false, ..encoder.feature }),
        None => Err(source.mismatch(key, &format!("an output from {} to {}", 1 - outputs, outputs - 1))),
    }
}

fn llava(source: &Source<'_>, decoder_size: usize) -> Result<VisionArch> {
    let mut encoder = encoder(&inner(source, "vision_config")?, Some("clip_vision_model"))?;
    TOWER.clone_into(&mut encoder.prefix);
    let key = "vision_feature_layer";
    let index = match source.get(key) {
        None => -2,
        Some(Value::Array(_)) => return Err(source.not_yet(format!("a list as {key}"))),
        Some(value) => value.as_i64().ok_or_else(|| source.mismatch(key, "a whole number"))?,
    };
    encoder.feature = feature_layer(source, key, index, &encoder)?;
    encoder.feature.drop_prefix = match source.text("vision_feature_select_strategy")? {
        None | Some("default") => true,
        Some("full") => false,
        Some(_) => return Err(source.mismatch("vision_feature_select_strategy", "\"default\" or \"full\"")),
    };
    let name = source.text("projector_hidden_act")?.unwrap_or("gelu");
    let activation = Pointwise::parse(name).ok_or_else(|| source.not_yet(format!("projector_hidden_act {name:?}")))?;
    let kind = ConnectorKind::Mlp {
        names: ["linear_1", "linear_2"].map(|name| format!("{PROJECTOR}{name}")),
        hidden_size: decoder_size,
        activation,
        bias: source.flag("multimodal_projector_bias", true)?,
        dropout: 0.0,
    };
    let token = token(source, &IMAGE, 32_000)?;
    let chat = Some(ChatImages { token, form: ChatForm::Bare });
    Ok(VisionArch { chat, ..whole(encoder, kind, decoder_size) })
}

fn gemma3(source: &Source<'_>, decoder_size: usize) -> Result<VisionArch> {
    let mut encoder = encoder(&inner(source, "vision_config")?, Some("siglip_vision_model"))?;
    TOWER.clone_into(&mut encoder.prefix);
    let tokens = source.size("mm_tokens_per_image", Some(256))?;
    let side = tokens.isqrt();
    let patches = encoder.grid[0];
    if side * side != tokens || side == 0 || !patches.is_multiple_of(side) {
        return Err(source.mismatch("mm_tokens_per_image", &format!("the square of a divisor of {patches}")));
    }
    let kind = ConnectorKind::AveragePool {
        kernel: patches / side,
        norm: format!("{PROJECTOR}mm_soft_emb_norm"),
        eps: encoder.norm_eps,
        projection: format!("{PROJECTOR}mm_input_projection_weight"),
    };
    let begin = token(source, &["boi_token_id", "boi_token_index"], 255_999)?;
    let end = token(source, &["eoi_token_id", "eoi_token_index"], 256_000)?;
    let chat = ChatImages { token: token(source, &IMAGE, 262_144)?, form: ChatForm::Gemma3 { begin, end } };
    Ok(VisionArch { chat: Some(chat), bidirectional: true, ..whole(encoder, kind, decoder_size) })
}

fn idefics3(source: &Source<'_>, decoder_size: usize) -> Result<VisionArch> {
    let mut encoder = encoder(&inner(source, "vision_config")?, Some("idefics3_vision"))?;
    "model.vision_model.".clone_into(&mut encoder.prefix);
    let factor = source.size_up_to("scale_factor", Some(2), 64)?;
    if !encoder.grid[0].is_multiple_of(factor) {
        return Err(source.mismatch("scale_factor", &format!("a divisor of {} patches a side", encoder.grid[0])));
    }
    let kind = ConnectorKind::PixelShuffle { name: "model.connector.modality_projection.proj".to_owned(), factor };
    let chat = Some(ChatImages { token: token(source, &IMAGE, 128_257)?, form: ChatForm::Idefics3 });
    Ok(VisionArch { chat, ..whole(encoder, kind, decoder_size) })
}

/// The token under the first of these keys, newer before older, that is there.
fn token(source: &Source<'_>, keys: &[&str], default: u32) -> Result<u32> {
    match keys.iter().find(|key| source.get(key).is_some()) {
        None => Ok(default),
        Some(key) => match source.token_ids(key)?[..] {
            [id] => Ok(id),
            _ => Err(source.mismatch(key, "a token id")),
        },
    }
}

fn whole(encoder: Encoder, kind: ConnectorKind, decoder_size: usize) -> VisionArch {
    let connector = Connector { encoder_size: encoder.hidden_size, decoder_size, kind, stored: true };
    let training = VisionTraining::default();
    VisionArch { encoder, connector, bidirectional: false, chat: None, folder: None, training, features: None }
}

pub(super) fn read(dir: &Path, decoder_size: usize) -> Result<VisionArch> {
    let path = dir.join("config.json");
    let source = open(dir, &path)?;
    match source.text("model_type")?.unwrap_or_default() {
        "llava" => llava(&source, decoder_size),
        "gemma3" => gemma3(&source, decoder_size),
        "idefics3" | "smolvlm" => idefics3(&source, decoder_size),
        other => Err(source
            .not_yet(format!("pictures in a model of model_type {other:?}"))
            .hint("models that see pictures in this version: gemma3, idefics3, llava, smolvlm; or set vision.encoder")),
    }
}

pub(super) fn pair(dir: &Path, pairing: &Pairing, decoder_size: usize) -> Result<VisionArch> {
    let path = dir.join("config.json");
    let source = open(dir, &path)?;
    let kind = source.text("model_type")?.unwrap_or_default();
    let part = match ENCODERS.iter().find(|family| family.wholes.contains(&kind)) {
        Some(family) => {
            let mut part = if source.has("vision_config") {
                inner(&source, "vision_config")?
            } else {
                Source { origin: source.origin, map: Map::new(), prefix: "vision_config.".into() }
            };
            part.map.entry("model_type").or_insert_with(|| family.model_types[0].into());
            part
        }
        None => source,
    };
    let mut encoder = encoder(&part, None)?;
    TOWER.clone_into(&mut encoder.prefix);
    if let Some(index) = pairing.feature_layer {
        encoder.feature = feature_layer(&part, "num_hidden_layers", index, &encoder)?;
    }
    let kind = match pairing.hidden_size {
        None => ConnectorKind::Linear { name: format!("{PROJECTOR}linear"), bias: true },
        Some(hidden_size) => ConnectorKind::Mlp {
            names: ["linear_1", "linear_2"].map(|name| format!("{PROJECTOR}{name}")),
            hidden_size,
            activation: Pointwise::Gelu,
            bias: true,
            dropout: pairing.dropout,
        },
    };
    let mut paired = whole(encoder, kind, decoder_size);
    paired.connector.stored = false;
    paired.folder = Some(dir.to_owned());
    Ok(paired)
}
