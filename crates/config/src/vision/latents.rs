//! The encoder of a variational autoencoder (VAE) of diffusers: `AutoencoderKL` (Rombach et al., "High-Resolution Image
//! Synthesis with Latent Diffusion Models", 2022), and `AutoencoderKLWan`, which Wan and Cosmos-Predict2 use. It is a
//! list of layers that keep the places of an image. The first half of the features of its output is the mean of the
//! latents' distribution.
//!
//! `AutoencoderKLWan` is made for video. For a single frame, only the last plane of each of its kernels matters,
//! because those before it read zeros; and steps in time are left out for the first frame.
use std::path::Path;

use serde_json::Value;

use crate::hf_json::{Source, read_text};
use crate::tensor_specs::TensorSpec;
use tunesmith_base::error::{Error, Result};

/// The prefix of its tensors in the whole model.
pub const WORLD_ENCODER: &str = "model.world_encoder.";
/// The classes that can be read, for messages.
const CLASSES: &str = "AutoencoderKL and AutoencoderKLWan";
/// The most layers of a kind, and the most features of a layer.
const MOST: usize = 1 << 14;

/// The encoder of a variational autoencoder of diffusers, as a list of layers from a picture to latents.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentEncoder {
    /// Its class in diffusers: `AutoencoderKL` or `AutoencoderKLWan`.
    pub class: &'static str,
    /// Its layers, from the first to the last.
    pub layers: Vec<LatentLayer>,
    /// The channels of a latent: half of the features of the last layer.
    pub latent: usize,
    /// How many pixels in each direction become one latent.
    pub shrink: usize,
}

/// A layer of a [`LatentEncoder`].
#[derive(Debug, Clone, PartialEq)]
pub enum LatentLayer {
    /// A convolution.
    Convolution(Convolution),
    /// `shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x))))))`.
    Residual(Box<Residual>),
    /// `x + out(attention(norm(x)))`, with one head over all places.
    Attention(Box<SpatialAttention>),
    /// `silu(norm(x))`.
    Activation(LatentNorm),
}

/// Two convolutions, each behind a norm and SiLU, beside a shortcut ([`LatentLayer::Residual`]).
#[derive(Debug, Clone, PartialEq)]
pub struct Residual {
    /// The norms before the first and before the second convolution.
    pub norms: [LatentNorm; 2],
    /// The first and the second convolution.
    pub convolutions: [Convolution; 2],
    /// The convolution on the shortcut; `None` if the number of features stays the same.
    pub shortcut: Option<Convolution>,
}

/// Attention with one head over all places of a picture ([`LatentLayer::Attention`]).
#[derive(Debug, Clone, PartialEq)]
pub struct SpatialAttention {
    /// The norm before query, key and value.
    pub norm: LatentNorm,
    /// Query, key and value; or one module for all three.
    pub qkv: Vec<Convolution>,
    /// The output projection.
    pub out: Convolution,
}

/// A convolution, or a linear module that is applied to each place.
#[derive(Debug, Clone, PartialEq)]
pub struct Convolution {
    /// The module's name in the whole model.
    pub name: String,
    /// The shape of its weight: `[out, in]`, `[out, in, side, side]`, or `[out, in, planes, side, side]`.
    pub shape: Vec<usize>,
    /// The stride, in rows and columns alike.
    pub stride: usize,
    /// How many rows and columns of zeros are added before the image, and after it.
    pub padding: [usize; 2],
}

/// A norm of a [`LatentEncoder`] over the features of a picture's places.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentNorm {
    /// The module's name in the whole model.
    pub name: String,
    /// Features of a place.
    pub size: usize,
    /// Whether it is a group norm or an RMS norm.
    pub kind: LatentNormKind,
}

/// The formula of a [`LatentNorm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LatentNormKind {
    /// `GroupNorm` with this many groups, and 1e-6 added to the variance.
    Group(usize),
    /// `x / max(|x|, 1e-12) sqrt(size) gamma`, for each place alone. The shape of `gamma` has this many ones after its
    /// first dimension.
    Rms(usize),
}

