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
    /// Index of the decoder block, from 0; `None` for `lm_head`.
    pub layer: Option<usize>,
}
