//! Latent attention on the CPU, in four parallel jobs: (1) the queries absorb the key projection, one task for each
//! head; (2) they attend to the latents, one task for sixteen heads and some positions; (3) the results of a query's
//! tasks are joined; (4) the value projection is applied, one task for each head. In jobs 2 and 3 heads are the vector
//! lanes; in jobs 1 and 4 features of a latent are. How positions are divided among tasks does not depend on the number
//! of threads.
use super::{Latents, LowRank, Projection};
use crate::activation::{Activation, LANES};
use crate::latent_heads::LatentHeads;
use crate::par;
use crate::scratch::{Cutter, with_scratch};
use crate::simd::{Simd, dispatch};
use std::ops::Range;

/// How many positions one task of job 2 takes.
const CHUNK: usize = 256;
/// How many partial results exist at once, unless a single query has more. Each takes `rank + 2` vectors.
const PARTS: usize = 1024;
/// How many positions' scores are summed at once, to hide the latency of an addition.
const AT_ONCE: usize = 8;
/// How many sums an inner product is divided into, for the same reason.
const SUMS: usize = 4;
/// How many features of a latent are mixed at once.
const FEATURES: usize = 4;

/// Adds `x` times `row` to `to`.
///
/// # Safety
/// The CPU has the features of `S`; both hold `vectors` vectors.
#[inline(always)]
unsafe fn add_kernel<S: Simd>(x: f32, row: *const f32, to: *mut f32, vectors: usize) {
    // SAFETY: `at` stays below what both hold.
    unsafe {
        let x = S::splat(x);
        for at in (0..vectors * LANES).step_by(LANES) {
            S::store(to.add(at), S::fma(x, S::load(row.add(at)), S::load(to.add(at))));
        }
    }
}

/// The inner product of `a` and `b`.
///
/// # Safety
/// The CPU has the features of `S`; both hold `vectors` vectors.
#[inline(always)]
unsafe fn dot_kernel<S: Simd>(a: *const f32, b: *const f32, vectors: usize) -> f32 {
    // SAFETY: `at` stays below what both hold, and `lanes` holds a vector.
    unsafe {
        let mut sums = [S::splat(0.0); SUMS];
        let product = |vector: usize, sum: S::V| {
            let at = vector * LANES;
            S::fma(S::load(a.add(at)), S::load(b.add(at)), sum)
        };
        let whole = vectors - vectors % SUMS;
        for first in (0..whole).step_by(SUMS) {
            for (number, sum) in sums.iter_mut().enumerate() {
                *sum = product(first + number, *sum);
            }
        }
        for (vector, sum) in (whole..vectors).zip(&mut sums) {
            *sum = product(vector, *sum);
        }
        let mut lanes = [0.0f32; LANES];
        let [first, second, third, fourth] = sums;
        S::store(lanes.as_mut_ptr(), S::add(S::add(first, second), S::add(third, fourth)));
        lanes.iter().sum()
    }
}

/// Sixteen heads of one query over some positions of its text.
struct Job<'a> {
    /// The cache's pages, each `[16][width]`.
    pages: &'a [*const f32],
    /// How many positions the pages hold; the last page may be partly used.
    positions: usize,
    width: usize,
    rank: usize,
    /// The absorbed queries, `[width][16 heads]`, already scaled.
    q: *const f32,
    /// Where the result goes: the mixed latents `[rank][16 heads]`, then each head's largest score, then its sum of
    /// exponentials.
    to: *mut f32,
}