impl Convolution {
    /// The depth of the kernel in time; 1 if the weight has no such dimension.
    pub fn planes(&self) -> usize {
        if self.shape.len() == 5 { self.shape[2] } else { 1 }
    }

    /// The number of rows of the kernel, which has as many columns.
    pub fn side(&self) -> usize {
        self.shape.get(2..).and_then(<[usize]>::last).copied().unwrap_or(1)
    }

    /// The side of the output for an input with this side.
    pub fn size(&self, side: usize) -> usize {
        let padded = side + self.padding[0] + self.padding[1];
        padded.saturating_sub(self.side()) / self.stride.max(1) + 1
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        vec![tensor(&self.name, "weight", self.shape.clone()), tensor(&self.name, "bias", vec![self.shape[0]])]
    }
}

impl LatentNorm {
    fn tensors(&self) -> Vec<TensorSpec> {
        match self.kind {
            LatentNormKind::Group(_) => {
                ["weight", "bias"].map(|part| tensor(&self.name, part, vec![self.size])).to_vec()
            }
            LatentNormKind::Rms(ones) => {
                vec![tensor(&self.name, "gamma", [vec![self.size], vec![1; ones]].concat())]
            }
        }
    }
}

fn tensor(module: &str, part: &str, shape: Vec<usize>) -> TensorSpec {
    TensorSpec { name: format!("{module}.{part}"), shape }
}

impl LatentEncoder {
    /// Reads `dir/config.json`, as diffusers writes it.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the file names another class, or describes a form of it that is not supported;
    /// the message names it.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = read_text(&path)?.ok_or_else(|| {
            Error::model(format!("{}: no such file", path.display()))
                .hint(format!("the folder must hold {CLASSES} of diffusers: of a pipeline its folder vae"))
        })?;
        Self::of(&Source::parse(&text, &path)?)
    }

    /// Reads the encoder that `source` describes.
    pub(super) fn of(source: &Source<'_>) -> Result<Self> {
        match source.text("_class_name")?.unwrap_or_default() {
            "AutoencoderKL" => kl(source),
            "AutoencoderKLWan" => wan(source),
            other => Err(source
                .not_yet(format!("_class_name {other:?}, an encoder of latents"))
                .hint(format!("encoders of latents in this version: {CLASSES}"))),
        }
    }

    /// Names and shapes of its tensors, from the first layer to the last one.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let of = |layer: &LatentLayer| match layer {
            LatentLayer::Convolution(convolution) => convolution.tensors(),
            LatentLayer::Activation(norm) => norm.tensors(),
            LatentLayer::Residual(residual) => {
                let [norm1, norm2] = &residual.norms;
                let [conv1, conv2] = &residual.convolutions;
                let shortcut = residual.shortcut.as_ref().map(Convolution::tensors).unwrap_or_default();
                [norm1.tensors(), conv1.tensors(), norm2.tensors(), conv2.tensors(), shortcut].concat()
            }
            LatentLayer::Attention(attention) => {
                let modules = attention.qkv.iter().chain([&attention.out]);
                [attention.norm.tensors(), modules.flat_map(Convolution::tensors).collect()].concat()
            }
        };
        self.layers.iter().flat_map(of).collect()
    }

    /// The names that a tensor may have in files, the most likely one first.
    pub(super) fn stored_names(inner: &str) -> Vec<String> {
        // Names in attention before diffusers 0.18.
        let older = [("to_q.", "query."), ("to_k.", "key."), ("to_v.", "value."), ("to_out.0.", "proj_attn.")];
        let older = older.iter().fold(inner.to_owned(), |name, (new, old)| name.replace(new, old));
        if older == inner { vec![older] } else { vec![inner.to_owned(), older] }
    }
}

/// What all modules of a class have in common.
struct Modules {
    norm: LatentNormKind,
    /// `Some` if convolutions have kernels over frames.
    planes: Option<usize>,
}

impl Modules {
    fn norm(&self, name: &str, size: usize) -> LatentNorm {
        LatentNorm { name: format!("{WORLD_ENCODER}{name}"), size, kind: self.norm }
    }

