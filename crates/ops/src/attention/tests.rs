//! Both passes against the definition, in f64.
use super::reference::{self, Operands};
use super::*;
use crate::activation::{Number, Pool};
use crate::simd::pair_level;
use crate::spans::{KeyRanges, Mask, full_spans, row_spans};
use crate::testing::{Engine, check_gradient, each_engine, numbers};
use half::{bf16, f16};
use std::sync::Arc;
use tunesmith_device::Array;

const PLAIN: Scores = Scores { scale: 0.7, softcap: None, window: None };

/// Operands of a batch whose spans are given, and a weight on each output, which makes a loss.
struct Case {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    sinks: Vec<f32>,
    weight: Vec<f32>,
}

impl Case {
    fn new(heads: Heads, spans: &[Span]) -> Self {
        let last = &spans[spans.len() - 1];
        let (queries, keys) = (last.query_tokens().end, last.key_tokens().end);
        Self {
            q: numbers(1, queries * heads.query * heads.head_dim).iter().map(|x| x * 2.0).collect(),
            k: numbers(2, keys * heads.kv * heads.head_dim),
            v: numbers(3, keys * heads.kv * heads.v_head_dim),
            sinks: numbers(5, heads.query).iter().map(|x| x * 3.0).collect(),
            weight: numbers(4, queries * heads.query * heads.v_head_dim),
        }
    }

    /// With operands that numbers of this type hold.
    fn rounded(mut self, number: Number) -> Self {
        for operand in [&mut self.q, &mut self.k, &mut self.v, &mut self.weight] {
            for x in operand {
                *x = rounded(*x, number);
            }
        }
        self
    }

    /// What the fast version gives with activations of this pool: o, lse, dq, dk, dv, and the gradient of the sinks.
    fn run(&self, pool: &Arc<Pool>, spans: &[Span], heads: Heads, how: Scores, sinks: bool) -> [Vec<f32>; 6] {
        let array = |numbers: &[f32]| Array::of(pool.device(), numbers);
        let act = |x: &[f32], features| Activation::from_rows(pool, x, features);
        let q = act(&self.q, heads.query * heads.head_dim);
        let (k, v) = (act(&self.k, heads.kv * heads.head_dim), act(&self.v, heads.kv * heads.v_head_dim));
        let sinks = sinks.then(|| array(&self.sinks));
        let sinks = sinks.as_ref().map(Floats::from);
        let (o, lse) = forward(&q, &k, &v, sinks, spans, heads, how);
        let mut d_sinks = array(&vec![0.5; sinks.map_or(0, Floats::len)]);
        let saved = Saved { q: &q, k: &k, v: &v, sinks, o: &o, lse: &lse };
        let weight = act(&self.weight, heads.query * heads.v_head_dim);
        let d_sinks_to = sinks.map(|_| FloatsMut::from(&mut d_sinks));
        let (dq, dk, dv) = backward(saved, &weight, spans, heads, how, d_sinks_to);
        // It was added to what was there.
        let d_sinks = d_sinks.read().iter().map(|value| value - 0.5).collect();
        [o.to_rows(), lse.to_rows(), dq.to_rows(), dk.to_rows(), dv.to_rows(), d_sinks]
    }
}

