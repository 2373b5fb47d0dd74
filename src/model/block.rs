//! One decoder block: attention and MLP, each a branch beside the residual stream.
//!
//! Llama's form is `x2 = x + O(attention(norm(x)))`, `y = x2 + D(act(G h) * U h)` with `h = norm(x2)`. Families differ
//! in where the norms are (see `NormPlacement`) and in how a branch joins the stream.
use super::attention::{self, Attention};
use super::linear::{Input, Linear, Low};
use super::mlp::{self, Mlp};
use super::norm::Norm;
use super::pass::{Pass, Rows};
use crate::ops::panel::Act;

/// How a branch joins the residual stream.
#[derive(Debug)]
pub enum Join {
    /// `x + y`, in one with the branch's last product.
    Plain,
    /// `x + factor y`. Granite.
    Scaled(f32),
    /// `x + norm(y)`. Gemma 2, OLMo 2.
    Normed(Norm),
}

/// What a norm behind a branch needs in backward: its input and `rstd`.
type Raw<T = Act> = Option<(T, Act)>;

impl Join {
    /// The stream `x` with the branch that ends in `last(input)`.
    fn forward(&self, pass: &Pass<'_>, last: &Linear, input: &Act, x: &Act) -> (Act, Option<Low>, Raw) {
        match self {
            Self::Plain => {
                let (y, low) = last.forward(pass, input, Some(x));
                (y, low, None)
            }
            Self::Scaled(factor) => {
                let (mut y, low) = last.forward(pass, input, None);
                y.data_mut().iter_mut().zip(x.data()).for_each(|(y, x)| *y = *y * factor + x);
                (y, low, None)
            }
            Self::Normed(norm) => {
                let (raw, low) = last.forward(pass, input, None);
                let (mut y, rstd) = norm.forward(pass, &raw, 1);
                y.add(x);
                (y, low, Some((raw, rstd)))
            }
        }
    }

    /// The gradient of `last`'s output, where it isn't `dy` itself, that of the joined stream.
    fn backward(&self, pass: &Pass<'_>, raw: Raw, dy: &Act, grads: &mut [f32]) -> Option<Act> {
        let mut d_last = (!matches!(self, Self::Plain)).then(|| dy.like())?;
        match (self, raw) {
            (Self::Normed(norm), Some((raw, rstd))) => {
                norm.backward(pass, (&raw, &rstd), dy, Some((&mut d_last, false)), grads);
            }
            (Self::Scaled(factor), _) => {
                d_last.data_mut().iter_mut().zip(dy.data()).for_each(|(d, dy)| *d = factor * dy);
            }
            _ => unreachable!("a norm keeps its input"),
        }
        Some(d_last)
    }

    fn trains(&self) -> bool {
        matches!(self, Self::Normed(norm) if norm.weight.trained().is_some())
    }
}

/// The block's weights.
#[derive(Debug)]
pub struct Block {
    /// Before attention.
    pub attention_norm: Option<Norm>,
    /// The first branch.
    pub attention: Attention,
    /// How it joins.
    pub attention_join: Join,
    /// Before the MLP.
    pub mlp_norm: Option<Norm>,
    /// The second branch.
    pub mlp: Mlp,
    /// How it joins.
    pub mlp_join: Join,
}

/// What forward keeps for backward, beside the block's input.
#[derive(Debug)]
pub struct Saved<T = Act> {
    rstd1: Option<Act>,
    attention: attention::Saved<T>,
    attention_raw: Raw<T>,
    x2: T,
    rstd2: Option<Act>,
    mlp: mlp::Saved<T>,
    mlp_raw: Raw<T>,
    low: [Option<Low<T>>; 2],
}

impl<T> Saved<T> {
    /// The same in another form.
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let raw = |raw: Raw<T>| raw.map(|(input, rstd)| (f(input), rstd));
        Saved {
            rstd1: self.rstd1,
            attention: self.attention.map(f),
            attention_raw: raw(self.attention_raw),
            x2: f(self.x2),
            rstd2: self.rstd2,
            mlp: self.mlp.map(f),
            mlp_raw: raw(self.mlp_raw),
            low: self.low.map(|low| low.map(|low| low.map(f))),
        }
    }
}

