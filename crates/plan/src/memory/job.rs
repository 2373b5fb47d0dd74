//! Everything that the memory of a run depends on: how the base is stored, what is trained, the optimizer, and the
//! batch.
use super::Walked;
use super::footprint::{Footprint, Shape};
use super::pictures::Pictures;
use super::pool::{BufferCounts, GpuHeld, GpuWalk, Walk};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::Arc;
use tunesmith_config::arch::{Arch, TensorSpec};
use tunesmith_config::stored_format::Layout;

/// How the numbers of a matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// Single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// Four bits per number (NF4 or FP4), and a scale for each block of 64: Dettmers et al., "`QLoRA`", 2023,
    /// <https://arxiv.org/abs/2305.14314>. Scales are f32; with `double`, a byte, and an f32 for each block of 256.
    FourBit {
        /// Whether the scales are quantized too.
        double: bool,
    },
    /// A byte per number, and an f32 scale per row.
    Int8,
    /// As [`Storage::Int8`], with 8-bit floating-point numbers.
    Fp8,
    /// As the checkpoint stores it, in the format of its maker.
    Stored(Layout),
}

impl Storage {
    /// Bytes of a tensor of this shape, scales included.
    pub fn bytes(self, shape: &[usize]) -> u64 {
        let numbers: u64 = shape.iter().map(|&size| size as u64).product();
        match self {
            Self::F32 => 4 * numbers,
            Self::Bf16 => 2 * numbers,
            Self::FourBit { double } => {
                let blocks = numbers.div_ceil(64);
                numbers.div_ceil(2) + if double { blocks + 4 * blocks.div_ceil(256) + 4 } else { 4 * blocks }
            }
            Self::Stored(layout) => layout.bytes(shape),
            Self::Int8 | Self::Fp8 => numbers + 4 * numbers / shape.last().map_or(1, |&size| size.max(1) as u64),
        }
    }

    /// The storage as a part of a matrix into which two were joined. Each part's scales were quantized around a mean of
    /// their own, so in the joined matrix the scales are not quantized.
    const fn joined(self) -> Self {
        match self {
            Self::FourBit { .. } => Self::FourBit { double: false },
            _ => self,
        }
    }

    /// Whether its numbers are dequantized before they are multiplied.
    pub(crate) const fn is_quantized(self) -> bool {
        matches!(self, Self::FourBit { .. } | Self::Int8 | Self::Fp8 | Self::Stored(_))
    }

    /// The name in tables, such as `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::FourBit { double: true } => "4 bit, double quantization",
            Self::FourBit { double: false } => "4 bit",
            Self::Int8 => "int8",
            Self::Fp8 => "FP8",
            Self::Stored(layout) => layout.name(),
        }
    }
}

/// How the weights of the base model are stored. It is cheap to clone and to compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    /// The storage of matrices that are neither trained nor quantized.
    pub matrices: Storage,
    /// The storage of the tensors in `quantized_tensors`; `None` quantizes nothing.
    pub quantized: Option<Storage>,
    /// The names of the tensors that `quantized` applies to.
    pub quantized_tensors: Arc<BTreeSet<String>>,
    /// The tensors that the checkpoint has in the format of its maker, and that stay so.
    pub stored: Arc<BTreeMap<String, Layout>>,
    /// Unquantized tensors that are f32 although `matrices` is bfloat16, because the checkpoint has them in another
    /// dtype, or in a format from which they are dequantized.
    pub float32: Arc<BTreeSet<String>>,
    /// Names of modules whose matrices are f32 in any case, because `PiSSA` changes them.
    pub wide: Arc<BTreeSet<String>>,
    /// Whether tensors exist in f32 before they are stored: they are drawn at random, or finished adapters are merged.
    pub through_f32: bool,
    /// Whether the GPU leaves frozen weights in the host's memory and loads them segment by segment.
    pub on_host: bool,
}

/// The engine, as far as it counts the memory of a pass without computing it.
pub trait CountBuffers: Debug + Send + Sync {
    /// The buffers that a training pass uses on the CPU.
    fn count(&self, walk: &Walk) -> BufferCounts;

    /// The buffers that the forward pass of a validation uses on the CPU, without those of the head. Nothing is saved.
    fn count_forward(&self, walk: &Walk) -> BufferCounts;

