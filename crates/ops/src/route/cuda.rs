//! What a GPU computes for routing: products for the gradients of experts' weights, which stay in its memory until the
//! host reads all of them at once; and the sigmoid gate of a shared expert.
use super::{Routing, cpu};
use crate::activation::cuda::{dot_to, times_by};
use crate::activation::{Activation, Pool};
use crate::cuda::{Arg, Grid, Typed, launch};
use std::sync::Arc;
use tunesmith_device::Array;

static KERNELS: Typed = Typed::new("route", include_str!("route.cu"));

/// The products of each expert's tokens, of all experts end to end: those with its outputs, then those with its bias.
#[derive(Debug)]
pub(super) struct Pending {
    /// Where each expert's tokens begin, with their total number at the end.
    firsts: Vec<usize>,
    /// How many products there are for each token and expert.
    each: usize,
    /// The products, allocated when the first of them is computed.
    sums: Option<Array<f32>>,
}

impl Pending {
    pub(super) fn new(routing: &Routing, biased: bool) -> Self {
        let mut firsts = vec![0];
        for expert in &routing.experts {
            firsts.push(firsts[firsts.len() - 1] + expert.tokens.len());
        }
        Self { firsts, each: 1 + usize::from(biased), sums: None }
    }

    fn pairs(&self) -> usize {
        self.firsts[self.firsts.len() - 1]
    }

    /// Computes product number `which` for each token of an expert: `sum_j x[t, j] y[t, j]`.
    pub(super) fn products(&mut self, which: usize, expert: usize, x: &Activation, y: &Activation) {
        assert!(which < self.each, "a product that there is room for");
        let (pairs, first, end) = (self.pairs(), self.firsts[expert], self.firsts[expert + 1]);
        let sums = self.sums.get_or_insert_with(|| Array::zeros(x.device(), self.each * pairs));
        dot_to(x, y, sums.slice_mut(which * pairs + first..which * pairs + end));
    }

    /// Adds the products, each divided by its token's weight, to the gradients `[tokens, experts]` of the weights. The
    /// host waits for them here.
    pub(super) fn read(&mut self, routing: &Routing, gradients: &mut [f32]) {
        let Some(sums) = self.sums.take() else { return };
        let sums = sums.read();
        for sums in sums.chunks_exact(self.pairs().max(1)) {
            for expert in 0..routing.experts.len() {
                let of = &sums[self.firsts[expert]..self.firsts[expert + 1]];
                cpu::add_products(routing, expert, of.iter().copied(), gradients);
            }
        }
    }
}

/// The gates, `[tokens, 1]` in float32, of `logits [tokens, 1]`.
pub(super) fn gates(logits: &Activation) -> Activation {
    let mut gates = logits.pool().act_f32(logits.tokens(), 1);
    let args = [logits.into(), (&mut gates).into(), Arg::count(logits.tokens())];
    launch(logits.device(), KERNELS.same(&[logits]), "route_gates", Grid::items(logits.tokens()), &args);
    gates
}

pub(super) fn gates_apply(gates: &Activation, y: &mut Activation) {
    times_by(y, gates.floats());
}

/// The gradient of the logits, `[tokens, 1]` in memory of `pool`.
pub(super) fn gates_backward(
    gates: &Activation,
    d_middle: &Activation,
    middle: &Activation,
    pool: &Arc<Pool>,
) -> Activation {
    let tokens = gates.tokens();
    let (mut sums, mut d_logits) = (Array::<f32>::zeros(gates.device(), tokens), pool.act(tokens, 1));
    dot_to(d_middle, middle, sums.view_mut());
    let args = [gates.into(), (&sums).into(), (&mut d_logits).into(), Arg::count(tokens)];
    let source = KERNELS.same(&[&d_logits]);
    launch(gates.device(), source, "route_gates_backward", Grid::items(tokens), &args);
    d_logits
}