impl Block {
    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        let norm = |norm: &Option<Norm>| norm.as_ref().is_some_and(|norm| norm.weight.trained().is_some());
        self.attention.linears().chain(self.mlp.linears()).any(Linear::trains)
            || self.attention.trains_norms()
            || norm(&self.attention_norm)
            || norm(&self.mlp_norm)
            || self.attention_join.trains()
            || self.mlp_join.trains()
    }

    /// `[tokens, hidden]` to `[rows, hidden]`, where the rows are all tokens unless `rows` picks some.
    /// `all` holds the rotary tables of every token.
    pub fn forward(&self, pass: &Pass<'_>, x: &Act, all: &Rows, rows: &Rows) -> (Act, Saved) {
        let (h, rstd1) = self.attention_norm.as_ref().map(|norm| norm.forward(pass, x, 1)).unzip();
        let attention = self.attention.forward(pass, h.as_ref().unwrap_or(x), all, rows);
        drop(h);
        let picked = rows.picked.as_ref().map(|picked| x.gather(picked));
        let stream = picked.as_ref().unwrap_or(x);
        let (x2, o_low, attention_raw) = self.attention_join.forward(pass, &self.attention.o, &attention.mixed, stream);
        drop(picked);
        let (h, rstd2) = self.mlp_norm.as_ref().map(|norm| norm.forward(pass, &x2, 1)).unzip();
        let mlp = self.mlp.forward(pass, h.as_ref().unwrap_or(&x2));
        drop(h);
        let (y, down_low, mlp_raw) = self.mlp_join.forward(pass, &self.mlp.down, &self.mlp.middle(&mlp), &x2);
        (y, Saved { rstd1, attention, attention_raw, x2, rstd2, mlp, mlp_raw, low: [o_low, down_low] })
    }

    /// From `dy [rows, hidden]` to the gradient of `x [tokens, hidden]`, or none if `want_dx` is false. Adds to `grads`.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        x: &Act,
        saved: Saved,
        dy: Act,
        (all, rows): (&Rows, &Rows),
        want_dx: bool,
        grads: &mut [f32],
    ) -> Option<Act> {
        let Saved { rstd1, attention, attention_raw, x2, rstd2, mut mlp, mlp_raw, low: [o_low, down_low] } = saved;
        // MLP.
        let mut dx2 = dy;
        {
            let d_down = self.mlp_join.backward(pass, mlp_raw, &dx2, grads);
            self.mlp.backward_down(pass, &mut mlp, down_low.as_ref(), d_down.as_ref().unwrap_or(&dx2), grads);
        }
        if let (Some(norm), Some(rstd2)) = (&self.mlp_norm, &rstd2) {
            let h = norm.again(pass, &x2, rstd2);
            let dh = self.mlp.backward_gate_up(pass, &h, mlp, grads);
            drop(h);
            norm.backward(pass, (&x2, rstd2), &dh, Some((&mut dx2, true)), grads);
        } else {
            dx2.add(&self.mlp.backward_gate_up(pass, &x2, mlp, grads));
        }
        drop((x2, rstd2));
        // Attention.
        let mut d_mixed = attention.mixed.like();
        {
            let d_o = self.attention_join.backward(pass, attention_raw, &dx2, grads);
            let dy = d_o.as_ref().unwrap_or(&dx2);
            let input = Input::new(&attention.mixed);
            self.attention.o.backward(pass, &input, o_low.as_ref(), dy, Some((&mut d_mixed, false)), grads);
        }
        let projected = self.attention.backward_mix(pass, attention, d_mixed, (all, rows), grads);
        let trains_norm = self.attention_norm.as_ref().is_some_and(|norm| norm.weight.trained().is_some());
        let want_dh = want_dx || trains_norm;
        let normed = self.attention_norm.as_ref().zip(rstd1.as_ref());
        let h = normed.map(|(norm, rstd)| norm.again(pass, x, rstd));
        let h = h.as_ref().unwrap_or(x);
        let dh = self.attention.backward_projections(pass, h, projected, rows, want_dh, grads)?;
        let mut dx = want_dx.then(|| match &rows.picked {
            Some(picked) => dx2.scatter(picked, x.tokens()),
            None => dx2,
        });
        match normed {
            Some((norm, rstd)) => norm.backward(pass, (x, rstd), &dh, dx.as_mut().map(|dx| (dx, true)), grads),
            None => dx.iter_mut().for_each(|dx| dx.add(&dh)),
        }
        dx
    }
}