/// # Safety
/// The CPU has the features of `S`. There is a position; `pages` are as many as hold `positions`, and all arrays as large as [`Job`] says.
#[inline(always)]
unsafe fn attend_kernel<S: Simd>(job: &Job<'_>) {
    let &Job { pages, positions, width, rank, q, to } = job;
    let mut weights = [0.0f32; LANES * LANES];
    let weights = weights.as_mut_ptr();
    // SAFETY: a page holds sixteen positions of `width` floats; `rank` is at most `width`; `weights` holds a vector for each
    // position of a page; `to` holds `rank + 2` vectors.
    unsafe {
        let (mut most, mut total) = (S::splat(f32::NEG_INFINITY), S::splat(0.0));
        for feature in 0..rank {
            S::store(to.add(feature * LANES), S::splat(0.0));
        }
        for (number, &page) in pages.iter().enumerate() {
            let count = (positions - number * LANES).min(LANES);
            let mut new = most;
            for first in (0..count).step_by(AT_ONCE) {
                let mut sums = [S::splat(0.0); AT_ONCE];
                let rows = page.add(first * width);
                for feature in 0..width {
                    let query = S::load(q.add(feature * LANES));
                    for (position, sum) in sums.iter_mut().enumerate() {
                        *sum = S::fma(S::splat(*rows.add(position * width + feature)), query, *sum);
                    }
                }
                for (position, sum) in sums.iter().enumerate() {
                    S::store(weights.add((first + position) * LANES), *sum);
                }
            }
            for position in 0..count {
                new = S::max(new, S::load(weights.add(position * LANES)));
            }
            let shrink = S::exp(S::sub(most, new));
            total = S::mul(total, shrink);
            for position in 0..count {
                let weight = S::exp(S::sub(S::load(weights.add(position * LANES)), new));
                S::store(weights.add(position * LANES), weight);
                total = S::add(total, weight);
            }
            most = new;
            let mut feature = 0;
            while feature + FEATURES <= rank {
                mix::<S, FEATURES>(page.add(feature), width, weights, count, shrink, to.add(feature * LANES));
                feature += FEATURES;
            }
            while feature < rank {
                mix::<S, 1>(page.add(feature), width, weights, count, shrink, to.add(feature * LANES));
                feature += 1;
            }
        }
        S::store(to.add(rank * LANES), most);
        S::store(to.add((rank + 1) * LANES), total);
    }
}

/// Scales `N` features of the latents mixed so far, and adds those of `count` more positions, `width` floats apart, by
/// their weights.
///
/// # Safety
/// The CPU has the features of `S`; `from`, `weights` and `to` hold these.
#[inline(always)]
unsafe fn mix<S: Simd, const N: usize>(
    from: *const f32,
    width: usize,
    weights: *const f32,
    count: usize,
    shrink: S::V,
    to: *mut f32,
) {
    // SAFETY: as the caller says.
    unsafe {
        let mut sums = [S::splat(0.0); N];
        for (at, sum) in sums.iter_mut().enumerate() {
            *sum = S::mul(S::load(to.add(at * LANES)), shrink);
        }
        for position in 0..count {
            let weight = S::load(weights.add(position * LANES));
            for (at, sum) in sums.iter_mut().enumerate() {
                *sum = S::fma(S::splat(*from.add(position * width + at)), weight, *sum);
            }
        }
        for (at, sum) in sums.iter().enumerate() {
            S::store(to.add(at * LANES), *sum);
        }
    }
}

/// Joins partial results, each as [`Job::to`] has it, to the mean latents `to [rank][16 heads]`.
///
/// # Safety
/// The CPU has the features of `S`; each part holds `rank + 2` vectors, and `to` `rank`. There is a part.
#[inline(always)]
unsafe fn join_kernel<S: Simd>(parts: &[*const f32], rank: usize, to: *mut f32) {
    // SAFETY: as the caller says.
    unsafe {
        let mut most = S::load(parts[0].add(rank * LANES));
        for part in &parts[1..] {
            most = S::max(most, S::load(part.add(rank * LANES)));
        }
        let mut total = S::splat(0.0);
        for (number, part) in parts.iter().enumerate() {
            let shrink = S::exp(S::sub(S::load(part.add(rank * LANES)), most));
            total = S::fma(S::load(part.add((rank + 1) * LANES)), shrink, total);
            for at in (0..rank * LANES).step_by(LANES) {
                let before = if number == 0 { S::splat(0.0) } else { S::load(to.add(at)) };
                S::store(to.add(at), S::fma(S::load(part.add(at)), shrink, before));
            }
        }
        let inverse = S::div(S::splat(1.0), total);
        for at in (0..rank * LANES).step_by(LANES) {
            S::store(to.add(at), S::mul(S::load(to.add(at)), inverse));
        }
    }
}

