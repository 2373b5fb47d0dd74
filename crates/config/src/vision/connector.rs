//! A connector: from an encoder's rows to rows of the decoder. It is a sequence of steps, from which its shapes, the names of its
//! tensors, and both passes follow. The kinds are in [`super::connectors`].
use super::encoder::Pointwise;
use crate::tensor_specs::LinearSpec;

/// A connector: its steps, its sizes, and whether it has weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Connector {
    /// The name of its kind, for people.
    pub kind: &'static str,
    /// Features of a row that the encoder gives.
    pub encoder_size: usize,
    /// Features of a row of the decoder: its `hidden_size`.
    pub decoder_size: usize,
    /// What it computes, in order.
    pub steps: Vec<Step>,
    /// Whether the checkpoint has its weights; else they are drawn from the seed.
    pub stored: bool,
}

/// A step of a connector, on activations `[rows, features]`. Names are those of the whole model.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// The patches of a square of so many a side become one row: their features side by side, row by row.
    SideBySide(usize),
    /// The same feature by feature: that of each patch of the square, row by row, then the next one's (Mistral 3). At most
    /// [`Step::MOST_BY_FEATURE`] a side.
    ByFeature(usize),
    /// The patches of a square of so many a side become one row: their mean.
    Mean(usize),
    /// An `RMSNorm`, or a `LayerNorm` if it has a bias.
    Norm(Norm),
    /// A linear module, whose weight is `[out_features, in_features]`.
    Linear(LinearSpec),
    /// A product with a tensor `[in, out]` that is no module's weight.
    Matrix {
        /// The tensor's name.
        name: String,
        /// Features of its input and of its output.
        shape: [usize; 2],
    },
    /// An `RMSNorm` without weights over so many features.
    PlainNorm {
        /// Features of a row.
        size: usize,
        /// Added to the mean square.
        eps: f64,
    },
    /// Every number is multiplied by this.
    Scale(f32),
    /// `(x - bias) * scale`, feature by feature, with two tensors that are never trained (Gemma 4).
    Standardize {
        /// Names of the tensors for bias and scale.
        names: [String; 2],
        /// Features of a row.
        size: usize,
    },
    /// A function of each number.
    Function(Pointwise),
    /// Zeroes this share of the numbers in training. A connector has at most one.
    Dropout(f64),
}

/// A norm over the features of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Norm {
    /// The module's name.
    pub name: String,
    /// Features of a row.
    pub size: usize,
    /// Added to the variance, or to the mean square.
    pub eps: f64,
    /// Whether it is an `RMSNorm`, without a bias.
    pub rms: bool,
    /// Added to the weights of an `RMSNorm`: 1 for Gemma, else 0.
    pub offset: f32,
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

impl Step {
    /// The most patches of a side of [`Step::ByFeature`].
    pub const MOST_BY_FEATURE: usize = 4;

    /// A linear module from so many features to so many.
    pub(super) const fn linear(name: String, [in_features, out_features]: [usize; 2], bias: bool) -> Self {
        Self::Linear(LinearSpec { name, out_features, in_features, bias, layer: None })
    }
}

impl Connector {
    /// Patches of a side that become one row.
    pub fn side(&self) -> usize {
        let side = |step: &Step| match step {
            Step::SideBySide(side) | Step::ByFeature(side) | Step::Mean(side) => *side,
            _ => 1,
        };
        self.steps.iter().map(side).product()
    }

    /// The share of values between its modules that is zeroed in training.
    pub fn dropout(&self) -> f64 {
        let share = |step: &Step| if let Step::Dropout(share) = step { Some(*share) } else { None };
        self.steps.iter().find_map(share).unwrap_or(0.0)
    }

    /// Its linear modules, in order.
    pub fn linears(&self) -> impl Iterator<Item = &LinearSpec> {
        self.steps.iter().filter_map(|step| if let Step::Linear(linear) = step { Some(linear) } else { None })
    }

    /// Features between its two linear modules; `None` if it has no two.
    pub fn hidden_size(&self) -> Option<usize> {
        let mut linears = self.linears();
        let first = linears.next()?;
        linears.next().map(|_| first.out_features)
    }

    /// Rows of a tile of `rows` x `columns` patches, of which `prefix` other tokens are kept too.
    pub(super) fn rows(&self, rows: usize, columns: usize, prefix: usize) -> usize {
        let side = self.side();
        if side == 1 { rows * columns + prefix } else { (rows / side) * (columns / side) }
    }
}
