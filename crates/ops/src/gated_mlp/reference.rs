//! The definition in f64.
use super::Gate;

pub(super) fn forward(act: Gate, gate: &[f64], up: &[f64]) -> Vec<f64> {
    if let Gate::Clamped { alpha, limit } = act {
        let (alpha, limit) = (f64::from(alpha), f64::from(limit));
        let one = |(g, u): (&f64, &f64)| {
            let (g, u) = (g.min(limit), u.clamp(-limit, limit));
            (u + 1.0) * g / (1.0 + (-alpha * g).exp())
        };
        return gate.iter().zip(up).map(one).collect();
    }
    let act = |x: f64| match act {
        Gate::Silu => x / (1.0 + (-x).exp()),
        Gate::GeluTanh => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh()),
        Gate::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Gate::Identity | Gate::Clamped { .. } => x,
    };
    gate.iter().zip(up).map(|(&g, u)| act(g) * u).collect()
}
