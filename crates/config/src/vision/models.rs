//! Reads a [`VisionArch`] from `config.json`: for composite checkpoints, such as LLaVA's, and for encoders in folders
//! of their own.
use std::path::Path;

use serde_json::{Map, Value};

use super::across;
use super::chat::{ChatForm, ChatImages};
use super::connector::{Connector, Pairing};
use super::connectors;
use super::encoder::{Encoder, Feature, Interpolation};
use super::families::{ENCODERS, EncoderFamily};
use super::joined::{self, AnyRes};
use super::{Bidirectional, Deepstack, Mrope, VisionArch, VisionTraining};
use crate::hf_json::{Source, read_text};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

/// The prefix of the encoder's tensors in a composite class.
const TOWER: &str = "model.vision_tower.";
/// Keys of the token that stands for a row of an image, the newer one first.
const IMAGE: [&str; 2] = ["image_token_id", "image_token_index"];

/// The key that says which output of the encoder the connector reads.
const LAYER: &str = "vision_feature_layer";

/// The values of `model_type` below, whose models read images, for messages.
pub const SEEING: &str = "gemma3, gemma4, idefics3, internvl, llava, llava_onevision, mistral3, paligemma, qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_5, qwen3_5_moe, smolvlm, vision-encoder-decoder";

fn open<'a>(dir: &Path, path: &'a Path) -> Result<Source<'a>> {
    let text = read_text(path)?.ok_or_else(|| {
        Error::model(format!("{}: no such file", path.display()))
            .hint(format!("{} must be a model's folder in Hugging Face's form", dir.display()))
    })?;
    Source::parse(&text, path)
}

/// Reads the encoder that `source` describes. `class` is its `model_type` if `source` has none.
fn encoder(source: &Source<'_>, class: Option<&str>) -> Result<Encoder> {
    let kind = source.text("model_type")?.or(class).unwrap_or_default().to_owned();
    let known = |family: &&&EncoderFamily| family.model_types.contains(&kind.as_str());
    let family = ENCODERS.iter().find(known).ok_or_else(|| {
        let known: Vec<_> = ENCODERS.iter().flat_map(|family| family.model_types).copied().collect();
        source
            .not_yet(format!("{}model_type {kind:?}, an image encoder", source.prefix))
            .hint(format!("image encoders in this version: {}", known.join(", ")))
    })?;
    // The `model_type` of the whole model may stand for that of its encoder.
    let first = family.model_types[0];
    source.check_types(if first.contains("vision") && !kind.contains("vision") { first } else { &kind })?;
    (family.read)(source)
}

/// The encoder in a class that passes it no `interpolate_pos_encoding`: CLIP, SigLIP and ViT then refuse images of other sizes than
/// `image_size`.
fn of_one_size(encoder: Encoder) -> Encoder {
    match encoder.family {
        "clip_vision_model" | "siglip_vision_model" | "vit" => {
            Encoder { interpolation: Some(Interpolation::Fixed), ..encoder }
        }
        _ => encoder,
    }
}

/// The output with this index in an encoder's `hidden_states`, where -1 is that of the last block. `None` if no block has it.
fn block_output(index: i64, encoder: &Encoder) -> Option<Feature> {
    let at = if index < 0 { encoder.num_hidden_layers as i64 + 1 + index } else { index };
    let blocks = usize::try_from(at).ok().filter(|at| (1..=encoder.num_hidden_layers).contains(at))?;
    Some(Feature { blocks, final_norm: false, ..encoder.feature })
}

/// The output that `vision_feature_layer` names.
fn feature_layer(source: &Source<'_>, index: i64, encoder: &Encoder) -> Result<Feature> {
    let blocks = encoder.num_hidden_layers;
    let expected = || source.mismatch(LAYER, &format!("a block's output: 1 to {blocks}, or -{blocks} to -1"));
    block_output(index, encoder).ok_or_else(expected)
}

fn llava(source: &Source<'_>, decoder_size: usize) -> Result<VisionArch> {
    let encoder = of_one_size(encoder(&source.part("vision_config")?, Some("clip_vision_model"))?);
    let token = token(source, &IMAGE, 32_000)?;
    let form = if encoder.rope_in_turns { ChatForm::Pixtral } else { ChatForm::Bare };
    let vision = llava_with(source, encoder, (-2, "default"), decoder_size)?;
    if form == ChatForm::Pixtral && vision.encoder.feature.drop_prefix {
        // The class would take the first patch for a class token and drop it.
        return Err(source.mismatch("vision_feature_select_strategy", "\"full\" beside an encoder pixtral"));
    }
    Ok(VisionArch { chat: Some(ChatImages { token, form }), ..vision })
}

