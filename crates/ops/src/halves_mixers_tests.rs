//! Norms, functions, mixers and streams of a GPU in 16 bits: they compute in float32, so that each result is that of float32 on the same
//! numbers, rounded once. What is rounded on the way has a stated size.
use crate::activation::{Activation, Pool};
use crate::halves_tests::{array, run_in_each};
use crate::recurrence::State;
use crate::route::SigmoidGate;
use crate::{
    altup, causal_conv1d, clamp, gated_delta_rule, gaussian_topk, group_norm, layer_norm, mamba2, pointwise, rms_match,
};
use std::ops::Range;
use std::sync::Arc;

/// What was rounded to 16 bits of a result: the numbers themselves, and on the way numbers of at most this size in all.
#[derive(Clone, Copy)]
struct Rounded {
    stored: bool,
    before: f32,
}

/// A result in 16 bits of a computation in float32.
const ONCE: Rounded = Rounded { stored: true, before: 0.0 };
/// A result in float32.
const NEVER: Rounded = Rounded { stored: false, before: 0.0 };

type Results = Vec<(&'static str, Vec<f32>, Rounded)>;

/// Holds `op` in 16 bits against itself in float32.
fn compare(op: impl Fn(&Arc<Pool>, &dyn Fn(u64, usize) -> Vec<f32>) -> Results + Sync) {
    run_in_each(op, |(what, expected, rounded), (_, found, _), number, unit| {
        assert!(!expected.is_empty() && expected.len() == found.len(), "{what}");
        let largest = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        assert!(largest > 0.0, "{what} is nothing but zeros");
        for (index, (e, f)) in expected.iter().zip(&found).enumerate() {
            let own = if rounded.stored { e.abs() } else { 0.0 };
            // Sums in float32 may have another order: 2^-18 of the largest. The smallest numbers of float16 are 2^-24 apart.
            let limit = unit * (own + rounded.before) + largest / 262_144.0 + 6e-8;
            assert!((e - f).abs() <= limit, "{what} in {number:?} [{index}]: {f} != {e}, limit {limit}");
        }
    });
}

/// Tokens and features: a pair, odd ones, more than a warp, and more than a block has threads.
const SHAPES: [(usize, usize); 5] = [(1, 2), (5, 6), (17, 34), (33, 96), (3, 300)];

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0f32, |most, value| most.max(value.abs()))
}

#[test]
fn bounds() {
    for (tokens, features) in SHAPES {
        compare(|pool, of| {
            let act = |seed| Activation::from_rows(pool, &of(seed, tokens * features), features);
            let (x, mut dx) = (act(1), act(2));
            // Bounds that 16 bits hold, and that some numbers lie beyond.
            let held = clamp::forward(&x, [-0.25, 0.5]).to_rows();
            clamp::backward(&x, [-0.25, 0.5], &mut dx);
            vec![("clamp", held, ONCE), ("clamp::backward", [dx.to_rows(), vec![1.0]].concat(), ONCE)]
        });
    }
}

#[test]
fn norms_of_layers_and_of_groups() {
    for (tokens, features) in SHAPES {
        compare(|pool, of| {
            let act = |seed| Activation::from_rows(pool, &of(seed, tokens * features), features);
            let (x, dh) = (act(1), act(2));
            let (weight, bias) = (array(pool, &of(3, features)), array(pool, &of(4, features)));
            let stats = layer_norm::stats(&x, 1e-2);
            let mut out: Results = vec![("layer_norm::stats", stats.to_rows(), NEVER)];
            out.push(("layer_norm", layer_norm::apply(&x, &stats, weight.view(), bias.view()).to_rows(), ONCE));
            for (what, add) in [("layer_norm::backward", false), ("layer_norm::backward, added", true)] {
                let mut dx = act(5);
                layer_norm::backward(&x, &stats, weight.view(), &dh, &mut dx, add);
                out.push((what, dx.to_rows(), ONCE));
            }
            let mut dw = array(pool, &of(6, features));
            layer_norm::backward_weight(&x, &stats, &dh, dw.view_mut());
            out.push(("layer_norm::backward_weight", dw.read(), NEVER));
            let normed = group_norm::forward(&x, 2, 1e-2, weight.view(), bias.view());
            out.push(("group_norm", normed.to_rows(), ONCE));
            out
        });
    }
}

