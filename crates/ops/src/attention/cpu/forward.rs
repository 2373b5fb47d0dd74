//! The forward pass: strips of queries walk over blocks of keys.
use super::amx::{InTiles, TilesTo, padded};
use super::operands::{Operands, Pairs, Panels, Part, Singles, split_scale};
use super::{BLOCK, tasks};
use crate::activation::{Activation, LANES, Pool, unalign};
use crate::attention::{Heads, Scores};
use crate::par::{self, Shared};
use crate::scratch::{Cutter, with_scratch};
use crate::simd::{PairLanes, Simd, TileLanes, dispatch, dispatch_pairs};
use crate::spans::{Span, Visibility};
use std::ops::Range;
use std::sync::Arc;

/// Below every score, above minus infinity: a running maximum that starts here never gives `inf - inf`, even where a
/// whole block of keys is hidden from a query.
pub(super) const LOWEST: f32 = -1e30;

/// Key panels in a block of the forward pass.
pub(super) const KEY_PANELS: usize = 16;

/// Where the running maximum and the running sum of a query's softmax start: at its sink. None is a sink of minus
/// infinity.
pub(super) fn start(sink: f32) -> (f32, f32) {
    let most = sink.max(LOWEST);
    (most, (sink - most).exp())
}

/// The keys that the queries of a strip see. Lanes past the last query repeat it.
struct Visible {
    /// The last key of each query, and the one before its first, which may be -1.
    last: [[f32; LANES]; 2],
    before: [[f32; LANES]; 2],
    /// The keys that all queries see, and those that any sees.
    all: Range<usize>,
    any: Range<usize>,
}

impl Visible {
    /// For `panels` query panels from number `strip` on.
    fn new(visibility: Visibility<'_>, strip: usize, panels: usize) -> Self {
        let last_query = visibility.queries() - 1;
        let (mut last, mut before) = ([[0.0; LANES]; 2], [[0.0; LANES]; 2]);
        let mut all = visibility.keys_of(strip * LANES);
        let mut any = all.clone();
        for (panel, (last, before)) in last.iter_mut().zip(&mut before).enumerate().take(panels) {
            for (lane, (last, before)) in last.iter_mut().zip(before).enumerate() {
                let seen = visibility.keys_of(((strip + panel) * LANES + lane).min(last_query));
                (*last, *before) = (seen.end as f32 - 1.0, seen.start as f32 - 1.0);
                all = all.start.max(seen.start)..all.end.min(seen.end);
                any = any.start.min(seen.start)..any.end.max(seen.end);
            }
        }
        Self { last, before, all, any }
    }
}

struct Forward<'a> {
    heads: Heads,
    how: Scores,
    span: &'a Span,
    k: *const f32,
    v: *const f32,
    q: *const f32,
    o: *mut f32,
    lse: *mut f32,
    scores: *mut f32,
    sink: f32,
    /// What scores are multiplied by.
    scale: f32,
}