    /// A convolution with a kernel of this side, which keeps the size of an image.
    fn convolution(&self, name: &str, [from, to]: [usize; 2], side: usize) -> Convolution {
        // A kernel over frames is as deep as it is wide.
        let planes = self.planes.map(|_| side);
        let shape = [vec![to, from], planes.into_iter().collect(), vec![side; 2]].concat();
        Convolution { name: format!("{WORLD_ENCODER}{name}"), shape, stride: 1, padding: [side / 2; 2] }
    }

    fn residual(&self, name: &str, [from, to]: [usize; 2]) -> LatentLayer {
        let part = |part: &str| format!("{name}.{part}");
        LatentLayer::Residual(Box::new(Residual {
            norms: [self.norm(&part("norm1"), from), self.norm(&part("norm2"), to)],
            convolutions: [
                self.convolution(&part("conv1"), [from, to], 3),
                self.convolution(&part("conv2"), [to; 2], 3),
            ],
            shortcut: (from != to).then(|| self.convolution(&part("conv_shortcut"), [from, to], 1)),
        }))
    }

    /// A convolution that halves both sides of an image.
    fn halving(name: &str, size: usize) -> LatentLayer {
        let shape = vec![size, size, 3, 3];
        let name = format!("{WORLD_ENCODER}{name}");
        LatentLayer::Convolution(Convolution { name, shape, stride: 2, padding: [0, 1] })
    }

    fn activation(&self, name: &str, size: usize) -> LatentLayer {
        LatentLayer::Activation(self.norm(name, size))
    }

    fn plain(&self, name: &str, channels: [usize; 2], side: usize) -> LatentLayer {
        LatentLayer::Convolution(self.convolution(name, channels, side))
    }
}

/// A list of numbers above 0.
fn sizes(source: &Source<'_>, key: &str, default: &[usize]) -> Result<Vec<usize>> {
    let found = source.indexes(key, default)?;
    let good = (1..=16).contains(&found.len()) && found.iter().all(|size| (1..=MOST).contains(size));
    if good { Ok(found) } else { Err(source.mismatch(key, &format!("up to 16 numbers from 1 to {MOST}"))) }
}

fn three_colors(source: &Source<'_>) -> Result<()> {
    match source.size("in_channels", Some(3))? {
        3 => Ok(()),
        other => Err(source.not_yet(format!("in_channels {other}"))),
    }
}

fn kl(source: &Source<'_>) -> Result<LatentEncoder> {
    three_colors(source)?;
    let sizes = sizes(source, "block_out_channels", &[64])?;
    let layers_per_block = source.size_up_to("layers_per_block", Some(1), 64)?;
    let groups = source.size("norm_num_groups", Some(32))?;
    let latent = source.size_up_to("latent_channels", Some(4), MOST)?;
    if let Some(wrong) = sizes.iter().find(|size| !size.is_multiple_of(groups)) {
        return Err(source.error(format!("block_out_channels {wrong} is not a multiple of norm_num_groups {groups}")));
    }
    if !matches!(source.text("act_fn")?, None | Some("silu" | "swish")) {
        return Err(source.not_yet("an act_fn other than silu"));
    }
    let kinds = source.get("down_block_types").and_then(Value::as_array);
    let plain = |kind: &Value| kind == "DownEncoderBlock2D";
    if kinds.map_or(sizes.len() != 1, |kinds| kinds.len() != sizes.len() || !kinds.iter().all(plain)) {
        return Err(source.not_yet("down_block_types other than \"DownEncoderBlock2D\" for each of block_out_channels"));
    }
    let modules = Modules { norm: LatentNormKind::Group(groups), planes: None };
    let mut layers = vec![modules.plain("encoder.conv_in", [3, sizes[0]], 3)];
    let mut size = sizes[0];
    for (block, &next) in sizes.iter().enumerate() {
        for layer in 0..layers_per_block {
            layers.push(modules.residual(&format!("encoder.down_blocks.{block}.resnets.{layer}"), [size, next]));
            size = next;
        }
        if block + 1 < sizes.len() {
            layers.push(Modules::halving(&format!("encoder.down_blocks.{block}.downsamplers.0.conv"), size));
        }
    }
    layers.push(modules.residual("encoder.mid_block.resnets.0", [size; 2]));
    if source.flag("mid_block_add_attention", true)? {
        let name = "encoder.mid_block.attentions.0";
        let linear = |part: &str| Convolution {
            name: format!("{WORLD_ENCODER}{name}.{part}"),
            shape: vec![size; 2],
            stride: 1,
            padding: [0; 2],
        };
        layers.push(LatentLayer::Attention(Box::new(SpatialAttention {
            norm: modules.norm(&format!("{name}.group_norm"), size),
            qkv: ["to_q", "to_k", "to_v"].map(linear).to_vec(),
            out: linear("to_out.0"),
        })));
    }
    layers.push(modules.residual("encoder.mid_block.resnets.1", [size; 2]));
    layers.push(modules.activation("encoder.conv_norm_out", size));
    layers.push(modules.plain("encoder.conv_out", [size, 2 * latent], 3));
    if source.flag("use_quant_conv", true)? {
        layers.push(modules.plain("quant_conv", [2 * latent; 2], 1));
    }
    Ok(LatentEncoder { class: "AutoencoderKL", layers, latent, shrink: 1 << (sizes.len() - 1) })
}

