//! The settings of LoRA (`tuning.lora`). Its formula: `model::adapters::lora`.
use crate::enums::Bias;
use crate::mixed_values::{InitLora, TargetModules};
use crate::option::{Range as Bounds, section};
use crate::value::Patterns;

/// First part of its tensors' names, after the module's name.
pub const PREFIX: &str = "lora_";
/// Whether rows of new tokens can be trained with it, as with PEFT's `trainable_token_indices`.
pub const TRAINS_TOKENS: bool = true;

section! {
    /// The adapter; names and meaning are those of PEFT's `LoraConfig`.
    LoraConfig = "tuning.lora" {
        /// The rank.
        r: usize = 16, range Bounds::within(1.0, 65536.0);
        /// The numerator of the adapter's scale: `lora_alpha / r`.
        lora_alpha: f64 = 32.0, aliases ["alpha"], range Bounds::greater_than(0.0);
        /// Dropout probability on the adapter's input.
        lora_dropout: f64 = 0.0, aliases ["dropout"], range Bounds::from_to_below(0.0, 1.0);
        /// The layers that get an adapter. `auto`: every linear layer of the decoder blocks. `all-linear`: as in PEFT. That differs
        /// for Mixtral and Qwen3-MoE: there, the router and the experts have adapters, and the MLP of dense blocks has none. A
        /// list: layers whose name ends with an entry; `[]`: none, beside `target_parameters`. In these two models `gate` is the
        /// router, and `gate_proj`, `up_proj`, `down_proj` (Mixtral: `w1`, `w3`, `w2`) are the experts. Any other string: a
        /// regular expression that must match the whole name.
        target_modules: TargetModules = TargetModules::Auto;
        /// Layers that are excluded from `target_modules`: ends of names, or a regular expression.
        exclude_modules: Option<TargetModules> = None;
        /// Scale by `lora_alpha / sqrt(r)` (rsLoRA).
        use_rslora: bool = false;
        /// Train a magnitude for each output feature beside A and B (DoRA). It comes closer to full training, especially at a low
        /// rank, and takes more memory and time.
        use_dora: bool = false;
        /// Ranks of layers that differ from `r`: a regular expression on the end of the name, then the rank.
        rank_pattern: Patterns<usize> = Patterns::default(), range Bounds::at_least(1.0);
        /// Alphas of layers that differ from `lora_alpha`, as in `rank_pattern`.
        alpha_pattern: Patterns<f64> = Patterns::default(), range Bounds::greater_than(0.0);
        /// Indices of the decoder layers that get adapters (`null`: all).
        layers_to_transform: Option<Vec<usize>> = None;
        /// Parameters that get adapters, by the end of their names. In a model with experts: `mlp.experts.gate_up_proj` and
        /// `mlp.experts.down_proj`, with one adapter for each expert, and the router `mlp.gate.weight`.
        target_parameters: Vec<String> = Vec::new();
        /// Modules that are trained in full and saved with the adapter, such as `lm_head`.
        modules_to_save: Vec<String> = Vec::new();
        /// Train embedding and head as one matrix where the model ties them and `modules_to_save` names one of them. Otherwise each
        /// that is named becomes a matrix of its own.
        ensure_weight_tying: bool = false;
        /// Which biases are trained too.
        bias: Bias = Bias::None;
        /// How A and B start. `true`: Kaiming-uniform A and zero B. `gaussian`: normal A and zero B. `false`: both random. `pissa`:
        /// the largest singular values of the weight; the base keeps the rest. `pissa_niter_N` finds them in N rounds of a
        /// randomized method, much faster. `loftq`: the error of the weight's quantization, up to the rank.
        init_lora_weights: InitLora = InitLora::Kaiming;
        /// With `init_lora_weights: loftq`: how often the weight without the adapter is quantized again. The base of more than one
        /// round differs from the quantized model.
        loftq_iter: usize = 1, range Bounds::within(1.0, 1000.0);
        /// LoRA+: the learning rate of the B matrices, divided by that of the A matrices (`null`: the same rate; the paper
        /// recommends 16).
        loraplus_lr_ratio: Option<f64> = None, range Bounds::greater_than(0.0);
    }
}
