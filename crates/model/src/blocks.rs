//! The blocks of a decoder or of an image encoder, and the walks over them: for evaluation, for decoding from caches,
//! and forward and backward for training. Gradient checkpointing, 16-bit activations and offloading to the host are
//! decided here.
use super::across::Across;
use super::attention::Attention;
use super::block::{Block, Saved};
use super::branch::Part;
use super::cross_attention::CrossAttention;
use super::grads::Grads;
use super::kept::Kept;
use super::mixers::{Mixing, OverBatch};
use super::moe::Moe;
use super::params::Params;
use super::pass::{BlockRows, Layout, Pass};
use super::per_layer_inputs::PerLayerInputs;
use super::shards::Shards;
use super::tiles::Tiles;
use std::cell::RefCell;
use std::sync::Arc;
use tunesmith_base::error::Result;
use tunesmith_config::{Checkpointing, Policy};
use tunesmith_device::Floats;
use tunesmith_ops::activation::{Activation, Leaving};
use tunesmith_ops::elementwise;
use tunesmith_ops::narrow::{Half, Narrow};

/// Blocks on one residual stream, in order, with the settings of a walk over them.
#[derive(Debug)]
pub struct Blocks {
    /// From the lowest to the highest.
    all: Vec<Block>,
    /// The segment of the first block ([`Shards`], [`Params::segment`]); those of the others follow. `None` where all
    /// blocks are in one segment, which the caller opens, gathers and closes: those of an image encoder are in the
    /// embedding's segment.
    first_segment: Option<usize>,
    /// The lowest block that trains anything: backward stops there.
    lowest: usize,
    /// Gradient checkpointing: what each block keeps for backward.
    pub checkpointing: Checkpointing,
    /// The 16-bit type in which activations wait for backward; `None` leaves them as they are. With float16, the
    /// gradients between blocks are rounded to it too.
    pub narrow: Option<Half>,
    /// Whether what forward keeps for backward waits on the host (`train.activation_offloading`).
    pub offloads: bool,
    /// How long passes are cut into tiles of tokens, in branches that keep nothing; `None` where no pass is cut.
    pub tiles: Option<Tiles>,
}

/// What a walk needs beside its pass.
#[derive(Debug, Clone, Copy)]
pub struct Walk<'a> {
    pub shards: &'a Shards,
    /// The trained values that this rank keeps.
    pub values: Floats<'a>,
    pub layout: &'a Layout,
    /// Whether the last block computes every token even if the head needs only some: the load-balancing loss of experts
    /// looks at all.
    pub every_token: bool,
    /// What is added to rows of the residual stream after the first blocks.
    pub added: Option<&'a Added>,
    /// Per-layer embeddings, where the model has them.
    pub per_layer: Option<&'a PerLayerInputs>,
    /// The image features that blocks attend to, where they do.
    pub across: Option<&'a Across>,
}

/// Image features that are added to rows of the residual stream after each of the first blocks (`DeepStack`, Qwen3-VL).
/// Nothing is added after the last block.
#[derive(Debug)]
pub struct Added {
    /// The rows of the stream that they are added to, rising.
    pub rows: Vec<usize>,
    /// For each of the first blocks `[rows, hidden]`.
    pub features: Vec<Activation>,
    /// The gradients of `features`, the last block's first. The backward walk fills them in.
    pub gradients: RefCell<Vec<Activation>>,
}

impl Walk<'_> {
    /// The residual stream after block `index`, with what is added there.
    fn add(&self, index: usize, x: Activation) -> Activation {
        let Some((added, features)) = self.added.and_then(|added| Some((added, added.features.get(index)?))) else {
            return x;
        };
        let mut sum = features.scatter(&added.rows, x.tokens());
        elementwise::add(&mut sum, &x);
        sum
    }

    /// Stores the gradient of what was added after block `index`, given that of the stream.
    fn leave(&self, index: usize, dy: &Activation) {
        if let Some(added) = self.added.filter(|added| index < added.features.len()) {
            added.gradients.borrow_mut().push(dy.gather(&added.rows));
        }
    }
}