fn mistral3(source: &Source<'_>, decoder_size: usize) -> Result<VisionArch> {
    let mut vision = source.part("vision_config")?;
    if vision.map.is_empty() {
        vision.map.extend([("patch_size", 14), ("image_size", 1540)].map(|(key, size)| (key.to_owned(), size.into())));
    }
    let mut encoder = encoder(&vision, Some("pixtral"))?;
    if !encoder.rope_in_turns {
        return Err(source.not_yet(format!("an encoder {} in mistral3", encoder.family)));
    }
    TOWER.clone_into(&mut encoder.prefix);
    let index = layer_index(source, -1)?;
    encoder.feature = feature_layer(source, index, &encoder)?;
    let chat = Some(ChatImages { token: token(source, &IMAGE, 10)?, form: ChatForm::Pixtral });
    Ok(VisionArch { chat, ..whole(source, encoder, decoder_size)? })
}

/// Which output of the encoder the connector reads, as the class counts them.
fn layer_index(source: &Source<'_>, default: i64) -> Result<i64> {
    match source.get(LAYER) {
        None => Ok(default),
        Some(Value::Array(_)) => Err(source.not_yet(format!("a list as {LAYER}"))),
        Some(value) => value.as_i64().ok_or_else(|| source.mismatch(LAYER, "a whole number")),
    }
}

fn llava_onevision(source: &Source<'_>, decoder_size: usize) -> Result<VisionArch> {
    let mut vision = source.part("vision_config")?;
    let defaults = [
        ("hidden_size", 1152),
        ("intermediate_size", 4304),
        ("num_hidden_layers", 26),
        ("num_attention_heads", 16),
        ("patch_size", 14),
        ("image_size", 384),
    ];
    if vision.map.is_empty() {
        vision.map.extend(defaults.into_iter().map(|(key, size)| (key.to_owned(), size.into())));
    }
    let encoder = of_one_size(encoder(&vision, Some("siglip_vision_model"))?);
    if encoder.prefix_tokens() > 0 {
        return Err(source.not_yet(format!("an encoder with a class token ({}) in llava_onevision", encoder.family)));
    }
    let ratio = source.text("vision_aspect_ratio")?.unwrap_or("anyres_max_9");
    let most = ratio.strip_prefix("anyres_max_").and_then(|tiles| tiles.parse().ok());
    let most_tiles = most
        .filter(|tiles| (1..=4096).contains(tiles))
        .ok_or_else(|| source.mismatch("vision_aspect_ratio", "\"anyres_max_\" and a number of tiles"))?;
    let grids = super::processing::grids(source)?.unwrap_or_else(joined::usual_grids);
    let any_res = AnyRes { newline: "model.image_newline".to_owned(), most_tiles, grids };
    let token = token(source, &IMAGE, 151_646)?;
    let chat = Some(ChatImages { token, form: ChatForm::AnyRes });
    Ok(VisionArch { any_res: Some(any_res), chat, ..llava_with(source, encoder, (-1, "full"), decoder_size)? })
}

/// Reads LLaVA's connector for an encoder. `layer` and `select` are the defaults of `vision_feature_layer` and
/// `vision_feature_select_strategy`.
fn llava_with(
    source: &Source<'_>,
    mut encoder: Encoder,
    (layer, select): (i64, &str),
    decoder_size: usize,
) -> Result<VisionArch> {
    TOWER.clone_into(&mut encoder.prefix);
    encoder.feature = feature_layer(source, layer_index(source, layer)?, &encoder)?;
    encoder.feature.drop_prefix = match source.text("vision_feature_select_strategy")?.unwrap_or(select) {
        "default" => true,
        "full" => false,
        _ => return Err(source.mismatch("vision_feature_select_strategy", "\"default\" or \"full\"")),
    };
    whole(source, encoder, decoder_size)
}

