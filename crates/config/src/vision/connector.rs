//! A connector turns the outputs of a vision encoder into rows of the decoder's input. It is a list of steps, from
//! which the shapes, the names of the tensors, and the forward and backward pass follow. [`super::connectors`] has one
//! reader for each kind of connector.
use super::encoder::Pointwise;
use crate::tensor_specs::LinearSpec;

/// A connector: its steps, its sizes, and whether it has weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Connector {
    /// The name of the kind, for messages.
    pub kind: &'static str,
    /// Features of an encoder output.
    pub encoder_size: usize,
    /// Features of a row of the decoder: its `hidden_size`.
    pub decoder_size: usize,
    /// The steps that it computes, in order.
    pub steps: Vec<Step>,
    /// Whether the checkpoint has its weights. Otherwise they are drawn from the seed.
    pub stored: bool,
}

/// A step of a connector, on activations `[rows, features]`. Names of tensors are those of the whole model.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Turns each square of this many patches a side into one row: the features of its patches one after another, row
    /// by row.
    SideBySide(usize),
    /// As [`Step::SideBySide`], but feature by feature: the first feature of each patch of the square, row by row, then
    /// the next feature (Mistral 3). The square has at most [`Step::MOST_BY_FEATURE`] patches a side.
    ByFeature(usize),
    /// Turns each square of this many patches a side into one row: the mean of its patches.
    Mean(usize),
    /// An `RMSNorm`, or a `LayerNorm` if it has a bias.
    Norm(Norm),
    /// A linear module, whose weight is `[out_features, in_features]`.
    Linear(LinearSpec),
    /// A product with a tensor `[in, out]` that is not the weight of a linear module.
    Matrix {
        /// The tensor's name.
        name: String,
        /// Features of its input and of its output.
        shape: [usize; 2],
    },
    /// An `RMSNorm` without weights.
    PlainNorm {
        /// Features of a row.
        size: usize,
        /// Added to the mean square.
        eps: f64,
    },
    /// Multiplies every number by this.
    Scale(f32),
    /// `(x - bias) * scale`, feature by feature, with two tensors that are never trained (Gemma 4).
    Standardize {
        /// Names of the tensors for bias and scale.
        names: [String; 2],
        /// Features of a row.
        size: usize,
    },
    /// Applies a function to each number.
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

/// How to connect an encoder and a decoder that come from two checkpoints.
#[derive(Debug, Clone, PartialEq)]
pub struct Pairing {
    /// The width between two linear modules with GELU (by erf); `None` for a single linear module.
    pub hidden_size: Option<usize>,
    /// Which of the encoder's `hidden_states` the connector reads, such as -2; `None` for the class's last hidden
    /// state, after the norm.
    pub feature_layer: Option<i64>,
    /// The share of GELU's outputs that is zeroed in training.
    pub dropout: f64,
}

impl Step {
    /// The largest side of [`Step::ByFeature`], in patches.
    pub const MOST_BY_FEATURE: usize = 4;

    /// A step with a linear module.
    pub(super) const fn linear(name: String, [in_features, out_features]: [usize; 2], bias: bool) -> Self {
        Self::Linear(LinearSpec { name, out_features, in_features, bias, layer: None })
    }
}

impl Connector {
    /// How many patches a side of the square has that becomes one row; 1 if each patch is a row.
    pub fn side(&self) -> usize {
        let side = |step: &Step| match step {
            Step::SideBySide(side) | Step::ByFeature(side) | Step::Mean(side) => *side,
            _ => 1,
        };
        self.steps.iter().map(side).product()
    }

    /// The share of values between its modules that training zeroes; 0 without dropout.
    pub fn dropout(&self) -> f64 {
        let share = |step: &Step| if let Step::Dropout(share) = step { Some(*share) } else { None };
        self.steps.iter().find_map(share).unwrap_or(0.0)
    }

    /// Its linear modules, in order.
    pub fn linears(&self) -> impl Iterator<Item = &LinearSpec> {
        self.steps.iter().filter_map(|step| if let Step::Linear(linear) = step { Some(linear) } else { None })
    }

    /// The number of features between its two linear modules; `None` if it has fewer than two.
    pub fn hidden_size(&self) -> Option<usize> {
        let mut linears = self.linears();
        let first = linears.next()?;
        linears.next().map(|_| first.out_features)
    }

    /// How many rows a tile of `rows` x `columns` patches gives. `prefix` further tokens, such as a class token, are
    /// kept if patches are not merged.
    pub(super) fn rows(&self, rows: usize, columns: usize, prefix: usize) -> usize {
        let side = self.side();
        if side == 1 { rows * columns + prefix } else { (rows / side) * (columns / side) }
    }
}
