//! A matrix in one of the quantization formats of checkpoints: the names of its parts, and how they are read.
use tunesmith_config::stored_format::{Grouped, Layout};

/// A matrix in a maker's format.
#[derive(Debug, Clone)]
pub(super) struct MakersTensor {
    /// `[rows, columns]`.
    pub(super) shape: [usize; 2],
    pub(super) layout: Layout,
    pub(super) kind: Kind,
    /// Its module.
    pub(super) module: String,
    /// What its codes are called behind the module's name.
    pub(super) codes: &'static str,
    /// Likewise the tensors beside them.
    pub(super) beside: Vec<&'static str>,
}

/// How its parts are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// With the name of its scales.
    Fp8(&'static str),
    Gptq(Grouped),
    Awq,
    /// compressed-tensors, packed in words or a byte a number.
    Packed,
    Bytes,
    /// Whether the number of the whole matrix divides the scales; else it multiplies them.
    Nvfp4(bool),
}

impl MakersTensor {
    /// The names of what lies beside its codes.
    pub(super) fn companions(&self) -> impl Iterator<Item = String> {
        self.beside.iter().map(|end| format!("{}.{end}", self.module))
    }
}
