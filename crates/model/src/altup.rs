//! Alternating updates (`AltUp`, Gemma 3n): a block with several residual streams, which lie side by side,
//! `[tokens, streams * hidden]`. The branches of the block compute the active stream only. All streams are predicted
//! before it and corrected after it:
//!
//! ```text
//! p = predict(x, P m(x_active))        m(x) = tanh(W s norm(x)),  s = 1 / hidden
//! u = branches(p_active)
//! y = correct(p, u, C m(u))
//! y_i += norm(O (act(G (y_active * scale)) * e))        for all but the first; e is the block's own embedding
//! ```
//!
//! ([`tunesmith_ops::altup`]). Transformers, `Gemma3nTextAltUp` and `Gemma3nTextDecoderLayer`. The first block makes the streams of
//! the embedding, and the last one brings them together ([`super::streams`]): the walk over the blocks sees a wider state between
//! them, and nothing else.
//!
//! Transformers cuts the weights of P and C in training at `altup_coef_clip`, 120 by default; runs refuse weights beyond it. In
//! training it also leaves out an adapter on C, which it has in evaluation; here it counts in both.
use super::branch::{Branch, Gained};
use super::branches;
use super::grads::Grads;
use super::linear::{self, Linear};
use super::mixers::Mixing;
use super::norm::Norm;
use super::pass::{BlockRows, Pass};
use super::per_layer::{self, PerLayerGate};
use super::streams::{self, Projected};
use super::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::pointwise::{self, Function};
use tunesmith_ops::{altup, elementwise};

/// What a block of several streams has beside its branches.
#[derive(Debug)]
pub struct AltUp {
    /// How many streams there are.
    pub streams: usize,
    /// The one that the branches compute.
    pub active: usize,
    pub router: Router,
    /// From a token's modalities to its prediction weights, `streams * streams`.
    pub prediction: Linear,
    /// From a token's modalities to its correction weights, `streams`.
    pub correction: Linear,
    /// The factors `scale` on the corrected active stream, before it gates the block's own embedding.
    pub output_scale: Gained,
    pub per_layer: PerLayerGate,
    /// The norm on the block's own embedding, gated and projected.
    pub per_layer_norm: Norm,
    /// In the first block: makes the other streams.
    pub begin: Option<Projected>,
    /// In the last block: brings all together.
    pub end: Option<Projected>,
}

/// The router: it computes a token's modalities, `[tokens, streams]`.
#[derive(Debug)]
pub struct Router {
    pub norm: Norm,
    /// From `hidden` features to one number for each stream.
    pub linear: Linear,
    /// The factor `s` on what the norm gives.
    pub scale: f32,
}

/// The prediction or correction weights of each token (`coefs`), and what the router keeps for backward.
#[derive(Debug)]
struct Weights<T = Activation> {
    rstd: Activation,
    logits: Activation,
    /// What the router keeps.
    router: Option<linear::Saved<T>>,
    coefs: Activation,
    /// What the last module keeps: `prediction` or `correction`.
    extra: Option<linear::Saved<T>>,
}

/// What forward keeps for backward, beside what the branches keep.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    /// In the first block: the streams, and what made them.
    begin: Option<(T, streams::Saved<T>)>,
    prediction: Weights<T>,
    /// The active stream as it was predicted: the branches' input.
    active: T,
    /// What the branches gave.
    computed: T,
    correction: Weights<T>,
    /// The active stream, corrected.
    corrected: T,
    gate: per_layer::Saved<T>,
    /// What the projection of the block's own embedding gave and keeps, and its norm's `rstd`.
    own: T,
    projection: Option<linear::Saved<T>>,
    rstd: Activation,
    /// In the last block: the streams, and what brought them together.
    end: Option<(T, streams::Saved<T>)>,
}

