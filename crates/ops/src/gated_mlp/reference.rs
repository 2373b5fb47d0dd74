//! The definition in f64.
use super::Gate;

/// `erf x` by Simpson's rule, which has 9 digits for `|x| < 6`.
fn erf(x: f64) -> f64 {
    let (parts, bell) = (1000, |t: f64| (-t * t).exp());
    let step = x / f64::from(parts);
    let inner = |at: i32| bell(step * f64::from(at)) * f64::from(2 + 2 * (at % 2));
    let sum: f64 = (1..parts).map(inner).sum();
    (bell(0.0) + sum + bell(x)) * step / 3.0 * std::f64::consts::FRAC_2_SQRT_PI
}

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
        Gate::Gelu => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Gate::GeluTanh => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh()),
        Gate::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Gate::Identity | Gate::Clamped { .. } => x,
    };
    gate.iter().zip(up).map(|(&g, u)| act(g) * u).collect()
}
