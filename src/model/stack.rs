//! `tuning.adapters`: finished adapters that are merged into the base as its tensors are read, one after the other, so
//! that what is trained stands on top of them. Merging is PEFT's: `W + s B A`, with `DoRA` `m / ||V|| ⊙ V`, with (IA)³ the
//! rows of W and b, or the columns of W, times their factors.
use super::targets::{Placement, Side};
use crate::error::{Error, Result};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Tensors by name with their shapes.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A finished adapter.
#[derive(Debug)]
pub struct Frozen {
    /// Its place in messages.
    pub origin: String,
    /// Which modules it changes.
    pub placements: BTreeMap<String, Placement>,
    /// Its tensors, and those it replaces, under the base model's names.
    pub tensors: Tensors,
}

/// Finished adapters, the lowest first.
#[derive(Debug, Default)]
pub struct Stack(pub Vec<Frozen>);

impl Stack {
    /// Whether an adapter changes that tensor.
    pub fn changes(&self, name: &str) -> bool {
        let module = name.strip_suffix(".weight").unwrap_or_default();
        self.0.iter().any(|adapter| adapter.tensors.contains_key(name) || adapter.placements.contains_key(module))
    }

    /// Changes a tensor of the base as the adapters say.
    ///
    /// # Errors
    /// [`crate::Kind::Checkpoint`]: an adapter's tensor has another shape than the base's.
    pub fn apply(&self, name: &str, values: &mut [f32]) -> Result<()> {
        for adapter in &self.0 {
            let wanted = values.len();
            let misfit = |part: &str, found: usize| {
                Err(Error::checkpoint(format!("{}: {part} has {found} values, {wanted} expected", adapter.origin))
                    .hint("the adapter must belong to this model"))
            };
            if let Some((_, whole)) = adapter.tensors.get(name) {
                if whole.len() != values.len() {
                    return misfit(name, whole.len());
                }
                values.copy_from_slice(whole);
            }
            if let Some(placement) = name.strip_suffix(".bias").and_then(|module| adapter.placements.get(module))
                && placement.factors == Some(Side::Output)
            {
                match adapter.tensors.get(&placement.tensors()[0].0) {
                    Some((_, factors)) if factors.len() == values.len() => {
                        values.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
                    }
                    _ => return misfit(name, placement.out_features),
                }
            }
            let module = name.strip_suffix(".weight").unwrap_or_default();
            if let Some(placement) = adapter.placements.get(module) {
                if placement.in_features * placement.out_features != values.len() {
                    return misfit(module, placement.in_features * placement.out_features);
                }
                if let Some(side) = placement.factors {
                    let Some((_, factors)) = adapter.tensors.get(&placement.tensors()[0].0) else { continue };
                    for (row, values) in values.chunks_exact_mut(placement.in_features).enumerate() {
                        match side {
                            Side::Output => values.iter_mut().for_each(|value| *value *= factors[row]),
                            Side::Input => values.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor),
                        }
                    }
                    continue;
                }
                let mut parts = placement.tensors().into_iter().map(|(name, _)| adapter.tensors.get(&name));
                let (Some(Some((_, a))), Some(Some((_, b)))) = (parts.next(), parts.next()) else { continue };
                let magnitudes = parts.next().flatten().map(|(_, values)| values.as_slice());
                merge(values, placement, a, b, magnitudes);
            }
        }
        Ok(())
    }
}

fn merge(values: &mut [f32], placement: &Placement, a: &[f32], b: &[f32], magnitudes: Option<&[f32]>) {
    let Placement { r, in_features, scale, .. } = placement;
    values.par_chunks_mut(*in_features).enumerate().for_each(|(row, values)| {
        let mut delta = vec![0.0f32; *in_features];
        for (k, &b) in b[row * r..][..*r].iter().enumerate() {
            delta.iter_mut().zip(&a[k * in_features..]).for_each(|(delta, a)| *delta += b * a);
        }
        values.iter_mut().zip(&delta).for_each(|(value, delta)| *value += scale * delta);
        if let Some(magnitudes) = magnitudes {
            let square: f64 = values.iter().map(|&value| f64::from(value).powi(2)).sum();
            let gain = magnitudes[row] / square.sqrt() as f32;
            for value in values {
                *value *= gain;
            }
        }
    });
}
