//! Converts a `PiSSA` adapter to plain LoRA of twice the rank, which fits the original base. `PiSSA` subtracts its initial
//! `s B0 A0` from the base, and `W - s B0 A0 + s B A = W + s [B, -B0] [A; A0]`. PEFT's `path_initial_model_for_weight_conversion`
//! does the same.
use super::adapter_config::AdapterConfig;
use tunesmith_config::{InitLora, Patterns};

/// Name, shape and values of a tensor.
pub(crate) type OwnedTensor = (String, Vec<usize>, Vec<f32>);

/// The converted settings and tensors. `start` has the initial values of `tensors`, in the same order.
pub fn as_lora(
    config: &AdapterConfig,
    tensors: &[(String, Vec<usize>, &[f32])],
    start: &[&[f32]],
) -> (AdapterConfig, Vec<OwnedTensor>) {
    let mut config = config.clone();
    let lora = &mut config.tuning.lora;
    lora.init_lora_weights = InitLora::Kaiming;
    // The scale stays: alpha / r, or alpha / sqrt(r).
    let factor = if lora.use_rslora { 2f64.sqrt() } else { 2.0 };
    let double =
        |patterns: &Patterns<usize>| Patterns(patterns.0.iter().map(|(key, rank)| (key.clone(), 2 * rank)).collect());
    lora.r *= 2;
    lora.lora_alpha *= factor;
    lora.rank_pattern = double(&lora.rank_pattern);
    let alphas = lora.alpha_pattern.0.iter().map(|(key, alpha)| (key.clone(), alpha * factor));
    lora.alpha_pattern = Patterns(alphas.collect());
    let tensors = tensors.iter().zip(start).map(|((name, shape, values), start)| {
        if name.ends_with(".lora_A.weight") {
            (name.clone(), vec![2 * shape[0], shape[1]], [*values, *start].concat())
        } else if name.ends_with(".lora_B.weight") {
            let rows = values.chunks_exact(shape[1]).zip(start.chunks_exact(shape[1]));
            let both = rows.flat_map(|(row, start)| row.iter().copied().chain(start.iter().map(|value| -value)));
            (name.clone(), vec![shape[0], 2 * shape[1]], both.collect())
        } else {
            (name.clone(), shape.clone(), values.to_vec())
        }
    });
    let tensors = tensors.collect();
    (config, tensors)
}
