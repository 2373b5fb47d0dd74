//! The settings of OFT (`tuning.oft`). Its formula: `model::adapters::oft`.
use crate::mixed_values::TargetModules;
use crate::option::{Range as Bounds, section};

/// First part of its tensors' names, after the module's name.
pub const PREFIX: &str = "oft_";
/// Whether rows of new tokens can be trained with it, as with PEFT's `trainable_token_indices`.
pub const TRAINS_TOKENS: bool = false;

section! {
    /// What `tuning.mode: oft` trains; names and meaning are those of PEFT's `OFTConfig`.
    OftConfig = "tuning.oft" {
        /// Inputs of a block; 0 where `r` sets the number of blocks. If it does not divide the inputs of a layer, the nearest
        /// number that does is used.
        oft_block_size: usize = 32, range Bounds::within(0.0, 65536.0);
        /// Number of blocks of a layer, instead of their size; 0 where `oft_block_size` is set.
        r: usize = 0, range Bounds::within(0.0, 65536.0);
        /// The layers whose inputs are rotated, as in `tuning.lora.target_modules`.
        target_modules: TargetModules = TargetModules::Auto;
        /// Layers that are excluded from `target_modules`.
        exclude_modules: Option<TargetModules> = None;
        /// Indices of the decoder layers that get adapters (`null`: all).
        layers_to_transform: Option<Vec<usize>> = None;
        /// Modules that are trained in full and saved with the adapter, such as `lm_head`.
        modules_to_save: Vec<String> = Vec::new();
        /// Use one matrix for all blocks of a layer.
        block_share: bool = false;
        /// Compute the matrix from `num_cayley_neumann_terms` terms of a series. `false`: compute it exactly, so that it is always
        /// orthogonal.
        use_cayley_neumann: bool = true;
        /// Number of terms of the series with `use_cayley_neumann`. One term alone would be the identity, which trains nothing.
        num_cayley_neumann_terms: usize = 5, range Bounds::within(2.0, 64.0);
        /// Start with the identity, so that the model is unchanged. `false`: start near it (for tests).
        init_weights: bool = true;
    }
}