/// What a training walk keeps for its way back.
#[derive(Debug)]
pub struct Trace {
    /// The tokens of the walk.
    tokens: usize,
    /// What each block keeps; `None` for blocks that backward does not reach.
    blocks: Vec<Option<KeptOfBlock>>,
    /// For each block with experts, if there is a load-balancing loss: the number of tokens and the summed probability
    /// of each expert.
    pub loads: Vec<Vec<(f64, f64)>>,
    /// The copies to the host that are under way (`train.activation_offloading`), of at most one block.
    leaving: Vec<Leaving>,
}

/// What a block keeps: its input, and what it computed, unless backward recomputes that.
type KeptOfBlock = (Kept, Option<Saved<Kept>>);

/// Starts to bring what a block keeps back from the host.
fn fetched((x, saved): KeptOfBlock) -> KeptOfBlock {
    (x.fetched(), saved.map(|saved| saved.map(&Kept::fetched)))
}

impl Blocks {
    /// `blocks` have the segments from `first_segment` on. Backward goes down to the lowest that trains, or to the first
    /// where `trains_below`.
    pub fn new(
        blocks: Vec<Block>,
        first_segment: Option<usize>,
        trains_below: bool,
        checkpointing: Checkpointing,
        narrow: Option<Half>,
    ) -> Self {
        let lowest = blocks.iter().position(Block::trains).unwrap_or(blocks.len());
        let lowest = if trains_below { 0 } else { lowest };
        Self { all: blocks, first_segment, lowest, checkpointing, narrow, offloads: false, tiles: None }
    }

    /// The number of blocks.
    pub const fn len(&self) -> usize {
        self.all.len()
    }

    /// The segments that the forward walk reaches, in order, and then those that the backward walk reaches.
    pub fn route(&self) -> [Vec<usize>; 2] {
        let first = self.first_segment.unwrap_or_default();
        let segment = |block: usize| first + block;
        [(0..self.len()).map(segment).collect(), (self.lowest..self.len()).rev().map(segment).collect()]
    }

    /// The attention of each block that has one, in order.
    pub fn attentions(&self) -> impl Iterator<Item = &Attention> {
        let branches = self.all.iter().flat_map(|block| &block.branches);
        branches.filter_map(|branch| match &branch.part {
            Part::Attention(attention) => Some(&**attention),
            _ => None,
        })
    }

    /// The cross-attention of each block that has one, in order.
    pub fn cross_attentions(&self) -> impl Iterator<Item = &CrossAttention> {
        let branches = self.all.iter().flat_map(|block| &block.branches);
        branches.filter_map(|branch| match &branch.part {
            Part::CrossAttention(cross) => Some(&**cross),
            _ => None,
        })
    }

    /// The mixers that keep a state, in order.
    pub fn recurrent(&self) -> impl Iterator<Item = &Part> {
        let parts = self.all.iter().flat_map(|block| &block.branches).map(|branch| &branch.part);
        parts.filter(|part| matches!(part, Part::DeltaNet(_) | Part::ShortConv(_) | Part::Mamba(_)))
    }

    /// The blocks with experts: their numbers and the experts.
    pub fn experts(&self) -> impl Iterator<Item = (usize, &Moe)> {
        self.all.iter().enumerate().filter_map(|(index, block)| Some((index, block.experts()?)))
    }

    /// As [`Blocks::experts`], one block for each pool that experts' activations come from.
    pub fn expert_pools(&self) -> impl Iterator<Item = (usize, &Moe)> {
        let mut before: Option<&Moe> = None;
        self.experts().filter(move |(_, moe)| !before.replace(moe).is_some_and(|it| Arc::ptr_eq(&it.pool, &moe.pool)))
    }

