//! Attention on a GPU's tensor cores: which head sizes can use it, and the tile sizes of its kernels.
use super::{Heads, Scores};
use crate::activation::{Activation, Number};
use crate::cuda::{Grid, Header, Source, Typed};

static HEADERS: [Header; 5] = [
    ("tiles.cuh", include_str!("tiles.cuh")),
    ("mma.cuh", include_str!("mma.cuh")),
    ("mma_tiles.cuh", include_str!("mma_tiles.cuh")),
    ("mma_forward.cuh", include_str!("mma_forward.cuh")),
    ("mma_backward.cuh", include_str!("mma_backward.cuh")),
];

/// Threads of a block: four warps.
const THREADS: u32 = 128;

/// Rows that the four warps of a block process at once, 16 each.
const ROWS: usize = 64;

/// The kernels for heads of up to `head_dim` and `v_head_dim` features, in float16 or bfloat16.
#[derive(Debug)]
pub(super) struct Class {
    head_dim: usize,
    v_head_dim: usize,
    source: Typed,
    names: [&'static str; 3],
    /// Queries of a tile, in the forward pass and in the gradient of the queries.
    pub(super) queries: usize,
    /// Keys that a block holds at once: in the forward pass, and in the gradient of the queries.
    forward_keys: usize,
    backward_keys: usize,
    /// Keys of a tile, in the gradients of keys and values.
    pub(super) keys: usize,
    /// Queries that a block of these gradients holds at once.
    backward_queries: usize,
    /// Blocks for each such tile: one for both gradients, or one for each.
    parts: u32,
}

macro_rules! class {
    ($name:literal, [$head_dim:literal, $v_head_dim:literal], $($field:ident: $value:expr),*) => {
        Class {
            head_dim: $head_dim,
            v_head_dim: $v_head_dim,
            source: Typed::new(concat!("mma_", $name), include_str!(concat!("mma_", $name, ".cu"))).with_headers(&HEADERS),
            names: [
                concat!("attention_mma_forward_", $name),
                concat!("attention_mma_queries_", $name),
                concat!("attention_mma_keys_", $name),
            ],
            $($field: $value),*
        }
    };
}

/// The same sizes as in the `.cu` files. A block has at most 99 KiB of shared memory, which every GPU of compute
/// capability 8.0 or later has.
#[rustfmt::skip]
static CLASSES: [Class; 6] = [
    class!("64", [64, 64], queries: 2 * ROWS, forward_keys: 64, backward_keys: 32, keys: 2 * ROWS, backward_queries: 32, parts: 1),
    class!("96", [96, 96], queries: 2 * ROWS, forward_keys: 32, backward_keys: 32, keys: ROWS, backward_queries: 32, parts: 1),
    class!("128", [128, 128], queries: ROWS, forward_keys: 64, backward_keys: 32, keys: ROWS, backward_queries: 32, parts: 1),
    class!("192_128", [192, 128], queries: ROWS, forward_keys: 64, backward_keys: 16, keys: ROWS, backward_queries: 32, parts: 2),
    class!("192", [192, 192], queries: ROWS, forward_keys: 32, backward_keys: 32, keys: ROWS, backward_queries: 32, parts: 2),
    class!("256", [256, 256], queries: ROWS, forward_keys: 32, backward_keys: 16, keys: ROWS, backward_queries: 16, parts: 2),
];

/// Bytes from one row of a tile to the next, as `Tile` in `mma_tiles.cuh` has them: padded unless the row has a
/// multiple of 64 features.
const fn pitch(features: usize) -> usize {
    if features.is_multiple_of(64) { 2 * features } else { 2 * features + 16 }
}

/// A kernel: its source, its name, and how many blocks run it.
pub(super) type Launch = (&'static Source, &'static str, Grid);

impl Class {
    /// The kernels for these activations and heads; `None` if the kernels without tensor cores have to be used.
    pub(super) fn of(operands: &[&Activation], heads: Heads, how: Scores) -> Option<&'static Self> {
        // Asynchronous copies move 16 bytes at a time, so operands have to be aligned to that.
        let aligned = |operand: &&Activation| operand.number() != Number::F32 && operand.address().is_multiple_of(16);
        if operands.iter().all(aligned) { Self::of_shape(heads, how) } else { None }
    }