fn gemma3(source: &Source<'_>, decoder_size: usize) -> Result<VisionArch> {
    let mut encoder = of_one_size(encoder(&source.part("vision_config")?, Some("siglip_vision_model"))?);
    TOWER.clone_into(&mut encoder.prefix);
    let begin = token(source, &["boi_token_id", "boi_token_index"], 255_999)?;
    let end = token(source, &["eoi_token_id", "eoi_token_index"], 256_000)?;
    let chat = ChatImages { token: token(source, &IMAGE, 262_144)?, form: ChatForm::Gemma3 { begin, end } };
    Ok(VisionArch { chat: Some(chat), bidirectional: Bidirectional::Always, ..whole(source, encoder, decoder_size)? })
}

fn gemma4(source: &Source<'_>, decoder_size: usize) -> Result<VisionArch> {
    if source.get("vision_config").is_none() {
        return Err(source.mismatch("vision_config", "an object: without one the model sees no images"));
    }
    let mut encoder = encoder(&source.part("vision_config")?, Some("gemma4_vision"))?;
    TOWER.clone_into(&mut encoder.prefix);
    let begin = token(source, &["boi_token_id"], 255_999)?;
    let end = token(source, &["eoi_token_id"], 258_882)?;
    let chat =
        ChatImages { token: token(source, &["image_token_id"], 258_880)?, form: ChatForm::Gemma4 { begin, end } };
    let text = source.part("text_config")?;
    // The class puts this token in the place of an image's rows before it looks up embeddings.
    if text.is_null("pad_token_id") {
        return Err(text.mismatch("pad_token_id", "a token id, which stands for images"));
    }
    let per_layer_token = Some(token(&text, &["pad_token_id"], 0)?);
    let bidirectional = match text.text("use_bidirectional_attention")? {
        None => Bidirectional::Never,
        Some("vision") => Bidirectional::Windowed,
        Some(_) => return Err(text.mismatch("use_bidirectional_attention", "null or \"vision\"")),
    };
    Ok(VisionArch { chat: Some(chat), bidirectional, per_layer_token, ..whole(source, encoder, decoder_size)? })
}

fn idefics3(source: &Source<'_>, decoder_size: usize) -> Result<VisionArch> {
    let mut encoder = encoder(&source.part("vision_config")?, Some("idefics3_vision"))?;
    "model.vision_model.".clone_into(&mut encoder.prefix);
    let chat = Some(ChatImages { token: token(source, &IMAGE, 128_257)?, form: ChatForm::Idefics3 });
    Ok(VisionArch { chat, ..whole(source, encoder, decoder_size)? })
}

fn paligemma(source: &Source<'_>, decoder_size: usize) -> Result<VisionArch> {
    let mut vision = source.part("vision_config")?;
    let defaults =
        [("hidden_size", 1152), ("intermediate_size", 4096), ("num_hidden_layers", 27), ("num_attention_heads", 16)];
    // These are the defaults of the whole model. If the file describes the encoder, that encoder's own class has the
    // defaults.
    if vision.map.is_empty() {
        vision
            .map
            .extend(defaults.into_iter().chain([("patch_size", 14)]).map(|(key, size)| (key.to_owned(), size.into())));
    }
    let projected = source.size("projection_dim", Some(2048))?;
    if projected != decoder_size {
        return Err(source.mismatch("projection_dim", &format!("the width of the language model, {decoder_size}")));
    }
    let mut encoder = of_one_size(encoder(&vision, Some("siglip_vision_model"))?);
    TOWER.clone_into(&mut encoder.prefix);
    let chat = Some(ChatImages { token: token(source, &IMAGE, 256_000)?, form: ChatForm::Bare });
    Ok(VisionArch { prefix: true, chat, ..whole(source, encoder, decoder_size)? })
}

fn internvl(source: &Source<'_>, decoder_size: usize) -> Result<VisionArch> {
    let mut encoder = encoder(&source.part("vision_config")?, Some("internvl_vision"))?;
    TOWER.clone_into(&mut encoder.prefix);
    match source.get(LAYER).map(|value| value.as_i64().ok_or_else(|| source.mismatch(LAYER, "a whole number"))) {
        None | Some(Ok(-1)) => {}
        Some(index) => encoder.feature = feature_layer(source, index?, &encoder)?,
    }
    if !matches!(source.text("vision_feature_select_strategy")?, None | Some("default")) {
        return Err(source.mismatch("vision_feature_select_strategy", "\"default\""));
    }
    let chat = Some(ChatImages { token: token(source, &IMAGE, 151_667)?, form: ChatForm::InternVl });
    Ok(VisionArch { chat, ..whole(source, encoder, decoder_size)? })
}

