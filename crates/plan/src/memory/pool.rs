//! The memory of the buffers that a pass uses. The engine reuses buffers of the same size, so it holds as many of each
//! size as were ever in use at once. It counts them itself, in a pass on the meta device.
use std::collections::BTreeMap;
use tunesmith_device::buffer_bytes;

/// How many tokens a panel has, as in `ops::activation`.
pub const LANES: u64 = 16;

/// For each number of features, how many activation buffers there are.
pub type Counts = BTreeMap<u64, u64>;

/// The buffers of a training pass. Those in `saved`, `all` and `experts` have room for the tokens of the pass, those in
/// `head` for one chunk of labelled tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BufferCounts {
    /// In use when the head begins, so saved for the backward pass.
    pub saved: Counts,
    /// The most that are in use at once.
    pub all: Counts,
    /// The buffers of each pool for experts. All blocks share one pool, except the last block, which may compute fewer
    /// tokens.
    pub experts: Vec<ExpertCounts>,
    /// Buffers of the head, for chunks of logits.
    pub head: Counts,
    /// The buffers of vision encoders and connectors, for one image.
    pub vision: VisionCounts,
}

/// The buffers of vision encoders and connectors. They have room for all encoder tokens of a pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VisionCounts {
    /// In use when the head begins, so saved for the backward pass.
    pub saved: Counts,
    /// The most that are in use at once.
    pub all: Counts,
    /// Bytes of the buffers of a second encoder, which reads one image at a time.
    pub world: u64,
}

/// The buffers of a pool for experts, each with room for the tokens of one expert.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpertCounts {
    /// In use when the head begins, as in [`BufferCounts::saved`].
    pub saved: Counts,
    /// The most that are in use at once, as in [`BufferCounts::all`].
    pub all: Counts,
    /// Whether the blocks of this pool compute only labelled tokens.
    pub labelled: bool,
}

/// A pass on the CPU whose buffers are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Walk {
    /// Tokens of the pass.
    pub tokens: usize,
    /// Tokens that carry a label, at least one.
    pub labelled: usize,
    /// The fewest tokens that every buffer has room for.
    pub room: usize,
    /// How many of the first blocks save nothing.
    pub full: usize,
    /// How many of the last blocks save everything.
    pub none: usize,
    /// Whether saved activations take two bytes per number.
    pub narrow: bool,
    /// Whether gradients between blocks are rounded to float16.
    pub rounds_gradients: bool,
    /// Images that the pass shows.
    pub images: usize,
}

/// A pass on a GPU whose bytes are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuWalk {
    /// Tokens of the pass, one row.
    pub tokens: usize,
    /// Tokens that carry a label, at least one.
    pub labelled: usize,
    /// The fewest tokens that every buffer has room for.
    pub room: usize,
    /// How many of the first blocks save nothing.
    pub full: usize,
    /// How many of the last blocks save everything.
    pub none: usize,
    /// Whether saved activations take two bytes per number.
    pub narrow: bool,
    /// Whether gradients between blocks are rounded to float16.
    pub rounds_gradients: bool,
    /// Whether all tokens choose the same experts. Otherwise each expert gets equally many.
    pub uneven: bool,
    /// Images that the pass shows.
    pub images: usize,
}

/// The memory of a model on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuHeld {
    /// Bytes of weights and trained values.
    pub held: u64,
    /// The most bytes that it takes while it is loaded.
    pub most: u64,
}

/// Bytes of buffers on the CPU, each with room for `tokens` tokens in full panels.
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
