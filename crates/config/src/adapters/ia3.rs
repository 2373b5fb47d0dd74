//! The settings of (IA)³ (`tuning.ia3`). Its formula: `model::adapters::ia3`.
use crate::mixed_values::TargetModules;
use crate::option::section;

/// What the names of its tensors begin with, behind the module's.
pub const PREFIX: &str = "ia3_";
/// Whether rows of new tokens can be trained beside it, as PEFT does with `trainable_token_indices`.
pub const TRAINS_TOKENS: bool = false;

section! {
    /// What `tuning.mode: ia3` trains; names and meaning are those of PEFT's `IA3Config`.
    Ia3Config = "tuning.ia3" {
        /// The layers that get factors, as in `tuning.lora.target_modules` (`null`: `k_proj`, `v_proj`, `down_proj`, and `qkv_proj` where
        /// the three are one).
        target_modules: Option<TargetModules> = None;
        /// Of these, the layers whose inputs are multiplied instead of their outputs: names that a layer's ends with, or a regular
        /// expression (`null`: `down_proj`).
        feedforward_modules: Option<TargetModules> = None;
        /// Layers that are excluded from `target_modules`.
        exclude_modules: Option<TargetModules> = None;
        /// Modules that are trained in full and saved with the factors, such as `lm_head`.
        modules_to_save: Vec<String> = Vec::new();
    }
}
