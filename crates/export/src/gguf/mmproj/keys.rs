//! Writes the sizes and constants of an image encoder, its connector and its image processor to the header of an `mmproj`
//! file.
use super::super::container::{Header, Value};
use super::{Projector, check};
use tunesmith_config::vision::{Encoder, Pointwise, Processing, Size, Step, VisionArch};

/// `image_size` for Qwen2-VL and Qwen2.5-VL, whose images keep their shape. llama.cpp uses it only to warm up.
const QWEN_SIDE: usize = 560;
/// `image_size` for Gemma 4, which llama.cpp does not read.
const GEMMA4_SIDE: usize = 224;

/// Writes all keys except those that describe the file itself (`general.*`).
pub(super) fn describe(projector: Projector, vision: &VisionArch, processing: &Processing, header: &mut Header) {
    let encoder = &vision.encoder;
    let number = |value: f64| Value::F32(value as f32);
    header.own("has_vision_encoder", Value::Bool(true));
    let projector_type = if projector == Projector::Gemma4 { "vision.projector_type" } else { "projector_type" };
    header.own(projector_type, Value::text(projector.name()));
    for (key, count) in [
        ("projection_dim", vision.connector.decoder_size),
        ("image_size", image_size(projector, encoder, processing)),
        ("patch_size", encoder.patch_size),
        ("embedding_length", encoder.hidden_size),
        ("feed_forward_length", encoder.intermediate_size),
        ("block_count", encoder.feature.blocks),
        ("attention.head_count", encoder.num_heads),
    ] {
        header.own(&format!("vision.{key}"), Value::count(count));
    }
    header.own("vision.attention.layer_norm_epsilon", number(encoder.norm_eps));
    // llama.cpp computes (x / 255 - mean) / std. Without a normalization, mean 0 and std 1 change nothing.
    let [mean, std] = processing.normalize.unwrap_or([[0.0; 3], [1.0; 3]]);
    header.own("vision.image_mean", Value::F32s(mean.to_vec()));
    header.own("vision.image_std", Value::F32s(std.to_vec()));
    match encoder.activation {
        Pointwise::Silu => header.own("use_silu", Value::Bool(true)),
        Pointwise::Gelu | Pointwise::GeluTanh => header.own("use_gelu", Value::Bool(true)),
        Pointwise::QuickGelu | Pointwise::Relu | Pointwise::Relu2 => {}
    }
    let mut put = |key: &str, value: Value| header.own(&format!("vision.{key}"), value);
    let side = Value::count(vision.connector.side());
    match projector {
        Projector::Gemma3 => put("projector.scale_factor", side),
        Projector::Gemma4 => {
            put("projector.scale_factor", side);
            if encoder.num_kv_heads != encoder.num_heads {
                put("attention.head_count_kv", Value::count(encoder.num_kv_heads));
            }
            if encoder.head_dim * encoder.num_heads != encoder.hidden_size {
                put("attention.head_dim", Value::count(encoder.head_dim));
            }
        }
        Projector::Idefics3 => {
            put("projector.scale_factor", side);
            if let Some(longest) = longest_edge(processing) {
                put("preproc_image_size", Value::U32(longest));
            }
        }
        Projector::InternVl => {
            put("projector.scale_factor", side);
            if let Size::Canvas { least, most, .. } = processing.size {
                put("preproc_min_tiles", Value::U32(least));
                put("preproc_max_tiles", Value::U32(most));
            }
        }
        // Without this key, llama.cpp would leave out the last block.
        Projector::Llava => put("feature_layer", Value::I32s(vec![encoder.feature.blocks as i32])),
        Projector::Pixtral => {
            if vision.connector.steps.iter().any(|step| matches!(step, Step::ByFeature(_))) {
                put("spatial_merge_size", side);
            }
        }
        Projector::Qwen2 => {}
        Projector::Qwen25 => put("n_wa_pattern", Value::count(check::interval(encoder).unwrap_or(0))),
        Projector::Qwen3 => {
            put("spatial_merge_size", side);
            let deep = |block| vision.deepstack.iter().any(|deep| deep.block == block);
            put("is_deepstack_layers", Value::Bools((0..encoder.feature.blocks).map(deep).collect()));
        }
    }
}

/// The longer side of an image before it is cut into tiles; a tile's own side if it is not cut.
fn longest_edge(processing: &Processing) -> Option<u32> {
    match processing.size {
        Size::Tiles { longest_edge, tile, split } => Some(if split { longest_edge } else { tile }),
        _ => None,
    }
}

/// The longest side in pixels that an image keeps; 0 if the image processor does not limit it.
fn longest_side(processing: &Processing) -> usize {
    match processing.size {
        Size::Within { most: [height, width], .. } => height.max(width) as usize,
        _ => 0,
    }
}

/// The side in pixels of the image or tile that the encoder reads.
fn image_size(projector: Projector, encoder: &Encoder, processing: &Processing) -> usize {
    match projector {
        Projector::Gemma4 => GEMMA4_SIDE,
        Projector::Qwen2 | Projector::Qwen25 => QWEN_SIDE,
        Projector::Qwen3 => encoder.grid[0] * encoder.patch_size,
        Projector::Pixtral => longest_side(processing),
        _ => check::side(processing).map_or(0, |side| side as usize),
    }
}
