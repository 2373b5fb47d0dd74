//! What is done to a base's tensors as they are read, one after the other. Finished adapters are merged into them: below
//! what is trained (`tuning.adapters`), or to write a model without them. Merging is PEFT's: `W + s B A`, with `DoRA`
//! `m / ||V|| ⊙ V`, with (IA)³ the rows of W and b, or the columns of W, times their factors. Between adapters the base may
//! be coded: then matrices become the numbers that their codes mean.
use super::quantize::How;
use super::targets::{Placement, Side, token_rows};
use crate::error::{Error, Result};
use crate::ops::quant::encode;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Tensors by name with their shapes.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A finished adapter.
#[derive(Debug)]
pub struct Frozen {
    /// Its place in messages.
    pub origin: String,
    /// Which modules it changes, by [`Placement::key`].
    pub placements: BTreeMap<String, Placement>,
    /// Its tensors, and those it replaces, under the base model's names.
    pub tensors: Tensors,
    /// The tokens whose rows it replaces, in the order of these rows.
    pub tokens: Vec<u32>,
}

/// Matrices in 4 or 8 bits, as a run held them.
#[derive(Debug)]
pub struct Coded {
    /// How.
    pub how: How,
    /// The numbers in a row of each.
    pub widths: BTreeMap<String, usize>,
}

/// One change of the base.
#[derive(Debug)]
pub enum Layer {
    /// An adapter is merged in.
    Adapter(Frozen),
    /// Matrices are coded and widened again.
    Coded(Coded),
}

/// Changes of the base, the lowest first.
#[derive(Debug, Default)]
pub struct Stack(pub Vec<Layer>);

/// The part of an adapter's update that belongs to one tensor.
struct Part<'a> {
    placement: &'a Placement,
    a: &'a [f32],
    b: &'a [f32],
    magnitudes: Option<&'a [f32]>,
    /// Which expert it is of (0 where there are none).
    expert: usize,
    /// The first of its rows among those of the placement.
    first: usize,
    /// How many rows it has.
    rows: usize,
}

/// Of an expert's matrix such as `model.layers.0.mlp.experts.3.up_proj.weight`: the parameter that adapters know, the expert,
/// and whether it is the second half of the parameter's rows.
fn expert_part(name: &str) -> Option<(String, usize, bool)> {
    let (block, rest) = name.split_once(".experts.")?;
    let layer = block.strip_suffix(".mlp").or_else(|| block.strip_suffix(".block_sparse_moe"))?;
    let (expert, matrix) = rest.split_once('.')?;
    let (parameter, second) = match matrix.strip_suffix(".weight")? {
        "gate_proj" | "w1" => ("gate_up_proj", false),
        "up_proj" | "w3" => ("gate_up_proj", true),
        "down_proj" | "w2" => ("down_proj", false),
        _ => return None,
    };
    Some((format!("{layer}.mlp.experts.{parameter}"), expert.parse().ok()?, second))
}

impl From<Frozen> for Layer {
    fn from(adapter: Frozen) -> Self {
        Self::Adapter(adapter)
    }
}

impl Stack {
    /// Whether that tensor is changed.
    pub fn changes(&self, name: &str) -> bool {
        self.0.iter().any(|layer| match layer {
            Layer::Adapter(adapter) => adapter.changes(name),
            Layer::Coded(coded) => coded.widths.contains_key(name),
        })
    }

    /// Changes a tensor of the base.
    ///
    /// # Errors
    /// [`crate::Kind::Checkpoint`]: an adapter's tensor has another shape than the base's; [`crate::Kind::Model`]: a number
    /// that cannot be coded.
    pub fn apply(&self, name: &str, values: &mut [f32]) -> Result<()> {
        self.0.iter().try_for_each(|layer| match layer {
            Layer::Adapter(adapter) => adapter.apply(name, values),
            Layer::Coded(coded) => coded.apply(name, values),
        })
    }
}

impl Coded {
    fn apply(&self, name: &str, values: &mut [f32]) -> Result<()> {
        let Some(&width) = self.widths.get(name) else { return Ok(()) };
        let matrix = encode::quantize(values, width, self.how.format, self.how.double)
            .map_err(|error| error.context(format!("tensor {name:?}")))?;
        matrix.widen(0, values);
        Ok(())
    }
}

impl Frozen {
    fn changes(&self, name: &str) -> bool {
        let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
        [name, &token_rows(name)].iter().any(|name| self.tensors.contains_key(*name))
            || self.placements.get(module).is_some_and(|placement| placement.factors.is_some())
            || self.part(name).is_some()
    }

