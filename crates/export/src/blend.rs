//! Blends weighted adapters into one, as PEFT's `add_weighted_adapter` does. All methods but `cat` combine the matrices A and
//! B separately, each with the square root of the weight, which only approximates the weighted sum of the updates. `cat`
//! concatenates the matrices: this is exactly the weighted sum, and the ranks add up.
//!
//! TIES: P. Yadav et al., "TIES-Merging: resolving interference when merging models", 2023. DARE: L. Yu et al., "Language models
//! are super Mario: absorbing abilities from homologous models as a free lunch", 2023.
use std::collections::BTreeMap;

use tunesmith_base::error::{Error, Result};
use tunesmith_base::words;
use tunesmith_checkpoint::AdapterConfig;
use tunesmith_checkpoint::loaded_adapter::LoadedAdapter;
use tunesmith_checkpoint::peft::Tensors;
use tunesmith_config::adapters::lora::LoraConfig;
use tunesmith_config::arch::Arch;
use tunesmith_config::{InitLora, Patterns};
use tunesmith_model::adapters::{Rank, names, parameters};
use tunesmith_model::targets::Placement;
use tunesmith_ops::dropout::key;

/// Ways of blending, named as in PEFT's `add_weighted_adapter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlendMethod {
    /// The weighted sum of the A's, and of the B's.
    Linear,
    /// Concatenation: exactly the weighted sum of the updates.
    Cat,
    /// Keeps the largest values of each adapter, then averages those of the dominant sign only.
    Ties,
    /// Keeps random values of each adapter, scaled up to make up for the dropped ones, then takes the weighted sum.
    DareLinear,
    /// Keeps random values of each adapter, scaled up, then averages those of the dominant sign only.
    DareTies,
    /// Keeps the largest values of each adapter, then takes the weighted sum.
    MagnitudePrune,
}

/// Which adapters are blended, how, and with which weights.
#[derive(Debug, Clone, PartialEq)]
pub struct BlendRecipe {
    /// How the adapters are combined: PEFT's `combination_type`.
    pub method: BlendMethod,
    /// A weight for each adapter.
    pub weights: Vec<f64>,
    /// The share of values to keep, from 0 to 1, for methods that drop some.
    pub density: f64,
    /// The seed of DARE's choice.
    pub seed: u64,
}

/// Blends the adapters into one.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: not a weight for each; [`tunesmith_base::Kind::Checkpoint`]: an adapter that is more than A and B, or one of
/// another rank.
pub fn blend(adapters: &[LoadedAdapter], recipe: &BlendRecipe) -> Result<(AdapterConfig, Tensors)> {
    let Some(first) = adapters.first() else { return Err(Error::config("no adapters to blend")) };
    if recipe.weights.len() != adapters.len() {
        let (weights, count) = (recipe.weights.len(), adapters.len());
        return Err(Error::config(format!(
            "{} for {}, expected one for each",
            words::count(weights, "weight"),
            words::count(count, "adapter")
        )));
    }
    adapters.iter().try_for_each(refuse_more_than_matrices)?;
    let mut modules: BTreeMap<&str, Vec<(usize, &Placement)>> = BTreeMap::new();
    for (number, adapter) in adapters.iter().enumerate() {
        for placement in &adapter.placements {
            modules.entry(&placement.module).or_default().push((number, placement));
        }
    }
    let rank_of = |adapter: &LoadedAdapter| adapter.placements.iter().map(|it| rank(it).r).max().unwrap_or(0);
    let rank = match recipe.method {
        BlendMethod::Cat => adapters.iter().map(rank_of).sum(),
        _ => rank_of(first),
    };
    let mut tensors = Tensors::new();
    for (module, parts) in &modules {
        let [a, b] = blend_module(adapters, parts, recipe, rank)?;
        tensors.insert(format!("{module}.lora_A.weight"), a);
        tensors.insert(format!("{module}.lora_B.weight"), b);
    }
    let placed: Vec<Placement> = modules.values().map(|parts| parts[0].1.clone()).collect();
    let mut config = first.config.clone();
    config.layers_pattern = Vec::new();
    // The weights include the scales, so the result's scale is 1.
    config.tuning.lora = LoraConfig {
        target_modules: names(&placed),
        target_parameters: parameters(&placed),
        exclude_modules: None,
        layers_to_transform: None,
        r: rank,
        lora_alpha: rank as f64,
        use_rslora: false,
        rank_pattern: Patterns::default(),
        alpha_pattern: Patterns::default(),
        init_lora_weights: InitLora::Kaiming,
        ..config.tuning.lora
    };
    Ok((config, tensors))
}

