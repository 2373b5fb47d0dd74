//! How long passes are cut into tiles of tokens ([`super::tiled_branch`]).
use std::ops::Range;
use std::sync::Arc;
use tunesmith_ops::activation::Pool;

/// Tokens of a tile on a GPU: enough for products at full speed, although each tile widens quantized weights again.
pub const TILE: usize = 8192;

/// The size of tiles, and the pool of their activations.
#[derive(Debug)]
pub struct Tiles {
    /// The most tokens of a tile, whole panels of 16. Shorter passes are not cut.
    pub tokens: usize,
    /// Where a tile's activations come from.
    pub pool: Arc<Pool>,
}

impl Tiles {
    /// The tiles of a pass over `tokens` tokens.
    pub fn of(&self, tokens: usize) -> impl Iterator<Item = Range<usize>> {
        let most = self.tokens;
        (0..tokens).step_by(most).map(move |start| start..tokens.min(start + most))
    }
}