#[test]
fn functions_of_plain_mlps() {
    use pointwise::Function::{Gelu, GeluTanh, QuickGelu, Relu, Relu2, Silu, Tanh};
    let names = [
        (Gelu, "GELU", "GELU's gradient"),
        (GeluTanh, "GELU by tanh", "GELU's gradient by tanh"),
        (QuickGelu, "quick GELU", "quick GELU's gradient"),
        (Silu, "SiLU", "SiLU's gradient"),
        (Relu, "ReLU", "ReLU's gradient"),
        (Relu2, "ReLU squared", "ReLU's gradient squared"),
        (Tanh, "tanh", "tanh's gradient"),
    ];
    for (tokens, features) in [(1, 3), (19, 5), (33, 96)] {
        compare(|pool, of| {
            let mut out = Results::new();
            for (function, name, gradient) in names {
                let wide: Vec<f32> = of(1, tokens * features).iter().map(|x| 4.0 * x).collect();
                let mut x = Activation::from_rows(pool, &wide, features);
                out.push((name, pointwise::forward(function, &x).to_rows(), ONCE));
                let dy = Activation::from_rows(pool, &of(2, tokens * features), features);
                pointwise::backward(function, &mut x, &dy);
                out.push((gradient, x.to_rows(), ONCE));
            }
            out
        });
    }
}

#[test]
fn the_short_convolution() {
    const SEQUENCES: [Range<usize>; 5] = [0..1, 1..3, 3..16, 16..17, 17..52];
    let (tokens, channels) = (52, 37);
    for (kernel, with_bias, silu) in [(1, false, false), (3, true, false), (4, false, true), (7, true, true)] {
        compare(|pool, of| {
            let act = |seed| Activation::from_rows(pool, &of(seed, tokens * channels), channels);
            let (weight, bias) = (array(pool, &of(1, channels * kernel)), array(pool, &of(2, channels)));
            let conv = causal_conv1d::Conv { weight: weight.view(), bias: with_bias.then(|| bias.view()), silu };
            let x = act(3);
            let mut out: Results = vec![("y", causal_conv1d::forward(conv, &x, &SEQUENCES).to_rows(), ONCE)];
            let mut d_weight = array(pool, &of(4, channels * kernel));
            let (dx, dz) = causal_conv1d::backward(conv, &x, act(5), &SEQUENCES, Some(d_weight.view_mut()));
            let dz = dz.to_rows();
            // The gradient of z is stored, then goes through a tap of at most 1 for each; and, times a number of at most 1, through each
            // token.
            let sum = |channel: usize| dz.iter().skip(channel).step_by(channels).map(|d| d.abs()).sum();
            let [of_dx, of_weight] = if silu {
                [kernel as f32 * largest(&dz), (0..channels).map(sum).fold(0.0, f32::max)]
            } else {
                [0.0; 2]
            };
            out.push(("dx", dx.to_rows(), Rounded { before: of_dx, ..ONCE }));
            out.push(("d_weight", d_weight.read(), Rounded { before: of_weight, ..NEVER }));
            out.push(("dz", dz, ONCE));
            out
        });
    }
}

/// Of one token, of a chunk of 64 and a part, and across a panel's end.
const SEQUENCES: [Range<usize>; 3] = [0..5, 5..6, 6..83];
const TOKENS: usize = 83;

fn times(values: Vec<f32>, factor: f32) -> Vec<f32> {
    values.into_iter().map(|value| factor * value).collect()
}

/// The outputs of a sequence that is cut after some tokens, its state kept between the parts.
fn in_parts(cut: usize, end: usize, mut state: State, run: impl Fn(&[usize], &mut State) -> Vec<f32>) -> Vec<f32> {
    let mut out = Vec::new();
    for part in [0..cut, cut..cut + 1, cut + 1..end] {
        out.extend(run(&part.collect::<Vec<_>>(), &mut state));
    }
    out
}