/// Blends the adapters and fits the result to the model `arch`, so that it can be merged or saved.
///
/// # Errors
/// As [`blend`]; [`tunesmith_base::Kind::Numeric`]: the blend would contain NaN or infinity.
pub fn finished(adapters: &[LoadedAdapter], recipe: &BlendRecipe, arch: &Arch) -> Result<LoadedAdapter> {
    let (config, tensors) = blend(adapters, recipe)?;
    if let Some((name, _)) = tensors.iter().find(|(_, (_, values))| !values.iter().all(|value| value.is_finite())) {
        let message = format!("the blend is no adapter: {name} would hold NaN or infinity");
        return Err(Error::new(tunesmith_base::Kind::Numeric, message)
            .hint("check the adapters for such values, or choose smaller --weights"));
    }
    let config = config.on(arch)?;
    let placements = config.place(arch)?;
    let dir = adapters.first().map(|adapter| adapter.dir.clone()).unwrap_or_default();
    Ok(LoadedAdapter { dir, config, placements, tensors })
}

/// The rank of an adapter that is A and B.
fn rank(placement: &Placement) -> Rank {
    placement.adapter.rank().unwrap_or(Rank { r: 0, alpha: 0.0, scale: 1.0 })
}

fn refuse_more_than_matrices(adapter: &LoadedAdapter) -> Result<()> {
    match adapter.beyond_matrices() {
        Some(what) => Err(Error::checkpoint(format!("{}: has {what}, which cannot be blended", adapter.dir.display()))
            .hint("only plain LoRA adapters can be blended; merge this one by itself")),
        None => Ok(()),
    }
}

type Matrix = (Vec<usize>, Vec<f32>);

/// The blended matrices A and B of one module.
fn blend_module(
    adapters: &[LoadedAdapter],
    parts: &[(usize, &Placement)],
    recipe: &BlendRecipe,
    rank: usize,
) -> Result<[Matrix; 2]> {
    let (placement, mut sides) = (parts[0].1, [Vec::new(), Vec::new()]);
    for (number, part) in parts {
        let (adapter, weight) = (&adapters[*number], recipe.weights[*number] * f64::from(self::rank(part).scale));
        let misfit = (part.in_features, part.out_features) != (placement.in_features, placement.out_features)
            || (recipe.method != BlendMethod::Cat && self::rank(part).r != rank);
        if misfit {
            return Err(Error::checkpoint(format!(
                "{}: {} has rank {}, expected {rank}",
                adapter.dir.display(),
                part.module,
                self::rank(part).r
            ))
            .hint("adapters of different ranks can only be concatenated: --combine cat"));
        }
        // A negative weight goes to A alone: on both sides the signs would cancel.
        let weights = match recipe.method {
            BlendMethod::Cat => [weight, 1.0],
            _ => [weight.abs().sqrt() * if weight < 0.0 { -1.0 } else { 1.0 }, weight.abs().sqrt()],
        };
        for (index, ((name, _), side)) in part.tensors().into_iter().zip(&mut sides).enumerate() {
            let values = adapter.tensors.get(&name).map(|(_, values)| values.as_slice()).unwrap_or_default();
            let stream = key(recipe.seed, *number as u64, hash(&name));
            side.push((values, weights[index] as f32, stream));
        }
    }
    let (inner, outer) = (placement.in_features, placement.out_features);
    let shapes = [vec![rank, inner], vec![outer, rank]];
    let [a, b] = sides;
    if recipe.method == BlendMethod::Cat {
        let (mut a_all, mut b_all) = (vec![0.0; rank * inner], vec![0.0; outer * rank]);
        let mut first = 0;
        for ((a, weight, _), (b, ..)) in a.iter().zip(&b) {
            let own = a.len() / inner;
            a_all[first * inner..][..a.len()].iter_mut().zip(*a).for_each(|(to, value)| *to = value * weight);
            for (to, row) in b_all.chunks_exact_mut(rank).zip(b.chunks_exact(own.max(1))) {
                to[first..first + own].copy_from_slice(row);
            }
            first += own;
        }
        let [a_shape, b_shape] = shapes;
        return Ok([(a_shape, a_all), (b_shape, b_all)]);
    }
    let [a_shape, b_shape] = shapes;
    Ok([(a_shape, combine(&a, recipe)), (b_shape, combine(&b, recipe))])
}

