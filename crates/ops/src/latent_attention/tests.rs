//! Against the definition, and what caches hold.
use super::*;
use crate::activation::Pool;
use crate::testing::{each_engine, f64s, near, numbers};
use tunesmith_device::Array;

const SHAPES: [(LatentHeads, usize); 4] = [
    (LatentHeads { heads: 4, nope: 16, rope: 8, value: 12 }, 32),
    (LatentHeads { heads: 1, nope: 1, rope: 2, value: 3 }, 5),
    (LatentHeads { heads: 19, nope: 7, rope: 4, value: 9 }, 21),
    (LatentHeads { heads: 40, nope: 24, rope: 16, value: 16 }, 48),
];

/// A cache of `length` positions, and its numbers.
fn cache(pool: &std::sync::Arc<Pool>, seed: u64, length: usize, [rank, rope]: [usize; 2]) -> (Latents, Vec<Vec<f64>>) {
    let (latent, turned) = (numbers(seed, length * rank), numbers(seed + 1, length * rope));
    let (latents, k_rot) = (Activation::from_rows(pool, &latent, rank), Activation::from_rows(pool, &turned, rope));
    let mut cache = Latents::new(rank, rope);
    let first = length / 3;
    cache.append(&latents, &k_rot, 0, first);
    cache.append(&latents, &k_rot, first, length - first);
    let rows = latent.chunks(rank).zip(turned.chunks(rope)).map(|(own, turned)| f64s(&[own, turned].concat()));
    (cache, rows.collect())
}

/// Rows in f64, with what is added to them.
fn rows(weight: &[f32], low: Option<LowRank<'_>>, rank: usize) -> Vec<Vec<f64>> {
    let mut rows: Vec<Vec<f64>> = weight.chunks(rank).map(f64s).collect();
    if let Some(LowRank { a, b, width, scale }) = low {
        for (row, b) in rows.iter_mut().zip(b.chunks(width)) {
            for (b, a) in b.iter().zip(a.chunks(rank)) {
                row.iter_mut().zip(a).for_each(|(to, a)| *to += f64::from(scale) * f64::from(*b) * f64::from(*a));
            }
        }
    }
    rows
}

#[test]
fn equals_keys_and_values_of_all_positions() {
    each_engine(|engine| {
        if !engine.is_cpu() {
            return;
        }
        let pool = engine.pool();
        for (heads, rank) in SHAPES {
            let count = heads.heads * (heads.nope + heads.value);
            let weight = numbers(1, count * rank);
            let stored = Array::of(Device::Cpu, &weight);
            let (a, b) = (numbers(2, 3 * rank), numbers(3, count * 3));
            let low = LowRank { a: &a, b: &b, width: 3, scale: 0.7 };
            let lengths = [1, 16, 300, 700];
            let caches: Vec<_> =
                lengths.iter().map(|&length| cache(&pool, length as u64, length, [rank, heads.rope])).collect();
            // Queries at the end of a text, and one before it.
            let queries: Vec<(&Latents, usize)> = caches
                .iter()
                .map(|(cache, _)| (cache, cache.len() - 1))
                .chain([(&caches[3].0, 255), (&caches[3].0, 256)])
                .collect();
            let q = numbers(4, queries.len() * heads.heads * heads.key());
            let act = Activation::from_rows(&pool, &q, heads.heads * heads.key());
            for low_rank in [None, Some(low)] {
                let projection = Projection { weight: Store::from(&stored), low_rank, rank };
                let mixed = decode(&act, &queries, projection, heads, 0.1);
                assert_eq!(mixed.features(), heads.heads * heads.value);
                let weight = rows(&weight, low_rank, rank);
                for (index, q) in q.chunks(heads.heads * heads.key()).enumerate() {
                    let (text, end) = (index.min(3), queries[index].1 + 1);
                    let wanted = reference::decode(&f64s(q), &caches[text].1[..end], &weight, heads, f64::from(0.1f32));
                    near("mixed", &mixed.row(index), &wanted, 1e-5);
                    // Whatever else is asked.
                    let alone = decode(&act.gather(&[index]), &queries[index..=index], projection, heads, 0.1);
                    assert_eq!(alone.row(0), mixed.row(index), "query {index}");
                }
            }
        }
    });
}

#[test]
fn a_cache_gives_back_what_it_took_and_copies_go_their_own_way() {
    let pool = Pool::new();
    let (one, rows) = cache(&pool, 1, 40, [5, 3]);
    assert_eq!((one.len(), one.bytes()), (40, 3 * 16 * 8 * 4));
    let (two, others) = cache(&pool, 7, 19, [5, 3]);
    let (latent, k_rot) = Latents::concat(&pool, &[(&one, 37), (&two, 19)]);
    for (at, wanted) in rows[..37].iter().chain(&others).enumerate() {
        assert_eq!(&f64s(&[latent.row(at), k_rot.row(at)].concat()), wanted);
    }
    let mut copy = one.clone();
    copy.truncate(33);
    assert_eq!((copy.len(), copy.bytes()), (33, 3 * 16 * 8 * 4));
    let (act, turned) = (Activation::from_rows(&pool, &[9.0; 5], 5), Activation::from_rows(&pool, &[8.0; 3], 3));
    copy.append(&act, &turned, 0, 1);
    assert_eq!(copy.position(33), [9.0, 9.0, 9.0, 9.0, 9.0, 8.0, 8.0, 8.0]);
    assert_eq!(f64s(one.position(33)), rows[33]);
    copy.truncate(16);
    assert_eq!(copy.bytes(), 16 * 8 * 4);
    copy.clear();
    assert!(copy.is_empty() && copy.bytes() == 0);
}

#[test]
#[should_panic(expected = "caches of such latents with these positions")]
fn a_position_that_the_cache_lacks_is_refused() {
    let pool = Pool::new();
    let (heads, rank) = SHAPES[0];
    let (cache, _) = cache(&pool, 1, 5, [rank, heads.rope]);
    let weight = Array::of(Device::Cpu, &numbers(1, heads.heads * (heads.nope + heads.value) * rank));
    let projection = Projection { weight: Store::from(&weight), low_rank: None, rank };
    decode(&pool.act(1, heads.heads * heads.key()), &[(&cache, 5)], projection, heads, 1.0);
}