    /// The kernels for heads of these sizes; `None` if no class fits.
    fn of_shape(heads: Heads, how: Scores) -> Option<&'static Self> {
        let whole = |features: usize| features > 0 && features.is_multiple_of(16);
        // The kernels keep the running maximum of products before they are scaled, so the scale has to be positive.
        if !whole(heads.head_dim) || !whole(heads.v_head_dim) || how.scale.is_nan() || how.scale <= 0.0 {
            return None;
        }
        CLASSES.iter().find(|class| class.head_dim >= heads.head_dim && class.v_head_dim >= heads.v_head_dim)
    }

    /// Bytes of one row of keys and one of values, or of queries and output gradients, in shared memory.
    const fn pair(&self) -> usize {
        pitch(self.head_dim) + pitch(self.v_head_dim)
    }

    /// Bytes of shared memory of a block, for each of the three kernels.
    const fn shared(&self) -> [usize; 3] {
        [
            self.queries * pitch(self.head_dim) + self.forward_keys * self.pair(),
            (self.queries + 2 * self.backward_keys) * self.pair(),
            self.keys * self.pair() + 2 * self.backward_queries * (self.pair() + 16),
        ]
    }

    fn launch(&'static self, which: usize, number: Number, blocks: [usize; 3]) -> Launch {
        let blocks = blocks.map(|count| u32::try_from(count).expect("a grid has less than 2^32 blocks"));
        let grid = Grid { blocks, threads: THREADS, shared: self.shared()[which] as u32 };
        (self.source.of(number), self.names[which], grid)
    }

    /// How to launch the forward pass for that many tiles of queries.
    pub(super) fn forward(&'static self, number: Number, tiles: usize, heads: Heads) -> Launch {
        self.launch(0, number, [tiles, heads.query, 1])
    }

    /// How to launch the gradient of the queries for that many tiles of queries.
    pub(super) fn backward_queries(&'static self, number: Number, tiles: usize, heads: Heads) -> Launch {
        self.launch(1, number, [tiles, heads.query, 1])
    }

    /// How to launch the gradients of keys and values for that many tiles of keys.
    pub(super) fn backward_keys(&'static self, number: Number, tiles: usize, heads: Heads) -> Launch {
        self.launch(2, number, [tiles, heads.kv, self.parts as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_has_room_on_every_gpu() {
        for class in &CLASSES {
            assert!(class.shared().iter().all(|&bytes| bytes <= 99 << 10), "{class:?}: {:?}", class.shared());
        }
    }

    #[test]
    fn shapes_take_the_smallest_class_that_holds_them() {
        let of = |head_dim, v_head_dim, scale| {
            let heads = Heads { query: 1, kv: 1, head_dim, v_head_dim };
            Class::of_shape(heads, Scores { scale, softcap: None, window: None }).map(|class| class.names[0])
        };
        assert_eq!(of(16, 64, 1.0), Some("attention_mma_forward_64"));
        assert_eq!(of(80, 80, 1.0), Some("attention_mma_forward_96"));
        assert_eq!(of(128, 96, 1.0), Some("attention_mma_forward_128"));
        assert_eq!(of(192, 128, 1.0), Some("attention_mma_forward_192_128"));
        assert_eq!(of(128, 192, 1.0), Some("attention_mma_forward_192"));
        assert_eq!(of(208, 32, 1.0), Some("attention_mma_forward_256"));
        for (head_dim, v_head_dim, scale) in [(272, 64, 1.0), (72, 64, 1.0), (64, 8, 1.0), (64, 64, -1.0)] {
            assert_eq!(of(head_dim, v_head_dim, scale), None);
        }
    }
}
