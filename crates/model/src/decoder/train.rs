//! The training pass: forward, head and loss, and backward over one micro-batch.
use super::pictures::Placed;
use super::{Model, labelled};
use crate::blocks::Walk;
use crate::grads::Grads;
use crate::head::HeadResult;
use crate::params::Params;
use crate::pass::{Drops, Pass};
use crate::shards::Kind;
use crate::vision::{Splice, Training, Vision};
use std::time::Instant;
use tunesmith_base::error::{Error, Result};
use tunesmith_data::batch::Batch;
use tunesmith_device::{Device, memory};
use tunesmith_ops::activation::Activation;
use tunesmith_ops::dropout::key;
use tunesmith_ops::elementwise;
use tunesmith_ops::noise;
use tunesmith_ops::par;

impl Model {
    /// One micro-batch, forward and backward. Adds the gradient of `scale * (sum of the label tokens' losses)`, times
    /// [`Model::loss_scale`], to the gradients of [`Model::params`]. Losses count with their weights, and with the
    /// label smoothing and z-loss of the configuration. Returns the weighted sum of the plain cross-entropies.
    ///
    /// `scale` is 1 / the weight of all label tokens of the effective batch. `share` is one over the passes of
    /// the step on all ranks: the load-balancing loss of experts, which each pass has for itself, is multiplied by it.
    /// `step` decides dropout masks and noise.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: a token outside the vocabulary. [`tunesmith_base::Kind::Memory`]: the activations do not fit into the
    /// memory budget; a part of the gradients has then been added.
    pub fn forward_backward(&mut self, batch: &Batch, scale: f32, share: f32, step: u64) -> Result<f64> {
        let device = self.device();
        memory::guarded(|| {
            self.totals.begin(device);
            Ok(())
        })?;
        let mut grads = self.params.take_grads();
        let walked = self.forward_backward_into(batch, scale, share, step, &mut Grads::whole(&mut grads));
        self.params.put_grads(grads);
        walked?;
        memory::guarded(|| Ok(self.totals.read().0))
    }

    /// As [`Model::forward_backward`], but adds the gradients to `grads` and the losses to [`Model::totals`]. `grads`
    /// is told when the gradients of a segment are final. Nothing waits for a GPU.
    ///
    /// # Errors
    /// As [`Model::forward_backward`], and those of the collector that takes the gradients
    /// ([`crate::grads::Collector`]).
    pub fn forward_backward_into(
        &mut self,
        batch: &Batch,
        scale: f32,
        share: f32,
        step: u64,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        self.check(batch)?;
        self.shards.begin(Kind::Train)?;
        let params = std::mem::take(&mut self.params);
        // Threads that spin while they wait would slow down those that gather weights, take gradients, or feed a GPU.
        let together = self.device() == Device::Cpu && !self.shards.gathers() && !grads.is_collected();
        let mut walk = || self.walk(&params, batch, scale, share, step, grads);
        let walked = memory::guarded(|| if together { par::together(walk) } else { walk() });
        self.params = params;
        self.end(walked, Some(grads))
    }