    /// The bytes that a model with this base holds on a GPU, and the most bytes while it is loaded.
    fn held_on_gpu(&self, base: &Base) -> GpuHeld;

    /// The bytes that a pass takes on a GPU in addition to weights, trained values and gradients.
    fn on_gpu(&self, base: &Base, walk: &GpuWalk) -> Walked;
}

/// What is trained: its tensors, adapters and number of values.
#[derive(Debug, Clone, Default)]
pub struct Trained {
    /// How many values are trained in all.
    pub values: u64,
    /// Names of the model's tensors that are trained in full.
    pub tensors: BTreeSet<String>,
    /// Adapters by the names of their modules; for experts, by the name of their parameter:
    /// `model.layers.0.mlp.experts.down_proj`.
    pub adapters: BTreeMap<String, Arc<dyn Footprint>>,
    /// Whether a copy of the initial values is kept, as `PiSSA` needs.
    pub keeps_start: bool,
}

/// The optimizer's memory, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OptimizerBytes {
    /// The state: moments and the like.
    pub state: u64,
    /// The moving average of the weights.
    pub average: u64,
    /// Memory that an update needs for a moment.
    pub scratch: u64,
    /// A copy of the trained values while others are evaluated or saved.
    pub publishing: u64,
    /// The copy from which checkpoints are written while training continues.
    pub saving: u64,
    /// The most bytes of offloaded state that are on a GPU at once, while the state is updated.
    pub in_flight: u64,
    /// Whether the state of a GPU's optimizer is in the host's memory.
    pub offloaded: bool,
}

/// What a block saves for its backward pass in addition to its input, which gradient checkpointing decides (Chen et
/// al., "Training Deep Nets with Sublinear Memory Cost", 2016, <https://arxiv.org/abs/1604.06174>).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Everything that the backward pass needs. Nothing is computed again.
    None,
    /// The results of matrix products. What is cheap to compute from them is computed again.
    Cheap,
    /// Nothing: the backward pass runs the block again.
    Full,
}

/// Everything that memory depends on, except for the batch.
#[derive(Debug, Clone)]
pub struct Job<'a> {
    /// The architecture of the model.
    pub arch: &'a Arch,
    /// How its weights are stored.
    pub base: Base,
    /// What is trained: tensors of the model, and adapters.
    pub trained: Trained,
    /// The memory of the optimizer.
    pub optimizer: OptimizerBytes,
    /// How many of the first blocks have [`Policy::Full`].
    pub full: usize,
    /// How many of the last blocks have [`Policy::None`]. The blocks between have [`Policy::Cheap`].
    pub none: usize,
    /// Whether saved activations take two bytes per number.
    pub narrow: bool,
    /// Whether gradients of trained values take two bytes each, except in the segment where the backward pass is.
    pub narrow_gradients: bool,
    /// Whether gradients between blocks are rounded to float16.
    pub rounds_gradients: bool,
    /// Threads that a rank computes on.
    pub threads: usize,
    /// Bytes that the process holds in addition: the tokenizer.
    pub companions: u64,
    /// Bytes of gradients that ranks exchange at a time.
    pub bucket: u64,
    /// Names of the base's tensors that the GPU leaves in the host's memory.
    pub offloaded: Vec<String>,
    /// Names of the tensors that the CPU leaves in the model's files: the token embedding, or none.
    pub in_files: Vec<String>,
    /// The images that rows show; `None` if they show none.
    pub pictures: Option<Pictures>,
    /// The largest pass of a validation, which only runs forward; `None` without validation.
    pub evaluation: Option<Pass>,
    /// Counts the buffers of a pass.
    pub engine: Arc<dyn CountBuffers>,
}

/// The tokens that go through the model in one pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Tokens of all rows together.
    pub tokens: u64,
    /// Tokens of the longest row.
    pub longest: u64,
    /// Tokens that carry a label.
    pub labelled: u64,
}

impl Pass {
    /// The largest pass of micro-batches of `rows` rows of `length` tokens. Every token but the last one of each row
    /// has a label. A micro-batch with more than `most` tokens is cut between rows.
    pub fn of(rows: u64, length: u64, most: Option<u64>) -> Self {
        let rows = most.map_or(rows, |most| rows.min(most / length.max(1)).max(1));
        Self { tokens: rows * length, longest: length, labelled: rows * length.saturating_sub(1).max(1) }
    }
}

