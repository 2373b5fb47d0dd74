//! Single queries, each against a text's cache. The result is that of [`super::forward`] to the last bit: the same sums
//! in the same order, only with keys and features in the vector's lanes where the batch has queries.
use super::forward::{KEY_PANELS, start};
use crate::activation::{Activation, LANES};
use crate::attention::cache::{KeyValues, Page};
use crate::attention::{Heads, Scores};
use crate::par::{self, Shared};
use crate::scratch::{Cutter, with_scratch};
use crate::simd::{Simd, dispatch, prefetch_far};
use crate::spans::Window;
use std::ops::Range;

/// Pages whose scores are summed at once, so that the sums' latency is hidden.
const PAGES: usize = 4;
/// The number of keys that are scored at a time.
const KEYS: usize = KEY_PANELS * LANES;

struct Job<'a> {
    cache: &'a KeyValues,
    /// Of the query in its text.
    position: usize,
    how: Scores,
    /// The key/value head, and how many query heads of its group are asked.
    head: (usize, usize),
    /// Queries, scaled: `[heads][head_dim]`.
    q: *const f32,
    /// `[heads][v_head_dim, filled up]`.
    o: *mut f32,
    /// `[heads][KEYS]`.
    scores: *mut f32,
    /// The sinks of these heads.
    sinks: Option<&'a [f32]>,
}

/// The scores of one query on `PANELS` pages: `to[page][16 keys]`. Meanwhile what lies `values` floats after the keys is fetched.
///
/// # Safety
/// The features of `S`; each of `keys`, as many as `PANELS`, holds `dim` vectors, `q` holds `dim` floats, `to` has room
/// for `PANELS` vectors.
#[inline(always)]
unsafe fn scores_of<S: Simd, const PANELS: usize>(
    dim: usize,
    keys: &[*const f32],
    values: usize,
    q: *const f32,
    to: *mut f32,
) {
    // SAFETY: `feature` is below `dim` and `page` below PANELS: within what the caller promises.
    unsafe {
        let mut sums = [S::splat(0.0); PANELS];
        for feature in 0..dim {
            let query = S::splat(*q.add(feature));
            for (sum, page) in sums.iter_mut().zip(keys) {
                prefetch_far(page.wrapping_add(values + feature * LANES));
                *sum = S::fma(S::load(page.add(feature * LANES)), query, *sum);
            }
        }
        for (page, sum) in sums.iter().enumerate() {
            S::store(to.add(page * LANES), *sum);
        }
    }
}

/// # Safety
/// The features of `S`.
#[inline(always)]
unsafe fn lane<S: Simd>(value: S::V) -> f32 {
    let mut lanes = [0.0f32; LANES];
    // SAFETY: the caller has the features of `S`, and `lanes` holds 16 floats.
    unsafe { S::store(lanes.as_mut_ptr(), value) };
    lanes[0]
}

