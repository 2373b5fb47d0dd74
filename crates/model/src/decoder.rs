//! The model: segments in a row, and the walks over them: forward and backward for training, forward for
//! evaluation, forward for the next token.
use super::adapters::{self, Method};
use super::block::{Block, Feed, Saved};
use super::build;
use super::grads::Grads;
use super::head::{Head, Walked};
use super::kept::Kept;
use super::params::Params;
use super::pass::{Drops, Layout, Pass};
use super::quantized_cache::Cache;
use super::shards::{Held, Kind, Shards};
use super::stack::Stack;
use super::weight::Weight;
use super::weights::WeightFiles;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tunesmith_base::error::{Error, Kind as ErrorKind, Result};
use tunesmith_base::memory;
use tunesmith_config::arch::Arch;
use tunesmith_config::{Checkpointing, Config, Policy};
use tunesmith_data::batch::{Batch, IGNORE};
use tunesmith_ops::dropout::key;
use tunesmith_ops::loss::Terms;
use tunesmith_ops::narrow::{Half, Narrow};
use tunesmith_ops::panel::{Act, Pool};
use tunesmith_ops::{embedding, noise};

mod next;

pub use next::{Logits, TextCache};

/// A decoder and what is trained in it.
#[derive(Debug)]
pub struct Model {
    /// Its sizes.
    pub arch: Arch,
    /// The trainable tensors.
    pub params: Params,
    /// Time spent in the walks of [`Model::forward_backward`] so far.
    pub phases: Phases,
    /// What gradients are multiplied by on their way (1: nothing). Set before [`Model::forward_backward`], and divided out
    /// by the caller.
    pub loss_scale: f32,
    /// Rows of a classification whose label was found, in all training passes since this was set to 0.
    pub right: u64,
    /// What a user should know of how it was loaded.
    pub notes: Vec<String>,
    embedding: Weight,
    blocks: Vec<Block>,
    head: Head,
    pool: Arc<Pool>,
    /// What each block keeps for backward.
    checkpointing: Checkpointing,
    /// How many bits what forward keeps for backward has; with float16 the gradients between blocks are rounded to it too.
    narrow: Option<Half>,
    dropout: f32,
    seed: u64,
    /// What the objective has beside plain cross-entropy.
    terms: Terms,
    /// The alpha of `NEFTune`.
    noise: Option<f64>,
    /// The lowest block that trains anything: backward stops there.
    lowest: usize,
    /// The frozen weights, where ranks share them: segment 0 is the embedding, which is the head too where the model ties
    /// them, then come the blocks, then the head.
    shards: Option<Shards>,
}

/// Time by phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Phases {
    /// Embedding and blocks, forward.
    pub forward: Duration,
    /// Final norm, LM head and loss, both directions.
    pub head: Duration,
    /// Blocks and embedding, backward, with what is computed again.
    pub backward: Duration,
}

impl Model {
    /// Reads the base from `weights`, or draws it from `config.train.seed` if there are none, and puts fresh adapters
    /// where the configuration says.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`] for weights that cannot be read, [`tunesmith_base::Kind::Config`] for targets that do not exist.
    pub fn load(arch: &Arch, weights: Option<&WeightFiles>, config: &Config) -> Result<Self> {
        Self::load_on(arch, weights, config, &Stack::default())
    }

    /// As [`Model::load`], with finished adapters merged into the base.
    ///
    /// # Errors
    /// As [`Model::load`]; [`tunesmith_base::Kind::Checkpoint`] for an adapter that does not fit.
    pub fn load_on(arch: &Arch, weights: Option<&WeightFiles>, config: &Config, stack: &Stack) -> Result<Self> {
        Self::load_with(arch, weights, config, stack, None)
    }

    /// As [`Model::load_on`], with matrices that were quantized before taken from `cache`, and others kept there.
    ///
    /// # Errors
    /// As [`Model::load_on`].
    pub fn load_with(
        arch: &Arch,
        weights: Option<&WeightFiles>,
        config: &Config,
        stack: &Stack,
        cache: Option<Cache<'_>>,
    ) -> Result<Self> {
        build::model(arch, weights, config, stack, cache, None)
    }

