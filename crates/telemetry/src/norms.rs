//! Norms of the trained tensors by kind, for TensorBoard's histograms: how far adapters have grown, and whether one
//! layer runs away.
use std::collections::BTreeMap;

use tunesmith_model::params::Params;

/// The L2 norms of the trained tensors, by kind. The key is a tag for TensorBoard, such as `weight_norm/lora_A`; the values
/// are the norms of all tensors of that kind, in model order.
pub fn by_kind(params: &Params) -> BTreeMap<String, Vec<f64>> {
    let values = params.values();
    let mut norms: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for spec in &params.specs {
        let values = values.slice(spec.range()).to_host();
        let squares = values.iter().map(|&value| f64::from(value).powi(2));
        norms.entry(tag(&spec.name)).or_default().push(squares.sum::<f64>().sqrt());
    }
    norms
}

/// The part of a tensor's name that tells its kind: the one before `.weight` or `.bias`.
fn tag(name: &str) -> String {
    let module = name.strip_suffix(".weight").or_else(|| name.strip_suffix(".bias")).unwrap_or(name);
    let kind = module.rsplit('.').next().unwrap_or(module);
    format!("weight_norm/{kind}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_grouped_by_what_they_are() {
        assert_eq!(tag("model.layers.0.self_attn.q_proj.lora_A.weight"), "weight_norm/lora_A");
        assert_eq!(tag("model.layers.0.self_attn.k_proj.ia3_l"), "weight_norm/ia3_l");
        assert_eq!(tag("model.layers.0.self_attn.q_proj.bias"), "weight_norm/q_proj");
        assert_eq!(tag("model.embed_tokens.weight"), "weight_norm/embed_tokens");
    }
}