/// The nearest number of a type.
fn rounded(x: f32, number: Number) -> f32 {
    match number {
        Number::F32 => x,
        Number::F16 => f16::from_f32(x).to_f32(),
        Number::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// Half the distance of two numbers of a type, relative to them.
pub(super) fn step(number: Number) -> f32 {
    match number {
        Number::F32 => 0.0,
        Number::F16 => 1.0 / 2048.0,
        Number::Bf16 => 1.0 / 256.0,
    }
}

/// A pool for each type of operands that products of an engine have.
pub(super) fn pools(engine: Engine) -> Vec<Arc<Pool>> {
    let numbers: &[Number] = match (engine.is_cpu(), pair_level()) {
        (true, None) => &[Number::F32],
        (true, Some(_)) => &[Number::F32, Number::Bf16],
        (false, _) => &[Number::F32, Number::F16, Number::Bf16],
    };
    let of = |&number: &Number| {
        let pool = engine.pool();
        pool.set_number(number);
        pool
    };
    numbers.iter().map(of).collect()
}

/// Holds the results with 16-bit activations, or operands, against those of the CPU in float32 for the same numbers. Weights and results are rounded: a result
/// errs by no more than five steps of the largest one, the log-sum-exp by what float32 does.
fn check_halves(engine: Engine, heads: Heads, spans: &[Span], how: Scores, sinks: bool) {
    for pool in &pools(engine)[1..] {
        let number = pool.products();
        let case = Case::new(heads, spans).rounded(number);
        let wanted = case.run(&Pool::new(), spans, heads, how, sinks);
        let got = case.run(pool, spans, heads, how, sinks);
        for (what, (got, wanted)) in ["o", "lse", "dq", "dk", "dv", "d_sinks"].iter().zip(got.iter().zip(&wanted)) {
            assert_eq!(got.len(), wanted.len(), "{what}");
            let largest = wanted.iter().fold(0.01f32, |most, value| most.max(value.abs()));
            let limit = largest * if *what == "lse" { 1e-5 } else { 5.0 * step(number) };
            for (index, (got, want)) in got.iter().zip(wanted).enumerate() {
                let error = (got - want).abs();
                assert!(
                    error <= limit,
                    "{what}[{index}] in {number:?}: {got} != {want} {heads:?} {how:?} limit {limit}"
                );
            }
        }
    }
}

/// [`check_halves`] for heads of these sizes, and of those with a multiple of 16 features, which tensor cores take.
fn check_halves_and_tensor_cores(engine: Engine, heads: Heads, spans: &[Span], how: Scores, sinks: bool) {
    check_halves(engine, heads, spans, how, sinks);
    let [head_dim, v_head_dim] = [heads.head_dim, heads.v_head_dim].map(|features| features.next_multiple_of(16));
    let whole = Heads { head_dim, v_head_dim, ..heads };
    if whole != heads {
        check_halves(engine, whole, spans, how, sinks);
    }
}

fn check_spans(engine: Engine, heads: Heads, spans: &[Span], how: Scores, sinks: bool) {
    check_halves_and_tensor_cores(engine, heads, spans, how, sinks);
    let case = Case::new(heads, spans);
    let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let operands = Operands {
        q: double(&case.q),
        k: double(&case.k),
        v: double(&case.v),
        sinks: sinks.then(|| double(&case.sinks)),
    };
    let (wanted, wanted_lse) = reference::forward(&operands, spans, heads, how);
    let [o, lse, dq, dk, dv, d_sinks] = case.run(&engine.pool(), spans, heads, how, sinks);
    for (got, want) in o.iter().zip(&wanted).chain(lse.iter().zip(&wanted_lse)) {
        assert!((f64::from(*got) - want).abs() < 2e-5, "{got} != {want} {heads:?} {how:?}");
    }
    let loss = |operands: &Operands| -> f64 {
        let (out, _) = reference::forward(operands, spans, heads, how);
        out.iter().zip(&case.weight).map(|(o, &w)| o * f64::from(w)).sum()
    };
    check_gradient("dq", &case.q, &dq, |q| loss(&Operands { q: q.to_vec(), ..operands.clone() }));
    check_gradient("dk", &case.k, &dk, |k| loss(&Operands { k: k.to_vec(), ..operands.clone() }));
    check_gradient("dv", &case.v, &dv, |v| loss(&Operands { v: v.to_vec(), ..operands.clone() }));
    if sinks {
        let of = |sinks: &[f64]| loss(&Operands { sinks: Some(sinks.to_vec()), ..operands.clone() });
        check_gradient("d_sinks", &case.sinks, &d_sinks, of);
    }
}

fn check(engine: Engine, heads: Heads, cu_seqlens: &[usize], rows: Option<&[usize]>, how: Scores) {
    let spans = rows.map_or_else(|| full_spans(cu_seqlens), |rows| row_spans(cu_seqlens, rows));
    check_spans(engine, heads, &spans, how, false);
}

#[test]
fn equals_the_definition_and_its_finite_differences_on_odd_sizes() {
    each_engine(|engine| {
        check(engine, Heads::new(1, 1, 2), &[0, 1], None, PLAIN);
        check(engine, Heads::new(4, 2, 6), &[0, 5, 6, 23, 40], None, PLAIN);
        check(engine, Heads::new(3, 1, 24), &[0, 37], None, PLAIN);
        check(engine, Heads::new(2, 2, 10), &[0, 17, 50], Some(&[2, 9, 16, 30, 31, 49]), PLAIN);
        check(engine, Heads::new(2, 1, 4), &[0, 9, 20], Some(&[12, 13]), PLAIN);
    });
}

#[test]
fn windows_and_caps_equal_the_definition() {
    each_engine(|engine| {
        for size in [1, 6, 17, 40] {
            for window in [Window::Sliding(size), Window::Chunked(size)] {
                let how = Scores { window: Some(window), ..PLAIN };
                check(engine, Heads::new(2, 1, 6), &[0, 5, 6, 50], None, how);
                check(engine, Heads::new(2, 2, 4), &[0, 17, 70], Some(&[2, 9, 16, 30, 69]), how);
            }
        }
        let capped = Scores { softcap: Some(0.5), ..PLAIN };
        check(engine, Heads::new(4, 2, 6), &[0, 5, 6, 23, 40], None, capped);
        check(engine, Heads::new(1, 1, 4), &[0, 37], None, Scores { window: Some(Window::Sliding(6)), ..capped });
    });
}

#[test]
fn long_sequences_cross_every_block() {
    each_engine(|engine| {
        let heads = Heads::new(1, 1, 4);
        check(engine, heads, &[0, 300], None, PLAIN);
        check(engine, heads, &[0, 600], None, Scores { window: Some(Window::Sliding(20)), ..PLAIN });
        check(engine, heads, &[0, 330], None, Scores { window: Some(Window::Chunked(290)), ..PLAIN });
        // Queries so far apart that blocks between them are hidden from all.
        let how = Scores { window: Some(Window::Sliding(9)), ..PLAIN };
        check(engine, heads, &[0, 600], Some(&[3, 290, 599]), how);
    });
}

#[test]
fn values_of_a_size_of_their_own_and_large_heads_equal_the_definition() {
    each_engine(|engine| {
        for (head_dim, v_head_dim) in [(6, 10), (5, 3), (1, 17), (33, 1), (192, 128), (72, 72), (512, 512), (511, 257)]
        {
            let heads = Heads { query: 2, kv: 1, head_dim, v_head_dim };
            let how = Scores { scale: 1.0 / (head_dim as f32).sqrt(), ..PLAIN };
            check_spans(engine, heads, &full_spans(&[0, 5, 23]), how, true);
            check_spans(engine, heads, &row_spans(&[0, 19, 37], &[3, 20, 36]), how, false);
        }
    });
}

#[test]
fn sinks_equal_the_definition_and_their_finite_differences() {
    each_engine(|engine| {
        for window in [None, Some(Window::Sliding(7)), Some(Window::Chunked(11))] {
            for softcap in [None, Some(0.5)] {
                let how = Scores { softcap, window, ..PLAIN };
                check_spans(engine, Heads::new(4, 2, 6), &full_spans(&[0, 5, 6, 23, 40]), how, true);
                check_spans(engine, Heads::new(3, 1, 5), &row_spans(&[0, 17, 50], &[2, 9, 16, 30, 31, 49]), how, true);
            }
        }
        check_spans(engine, Heads::new(1, 1, 4), &full_spans(&[0, 300]), PLAIN, true);
    });
}

#[test]
fn a_sink_far_below_the_scores_is_none_and_one_far_above_takes_all() {
    each_engine(|engine| {
        let spans = full_spans(&[0, 20]);
        for (pool, size) in pools(engine).iter().flat_map(|pool| [(pool, 6), (pool, 16)]) {
            let heads = Heads::new(2, 1, size);
            let case = Case::new(heads, &spans);
            let without = case.run(pool, &spans, heads, PLAIN, false);
            for low in [f32::NEG_INFINITY, f32::MIN, -1e4] {
                let low = Case { sinks: vec![low; 2], ..Case::new(heads, &spans) };
                let with = low.run(pool, &spans, heads, PLAIN, true);
                assert_eq!(with[..5], without[..5]);
                assert_eq!(with[5], [0.0; 2]);
            }
            let high = Case { sinks: vec![1e4; 2], ..Case::new(heads, &spans) };
            let [o, lse, rest @ ..] = high.run(pool, &spans, heads, PLAIN, true);
            assert!(o.iter().all(|&value| value == 0.0) && lse.iter().all(|&value| (value - 1e4).abs() < 1e-3));
            assert!(rest.iter().flatten().all(|&value| value == 0.0));
        }
    });
}

#[test]
fn every_mask_equals_the_definition_and_its_finite_differences() {
    let blocks = [2..7, 7..8, 11..30];
    let window = Some(Window::Sliding(6));
    let masks = [
        Mask::Full,
        Mask::Prefix(9),
        Mask::Local { before: 4, after: 4 },
        Mask::Local { before: 0, after: 20 },
        Mask::Blocks { blocks: &blocks, window: None },
        Mask::Blocks { blocks: &blocks, window },
        Mask::Blocks { blocks: &blocks, window: Some(Window::Chunked(8)) },
    ];
    let heads = Heads { query: 4, kv: 2, head_dim: 6, v_head_dim: 5 };
    each_engine(|engine| {
        for mask in &masks {
            let masked = |spans: Vec<Span>| spans.into_iter().map(|span| span.masked(mask)).collect::<Vec<Span>>();
            check_spans(engine, heads, &masked(full_spans(&[0, 5, 6, 49])), PLAIN, false);
            let rows = masked(row_spans(&[0, 17, 50], &[2, 9, 16, 30, 31, 49]));
            // The window of the layer does not matter where a span has ranges.
            let how = Scores { softcap: Some(0.8), window: Some(Window::Sliding(3)), ..PLAIN };
            check_spans(engine, heads, &rows, how, true);
        }
        // A sequence with ranges beside one with the causal rule.
        let mut mixed = full_spans(&[0, 20, 43]);
        mixed[1] = mixed[1].clone().masked(&Mask::Full);
        check_spans(engine, heads, &mixed, Scores { window, ..PLAIN }, true);
    });
}

/// As in cross-attention: every query of a sequence is at its last position, and there may be more or fewer queries than keys, or none.
#[test]
fn queries_at_one_position_equal_the_definition_and_its_finite_differences() {
    let span = |keys: std::ops::Range<usize>, queries: std::ops::Range<usize>| Span {
        key_start: keys.start,
        keys: keys.len(),
        query_start: queries.start,
        positions: vec![keys.len() - 1; queries.len()],
        ranges: None,
    };
    let spans = [span(0..5, 0..21), span(5..6, 21..24), span(6..40, 24..24), span(40..73, 24..26)];
    each_engine(|engine| {
        check_spans(engine, Heads::new(2, 2, 6), &spans, PLAIN, false);
        check_spans(engine, Heads { query: 4, kv: 2, head_dim: 6, v_head_dim: 5 }, &spans, PLAIN, true);
    });
}

#[test]
fn masks_of_long_sequences_cross_every_block() {
    let heads = Heads::new(1, 1, 4);
    let images = [2..9, 120..290];
    let masks = [
        Mask::Full,
        Mask::Local { before: 30, after: 140 },
        Mask::Blocks { blocks: &images, window: Some(Window::Sliding(20)) },
    ];
    each_engine(|engine| {
        for mask in &masks {
            let spans = [full_spans(&[0, 300]).remove(0).masked(mask)];
            check_spans(engine, heads, &spans, PLAIN, false);
            let spans = [row_spans(&[0, 600], &[3, 290, 599]).remove(0).masked(mask)];
            check_spans(engine, heads, &spans, PLAIN, false);
        }
        // Ranges in no order, with gaps between what the queries of a strip see.
        let mut span = row_spans(&[0, 600], &[3, 4, 5]).remove(0);
        span.ranges = Some(KeyRanges { first: vec![597, 1, 300], end: vec![600, 2, 345] });
        check_spans(engine, heads, &[span], PLAIN, true);
    });
}

#[test]
fn ranges_of_the_causal_rule_are_the_rule_to_the_bit() {
    let check = |pool: &Arc<Pool>, heads: Heads, window: Option<Window>| {
        let how = Scores { window, ..PLAIN };
        for spans in [full_spans(&[0, 21, 320]), row_spans(&[0, 21, 320], &[1, 20, 30, 100, 319])] {
            let case = Case::new(heads, &spans);
            let masked = |span: &Span| span.clone().masked(&Mask::Causal(window));
            let by_ranges: Vec<Span> = spans.iter().map(masked).collect();
            let bits = |results: [Vec<f32>; 6]| results.map(|of| of.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
            let wanted = bits(case.run(pool, &spans, heads, how, true));
            assert_eq!(bits(case.run(pool, &by_ranges, heads, how, true)), wanted, "{window:?}");
            // The window of a layer that is not the ranges' changes nothing.
            assert_eq!(bits(case.run(pool, &by_ranges, heads, PLAIN, true)), wanted, "{window:?}");
        }
    };
    each_engine(|engine| {
        for window in [None, Some(Window::Sliding(40)), Some(Window::Chunked(100))] {
            check(&engine.pool(), Heads::new(2, 1, 12), window);
            for pool in &pools(engine)[1..] {
                check(pool, Heads::new(2, 1, 16), window);
            }
        }
    });
}

#[test]
#[should_panic(expected = "ranges of keys inside the sequence")]
fn a_query_that_sees_no_key_is_refused() {
    let mut span = full_spans(&[0, 2]).remove(0);
    span.ranges = Some(KeyRanges { first: vec![0, 1], end: vec![1, 1] });
    let case = Case::new(Heads::new(1, 1, 4), &[span.clone()]);
    each_engine(|engine| {
        case.run(&engine.pool(), &[span.clone()], Heads::new(1, 1, 4), PLAIN, false);
    });
}

#[test]
fn tensor_cores_take_every_size_of_head() {
    let sizes = [(16, 16), (64, 64), (80, 96), (128, 128), (112, 48), (192, 128), (160, 160), (256, 256), (208, 64)];
    each_engine(|engine| {
        if engine.is_cpu() {
            return;
        }
        for (index, (head_dim, v_head_dim)) in sizes.into_iter().enumerate() {
            // One, four and seven query heads a key head.
            let (query, kv) = [(2, 2), (4, 1), (7, 1)][index % 3];
            let heads = Heads { query, kv, head_dim, v_head_dim };
            let softcap = (index % 2 == 1).then_some(1.5);
            let how = Scores { scale: 2.0 / (head_dim as f32).sqrt(), softcap, window: None };
            check_halves(engine, heads, &full_spans(&[0, 5, 150]), how, index % 2 == 0);
            let window = Some(Window::Sliding(70));
            let rows = row_spans(&[0, 70, 210], &[3, 69, 75, 120, 209]);
            check_halves(engine, heads, &rows, Scores { window, ..how }, index % 2 == 1);
            let full = full_spans(&[0, 3, 73]).into_iter().map(|span| span.masked(&Mask::Full)).collect::<Vec<Span>>();
            check_halves(engine, heads, &full, how, false);
        }
    });
}