    fn walk(
        &mut self,
        params: &Params,
        batch: &Batch,
        scale: f32,
        share: f32,
        step: u64,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let (rows, targets) = labelled(batch);
        if rows.is_empty() {
            return Ok(());
        }
        let mut clock = Instant::now();
        let mut lap = || std::mem::replace(&mut clock, Instant::now()).elapsed();
        let values = params.values();
        let tokens = batch.tokens.len();
        self.pool.reserve(tokens);
        let first_row = batch.first_row;
        let drops = Drops { rate: self.dropout, seed: self.seed, step, first_row, picked: &rows };
        let slopes: Vec<f32>;
        let mut pass = Pass {
            values: values.into(),
            pool: &self.pool,
            balance: None,
            dropout: (self.dropout > 0.0).then_some(drops),
        };
        let layout = self.layout(batch, &rows);
        // The loss for uneven use of experts looks at every token, in the last block too.
        let balance = self.balance();
        let every_token = balance.is_some();

        // Forward.
        let splice = self.splice(batch);
        let training = Training {
            dropout: self.dropout,
            seed: self.seed,
            step,
            first_row,
            rows: &splice.images,
            images: &batch.images,
        };
        let (trains_per_layer, trains_embedding) = (self.trains_per_layer(), self.embedding.trains());
        let position_ids = self.position_ids(batch);
        let positions = self.positions.as_ref().zip(position_ids.as_deref());
        let per_layer_tokens = self.per_layer_tokens(&batch.tokens, &splice);
        let mut before_norm = None;
        let (placed, embedded, per_layer, of_positions) = self.shards.at(0, values, &pass, |pass| {
            let (mut x, seen) = self.embed_training(pass, batch, training)?;
            if self.embedding_norm.is_some() && trains_embedding {
                before_norm = Some(self.look_up(pass, &batch.tokens)?);
            }
            if let Some(alpha) = self.noise {
                let outside = if self.arch.embedding_scaled_outside { self.arch.embedding_scale } else { 1.0 };
                noise::add(&mut x, &batch.cu_seqlens, alpha * outside, key(self.seed, step, NOISE), first_row);
            }
            let placed = self.place(x, seen, &splice, Some(training));
            let per_layer = self.per_layer_inputs(pass, &placed.x, &per_layer_tokens, trains_per_layer);
            let of_positions = positions.map(|(it, ids)| it.rows(pass, ids));
            let embedded = trains_per_layer.then(|| placed.x.copy());
            Ok::<_, Error>((placed, embedded, per_layer, of_positions))
        })??;
        let Placed { mut x, added, across, trace: pictures } = placed;
        if let Some(rows) = of_positions {
            elementwise::add(&mut x, &rows);
        }
        let walk = Walk {
            shards: &self.shards,
            values,
            layout: &layout,
            every_token,
            added: added.as_ref(),
            per_layer: per_layer.as_ref(),
            across: across.as_ref(),
        };
        let (x, trace) = self.blocks.forward_keeping(&walk, &pass, x, balance.is_some())?;
        self.phases.forward += lap();
        if self.device().only_counts() {
            self.at_head = self.buffers(tokens, rows.len());
        }

        // Head and loss, both directions.
        let (embedding, head) = (params.segment(0), params.segment(self.blocks.len() + 1));
        grads.open(head.clone());
        // A head that shares the embedding's table adds to its gradients.
        if self.head.weight.place().is_some_and(|place| place.end <= embedding.end) {
            grads.open(embedding.clone());
        }
        let (plain_scale, scale) = (scale, scale * self.loss_scale);
        let HeadResult { losses, dx: dy } =
            self.shards.at(Self::segment_of_head(&self.arch), values, &pass, |pass| {
                self.head.weight.refresh(pass.values);
                let weights: Vec<f32> = if batch.weights.is_empty() {
                    Vec::new()
                } else {
                    rows.iter().map(|&row| batch.weight(row)).collect()
                };
                self.head.forward_backward(pass, &x, &targets, self.terms, &weights, scale, grads)
            })?;
        drop(x);
        let mut total_of_balance = 0.0;
        if let Some(coefficient) = balance {
            let (loss, slope) = balance_loss(&trace.loads, batch.tokens.len());
            let weight = coefficient * f64::from(share);
            total_of_balance = loss * weight / f64::from(plain_scale);
            let weight = weight * f64::from(self.loss_scale);
            slopes = slope.into_iter().map(|slope| (slope * weight) as f32).collect();
            pass.balance = Some(&slopes);
        }
        grads.close(&head)?;
        self.phases.head += lap();

        // Backward.
        let trains_vision = self.vision.as_ref().is_some_and(Vision::trains);
        let positions = positions.filter(|(it, _)| it.table.trains());
        let trains_below = trains_embedding || trains_vision || trains_per_layer || positions.is_some();
        let dx = self.blocks.backward(&walk, &pass, trace, dy, params, trains_below, grads)?;
        if let Some(mut dx) = dx.filter(|_| trains_below) {
            grads.open(embedding.clone());
            let per_layer = self.per_layer.as_ref().zip(per_layer).zip(embedded);
            if per_layer.is_some() || trains_vision {
                // In one visit of the segment, which is gathered once.
                self.shards.at(0, values, &pass, |pass| {
                    if let Some(((it, inputs), x)) = per_layer {
                        let tokens = (&*per_layer_tokens, self.arch.pad_token_id);
                        let dx = (trains_embedding || trains_vision).then_some(&mut dx);
                        it.backward(pass, inputs, (&x, dx), tokens, grads);
                    }
                    if !trains_vision {
                        return Ok(());
                    }
                    self.pictures_backward(pass, pictures, training, (&dx, added, across), params, grads)
                })??;
            }
            if let Some((it, ids)) = positions {
                it.backward(&dx, ids, grads);
            }
            if trains_embedding {
                if let (Some(norm), Some(x)) = (&self.embedding_norm, before_norm) {
                    let mut before = x.like();
                    norm.backward(&pass, &x, &norm.stats(&x, 1), &dx, Some((&mut before, false)), grads);
                    dx = before;
                }
                self.embedding_backward(&dx, batch, &splice, grads);
            }
            grads.close(&embedding)?;
        }
        drop(layout);
        self.totals.add(losses, total_of_balance);
        self.phases.backward += lap();
        Ok(())
    }
}

impl Model {
    /// Adds the gradient of the embedding's table, given that of its output. Rows of images do not come from the table.
    fn embedding_backward(&self, dx: &Activation, batch: &Batch, splice: &Splice, grads: &mut Grads<'_>) {
        let (scale, padding) = (self.arch.embedding_scale as f32, self.arch.pad_token_id);
        if splice.images.is_empty() {
            return self.embedding.add_embedding_gradient(dx, &batch.tokens, scale, padding, grads);
        }
        let tokens: Vec<u32> = splice.texts.iter().map(|&row| batch.tokens[row]).collect();
        if !tokens.is_empty() {
            self.embedding.add_embedding_gradient(&dx.gather(&splice.texts), &tokens, scale, padding, grads);
        }
    }
}

/// The key of the noise on embeddings (`NEFTune`), in the place of a module's number, so that it differs from every
/// dropout mask.
const NOISE: u64 = u64::MAX;

/// The load-balancing loss of experts, as in Transformers' `load_balancing_loss_func`: `E sum_e f_e P_e`, with the
/// share f of tokens and the mean probability P of each expert over all blocks and tokens. Also its derivative with
/// respect to one token's probability of each expert. There f counts as a constant.
fn balance_loss(blocks: &[Vec<(f64, f64)>], tokens: usize) -> (f64, Vec<f64>) {
    let all = (blocks.len() * tokens) as f64;
    let count = blocks.first().map_or(0, Vec::len);
    let sum =
        |expert: usize| blocks.iter().fold((0.0, 0.0), |sum, block| (sum.0 + block[expert].0, sum.1 + block[expert].1));
    let uses: Vec<(f64, f64)> = (0..count).map(sum).map(|(tokens, sum)| (tokens / all, sum / all)).collect();
    let loss = uses.iter().map(|(share, mean)| share * mean).sum::<f64>() * count as f64;
    (loss, uses.iter().map(|(share, _)| share * count as f64 / all).collect())
}