impl Job<'_> {
    /// Whether the CPU leaves a tensor in the model's files and reads only the rows that a pass looks up.
    pub(super) fn stays_in_files(&self, tensor: &str) -> bool {
        self.in_files.iter().any(|name| name == tensor)
    }

    /// What a block saves for its backward pass; blocks count from 0.
    pub const fn policy(&self, block: usize) -> Policy {
        if block < self.full {
            Policy::Full
        } else if self.arch.num_hidden_layers - block <= self.none {
            Policy::None
        } else {
            Policy::Cheap
        }
    }

    /// How a tensor of the base is stored; `None` if it is fully trained.
    pub fn storage(&self, spec: &TensorSpec) -> Option<Storage> {
        let base = &self.base;
        let module = spec.name.strip_suffix(".weight").unwrap_or(&spec.name);
        let has_rows = !self.arch.rows_of(&spec.name).is_empty();
        if self.trained.tensors.contains(&spec.name) {
            None
        } else if !TensorSpec::is_matrix(&spec.shape) || base.wide.contains(module) || has_rows {
            Some(Storage::F32)
        } else if let Some(layout) = base.stored.get(&spec.name) {
            Some(Storage::Stored(*layout))
        } else {
            let named = |_: &Storage| base.quantized_tensors.contains(&spec.name);
            let dense = if base.float32.contains(&spec.name) { Storage::F32 } else { base.matrices };
            let quantized = base.quantized.filter(named);
            let quantized =
                quantized.map(|storage| if self.is_joined(&spec.name) { storage.joined() } else { storage });
            Some(quantized.unwrap_or(dense))
        }
    }

    /// Whether the engine joins this matrix with another one: an expert's gate and up, unless each has an adapter of
    /// its own.
    fn is_joined(&self, tensor: &str) -> bool {
        let gated = self.arch.experts.as_ref().filter(|experts| experts.gated && tensor.contains(".experts."));
        let Some(experts) = gated else { return false };
        let matrix = |name: &str| name.rsplit('.').nth(1).map(str::to_owned);
        let down = experts.names(0).pop().and_then(|name| matrix(&name));
        let apart =
            experts.is_interleaved() && self.trained.adapters.keys().any(|module| module.ends_with("gate_up_proj"));
        matrix(tensor) != down && !apart
    }

    /// The adapters on linear modules, without those of experts, and the shapes of these modules.
    fn adapted(&self) -> impl Iterator<Item = (&dyn Footprint, Shape)> {
        self.arch.linear_modules().into_iter().chain(self.arch.routers()).filter_map(|linear| {
            let adapter = self.trained.adapters.get(&linear.name)?;
            let (out, inputs) = (linear.out_features as u64, linear.in_features as u64);
            Some((adapter.as_ref(), Shape { out, inputs }))
        })
    }

    /// Bytes that adapters always hold in addition to their trained values.
    pub(crate) fn constants(&self) -> u64 {
        self.adapted().map(|(adapter, shape)| adapter.constants(&shape)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_bits_carry_a_scale_a_block() {
        let shape = [4096, 4096];
        let numbers = 4096 * 4096;
        assert_eq!(Storage::F32.bytes(&shape), 4 * numbers);
        assert_eq!(Storage::FourBit { double: false }.bytes(&shape), numbers / 2 + numbers / 64 * 4);
        let double = numbers / 2 + numbers / 64 + numbers / 64 / 256 * 4 + 4;
        assert_eq!(Storage::FourBit { double: true }.bytes(&shape), double);
        assert_eq!(Storage::Int8.bytes(&shape), numbers + 4 * 4096);
        assert_eq!(Storage::FourBit { double: true }.bytes(&[3, 7]), 11 + 1 + 4 + 4, "odd counts are rounded up");
    }

    #[test]
    fn passes_are_cut_between_rows() {
        let of = |rows, length, most| Pass::of(rows, length, most).tokens;
        assert_eq!((of(2, 512, None), of(2, 512, Some(768)), of(8, 100, Some(768))), (1024, 512, 700));
        assert_eq!(of(2, 2048, Some(768)), 2048, "a row stays whole");
    }
}
