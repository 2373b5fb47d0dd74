//! The state space, its gradients and its states against the recurrence in f64 and finite differences.
use super::*;
use crate::testing::{Engine, check_gradient, each_engine, f64s, near, numbers};
use reference::Rows;

/// Within a panel, of one token, across panels, of a whole chunk, and of two chunks and a part, none at a panel's beginning.
const SEQUENCES: [Range<usize>; 5] = [0..5, 5..6, 6..40, 40..104, 104..250];
const TOKENS: usize = 250;

struct Case {
    heads: Heads,
    xbc: Vec<f32>,
    dt: Vec<f32>,
    a_log: Vec<f32>,
    d: Vec<f32>,
    dt_bias: Vec<f32>,
    limits: [f32; 2],
    seed: Vec<f32>,
}

fn case(heads: Heads, limits: [f32; 2]) -> Case {
    let scaled = |seed, count, scale: f32| numbers(seed, count).iter().map(|x| x * scale).collect::<Vec<f32>>();
    // Some tokens forget all that was before them.
    let mut dt = scaled(2, TOKENS * heads.count, 2.0);
    dt.iter_mut().step_by(37).for_each(|dt| *dt = 60.0);
    Case {
        heads,
        xbc: numbers(1, TOKENS * heads.features()),
        dt,
        a_log: scaled(3, heads.count, 1.5),
        d: numbers(4, heads.count),
        dt_bias: numbers(5, heads.count),
        limits,
        seed: numbers(6, TOKENS * heads.values()),
    }
}

/// Odd widths, a width of several vectors, groups that heads share, more parts than heads, and limits that cut some steps.
const CASES: [(Heads, [f32; 2]); 4] = [
    (Heads { count: 6, groups: 2, dim: 10, state: 13 }, [0.0, f32::INFINITY]),
    (Heads { count: 1, groups: 1, dim: 70, state: 20 }, [0.3, f32::INFINITY]),
    (Heads { count: 3, groups: 3, dim: 16, state: 16 }, [0.0, 0.9]),
    (Heads { count: 19, groups: 1, dim: 5, state: 3 }, [0.2, 1.1]),
];

fn loss(case: &Case, rows: &Rows<'_>) -> f64 {
    let out = reference::forward(rows, case.heads, &SEQUENCES);
    out.iter().zip(&case.seed).map(|(y, &s)| y * f64::from(s)).sum()
}

fn check(engine: Engine, case: &Case) {
    let (heads, pool) = (case.heads, engine.pool());
    let act = |rows: &[f32], features| Activation::from_rows(&pool, rows, features);
    let (xbc, dt) = (act(&case.xbc, heads.features()), act(&case.dt, heads.count));
    let [a_log, d, dt_bias] = [&case.a_log, &case.d, &case.dt_bias].map(|constant| engine.array(constant));
    let inputs =
        Inputs { xbc: &xbc, dt: &dt, a_log: a_log.view(), d: d.view(), dt_bias: dt_bias.view(), limits: case.limits };
    let double = [&case.xbc, &case.dt, &case.a_log, &case.d, &case.dt_bias].map(|x| f64s(x));
    let [of_xbc, of_dt, of_a_log, of_d, of_dt_bias] = &double;
    let limits = case.limits.map(f64::from);
    let rows = || Rows { xbc: of_xbc, dt: of_dt, a_log: of_a_log, d: of_d, dt_bias: of_dt_bias, limits };
    let expected = reference::forward(&rows(), heads, &SEQUENCES);
    near("out", &forward(inputs, heads, &SEQUENCES, None).to_rows(), &expected, 2e-5);

    let dy = act(&case.seed, heads.values());
    let found = backward(inputs, heads, &SEQUENCES, &dy);
    let [mut g_a_log, mut g_d, mut g_dt_bias] = [(); 3].map(|()| engine.array(&vec![0.0; heads.count]));
    crate::elementwise::add_bias_backward(&found.a_log, g_a_log.view_mut());
    crate::elementwise::add_bias_backward(&found.d, g_d.view_mut());
    crate::elementwise::add_bias_backward(&found.dt, g_dt_bias.view_mut());
    check_gradient("xbc", &case.xbc, &found.xbc.to_rows(), |x| loss(case, &Rows { xbc: x, ..rows() }));
    check_gradient("dt", &case.dt, &found.dt.to_rows(), |x| loss(case, &Rows { dt: x, ..rows() }));
    check_gradient("A_log", &case.a_log, &g_a_log.read(), |x| loss(case, &Rows { a_log: x, ..rows() }));
    check_gradient("D", &case.d, &g_d.read(), |x| loss(case, &Rows { d: x, ..rows() }));
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
        let (xbc, dt) = (xbc.gather(&tokens), dt.gather(&tokens));
        let inputs = Inputs { xbc: &xbc, dt: &dt, ..inputs };
        let mut copy = state.clone();
        parts
            .extend(forward(inputs, heads, std::slice::from_ref(&(0..tokens.len())), Some(&mut [&mut copy])).to_rows());
        state = copy;
    }
    near("parts", &parts, &expected[last.start * heads.values()..], 2e-5);
}