    /// As [`Model::load_with`], of whose frozen weights this rank keeps its share alone: at most one segment is whole while
    /// it is read.
    ///
    /// # Errors
    /// As [`Model::load_with`].
    pub fn load_shared(
        arch: &Arch,
        weights: Option<&WeightFiles>,
        config: &Config,
        stack: &Stack,
        cache: Option<Cache<'_>>,
        shards: Shards,
    ) -> Result<Self> {
        build::model(arch, weights, config, stack, cache, Some(shards))
    }

    pub(super) fn new(
        arch: Arch,
        params: Params,
        embedding: Weight,
        blocks: Vec<Block>,
        head: Head,
        config: &Config,
        mut shards: Option<Shards>,
    ) -> Self {
        let lowest = blocks.iter().position(Block::trains).unwrap_or(blocks.len());
        let lowest = if embedding.trains() { 0 } else { lowest };
        if let Some(shards) = &mut shards {
            let (first, last) = (0, Self::segment_of_head(&arch));
            let backward: Vec<usize> = (lowest..blocks.len()).rev().map(|block| block + 1).collect();
            shards.set_route([first].into_iter().chain(1..=blocks.len()).chain([last]).collect(), &backward);
        }
        Self {
            arch,
            params,
            phases: Phases::default(),
            loss_scale: 1.0,
            right: 0,
            notes: Vec::new(),
            lowest,
            shards,
            embedding,
            blocks,
            head,
            pool: Pool::new(),
            checkpointing: config.train.gradient_checkpointing,
            narrow: match (config.train.bf16, config.train.fp16) {
                (_, true) => Some(Half::F16),
                (true, false) => Some(Half::Bf16),
                (false, false) => None,
            },
            dropout: adapters::of(&config.tuning).map_or(0.0, Method::dropout) as f32,
            seed: config.train.seed,
            terms: Terms { smoothing: config.train.label_smoothing_factor as f32, z: config.train.z_loss as f32 },
            noise: config.train.neftune_noise_alpha.filter(|&alpha| alpha > 0.0),
        }
    }

    /// Where the head's matrix is shared.
    const fn segment_of_head(arch: &Arch) -> usize {
        if arch.ties_head() { 0 } else { arch.num_hidden_layers + 1 }
    }

    /// The frozen weights, where ranks share them.
    pub const fn shards(&self) -> Option<&Shards> {
        self.shards.as_ref()
    }

    /// Goes along with the passes that other ranks make, where weights are shared, until none has one to make. Whatever
    /// makes passes of which ranks may have different numbers ends with this, on every rank.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank is gone.
    pub fn stand_by(&self) -> Result<()> {
        self.shards.as_ref().map_or(Ok(()), |shards| shards.stand_by(self.params.values()))
    }

    /// A pass of a rank that has nothing to train on while others have.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank is gone; those of whoever takes the gradients.
    pub fn idle(&self, grads: &mut Grads<'_>) -> Result<()> {
        self.begin(Kind::Train)?;
        self.end(Ok(()), Some(grads))
    }

    fn begin(&self, kind: Kind) -> Result<()> {
        self.shards.as_ref().map_or(Ok(()), |shards| shards.begin(kind))
    }

