//! The model: segments in a row, and the walks over them: forward and backward for training, forward for
//! evaluation, forward for the next token.
use super::block::{Block, Feed, Saved};
use super::build;
use super::head::Head;
use super::kept::Kept;
use super::params::Params;
use super::pass::{Drops, Layout, Pass};
use super::quantized_cache::Cache;
use super::stack::Stack;
use super::weight::Weight;
use super::weights::WeightFiles;
use crate::config::arch::Arch;
use crate::config::{Checkpointing, Config, Policy};
use crate::data::batch::{Batch, IGNORE};
use crate::error::{Error, Result};
use crate::memory;
use crate::ops::dropout::key;
use crate::ops::loss::Terms;
use crate::ops::narrow::{Half, Narrow};
use crate::ops::panel::{Act, Pool};
use crate::ops::{embedding, noise};
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    /// [`crate::Kind::Model`] for weights that cannot be read, [`crate::Kind::Config`] for targets that do not exist.
    pub fn load(arch: &Arch, weights: Option<&WeightFiles>, config: &Config) -> Result<Self> {
        Self::load_on(arch, weights, config, &Stack::default())
    }

    /// As [`Model::load`], with finished adapters merged into the base.
    ///
    /// # Errors
    /// As [`Model::load`]; [`crate::Kind::Checkpoint`] for an adapter that does not fit.
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
        build::model(arch, weights, config, stack, cache)
    }

    pub(super) fn new(
        arch: Arch,
        params: Params,
        embedding: Weight,
        blocks: Vec<Block>,
        head: Head,
        config: &Config,
    ) -> Self {
        let lowest = blocks.iter().position(Block::trains).unwrap_or(blocks.len());
        Self {
            arch,
            params,
            phases: Phases::default(),
            loss_scale: 1.0,
            notes: Vec::new(),
            lowest: if embedding.trains() { 0 } else { lowest },
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
            dropout: config.tuning.lora.lora_dropout as f32,
            seed: config.train.seed,
            terms: Terms { smoothing: config.train.label_smoothing_factor as f32, z: config.train.z_loss as f32 },
            noise: config.train.neftune_noise_alpha.filter(|&alpha| alpha > 0.0),
        }
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
    /// [`crate::Kind::Data`]: a token outside the vocabulary. [`crate::Kind::Memory`]: the activations do not fit into the
    /// memory budget; a part of the gradients has then been added.
    pub fn forward_backward(&mut self, batch: &Batch, scale: f32, share: f32, step: u64) -> Result<f64> {
        self.check(batch)?;
        let mut params = std::mem::take(&mut self.params);
        let walked = memory::guarded(|| Ok(self.walk(&mut params, batch, (scale, share), step)));
        self.params = params;
        walked
    }

    fn walk(&mut self, params: &mut Params, batch: &Batch, (scale, share): (f32, f32), step: u64) -> f64 {
        let (rows, targets) = labelled(batch);
        if rows.is_empty() {
            return 0.0;
        }
        let mut clock = Instant::now();
        let mut lap = || std::mem::replace(&mut clock, Instant::now()).elapsed();
        let (values, grads) = params.split();
        self.refresh(values);
        self.pool.reserve(batch.tokens.len());
        let first_row = batch.first_row;
        let drops = Drops { rate: self.dropout, seed: self.seed, step, first_row, picked: &rows };
        let (mut uneven, slopes): (Vec<Vec<(f64, f64)>>, Vec<f32>);
        uneven = Vec::new();
        let mut pass = Pass { values, pool: &self.pool, balance: None, dropout: (self.dropout > 0.0).then_some(drops) };
        let layout = Layout::new(&self.pool, &batch.cu_seqlens, &rows, &self.arch.ropes);
        let last = self.blocks.len() - 1;
        // The loss for uneven use of experts looks at every token, in the last block too.
        let balance = self.arch.experts.as_ref().and_then(|experts| experts.balance);
        let rows_of = |index| if index == last && balance.is_none() { &layout.last } else { &layout.all };

        // Forward: a block's input is kept where backward comes by, and what it computed unless that is done again.
        let mut x = self.embed(&pass, &batch.tokens);
        if let Some(alpha) = self.noise {
            let outside = if self.arch.embedding_scaled_outside { self.arch.embedding_scale } else { 1.0 };
            noise::add(&mut x, &batch.cu_seqlens, alpha * outside, key(self.seed, step, NOISE), first_row);
        }
        let mut kept: Vec<Option<(Kept, Option<Saved<Kept>>)>> = Vec::with_capacity(self.blocks.len());
        for (index, block) in self.blocks.iter().enumerate() {
            let policy = self.checkpointing.of(index, self.blocks.len());
            // What is kept in 16 bits is rounded: what follows from it is then better computed again than rounded too.
            let whole = policy == Policy::None && (self.narrow.is_none() || index == last);
            let (y, saved) = block.forward_keeping(&pass, &x, &layout.all, rows_of(index), whole);
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
        let (plain_scale, scale) = (scale, scale * self.loss_scale);
        let (mut total, mut dy) = if self.terms.is_plain() && batch.weights.is_empty() {
            self.head.forward_backward(&pass, &x, &targets, scale, grads)
        } else {
            let weights: Vec<f32> = rows.iter().map(|&row| batch.weight(row)).collect();
            self.head.weighted(&pass, &x, &targets, &weights, self.terms, scale, grads)
        };
        drop(x);
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
        self.phases.head += lap();

        // Backward.
        let trains_embedding = self.embedding.trains();
        for (index, block) in self.blocks.iter().enumerate().rev() {
            let Some((x, saved)) = kept.pop().flatten() else { break };
            let x = x.restore();
            let saved = match saved {
                Some(saved) => saved.map(&Kept::restore),
                None => block.forward(&pass, &x, &layout.all, rows_of(index)).1,
            };
            let want_dx = index > self.lowest || trains_embedding;
            let parts = (&layout.all, rows_of(index));
            // None only at the lowest block, where nothing below is trained.
            let dx = block.backward(&pass, &x, saved, dy, parts, want_dx, grads);
            dy = dx.map_or_else(|| self.pool.act(0, 0), |dx| self.rounded(dx));
        }
        if trains_embedding {
            let scale = self.arch.embedding_scale as f32;
            self.embedding.add_embedding_gradient(&dy, &batch.tokens, scale, self.arch.pad_token_id, grads);
        }
        drop((dy, layout));
        self.phases.backward += lap();
        total
    }

    /// A gradient between blocks as it is kept: in float16 where activations are.
    fn rounded(&self, gradient: Act) -> Act {
        match self.narrow {
            Some(Half::F16) => Narrow::new(&gradient, Half::F16).widen(),
            _ => gradient,
        }
    }

    /// The last block's output on the tokens `rows` (rising).
    fn hidden(&self, pass: &Pass<'_>, batch: &Batch, rows: &[usize]) -> Act {
        self.pool.reserve(batch.tokens.len());
        let layout = Layout::new(&self.pool, &batch.cu_seqlens, rows, &self.arch.ropes);
        let last = self.blocks.len() - 1;
        let start = self.embed(pass, &batch.tokens);
        self.blocks.iter().enumerate().fold(start, |x, (index, block)| {
            block.forward(pass, &x, &layout.all, if index == last { &layout.last } else { &layout.all }).0
        })
    }

    /// Brings tables of which some rows are trained up to date.
    fn refresh(&self, values: &[f32]) {
        self.embedding.refresh(values);
        self.head.weight.refresh(values);
    }

    fn evaluation(&self) -> Pass<'_> {
        self.refresh(self.params.values());
        Pass { values: self.params.values(), pool: &self.pool, balance: None, dropout: None }
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
        memory::guarded(|| {
            let pass = self.evaluation();
            Ok(self.head.losses(&pass, &self.hidden(&pass, batch, &rows), &targets))
        })
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
        let pass = self.evaluation();
        Ok(self.head.scored_losses(&pass, &self.hidden(&pass, batch, &rows), &targets))
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
        memory::guarded(|| {
            let pass = self.evaluation();
            Ok(self.head.logits(&pass, &self.hidden(&pass, batch, rows)))
        })
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