dispatch! { fn add_row = add_kernel(x: f32, row: *const f32, to: *mut f32, vectors: usize); }
dispatch! { fn dot = dot_kernel(a: *const f32, b: *const f32, vectors: usize) -> f32; }
dispatch! { fn attend = attend_kernel(job: &Job<'_>); }
dispatch! { fn join = join_kernel(parts: &[*const f32], rank: usize, to: *mut f32); }

/// [`super::decode`], which has checked the arguments.
pub(super) fn decode(
    q: &Activation,
    queries: &[(&Latents, usize)],
    projection: Projection<'_>,
    heads: LatentHeads,
    scale: f32,
) -> Activation {
    let (pool, panels) = (q.pool(), heads.heads.div_ceil(LANES));
    let mut o = pool.act(queries.len(), heads.heads * heads.value);
    let mut first = 0;
    while first < queries.len() {
        let mut parts = 0;
        let room = |&&(_, position): &&(&Latents, usize)| {
            parts += panels * (position / CHUNK + 1);
            parts <= PARTS
        };
        let count = queries[first..].iter().take_while(room).count().max(1);
        let tokens = first..first + count;
        first += count;
        let mut absorbed = pool.act(count * panels * LANES, projection.rank + heads.rope);
        // There may be lanes without a head, which have to be zero.
        absorbed.zero();
        absorb(q, tokens.clone(), &mut absorbed, projection, heads, scale);
        let mut latents = pool.act(count * panels * LANES, projection.rank);
        mix_latents(&absorbed, &queries[tokens.clone()], &mut latents, panels);
        drop(absorbed);
        make_values(&latents, &mut o, tokens, projection, heads);
    }
    o
}

/// Job 1: turns queries `q` into `[query][panel of heads][rank + rope][16 heads]`, what latents and rotated parts of
/// keys are multiplied by, both scaled.
fn absorb(
    q: &Activation,
    tokens: Range<usize>,
    absorbed: &mut Activation,
    projection: Projection<'_>,
    heads: LatentHeads,
    scale: f32,
) {
    let Projection { weight, low_rank, rank } = projection;
    let (count, padded) = (tokens.len(), rank.next_multiple_of(LANES));
    let (panels, stride) = (heads.heads.div_ceil(LANES), absorbed.stride());
    let to = absorbed.shared();
    par::run(heads.heads, |head| {
        let inner = low_rank.map_or(0, |low| low.width);
        with_scratch((1 + count) * padded + count * inner, |scratch| {
            let mut scratch = Cutter(scratch);
            let (row, sums, lows) = (scratch.cut(padded), scratch.cut(count * padded), scratch.cut(count * inner));
            row.fill(0.0);
            sums.fill(0.0);
            lows.fill(0.0);
            let query = |token: usize, feature: usize| {
                let token = tokens.start + token;
                q.panel(token / LANES)[(head * heads.key() + feature) * LANES + token % LANES] * scale
            };
            let add = |row: &[f32], x: f32, sum: &mut [f32]| {
                // SAFETY: both are `padded` floats, that many vectors.
                unsafe { add_row(x, row.as_ptr(), sum.as_mut_ptr(), padded / LANES) };
            };
            for feature in 0..heads.nope {
                let number = head * (heads.nope + heads.value) + feature;
                weight.widen(number * rank, &mut row[..rank]);
                for (token, sum) in sums.chunks_exact_mut(padded).enumerate() {
                    add(row, query(token, feature), sum);
                }
                let Some(LowRank { b, width, scale, .. }) = low_rank else { continue };
                for (token, low) in lows.chunks_exact_mut(width).enumerate() {
                    let x = query(token, feature) * scale;
                    low.iter_mut().zip(&b[number * width..]).for_each(|(low, b)| *low += x * b);
                }
            }
            for (at, a) in low_rank.iter().flat_map(|low| low.a.chunks_exact(rank)).enumerate() {
                row[..rank].copy_from_slice(a);
                for (sum, low) in sums.chunks_exact_mut(padded).zip(lows.chunks_exact(inner)) {
                    add(row, low[at], sum);
                }
            }
            for (token, sum) in sums.chunks_exact(padded).enumerate() {
                let panel = token * panels + head / LANES;
                let turns = (heads.nope..heads.key()).map(|feature| query(token, feature));
                for (feature, x) in sum[..rank].iter().copied().chain(turns).enumerate() {
                    // SAFETY: there is a panel for each query and sixteen heads, of `rank + rope` features, which these are; no
                    // other task has this head, and so this lane.
                    unsafe { *to.get().add(panel * stride + feature * LANES + head % LANES) = x };
                }
            }
        });
    });
}

/// Jobs 2 and 3: the means of the latents, weighted by attention, `[query][panel of heads][rank][16 heads]`.
fn mix_latents(absorbed: &Activation, queries: &[(&Latents, usize)], latents: &mut Activation, panels: usize) {
    let (rank, width) = (latents.features(), absorbed.features());
    // For each query and panel of heads, which partial results are its own.
    let mut tasks = Vec::new();
    let mut of_panels = Vec::with_capacity(queries.len() * panels);
    for (query, (_, position)) in queries.iter().enumerate() {
        for panel in 0..panels {
            let first = tasks.len();
            tasks.extend((0..=*position).step_by(CHUNK).map(|start| (query, query * panels + panel, start)));
            of_panels.push(first..tasks.len());
        }
    }
    let mut parts = absorbed.pool().act(tasks.len() * LANES, rank + 2);
    let (stride, to) = (parts.stride(), parts.shared());
    par::run(tasks.len(), |task| {
        let (query, panel, start) = tasks[task];
        let (cache, position) = queries[query];
        let positions = (position + 1 - start).min(CHUNK);
        let mut pages = [std::ptr::null(); CHUNK / LANES];
        let used = positions.div_ceil(LANES);
        for (number, page) in pages.iter_mut().enumerate().take(used) {
            *page = cache.page(start / LANES + number).as_ptr();
        }
        let q = absorbed.panel(panel).as_ptr();
        // SAFETY: a chunk begins with a page, and the cache holds the positions up to `position`, each of `width` floats in pages
        // of sixteen. `q` is a panel of `width` features. A part is a panel of its own of `rank + 2` features.
        unsafe {
            let to = to.get().add(task * stride);
            attend(&Job { pages: &pages[..used], positions, width, rank, q, to });
        }
    });
    let (stride, to) = (latents.stride(), latents.shared());
    par::run(of_panels.len(), |panel| {
        let parts: Vec<*const f32> = of_panels[panel].clone().map(|part| parts.panel(part).as_ptr()).collect();
        // SAFETY: each part is a panel of `rank + 2` features, of which a query has one at least; `latents` has a panel of `rank`
        // features for each query and sixteen heads, which no other task has.
        unsafe { join(&parts, rank, to.get().add(panel * stride)) };
    });
}

/// Job 4: turns mean latents into the values of all heads.
fn make_values(
    latents: &Activation,
    o: &mut Activation,
    tokens: Range<usize>,
    projection: Projection<'_>,
    heads: LatentHeads,
) {
    let Projection { weight, low_rank, rank } = projection;
    let (count, padded) = (tokens.len(), rank.next_multiple_of(LANES));
    let (panels, stride) = (heads.heads.div_ceil(LANES), o.stride());
    let to = o.shared();
    par::run(heads.heads, |head| {
        let inner = low_rank.map_or(0, |low| low.width);
        with_scratch((1 + count) * padded + count * inner, |scratch| {
            let mut scratch = Cutter(scratch);
            let (row, means, lows) = (scratch.cut(padded), scratch.cut(count * padded), scratch.cut(count * inner));
            row.fill(0.0);
            means.fill(0.0);
            for (token, mean) in means.chunks_exact_mut(padded).enumerate() {
                let panel = latents.panel(token * panels + head / LANES);
                mean.iter_mut().zip(panel.chunks_exact(LANES)).for_each(|(mean, lanes)| *mean = lanes[head % LANES]);
            }
            let product = |row: &[f32], mean: &[f32]| {
                // SAFETY: both are `padded` floats, that many vectors.
                unsafe { dot(row.as_ptr(), mean.as_ptr(), padded / LANES) }
            };
            for (at, a) in low_rank.iter().flat_map(|low| low.a.chunks_exact(rank)).enumerate() {
                row[..rank].copy_from_slice(a);
                for (low, mean) in lows.chunks_exact_mut(inner).zip(means.chunks_exact(padded)) {
                    low[at] = product(row, mean);
                }
            }
            for feature in 0..heads.value {
                let number = head * (heads.nope + heads.value) + heads.nope + feature;
                weight.widen(number * rank, &mut row[..rank]);
                for (query, mean) in means.chunks_exact(padded).enumerate() {
                    let mut value = product(row, mean);
                    if let Some(LowRank { b, width, scale, .. }) = low_rank {
                        let low = &lows[query * width..][..width];
                        value += scale * low.iter().zip(&b[number * width..]).map(|(low, b)| low * b).sum::<f32>();
                    }
                    let token = tokens.start + query;
                    let at = (head * heads.value + feature) * LANES + token % LANES;
                    // SAFETY: `o` has a token for each query and `heads * value` features; no other task has this head's.
                    unsafe { *to.get().add(token / LANES * stride + at) = value };
                }
            }
        });
    });
}
