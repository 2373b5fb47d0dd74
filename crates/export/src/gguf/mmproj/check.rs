//! Finds what llama.cpp would compute differently in an image encoder, a connector or an image processor.
use super::Projector;
use tunesmith_config::vision::{Bidirectional, Encoder, Pointwise, Processing, Size, Step, VisionArch};

/// Side of a window in pixels, and side in patches of the square that becomes one row: fixed in llama.cpp for Qwen's models.
const WINDOW: usize = 112;
const MERGED: usize = 2;
/// Width and blocks of the one `InternVL` encoder that llama.cpp assumes to use `RMSNorm`.
const INTERN_6B: [usize; 2] = [3200, 45];
/// Widths of the language models of Gemma 4 E2B and E4B, the only ones in which the rows of an image have causal attention.
const GEMMA4_CAUSAL: [usize; 2] = [1536, 2560];

/// The first thing that llama.cpp computes differently, in words; `None` if it computes all as the model does.
pub(super) fn lacks(projector: Projector, vision: &VisionArch, processing: &Processing) -> Option<String> {
    let encoder = &vision.encoder;
    if !projector.encoders().contains(&encoder.family) {
        return Some(format!("an image encoder {}", encoder.family));
    }
    if encoder.channels != 3 {
        return Some(format!("images of {} channels", encoder.channels));
    }
    if matches!(encoder.activation, Pointwise::Relu | Pointwise::Relu2) {
        return Some("ReLU in an image encoder".into());
    }
    connector(projector, vision)
        .or_else(|| of_kind(projector, vision))
        .or_else(|| images(projector, encoder, processing))
}

fn connector(projector: Projector, vision: &VisionArch) -> Option<String> {
    let encoder = &vision.encoder;
    for connector in vision.connectors() {
        for step in &connector.steps {
            let what = match step {
                Step::Function(Pointwise::Gelu | Pointwise::GeluTanh) => continue,
                Step::Function(_) => "another activation than GELU in the connector",
                Step::Linear(linear)
                    if !linear.bias
                        && ![Projector::Gemma4, Projector::Idefics3, Projector::Pixtral].contains(&projector) =>
                {
                    "a connector without biases"
                }
                // The connectors of InternVL have an epsilon of their own.
                Step::Norm(norm) if norm.eps != encoder.norm_eps && projector != Projector::InternVl => {
                    "a norm of the connector with another epsilon than the encoder's"
                }
                _ => continue,
            };
            return Some(what.into());
        }
    }
    None
}

/// Rules for single kinds of models.
fn of_kind(projector: Projector, vision: &VisionArch) -> Option<String> {
    let encoder = &vision.encoder;
    let rules: &[(bool, &str)] = match projector {
        Projector::Gemma3 | Projector::Idefics3 => &[],
        Projector::Gemma4 => &[
            (encoder.rope_theta == Some(100.0), "a rope_theta other than 100 in the image encoder"),
            (encoder.activation == Pointwise::GeluTanh, "an activation other than GELU by tanh in the image encoder"),
            (
                GEMMA4_CAUSAL.contains(&vision.connector.decoder_size)
                    == matches!(vision.bidirectional, Bidirectional::Never),
                "use_bidirectional_attention other than null for E2B and E4B, and other than vision for wider models",
            ),
        ],
        Projector::Llava => {
            &[(encoder.feature.drop_prefix || !encoder.class_token, "a class token among an image's rows")]
        }
        Projector::Pixtral => &[
            (encoder.rope_theta == Some(10_000.0), "a rope_theta other than 10000 in the image encoder"),
            (encoder.activation != Pointwise::GeluTanh, "GELU by tanh in the image encoder"),
            (encoder.feature.blocks == encoder.num_hidden_layers, "another output than the last block's"),
        ],
        Projector::InternVl => {
            let large = [encoder.hidden_size, encoder.feature.blocks] == INTERN_6B;
            &[(encoder.rms_norm == large, "this norm in the image encoder")]
        }
        Projector::Qwen2 | Projector::Qwen25 | Projector::Qwen3 => &[
            (encoder.frames == Some(2), "a temporal_patch_size other than 2"),
            (vision.connector.side() == MERGED, "a spatial_merge_size other than 2"),
            (encoder.rope_theta == Some(10_000.0), "a rope_theta other than 10000 in the image encoder"),
            (
                encoder
                    .windows
                    .as_ref()
                    .is_none_or(|windows| windows.side == WINDOW / MERGED / encoder.patch_size * MERGED),
                "a window_size other than 112",
            ),
            (
                encoder.windows.is_none() || interval(encoder).is_some(),
                "attention to the whole image in other blocks than every n-th",
            ),
        ],
    };
    rules.iter().find_map(|(fits, what)| (!fits).then(|| (*what).into()))
}

/// The number n if patches see the whole image in exactly every n-th block (and a window in the others).
pub(super) fn interval(encoder: &Encoder) -> Option<usize> {
    let blocks = 0..encoder.feature.blocks;
    let interval = blocks.clone().position(|layer| !encoder.is_windowed(layer))? + 1;
    let fits = |layer: usize| encoder.is_windowed(layer) != (layer + 1).is_multiple_of(interval);
    blocks.into_iter().all(fits).then_some(interval)
}

/// What differs in how images become pixels.
fn images(projector: Projector, encoder: &Encoder, processing: &Processing) -> Option<String> {
    if processing.rescale.is_none_or(|factor| (factor * 255.0 - 1.0).abs() > 1e-6) {
        return Some("a rescale_factor other than 1/255".into());
    }
    if matches!(
        projector,
        Projector::Gemma4 | Projector::Pixtral | Projector::Qwen2 | Projector::Qwen25 | Projector::Qwen3
    ) {
        return None;
    }
    let Some(side) = side(processing) else {
        return Some("images that are no squares of one size".into());
    };
    // The patch embedding, a convolution, ignores pixels that do not fill a patch.
    let patches = side as usize / encoder.patch_size;
    (encoder.grid != [patches; 2])
        .then(|| format!("images of {side} pixels a side, for which the encoder has no positions"))
}

/// The side in pixels of the square that each image or tile is resized to; `None` if the size varies or is no square.
pub(super) fn side(processing: &Processing) -> Option<u32> {
    let square = |[height, width]: [u32; 2]| (height == width).then_some(height);
    match (processing.crop, processing.size) {
        (Some(crop), _) => square(crop),
        (None, Size::Exact(size) | Size::Canvas { tile: size, .. }) => square(size),
        (None, Size::Tiles { tile, .. } | Size::AnyRes { tile }) => Some(tile),
        (None, Size::ShortestEdge(side)) => processing.square.map(|_| side),
        (
            None,
            Size::Kept | Size::MostPatches { .. } | Size::MostRows { .. } | Size::Within { .. } | Size::Pixels { .. },
        ) => None,
    }
}
