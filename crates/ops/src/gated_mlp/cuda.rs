//! The middle of a gated MLP on a GPU.
use super::Gate;
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};

static KERNELS: Typed = Typed::new("gated_mlp", include_str!("gated_mlp.cu"));

/// The function as three kernel arguments: its number, `alpha` and `limit`.
fn code(gate: Gate) -> [Arg; 3] {
    let (code, alpha, limit) = match gate {
        Gate::Silu => (0i32, 0.0f32, 0.0f32),
        Gate::GeluTanh => (1, 0.0, 0.0),
        Gate::Sigmoid => (2, 0.0, 0.0),
        Gate::Identity => (3, 0.0, 0.0),
        Gate::Clamped { alpha, limit } => (4, alpha, limit),
        Gate::Gelu => (5, 0.0, 0.0),
    };
    [code.into(), alpha.into(), limit.into()]
}

pub(super) fn forward(act: Gate, gate: &Activation, up: &Activation, out: &mut Activation) {
    let count = gate.tokens() * gate.features();
    let [function, alpha, limit] = code(act);
    let args = [gate.into(), up.into(), out.into(), function, alpha, limit, Arg::count(count)];
    cuda::launch(
        gate.device(),
        KERNELS.same(&[gate, up, out]),
        "gated_mlp_forward",
        Grid::packs(count, gate.number()),
        &args,
    );
}

pub(super) fn backward(act: Gate, gate: &mut Activation, up: &mut Activation, d_out: &Activation) {
    let count = d_out.tokens() * d_out.features();
    let [function, alpha, limit] = code(act);
    let args = [gate.into(), up.into(), d_out.into(), function, alpha, limit, Arg::count(count)];
    cuda::launch(
        d_out.device(),
        KERNELS.same(&[gate, up, d_out]),
        "gated_mlp_backward",
        Grid::packs(count, d_out.number()),
        &args,
    );
}
