//! How the residual streams of `AltUp` (Gemma 3n) begin before the first block and end after the last one. At the
//! beginning, each stream but the first is a projection of the embedding, scaled to the embedding's root mean square.
//! At the end, each stream but the first is projected and scaled to the root mean square of the first; the output is
//! the mean of all.
use super::grads::Grads;
use super::linear::{self, Input, Linear};
use super::pass::Pass;
use super::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::{elementwise, rms_match};

/// One projection for each stream but the first.
#[derive(Debug)]
pub struct Projected(pub Vec<Linear>);

/// What forward keeps for backward: what each projection gives, and what it keeps.
#[derive(Debug)]
pub struct Saved<T = Activation>(Vec<(T, Option<linear::Saved<T>>)>);

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved(self.0.into_iter().map(|(raw, extra)| (f(raw), extra.map(|extra| extra.map(f)))).collect())
    }
}

impl Projected {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> impl Iterator<Item = &mut Weight> {
        self.0.iter_mut().flat_map(Linear::weights_mut)
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        self.0.iter().any(Linear::trains)
    }

    /// All streams of the embedding `x [tokens, hidden]`: `[tokens, streams * hidden]`.
    pub fn begin(&self, pass: &Pass<'_>, x: &Activation) -> (Activation, Saved) {
        let saved: Vec<_> = self.0.iter().map(|linear| linear.forward(pass, x, None)).collect();
        let others: Vec<Activation> = saved.iter().map(|(raw, _)| rms_match::forward(raw, x)).collect();
        let all: Vec<&Activation> = std::iter::once(x).chain(&others).collect();
        (Activation::side_by_side(&all), Saved(saved))
    }

    /// From the gradient of all streams to that of the embedding `x`.
    pub fn begin_backward(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        saved: Saved,
        d: &Activation,
        grads: &mut Grads<'_>,
    ) -> Activation {
        let hidden = x.features();
        let mut dx = d.columns(0..hidden);
        let input = Input::new(x);
        for (index, (linear, (raw, extra))) in self.0.iter().zip(saved.0).enumerate() {
            let dy = d.columns((index + 1) * hidden..(index + 2) * hidden);
            let d_raw = rms_match::backward(&raw, x, &dy, &mut dx);
            linear.backward(pass, &input, extra.as_ref(), &d_raw, Some((&mut dx, true)), grads);
        }
        dx
    }

    /// The mean of the streams `y [rows, streams * hidden]`: `[rows, hidden]`.
    pub fn end(&self, pass: &Pass<'_>, y: &Activation) -> (Activation, Saved) {
        let first = self.stream(y, 0);
        let mut sum = first.copy();
        let project = |(index, linear): (usize, &Linear)| {
            let (raw, extra) = linear.forward(pass, &self.stream(y, index + 1), None);
            elementwise::add(&mut sum, &rms_match::forward(&raw, &first));
            (raw, extra)
        };
        let saved = self.0.iter().enumerate().map(project).collect();
        elementwise::scale(&mut sum, self.share());
        (sum, Saved(saved))
    }

    /// From the gradient of what [`Projected::end`] gives to that of all streams.
    pub fn end_backward(
        &self,
        pass: &Pass<'_>,
        y: &Activation,
        saved: Saved,
        mut d: Activation,
        grads: &mut Grads<'_>,
    ) -> Activation {
        elementwise::scale(&mut d, self.share());
        let (first, mut d_first) = (self.stream(y, 0), d.copy());
        let back = |(index, (linear, (raw, extra))): (usize, (&Linear, (Activation, Option<linear::Saved>)))| {
            let d_raw = rms_match::backward(&raw, &first, &d, &mut d_first);
            linear.backward_through(pass, self.stream(y, index + 1), extra.as_ref(), &d_raw, grads)
        };
        let others: Vec<Activation> = self.0.iter().zip(saved.0).enumerate().map(back).collect();
        let all: Vec<&Activation> = std::iter::once(&d_first).chain(&others).collect();
        Activation::side_by_side(&all)
    }

    fn stream(&self, y: &Activation, index: usize) -> Activation {
        let hidden = y.features() / (self.0.len() + 1);
        y.columns(index * hidden..(index + 1) * hidden)
    }

    fn share(&self) -> f32 {
        1.0 / (self.0.len() + 1) as f32
    }
}
