//! The parts of a vision encoder: the stem (patch embedding, class and register tokens, positions), the blocks, and
//! which of their outputs is used.

/// A vision transformer (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020): which parts it has, their sizes and names.
#[allow(clippy::struct_excessive_bools)] // each is a part that a family has or has not
#[derive(Debug, Clone, PartialEq)]
pub struct Encoder {
    /// The `model_type` by which the encoder was recognised.
    pub family: &'static str,
    /// The prefix of its tensors in the whole model, such as `model.vision_tower.`.
    pub prefix: String,
    /// The names of its tensors, without the prefix.
    pub names: Names,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP's hidden layer.
    pub intermediate_size: usize,
    /// How many blocks the checkpoint has. Those above [`Feature::blocks`] are neither loaded nor computed.
    pub num_hidden_layers: usize,
    /// Attention heads of a block.
    pub num_heads: usize,
    /// Heads of keys and values.
    pub num_kv_heads: usize,
    /// Features of a head, often `hidden_size` over the number of heads.
    pub head_dim: usize,
    /// Color channels of a picture, often 3.
    pub channels: usize,
    /// Side of a square patch in pixels.
    pub patch_size: usize,
    /// How many frames a patch has, if the patch embedding is a 3-D convolution (Qwen-VL). An image counts as as many
    /// equal frames.
    pub frames: Option<usize>,
    /// The rows and columns of patches for which the checkpoint has learned positions; zeros if it has none. With
    /// [`Interpolation::Axes`]: 2, and the number of positions on each axis.
    pub grid: [usize; 2],
    /// Added to the variance in every norm.
    pub norm_eps: f64,
    /// The activation between the MLP's linear modules.
    pub activation: Pointwise,
    /// Whether a class token stands before the patches, with a position of its own.
    pub class_token: bool,
    /// Register tokens between the class token and the patches, which have no positions.
    pub registers: usize,
    /// Whether the patch embedding is a linear module on patches `[row, column, channel]` instead of a convolution
    /// (SigLIP 2 NaFlex, Gemma 4).
    pub channels_last: bool,
    /// Whether values from 0 to 1 are mapped to -1 to 1 before the patch embedding (Gemma 4).
    pub centered: bool,
    /// Whether the patch embedding adds a bias.
    pub patch_bias: bool,
    /// Whether q, k and v add a bias.
    pub qkv_bias: bool,
    /// Whether attention's output projection and the MLP's modules add a bias.
    pub bias: bool,
    /// Whether a single module computes q, k and v ([`BlockNames::query`]).
    pub fused_qkv: bool,
    /// Whether the MLP has a gate: [`BlockNames::fc1`], beside [`BlockNames::up`].
    pub gated_mlp: bool,
    /// Whether norms are `RMSNorm`, without a bias.
    pub rms_norm: bool,
    /// Whether a norm comes before the blocks (CLIP).
    pub pre_norm: bool,
    /// The norms on each head's queries and keys, by their names in a block. Values then have a norm without weights,
    /// and scores are not scaled (Gemma 4).
    pub qk_norms: Option<[&'static str; 2]>,
    /// The norms on the outputs of attention and of the MLP, before these are added to the residual stream, by their
    /// names in a block (Gemma 4).
    pub post_norms: Option<[&'static str; 2]>,
    /// Whether the linear modules of blocks clip their inputs and outputs to bounds that the checkpoint has ([`CLIP_BOUNDS`]).
    pub clipped: bool,
    /// Whether the output of each branch is multiplied by a learned factor per feature before it is added to the
    /// residual stream (`DINOv2`).
    pub layer_scale: bool,
    /// How learned positions are computed for another grid of patches; `None` if no position is learned.
    pub interpolation: Option<Interpolation>,
    /// The base of the rotary frequencies of queries and keys: half of them rotate by a patch's row, half by its
    /// column. `None` without rotary positions.
    pub rope_theta: Option<f64>,
    /// Whether rows and columns alternately take the frequencies of a whole head, instead of both having the same ones
    /// (Pixtral).
    pub rope_in_turns: bool,
    /// Whether the first half of a head rotates by a patch's column and the second half by its row, each like a head of
    /// its own (Gemma 4).
    pub rope_by_halves: bool,
    /// Whether the encoder's class pools its outputs, which here the model's connector does. Such an encoder cannot be
    /// part of a pair (Gemma 4).
    pub pooled: bool,
    /// Attention within windows of a tile; `None` if every block attends to the whole tile.
    pub windows: Option<Windows>,
    /// The block whose output the connector takes, whether the last norm follows, and which rows are kept.
    pub feature: Feature,
    /// Standard deviation of newly initialised weights.
    pub initializer_range: f64,
}

/// Attention within square windows of a tile (Qwen2.5-VL).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Windows {
    /// The side of a window in patches. Windows at the right and lower edge of a tile may be smaller.
    pub side: usize,
    /// The blocks in which a patch attends to the whole tile.
    pub full: Vec<usize>,
}

/// Which output of an encoder a connector reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Feature {
    /// After how many blocks the output is taken.
    pub blocks: usize,
    /// Whether the encoder's last norm is applied to it.
    pub final_norm: bool,
    /// Whether class and register tokens are left out.
    pub drop_prefix: bool,
}

