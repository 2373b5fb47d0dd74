//! Experts beside an MLP, each followed by a norm (Gemma 4):
//!
//! ```text
//! y = norm_1(mlp(h)) + norm_2(experts(norm_e(x)))      with the router on  r = norm(x) * scale * hidden^-1/2
//! ```
//!
//! `x` is the stream, and `h` what the branch's norm makes of it. Transformers, `Gemma4TextDecoderLayer`, `Gemma4TextRouter`.
use super::grads::Grads;
use super::linear::{self, Linear};
use super::mlp::{self, Mlp};
use super::moe::{self, Moe};
use super::norm::Norm;
use super::pass::Pass;
use super::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;

/// A dense MLP and a mixture of experts side by side.
#[derive(Debug)]
pub struct MlpAndExperts {
    pub mlp: Mlp,
    /// The norm on the MLP's output.
    pub mlp_norm: Norm,
    /// The norm on the router's input. Its gain is the router's `scale`.
    pub router_norm: Norm,
    /// Factor on what the router takes.
    pub router_scale: f32,
    /// The norm on the experts' input.
    pub experts_norm: Norm,
    pub moe: Moe,
    /// The norm on the experts' output.
    pub moe_norm: Norm,
}

/// What forward keeps for backward; roots of sums stay in f32.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    mlp: mlp::Saved<T>,
    down: Option<linear::Saved<T>>,
    pub moe: moe::Saved<T>,
    /// The input and `rstd` of the norms on the outputs: the MLP's, then the experts'.
    behind: [(T, Activation); 2],
    /// `rstd` of the stream, the same for both norms on it.
    rstd: Activation,
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved {
            mlp: self.mlp.map(f),
            down: self.down.map(|extra| extra.map(f)),
            moe: self.moe.map(f),
            behind: self.behind.map(|(input, rstd)| (f(input), rstd)),
            rstd: self.rstd,
        }
    }
}

impl MlpAndExperts {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let norms = [&mut self.mlp_norm, &mut self.router_norm, &mut self.experts_norm, &mut self.moe_norm];
        let norms = norms.into_iter().flat_map(Norm::weights_mut);
        self.mlp.weights_mut().chain(norms).chain(self.moe.weights_mut()).collect()
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        let norms = [&self.mlp_norm, &self.router_norm, &self.experts_norm, &self.moe_norm];
        self.mlp.linears().any(Linear::trains) || self.moe.trains() || norms.into_iter().any(Norm::trains)
    }

    /// The router's input.
    fn seen(&self, pass: &Pass<'_>, x: &Activation, rstd: &Activation) -> Activation {
        let mut seen = self.router_norm.again(pass, x, rstd);
        elementwise::scale(&mut seen, self.router_scale);
        seen
    }

    /// The branch's output `[rows, hidden]` for the stream `x` and its normed form `h`.
    pub fn forward(&self, pass: &Pass<'_>, x: &Activation, h: &Activation) -> (Activation, Saved) {
        let saved = self.mlp.forward(pass, h);
        let (dense, down) = self.mlp.down.forward(pass, &self.mlp.middle(&saved), None);
        let rstd = self.experts_norm.stats(x, 1);
        let (sparse, moe) = {
            let (seen, input) = (self.seen(pass, x, &rstd), self.experts_norm.again(pass, x, &rstd));
            self.moe.forward_routed(pass, &seen, &input)
        };
        let (mut y, dense_rstd) = self.mlp_norm.forward(pass, &dense, 1);
        let (other, sparse_rstd) = self.moe_norm.forward(pass, &sparse, 1);
        elementwise::add(&mut y, &other);
        (y, Saved { mlp: saved, down, moe, behind: [(dense, dense_rstd), (sparse, sparse_rstd)], rstd })
    }

    /// From the gradient of the output to that of `x`, without what flows through `h`, and to that of `h`.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        (x, h): (&Activation, &Activation),
        saved: Saved,
        dy: &Activation,
        grads: &mut Grads<'_>,
    ) -> (Activation, Activation) {
        let Saved { mlp: mut of_mlp, down, moe, behind: [(dense, dense_rstd), (sparse, sparse_rstd)], rstd } = saved;
        let mut d_sparse = sparse.like();
        self.moe_norm.backward(pass, &sparse, &sparse_rstd, dy, Some((&mut d_sparse, false)), grads);
        drop(sparse);
        let (seen, input) = (self.seen(pass, x, &rstd), self.experts_norm.again(pass, x, &rstd));
        let (mut d_seen, d_input) = self.moe.backward_routed(pass, (&seen, &input), moe, &d_sparse, grads);
        drop((seen, input, d_sparse));
        let mut dx = x.like();
        self.experts_norm.backward(pass, x, &rstd, &d_input, Some((&mut dx, false)), grads);
        elementwise::scale(&mut d_seen, self.router_scale);
        self.router_norm.backward(pass, x, &rstd, &d_seen, Some((&mut dx, true)), grads);
        drop((d_seen, d_input));
        let mut d_dense = dense.like();
        self.mlp_norm.backward(pass, &dense, &dense_rstd, dy, Some((&mut d_dense, false)), grads);
        drop(dense);
        self.mlp.backward_down(pass, &mut of_mlp, None, down.as_ref(), &d_dense, grads);
        (dx, self.mlp.backward_gate_up(pass, h, of_mlp, grads))
    }
}
