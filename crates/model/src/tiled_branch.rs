//! MLP branches of long passes, computed for a tile of tokens at a time. Their buffers, the widest of a block, are then
//! as long as a tile and not as the pass. That is possible because these branches look at each token alone.
//! `DeepSpeed`'s `TiledMLP` does the same: Bekman et al., "Arctic Long Sequence Training", 2025,
//! <https://arxiv.org/abs/2506.13996>.
//!
//! Nothing is saved for the backward pass, which recomputes a tile before it goes back. So only blocks with gradient
//! checkpointing are tiled, and such a branch is left out when its block is recomputed: the work is the same.
use super::branch::{Branch, Part, Saved};
use super::grads::Grads;
use super::mixers::OverBatch;
use super::pass::{BlockRows, Pass};
use super::tiles::Tiles;
use tunesmith_ops::activation::Activation;

impl Branch {
    /// How the branch is cut in a pass over `tokens` tokens; `None` if it is not.
    pub fn tiled<'a>(&self, tokens: usize, rows: BlockRows<'a>) -> Option<&'a Tiles> {
        let alone = matches!(self.part, Part::Mlp(_) | Part::Plain(_));
        rows.tiles.filter(|tiles| alone && tokens > tiles.tokens)
    }

    /// The stream after the branch. Each tile is copied, which takes a hundredth of a product's time.
    pub fn forward_tiled(&self, tiles: &Tiles, pass: &Pass<'_>, x: &Activation, rows: BlockRows<'_>) -> Activation {
        let mut y = x.like();
        for tile in tiles.of(x.tokens()) {
            let (of_tile, part) = (pass.of_rows(&tile, x.tokens()), x.rows(&tiles.pool, tile.clone()));
            y.put_rows(tile.start, &self.forward_whole(&of_tile, &part, rows, false, &mut OverBatch).0);
        }
        y
    }

    /// Turns `dy`, the gradient of the stream after the branch, into that of `x`, tile by tile: each tile is recomputed
    /// first. Adds to `grads`.
    pub fn backward_tiled(
        &self,
        tiles: &Tiles,
        pass: &Pass<'_>,
        x: &Activation,
        mut dy: Activation,
        rows: BlockRows<'_>,
        want_dx: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        for tile in tiles.of(x.tokens()) {
            let (of_tile, part) = (pass.of_rows(&tile, x.tokens()), x.rows(&tiles.pool, tile.clone()));
            let (_, saved): (_, Saved) = self.forward_whole(&of_tile, &part, rows, false, &mut OverBatch);
            let d_part = dy.rows(&tiles.pool, tile.clone());
            let dx = self.backward(&of_tile, &part, saved, d_part, rows, want_dx, grads);
            if let Some(dx) = dx {
                dy.put_rows(tile.start, &dx);
            }
        }
        want_dx.then_some(dy)
    }
}
