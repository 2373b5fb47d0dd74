//! Where tensors lie and ops compute: the CPU, or the meta device, which stores and computes nothing.
mod buffer;
mod usage;

pub use buffer::Buffer;
pub use usage::{Held, Usage};

/// Where tensors lie and ops compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// Main memory and the processor.
    #[default]
    Cpu,
    /// Tensors have sizes and no memory, ops do nothing, as on PyTorch's device of this name. What a pass would need is
    /// counted for a device of the given layout.
    Meta(Layout),
}

/// How a device lays an activation `[tokens, features]` out in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Tokens are stored in whole groups of so many.
    pub tokens: usize,
    /// Bytes of a value.
    pub value: usize,
    /// Buffers of at least two huge pages consist of whole ones.
    pub huge_pages: bool,
}

impl Layout {
    /// The CPU's: panels of 16 tokens, f32.
    pub const CPU: Self = Self { tokens: 16, value: size_of::<f32>(), huge_pages: true };

    /// Row-major, with so many bytes a value, on a GPU.
    pub const fn rows(value: usize) -> Self {
        Self { tokens: 1, value, huge_pages: false }
    }

    /// Bytes of a buffer of so many values, at least one.
    pub const fn bytes(self, values: usize) -> usize {
        let bytes = (if values == 0 { 1 } else { values }) * self.value;
        if self.huge_pages && bytes >= 2 * HUGE_PAGE { bytes.next_multiple_of(HUGE_PAGE) } else { bytes }
    }
}

impl Device {
    /// The layout of activations.
    pub const fn layout(self) -> Layout {
        match self {
            Self::Cpu => Layout::CPU,
            Self::Meta(layout) => layout,
        }
    }
}

/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_buffers_are_whole_huge_pages() {
        assert_eq!([0, 1, 1 << 20].map(|values| Layout::CPU.bytes(values)), [4, 4, 4 << 20]);
        assert_eq!(Layout::CPU.bytes((1 << 20) + 1), 6 << 20);
        assert_eq!(Layout::rows(2).bytes((4 << 20) + 1), (8 << 20) + 2);
    }
}
