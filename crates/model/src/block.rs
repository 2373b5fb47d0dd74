//! One decoder block: attention and MLP, each a branch beside the residual stream.
//!
//! Llama's form is `x2 = x + O(attention(norm(x)))`, `y = x2 + D(act(G h) * U h)` with `h = norm(x2)`. Families differ
//! in where the norms are (see `NormPlacement`) and in how a branch joins the stream.
use super::attention::{self, Attention};
use super::grads::Grads;
use super::linear::{self, Input, Linear};
use super::mlp::{self, Mlp};
use super::moe::{self, Moe};
use super::norm::Norm;
use super::pass::{BlockRows, Pass, Rows};
use super::weight::Weight;
use tunesmith_ops::elementwise;
use tunesmith_ops::panel::Act;
use tunesmith_ops::route::Routing;

/// How a branch joins the residual stream.
#[derive(Debug)]
pub enum Join {
    /// `x + y`, in one with the branch's last product.
    Plain,
    /// `x + factor y`: Granite has a residual multiplier.
    Scaled(f32),
    /// `x + norm(y)`. Gemma 2, OLMo 2.
    Normed(Norm),
}

/// What a norm behind a branch needs in backward: its input and `rstd`.
type Raw<T = Act> = Option<(T, Act)>;

impl Join {
    /// The stream `x` with the branch that ends in `last(input)`.
    fn forward(&self, pass: &Pass<'_>, last: &Linear, input: &Act, x: &Act) -> (Act, Option<linear::Saved>, Raw) {
        if let Self::Plain = self {
            let (y, extra) = last.forward(pass, input, Some(x));
            return (y, extra, None);
        }
        let (y, extra) = last.forward(pass, input, None);
        let (y, raw) = self.add(pass, y, x);
        (y, extra, raw)
    }

    /// The stream `x` with the branch that gave `y`.
    fn add(&self, pass: &Pass<'_>, mut y: Act, x: &Act) -> (Act, Raw) {
        match self {
            Self::Plain => {
                elementwise::add(&mut y, x);
                (y, None)
            }
            Self::Scaled(factor) => {
                elementwise::scale_add(&mut y, *factor, x);
                (y, None)
            }
            Self::Normed(norm) => {
                let (mut normed, rstd) = norm.forward(pass, &y, 1);
                elementwise::add(&mut normed, x);
                (normed, Some((y, rstd)))
            }
        }
    }

    /// The gradient of `last`'s output, where it isn't `dy` itself, that of the joined stream.
    fn backward(&self, pass: &Pass<'_>, raw: Raw, dy: &Act, grads: &mut Grads<'_>) -> Option<Act> {
        match (self, raw) {
            (Self::Plain, _) => None,
            (Self::Scaled(factor), _) => Some(elementwise::scaled(dy, *factor)),
            (Self::Normed(norm), Some((raw, rstd))) => {
                let mut d_last = dy.like();
                norm.backward(pass, &raw, &rstd, dy, Some((&mut d_last, false)), grads);
                Some(d_last)
            }
            (Self::Normed(_), None) => unreachable!("a norm keeps its input"),
        }
    }

    fn trains(&self) -> bool {
        matches!(self, Self::Normed(norm) if norm.weight.trained().is_some())
    }
}

#[derive(Debug)]
pub enum Feed {
    /// One MLP for every token.
    Dense(Box<Mlp>),
    Sparse(Box<Moe>),
}

/// What the second branch keeps for backward.
#[derive(Debug)]
enum FeedSaved<T> {
    /// With what `down` took, where it is kept.
    Dense(mlp::Saved<T>, Option<linear::Saved<T>>, Option<T>),
    Sparse(moe::Saved<T>),
}

impl<T> FeedSaved<T> {
    fn map<U>(self, f: &impl Fn(T) -> U) -> FeedSaved<U> {
        match self {
            Self::Dense(saved, extra, middle) => {
                FeedSaved::Dense(saved.map(f), extra.map(|extra| extra.map(f)), middle.map(f))
            }
            Self::Sparse(saved) => FeedSaved::Sparse(saved.map(f)),
        }
    }
}

#[derive(Debug)]
pub struct Block {
    pub attention_norm: Option<Norm>,
    pub attention: Attention,
    pub attention_join: Join,
    pub mlp_norm: Option<Norm>,
    pub feed: Feed,
    pub mlp_join: Join,
}

