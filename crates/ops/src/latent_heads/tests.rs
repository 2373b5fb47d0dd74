//! Keys, values and their gradients against the definition and finite differences.
use super::*;
use crate::testing::{check_gradient, each_engine, f64s, near, numbers};

#[test]
fn equals_the_definition_and_its_finite_differences() {
    each_engine(|engine| {
        let pool = engine.pool();
        for how in [
            LatentHeads { heads: 4, nope: 12, rope: 4, value: 10 },
            LatentHeads { heads: 3, nope: 5, rope: 2, value: 9 },
            LatentHeads { heads: 1, nope: 1, rope: 6, value: 1 },
        ] {
            let LatentHeads { heads, nope, rope, value } = how;
            for tokens in [1, 16, 37] {
                let kv = numbers(1, tokens * heads * (nope + value));
                let k_rot = numbers(2, tokens * rope);
                let act = |rows: &[f32]| Activation::from_rows(&pool, rows, rows.len() / tokens);
                let (k, v) = forward(&act(&kv), &act(&k_rot), how);
                let (want_k, want_v) = reference::forward(&f64s(&kv), &f64s(&k_rot), how);
                near("k", &k.to_rows(), &want_k, 0.0);
                near("v", &v.to_rows(), &want_v, 0.0);

                // The loss is the sum of the results, each times its seed: the seeds are their gradients.
                let seeds = (numbers(3, want_k.len()), numbers(4, want_v.len()));
                let (d_kv, d_k_rot) = backward(&act(&seeds.0), &act(&seeds.1), how);
                let loss = |kv: &[f64], k_rot: &[f64]| -> f64 {
                    let (k, v) = reference::forward(kv, k_rot, how);
                    let sum = |of: &[f64], seeds: &[f32]| -> f64 {
                        of.iter().zip(seeds).map(|(&x, &seed)| x * f64::from(seed)).sum()
                    };
                    sum(&k, &seeds.0) + sum(&v, &seeds.1)
                };
                check_gradient("d_kv", &kv, &d_kv.to_rows(), |kv| loss(kv, &f64s(&k_rot)));
                check_gradient("d_k_rot", &k_rot, &d_k_rot.to_rows(), |k_rot| loss(&f64s(&kv), k_rot));
                // Lanes beyond the tokens stay zero in gradients.
                if engine.is_cpu() && !tokens.is_multiple_of(16) {
                    let rest = |of: &Activation| {
                        of.data()
                            .chunks_exact(16)
                            .rev()
                            .take(of.features())
                            .all(|lanes| lanes[tokens % 16..].iter().all(|&lane| lane == 0.0))
                    };
                    assert!(rest(&d_kv) && rest(&d_k_rot));
                }
            }
        }
    });
}
