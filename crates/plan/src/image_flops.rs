//! FLOPs of an image on its way to the decoder: through the encoder and the connector, forward, and backward as far as
//! they are trained. They are counted as for text ([`super::flops`]).
use super::memory::footprint::Shape;
use super::memory::{ImageSize, Trained};
use tunesmith_config::arch::LinearSpec;
use tunesmith_config::vision::{
    Connector, Convolution, Encoder, Features, LatentEncoder, LatentLayer, Step, VisionArch,
};

/// The FLOPs of one image.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ImageFlops {
    /// In each step that shows the image.
    pub step: f64,
    /// Once before training, if the image's features are computed then and cached.
    pub ahead: f64,
}

impl ImageFlops {
    /// The FLOPs of an image of this size in a training of `trained`.
    pub fn of(vision: &VisionArch, trained: &Trained, size: &ImageSize) -> Self {
        let world = vision.world.as_deref();
        let encoders =
            encoder(&vision.encoder, size) + world.map_or(0.0, |world| latents(&world.encoder, world.image_size));
        let trains_encoder = vision.fixed_features().is_none();
        let rows = size.outputs as f64;
        let connectors =
            |trains: bool| -> f64 { vision.connectors().map(|it| connector(it, rows, trains, trains_encoder)).sum() };
        // The projector of a second encoder is always trained.
        let projector = world.map_or(0.0, |world| connector(&world.projector, world.rows() as f64, true, false));
        let behind = connectors(vision.training.connector) + projector;
        match vision.features {
            None => Self { step: encoders + backward(vision, trained, size) + behind, ahead: 0.0 },
            Some(Features::Encoder) => Self { step: behind, ahead: encoders },
            Some(Features::Connector) => Self { step: projector, ahead: encoders + connectors(false) },
        }
    }
}

fn numbers(linear: &LinearSpec) -> f64 {
    linear.in_features as f64 * linear.out_features as f64
}

/// How many weights the matrices of a block have.
fn block(encoder: &Encoder, layer: usize) -> f64 {
    encoder.block_linears(layer).iter().map(numbers).sum()
}

/// FLOPs of the attention scores and their products with values in a block, forward.
fn pairs(encoder: &Encoder, layer: usize, size: &ImageSize) -> f64 {
    let pairs = size.pairs[usize::from(encoder.is_windowed(layer))];
    4.0 * (encoder.num_heads * encoder.head_dim) as f64 * pairs as f64
}

/// FLOPs of an encoder's forward pass.
fn encoder(encoder: &Encoder, size: &ImageSize) -> f64 {
    let stem = 2.0 * size.patches as f64 * numbers(&encoder.patch_embedding());
    let of_block = |layer| 2.0 * size.tokens as f64 * block(encoder, layer) + pairs(encoder, layer, size);
    stem + (0..encoder.feature.blocks).map(of_block).sum::<f64>()
}

/// FLOPs of an encoder's backward pass and of its adapters. The backward pass ends at the lowest block with a trained
/// parameter.
fn backward(vision: &VisionArch, trained: &Trained, size: &ImageSize) -> f64 {
    let (encoder, training) = (&vision.encoder, &vision.training);
    let blocks = encoder.feature.blocks;
    let whole = if training.encoder { 0 } else { blocks.saturating_sub(training.last_blocks) };
    let adapted = vision.adapted_linears();
    let lowest = adapted.iter().filter_map(|linear| linear.layer).chain([whole]).min().unwrap_or(whole);
    let tokens = size.tokens as f64;
    let of_block = |layer: usize| {
        let times = if layer >= whole { 4.0 } else { 2.0 };
        times * tokens * block(encoder, layer) + 2.0 * pairs(encoder, layer, size)
    };
    let of_adapter = |linear: &LinearSpec| {
        let shape = Shape { out: linear.out_features as u64, inputs: linear.in_features as u64 };
        let numbers = trained.adapters.get(&linear.name).map_or(0, |adapter| adapter.numbers(&shape));
        6.0 * tokens * numbers as f64
    };
    let stem = if training.encoder { 2.0 * size.patches as f64 * numbers(&encoder.patch_embedding()) } else { 0.0 };
    stem + (lowest..blocks).map(of_block).sum::<f64>() + adapted.iter().map(of_adapter).sum::<f64>()
}

/// FLOPs of a connector for `rows` outputs of an encoder. A matrix's input has a gradient only if something before the
/// matrix is trained.
fn connector(connector: &Connector, rows: f64, trains: bool, trains_encoder: bool) -> f64 {
    let (mut rows, mut below, mut useful) = (rows, trains_encoder, 0.0);
    for step in &connector.steps {
        let numbers = match step {
            Step::SideBySide(side) | Step::ByFeature(side) | Step::Mean(side) => {
                rows /= (side * side) as f64;
                continue;
            }
            Step::Linear(linear) => numbers(linear),
            Step::Matrix { shape: [from, to], .. } => (from * to) as f64,
            Step::Norm(_) => {
                below |= trains;
                continue;
            }
            Step::PlainNorm { .. }
            | Step::Scale(_)
            | Step::Standardize { .. }
            | Step::Function(_)
            | Step::Dropout(_) => {
                continue;
            }
        };
        let passes = 1 + u32::from(trains) + u32::from(below);
        useful += 2.0 * f64::from(passes) * numbers * rows;
        below |= trains;
    }
    useful
}