fn encoder_decoder(dir: &Path, source: &Source<'_>, decoder_size: usize) -> Result<VisionArch> {
    let part = source.part("encoder")?;
    across::check(source, &part)?;
    let (encoder, connector) = across::parts(source, of_one_size(encoder(&part, None)?), decoder_size)?;
    let path = dir.join("generation_config.json");
    let generation = read_text(&path)?.map(|text| Source::parse(&text, &path)).transpose()?;
    let start_token = Some(across::start_token(source, generation.as_ref())?);
    Ok(VisionArch { start_token, ..joined(encoder, connector) })
}

/// Reads Qwen's models from Qwen2-VL on.
fn qwen_vl(source: &Source<'_>, kind: &str, decoder_size: usize) -> Result<VisionArch> {
    let vision = source.part("vision_config")?;
    let mut encoder = encoder(&vision, Some(kind))?;
    "model.visual.".clone_into(&mut encoder.prefix);
    // The defaults of `mrope_section` and of the image token.
    let (default, image) = match kind {
        "qwen3_vl" => ([24, 20, 20], 151_655),
        "qwen3_5" | "qwen3_5_moe" => ([11, 11, 10], 248_056),
        _ => ([16, 24, 24], 151_655),
    };
    let interleaved = kind.starts_with("qwen3");
    let key = if kind == "qwen2_vl" { "hidden_size" } else { "out_hidden_size" };
    if vision.size(key, Some(3584))? != decoder_size {
        return Err(vision.mismatch(key, &format!("the width of the language model, {decoder_size}")));
    }
    let inner_blocks =
        if kind == "qwen3_vl" { vision.indexes("deepstack_visual_indexes", &[8, 16, 24])? } else { Vec::new() };
    let rising = inner_blocks.windows(2).all(|pair| pair[0] < pair[1]);
    if !rising || inner_blocks.last().is_some_and(|&last| last >= encoder.num_hidden_layers) {
        let expected = format!("rising numbers of blocks below {}", encoder.num_hidden_layers);
        return Err(vision.mismatch("deepstack_visual_indexes", &expected));
    }
    let deep = |(place, block)| {
        let connector = connectors::deepstack(source, &encoder, place, decoder_size)?;
        Ok(Deepstack { block, connector })
    };
    let deepstack = inner_blocks.into_iter().enumerate().map(deep).collect::<Result<_>>()?;
    let mrope = Some(Mrope { sections: sections(source, default)?, interleaved });
    let chat = Some(ChatImages { token: token(source, &IMAGE, image)?, form: ChatForm::Bare });
    Ok(VisionArch { deepstack, mrope, chat, ..whole(source, encoder, decoder_size)? })
}

/// `mrope_section` of the language model.
fn sections(source: &Source<'_>, default: [usize; 3]) -> Result<[usize; 3]> {
    let text = if source.has("text_config") { &source.part("text_config")? } else { source };
    let key = if text.has("rope_parameters") { "rope_parameters" } else { "rope_scaling" };
    if !text.has(key) {
        return Ok(default);
    }
    let found = text.part(key)?.indexes("mrope_section", &default)?;
    found.try_into().map_err(|_| text.mismatch(&format!("{key}.mrope_section"), "three numbers of frequencies"))
}

/// The token under the first of these keys that the file has; the newer key comes first.
fn token(source: &Source<'_>, keys: &[&str], default: u32) -> Result<u32> {
    match keys.iter().find(|key| source.get(key).is_some()) {
        None => Ok(default),
        Some(key) => match source.token_ids(key)?[..] {
            [id] => Ok(id),
            _ => Err(source.mismatch(key, "a token id")),
        },
    }
}

/// Puts together a composite checkpoint's encoder and its connector.
fn whole(source: &Source<'_>, encoder: Encoder, decoder_size: usize) -> Result<VisionArch> {
    let connector = connectors::of_model(source, &encoder, decoder_size)?;
    Ok(joined(encoder, connector))
}

fn joined(encoder: Encoder, connector: Connector) -> VisionArch {
    let training = VisionTraining::default();
    VisionArch {
        encoder,
        connector,
        deepstack: Vec::new(),
        mrope: None,
        bidirectional: Bidirectional::Never,
        prefix: false,
        per_layer_token: None,
        start_token: None,
        any_res: None,
        world: None,
        chat: None,
        folder: None,
        training,
        features: None,
    }
}