/// What forward keeps for backward, beside the block's input.
#[derive(Debug)]
pub struct Saved<T = Act> {
    /// The normed inputs of both branches, where they are kept.
    normed: [Option<T>; 2],
    rstd1: Option<Act>,
    attention: attention::Saved<T>,
    attention_raw: Raw<T>,
    x2: T,
    rstd2: Option<Act>,
    feed: FeedSaved<T>,
    mlp_raw: Raw<T>,
    o_extra: Option<linear::Saved<T>>,
}

impl<T> Saved<T> {
    /// The same in another form.
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let raw = |raw: Raw<T>| raw.map(|(input, rstd)| (f(input), rstd));
        Saved {
            normed: self.normed.map(|normed| normed.map(f)),
            rstd1: self.rstd1,
            attention: self.attention.map(f),
            attention_raw: raw(self.attention_raw),
            x2: f(self.x2),
            rstd2: self.rstd2,
            feed: self.feed.map(f),
            mlp_raw: raw(self.mlp_raw),
            o_extra: self.o_extra.map(|extra| extra.map(f)),
        }
    }

    /// Where the tokens went, in a block of experts.
    pub const fn routing(&self) -> Option<&Routing> {
        match &self.feed {
            FeedSaved::Dense(..) => None,
            FeedSaved::Sparse(saved) => Some(&saved.routing),
        }
    }
}