/// One head of one sequence: `q` is `[query panels][head_dim][16]`, `o` `[query panels][v_head_dim][16]`, `k`
/// `[key panels][head_dim][16]`, `v` `[key panels][v_head_dim][16]`, all aligned. `lse` is `[query panels][16]`,
/// `scores` has room for `PANELS * KEY_PANELS * 256` of a tile's panels, `sink` is minus infinity for none. Pairs are along the
/// features of `q` and `k`, and along the keys of `v`.
///
/// # Safety
/// The features of `O`; the arrays are as large as said above and do not overlap; the span has queries, each of which
/// sees keys below the span's `keys`, at least one.
#[inline(always)]
unsafe fn forward_kernel<O: Operands<Wide = S, Tile = T>, S: Simd, T: TileLanes<Sum = S::V>>(job: &Forward<'_>) {
    let Heads { head_dim, v_head_dim, .. } = job.heads;
    let visibility = job.span.visibility(job.how.window);
    let query_panels = visibility.queries().div_ceil(LANES);
    let (key_panel, value_panel) = (O::score_panel(head_dim), v_head_dim * LANES);
    let along = O::along(v_head_dim, job.span.keys.div_ceil(LANES).next_multiple_of(O::STEP));
    let (most_at_first, total_at_first) = start(job.sink);
    let score_stride = KEY_PANELS * BLOCK;
    // SAFETY: the caller says so.
    let engine = unsafe { O::engine() };
    let mut strip = 0;
    while strip < query_panels {
        let panels = O::Tile::TILE_PANELS.min(query_panels - strip);
        let visible = Visible::new(visibility, strip, panels);
        let first_panel = visible.any.start / LANES / O::STEP * O::STEP;
        let key_panels = visible.any.end.div_ceil(LANES).next_multiple_of(O::STEP);
        // SAFETY: a strip is `panels` query panels below `query_panels`. A block is at most KEY_PANELS key panels, the
        // last of them below `key_panels`, which holds a key, for visible keys are below `keys`. Score rows are below
        // LANES in each of them, features below `head_dim` or `v_head_dim`.
        unsafe {
            let (q, o) = (job.q.add(strip * key_panel), job.o.add(strip * value_panel));
            let mut most = [S::splat(most_at_first); 2];
            let mut total = [S::splat(total_at_first); 2];
            let mut block = first_panel;
            while block < key_panels {
                // Blocks end at the same keys wherever a strip's window begins: a query's sums do not depend on its strip.
                let count = (key_panels - block).min(KEY_PANELS - block % KEY_PANELS);
                let queries = Panels { first: q, apart: key_panel, count: panels };
                let scores = Panels { first: job.scores, apart: score_stride, count: panels };
                O::scores(&engine, head_dim, (job.k.add(block * key_panel), count), queries, scores);
                for kp in 0..count {
                    let key = (block + kp) * LANES;
                    if job.scale != 1.0 {
                        for panel in 0..panels {
                            for row in 0..LANES {
                                let to = job.scores.add(panel * score_stride + kp * BLOCK + row * LANES);
                                S::store(to, S::mul(S::load(to), S::splat(job.scale)));
                            }
                        }
                    }
                    if let Some(cap) = job.how.softcap {
                        for panel in 0..panels {
                            for row in 0..LANES {
                                let to = job.scores.add(panel * score_stride + kp * BLOCK + row * LANES);
                                S::store(to, S::mul(S::splat(cap), S::tanh(S::mul(S::load(to), S::splat(1.0 / cap)))));
                            }
                        }
                    }
                    let hidden = S::splat(f32::NEG_INFINITY);
                    if key + LANES > visible.all.end {
                        for (panel, last) in visible.last.iter().enumerate().take(panels) {
                            let last = S::load(last.as_ptr());
                            for row in 0..LANES {
                                let to = job.scores.add(panel * score_stride + kp * BLOCK + row * LANES);
                                S::store(to, S::if_gt(S::splat((key + row) as f32), last, hidden, S::load(to)));
                            }
                        }
                    }
                    if key < visible.all.start {
                        for (panel, before) in visible.before.iter().enumerate().take(panels) {
                            let before = S::load(before.as_ptr());
                            for row in 0..LANES {
                                let to = job.scores.add(panel * score_stride + kp * BLOCK + row * LANES);
                                S::store(to, S::if_gt(S::splat((key + row) as f32), before, S::load(to), hidden));
                            }
                        }
                    }
                }
                for panel in 0..panels {
                    let scores = job.scores.add(panel * score_stride);
                    let mut new = most[panel];
                    for row in 0..count * LANES {
                        new = S::max(new, S::load(scores.add(row * LANES)));
                    }
                    let shrink = S::exp(S::sub(most[panel], new));
                    let mut sum = S::splat(0.0);
                    for row in 0..count * LANES {
                        let to = scores.add(row * LANES);
                        let p = S::exp(S::sub(S::load(to), new));
                        sum = S::add(sum, p);
                        S::store(to, p);
                    }
                    O::along_rows(count * LANES, scores);
                    total[panel] = S::fma(total[panel], shrink, sum);
                    most[panel] = new;
                    if block > first_panel {
                        for feature in 0..v_head_dim {
                            let to = o.add(panel * value_panel + feature * LANES);
                            S::store(to, S::mul(S::load(to), shrink));
                        }
                    }
                }
                let scores = scores.to_read();
                let result = Panels { first: o, apart: value_panel, count: panels };
                let values = (job.v.add(block * along.panel), along, count);
                O::sums(&engine, v_head_dim, values, scores, result, block > first_panel);
                block += count;
            }
            for panel in 0..panels {
                let inverse = S::div(S::splat(1.0), total[panel]);
                for feature in 0..v_head_dim {
                    let to = o.add(panel * value_panel + feature * LANES);
                    S::store(to, S::mul(S::load(to), inverse));
                }
                let (mut top, mut sums) = ([0.0f32; LANES], [0.0f32; LANES]);
                S::store(top.as_mut_ptr(), most[panel]);
                S::store(sums.as_mut_ptr(), total[panel]);
                for lane in 0..LANES {
                    *job.lse.add((strip + panel) * LANES + lane) = top[lane] + sums[lane].ln();
                }
            }
        }
        strip += panels;
    }
}

/// # Safety
/// As [`forward_kernel`].
#[inline(always)]
unsafe fn forward_singles<S: Simd>(job: &Forward<'_>) {
    // SAFETY: as the caller says.
    unsafe { forward_kernel::<Singles<S>, S, S>(job) }
}

/// # Safety
/// As [`forward_kernel`].
#[inline(always)]
unsafe fn forward_pairs<P: PairLanes>(job: &Forward<'_>) {
    // SAFETY: as the caller says.
    unsafe { forward_kernel::<Pairs<P>, P::Wide, P>(job) }
}

