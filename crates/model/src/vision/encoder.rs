//! The walk over an encoder: stem, blocks, last norm, and the choice of rows.
use super::stem::{self, Stem};
use super::tiles::Tiles;
use crate::blocks::{Blocks, Trace, Walk};
use crate::grads::Grads;
use crate::norm::Norm;
use crate::params::Params;
use crate::pass::{Layout, Pass};
use crate::shards::Shards;
use tunesmith_base::error::Result;
use tunesmith_config::vision::Encoder as Spec;
use tunesmith_device::Floats;
use tunesmith_ops::activation::Activation;

#[derive(Debug)]
pub struct Encoder {
    pub spec: Spec,
    pub stem: Stem,
    pub blocks: Blocks,
    pub final_norm: Option<Norm>,
    /// Whether anything in it is trained.
    pub trains: bool,
    /// None: the caller has gathered all of it.
    pub shards: Shards,
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved {
    stem: stem::Saved,
    layout: Layout,
    trace: Trace,
    /// The last norm's input, and its statistics.
    norm: Option<(Activation, Activation)>,
}

impl Encoder {
    fn walk<'a>(&'a self, layout: &'a Layout) -> Walk<'a> {
        Walk { shards: &self.shards, values: Floats::default(), layout, every_token: true }
    }

    /// From `patches [patches, channels * patch * patch]` to the rows that a connector takes, `[rows, hidden]`. Keeps what
    /// backward needs, if anything is trained and `keep`.
    ///
    /// # Errors
    /// As [`Stem::forward`].
    pub fn forward(
        &self,
        pass: &Pass<'_>,
        tiles: &Tiles,
        patches: Activation,
        keep: bool,
    ) -> Result<(Activation, Option<Saved>)> {
        let prefix = self.spec.prefix_tokens();
        let layout = Layout::full(&tiles.cu_seqlens(prefix));
        let (x, stem) = self.stem.forward(pass, &self.spec, tiles, patches)?;
        let keep = keep && self.trains;
        let (x, trace) = if keep {
            let (x, trace) = self.blocks.forward_keeping(&self.walk(&layout), pass, x, false)?;
            (x, Some(trace))
        } else {
            (self.blocks.forward(&self.walk(&layout), pass, x)?, None)
        };
        let (y, norm) = match &self.final_norm {
            Some(norm) => {
                let (y, stats) = norm.forward(pass, &x, 1);
                (y, Some((x, stats)))
            }
            None => (x, None),
        };
        let drop_prefix = self.spec.feature.drop_prefix && prefix > 0;
        let y = if drop_prefix { y.gather(&tiles.patch_rows(prefix)) } else { y };
        Ok((y, trace.map(|trace| Saved { stem, layout, trace, norm })))
    }

    /// Adds the gradients of what is trained, given that of the rows `[rows, hidden]`.
    ///
    /// # Errors
    /// Those of whoever takes the gradients.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        tiles: &Tiles,
        saved: Saved,
        dy: Activation,
        params: &Params,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let Saved { stem, layout, trace, norm } = saved;
        let prefix = self.spec.prefix_tokens();
        let drop_prefix = self.spec.feature.drop_prefix && prefix > 0;
        let dy = if drop_prefix { dy.scatter(&tiles.patch_rows(prefix), tiles.tokens(prefix)) } else { dy };
        let dx = match (&self.final_norm, norm) {
            (Some(norm), Some((x, stats))) => {
                let mut dx = dy.like();
                norm.backward(pass, &x, &stats, &dy, Some((&mut dx, false)), grads);
                dx
            }
            _ => dy,
        };
        let trains_stem = self.stem.trains();
        let dx = self.blocks.backward(&self.walk(&layout), pass, trace, dx, params, trains_stem, grads)?;
        if let Some(dx) = dx.filter(|_| trains_stem) {
            self.stem.backward(pass, &self.spec, tiles, stem, dx, grads);
        }
        Ok(())
    }
}