impl<T> Weights<T> {
    fn map<U>(self, f: &impl Fn(T) -> U) -> Weights<U> {
        let Self { rstd, logits, router, coefs, extra } = self;
        let (router, extra) = (router.map(|it| it.map(f)), extra.map(|it| it.map(f)));
        Weights { rstd, logits, router, coefs, extra }
    }
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let streams = |it: Option<(T, streams::Saved<T>)>| it.map(|(all, saved)| (f(all), saved.map(f)));
        Saved {
            begin: streams(self.begin),
            prediction: self.prediction.map(f),
            active: f(self.active),
            computed: f(self.computed),
            correction: self.correction.map(f),
            corrected: f(self.corrected),
            gate: self.gate.map(f),
            own: f(self.own),
            projection: self.projection.map(|it| it.map(f)),
            rstd: self.rstd,
            end: streams(self.end),
        }
    }
}

impl Router {
    /// The scaled norm of `x`.
    fn input(&self, pass: &Pass<'_>, x: &Activation, rstd: &Activation) -> Activation {
        let mut h = self.norm.again(pass, x, rstd);
        elementwise::scale(&mut h, self.scale);
        h
    }

    /// The output of `last` (`prediction` or `correction`) on the modalities of `x [tokens, hidden]`.
    fn forward(&self, pass: &Pass<'_>, last: &Linear, x: &Activation) -> Weights {
        let rstd = self.norm.stats(x, 1);
        let (logits, router) = self.linear.forward(pass, &self.input(pass, x, &rstd), None);
        let (coefs, extra) = last.forward(pass, &pointwise::forward(Function::Tanh, &logits), None);
        Weights { rstd, logits, router, coefs, extra }
    }

    /// From the gradient of the output of `last` to that of `x`.
    fn backward(
        &self,
        pass: &Pass<'_>,
        last: &Linear,
        (x, saved): (&Activation, Weights),
        d_coefs: &Activation,
        grads: &mut Grads<'_>,
    ) -> Activation {
        let Weights { rstd, mut logits, router, extra, .. } = saved;
        let modalities = pointwise::forward(Function::Tanh, &logits);
        let d = last.backward_through(pass, modalities, extra.as_ref(), d_coefs, grads);
        pointwise::backward(Function::Tanh, &mut logits, &d);
        let h = self.input(pass, x, &rstd);
        let mut dh = self.linear.backward_through(pass, h, router.as_ref(), &logits, grads);
        elementwise::scale(&mut dh, self.scale);
        let mut dx = x.like();
        self.norm.backward(pass, x, &rstd, &dh, Some((&mut dx, false)), grads);
        dx
    }
}

