//! One token at a time against all at once.
use super::tests::{pools, step};
use super::*;
use crate::activation::{Number, Pool};
use crate::spans::{Mask, full_spans};
use crate::testing::{each_engine, numbers};
use std::sync::Arc;
use tunesmith_device::Array;

#[test]
fn a_token_at_a_time_equals_all_at_once_to_the_bit() {
    each_engine(|engine| {
        // The CPU reads its cache in float32 whatever products are.
        for pool in pools(engine).iter().filter(|pool| pool.number() == pool.products()) {
            token_at_a_time(pool);
        }
    });
}

/// Decodes and compares: to the bit where the forward pass has no tensor cores, else within what they round.
fn token_at_a_time(pool: &Arc<Pool>) {
    let (number, is_cpu) = (pool.number(), pool.device() == Device::Cpu);
    for (heads, length) in [
        (Heads::new(6, 2, 24), 300),
        (Heads::new(3, 3, 16), 40),
        (Heads::new(2, 1, 7), 620),
        (Heads { query: 4, kv: 2, head_dim: 19, v_head_dim: 5 }, 290),
        (Heads { query: 20, kv: 1, head_dim: 192, v_head_dim: 128 }, 20),
        (Heads::new(1, 1, 512), 20),
    ] {
        for (softcap, window, with_sinks) in [
            (None, None, false),
            (None, None, true),
            (Some(2.0), Some(Window::Sliding(7)), false),
            (None, Some(Window::Sliding(270)), true),
            (None, Some(Window::Sliding(33)), false),
            (Some(2.0), Some(Window::Chunked(38)), true),
            (None, Some(Window::Chunked(280)), false),
        ] {
            let how = Scores { scale: 0.3, softcap, window };
            // The emulation of a GPU takes its time.
            if number != Number::F32 && (softcap.is_some() || length > 300) {
                continue;
            }
            let act = |seed, width: usize| Activation::from_rows(pool, &numbers(seed, length * width), width);
            let q = act(1, heads.query * heads.head_dim);
            let (k, v) = (act(2, heads.kv * heads.head_dim), act(3, heads.kv * heads.v_head_dim));
            let sinks = numbers(4, heads.query).iter().map(|x| x * 3.0).collect::<Vec<f32>>();
            let sinks = Array::of(pool.device(), &sinks);
            let sinks = with_sinks.then(|| Floats::from(&sinks));
            let (whole, _) = forward(&q, &k, &v, sinks, &full_spans(&[0, length]), heads, how);
            let (whole, width) = (whole.to_rows(), whole.features());
            let mut cache = KeyValues::new(heads, window);
            cache.append(&k, &v, 0, 1);
            let other = cache.clone();
            let mut by_vectors = cache.clone();
            for token in 1..length {
                cache.append(&k, &v, token, 1);
                if is_cpu {
                    let of = |x: &Activation| x.gather(&[token]).to_vector();
                    by_vectors.append_vectors(&of(&k), &of(&v));
                    let mixed = decode_vector(&of(&q), (&by_vectors, token), sinks, heads, how);
                    assert_eq!((mixed.tokens(), mixed.features()), (width, 1));
                    assert!(mixed.to_rows() == whole[token * width..][..width], "{heads:?} {how:?} vector {token}");
                    by_vectors.trim();
                }
                if is_cpu || token % 17 == 0 || token == length - 1 {
                    // Beside another text, whose company changes nothing.
                    let mixed = decode(&q.gather(&[0, token]), &[(&other, 0), (&cache, token)], sinks, heads, how);
                    let wanted = [&whole[..width], &whole[token * width..][..width]].concat();
                    let whole = |features: usize| features.is_multiple_of(16) && features <= 256;
                    let mma = number != Number::F32 && whole(heads.head_dim) && whole(heads.v_head_dim);
                    // Values are below 1; weights and results are rounded.
                    let limit = if mma { 3.0 * step(number) } else { 0.0 };
                    for (got, want) in mixed.to_rows().iter().zip(wanted) {
                        assert!(
                            (got - want).abs() <= limit,
                            "{number:?} {heads:?} {how:?} token {token}: {got} {want}"
                        );
                    }
                }
                cache.trim();
            }
        }
    }
}

#[test]
fn an_answer_after_a_prefix_equals_all_at_once_to_the_bit() {
    each_engine(|engine| {
        let (heads, how) = (Heads::new(2, 1, 8), Scores { scale: 0.3, softcap: None, window: None });
        let pool = engine.pool();
        let act = |seed, width: usize| Activation::from_rows(&pool, &numbers(seed, 50 * width), width);
        let (q, k, v) = (act(1, 16), act(2, 8), act(3, 8));
        let spans = [full_spans(&[0, 50]).remove(0).masked(&Mask::Prefix(21))];
        let (whole, _) = forward(&q, &k, &v, None, &spans, heads, how);
        let mut cache = KeyValues::new(heads, None);
        cache.append(&k, &v, 0, 21);
        for token in 21..50 {
            cache.append(&k, &v, token, 1);
            let mixed = decode(&q.gather(&[token]), &[(&cache, token)], None, heads, how);
            assert_eq!(mixed.to_rows(), whole.gather(&[token]).to_rows());
        }
    });
}

#[test]
fn several_tokens_of_a_text_each_see_what_is_before_them() {
    each_engine(|engine| {
        let heads = Heads::new(4, 2, 24);
        let pool = engine.pool();
        let act = |seed, width: usize| Activation::from_rows(&pool, &numbers(seed, 60 * width), width);
        let (q, k, v) = (act(1, 96), act(2, 48), act(3, 48));
        for window in [None, Some(Window::Sliding(19))] {
            let how = Scores { scale: 0.3, softcap: None, window };
            let (whole, _) = forward(&q, &k, &v, None, &full_spans(&[0, 60]), heads, how);
            let mut cache = KeyValues::new(heads, window);
            cache.append(&k, &v, 0, 45);
            cache.trim();
            cache.append(&k, &v, 45, 15);
            let tokens: Vec<usize> = (45..60).collect();
            let queries: Vec<_> = tokens.iter().map(|&token| (&cache, token)).collect();
            let mixed = decode(&q.gather(&tokens), &queries, None, heads, how);
            assert_eq!(mixed.to_rows(), whole.gather(&tokens).to_rows(), "{window:?}");
        }
    });
}

#[test]
#[should_panic(expected = "caches that keep what these positions see")]
fn a_cache_that_gave_up_visible_keys_is_refused() {
    let (pool, heads) = (Pool::new(), Heads::new(1, 1, 4));
    let act = Activation::from_rows(&pool, &numbers(1, 40 * 4), 4);
    let mut cache = KeyValues::new(heads, Some(Window::Sliding(4)));
    cache.append(&act, &act, 0, 40);
    cache.trim();
    let how = Scores { scale: 1.0, softcap: None, window: None };
    decode(&act.gather(&[39]), &[(&cache, 39)], None, heads, how);
}
