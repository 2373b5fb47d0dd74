//! The model: its segments, and the walks over them: forward and backward for training, forward for evaluation, and
//! forward for the next token.
use super::adapters::{self, Method};
use super::block::Block;
use super::blocks::{Blocks, Walk};
use super::device::pool;
use super::head::Head;
use super::learned_positions::LearnedPositions;
use super::norm::Norm;
use super::params::Params;
use super::pass::Pass;
use super::per_layer::PerLayer;
use super::per_layer_inputs::PerLayerInputs;
use super::shards::Shards;
use super::tiles::{TILE, Tiles};
use super::vision::Vision;
use super::weight::Weight;
use super::weights::StoredRows;
use std::sync::Arc;
use std::time::Duration;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words;
use tunesmith_config::arch::Arch;
use tunesmith_config::{Checkpointing, Config};
use tunesmith_data::batch::{Batch, IGNORE};
use tunesmith_device::Device;
use tunesmith_ops::activation::{Activation, Pool, Unrounded};
use tunesmith_ops::embedding;
use tunesmith_ops::loss::{Terms, Totals};
use tunesmith_ops::narrow::Half;

mod counts;
mod layer_cache;
mod next;
mod passes;
mod pictures;
mod train;

use pictures::Placed;

pub use next::{Drafted, Logits, TextCache};

/// A decoder, its adapters, and the buffers of what is trained.
#[derive(Debug)]
pub struct Model {
    /// The architecture that it was loaded for.
    pub arch: Arch,
    /// The trained tensors: values, gradients, names and shapes.
    pub params: Params,
    /// Time spent in the walks of [`Model::forward_backward`] so far.
    pub phases: Phases,
    /// The loss scale: what gradients are multiplied by during backward (1: nothing). The caller sets it before
    /// [`Model::forward_backward`], and divides the gradients by it afterwards.
    pub loss_scale: f32,
    /// Losses, and rows of a classification whose label was found, of all training passes since [`Totals::begin`].
    pub totals: Totals,
    /// What a user should know of how it was loaded.
    pub notes: Vec<String>,
    embedding: Weight,
    /// The embedding's rows, where they stay in the model's files.
    stored_rows: Option<StoredRows>,
    /// The norm on the embedding's output, which has no weights.
    embedding_norm: Option<Norm>,
    /// Learned positions, which are added to the stream before the first block.
    positions: Option<LearnedPositions>,
    /// What makes the per-layer embeddings (Gemma 3n and 4).
    per_layer: Option<PerLayer>,
    /// Image encoder and connector.
    pub(crate) vision: Option<Vision>,
    blocks: Blocks,
    head: Head,
    pool: Arc<Pool>,
    dropout: f32,
    seed: u64,
    /// Label smoothing and z-loss, which the objective has beside cross-entropy.
    terms: Terms,
    /// The alpha of `NEFTune`'s noise on embeddings, if above 0.
    noise: Option<f64>,
    /// Gathers the weights of a segment before a pass is there, where ranks shard them. Segment 0 is the embedding, which is
    /// the head too where the model ties them, then come the blocks, then the head.
    shards: Shards,
    /// On a device that only counts: the buffers at the time when the pass reached the head.
    at_head: counts::Buffers,
}

/// The time that training passes took, by part of the model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Phases {
    /// The forward pass of the embedding and the blocks.
    pub forward: Duration,
    /// Final norm, LM head and loss, both directions.
    pub head: Duration,
    /// Blocks and embedding, backward, with what is computed again.
    pub backward: Duration,
}

/// The parts of a model, in the order of a pass.
pub(super) struct Segments {
    pub(super) embedding: Weight,
    pub(super) stored_rows: Option<StoredRows>,
    pub(super) embedding_norm: Option<Norm>,
    pub(super) positions: Option<LearnedPositions>,
    pub(super) per_layer: Option<PerLayer>,
    pub(super) vision: Option<Vision>,
    pub(super) blocks: Vec<Block>,
    pub(super) head: Head,
}

