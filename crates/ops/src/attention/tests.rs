//! Both passes against the definition, in f64.
use super::*;
use crate::panel::Pool;
use crate::spans::{full_spans, row_spans};
use crate::testing::{check_gradient, each_level, numbers};

/// The plain definition on row-major f64: softmax over the visible keys of each query, then their values' mean.
fn reference(q: &[f64], k: &[f64], v: &[f64], spans: &[Span], heads: Heads, how: Scores) -> Vec<f64> {
    let (wide, narrow) = (heads.query * heads.dim, heads.kv * heads.dim);
    let mut out = vec![0.0; q.len()];
    for span in spans {
        for (index, &position) in span.positions.iter().enumerate() {
            let row = span.query_start + index;
            for head in 0..heads.query {
                let kv = head / (heads.query / heads.kv);
                let score = |j: usize| {
                    let key = &k[(span.key_start + j) * narrow + kv * heads.dim..][..heads.dim];
                    let query = &q[row * wide + head * heads.dim..][..heads.dim];
                    let score = query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() * f64::from(how.scale);
                    how.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                };
                let first = how.window.map_or(0, |window| (position + 1).saturating_sub(window));
                let scores: Vec<f64> = (first..=position).map(score).collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                for (j, s) in scores.iter().enumerate() {
                    for d in 0..heads.dim {
                        out[row * wide + head * heads.dim + d] +=
                            (s - top).exp() / total * v[(span.key_start + first + j) * narrow + kv * heads.dim + d];
                    }
                }
            }
        }
    }
    out
}

fn check(heads: Heads, cu_seqlens: &[usize], rows: Option<&[usize]>, how: Scores) {
    let tokens = cu_seqlens[cu_seqlens.len() - 1];
    let spans = rows.map_or_else(|| full_spans(cu_seqlens), |rows| row_spans(cu_seqlens, rows));
    let queries = rows.map_or(tokens, <[usize]>::len);
    let (wide, narrow) = (heads.query * heads.dim, heads.kv * heads.dim);
    let q = numbers(1, queries * wide).iter().map(|x| x * 2.0).collect::<Vec<_>>();
    let (k, v, weight) = (numbers(2, tokens * narrow), numbers(3, tokens * narrow), numbers(4, queries * wide));
    let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let expected = reference(&double(&q), &double(&k), &double(&v), &spans, heads, how);
    let pool = Pool::new();
    let act = |x: &[f32], features| Act::from_rows(&pool, x, features);
    let (qa, ka, va) = (act(&q, wide), act(&k, narrow), act(&v, narrow));
    let (o, lse) = forward(&qa, &ka, &va, &spans, heads, how);
    for (got, want) in o.to_rows().iter().zip(&expected) {
        assert!((f64::from(*got) - want).abs() < 2e-5, "{got} != {want}");
    }
    let weights = act(&weight, wide);
    let (dq, dk, dv) = backward(Saved { q: &qa, k: &ka, v: &va, o: &o, lse: &lse }, &weights, &spans, heads, how);
    let loss = |q: &[f64], k: &[f64], v: &[f64]| -> f64 {
        let out = reference(q, k, v, &spans, heads, how);
        out.iter().zip(&weight).map(|(o, &w)| o * f64::from(w)).sum()
    };
    check_gradient("dq", &q, &dq.to_rows(), |q| loss(q, &double(&k), &double(&v)));
    check_gradient("dk", &k, &dk.to_rows(), |k| loss(&double(&q), k, &double(&v)));
    check_gradient("dv", &v, &dv.to_rows(), |v| loss(&double(&q), &double(&k), v));
}

const PLAIN: Scores = Scores { scale: 0.7, softcap: None, window: None };

#[test]
fn equals_the_definition_and_its_finite_differences_on_odd_sizes() {
    each_level(|_| {
        check(Heads { query: 1, kv: 1, dim: 2 }, &[0, 1], None, PLAIN);
        check(Heads { query: 4, kv: 2, dim: 6 }, &[0, 5, 6, 23, 40], None, PLAIN);
        check(Heads { query: 3, kv: 1, dim: 24 }, &[0, 37], None, PLAIN);
        check(Heads { query: 2, kv: 2, dim: 10 }, &[0, 17, 50], Some(&[2, 9, 16, 30, 31, 49]), PLAIN);
        check(Heads { query: 2, kv: 1, dim: 4 }, &[0, 9, 20], Some(&[12, 13]), PLAIN);
    });
}

#[test]
fn windows_and_caps_equal_the_definition() {
    each_level(|_| {
        for window in [1, 6, 17, 40] {
            let how = Scores { window: Some(window), ..PLAIN };
            check(Heads { query: 2, kv: 1, dim: 6 }, &[0, 5, 6, 50], None, how);
            check(Heads { query: 2, kv: 2, dim: 4 }, &[0, 17, 70], Some(&[2, 9, 16, 30, 69]), how);
        }
        let capped = Scores { softcap: Some(0.5), ..PLAIN };
        check(Heads { query: 4, kv: 2, dim: 6 }, &[0, 5, 6, 23, 40], None, capped);
        check(Heads { query: 1, kv: 1, dim: 4 }, &[0, 37], None, Scores { window: Some(6), ..capped });
    });
}

#[test]
fn long_sequences_cross_every_block() {
    each_level(|_| {
        let heads = Heads { query: 1, kv: 1, dim: 4 };
        check(heads, &[0, 300], None, PLAIN);
        check(heads, &[0, 600], None, Scores { window: Some(20), ..PLAIN });
        // Queries so far apart that blocks between them are hidden from all.
        check(heads, &[0, 600], Some(&[3, 290, 599]), Scores { window: Some(9), ..PLAIN });
    });
}