#[test]
fn the_gated_delta_rule() {
    use gated_delta_rule::{Heads, Inputs};
    for (heads, beta_max) in [
        (Heads { key: 2, value: 4, key_dim: 13, value_dim: 10 }, 1.0),
        (Heads { key: 1, value: 1, key_dim: 20, value_dim: 70 }, 2.0),
    ] {
        compare(|pool, of| {
            let act = |values: Vec<f32>, width| Activation::from_rows(pool, &values, width);
            let width = 2 * heads.keys() + heads.values();
            let qkv = act(of(1, TOKENS * width), width);
            let gate = |seed| act(times(of(seed, TOKENS * heads.value), 2.0), heads.value);
            let (b, a) = (gate(2), gate(3));
            let (a_log, dt_bias) = (array(pool, &of(4, heads.value)), array(pool, &of(5, heads.value)));
            let inputs = Inputs { qkv: &qkv, b: &b, a: &a, a_log: a_log.view(), dt_bias: dt_bias.view(), beta_max };
            let forward = gated_delta_rule::forward(inputs, heads, &SEQUENCES, None);
            let mut out: Results = vec![("outputs", forward.to_rows(), ONCE)];
            let state = State::new(pool.device(), heads.state());
            let parts = in_parts(70, TOKENS, state, |tokens, state| {
                let (qkv, b, a) = (qkv.gather(tokens), b.gather(tokens), a.gather(tokens));
                let inputs = Inputs { qkv: &qkv, b: &b, a: &a, ..inputs };
                gated_delta_rule::forward(inputs, heads, std::slice::from_ref(&(0..tokens.len())), Some(&mut [state]))
                    .to_rows()
            });
            out.push(("outputs in parts", parts, ONCE));
            let dy = act(of(6, TOKENS * heads.values()), heads.values());
            let d = gated_delta_rule::backward(inputs, heads, &SEQUENCES, &dy);
            out.push(("d_qkv", d.qkv.to_rows(), ONCE));
            out.extend([("d_b", d.b.to_rows(), ONCE), ("d_a", d.a.to_rows(), ONCE)]);
            out.push(("d_a_log", d.a_log.to_rows(), NEVER));
            out
        });
    }
}

#[test]
fn mamba_2() {
    use mamba2::{Heads, Inputs};
    for (heads, limits) in [
        (Heads { count: 6, groups: 2, dim: 10, state: 13 }, [0.0, f32::INFINITY]),
        (Heads { count: 3, groups: 1, dim: 70, state: 20 }, [0.3, 1.1]),
    ] {
        compare(|pool, of| {
            let act = |values: Vec<f32>, width| Activation::from_rows(pool, &values, width);
            let xbc = act(of(1, TOKENS * heads.features()), heads.features());
            let dt = act(times(of(2, TOKENS * heads.count), 2.0), heads.count);
            let [a_log, d, dt_bias] = [3, 4, 5].map(|seed| array(pool, &of(seed, heads.count)));
            let inputs =
                Inputs { xbc: &xbc, dt: &dt, a_log: a_log.view(), d: d.view(), dt_bias: dt_bias.view(), limits };
            let forward = mamba2::forward(inputs, heads, &SEQUENCES, None);
            let mut out: Results = vec![("outputs", forward.to_rows(), ONCE)];
            let state = State::new(pool.device(), heads.state());
            let parts = in_parts(70, TOKENS, state, |tokens, state| {
                let (xbc, dt) = (xbc.gather(tokens), dt.gather(tokens));
                let inputs = Inputs { xbc: &xbc, dt: &dt, ..inputs };
                mamba2::forward(inputs, heads, std::slice::from_ref(&(0..tokens.len())), Some(&mut [state])).to_rows()
            });
            out.push(("outputs in parts", parts, ONCE));
            let dy = act(of(6, TOKENS * heads.values()), heads.values());
            let d = mamba2::backward(inputs, heads, &SEQUENCES, &dy);
            out.extend([("d_xbc", d.xbc.to_rows(), ONCE), ("d_dt", d.dt.to_rows(), ONCE)]);
            out.extend([("d_a_log", d.a_log.to_rows(), NEVER), ("d_d", d.d.to_rows(), NEVER)]);
            out
        });
    }
}