/// The 16-bit type in which activations wait for backward; `None` for float32.
pub(super) const fn narrow(config: &Config) -> Option<Half> {
    match (config.train.bf16, config.train.fp16) {
        (_, true) => Some(Half::F16),
        (true, false) => Some(Half::Bf16),
        (false, false) => None,
    }
}

impl Model {
    pub(super) fn new(
        arch: Arch,
        params: Params,
        segments: Segments,
        config: &Config,
        device: Device,
        mut shards: Shards,
    ) -> Self {
        let Segments { embedding, stored_rows, embedding_norm, positions, per_layer, vision, blocks, head } = segments;
        let sees = vision.as_ref().is_some_and(Vision::trains);
        let trains_per_layer = per_layer.as_ref().is_some_and(|it| it.trains() || embedding.trains());
        let trains_positions = positions.as_ref().is_some_and(|it| it.table.trains());
        let trains_below = embedding.trains() || sees || trains_per_layer || trains_positions;
        let mut blocks =
            Blocks::new(blocks, Some(1), trains_below, config.train.gradient_checkpointing, narrow(config));
        blocks.offloads = config.train.activation_offloading;
        blocks.tiles = matches!(device, Device::Cuda(_)).then(|| Tiles { tokens: TILE, pool: pool(device, config) });
        let [forward, mut backward] = blocks.route();
        // Encoder, connector and what makes embeddings for each block are in the embedding's segment, and gathered again for their
        // gradients.
        backward.extend((sees || trains_per_layer).then_some(0));
        let forward = std::iter::once(0).chain(forward).chain([Self::segment_of_head(&arch)]);
        shards.set_route(forward.collect(), &backward);
        Self {
            arch,
            params,
            phases: Phases::default(),
            loss_scale: 1.0,
            totals: Totals::default(),
            notes: Vec::new(),
            shards,
            at_head: counts::Buffers::default(),
            embedding,
            stored_rows,
            embedding_norm,
            positions,
            per_layer,
            vision,
            blocks,
            head,
            pool: pool(device, config),
            dropout: adapters::of(&config.tuning).map_or(0.0, Method::dropout) as f32,
            seed: config.train.seed,
            terms: Terms { smoothing: config.train.label_smoothing_factor as f32, z: config.train.z_loss as f32 },
            noise: config.train.neftune_noise_alpha.filter(|&alpha| alpha > 0.0),
        }
    }

    /// The segment in which ranks share the head's matrix: that of the embedding where the two are tied.
    const fn segment_of_head(arch: &Arch) -> usize {
        if arch.ties_head() { 0 } else { arch.num_hidden_layers + 1 }
    }

    /// Where all of it is, and where its passes compute.
    pub fn device(&self) -> Device {
        self.pool.device()
    }

    /// The segments of the model, which ranks may shard.
    pub const fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Where the activations of blocks and head come from.
    fn pools(&self) -> impl Iterator<Item = &Arc<Pool>> {
        let experts = self.blocks.expert_pools().map(|(_, moe)| &moe.pool);
        let tiles = self.blocks.tiles.iter().map(|tiles| &tiles.pool);
        [&self.pool, &self.head.pool].into_iter().chain(experts).chain(tiles)
    }

    /// Bytes of idle activation buffers between passes: those of the blocks with the image encoder, and those of the
    /// head.
    pub fn idle_bytes(&self) -> [u64; 2] {
        let vision: u64 = self.vision.iter().map(Vision::idle_bytes).sum();
        let (all, head) = (self.pools().map(|pool| pool.idle_bytes()).sum::<u64>(), self.head.pool.idle_bytes());
        [all - head + vision, head]
    }