fn wan(source: &Source<'_>) -> Result<LatentEncoder> {
    three_colors(source)?;
    if source.flag("is_residual", false)? {
        return Err(source.not_yet("is_residual: true (Wan 2.2)"));
    }
    if source.get("patch_size").is_some_and(|size| !size.is_null()) {
        return Err(source.not_yet("patch_size in AutoencoderKLWan"));
    }
    let base = source.size_up_to("base_dim", Some(96), MOST)?;
    let latent = source.size_up_to("z_dim", Some(16), MOST)?;
    let sizes: Vec<usize> =
        sizes(source, "dim_mult", &[1, 2, 4, 4])?.into_iter().map(|times| base.saturating_mul(times)).collect();
    if sizes.iter().any(|size| *size > MOST) {
        return Err(source.mismatch("dim_mult", &format!("numbers that make at most {MOST} features")));
    }
    let blocks = source.size_up_to("num_res_blocks", Some(2), 64)?;
    // diffusers itself cannot run models with this key.
    if source.get("attn_scales").is_some_and(|scales| scales.as_array().is_none_or(|list| !list.is_empty())) {
        return Err(source.not_yet("attn_scales in AutoencoderKLWan"));
    }
    let modules = Modules { norm: LatentNormKind::Rms(3), planes: Some(3) };
    let mut layers = vec![modules.plain("encoder.conv_in", [3, base], 3)];
    let (mut size, mut number) = (base, 0..);
    let mut name = || format!("encoder.down_blocks.{}", number.next().unwrap_or_default());
    for (block, &next) in sizes.iter().enumerate() {
        for _ in 0..blocks {
            layers.push(modules.residual(&name(), [size, next]));
            size = next;
        }
        if block + 1 < sizes.len() {
            layers.push(Modules::halving(&format!("{}.resample.1", name()), size));
        }
    }
    layers.push(modules.residual("encoder.mid_block.resnets.0", [size; 2]));
    let name = "encoder.mid_block.attentions.0";
    let place = |part: &str, to: usize| Convolution {
        name: format!("{WORLD_ENCODER}{name}.{part}"),
        shape: vec![to, size, 1, 1],
        stride: 1,
        padding: [0; 2],
    };
    layers.push(LatentLayer::Attention(Box::new(SpatialAttention {
        norm: LatentNorm { kind: LatentNormKind::Rms(2), ..modules.norm(&format!("{name}.norm"), size) },
        qkv: vec![place("to_qkv", 3 * size)],
        out: place("proj", size),
    })));
    layers.push(modules.residual("encoder.mid_block.resnets.1", [size; 2]));
    layers.push(modules.activation("encoder.norm_out", size));
    layers.push(modules.plain("encoder.conv_out", [size, 2 * latent], 3));
    layers.push(modules.plain("quant_conv", [2 * latent; 2], 1));
    Ok(LatentEncoder { class: "AutoencoderKLWan", layers, latent, shrink: 1 << (sizes.len() - 1) })
}