#[test]
fn alternating_updates_of_streams() {
    for (tokens, streams, dim) in [(37, 4, 5), (1, 3, 40), (19, 2, 33), (3, 4, 300)] {
        compare(|pool, of| {
            let act = |seed, width: usize| Activation::from_rows(pool, &of(seed, tokens * width), width);
            let (x, coefs) = (act(1, streams * dim), act(2, streams * streams));
            let mut out: Results = vec![("predicted", altup::predict(&x, &coefs, streams).to_rows(), ONCE)];
            let (dx, d_coefs) = altup::predict_backward(&x, &coefs, streams, &act(3, streams * dim));
            out.extend([("dx", dx.to_rows(), ONCE), ("d_coefs of predict", d_coefs.to_rows(), ONCE)]);
            let (mut y, u, coefs) = (act(4, streams * dim), act(5, dim), act(6, streams));
            let before = y.columns(dim..2 * dim);
            altup::correct(&mut y, &u, &coefs, 1);
            let mut dp = act(7, streams * dim);
            let (du, d_coefs) = altup::correct_backward(&before, &u, &coefs, 1, &mut dp);
            out.extend([("corrected", y.to_rows(), ONCE), ("dp", dp.to_rows(), ONCE), ("du", du.to_rows(), ONCE)]);
            out.push(("d_coefs of correct", d_coefs.to_rows(), ONCE));
            let mut sums = act(8, streams * dim);
            altup::add(&mut sums, &u, 1..streams);
            out.push(("added", sums.to_rows(), ONCE));
            out.push(("summed", altup::sum(&act(9, streams * dim), dim, 0..streams).to_rows(), ONCE));
            out
        });
    }
}

#[test]
fn cuts_at_a_quantile_and_sizes_of_rows() {
    for (tokens, features) in [(1, 33), (5, 6), (37, 5), (19, 70), (3, 300)] {
        compare(|pool, of| {
            let act = |seed| Activation::from_rows(pool, &of(seed, tokens * features), features);
            let (x, r) = (act(1), act(2));
            let mut out = Results::new();
            for (cut, multiplier) in [(["cut", "its gradient"], 0.3), (["cut below", "its gradient"], -0.4)] {
                out.push((cut[0], gaussian_topk::forward(&x, multiplier).to_rows(), ONCE));
                let mut dx = act(3);
                gaussian_topk::backward(&x, multiplier, &mut dx);
                out.push((cut[1], dx.to_rows(), ONCE));
            }
            // Every third row is below the floor; its numbers are multiples of 2^-12, which 16 bits hold.
            let mut small = x.to_rows();
            for row in small.chunks_mut(features).step_by(3) {
                for value in row {
                    *value = (8.0 * *value).round() / 4096.0;
                }
            }
            for (matched, x) in [
                (["matched", "dx", "dr"], x),
                (["some small", "dx", "dr"], Activation::from_rows(pool, &small, features)),
            ] {
                out.push((matched[0], rms_match::forward(&x, &r).to_rows(), ONCE));
                let mut dr = act(4);
                let dx = rms_match::backward(&x, &r, &act(5), &mut dr);
                out.extend([(matched[1], dx.to_rows(), ONCE), (matched[2], dr.to_rows(), ONCE)]);
            }
            out
        });
    }
}

#[test]
fn the_gate_of_a_shared_expert() {
    for (tokens, features) in SHAPES {
        compare(|pool, of| {
            let act = |seed, width: usize| Activation::from_rows(pool, &of(seed, tokens * width), width);
            let gate = SigmoidGate::new(&act(1, 1));
            let mut y = act(2, features);
            gate.apply(&mut y);
            let d_logits = gate.backward(&act(3, features), &act(4, features), pool);
            vec![("gated", y.to_rows(), ONCE), ("d_logits", d_logits.to_rows(), ONCE)]
        });
    }
}
