//! Per-layer embeddings (Gemma 3n and 4): each block has token embeddings of its own, beside those of the residual
//! stream. They are made for all blocks at once, side by side:
//!
//! ```text
//! e = (norm(c P x) + s E[tokens]) / sqrt(2)       c = hidden^-1/2, s = width^1/2, x the stream's embedding
//! ```
//!
//! with a table `E [vocabulary, blocks * width]` and a norm over each block's `width` features. A block gates its own
//! embeddings, projects them, and adds them to the stream: [`PerLayerGate`]. Transformers,
//! `Gemma4TextModel.project_per_layer_inputs`.
use super::grads::Grads;
use super::linear::{self, Input, Linear};
use super::norm::Norm;
use super::pass::{Pass, Rows};
use super::per_layer_inputs::PerLayerInputs;
use super::weight::Weight;
use std::borrow::Cow;
use std::f32::consts::FRAC_1_SQRT_2;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::gated_mlp::{self, Gate};
use tunesmith_ops::{elementwise, embedding};

/// Makes the per-layer embeddings of all blocks.
#[derive(Debug)]
pub struct PerLayer {
    /// The table of all blocks' embeddings, `[vocabulary, blocks * width]`.
    pub table: Weight,
    /// From the stream's embedding to `blocks * width` features.
    pub projection: Linear,
    /// The norm over `width` features, the same for each block.
    pub norm: Norm,
    pub blocks: usize,
    /// The number of rows of the table. Tokens with larger ids get the first row, as in Gemma 3n.
    pub rows: usize,
    /// Factor on the table's rows.
    pub table_scale: f32,
    /// Factor on what the projection gives.
    pub projection_scale: f32,
}

impl PerLayer {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let rest = self.projection.weights_mut().chain(self.norm.weights_mut());
        std::iter::once(&mut self.table).chain(rest).collect()
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        self.table.trains() || self.projection.trains() || self.norm.trains()
    }

    /// The rows of the table for `tokens`.
    fn rows_of<'t>(&self, tokens: &'t [u32]) -> Cow<'t, [u32]> {
        let beyond = |token: u32| token as usize >= self.rows;
        if !tokens.iter().any(|&token| beyond(token)) {
            return tokens.into();
        }
        tokens.iter().map(|&token| if beyond(token) { 0 } else { token }).collect()
    }

    /// `c P x`, and what the projection needs in backward.
    fn projected(&self, pass: &Pass<'_>, x: &Activation) -> (Activation, Option<linear::Saved>) {
        let (mut raw, saved) = self.projection.forward(pass, x, None);
        elementwise::scale(&mut raw, self.projection_scale);
        (raw, saved)
    }

    /// The per-layer embeddings of `tokens`, whose embedding in the stream is `x [tokens, hidden]`. With `gradients`,
    /// backward collects their gradients.
    pub fn forward(&self, pass: &Pass<'_>, x: &Activation, tokens: &[u32], gradients: bool) -> PerLayerInputs {
        let (raw, _) = self.projected(pass, x);
        let (mut all, _) = self.norm.forward(pass, &raw, self.blocks);
        drop(raw);
        let table = self.table.view(pass.values);
        let rows =
            embedding::forward(pass.pool, table.store(), all.features(), &self.rows_of(tokens), self.table_scale);
        elementwise::add(&mut all, &rows);
        drop(rows);
        elementwise::scale(&mut all, FRAC_1_SQRT_2);
        PerLayerInputs::new(all, self.blocks, gradients)
    }

    /// Adds the gradients of what is trained to `grads`, and that of `x` to `dx`, if given. Call it when backward has
    /// passed every block.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        inputs: PerLayerInputs,
        (x, dx): (&Activation, Option<&mut Activation>),
        (tokens, padding): (&[u32], Option<u32>),
        grads: &mut Grads<'_>,
    ) {
        let mut d = inputs.into_gradient();
        elementwise::scale(&mut d, FRAC_1_SQRT_2);
        self.table.add_embedding_gradient(&d, &self.rows_of(tokens), self.table_scale, padding, grads);
        let (raw, saved) = self.projected(pass, x);
        let stats = self.norm.stats(&raw, self.blocks);
        let mut d_raw = raw.like();
        self.norm.backward(pass, &raw, &stats, &d, Some((&mut d_raw, false)), grads);
        drop((raw, d));
        elementwise::scale(&mut d_raw, self.projection_scale);
        let dx = dx.map(|dx| (dx, true));
        self.projection.backward(pass, &Input::new(x), saved.as_ref(), &d_raw, dx, grads);
    }
}

/// A block's own embeddings gated by the stream: `P (act(G x) * e)`.
#[derive(Debug)]
pub struct PerLayerGate {
    /// From `hidden` to `width` features.
    pub gate: Linear,
    /// From `width` features back to `hidden`.
    pub projection: Linear,
    /// The activation function of the gate.
    pub act: Gate,
    /// The block's number, from 0: whose part of all blocks' embeddings it takes.
    pub block: usize,
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    gate: T,
    extra: Option<linear::Saved<T>>,
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved { gate: f(self.gate), extra: self.extra.map(|extra| extra.map(f)) }
    }
}

impl PerLayerGate {
    /// Its modules' weights, without those of adapters.
    pub fn weights_mut(&mut self) -> impl Iterator<Item = &mut Weight> {
        self.gate.weights_mut().chain(self.projection.weights_mut())
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        [&self.gate, &self.projection].into_iter()
    }

    /// The gate of `x [rows, hidden]`.
    pub fn forward(&self, pass: &Pass<'_>, x: &Activation) -> Saved {
        let (gate, extra) = self.gate.forward(pass, x, None);
        Saved { gate, extra }
    }

    /// The input of the projection, `[rows, width]`.
    pub fn middle(&self, saved: &Saved, inputs: &PerLayerInputs, rows: &Rows) -> Activation {
        gated_mlp::forward(self.act, &saved.gate, &inputs.of(self.block, rows.picked.as_deref()))
    }

    /// From the gradient of the projection's output, `dy [rows, hidden]`, to that of `x`. `extra` is what the projection keeps.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        (x, inputs, rows): (&Activation, &PerLayerInputs, &Rows),
        saved: Saved,
        extra: Option<&linear::Saved>,
        dy: &Activation,
        grads: &mut Grads<'_>,
    ) -> Activation {
        let middle = self.middle(&saved, inputs, rows);
        let mut d_middle = middle.like();
        self.projection.backward(pass, &Input::new(&middle), extra, dy, Some((&mut d_middle, false)), grads);
        drop(middle);
        let Saved { gate: mut d_gate, extra } = saved;
        let mut d_own = inputs.of(self.block, rows.picked.as_deref());
        gated_mlp::backward(self.act, &mut d_gate, &mut d_own, &d_middle);
        drop(d_middle);
        inputs.put_gradient(self.block, d_own, rows.picked.as_deref());
        let mut dx = x.like();
        self.gate.backward(pass, &Input::new(x), extra.as_ref(), &d_gate, Some((&mut dx, false)), grads);
        dx
    }
}