    /// Whether a block gives an output only for the tokens that the head needs: the last block, if it has an attention.
    pub fn picks_rows(&self, index: usize, every_token: bool) -> bool {
        index + 1 == self.len() && !every_token && self.all[index].picks_rows()
    }

    /// Calls `act` while the block's weights are gathered, where ranks share them.
    fn at<T>(&self, walk: &Walk<'_>, index: usize, pass: &Pass<'_>, act: impl FnOnce(&Pass<'_>) -> T) -> Result<T> {
        match self.first_segment {
            Some(first) => walk.shards.at(first + index, walk.values, pass, act),
            None => Ok(act(pass)),
        }
    }

    fn rows<'l>(&'l self, walk: &Walk<'l>, index: usize) -> BlockRows<'l> {
        let picks = self.picks_rows(index, walk.every_token);
        let rows = if picks { walk.layout.last_block() } else { walk.layout.block() };
        BlockRows { per_layer: walk.per_layer, across: walk.across, ..rows }
    }

    /// As [`Blocks::rows`], for a block of which nothing is kept.
    fn rows_in_tiles<'l>(&'l self, walk: &Walk<'l>, index: usize) -> BlockRows<'l> {
        BlockRows { tiles: self.tiles.as_ref(), ..self.rows(walk, index) }
    }

    /// The rows of a block with this checkpointing policy.
    fn rows_by<'l>(&'l self, policy: Policy, walk: &Walk<'l>, index: usize) -> BlockRows<'l> {
        if policy == Policy::Full { self.rows_in_tiles(walk, index) } else { self.rows(walk, index) }
    }

    /// The tokens that the head needs, unless the last block has already picked them.
    fn left_to_pick<'l>(&self, walk: &Walk<'l>) -> Option<&'l [usize]> {
        let picked = self.len().checked_sub(1).is_some_and(|last| self.picks_rows(last, walk.every_token));
        if picked { None } else { walk.layout.picked() }
    }

    fn pick(&self, walk: &Walk<'_>, x: Activation) -> Activation {
        match self.left_to_pick(walk) {
            Some(rows) => x.gather(rows),
            None => x,
        }
    }

    /// From `x [tokens, hidden]` to the last block's output at the tokens that the head needs, over the batch.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank that has a share of the weights is gone.
    pub fn forward(&self, walk: &Walk<'_>, pass: &Pass<'_>, x: Activation) -> Result<Activation> {
        self.forward_by(walk, pass, x, &mut OverBatch)
    }

    /// As [`Blocks::forward`], with `mixing` in the place of mixers over the batch.
    ///
    /// # Errors
    /// As [`Blocks::forward`].
    pub fn forward_by(
        &self,
        walk: &Walk<'_>,
        pass: &Pass<'_>,
        mut x: Activation,
        mixing: &mut dyn Mixing,
    ) -> Result<Activation> {
        for (index, block) in self.all.iter().enumerate() {
            let rows = self.rows_in_tiles(walk, index);
            let forward = |pass: &Pass<'_>| block.forward(pass, &x, rows, false, mixing).0;
            x = walk.add(index, self.at(walk, index, pass, forward)?);
        }
        Ok(self.pick(walk, x))
    }

    /// As [`Blocks::forward`], for training. The trace keeps the input of each block that backward reaches, and what
    /// the block computed, unless its checkpointing policy recomputes that. With `loads`, it also has how the experts
    /// were used.
    ///
    /// # Errors
    /// As [`Blocks::forward`].
    pub fn forward_keeping(
        &self,
        walk: &Walk<'_>,
        pass: &Pass<'_>,
        mut x: Activation,
        loads: bool,
    ) -> Result<(Activation, Trace)> {
        let blocks = Vec::with_capacity(self.len());
        let mut trace = Trace { tokens: x.tokens(), blocks, loads: Vec::new(), leaving: Vec::new() };
        for (index, block) in self.all.iter().enumerate() {
            let is_last = index + 1 == self.len();
            let policy = self.checkpointing.of(index, self.len());
            // What is kept in 16 bits is rounded: what follows from it is then better computed again than rounded too.
            let whole = policy == Policy::None && (self.narrow.is_none() || is_last);
            let rows = self.rows_by(policy, walk, index);
            let forward = |pass: &Pass<'_>| block.forward(pass, &x, rows, whole, &mut OverBatch);
            let (y, saved) = self.at(walk, index, pass, forward)?;
            let y = walk.add(index, y);
            if let (Some(routing), true) = (saved.routing(), loads) {
                trace.loads.push(routing.load());
            }
            let saved = (policy != Policy::Full || is_last).then_some(saved);
            let input = std::mem::replace(&mut x, y);
            // Backward begins with the last block, which stays. The copies of a block are made while the next one is computed.
            let leaving = RefCell::new(Vec::new());
            let keep = |act| {
                let mut kept = Kept::new(act, self.narrow.filter(|_| !is_last));
                if self.offloads && !is_last {
                    leaving.borrow_mut().extend(kept.leave());
                }
                kept
            };
            trace.blocks.push((index >= self.lowest).then(|| (keep(input), saved.map(|saved| saved.map(&keep)))));
            trace.leaving = leaving.into_inner();
        }
        Ok((self.pick(walk, x), trace))
    }

    /// From the gradient of [`Blocks::forward_keeping`]'s output to that of its input, or none if `want_dx` is false. Opens and
    /// closes each block's segment in `grads`.
    ///
    /// # Errors
    /// As [`Blocks::forward`], and those of the collector that takes the gradients ([`super::grads::Collector`]).
    pub fn backward(
        &self,
        walk: &Walk<'_>,
        pass: &Pass<'_>,
        trace: Trace,
        dy: Activation,
        params: &Params,
        want_dx: bool,
        grads: &mut Grads<'_>,
    ) -> Result<Option<Activation>> {
        let Trace { tokens, blocks: mut kept, leaving, .. } = trace;
        drop(leaving);
        let mut dy = self.rounded(match self.left_to_pick(walk) {
            Some(rows) => dy.scatter(rows, tokens),
            None => dy,
        });
        for (index, block) in self.all.iter().enumerate().rev() {
            let Some((x, saved)) = kept.pop().flatten() else { break };
            // What the next block keeps comes back from the host while this one is computed.
            if let Some(next) = kept.last_mut().filter(|_| self.offloads) {
                *next = next.take().map(fetched);
            }
            walk.leave(index, &dy);
            let segment = self.first_segment.map(|first| params.segment(first + index));
            if let Some(segment) = &segment {
                grads.open(segment.clone());
            }
            let policy = self.checkpointing.of(index, self.len());
            let (x, rows) = (x.restore(), self.rows_by(policy, walk, index));
            let want_dx = index > self.lowest || want_dx;
            // None only at the lowest block, where nothing below is trained.
            let dx = self.at(walk, index, pass, |pass| {
                let saved = match saved {
                    Some(saved) => saved.map(&Kept::restore),
                    None => block.again(pass, &x, rows, &mut OverBatch),
                };
                block.backward(pass, &x, saved, dy, rows, want_dx, grads)
            })?;
            if let Some(segment) = &segment {
                grads.close(segment)?;
            }
            match dx {
                Some(dx) => dy = self.rounded(dx),
                None => return Ok(None),
            }
        }
        Ok(Some(dy))
    }

    /// Rounds a gradient between blocks to float16, where activations are kept in float16.
    fn rounded(&self, gradient: Activation) -> Activation {
        match self.narrow {
            Some(half @ Half::F16) if gradient.number() != half.number() => Narrow::new(&gradient, Half::F16).widen(),
            _ => gradient,
        }
    }
}

#[cfg(test)]
impl Blocks {
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Block> {
        self.all.iter_mut()
    }
}
