//! The settings of OFT (`tuning.oft`). Its formula: `model::adapters::oft`.
use crate::mixed_values::TargetModules;
use crate::option::{Range as Bounds, section};

/// What the names of its tensors begin with, behind the module's.
pub const PREFIX: &str = "oft_";
/// Whether rows of new tokens can be trained beside it, as PEFT does with `trainable_token_indices`.
pub const TRAINS_TOKENS: bool = false;

section! {
    /// What `tuning.mode: oft` trains; names and meaning are those of PEFT's `OFTConfig`.
    OftConfig = "tuning.oft" {
        /// Inputs of a block. Where a layer's are no multiple of it the nearest number is taken of which they are; 0 where `r` says
        /// how many blocks there are.
        oft_block_size: usize = 32, range Bounds::within(0.0, 65536.0);
        /// Blocks of a layer, instead of their size (0).
        r: usize = 0, range Bounds::within(0.0, 65536.0);
        /// The layers whose inputs are rotated, as in `tuning.lora.target_modules`.
        target_modules: TargetModules = TargetModules::Auto;
        /// Layers that are excluded from `target_modules`.
        exclude_modules: Option<TargetModules> = None;
        /// Indices of the decoder layers that get adapters (`null`: all).
        layers_to_transform: Option<Vec<usize>> = None;
        /// Modules that are trained in full and saved with the adapter, such as `lm_head`.
        modules_to_save: Vec<String> = Vec::new();
        /// One matrix for all blocks of a layer.
        block_share: bool = false;
        /// Take `num_cayley_neumann_terms` terms of the matrix's series; `false`: the matrix itself, orthogonal whatever is trained.
        use_cayley_neumann: bool = true;
        /// Number of terms of the series with `use_cayley_neumann`.
        num_cayley_neumann_terms: usize = 5, range Bounds::within(1.0, 64.0);
        /// Start with the identity, so that the model is unchanged; `false`: start near it (for tests).
        init_weights: bool = true;
    }
}