/// # Safety
/// The features of `S`. The arrays are as large as [`Job`] says, with at most [`MAX_GROUP`] heads. The cache keeps all
/// pages from that of the first key which `position` sees.
#[inline(always)]
unsafe fn decode_kernel<S: Simd>(job: &Job<'_>) {
    let (dim, padded) = (job.cache.heads().head_dim, job.cache.value_floats());
    let (kv, heads) = job.head;
    let position = job.position;
    let first_key = Window::causal(job.how.window, position).start;
    let (mut block, last) = (first_key / LANES, position / LANES);
    let first_block = block;
    let values_after_keys = job.cache.key_floats() + kv * LANES * padded - kv * dim * LANES;
    let (mut most, mut total) = ([0.0f32; MAX_GROUP], [0.0f32; MAX_GROUP]);
    for (head, (most, total)) in most.iter_mut().zip(&mut total).enumerate().take(heads) {
        (*most, *total) = start(job.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]));
    }
    // SAFETY: pages `block..=last` are kept, as the caller says, so that `page` is never null; each holds the keys and
    // values of all key/value heads. A block is at most KEY_PANELS pages, `KEYS` scores of a head; heads are below
    // those of `q`, `o` and `scores`.
    unsafe {
        while block <= last {
            // Blocks end where those of the forward pass end, which keeps the running maximum's steps the same.
            let count = (last + 1 - block).min(KEY_PANELS - block % KEY_PANELS);
            let page = |index: usize| job.cache.page(block + index).map_or(std::ptr::null(), Page::ptr);
            for head in 0..heads {
                let scores = job.scores.add(head * KEYS);
                let q = job.q.add(head * dim);
                let mut index = 0;
                while index < count {
                    let mut keys = [std::ptr::null(); PAGES];
                    let pages = PAGES.min(count - index);
                    for (slot, key) in keys.iter_mut().enumerate().take(pages) {
                        *key = page(index + slot).add(kv * dim * LANES);
                    }
                    let to = scores.add(index * LANES);
                    match pages {
                        PAGES => scores_of::<S, PAGES>(dim, &keys, values_after_keys, q, to),
                        3 => scores_of::<S, 3>(dim, &keys[..3], values_after_keys, q, to),
                        2 => scores_of::<S, 2>(dim, &keys[..2], values_after_keys, q, to),
                        _ => scores_of::<S, 1>(dim, &keys[..1], values_after_keys, q, to),
                    }
                    index += pages;
                }
                if let Some(cap) = job.how.softcap {
                    for index in 0..count {
                        let to = scores.add(index * LANES);
                        S::store(to, S::mul(S::splat(cap), S::tanh(S::mul(S::load(to), S::splat(1.0 / cap)))));
                    }
                }
                let (start, end) = (block * LANES, (block + count) * LANES);
                for key in (start..first_key.clamp(start, end)).chain((position + 1).min(end)..end) {
                    *scores.add(key - start) = f32::NEG_INFINITY;
                }
                let mut new = S::splat(most[head]);
                for index in 0..count {
                    new = S::max(new, S::load(scores.add(index * LANES)));
                }
                let mut lanes = [0.0f32; LANES];
                S::store(lanes.as_mut_ptr(), new);
                let top = lanes.iter().copied().fold(most[head], f32::max);
                let new = S::splat(top);
                let shrink = S::exp(S::sub(S::splat(most[head]), new));
                let mut sum = 0.0f32;
                for index in 0..count {
                    let to = scores.add(index * LANES);
                    S::store(to, S::exp(S::sub(S::load(to), new)));
                    for key in 0..LANES {
                        sum += *to.add(key);
                    }
                }
                total[head] = lane::<S>(S::fma(S::splat(total[head]), shrink, S::splat(sum)));
                most[head] = top;
                for at in (0..padded).step_by(LANES) {
                    let to = job.o.add(head * padded + at);
                    S::store(to, if block > first_block { S::mul(S::load(to), shrink) } else { S::splat(0.0) });
                }
            }
            for index in 0..count {
                let values = page(index).add(job.cache.key_floats() + kv * LANES * padded);
                for head in 0..heads {
                    let weights = job.scores.add(head * KEYS + index * LANES);
                    for at in (0..padded).step_by(LANES) {
                        let to = job.o.add(head * padded + at);
                        let mut sum = S::load(to);
                        for key in 0..LANES {
                            sum = S::fma(S::load(values.add(key * padded + at)), S::splat(*weights.add(key)), sum);
                        }
                        S::store(to, sum);
                    }
                }
            }
            block += count;
        }
        for (head, total) in total.iter().enumerate().take(heads) {
            let inverse = S::div(S::splat(1.0), S::splat(*total));
            for at in (0..padded).step_by(LANES) {
                let to = job.o.add(head * padded + at);
                S::store(to, S::mul(S::load(to), inverse));
            }
        }
    }
}

/// The largest group that a task takes at once.
const MAX_GROUP: usize = 16;

