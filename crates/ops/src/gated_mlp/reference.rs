//! The definition in f64.
use super::Gate;

pub(super) fn forward(act: Gate, gate: &[f64], up: &[f64]) -> Vec<f64> {
    let act = |x: f64| match act {
        Gate::Silu => x / (1.0 + (-x).exp()),
        Gate::GeluTanh => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh()),
        Gate::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Gate::Identity => x,
    };
    gate.iter().zip(up).map(|(&g, u)| act(g) * u).collect()
}