impl Block {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let joins = [&mut self.attention_join, &mut self.mlp_join];
        let joins = joins.into_iter().filter_map(|join| match join {
            Join::Normed(norm) => Some(norm),
            Join::Plain | Join::Scaled(_) => None,
        });
        let norms = self.attention_norm.iter_mut().chain(&mut self.mlp_norm).chain(joins).map(|norm| &mut norm.weight);
        let feed = match &mut self.feed {
            Feed::Dense(mlp) => mlp.weights_mut().collect(),
            Feed::Sparse(moe) => moe.weights_mut(),
        };
        self.attention.weights_mut().into_iter().chain(norms).chain(feed).collect()
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        let norm = |norm: &Option<Norm>| norm.as_ref().is_some_and(|norm| norm.weight.trained().is_some());
        let feed = match &self.feed {
            Feed::Dense(mlp) => mlp.linears().any(Linear::trains),
            Feed::Sparse(moe) => moe.linears().any(Linear::trains),
        };
        feed || self.attention.linears().any(Linear::trains)
            || self.attention.trains_norms()
            || norm(&self.attention_norm)
            || norm(&self.mlp_norm)
            || self.attention_join.trains()
            || self.mlp_join.trains()
    }

    /// `[tokens, hidden]` to `[rows, hidden]`: the rows are all tokens, unless `rows.outputs` picks some.
    pub fn forward(&self, pass: &Pass<'_>, x: &Act, rows: BlockRows<'_>) -> (Act, Saved) {
        self.forward_keeping(pass, x, rows, false)
    }

    /// As [`Block::forward`]; with `whole` it also keeps what backward would else compute again at little cost: the normed
    /// inputs of both branches, and what the MLP's last product takes.
    pub fn forward_keeping(&self, pass: &Pass<'_>, x: &Act, rows: BlockRows<'_>, whole: bool) -> (Act, Saved) {
        self.forward_by(pass, x, |h| self.attention.forward(pass, h, rows), rows.outputs, whole)
    }

    /// As [`Block::forward_keeping`], with the attention branch up to its output projection given.
    pub fn forward_by(
        &self,
        pass: &Pass<'_>,
        x: &Act,
        attend: impl FnOnce(&Act) -> attention::Saved,
        rows: &Rows,
        whole: bool,
    ) -> (Act, Saved) {
        let (h, rstd1) = self.attention_norm.as_ref().map(|norm| norm.forward(pass, x, 1)).unzip();
        let attention = attend(h.as_ref().unwrap_or(x));
        let normed1 = h.filter(|_| whole);
        let picked = rows.picked.as_ref().map(|picked| x.gather(picked));
        let stream = picked.as_ref().unwrap_or(x);
        let (x2, o_extra, attention_raw) =
            self.attention_join.forward(pass, &self.attention.o, &attention.mixed, stream);
        drop(picked);
        let (h, rstd2) = self.mlp_norm.as_ref().map(|norm| norm.forward(pass, &x2, 1)).unzip();
        let normed2;
        let (y, feed, mlp_raw) = match &self.feed {
            Feed::Dense(mlp) => {
                let saved = mlp.forward(pass, h.as_ref().unwrap_or(&x2));
                normed2 = h.filter(|_| whole);
                let middle = mlp.middle(&saved);
                let (y, extra, raw) = self.mlp_join.forward(pass, &mlp.down, &middle, &x2);
                (y, FeedSaved::Dense(saved, extra, whole.then_some(middle)), raw)
            }
            Feed::Sparse(moe) => {
                let (y, saved) = moe.forward(pass, h.as_ref().unwrap_or(&x2));
                normed2 = h.filter(|_| whole);
                let (y, raw) = self.mlp_join.add(pass, y, &x2);
                (y, FeedSaved::Sparse(saved), raw)
            }
        };
        let normed = [normed1, normed2];
        (y, Saved { normed, rstd1, attention, attention_raw, x2, rstd2, feed, mlp_raw, o_extra })
    }

    /// From `dy [rows, hidden]` to the gradient of `x [tokens, hidden]`, or none if `want_dx` is false. Adds to `grads`.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        x: &Act,
        saved: Saved,
        dy: Act,
        rows: BlockRows<'_>,
        want_dx: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Act> {
        let Saved { normed: [h1, h2], rstd1, attention, attention_raw, x2, rstd2, feed, mlp_raw, o_extra } = saved;
        // MLP.
        let mut dx2 = dy;
        let d_last = self.mlp_join.backward(pass, mlp_raw, &dx2, grads);
        let d_last = d_last.as_ref().unwrap_or(&dx2);
        let normed = self.mlp_norm.as_ref().zip(rstd2.as_ref());
        let again = || h2.or_else(|| normed.map(|(norm, rstd)| norm.again(pass, &x2, rstd)));
        let dh = match (&self.feed, feed) {
            (Feed::Dense(mlp), FeedSaved::Dense(mut saved, extra, middle)) => {
                mlp.backward_down(pass, &mut saved, middle, extra.as_ref(), d_last, grads);
                mlp.backward_gate_up(pass, again().as_ref().unwrap_or(&x2), saved, grads)
            }
            (Feed::Sparse(moe), FeedSaved::Sparse(saved)) => {
                moe.backward(pass, again().as_ref().unwrap_or(&x2), saved, d_last, grads)
            }
            _ => unreachable!("a branch keeps its own kind"),
        };
        match normed {
            Some((norm, rstd)) => norm.backward(pass, &x2, rstd, &dh, Some((&mut dx2, true)), grads),
            None => elementwise::add(&mut dx2, &dh),
        }
        drop(dh);
        drop((x2, rstd2));
        // Attention.
        let mut d_mixed = attention.mixed.like();
        {
            let d_o = self.attention_join.backward(pass, attention_raw, &dx2, grads);
            let dy = d_o.as_ref().unwrap_or(&dx2);
            let input = Input::new(&attention.mixed);
            self.attention.o.backward(pass, &input, o_extra.as_ref(), dy, Some((&mut d_mixed, false)), grads);
        }
        let (projected, extra) = self.attention.backward_mix(pass, attention, d_mixed, rows, grads);
        let trains_norm = self.attention_norm.as_ref().is_some_and(|norm| norm.weight.trained().is_some());
        let want_dh = want_dx || trains_norm;
        let normed = self.attention_norm.as_ref().zip(rstd1.as_ref());
        let h = h1.or_else(|| normed.map(|(norm, rstd)| norm.again(pass, x, rstd)));
        let h = h.as_ref().unwrap_or(x);
        let dh = self.attention.backward_projections(pass, h, projected, &extra, rows.outputs, want_dh, grads)?;
        drop(extra);
        let mut dx = want_dx.then(|| match &rows.outputs.picked {
            Some(picked) => dx2.scatter(picked, x.tokens()),
            None => dx2,
        });
        match normed {
            Some((norm, rstd)) => norm.backward(pass, x, rstd, &dh, dx.as_mut().map(|dx| (dx, true)), grads),
            None => dx.iter_mut().for_each(|dx| elementwise::add(dx, &dh)),
        }
        dx
    }
}
