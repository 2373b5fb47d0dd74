//! Learning rates of tensors that have their own: `train.learning_rates` by pattern, and LoRA+ (Hayou et al., 2024,
//! <https://arxiv.org/abs/2402.12354>).
use std::collections::BTreeSet;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::{Pattern, TrainConfig, adapters, nearest};

/// Each tensor's learning rate divided by that of the run, in the order of `tensors`, which are names and shapes.
///
/// The first pattern that matches counts: `(.*\.)?(pattern)` must be the whole name of the tensor, of its module
/// (without `.weight`, `.bias`), or of the module that an adapter's tensor belongs to (without `.lora_A`). Where none
/// matches, LoRA+ gives B matrices and vectors `ratio` times the rate, as PEFT's `create_loraplus_optimizer` does.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: a pattern that is no regular expression, or matches nothing, or the run's rate is
/// 0.
pub fn scales(train: &TrainConfig, ratio: Option<f64>, tensors: &[(String, Vec<usize>)]) -> Result<Vec<f64>> {
    let patterns = &train.learning_rates.0;
    if let (Some((pattern, _)), true) = (patterns.first(), train.learning_rate == 0.0) {
        return Err(Error::config(format!("train.learning_rates: {pattern:?} contradicts train.learning_rate = 0"))
            .hint("the schedule of every rate is that of train.learning_rate: set it above 0"));
    }
    let mut compiled = Vec::with_capacity(patterns.len());
    for (pattern, rate) in patterns {
        let whole = Pattern::new("train.learning_rates", pattern, &format!(r"^(?:.*\.)?(?:{pattern})$"))?;
        if !tensors.iter().any(|(name, _)| names(name).any(|name| whole.is_match(name))) {
            return Err(unmatched(pattern, tensors));
        }
        compiled.push((whole, rate / train.learning_rate));
    }
    let scale = |(name, shape): &(String, Vec<usize>)| {
        let own = compiled.iter().find(|(pattern, _)| names(name).any(|name| pattern.is_match(name)));
        let plus = ratio.filter(|_| name.contains("lora_B") || shape.len() == 1);
        own.map(|(_, scale)| *scale).or(plus).unwrap_or(1.0)
    };
    Ok(tensors.iter().map(scale).collect())
}

/// The names that a pattern may match: the tensor's, its module's, and that of the module it adapts.
fn names(tensor: &str) -> impl Iterator<Item = &str> {
    let without = |name: &'_ str, ends: &[&str]| -> Option<usize> {
        let (module, last) = name.rsplit_once('.')?;
        ends.iter().any(|end| last.starts_with(end)).then_some(module.len())
    };
    let module = without(tensor, &["weight", "bias"]).map(|end| &tensor[..end]);
    let inner = module.unwrap_or(tensor);
    let adapted = without(inner, adapters::PREFIXES).map(|end| &inner[..end]);
    [Some(tensor), module, adapted].into_iter().flatten()
}

fn unmatched(pattern: &str, tensors: &[(String, Vec<usize>)]) -> Error {
    let error = Error::config(format!("train.learning_rates: {pattern:?} matches no trained tensor"));
    let ends: BTreeSet<&str> =
        tensors.iter().flat_map(|(name, _)| names(name)).filter_map(|name| name.rsplit('.').next()).collect();
    let ends: Vec<&str> = ends.into_iter().filter(|end| !["weight", "bias"].contains(end)).collect();
    match nearest(pattern, ends.iter().copied()) {
        Some(near) => error.hint(format!("did you mean {near}?")),
        None => error.hint(format!("names end with {}", ends.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_config::Patterns;

    fn of(patterns: &[(&str, f64)], ratio: Option<f64>) -> Result<Vec<f64>> {
        let learning_rates = Patterns(patterns.iter().map(|(pattern, rate)| ((*pattern).to_owned(), *rate)).collect());
        let train = TrainConfig { learning_rate: 1e-3, learning_rates, ..TrainConfig::default() };
        let tensors = [
            ("model.layers.0.self_attn.q_proj.lora_A.weight", vec![4, 8]),
            ("model.layers.0.self_attn.q_proj.lora_B.weight", vec![8, 4]),
            ("model.layers.1.mlp.up_proj.lora_B.weight", vec![8, 4]),
            ("model.norm.weight", vec![8]),
            ("lm_head.weight", vec![32, 8]),
        ];
        scales(&train, ratio, &tensors.map(|(name, shape)| (name.to_owned(), shape)))
    }

    #[test]
    fn the_first_pattern_counts_and_may_name_tensors_modules_or_what_is_adapted() {
        assert_eq!(of(&[], None).unwrap(), [1.0; 5]);
        let scales = of(&[("lm_head", 1e-4), (r"layers\.0\..*", 5e-4), ("lora_B", 2e-3)], None).unwrap();
        let close = |wanted: [f64; 5], got: &[f64]| wanted.iter().zip(got).all(|(a, b)| (a - b).abs() < 1e-12);
        assert!(close([0.5, 0.5, 2.0, 1.0, 0.1], &scales), "{scales:?}");
        assert!(close([3.0, 3.0, 1.0, 1.0, 1.0], &of(&[("q_proj", 3e-3)], None).unwrap()));
        assert!(close([1.0, 16.0, 16.0, 16.0, 1.0], &of(&[], Some(16.0)).unwrap()));
        assert!(close([1.0, 2.0, 2.0, 16.0, 1.0], &of(&[("lora_B", 2e-3)], Some(16.0)).unwrap()));
    }

    #[test]
    fn patterns_without_effect_are_refused() {
        let says = |pattern: &str, wanted: &str| {
            let error = of(&[(pattern, 1e-4)], None).unwrap_err();
            assert!(error.to_string().contains(wanted), "{error}");
        };
        says("lmhead", "did you mean lm_head");
        says("embed_tokens", "names end with");
        says("(", "no valid regular expression");
    }
}
