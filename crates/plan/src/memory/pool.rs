//! The bytes of the buffers that a pass takes. The engine reuses buffers of the same size. So it holds as many of each as
//! were ever in use at once, which it counts itself, in a pass on the meta device.
use std::collections::BTreeMap;
use tunesmith_device::buffer_bytes;

/// Tokens in a panel, as in `ops::activation`.
pub const LANES: u64 = 16;

/// How many buffers there are for activations of so many features, by features.
pub type Counts = BTreeMap<u64, u64>;

/// The buffers of a pass of training. Those of `saved`, `all`, and experts have room for its tokens, those of `head` for a
/// chunk of labelled tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BufferCounts {
    /// In use when the head begins: what is saved for the backward pass.
    pub saved: Counts,
    /// The most that are in use at once.
    pub all: Counts,
    /// Of each pool for experts: blocks share one, but for the last, which may compute fewer tokens.
    pub experts: Vec<ExpertCounts>,
    /// Buffers of the head, for chunks of logits.
    pub head: Counts,
    /// Those of image encoders and connectors, for one image.
    pub vision: VisionCounts,
}

/// Buffers of image encoders and connectors, with room for the encoder's tokens of a pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VisionCounts {
    /// In use when the head begins: what is saved for the backward pass.
    pub saved: Counts,
    /// The most that are in use at once.
    pub all: Counts,
    /// Bytes of a second encoder's buffers, which sees one image at a time.
    pub world: u64,
}

/// The buffers of a pool for experts, each with room for the tokens of one expert.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpertCounts {
    /// In use when the head begins, as in [`BufferCounts::saved`].
    pub saved: Counts,
    /// The most that are in use at once, as in [`BufferCounts::all`].
    pub all: Counts,
    /// Whether its blocks compute labelled tokens only.
    pub labelled: bool,
}

/// A pass whose buffers are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Walk {
    /// Tokens of the pass.
    pub tokens: usize,
    /// Tokens that carry a label, at least one.
    pub labelled: usize,
    /// Every buffer has room for at least so many tokens.
    pub room: usize,
    /// How many of the first blocks save nothing.
    pub full: usize,
    /// How many of the last blocks save everything.
    pub none: usize,
    /// Whether saved activations have two bytes a number.
    pub narrow: bool,
    /// Whether gradients between blocks are rounded to float16.
    pub rounds_gradients: bool,
    /// Images that the pass shows.
    pub images: usize,
}

/// A pass whose bytes on a GPU are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuWalk {
    /// Tokens of the pass, one row.
    pub tokens: usize,
    /// Tokens that carry a label, at least one.
    pub labelled: usize,
    /// Every buffer has room for at least so many tokens.
    pub room: usize,
    /// How many of the first blocks save nothing.
    pub full: usize,
    /// How many of the last blocks save everything.
    pub none: usize,
    /// Whether saved activations have two bytes a number.
    pub narrow: bool,
    /// Whether gradients between blocks are rounded to float16.
    pub rounds_gradients: bool,
    /// Whether all tokens choose the same experts; else each expert sees as many.
    pub uneven: bool,
    /// Images that the pass shows.
    pub images: usize,
}

/// What a model holds on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuHeld {
    /// Bytes of weights and trained values.
    pub held: u64,
    /// The most bytes while it is loaded.
    pub most: u64,
}

/// Bytes of buffers on the CPU, each for so many tokens in panels.
pub(super) fn bytes(counts: &Counts, tokens: u64) -> u64 {
    let one = |features: u64| buffer_bytes((features * tokens.next_multiple_of(LANES)) as usize) as u64;
    counts.iter().map(|(&features, count)| count * one(features)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_counts_in_whole_panels() {
        let counts = Counts::from([(8, 2), (3, 1)]);
        assert_eq!(bytes(&counts, 17), (2 * 8 + 3) * 32 * 4);
    }
}