#[test]
fn equals_its_recurrence_and_its_finite_differences() {
    each_engine(|engine| CASES.into_iter().for_each(|(heads, limits)| check(engine, &case(heads, limits))));
}

#[test]
fn rows_in_one_batch_do_not_see_each_other() {
    each_engine(|engine| {
        let (heads, limits) = CASES[0];
        let case = case(heads, limits);
        let pool = engine.pool();
        let [a_log, d, dt_bias] = [&case.a_log, &case.d, &case.dt_bias].map(|constant| engine.array(constant));
        let all = |xbc: &[f32]| {
            let act = |rows: &[f32], features| Activation::from_rows(&pool, rows, features);
            let (xbc, dt) = (act(xbc, heads.features()), act(&case.dt, heads.count));
            let (a_log, d, dt_bias) = (a_log.view(), d.view(), dt_bias.view());
            let inputs = Inputs { xbc: &xbc, dt: &dt, a_log, d, dt_bias, limits };
            let dy = act(&case.seed, heads.values());
            let gradients = backward(inputs, heads, &SEQUENCES, &dy).xbc.to_rows();
            (forward(inputs, heads, &SEQUENCES, None).to_rows(), gradients)
        };
        let mut other = case.xbc.clone();
        other[..SEQUENCES[2].start * heads.features()].fill(1e4);
        let (found, changed) = (all(&case.xbc), all(&other));
        let from = SEQUENCES[2].start;
        assert_eq!(found.0[from * heads.values()..], changed.0[from * heads.values()..], "outputs");
        assert_eq!(found.1[from * heads.features()..], changed.1[from * heads.features()..], "gradients");
    });
}

#[test]
fn a_state_that_has_decayed_to_nothing_stays_finite() {
    each_engine(|engine| {
        let (heads, limits) = CASES[2];
        let mut case = case(heads, limits);
        case.dt.fill(60.0);
        case.a_log.fill(4.0);
        case.limits = [0.0, f32::INFINITY];
        let pool = engine.pool();
        let act = |rows: &[f32], features| Activation::from_rows(&pool, rows, features);
        let (xbc, dt) = (act(&case.xbc, heads.features()), act(&case.dt, heads.count));
        let [a_log, d, dt_bias] = [&case.a_log, &case.d, &case.dt_bias].map(|constant| engine.array(constant));
        let (a_log, d, dt_bias, limits) = (a_log.view(), d.view(), dt_bias.view(), case.limits);
        let inputs = Inputs { xbc: &xbc, dt: &dt, a_log, d, dt_bias, limits };
        let dy = act(&case.seed, heads.values());
        let out = forward(inputs, heads, &SEQUENCES, None).to_rows();
        let d = backward(inputs, heads, &SEQUENCES, &dy);
        let all = [out, d.xbc.to_rows(), d.dt.to_rows(), d.a_log.to_rows(), d.d.to_rows()].concat();
        assert!(all.iter().all(|x| x.is_finite()));
    });
}