impl AltUp {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let linears = [&mut self.router.linear, &mut self.prediction, &mut self.correction];
        let mut weights: Vec<&mut Weight> = linears.into_iter().flat_map(Linear::weights_mut).collect();
        weights.extend(self.router.norm.weights_mut());
        weights.push(&mut self.output_scale.gain);
        weights.extend(self.per_layer.weights_mut().chain(self.per_layer_norm.weights_mut()));
        weights.extend(self.begin.iter_mut().chain(&mut self.end).flat_map(Projected::weights_mut));
        weights
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        let linears = [&self.router.linear, &self.prediction, &self.correction];
        linears.into_iter().chain(self.per_layer.linears()).any(Linear::trains)
            || self.router.norm.trains()
            || self.per_layer_norm.trains()
            || self.output_scale.gain.trains()
            || self.begin.iter().chain(&self.end).any(Projected::trains)
    }

    /// The columns of the active stream.
    fn own(&self, hidden: usize) -> std::ops::Range<usize> {
        self.active * hidden..(self.active + 1) * hidden
    }

    /// As [`branches::forward`], on all streams. The last result is what is kept for backward beside what the branches
    /// keep.
    pub fn forward(
        &self,
        branches: &[Branch],
        pass: &Pass<'_>,
        x: &Activation,
        rows: BlockRows<'_>,
        whole: bool,
        mixing: &mut dyn Mixing,
    ) -> (Activation, branches::Saved, Saved) {
        let begun = self.begin.as_ref().map(|begin| begin.begin(pass, x));
        let streams = begun.as_ref().map_or(x, |(streams, _)| streams);
        let hidden = streams.features() / self.streams;
        let prediction = self.router.forward(pass, &self.prediction, &streams.columns(self.own(hidden)));
        let mut y = altup::predict(streams, &prediction.coefs, self.streams);
        let active = y.columns(self.own(hidden));
        if let Some(picked) = &rows.outputs.picked {
            y = y.gather(picked);
        }
        let (computed, kept) = branches::forward(branches, pass, &active, rows, whole, mixing);
        let correction = self.router.forward(pass, &self.correction, &computed);
        altup::correct(&mut y, &computed, &correction.coefs, self.active);
        let corrected = y.columns(self.own(hidden));
        let gate = self.per_layer.forward(pass, &self.output_scale.times(pass, &corrected));
        let middle = self.per_layer.middle(&gate, rows.own_embeddings(), rows.outputs);
        let (own, projection) = self.per_layer.projection.forward(pass, &middle, None);
        drop(middle);
        let (normed, rstd) = self.per_layer_norm.forward(pass, &own, 1);
        altup::add(&mut y, &normed, 1..self.streams);
        drop(normed);
        let mut end = None;
        if let Some(projected) = &self.end {
            let (mean, projections) = projected.end(pass, &y);
            end = Some((std::mem::replace(&mut y, mean), projections));
        }
        let saved = Saved {
            begin: begun,
            prediction,
            active,
            computed,
            correction,
            corrected,
            gate,
            own,
            projection,
            rstd,
            end,
        };
        (y, kept, saved)
    }

    /// As [`branches::backward`], on all streams.
    pub fn backward(
        &self,
        branches: &[Branch],
        pass: &Pass<'_>,
        x: &Activation,
        (kept, saved): (branches::Saved, Saved),
        dy: Activation,
        rows: BlockRows<'_>,
        grads: &mut Grads<'_>,
    ) -> Activation {
        let mut d = match (&self.end, saved.end) {
            (Some(end), Some((streams, kept))) => end.end_backward(pass, &streams, kept, dy, grads),
            _ => dy,
        };
        let hidden = d.features() / self.streams;
        // The block's own embedding.
        let d_normed = altup::sum(&d, hidden, 1..self.streams);
        let mut d_own = saved.own.like();
        self.per_layer_norm.backward(pass, &saved.own, &saved.rstd, &d_normed, Some((&mut d_own, false)), grads);
        drop((d_normed, saved.own));
        let scaled = self.output_scale.times(pass, &saved.corrected);
        let inputs = (&scaled, rows.own_embeddings(), rows.outputs);
        let projection = saved.projection.as_ref();
        let d_scaled = self.per_layer.backward(pass, inputs, saved.gate, projection, &d_own, grads);
        drop((scaled, d_own));
        altup::add(
            &mut d,
            &self.output_scale.backward(pass, &saved.corrected, &d_scaled, grads),
            self.active..self.active + 1,
        );
        drop((d_scaled, saved.corrected));
        // The correction, the branches, the prediction.
        let picked = rows.outputs.picked.as_deref();
        let active = picked.map(|picked| saved.active.gather(picked));
        let active = active.as_ref().unwrap_or(&saved.active);
        let (mut du, d_coefs) =
            altup::correct_backward(active, &saved.computed, &saved.correction.coefs, self.active, &mut d);
        let of_router = (&saved.computed, saved.correction);
        elementwise::add(&mut du, &self.router.backward(pass, &self.correction, of_router, &d_coefs, grads));
        drop(saved.computed);
        let d_active = branches::backward(branches, pass, &saved.active, kept, du, rows, true, grads)
            .expect("the gradient was asked for");
        if let Some(picked) = picked {
            d = d.scatter(picked, x.tokens());
        }
        altup::add(&mut d, &d_active, self.active..self.active + 1);
        drop((d_active, saved.active));
        let streams = saved.begin.as_ref().map_or(x, |(streams, _)| streams);
        let (mut dx, d_coefs) = altup::predict_backward(streams, &saved.prediction.coefs, self.streams, &d);
        drop(d);
        let of_router = (&streams.columns(self.own(hidden)), saved.prediction);
        let d_active = self.router.backward(pass, &self.prediction, of_router, &d_coefs, grads);
        altup::add(&mut dx, &d_active, self.active..self.active + 1);
        match (&self.begin, saved.begin) {
            (Some(begin), Some((_, kept))) => begin.begin_backward(pass, x, kept, &dx, grads),
            _ => dx,
        }
    }
}
