//! The definition in f64.
use super::Function;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, PI};

/// `erf x` by its Taylor series, which has 11 digits for `|x| < 3`.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * FRAC_2_SQRT_PI
}

pub(super) fn forward(function: Function, x: &[f64]) -> Vec<f64> {
    let of = |&x: &f64| match function {
        Function::Gelu => 0.5 * x * (1.0 + erf(x * FRAC_1_SQRT_2)),
        Function::GeluTanh => 0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh()),
        Function::QuickGelu => x / (1.0 + (-1.702 * x).exp()),
        Function::Silu => x / (1.0 + (-x).exp()),
        Function::Relu => x.max(0.0),
        Function::Relu2 => x.max(0.0).powi(2),
        Function::Tanh => x.tanh(),
    };
    x.iter().map(of).collect()
}
