//! The settings of (IA)³ (`tuning.ia3`). Its formula: `model::adapters::ia3`.
use crate::mixed_values::TargetModules;
use crate::option::section;

/// First part of its tensors' names, after the module's name.
pub const PREFIX: &str = "ia3_";
/// Whether rows of new tokens can be trained with it, as with PEFT's `trainable_token_indices`.
pub const TRAINS_TOKENS: bool = false;

section! {
    /// What `tuning.mode: ia3` trains; names and meaning are those of PEFT's `IA3Config`.
    Ia3Config = "tuning.ia3" {
        /// The layers that get factors, as in `tuning.lora.target_modules` (`null`: `k_proj`, `v_proj`, `down_proj`, and `qkv_proj`
        /// in models that fuse the three).
        target_modules: Option<TargetModules> = None;
        /// Those of `target_modules` whose inputs are multiplied instead of their outputs: ends of names, or a regular expression
        /// (`null`: `down_proj`; `[]`: none).
        feedforward_modules: Option<TargetModules> = None;
        /// Layers that are excluded from `target_modules`.
        exclude_modules: Option<TargetModules> = None;
        /// Modules that are trained in full and saved with the factors, such as `lm_head`.
        modules_to_save: Vec<String> = Vec::new();
    }
}