/// # Safety
/// As [`forward_kernel`]; the processor has tiles.
#[inline(always)]
unsafe fn forward_tiles<P: PairLanes>(job: &Forward<'_>) {
    // SAFETY: as the caller says.
    unsafe { forward_kernel::<InTiles<P>, P::Wide, P>(job) }
}

dispatch! { fn forward_head = forward_singles(job: &Forward<'_>); }
dispatch_pairs! { fn forward_head_in_pairs = forward_pairs(job: &Forward<'_>); }
dispatch_pairs! { fn forward_head_in_tiles = forward_tiles(job: &Forward<'_>); }

/// [`crate::attention::forward`], whose checks have passed.
pub(in crate::attention) fn forward(
    q: &Activation,
    k: &Activation,
    v: &Activation,
    sinks: Option<&[f32]>,
    spans: &[Span],
    heads: Heads,
    how: Scores,
) -> (Activation, Activation) {
    let Heads { head_dim, v_head_dim, .. } = heads;
    let pool: &Arc<Pool> = q.pool();
    let mut o = pool.act(q.tokens(), heads.query * v_head_dim);
    let mut lse = pool.act(q.tokens(), heads.query);
    let (o_to, lse_to): (Shared<f32>, Shared<f32>) = (o.shared(), lse.shared());
    let (o_stride, lse_stride) = (o.stride(), lse.stride());
    let group = heads.query / heads.kv;
    let (order, pairs) = (tasks(spans, heads.kv), q.pool().in_pairs());
    let tiles = pairs && super::amx::fits(heads);
    let [step, even] = padded(tiles);
    let (of_queries, scale) = if pairs { split_scale(how.scale) } else { (how.scale, 1.0) };
    par::run(order.len(), |task| {
        let (span, kv) = (&spans[order[task].0], order[task].1);
        if span.positions.is_empty() {
            return;
        }
        let (query_tokens, key_tokens) = (span.query_tokens(), span.key_tokens());
        let features = |head: usize, dim: usize| head * dim..(head + 1) * dim;
        let [queries, keys] = [&query_tokens, &key_tokens].map(|tokens| tokens.len().next_multiple_of(step));
        let score_floats = 2 * KEY_PANELS * BLOCK;
        let panel = if pairs { LANES * head_dim.max(v_head_dim) } else { 0 };
        let features_of_keys = head_dim.next_multiple_of(even);
        let floats = (keys + queries) * (features_of_keys + v_head_dim) + queries + score_floats + panel;
        with_scratch(floats, |scratch| {
            let mut scratch = Cutter(scratch);
            let (ks, vs) = (scratch.take(keys * features_of_keys), scratch.take(keys * v_head_dim));
            let (qs, os) = (scratch.take(queries * features_of_keys), scratch.take(queries * v_head_dim));
            let temporary = scratch.take(panel);
            let (lses, scores) = (scratch.take(queries), scratch.take(score_floats));
            // SAFETY: heads and spans have been held against the activations. `scratch` has cut parts of the lengths
            // that `realign` and the kernel ask for, which do not overlap. `o` and `lse` have the rows of `q` and live
            // until all tasks are done; no other task writes these rows of these heads.
            unsafe {
                let (keys, values) = (
                    Part::of(k, features(kv, head_dim), &key_tokens),
                    Part::of(v, features(kv, v_head_dim), &key_tokens),
                );
                if tiles {
                    keys.to_tiles(temporary, TilesTo { rows: ks, ..TilesTo::NONE });
                    values.to_tiles(temporary, TilesTo { sums: vs, ..TilesTo::NONE });
                } else if pairs {
                    keys.to_pairs(temporary, ks, std::ptr::null_mut());
                    values.to_pairs(temporary, std::ptr::null_mut(), vs);
                } else {
                    keys.to_panels(ks);
                    values.to_panels(vs);
                }
                for head in kv * group..(kv + 1) * group {
                    let queries = Part { scale: of_queries, ..Part::of(q, features(head, head_dim), &query_tokens) };
                    let sink = sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
                    let job = Forward { heads, how, span, k: ks, v: vs, q: qs, o: os, lse: lses, scores, sink, scale };
                    if tiles {
                        queries.to_tiles(temporary, TilesTo { columns: qs, ..TilesTo::NONE });
                        forward_head_in_tiles(&job);
                    } else if pairs {
                        queries.to_pairs(temporary, qs, std::ptr::null_mut());
                        forward_head_in_pairs(&job);
                    } else {
                        queries.to_panels(qs);
                        forward_head(&job);
                    }
                    unalign(os, o_to.get(), o_stride, features(head, v_head_dim), query_tokens.clone());
                    unalign(lses, lse_to.get(), lse_stride, head..head + 1, query_tokens.clone());
                }
            }
        });
    });
    (o, lse)
}
