//! How a model lies in a GGUF file of its llama.cpp architecture: the keys of the header, the tensors, and an adapter's
//! matrices.
use super::check::{check, refuse};
use super::container::Header;
use super::keys;
use super::names::is_mixer;
use super::rows::Step;
use super::tensors::{Computed, Output, computed, outputs};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{Arch, BlockSpec, Gguf, PartSpec, TensorSpec};

/// The llama.cpp architecture of a model: its name and its rules.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    gguf: Gguf,
    name: &'static str,
}

/// A tensor of the file: its name and shape, and the tensors of the model that it consists of, one after the other.
pub(super) struct Made {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) parts: Vec<(TensorSpec, Output)>,
}

impl Layout {
    /// The layout of a model. [`Arch::vision`] matters too: a model whose image tokens have positions on several axes has
    /// another architecture in llama.cpp (such as `qwen2vl`).
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: llama.cpp does not know the family, or computes the model differently.
    pub(super) fn of(arch: &Arch) -> Result<Self> {
        let family = arch.family;
        let Some(gguf) = family.gguf else { return Err(refuse(family.model_type, "this family")) };
        check(arch, &gguf)?;
        let other = |block: &BlockSpec| {
            let mut parts = block.branches.iter().map(|branch| &branch.part);
            parts.any(|part| is_mixer(part) && !matches!(part, PartSpec::Attention(_)))
        };
        let (hybrid, sparse) = (arch.blocks.iter().any(other), arch.blocks.iter().any(BlockSpec::has_experts));
        let seeing = arch.vision.as_ref().and_then(|vision| vision.mrope.as_ref());
        let name = match (gguf.name, seeing.map(|mrope| mrope.interleaved)) {
            ("qwen2", Some(false)) => "qwen2vl",
            ("qwen3", Some(true)) => "qwen3vl",
            _ => (gguf.variant)(hybrid, sparse).unwrap_or(gguf.name),
        };
        Ok(Self { gguf, name })
    }

    pub(super) const fn name(&self) -> &'static str {
        self.name
    }

    /// Writes the sizes of the model to the header.
    pub(super) fn describe(&self, arch: &Arch, header: &mut Header) {
        keys::describe(arch, &self.gguf, header);
    }

    /// Computed tensors that no model folder has.
    #[allow(clippy::unused_self, reason = "one of the layout's tables")]
    pub(super) fn computed(&self, arch: &Arch) -> Vec<Computed> {
        computed(arch)
    }

    /// The tensors of the file that a tensor of the model becomes.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: llama.cpp has no name for it.
    pub(super) fn outputs(&self, arch: &Arch, spec: &TensorSpec) -> Result<Vec<Output>> {
        outputs(arch, &self.gguf, spec).ok_or_else(|| {
            Error::model(format!("{} has no name in GGUF files of the architecture {}", spec.name, self.name))
        })
    }

    /// The tensors of the file in their order.
    ///
    /// # Errors
    /// As [`Layout::outputs`].
    pub(super) fn tensors(&self, arch: &Arch) -> Result<Vec<Made>> {
        let mut made: Vec<Made> = Vec::new();
        let mut places = std::collections::HashMap::new();
        for spec in arch.tensors() {
            let stacked = is_stacked(&spec.name);
            for output in self.outputs(arch, &spec)? {
                // The experts of a block are one tensor, as are the projections of residual streams.
                if let Some(&place) = places.get(&output.name) {
                    let tensor: &mut Made = &mut made[place];
                    tensor.shape[0] += 1;
                    tensor.parts.push((spec.clone(), output));
                    continue;
                }
                places.insert(output.name.clone(), made.len());
                let shape = if stacked { [&[1], output.shape.as_slice()].concat() } else { output.shape.clone() };
                made.push(Made { name: output.name.clone(), shape, parts: vec![(spec.clone(), output)] });
            }
        }
        Ok(made)
    }

    /// An adapter's A and B on the matrix `spec`, with rows and columns in the order of the file. If the matrix becomes two
    /// tensors of the file, both get the same A.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: llama.cpp changes the matrix in a way that A and B cannot follow.
    pub(super) fn adapted(&self, arch: &Arch, spec: &TensorSpec, a: &[f32], b: &[f32]) -> Result<Vec<Adapted>> {
        let rank = a.len() / spec.shape[1];
        let outputs = self.outputs(arch, spec)?;
        let latent = arch.attentions().any(|attention| attention.latent.is_some());
        let ignored = |output: &Output| {
            IGNORED.iter().any(|name| output.name.contains(name)) || latent && output.name.contains("attn_q.")
        };
        if outputs.iter().any(ignored) {
            let name = spec.name.trim_end_matches(".weight");
            return Err(Error::model(format!("llama.cpp ignores an adapter on {name} in a {} model", self.name))
                .hint("export the merged model: leave --adapter-only out"));
        }
        outputs
            .into_iter()
            .map(|output| {
                let mut adapted = Adapted { name: output.name, rank, a: a.to_vec(), b: b.to_vec() };
                for step in &output.steps {
                    match step {
                        Step::Rows(_) => adapted.b = step.apply(adapted.b, rank).0,
                        Step::Columns(_) => adapted.a = step.apply(adapted.a, spec.shape[1]).0,
                        _ => {
                            let name = spec.name.trim_end_matches(".weight");
                            return Err(Error::model(format!(
                                "{name} is another matrix in GGUF files, which an adapter's matrices cannot follow"
                            ))
                            .hint("export the merged model: leave --adapter-only out"));
                        }
                    }
                }
                Ok(adapted)
            })
            .collect()
    }
}

/// Parts of the names of matrices on which llama.cpp accepts an adapter but ignores it.
const IGNORED: [&str; 6] = ["attn_q_a", "attn_q_b", "attn_kv_a_mqa", "ffn_latent_", "per_layer_model_proj", "altup_"];

/// An adapter's matrices on a tensor of the file: A is `[rank, in]`, B is `[out, rank]`.
pub(super) struct Adapted {
    pub(super) name: String,
    pub(super) rank: usize,
    pub(super) a: Vec<f32>,
    pub(super) b: Vec<f32>,
}

/// Whether tensors of this kind are stacked into one tensor of the file: experts, and projections of residual streams.
fn is_stacked(name: &str) -> bool {
    name.contains(".experts.") || name.starts_with("model.altup_")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Layout, Made};
    use tunesmith_config::arch::Arch;

    #[test]
    fn a_head_of_its_own_is_written_where_llama_cpp_has_one() {
        for (family, refused) in [("qwen2", false), ("gemma", true)] {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/a").join(family).join("model");
            let mut arch = Arch::from_dir(&dir).unwrap();
            let names = |arch: &Arch| {
                Layout::of(arch)?.tensors(arch).map(|made| made.into_iter().map(|Made { name, .. }| name))
            };
            assert!(names(&arch).unwrap().all(|name| name != "output.weight"), "{family}");
            arch.separate(&["lm_head".to_owned()]);
            match names(&arch) {
                Ok(mut names) => assert!(!refused && names.any(|name| name == "output.weight"), "{family}"),
                Err(error) => {
                    assert!(refused && error.to_string().contains("an output head with its own matrix"), "{error}");
                }
            }
        }
    }
}