dispatch! { fn decode_heads = decode_kernel(job: &Job<'_>); }

/// Where the features of a token are: the first of panel 0, floats from panel to panel, and from feature to feature.
#[derive(Clone, Copy)]
struct Place<T> {
    first: T,
    stride: usize,
    apart: usize,
}

/// [`crate::attention::decode`], whose checks have passed.
pub(in crate::attention) fn decode(
    q: &Activation,
    queries: &[(&KeyValues, usize)],
    sinks: Option<&[f32]>,
    heads: Heads,
    how: Scores,
) -> Activation {
    let mut o = q.pool().act(q.tokens(), heads.query * heads.v_head_dim);
    let from = Place { first: Shared(q.ptr().cast_mut()), stride: q.stride(), apart: LANES };
    let to = Place { first: o.shared(), stride: o.stride(), apart: LANES };
    mix([from, to], queries, sinks, heads, how);
    o
}

/// [`crate::attention::decode_vector`], whose checks have passed.
pub(in crate::attention) fn decode_vector(
    q: &Activation,
    query: (&KeyValues, usize),
    sinks: Option<&[f32]>,
    heads: Heads,
    how: Scores,
) -> Activation {
    let features = heads.query * heads.v_head_dim;
    let mut o = q.pool().blank(features, 1);
    o.data_mut()[features..].fill(0.0);
    let from = Place { first: Shared(q.ptr().cast_mut()), stride: 0, apart: 1 };
    let to = Place { first: o.shared(), stride: 0, apart: 1 };
    mix([from, to], &[query], sinks, heads, how);
    o
}

/// What the queries at the first place mix, to the second. The places have a token for each query, with the features of all heads, and
/// nobody else uses them; the first is read only.
fn mix(
    [q, o]: [Place<Shared<f32>>; 2],
    queries: &[(&KeyValues, usize)],
    sinks: Option<&[f32]>,
    heads: Heads,
    how: Scores,
) {
    let Heads { head_dim, v_head_dim, .. } = heads;
    let group = heads.query / heads.kv;
    // Few queries: a group is cut, so that every thread has work.
    let few = queries.len() * heads.kv < 2 * par::threads();
    let part = if few { 1 } else { group.min(MAX_GROUP) };
    let parts: Vec<Range<usize>> = (0..heads.kv)
        .flat_map(|kv| (0..group).step_by(part).map(move |at| kv * group + at..kv * group + group.min(at + part)))
        .collect();
    par::run(queries.len() * parts.len(), |task| {
        let (token, asked) = (task / parts.len(), &parts[task % parts.len()]);
        let (cache, position) = queries[token];
        let (padded, count) = (cache.value_floats(), asked.len());
        with_scratch(count * (head_dim + padded + KEYS) + LANES, |scratch| {
            // Vectors on cache lines of their own.
            let skip = scratch.as_ptr().align_offset(64).min(LANES);
            let mut scratch = Cutter(&mut scratch[skip..]);
            let (scores, os) = (scratch.take(count * KEYS), scratch.take(count * padded));
            let qs = scratch.take(count * head_dim);
            let (panel, lane) = (token / LANES, token % LANES);
            // SAFETY: queries have been held against heads and caches, and visible pages are kept. `scratch` has cut
            // parts as large as `Job` says, which do not overlap. `panel` and `lane` are the query's in `q` and in `o`,
            // which have a token for each query and live until all tasks are done; no other task has these heads of this
            // query.
            unsafe {
                let from = q.first.get().add(panel * q.stride + lane);
                for (index, feature) in (asked.start * head_dim..asked.end * head_dim).enumerate() {
                    *qs.add(index) = *from.add(feature * q.apart) * how.scale;
                }
                let head = (asked.start / group, count);
                let sinks = sinks.map(|sinks| &sinks[asked.clone()]);
                decode_heads(&Job { cache, position, how, head, q: qs, o: os, scores, sinks });
                let to = o.first.get().add(panel * o.stride + lane);
                for (index, head) in asked.clone().enumerate() {
                    for feature in 0..v_head_dim {
                        *to.add((head * v_head_dim + feature) * o.apart) = *os.add(index * padded + feature);
                    }
                }
            }
        });
    });
}
