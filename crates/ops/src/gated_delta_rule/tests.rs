//! The rule, its gradients and its states against the recurrence in f64 and finite differences.
use super::*;
use crate::testing::{Engine, check_gradient, each_engine, f64s, near, numbers};
use reference::Rows;

/// Within a panel, of one token, across panels, of a whole chunk, and of two chunks and a part, none at a panel's beginning.
const SEQUENCES: [Range<usize>; 5] = [0..5, 5..6, 6..40, 40..104, 104..250];
const TOKENS: usize = 250;

struct Case {
    heads: Heads,
    beta_max: f32,
    qkv: Vec<f32>,
    b: Vec<f32>,
    a: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    seed: Vec<f32>,
}

fn case(heads: Heads, beta_max: f32) -> Case {
    let scaled = |seed, count, scale: f32| numbers(seed, count).iter().map(|x| x * scale).collect::<Vec<f32>>();
    // Some tokens forget all that was before them.
    let mut a = scaled(3, TOKENS * heads.value, 2.0);
    a.iter_mut().step_by(37).for_each(|a| *a = 60.0);
    Case {
        heads,
        beta_max,
        qkv: numbers(1, TOKENS * (2 * heads.keys() + heads.values())),
        b: scaled(2, TOKENS * heads.value, 2.0),
        a,
        a_log: scaled(4, heads.value, 1.5),
        dt_bias: numbers(5, heads.value),
        seed: numbers(6, TOKENS * heads.values()),
    }
}

/// Odd widths, a width of several vectors, key heads that are shared and such that are not.
const HEADS: [Heads; 3] = [
    Heads { key: 2, value: 4, key_dim: 13, value_dim: 10 },
    Heads { key: 1, value: 1, key_dim: 20, value_dim: 70 },
    Heads { key: 3, value: 3, key_dim: 16, value_dim: 16 },
];

fn loss(case: &Case, rows: &Rows<'_>) -> f64 {
    let out = reference::forward(rows, case.heads, &SEQUENCES);
    out.iter().zip(&case.seed).map(|(o, &s)| o * f64::from(s)).sum()
}

fn check(engine: Engine, case: &Case) {
    let (heads, pool) = (case.heads, engine.pool());
    let act = |rows: &[f32], features| Activation::from_rows(&pool, rows, features);
    let (qkv, b, a) =
        (act(&case.qkv, 2 * heads.keys() + heads.values()), act(&case.b, heads.value), act(&case.a, heads.value));
    let (a_log, dt_bias) = (engine.array(&case.a_log), engine.array(&case.dt_bias));
    let (a_log, dt_bias, beta_max) = (a_log.view(), dt_bias.view(), case.beta_max);
    let inputs = Inputs { qkv: &qkv, b: &b, a: &a, a_log, dt_bias, beta_max };
    let double = [&case.qkv, &case.b, &case.a, &case.a_log, &case.dt_bias].map(|x| f64s(x));
    let [d_qkv, d_b, d_a, d_a_log, d_dt_bias] = &double;
    let beta_max = f64::from(case.beta_max);
    let rows = || Rows { qkv: d_qkv, b: d_b, a: d_a, a_log: d_a_log, dt_bias: d_dt_bias, beta_max };
    let expected = reference::forward(&rows(), heads, &SEQUENCES);
    near("out", &forward(inputs, heads, &SEQUENCES, None).to_rows(), &expected, 2e-5);

    let dy = act(&case.seed, heads.values());
    let (mut g_a_log, mut g_dt_bias) = (engine.array(&vec![0.0; heads.value]), engine.array(&vec![0.0; heads.value]));
    let found = backward(inputs, heads, &SEQUENCES, &dy);
    crate::elementwise::add_bias_backward(&found.a_log, g_a_log.view_mut());
    crate::elementwise::add_bias_backward(&found.a, g_dt_bias.view_mut());
    check_gradient("qkv", &case.qkv, &found.qkv.to_rows(), |x| loss(case, &Rows { qkv: x, ..rows() }));
    check_gradient("b", &case.b, &found.b.to_rows(), |x| loss(case, &Rows { b: x, ..rows() }));
    check_gradient("a", &case.a, &found.a.to_rows(), |x| loss(case, &Rows { a: x, ..rows() }));
    check_gradient("A_log", &case.a_log, &g_a_log.read(), |x| loss(case, &Rows { a_log: x, ..rows() }));
    check_gradient("dt_bias", &case.dt_bias, &g_dt_bias.read(), |x| loss(case, &Rows { dt_bias: x, ..rows() }));

    // In parts, with states between them: more than a chunk, so many tokens one by one, and the rest.
    let cut = 70;
    let mut state = State::new(engine.device(), heads.state());
    let last = SEQUENCES[4].clone();
    let mut parts = Vec::new();
    let (one_by_one, rest) = (last.start + cut..last.start + cut + 3, last.start + cut + 3..last.end);
    let single = one_by_one.map(|token| token..token + 1);
    for part in std::iter::once(last.start..last.start + cut).chain(single).chain([rest]) {
        let tokens: Vec<usize> = part.clone().collect();
        let (qkv, b, a) = (qkv.gather(&tokens), b.gather(&tokens), a.gather(&tokens));
        let inputs = Inputs { qkv: &qkv, b: &b, a: &a, ..inputs };
        let mut copy = state.clone();
        parts
            .extend(forward(inputs, heads, std::slice::from_ref(&(0..tokens.len())), Some(&mut [&mut copy])).to_rows());
        state = copy;
    }
    near("parts", &parts, &expected[last.start * heads.values()..], 2e-5);
}

#[test]
fn equals_its_recurrence_and_its_finite_differences() {
    each_engine(|engine| {
        for (heads, beta_max) in HEADS.into_iter().zip([1.0, 1.0, 2.0]) {
            check(engine, &case(heads, beta_max));
        }
    });
}

#[test]
fn strong_decays_on_both_sides_of_the_least_that_counts_equal_the_recurrence() {
    each_engine(|engine| {
        let mut case = case(HEADS[0], 1.0);
        // Logarithms down to about -80 for one token, and of every size above.
        case.a.iter_mut().enumerate().for_each(|(at, a)| *a = (at % 61) as f32 / 2.0);
        case.a_log.iter_mut().enumerate().for_each(|(head, a_log)| *a_log = head as f32 / 2.0 - 0.5);
        check(engine, &case);
    });
}

#[test]
fn a_state_that_has_decayed_to_nothing_stays_finite() {
    each_engine(|engine| {
        let heads = HEADS[2];
        let mut case = case(heads, 1.0);
        case.a.fill(60.0);
        case.a_log.fill(4.0);
        let pool = engine.pool();
        let act = |rows: &[f32], features| Activation::from_rows(&pool, rows, features);
        let (qkv, b, a) =
            (act(&case.qkv, 2 * heads.keys() + heads.values()), act(&case.b, heads.value), act(&case.a, heads.value));
        let (a_log, dt_bias) = (engine.array(&case.a_log), engine.array(&case.dt_bias));
        let (a_log, dt_bias, beta_max) = (a_log.view(), dt_bias.view(), case.beta_max);
        let inputs = Inputs { qkv: &qkv, b: &b, a: &a, a_log, dt_bias, beta_max };
        let dy = act(&case.seed, heads.values());
        let out = forward(inputs, heads, &SEQUENCES, None).to_rows();
        let d = backward(inputs, heads, &SEQUENCES, &dy);
        let all = [out, d.qkv.to_rows(), d.a.to_rows(), d.b.to_rows()].concat();
        assert!(all.iter().all(|x| x.is_finite()));
    });
}