pub(super) fn read(dir: &Path, decoder_size: usize) -> Result<VisionArch> {
    if files::is_there(&dir.join(super::PAIR_SETTINGS)) {
        return merged_pair(dir, decoder_size);
    }
    let path = dir.join("config.json");
    let source = open(dir, &path)?;
    match source.text("model_type")?.unwrap_or_default() {
        "llava" => llava(&source, decoder_size),
        "llava_onevision" => llava_onevision(&source, decoder_size),
        "gemma3" => gemma3(&source, decoder_size),
        "gemma4" => gemma4(&source, decoder_size),
        "idefics3" | "smolvlm" => idefics3(&source, decoder_size),
        "mistral3" => mistral3(&source, decoder_size),
        "paligemma" => paligemma(&source, decoder_size),
        "internvl" => internvl(&source, decoder_size),
        "vision-encoder-decoder" => encoder_decoder(dir, &source, decoder_size),
        kind @ ("qwen2_vl" | "qwen2_5_vl" | "qwen3_vl" | "qwen3_5" | "qwen3_5_moe") => qwen_vl(&source, kind, decoder_size),
        other => Err(source.not_yet(format!("images in a model of model_type {other:?}")).hint(format!(
            "models that see images in this version: {SEEING}; or set vision.encoder, or leave rows with images out; data.format: text trains on their text alone"
        ))),
    }
}

/// Reads a pair whose two parts are in one folder.
fn merged_pair(dir: &Path, decoder_size: usize) -> Result<VisionArch> {
    let path = dir.join(super::PAIR_SETTINGS);
    let source = open(dir, &path)?;
    let optional = |key: &str| match source.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_i64().map(Some).ok_or_else(|| source.mismatch(key, "a whole number")),
    };
    let hidden_size = match source.get("connector_hidden_size") {
        None | Some(Value::Null) => None,
        Some(_) => Some(source.size("connector_hidden_size", None)?),
    };
    let pairing = Pairing { hidden_size, feature_layer: optional("feature_layer")?, dropout: 0.0 };
    let mut vision = paired(&source.part("vision_config")?, &pairing, decoder_size)?;
    vision.connector.stored = true;
    vision.folder = Some(dir.join(super::PAIR_WEIGHTS));
    if optional("image_token_id")?.is_some() {
        vision.chat = Some(ChatImages { token: token(&source, &IMAGE, 0)?, form: ChatForm::Bare });
    }
    Ok(vision)
}

/// The part of an encoder's `config.json` that describes it and names its class.
pub(super) fn encoder_config(dir: &Path) -> Result<Map<String, Value>> {
    let path = dir.join("config.json");
    Ok(encoder_part(open(dir, &path)?)?.map)
}

pub(super) fn pair(dir: &Path, pairing: &Pairing, decoder_size: usize) -> Result<VisionArch> {
    let path = dir.join("config.json");
    let part = encoder_part(open(dir, &path)?)?;
    let mut vision = paired(&part, pairing, decoder_size)?;
    vision.folder = Some(dir.to_owned());
    Ok(vision)
}

/// The part that describes the encoder: `vision_config`, if the checkpoint also has a text model.
fn encoder_part(source: Source<'_>) -> Result<Source<'_>> {
    let kind = source.text("model_type")?.unwrap_or_default();
    Ok(match ENCODERS.iter().find(|family| family.wholes.contains(&kind)) {
        Some(family) => {
            let mut part = if source.has("vision_config") {
                source.part("vision_config")?
            } else {
                Source { origin: source.origin, map: Map::new(), prefix: "vision_config.".into() }
            };
            part.map.entry("model_type").or_insert_with(|| family.model_types[0].into());
            part
        }
        None => source,
    })
}

fn paired(part: &Source<'_>, pairing: &Pairing, decoder_size: usize) -> Result<VisionArch> {
    let mut encoder = encoder(part, None)?;
    if encoder.pooled {
        return Err(part.not_yet(format!("an encoder {} beside another text model", encoder.family)));
    }
    TOWER.clone_into(&mut encoder.prefix);
    if let Some(index) = pairing.feature_layer {
        let blocks = encoder.num_hidden_layers;
        encoder.feature = block_output(index, &encoder).ok_or_else(|| {
            Error::config(format!("vision.feature_layer: {index}, and the encoder has {blocks} blocks"))
                .hint(format!("a block's output is 1 to {blocks}, or -{blocks} to -1"))
        })?;
    }
    let connector = connectors::of_pair(pairing, encoder.hidden_size, decoder_size);
    Ok(joined(encoder, connector))
}
