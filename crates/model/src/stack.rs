//! Changes to the base's tensors, which are applied one after the other as each tensor is read. Finished adapters are
//! merged: for training on top of them (`tuning.adapters`), or to write a merged model. Each kind of adapter merges as
//! PEFT does ([`super::adapters::Adapter::merge`]). If the base was quantized between two adapters, its matrices are
//! quantized and dequantized there. A run with `model.dtype: bfloat16` rounds them instead.
use super::adapters::{Part, Placement, Stacked};
use super::names::{peft_name, token_rows};
use super::quantized_form::How;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use half::bf16;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{EMBEDDING, LM_HEAD, TokenRows};
use tunesmith_ops::quant::encode;

/// Tensors by name with their shapes.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A finished adapter that is merged into the base.
#[derive(Debug)]
pub struct Frozen {
    /// The file or folder that messages name.
    pub origin: String,
    /// Which modules it changes, by [`Placement::key`].
    pub placements: BTreeMap<String, Placement>,
    /// The adapter's tensors, and whole tensors of the base that it replaces, under the base model's names.
    pub tensors: Tensors,
    /// The tokens whose rows it replaces, in the order of these rows.
    pub tokens: TokenRows,
    /// Whether the adapter belongs to a model whose head shares the embedding's matrix. Then it changes the head
    /// wherever it changes the embedding.
    pub shared_head: bool,
}

/// Which matrices a run held in 4 or 8 bits, and how.
#[derive(Debug)]
pub struct Coded {
    /// The format that they were quantized in.
    pub how: How,
    /// The length of a row of each, by name.
    pub widths: BTreeMap<String, usize>,
}

/// One change of the base's tensors.
#[derive(Debug)]
pub enum Layer {
    /// An adapter is merged in.
    Adapter(Frozen),
    /// Matrices are quantized and dequantized.
    Coded(Coded),
    /// Matrices of these names are rounded to bfloat16, as `model.dtype: bfloat16` rounds them.
    Rounded(BTreeSet<String>),
    /// Whole tensors of an image encoder and a connector, as an earlier stage has trained them.
    Kept(Arc<Tensors>),
}

/// Changes of the base, in the order in which they are applied.
#[derive(Debug, Default)]
pub struct Stack(pub Vec<Layer>);

/// For an expert's matrix such as `model.layers.0.mlp.experts.3.up_proj.weight`: the stacked parameter that adapters
/// know, the expert, and whether the matrix is the second half of the parameter's rows.
fn expert_part(name: &str) -> Option<(String, usize, bool)> {
    let (block, rest) = name.split_once(".experts.")?;
    let (layer, feed) = block.rsplit_once('.')?;
    let (expert, matrix) = rest.split_once('.')?;
    let feed = if feed == "block_sparse_moe" && !matrix.contains("_proj") { "mlp" } else { feed };
    let (parameter, second) = match matrix.strip_suffix(".weight")? {
        "gate_proj" | "w1" => ("gate_up_proj", false),
        // Nemotron-H's have no gate.
        "up_proj" if feed == "mixer" => ("up_proj", false),
        "up_proj" | "w3" => ("gate_up_proj", true),
        "down_proj" | "w2" => ("down_proj", false),
        _ => return None,
    };
    Some((format!("{layer}.{feed}.experts.{parameter}"), expert.parse().ok()?, second))
}

impl From<Frozen> for Layer {
    fn from(adapter: Frozen) -> Self {
        Self::Adapter(adapter)
    }
}

impl Stack {
    /// Whether a tensor is changed.
    pub fn changes(&self, name: &str) -> bool {
        self.0.iter().any(|layer| match layer {
            Layer::Adapter(adapter) => adapter.changes(name),
            Layer::Coded(coded) => coded.widths.contains_key(name),
            Layer::Rounded(names) => names.contains(name),
            Layer::Kept(tensors) => tensors.contains_key(name),
        })
    }

    /// Whether a tensor of an encoder or a connector is kept as an earlier stage has trained it.
    pub fn keeps(&self, name: &str) -> bool {
        self.0.iter().any(|layer| matches!(layer, Layer::Kept(tensors) if tensors.contains_key(name)))
    }

    /// Whether nothing changes the base, except for the tensors of [`Stack::keeps`].
    pub fn leaves_base(&self) -> bool {
        self.0.iter().all(|layer| matches!(layer, Layer::Kept(_)))
    }