    /// Does something at a segment, whose weights are brought together for it. `values` are the trained values here.
    fn at<T>(&self, segment: usize, values: &[f32], pass: &Pass<'_>, act: impl FnOnce(&Pass<'_>) -> T) -> Result<T> {
        let Some(shards) = &self.shards else { return Ok(act(pass)) };
        shards.reach(segment, values)?;
        let held = shards.held(segment);
        let values = held.as_ref().map_or(pass.values, Held::values);
        Ok(act(&Pass { values, ..*pass }))
    }

    /// After a pass, also one that failed: the other ranks are still at theirs. They wait for what it has of `grads`, if it
    /// was to make some, where they leave a segment: so it goes there while it goes on to the end.
    fn end<T>(&self, walked: Result<T>, mut grads: Option<&mut Grads<'_>>) -> Result<T> {
        if walked.as_ref().is_err_and(|error| error.kind() == ErrorKind::Memory) {
            // Ranks that are threads share the budget: what lies idle here may be what another lacks.
            self.release();
        }
        let Some(shards) = &self.shards else { return walked };
        if walked.as_ref().is_err_and(|error| error.kind() == ErrorKind::Peer) {
            return walked;
        }
        let head = self.blocks.len() + 1;
        shards.end(self.params.values(), &mut |left| match &mut grads {
            // With those above it whose weights are not shared.
            Some(grads) => (left.unwrap_or(head)..=head)
                .rev()
                .try_for_each(|segment| grads.pass_over(&self.params.segment(segment))),
            None => Ok(()),
        })?;
        walked
    }

    /// A pass without backward.
    fn forward<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.begin(Kind::Forward)?;
        self.end(memory::guarded(work), None)
    }

    /// Bytes of activations that are held between passes: those of the blocks, and those of the head.
    pub fn idle_bytes(&self) -> [u64; 2] {
        let experts = self.blocks.iter().filter_map(|block| match &block.feed {
            Feed::Sparse(moe) => Some(moe.pool.idle_bytes()),
            Feed::Dense(_) => None,
        });
        [self.pool.idle_bytes() + experts.sum::<u64>(), self.head.pool.idle_bytes()]
    }

    /// From here on blocks keep this for backward. Gradients do not depend on it, to the bit (but for `train.bf16`, which
    /// rounds what is kept).
    pub const fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.checkpointing = checkpointing;
    }

    /// How many blocks there are.
    pub const fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Gives the memory of idle activations back.
    pub fn release(&self) {
        self.pool.release();
        self.head.pool.release();
        if let Some(shards) = &self.shards {
            shards.release();
        }
        for block in &self.blocks {
            if let Feed::Sparse(moe) = &block.feed {
                moe.pool.release();
            }
        }
    }

    fn check(&self, batch: &Batch) -> Result<()> {
        let (vocabulary, outputs) = (self.arch.vocab_size as i64, self.arch.outputs() as i64);
        let targets = batch.targets.iter().filter(|&&target| target != IGNORE && !self.head.squared);
        let outside = targets.map(|&target| i64::from(target)).find(|id| !(0..outputs).contains(id));
        if let Some(label) = outside.filter(|_| self.arch.score.is_some()) {
            return Err(Error::data(format!("label {label} is not one of the model's {outputs}")));
        }
        let tokens = batch.tokens.iter().map(|&token| i64::from(token)).find(|id| *id >= vocabulary);
        match tokens.or(outside) {
            Some(id) => Err(Error::data(format!("token {id} is outside the model's vocabulary of {vocabulary}"))
                .hint("the tokenizer belongs to another model")),
            None => Ok(()),
        }
    }

    fn embed(&self, pass: &Pass<'_>, tokens: &[u32]) -> Act {
        self.embedding.refresh(pass.values);
        let scale = self.arch.embedding_scale as f32;
        embedding::forward(pass.pool, self.embedding.view(pass.values).store(), self.arch.hidden_size, tokens, scale)
    }

    /// One micro-batch: adds the gradient of `scale * (sum of the label tokens' losses)`, each loss counted with its
    /// weight and with label smoothing and z-loss where the configuration asks for them, to the gradients of
    /// [`Model::params`], times [`Model::loss_scale`]. Returns the sum of the plain cross-entropies, counted with their weights. `step` decides dropout
    /// masks and noise. `scale` is 1 / the weight of all label tokens of the whole effective batch, `share` is this batch's
    /// part of it: a loss for uneven use of experts, where the model has one, is a batch's own, and counts so much.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: a token outside the vocabulary. [`tunesmith_base::Kind::Memory`]: the activations do not fit into the
    /// memory budget; a part of the gradients has then been added.
    pub fn forward_backward(&mut self, batch: &Batch, scale: f32, share: f32, step: u64) -> Result<f64> {
        let mut grads = self.params.take_grads();
        let walked = self.forward_backward_into(batch, (scale, share), step, &mut Grads::whole(&mut grads));
        self.params.put_grads(grads);
        walked
    }

    /// As [`Model::forward_backward`], with the gradients added to `grads`, which are told when those of a segment are final.
    ///
    /// # Errors
    /// As [`Model::forward_backward`], and those of whoever takes the gradients.
    pub fn forward_backward_into(
        &mut self,
        batch: &Batch,
        scales: (f32, f32),
        step: u64,
        grads: &mut Grads<'_>,
    ) -> Result<f64> {
        self.check(batch)?;
        self.begin(Kind::Train)?;
        let params = std::mem::take(&mut self.params);
        let walked = memory::guarded(|| self.walk(&params, batch, scales, step, grads));
        self.params = params;
        self.end(walked, Some(grads))
    }

    fn walk(
        &mut self,
        params: &Params,
        batch: &Batch,
        (scale, share): (f32, f32),
        step: u64,
        grads: &mut Grads<'_>,
    ) -> Result<f64> {
        let (rows, targets) = labelled(batch);
        if rows.is_empty() {
            return Ok(0.0);
        }
        let mut clock = Instant::now();
        let mut lap = || std::mem::replace(&mut clock, Instant::now()).elapsed();
        let values = params.values();
        self.pool.reserve(batch.tokens.len());
        let first_row = batch.first_row;
        let drops = Drops { rate: self.dropout, seed: self.seed, step, first_row, picked: &rows };
        let (mut uneven, slopes): (Vec<Vec<(f64, f64)>>, Vec<f32>);
        uneven = Vec::new();
        let mut pass = Pass {
            values: values.into(),
            pool: &self.pool,
            balance: None,
            dropout: (self.dropout > 0.0).then_some(drops),
        };
        let layout = Layout::new(&self.pool, &batch.cu_seqlens, &rows, &self.arch.ropes);
        let last = self.blocks.len() - 1;
        // The loss for uneven use of experts looks at every token, in the last block too.
        // Classifiers have none, as in Transformers.
        let balance = self.arch.experts.as_ref().filter(|_| self.arch.score.is_none()).and_then(|it| it.balance);
        let rows_of = |index| if index == last && balance.is_none() { &layout.last } else { &layout.all };

        // Forward: a block's input is kept where backward comes by, and what it computed unless that is done again.
        let mut x = self.at(0, values, &pass, |pass| self.embed(pass, &batch.tokens))?;
        if let Some(alpha) = self.noise {
            let outside = if self.arch.embedding_scaled_outside { self.arch.embedding_scale } else { 1.0 };
            noise::add(&mut x, &batch.cu_seqlens, alpha * outside, key(self.seed, step, NOISE), first_row);
        }
        let mut kept: Vec<Option<(Kept, Option<Saved<Kept>>)>> = Vec::with_capacity(self.blocks.len());
        for (index, block) in self.blocks.iter().enumerate() {
            let policy = self.checkpointing.of(index, self.blocks.len());
            // What is kept in 16 bits is rounded: what follows from it is then better computed again than rounded too.
            let whole = policy == Policy::None && (self.narrow.is_none() || index == last);
            let (y, saved) = self.at(index + 1, values, &pass, |pass| {
                block.forward_keeping(pass, &x, &layout.all, rows_of(index), whole)
            })?;
            if let (Some(routing), true) = (saved.routing(), balance.is_some()) {
                uneven.push(routing.use_of_experts().collect());
            }
            let saved = (policy != Policy::Full || index == last).then_some(saved);
            let input = std::mem::replace(&mut x, y);
            let keep = |act| Kept::new(act, self.narrow.filter(|_| index != last));
            kept.push((index >= self.lowest).then(|| (keep(input), saved.map(|saved| saved.map(&keep)))));
        }
        if balance.is_some() {
            x = x.gather(&rows);
        }
        self.phases.forward += lap();

        // Head and loss, both directions.
        let (embedding, head) = (params.segment(0), params.segment(self.blocks.len() + 1));
        grads.open(head.clone());
        // A head that shares the embedding's table adds to its gradients.
        if self.head.weight.place().is_some_and(|place| place.end <= embedding.end) {
            grads.open(embedding.clone());
        }
        let (plain_scale, scale) = (scale, scale * self.loss_scale);
        let Walked { mut total, right, dx: mut dy } =
            self.at(Self::segment_of_head(&self.arch), values, &pass, |pass| {
                self.head.weight.refresh(pass.values);
                if self.terms.is_plain() && batch.weights.is_empty() {
                    return self.head.forward_backward(pass, &x, &targets, scale, grads);
                }
                let weights: Vec<f32> = rows.iter().map(|&row| batch.weight(row)).collect();
                self.head.weighted(pass, &x, &targets, &weights, self.terms, scale, grads)
            })?;
        drop(x);
        self.right += if self.head.counts { right as u64 } else { 0 };
        if let Some(coefficient) = balance {
            dy = dy.scatter(&rows, batch.tokens.len());
            let (loss, slope) = balance_loss(&uneven, batch.tokens.len());
            let weight = coefficient * f64::from(share);
            total += loss * weight / f64::from(plain_scale);
            let weight = weight * f64::from(self.loss_scale);
            slopes = slope.into_iter().map(|slope| (slope * weight) as f32).collect();
            pass.balance = Some(&slopes);
        }
        dy = self.rounded(dy);
        grads.close(&head)?;
        self.phases.head += lap();

        // Backward.
        let trains_embedding = self.embedding.trains();
        for (index, block) in self.blocks.iter().enumerate().rev() {
            let Some((x, saved)) = kept.pop().flatten() else { break };
            let segment = params.segment(index + 1);
            grads.open(segment.clone());
            let x = x.restore();
            let want_dx = index > self.lowest || trains_embedding;
            let parts = (&layout.all, rows_of(index));
            // None only at the lowest block, where nothing below is trained.
            let dx = self.at(index + 1, values, &pass, |pass| {
                let saved = match saved {
                    Some(saved) => saved.map(&Kept::restore),
                    None => block.forward(pass, &x, &layout.all, rows_of(index)).1,
                };
                block.backward(pass, &x, saved, dy, parts, want_dx, grads)
            })?;
            dy = dx.map_or_else(|| self.pool.act(0, 0), |dx| self.rounded(dx));
            grads.close(&segment)?;
        }
        if trains_embedding {
            let scale = self.arch.embedding_scale as f32;
            grads.open(embedding.clone());
            self.embedding.add_embedding_gradient(&dy, &batch.tokens, scale, self.arch.pad_token_id, grads);
            grads.close(&embedding)?;
        }
        drop((dy, layout));
        self.phases.backward += lap();
        Ok(total)
    }

    /// A gradient between blocks as it is kept: in float16 where activations are.
    fn rounded(&self, gradient: Act) -> Act {
        match self.narrow {
            Some(Half::F16) => Narrow::new(&gradient, Half::F16).widen(),
            _ => gradient,
        }
    }

    /// A pass without backward: what the head has to say of the last block's output on the tokens `rows` (rising).
    fn ask<T>(&self, batch: &Batch, rows: &[usize], head: impl FnOnce(&Pass<'_>, &Act) -> T) -> Result<T> {
        self.forward(|| {
            let (pass, values) = (self.evaluation(), self.params.values());
            self.pool.reserve(batch.tokens.len());
            let layout = Layout::new(&self.pool, &batch.cu_seqlens, rows, &self.arch.ropes);
            let last = self.blocks.len() - 1;
            let mut x = self.at(0, values, &pass, |pass| self.embed(pass, &batch.tokens))?;
            for (index, block) in self.blocks.iter().enumerate() {
                let rows = if index == last { &layout.last } else { &layout.all };
                x = self.at(index + 1, values, &pass, |pass| block.forward(pass, &x, &layout.all, rows).0)?;
            }
            self.conclude(&pass, |pass| head(pass, &x))
        })
    }

    /// The head's turn in a pass without backward.
    fn conclude<T>(&self, pass: &Pass<'_>, head: impl FnOnce(&Pass<'_>) -> T) -> Result<T> {
        self.at(Self::segment_of_head(&self.arch), self.params.values(), pass, |pass| {
            self.head.weight.refresh(pass.values);
            head(pass)
        })
    }

    fn evaluation(&self) -> Pass<'_> {
        Pass { values: self.params.values().into(), pool: &self.pool, balance: None, dropout: None }
    }

    /// The loss of each label token of the batch, in order, without dropout.
    ///
    /// # Errors
    /// As [`Model::forward_backward`].
    pub fn token_losses(&self, batch: &Batch) -> Result<Vec<f32>> {
        self.check(batch)?;
        let (rows, targets) = labelled(batch);
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        self.ask(batch, &rows, |pass, x| self.head.losses(pass, x, &targets))
    }

    /// As [`Model::token_losses`], with whether each token is the most probable.
    ///
    /// # Errors
    /// As [`Model::forward_backward`].
    pub fn token_scores(&self, batch: &Batch) -> Result<Vec<(f32, bool)>> {
        self.check(batch)?;
        let (rows, targets) = labelled(batch);
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        self.ask(batch, &rows, |pass, x| self.head.scored_losses(pass, x, &targets))
    }

    /// The sum of the label tokens' losses, each counted with its weight, without dropout.
    ///
    /// # Errors
    /// As [`Model::forward_backward`].
    pub fn loss(&self, batch: &Batch) -> Result<f64> {
        let losses = self.token_losses(batch)?.into_iter().map(f64::from);
        if batch.weights.is_empty() {
            return Ok(losses.sum());
        }
        Ok(losses.zip(labelled(batch).0).map(|(loss, row)| loss * f64::from(batch.weight(row))).sum())
    }

    /// Logits `[rows, vocabulary]`, row-major, at the tokens `rows` (rising) of the batch.
    ///
    /// # Errors
    /// As [`Model::forward_backward`].
    pub fn logits(&self, batch: &Batch, rows: &[usize]) -> Result<Vec<f32>> {
        self.check(batch)?;
        self.ask(batch, rows, |pass, x| self.head.logits(pass, x))
    }
}

