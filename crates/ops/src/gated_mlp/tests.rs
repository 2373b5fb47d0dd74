//! Both activations against their definition and finite differences.
use super::*;
use crate::testing::{Engine, check_gradient, each_engine, numbers};

#[test]
fn equals_the_definition_and_its_finite_differences() {
    let run = |engine: Engine, act: Gate| {
        let (tokens, features) = (19, 5);
        let gate: Vec<f32> = numbers(1, tokens * features).iter().map(|x| x * 8.0).collect();
        let (up, seed) = (numbers(2, tokens * features), numbers(3, tokens * features));
        let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let pool = engine.pool();
        let panels = |x: &[f32]| Activation::from_rows(&pool, x, features);
        let (mut ga, mut ua) = (panels(&gate), panels(&up));
        for (got, want) in
            forward(act, &ga, &ua).to_rows().iter().zip(reference::forward(act, &double(&gate), &double(&up)))
        {
            assert!((f64::from(*got) - want).abs() < 2e-6);
        }
        backward(act, &mut ga, &mut ua, &panels(&seed));
        let loss = |g: &[f64], u: &[f64]| -> f64 {
            reference::forward(act, g, u).iter().zip(&seed).map(|(o, &s)| o * f64::from(s)).sum()
        };
        check_gradient("gate", &gate, &ga.to_rows(), |g| loss(g, &double(&up)));
        check_gradient("up", &up, &ua.to_rows(), |u| loss(&double(&gate), u));
    };
    let all = [
        Gate::Silu,
        Gate::Gelu,
        Gate::GeluTanh,
        Gate::Sigmoid,
        Gate::Identity,
        Gate::Clamped { alpha: 1.702, limit: 0.625 },
    ];
    each_engine(|engine| all.into_iter().for_each(|act| run(engine, act)));
}