    fn apply(&self, name: &str, values: &mut [f32]) -> Result<()> {
        let wanted = values.len();
        let misfit = |part: &str, found: usize| {
            Err(Error::checkpoint(format!("{}: {part} has {found} values, {wanted} expected", self.origin))
                .hint("the adapter must belong to this model"))
        };
        if let Some((_, whole)) = self.tensors.get(name) {
            if whole.len() != values.len() {
                return misfit(name, whole.len());
            }
            values.copy_from_slice(whole);
        }
        let rows = token_rows(name);
        if let Some((_, values_of_rows)) = self.tensors.get(&rows) {
            let width = values_of_rows.len() / self.tokens.len().max(1);
            for (&token, row) in self.tokens.iter().zip(values_of_rows.chunks_exact(width.max(1))) {
                match values.get_mut(token as usize * width..(token as usize + 1) * width) {
                    Some(to) => to.copy_from_slice(row),
                    None => return misfit(&rows, values_of_rows.len()),
                }
            }
        }
        let (module, kind) = name.rsplit_once('.').unwrap_or_default();
        if let Some((placement, side)) = self.placements.get(module).and_then(|placed| Some((placed, placed.factors?)))
        {
            let columns = if kind == "bias" { 1 } else { placement.in_features };
            let wanted = columns * placement.out_features;
            let factors = placement.tensors().first().and_then(|(name, _)| self.tensors.get(name));
            return match factors {
                Some((_, factors)) if wanted == values.len() => {
                    scale(values, columns, factors, side);
                    Ok(())
                }
                _ => misfit(module, wanted),
            };
        }
        let Some(part) = self.part(name) else { return Ok(()) };
        let size = part.rows * part.placement.in_features;
        if size != values.len() {
            return misfit(&part.placement.key, size);
        }
        part.merge(values);
        Ok(())
    }

    /// What the adapter adds to the tensor of that name.
    fn part(&self, name: &str) -> Option<Part<'_>> {
        let (placement, expert, second) = match expert_part(name) {
            Some((key, expert, second)) => (self.placements.get(&key)?, expert, second),
            None => (self.placements.get(name.strip_suffix(".weight")?)?, 0, false),
        };
        let mut tensors = placement.tensors().into_iter().map(|(name, _)| Some(self.tensors.get(&name)?.1.as_slice()));
        let (a, b) = (tensors.next()??, tensors.next()??);
        let halves = placement.key.ends_with(".experts.gate_up_proj");
        let rows = if halves { placement.out_features / 2 } else { placement.out_features };
        let first = if second { rows } else { 0 };
        Some(Part { placement, a, b, magnitudes: tensors.next().flatten(), expert, first, rows })
    }
}

/// (IA)³: rows times their factor, or columns; the bias is part of the output.
fn scale(values: &mut [f32], columns: usize, factors: &[f32], side: Side) {
    for (row, values) in values.chunks_exact_mut(columns).enumerate() {
        match side {
            Side::Output => values.iter_mut().for_each(|value| *value *= factors[row]),
            Side::Input if columns == factors.len() => {
                values.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
            }
            Side::Input => {}
        }
    }
}

impl Part<'_> {
    /// Rows `e r..` of A are expert e's, and of B every so many-th column as there are experts.
    fn merge(&self, values: &mut [f32]) {
        let Placement { r, in_features, scale, experts, .. } = *self.placement;
        let experts = experts.unwrap_or(1);
        let a = &self.a[self.expert * r * in_features..];
        values.par_chunks_mut(in_features).enumerate().for_each(|(row, values)| {
            let mut delta = vec![0.0f32; in_features];
            let b = &self.b[(self.first + row) * r * experts..];
            for k in 0..r {
                let b = b[k * experts + self.expert];
                delta.iter_mut().zip(&a[k * in_features..]).for_each(|(delta, a)| *delta += b * a);
            }
            values.iter_mut().zip(&delta).for_each(|(value, delta)| *value += scale * delta);
            if let Some(magnitudes) = self.magnitudes {
                let square: f64 = values.iter().map(|&value| f64::from(value).powi(2)).sum();
                let gain = magnitudes[row] / square.sqrt() as f32;
                for value in values {
                    *value *= gain;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::expert_part;

    #[test]
    fn an_expert_s_matrices_are_parts_of_two_parameters() {
        let part = |name: &str, key: &str, expert, second| {
            assert_eq!(
                expert_part(name),
                Some((format!("model.layers.7.mlp.experts.{key}"), expert, second)),
                "{name}"
            );
        };
        part("model.layers.7.mlp.experts.12.up_proj.weight", "gate_up_proj", 12, true);
        part("model.layers.7.block_sparse_moe.experts.3.w1.weight", "gate_up_proj", 3, false);
        part("model.layers.7.block_sparse_moe.experts.3.w2.weight", "down_proj", 3, false);
        assert_eq!(expert_part("model.layers.7.mlp.gate_proj.weight"), None);
    }
}