    /// Applies all changes to the values of a tensor, in place.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: an adapter's tensor has another shape than the base's; [`tunesmith_base::Kind::Model`]: a number
    /// that cannot be quantized.
    pub fn apply(&self, name: &str, values: &mut [f32]) -> Result<()> {
        self.0.iter().try_for_each(|layer| match layer {
            Layer::Adapter(adapter) => adapter.apply(name, values),
            Layer::Coded(coded) => coded.apply(name, values),
            Layer::Rounded(names) => {
                if names.contains(name) {
                    round_to_bf16(values);
                }
                Ok(())
            }
            Layer::Kept(tensors) => {
                if let Some((_, kept)) = tensors.get(name) {
                    // Shapes were compared when the adapter was opened.
                    values.copy_from_slice(kept);
                }
                Ok(())
            }
        })
    }
}

/// Rounds each value to the nearest that bfloat16 has.
pub fn round_to_bf16(values: &mut [f32]) {
    for value in values {
        *value = bf16::from_f32(*value).to_f32();
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
    /// The tensor that the adapter knows `name` as.
    fn known<'n>(&self, name: &'n str) -> &'n str {
        if self.shared_head && name == LM_HEAD { EMBEDDING } else { name }
    }

    fn changes(&self, name: &str) -> bool {
        let name = self.known(name);
        [name, &token_rows(name)].iter().any(|name| self.tensors.contains_key(*name)) || self.part(name).is_some()
    }

    fn apply(&self, name: &str, values: &mut [f32]) -> Result<()> {
        let (name, wanted) = (self.known(name), values.len());
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
            let tokens = self.tokens.of(name);
            let width = values_of_rows.len() / tokens.len().max(1);
            for (&token, row) in tokens.iter().zip(values_of_rows.chunks_exact(width.max(1))) {
                match values.get_mut(token as usize * width..(token as usize + 1) * width) {
                    Some(to) => to.copy_from_slice(row),
                    None => return misfit(&rows, values_of_rows.len()),
                }
            }
        }
        let Some((placement, part)) = self.part(name) else { return Ok(()) };
        let halves = placement.key.ends_with(".experts.gate_up_proj");
        let rows = if halves { placement.out_features / 2 } else { placement.out_features };
        let size = rows * if part.bias { 1 } else { placement.in_features };
        if size != wanted {
            return misfit(&placement.key, size);
        }
        let tensors: Option<Vec<&[f32]>> =
            placement.tensors().iter().map(|(name, _)| Some(&self.tensors.get(name)?.1[..])).collect();
        match tensors {
            Some(tensors) => placement.adapter.merge(&tensors, &part, values),
            None => return misfit(&placement.key, 0),
        }
        Ok(())
    }

    /// The adapter that changes the tensor of that name, and what of its module that tensor is.
    fn part(&self, name: &str) -> Option<(&Placement, Part)> {
        if let Some((key, expert, second)) = expert_part(name) {
            let placement = self.placements.get(&key)?;
            let (half, step) = match placement.experts {
                Some(Stacked { interleaved: true, .. }) => (1, 2),
                _ => (placement.out_features / 2, 1),
            };
            return Some((placement, Part { bias: false, expert, first: if second { half } else { 0 }, step }));
        }
        let (module, kind) = name.rsplit_once('.')?;
        // An adapter on a module, or on its weight as a parameter.
        let placement = self.placements.get(module).or_else(|| self.placements.get(&peft_name(name)))?;
        let bias = kind == "bias";
        let changed = kind == "weight" || (bias && placement.adapter.changes_bias());
        changed.then_some((placement, Part { bias, expert: 0, first: 0, step: 1 }))
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
        let granite = expert_part("model.layers.7.block_sparse_moe.experts.3.up_proj.weight");
        assert_eq!(granite, Some(("model.layers.7.block_sparse_moe.experts.gate_up_proj".into(), 3, true)));
        let nemotron = expert_part("model.layers.7.mixer.experts.3.up_proj.weight");
        assert_eq!(nemotron, Some(("model.layers.7.mixer.experts.up_proj".into(), 3, false)));
        let lfm2 = expert_part("model.layers.7.feed_forward.experts.3.w3.weight");
        assert_eq!(lfm2, Some(("model.layers.7.feed_forward.experts.gate_up_proj".into(), 3, true)));
    }
}