/// The values of A or B of one module, their weight, and the key of DARE's random choice.
type Side<'a> = (&'a [f32], f32, u64);

fn combine(sides: &[Side<'_>], recipe: &BlendRecipe) -> Vec<f32> {
    let pruned: Vec<Vec<f32>> = sides
        .iter()
        .map(|(values, _, stream)| match recipe.method {
            BlendMethod::Linear | BlendMethod::Cat => values.to_vec(),
            BlendMethod::Ties | BlendMethod::MagnitudePrune => largest(values, recipe.density),
            BlendMethod::DareLinear | BlendMethod::DareTies => some(values, recipe.density, *stream),
        })
        .collect();
    let elects = matches!(recipe.method, BlendMethod::Ties | BlendMethod::DareTies);
    let length = pruned.first().map_or(0, Vec::len);
    let at = |index: usize| {
        let values = || pruned.iter().map(move |values| values[index]).zip(sides.iter().map(|(_, weight, _)| *weight));
        if !elects {
            return values().map(|(value, weight)| value * weight).sum();
        }
        let majority = if values().map(|(value, _)| value).sum::<f32>() >= 0.0 { 1.0 } else { -1.0 };
        let agreeing = || values().filter(|(value, _)| *value != 0.0 && value.signum() == majority);
        let sum: f32 = agreeing().map(|(value, weight)| value * weight).sum();
        sum / (agreeing().count().max(1) as f32)
    };
    (0..length).map(at).collect()
}

/// Keeps the share `density` of the values that are largest in magnitude, and sets the rest to 0.
fn largest(values: &[f32], density: f64) -> Vec<f32> {
    if density >= 1.0 {
        return values.to_vec();
    }
    let kept = (density * values.len() as f64) as usize;
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].abs().total_cmp(&values[a].abs()));
    let mut out = vec![0.0; values.len()];
    order[..kept].iter().for_each(|&index| out[index] = values[index]);
    out
}

/// Keeps each value with the probability `density` and divides it by `density`; sets the others to 0.
fn some(values: &[f32], density: f64, stream: u64) -> Vec<f32> {
    if density >= 1.0 {
        return values.to_vec();
    }
    let bound = (density * 2f64.powi(64)) as u64;
    let one = |(index, value): (usize, &f32)| {
        if key(stream, index as u64, 0) < bound { value / density as f32 } else { 0.0 }
    };
    values.iter().enumerate().map(one).collect()
}

fn hash(name: &str) -> u64 {
    let bytes = blake3::hash(name.as_bytes());
    u64::from_le_bytes(bytes.as_bytes()[..8].try_into().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dare_keeps_the_mean_and_about_as_many_values_as_asked() {
        let values = vec![1.0f32; 20_000];
        let kept = some(&values, 0.3, 7);
        let share = kept.iter().filter(|value| **value != 0.0).count() as f64 / 20_000.0;
        let mean = kept.iter().sum::<f32>() / 20_000.0;
        assert!((share - 0.3).abs() < 0.02 && (mean - 1.0).abs() < 0.05, "{share} {mean}");
        assert_eq!(some(&values, 0.3, 7), kept);
        assert_ne!(some(&values, 0.3, 8), kept);
    }
}
