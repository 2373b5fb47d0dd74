//! A matrix that the maker of a checkpoint has quantized: the names of its parts, and how they are read.
use tunesmith_config::stored_format::{Grouped, Layout};

/// A matrix in a maker's format.
#[derive(Debug, Clone)]
pub(super) struct MakersTensor {
    /// `[rows, columns]`.
    pub(super) shape: [usize; 2],
    pub(super) layout: Layout,
    pub(super) kind: Kind,
    /// The name of its module.
    pub(super) module: String,
    /// The end of the name of its codes, after the module's name.
    pub(super) codes: &'static str,
    /// The ends of the names of the tensors beside them, such as scales and zero points.
    pub(super) beside: Vec<&'static str>,
}

/// How its parts are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// FP8, with the end of the name of its scales.
    Fp8(&'static str),
    Gptq(Grouped),
    Awq,
    /// compressed-tensors, with several codes packed into a word.
    Packed,
    /// compressed-tensors, with a byte for each code.
    Bytes,
    /// NVFP4; whether the scale of the whole matrix divides the scales of groups, or else multiplies them.
    Nvfp4(bool),
}

impl Kind {
    /// Whether matrices of this layout are read so.
    pub(super) const fn has(self, layout: Layout) -> bool {
        match self {
            Self::Fp8(_) => matches!(layout, Layout::Fp8 { .. }),
            Self::Nvfp4(_) => matches!(layout, Layout::Nvfp4),
            Self::Gptq(_) | Self::Awq | Self::Packed | Self::Bytes => matches!(layout, Layout::Integers { .. }),
        }
    }
}

impl MakersTensor {
    /// The names of what lies beside its codes.
    pub(super) fn companions(&self) -> impl Iterator<Item = String> {
        self.beside.iter().map(|end| format!("{}.{end}", self.module))
    }
}
