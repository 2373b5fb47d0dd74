//! Names and shapes of tensors and linear modules.

/// Name and shape of a tensor that the checkpoint must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Hugging Face's name, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Sizes; the last dimension is contiguous in memory.
    pub shape: Vec<usize>,
}

/// A linear module of the model: its weight is `[out_features, in_features]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearSpec {
    /// Module name, such as `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// Rows of the weight: the width of the output.
    pub out_features: usize,
    /// Columns of the weight: the width of the input.
    pub in_features: usize,
    /// Whether the module adds a bias.
    pub bias: bool,
    /// Index of the decoder block, from 0; `None` for those outside of blocks, such as `lm_head`.
    pub layer: Option<usize>,
}

impl TensorSpec {
    /// A tensor of that name and shape.
    pub fn new(name: &str, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec() }
    }

    /// Number of elements: the product of the shape.
    #[allow(clippy::len_without_is_empty)] // no tensor of a checked model is empty
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it is a matrix that a product takes, which may be kept in 16 bits. The weight of a depthwise convolution,
    /// `[channels, 1, kernel]`, is a list of vectors, and a gain `[channels, 1, 1, 1]` is a vector.
    pub fn is_matrix(shape: &[usize]) -> bool {
        shape.len() > 1 && !matches!(shape, [_, 1, _] | [_, 1, 1, 1])
    }
}

impl LinearSpec {
    /// Whether it is the model's head, which has no adapter of its own and is never quantized.
    pub fn is_head(&self) -> bool {
        self.layer.is_none() && matches!(self.name.as_str(), "lm_head" | "score")
    }

    /// Name of its weight tensor: the module's name, then `.weight`.
    pub fn weight(&self) -> String {
        format!("{}.weight", self.name)
    }
}
