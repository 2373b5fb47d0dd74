//! A connector: from an encoder's rows to rows of the decoder.
use super::encoder::Pointwise;

/// A connector, its sizes and the names of its modules in the whole model.
#[derive(Debug, Clone, PartialEq)]
pub struct Connector {
    /// Features of a row that the encoder gives.
    pub encoder_size: usize,
    /// Features of a row of the decoder: its `hidden_size`.
    pub decoder_size: usize,
    /// The modules that it computes, with their names and settings.
    pub kind: ConnectorKind,
    /// Whether the checkpoint has its weights; else they are drawn from the seed.
    pub stored: bool,
}

/// The form of a connector: its modules, from an encoder's rows to rows of the decoder.
#[derive(Debug, Clone, PartialEq)]
pub enum ConnectorKind {
    /// One linear module, `[decoder_size, encoder_size]`.
    Linear {
        /// The module's name in the whole model.
        name: String,
        /// Whether it adds a bias.
        bias: bool,
    },
    /// Linear, activation, dropout, linear.
    Mlp {
        /// Names of the two linear modules in the whole model.
        names: [String; 2],
        /// Features between the two linear modules.
        hidden_size: usize,
        /// The activation between the two linear modules.
        activation: Pointwise,
        /// Whether they add a bias.
        bias: bool,
        /// The share of the activation's outputs that is zeroed in training.
        dropout: f64,
    },
    /// `factor x factor` neighbouring patches side by side, then a linear module without bias: Idefics 3, `SmolVLM`.
    PixelShuffle {
        /// The linear module's name in the whole model.
        name: String,
        /// Patches of a side that become one row.
        factor: usize,
    },
    /// The mean of `kernel x kernel` neighbouring patches, an `RMSNorm` whose weights count from 1, then a product with a matrix
    /// `[encoder_size, decoder_size]`: Gemma 3.
    AveragePool {
        /// Patches of a side that become one row.
        kernel: usize,
        /// The norm's name in the whole model.
        norm: String,
        /// Added to the mean square in the norm.
        eps: f64,
        /// The name of the matrix's tensor, `[encoder_size, decoder_size]`.
        projection: String,
    },
    /// `factor x factor` neighbouring patches side by side, with a norm before or after, then linear, activation, linear: the
    /// mergers of Qwen-VL, the projector of `InternVL`.
    Merger(Merger),
}

/// A norm and two linear modules over neighbouring patches side by side ([`ConnectorKind::Merger`]).
#[derive(Debug, Clone, PartialEq)]
pub struct Merger {
    /// Patches of a side that become one row.
    pub factor: usize,
    /// The norm's name in the whole model.
    pub norm: String,
    /// Whether the norm is over the patches side by side, and not over each.
    pub norm_of_merged: bool,
    /// Whether it is an `RMSNorm`, without a bias.
    pub rms_norm: bool,
    /// Added to the variance in the norm.
    pub eps: f64,
    /// Names of the two linear modules in the whole model.
    pub names: [String; 2],
    /// Features between the two linear modules.
    pub hidden_size: usize,
    /// The activation between the two linear modules.
    pub activation: Pointwise,
}

/// The connector of an encoder and a decoder that come from two checkpoints.
#[derive(Debug, Clone, PartialEq)]
pub struct Pairing {
    /// A linear module; or with a width two of them, and GELU by erf between them.
    pub hidden_size: Option<usize>,
    /// Which of the encoder's `hidden_states` is taken, such as -2; without it the class's last hidden state, norm included.
    pub feature_layer: Option<i64>,
    /// The share of GELU's outputs that is zeroed in training.
    pub dropout: f64,
}

impl Connector {
    /// Patches of a side that become one row.
    pub const fn side(&self) -> usize {
        match &self.kind {
            ConnectorKind::Linear { .. } | ConnectorKind::Mlp { .. } => 1,
            ConnectorKind::PixelShuffle { factor, .. } => *factor,
            ConnectorKind::AveragePool { kernel, .. } => *kernel,
            ConnectorKind::Merger(merger) => merger.factor,
        }
    }

    /// The share of values between its modules that is zeroed in training.
    pub const fn dropout(&self) -> f64 {
        match self.kind {
            ConnectorKind::Mlp { dropout, .. } => dropout,
            _ => 0.0,
        }
    }

    /// Rows of a tile of `rows` x `columns` patches, of which `prefix` other tokens are kept too.
    pub(super) const fn rows(&self, rows: usize, columns: usize, prefix: usize) -> usize {
        let side = self.side();
        if side == 1 { rows * columns + prefix } else { (rows / side) * (columns / side) }
    }
}