/// An activation function between two linear modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pointwise {
    /// GELU by erf, `gelu`.
    Gelu,
    /// GELU in the tanh approximation, `gelu_pytorch_tanh`.
    GeluTanh,
    /// `x sigmoid(1.702 x)`, `quick_gelu`.
    QuickGelu,
    /// SiLU.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`, `relu2`.
    Relu2,
}

impl Pointwise {
    /// The function with this name in Transformers' `ACT2FN`; `None` for an unknown name.
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "gelu" => Self::Gelu,
            "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Self::GeluTanh,
            "quick_gelu" => Self::QuickGelu,
            "silu" | "swish" => Self::Silu,
            "relu" => Self::Relu,
            "relu2" => Self::Relu2,
            _ => return None,
        })
    }
}

/// How learned positions are computed for a grid of patches for which the checkpoint has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interpolation {
    /// Bicubic, as `torch.nn.functional.interpolate` does it with `align_corners=False`: ViT, CLIP, SigLIP, `DINOv2`.
    Bicubic,
    /// Bicubic over all learned positions that a new one covers, as `interpolate` does it with `antialias=True`: `DINOv2` with
    /// registers.
    AntialiasedBicubic,
    /// The learned position at the same relative place (Idefics 3).
    Nearest,
    /// Bilinear over all learned positions that a new one covers, as `interpolate` does it with `antialias=True`:
    /// SigLIP 2 NaFlex.
    AntialiasedBilinear,
    /// Bilinear, with the first and the last position at the ends of a side (`align_corners=True`): Qwen3-VL.
    Bilinear,
    /// There is no other grid: Transformers' class refuses images of other sizes (LLaVA, Gemma 3, `PaliGemma`).
    Fixed,
    /// Without interpolation: a patch's position is the sum of those of its column and of its row, each from a table of
    /// its own (Gemma 4).
    Axes,
}

/// The tensors of a linear module that clips, in this order and of shape `[]`. Inputs are clipped to the first two,
/// outputs to the last two. In their names, these words replace the last part of the module's name.
pub const CLIP_BOUNDS: [&str; 4] = ["input_min", "input_max", "output_min", "output_max"];

/// Names of an encoder's tensors behind its prefix, without `.weight` and `.bias`, as Transformers 5 has them in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Names {
    /// Names of what comes before and after the blocks.
    pub stem: StemNames,
    /// The prefix of a block's number.
    pub blocks: &'static str,
    /// Names of a block's parts, after the block's number.
    pub block: BlockNames,
    /// Parts of these names, and what the files of checkpoints write instead.
    pub stored: &'static [(&'static str, &'static str)],
}

/// Names of what comes before and after the blocks. A name is empty if a family does not have this part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StemNames {
    /// The module of the patch embedding, a convolution or a linear module.
    pub patch: &'static str,
    /// The tensor of the class token.
    pub class_token: &'static str,
    /// How many dimensions of size one the class token's shape has before the width.
    pub class_dimensions: usize,
    /// The tensor of the register tokens.
    pub registers: &'static str,
    /// The tensor of learned positions.
    pub positions: &'static str,
    /// Whether the table of positions has a leading dimension of size one.
    pub positions_batched: bool,
    /// The norm before the blocks.
    pub pre_norm: &'static str,
    /// The norm after the blocks.
    pub final_norm: &'static str,
}

/// Names of the modules of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockNames {
    /// The norm before attention.
    pub norm1: &'static str,
    /// The projection to queries; with [`Encoder::fused_qkv`] that to queries, keys and values.
    pub query: &'static str,
    /// The projection to keys; unused with [`Encoder::fused_qkv`].
    pub key: &'static str,
    /// The projection to values; unused with [`Encoder::fused_qkv`].
    pub value: &'static str,
    /// Attention's output projection.
    pub out: &'static str,
    /// The norm before the MLP.
    pub norm2: &'static str,
    /// The MLP's first linear module: the gate, where it has one.
    pub fc1: &'static str,
    /// The linear module whose output the gate multiplies, where the MLP has a gate.
    pub up: &'static str,
    /// The MLP's last linear module, back to `hidden_size`.
    pub fc2: &'static str,
    /// The factors on the output of attention: a tensor, not a module.
    pub scale1: &'static str,
    /// The factors on the output of the MLP.
    pub scale2: &'static str,
}

impl Encoder {
    /// How many tokens come before the patches: class token and registers.
    pub const fn prefix_tokens(&self) -> usize {
        self.class_token as usize + self.registers
    }

    /// How many numbers a patch has: `channels * frames * patch_size^2`, with one frame if `frames` is `None`.
    pub fn patch_values(&self) -> usize {
        self.channels * self.frames.unwrap_or(1) * self.patch_size * self.patch_size
    }

    /// How many rows the table of positions has.
    pub const fn positions(&self) -> usize {
        self.class_token as usize + self.grid[0] * self.grid[1]
    }

    /// The name of a module or tensor in the whole model.
    pub fn name(&self, inner: &str) -> String {
        format!("{}{inner}", self.prefix)
    }

    /// Whether a patch in block `layer` attends only to its window.
    pub fn is_windowed(&self, layer: usize) -> bool {
        self.windows.as_ref().is_some_and(|windows| !windows.full.contains(&layer))
    }

    /// The name of a part of block `layer`.
    pub fn block_name(&self, layer: usize, inner: &str) -> String {
        format!("{}{}.{layer}.{inner}", self.prefix, self.names.blocks)
    }
}
