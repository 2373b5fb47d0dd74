//! Every function against its definition and finite differences.
use super::*;
use crate::testing::{Engine, check_gradient, each_engine, f64s, near, numbers};

#[test]
fn equals_the_definition_and_its_finite_differences() {
    use Function::{Gelu, GeluTanh, QuickGelu, Relu, Relu2, Silu, Tanh};
    let run = |engine: Engine, function: Function| {
        let (tokens, features) = (19, 5);
        let x: Vec<f32> = numbers(1, tokens * features).iter().map(|x| x * 4.0).collect();
        let seed = numbers(3, tokens * features);
        let pool = engine.pool();
        let panels = |x: &[f32]| Activation::from_rows(&pool, x, features);
        let mut xa = panels(&x);
        let found = forward(function, &xa).to_rows();
        near(&format!("{function:?}"), &found, &reference::forward(function, &f64s(&x)), 2e-6);
        backward(function, &mut xa, &panels(&seed));
        let loss = |x: &[f64]| -> f64 {
            reference::forward(function, x).iter().zip(&seed).map(|(y, &s)| y * f64::from(s)).sum()
        };
        check_gradient(&format!("d{function:?}"), &x, &xa.to_rows(), loss);
    };
    each_engine(|engine| {
        for function in [Gelu, GeluTanh, QuickGelu, Silu, Relu, Relu2, Tanh] {
            run(engine, function);
        }
    });
}