/// Tells the noise on embeddings from the dropout of any module.
const NOISE: u64 = u64::MAX;

/// The loss for uneven use of experts of Transformers' `load_balancing_loss_func`, `E sum_e f_e P_e` with the share f of
/// tokens and the mean probability P of each expert over all blocks and tokens; and its derivative with respect to one
/// token's probability of each, for which f counts as a constant.
fn balance_loss(blocks: &[Vec<(f64, f64)>], tokens: usize) -> (f64, Vec<f64>) {
    let all = (blocks.len() * tokens) as f64;
    let count = blocks.first().map_or(0, Vec::len);
    let sum =
        |expert: usize| blocks.iter().fold((0.0, 0.0), |sum, block| (sum.0 + block[expert].0, sum.1 + block[expert].1));
    let uses: Vec<(f64, f64)> = (0..count).map(sum).map(|(tokens, sum)| (tokens / all, sum / all)).collect();
    let loss = uses.iter().map(|(share, mean)| share * mean).sum::<f64>() * count as f64;
    (loss, uses.iter().map(|(share, _)| share * count as f64 / all).collect())
}

/// The positions that carry a label, and their targets.
fn labelled(batch: &Batch) -> (Vec<usize>, Vec<u32>) {
    let labelled = batch.targets.iter().enumerate().filter(|&(_, &target)| target != IGNORE);
    labelled.map(|(row, &target)| (row, target as u32)).unzip()
}