    /// Sets the gradient checkpointing of the following passes. Gradients do not depend on it, to the bit (except with
    /// `train.bf16`, which rounds what is kept).
    pub const fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.blocks.checkpointing = checkpointing;
    }

    /// From here on, branches that look at each token alone are computed for at most `tokens` tokens at a time. That
    /// applies to passes without backward, and to blocks that are recomputed for backward. A GPU does so from the
    /// start, with 8,192 tokens; the CPU only after this call.
    ///
    /// # Panics
    /// In a later pass, if `tokens` is no multiple of 16.
    pub fn set_tiles(&mut self, tokens: usize, config: &Config) {
        self.blocks.tiles = Some(Tiles { tokens, pool: pool(self.device(), config) });
    }

    /// How many blocks there are.
    pub const fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Frees the memory of idle activation buffers.
    pub fn release(&self) {
        self.pools().for_each(|pool| pool.release());
        self.vision.iter().for_each(Vision::release);
        self.shards.release();
    }

    fn check(&self, batch: &Batch) -> Result<()> {
        let (vocabulary, outputs) = (self.arch.vocab_size as i64, self.arch.outputs() as i64);
        let targets = batch.targets.iter().filter(|&&target| target != IGNORE && !self.head.squared);
        let outside = targets.map(|&target| i64::from(target)).find(|id| !(0..outputs).contains(id));
        if let Some(label) = outside.filter(|_| self.arch.score.is_some()) {
            return Err(Error::data(format!("label {label} is not one of the model's {outputs}")));
        }
        let tokens = batch.tokens.iter().map(|&token| i64::from(token)).find(|id| *id >= vocabulary);
        if let Some(positions) = self.positions.as_ref().filter(|_| !self.device().only_counts()) {
            batch.cu_seqlens.windows(2).try_for_each(|ends| positions.check(ends[1] - ends[0]))?;
        }
        match (&self.vision, batch.images.is_empty()) {
            (Some(vision), _) => vision.check(&batch.images, batch.tokens.len())?,
            (None, true) => {}
            (None, false) => {
                return Err(Error::data("a row with an image, and the model has no encoder")
                    .hint("set vision.encoder, or use a checkpoint that sees images"));
            }
        }
        if self.arch.reads_images_across() {
            check_one_each(batch)?;
        }
        if let Some(first) = self.arch.media_ids
            && let Some(id) = batch.tokens.iter().find(|id| **id as usize >= first)
        {
            return Err(Error::data(format!(
                "found token id {id} in a text, but ids from {first} on stand for images and sounds"
            ))
            .hint("this model reads text only: leave it out of the text"));
        }
        match tokens.or(outside) {
            Some(id) => Err(Error::data(format!("token {id} is outside the model's vocabulary of {vocabulary}"))
                .hint("the tokenizer belongs to another model")),
            None => Ok(()),
        }
    }

    fn embed(&self, pass: &Pass<'_>, tokens: &[u32]) -> Result<Activation> {
        let x = self.look_up(pass, tokens)?;
        Ok(match &self.embedding_norm {
            Some(norm) => norm.forward(pass, &x, 1).0,
            None => x,
        })
    }

    /// The rows of the embedding's table, before its norm.
    fn look_up(&self, pass: &Pass<'_>, tokens: &[u32]) -> Result<Activation> {
        let scale = self.arch.embedding_scale as f32;
        if let Some(rows) = &self.stored_rows {
            return rows.look_up(pass.pool, tokens, scale);
        }
        self.embedding.refresh(pass.values);
        let table = self.embedding.view(pass.values);
        Ok(embedding::forward(pass.pool, table.store(), self.arch.hidden_size, tokens, scale))
    }

    /// Which rows of learned positions the tokens of a batch have.
    fn position_ids(&self, batch: &Batch) -> Option<Vec<u32>> {
        let lengths = batch.cu_seqlens.windows(2).map(|ends| 0..ends[1] - ends[0]);
        self.positions.as_ref().map(|positions| positions.ids(lengths))
    }

    /// Whether backward has to compute the gradients of the per-layer embeddings.
    fn trains_per_layer(&self) -> bool {
        let sees = || self.vision.as_ref().is_some_and(Vision::trains);
        self.per_layer.as_ref().is_some_and(|it| it.trains() || self.embedding.trains() || sees())
    }

    /// The per-layer embeddings of `tokens`, whose embedding in the stream is `x`. With `gradients`, backward collects
    /// their gradients.
    fn per_layer_inputs(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        tokens: &[u32],
        gradients: bool,
    ) -> Option<PerLayerInputs> {
        self.per_layer.as_ref().map(|it| it.forward(pass, x, tokens, gradients))
    }

    /// A pass without backward. `head` computes the result from the last block's output at the tokens `rows` (rising).
    fn evaluate<T>(&self, batch: &Batch, rows: &[usize], head: impl FnOnce(&Pass<'_>, &Activation) -> T) -> Result<T> {
        self.forward(|| {
            let (pass, values) = (self.evaluation(), self.params.values());
            self.pool.reserve(batch.tokens.len());
            let layout = self.layout(batch, rows);
            let (Placed { x, added, across, .. }, per_layer) = self.shards.at(0, values, &pass, |pass| {
                let placed = self.embed_batch(pass, batch)?;
                let tokens = self.per_layer_tokens(&batch.tokens, &self.splice(batch));
                let per_layer = self.per_layer_inputs(pass, &placed.x, &tokens, false);
                Ok::<_, Error>((placed, per_layer))
            })??;
            let (added, per_layer, across) = (added.as_ref(), per_layer.as_ref(), across.as_ref());
            let walk =
                Walk { shards: &self.shards, values, layout: &layout, every_token: false, added, per_layer, across };
            let x = self.blocks.forward(&walk, &pass, x)?;
            self.at_head(&pass, |pass| head(pass, &x))
        })
    }

    /// Computes `head` while the weights of the head are gathered.
    fn at_head<T>(&self, pass: &Pass<'_>, head: impl FnOnce(&Pass<'_>) -> T) -> Result<T> {
        self.shards.at(Self::segment_of_head(&self.arch), self.params.values(), pass, |pass| {
            self.head.weight.refresh(pass.values);
            head(pass)
        })
    }

    /// The coefficient of the experts' load-balancing loss. Classifiers have none, as in Transformers.
    fn balance(&self) -> Option<f64> {
        self.arch.experts.as_ref().filter(|_| self.arch.score.is_none())?.balance
    }

    pub(crate) fn evaluation(&self) -> Pass<'_> {
        Pass { values: self.params.values().into(), pool: &self.pool, balance: None, dropout: None }
    }

    /// The loss of each label token of the batch, in order, without dropout.
    ///
    /// # Errors
    /// As [`Model::forward_backward`].
    pub fn token_losses(&self, batch: &Batch) -> Result<Vec<f32>> {
        Ok(self.token_scores(batch)?.into_iter().map(|(nll, _)| nll).collect())
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
        self.evaluate(batch, &rows, |pass, x| self.head.losses(pass, x, &targets))
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
        let _unrounded = Unrounded::new(self.pools());
        self.evaluate(batch, rows, |pass, x| self.head.logits(pass, x))
    }
}

/// Refuses a batch in which a text has no image or several, where the decoder reads one image beside each text.
fn check_one_each(batch: &Batch) -> Result<()> {
    let mut images = batch.images.iter().peekable();
    for ends in batch.cu_seqlens.windows(2) {
        let mut count = 0;
        while images.next_if(|image| image.runs.first().is_some_and(|run| run.start < ends[1])).is_some() {
            count += 1;
        }
        if count != 1 {
            return Err(one_image(count));
        }
    }
    Ok(())
}

/// The error of a text with so many images, where the decoder reads one.
fn one_image(count: usize) -> Error {
    Error::data(format!(
        "a text with {}, and the model's decoder reads one beside each text",
        words::count(count, "image")
    ))
    .hint("write rows {image, caption}")
}

/// The positions that carry a label, and their targets.
fn labelled(batch: &Batch) -> (Vec<usize>, Vec<u32>) {
    let labelled = batch.targets.iter().enumerate().filter(|&(_, &target)| target != IGNORE);
    labelled.map(|(row, &target)| (row, target as u32)).unzip()
}

#[cfg(test)]
mod inference_tests;