/// FLOPs of an encoder of latents (a VAE) on a square image of `side` pixels.
fn latents(encoder: &LatentEncoder, side: usize) -> f64 {
    // For a convolution over frames, the image is one frame, which only the last plane of the kernel reads.
    let convolution = |it: &Convolution, side: usize| {
        let places = it.size(side).pow(2) as f64;
        2.0 * places * (it.shape[0] * it.shape[1] * it.side() * it.side()) as f64
    };
    let (mut side, mut sum) = (side, 0.0);
    for layer in &encoder.layers {
        match layer {
            LatentLayer::Convolution(it) => {
                sum += convolution(it, side);
                side = it.size(side);
            }
            LatentLayer::Residual(residual) => {
                let all = residual.convolutions.iter().chain(&residual.shortcut);
                sum += all.map(|it| convolution(it, side)).sum::<f64>();
            }
            LatentLayer::Attention(attention) => {
                let modules = attention.qkv.iter().chain([&attention.out]);
                sum += modules.map(|it| convolution(it, side)).sum::<f64>();
                sum += 4.0 * attention.norm.size as f64 * (side as f64).powi(4);
            }
            LatentLayer::Activation(_) => {}
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flops::Costs;
    use crate::memory::testing::{arch, job};
    use crate::memory::{Job, LowRank, Pictures};
    use std::path::{Path, PathBuf};
    use std::sync::Arc;
    use tunesmith_config::arch::Arch;
    use tunesmith_config::vision::{Pairing, VisionTraining};

    const DECODER: usize = 1024;

    fn golden(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/vision").join(name).join("model")
    }

    /// A `SigLIP` of 3 blocks, 32 features, 48 in the MLP, and patches of 8 x 8 pixels, before an MLP of 40 features.
    fn vision(training: VisionTraining, features: Option<Features>) -> VisionArch {
        let pairing = Pairing { hidden_size: Some(40), feature_layer: None, dropout: 0.0 };
        VisionArch { training, features, ..VisionArch::pair(&golden("siglip"), &pairing, DECODER).unwrap() }
    }

    fn of(vision: &VisionArch, trained: &Trained) -> ImageFlops {
        ImageFlops::of(vision, trained, &ImageSize::of(vision, &[(4, 4), (4, 2)]))
    }

    /// Of two tiles: patch embedding, a block's matrices, the pairs of a block in both directions of a product, and both modules of
    /// the connector, one number of a token each.
    fn parts() -> [f64; 5] {
        let patches = 24.0;
        [
            patches * 192.0 * 32.0,
            patches * (4.0 * 32.0 * 32.0 + 2.0 * 32.0 * 48.0),
            2.0 * 32.0 * (16.0 * 16.0 + 8.0 * 8.0),
            patches * 32.0 * 40.0,
            patches * 40.0 * DECODER as f64,
        ]
    }

    #[test]
    fn an_image_costs_2_a_number_forward_and_what_is_trained_6() {
        let [stem, block, pairs, first, second] = parts();
        let forward = 2.0 * (stem + 3.0 * (block + pairs));
        let nothing = Trained::default();
        let connector = VisionTraining { connector: true, ..VisionTraining::default() };
        let frozen = of(&vision(VisionTraining::default(), None), &nothing);
        assert_eq!(frozen, ImageFlops { step: forward + 2.0 * (first + second), ahead: 0.0 });
        // The first module's input has no gradient.
        let behind = 4.0 * first + 6.0 * second;
        assert_eq!(of(&vision(connector.clone(), None), &nothing).step, forward + behind);
        let last = VisionTraining { last_blocks: 1, ..connector.clone() };
        let with_last = forward + 4.0 * (block + pairs) + 6.0 * (first + second);
        assert_eq!(of(&vision(last, None), &nothing).step, with_last);
        let whole = VisionTraining { encoder: true, ..connector.clone() };
        let all = 4.0 * stem + 3.0 * 6.0 * (block + pairs) + 6.0 * (first + second);
        assert_eq!(of(&vision(whole, None), &nothing).step, all);
    }

    #[test]
    fn adapters_of_an_encoder_take_the_backward_pass_down_to_the_lowest_one() {
        let [stem, block, pairs, first, second] = parts();
        let linears = vision(VisionTraining::default(), None).encoder.attention_linears(1);
        let name = &linears[0].name;
        let vision = vision(VisionTraining { adapters: vec![name.clone()], ..VisionTraining::default() }, None);
        assert_eq!(vision.adapted_linears(), linears[..1]);
        let mut trained = Trained::default();
        trained.adapters.insert(name.clone(), Arc::new(LowRank { rank: 8, magnitudes: false }));
        let forward = 2.0 * (stem + 3.0 * (block + pairs));
        let back = 2.0 * (2.0 * block + 2.0 * pairs * 2.0) + 24.0 * 6.0 * 8.0 * (32.0 + 32.0);
        assert_eq!(of(&vision, &trained).step, forward + back + 4.0 * (first + second));
    }

    #[test]
    fn kept_features_cost_their_encoder_once() {
        let [stem, block, pairs, first, second] = parts();
        let forward = 2.0 * (stem + 3.0 * (block + pairs));
        let connector = VisionTraining { connector: true, ..VisionTraining::default() };
        let found = of(&vision(connector, Some(Features::Encoder)), &Trained::default());
        assert_eq!(found, ImageFlops { step: 4.0 * first + 6.0 * second, ahead: forward });
        let found = of(&vision(VisionTraining::default(), Some(Features::Connector)), &Trained::default());
        assert_eq!(found, ImageFlops { step: 0.0, ahead: forward + 2.0 * (first + second) });
    }

    #[test]
    fn windows_see_themselves_alone_and_merged_patches_are_one_row() {
        let vision = VisionArch::of_model(&golden("qwen2_5_vl"), 32).unwrap();
        let side = vision.encoder.windows.as_ref().unwrap().side;
        let size = ImageSize::of(&vision, &[(side, 2 * side)]);
        let patches = 2 * side.pow(2) as u64;
        assert_eq!((size.patches, size.tokens, size.outputs), (patches, patches, patches));
        assert_eq!(size.pairs, [patches * patches, patches * patches / 2]);
        let edge = ImageSize::of(&vision, &[(side + 2, side)]);
        assert_eq!(edge.pairs[1], (side.pow(4) + 4 * side.pow(2)) as u64);
        let merged = vision.connector.side().pow(2) as f64;
        assert!(merged > 1.0);
        let linears: f64 = vision.connector.linears().map(numbers).sum();
        assert_eq!(connector(&vision.connector, 64.0, false, false), 2.0 * 64.0 / merged * linears);
    }

    #[test]
    fn a_second_encoder_counts_its_convolutions_and_its_trained_projector() {
        let convolution = |shape: [usize; 4], stride: usize, padding: [usize; 2]| Convolution {
            name: String::new(),
            shape: shape.to_vec(),
            stride,
            padding,
        };
        let encoder = LatentEncoder {
            class: "AutoencoderKL",
            layers: vec![
                LatentLayer::Convolution(convolution([8, 3, 3, 3], 1, [1, 1])),
                LatentLayer::Convolution(convolution([16, 8, 3, 3], 2, [0, 1])),
            ],
            latent: 8,
            shrink: 2,
        };
        let wanted = 2.0 * (16.0 * 16.0 * 8.0 * 3.0 * 9.0 + 8.0 * 8.0 * 16.0 * 8.0 * 9.0);
        assert_eq!(latents(&encoder, 16), wanted);
    }

    #[test]
    fn a_row_costs_its_images_and_their_gradient_comes_through_all_blocks() {
        let image = |training| Some(Arc::new(vision(training, None)));
        let seeing = |training| Arch { vision: image(training), ..arch() };
        let none = VisionTraining::default();
        let size = ImageSize::of(&vision(none.clone(), None), &[(4, 4)]);
        let shown = Pictures { per_row: 3, most: None, spacing: 1, rows: 16, tokens: 16, numbers: 0, scratch: 0, size };
        // Only the last block of the decoder has adapters.
        let costs = |arch: &Arch, pictures: Option<Pictures>| {
            let mut job = Job { pictures, ..job(arch, false) };
            job.trained.adapters.retain(|name, _| name.starts_with("model.layers.2."));
            (Costs::new(&job).of([64], 63.0).useful, Costs::image(&job).step)
        };
        let frozen = seeing(none);
        let (text, nothing) = costs(&frozen, None);
        let (with, of_image) = costs(&frozen, Some(shown));
        assert_eq!((nothing, with - text), (0.0, 3.0 * of_image));
        assert!(of_image > 0.0);
        let trained = seeing(VisionTraining { connector: true, ..VisionTraining::default() });
        let (with_all, of_image) = costs(&trained, Some(shown));
        let blocks: f64 =
            arch().linear_modules().iter().filter(|it| it.layer.is_some_and(|it| it < 2)).map(numbers).sum();
        let pairs = 8.0 * 64.0 * 64.0 / 2.0 * (arch().hidden_size * 2) as f64;
        assert_eq!(with_all, text + 3.0 * of_image + 64.0 * 2.0 * blocks + pairs);
    }
}
