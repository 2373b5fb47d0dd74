//! The forward pass: strips of queries walk over blocks of keys.
use super::realign::{realign, unalign};
use super::{BLOCK, Cutter, Heads, Scores, check, score_tile, sum_tile, tasks, with_scratch};
use crate::gemm::{tile_rows, with_tile};
use crate::panel::{Act, LANES, Pool};
use crate::par::{self, Shared};
use crate::simd::{Simd, dispatch};
use crate::spans::Span;
use std::sync::Arc;

/// Below every score, above minus infinity: a running maximum that starts here never gives `inf - inf`, even where a
/// whole block of keys is hidden from a query.
pub(super) const LOWEST: f32 = -1e30;

/// Key panels in a block of the forward pass.
pub(super) const KEY_PANELS: usize = 16;
/// Positions of a strip of `panels` query panels as lanes; lanes past the end repeat the last query.
fn lane_positions(
    positions: &[usize],
    first_panel: usize,
    panels: usize,
    out: &mut [[f32; LANES]; 2],
) -> (usize, usize) {
    let last = positions.len() - 1;
    for (panel, lanes) in out.iter_mut().enumerate().take(panels) {
        for (lane, value) in lanes.iter_mut().enumerate() {
            *value = positions[((first_panel + panel) * LANES + lane).min(last)] as f32;
        }
    }
    (positions[(first_panel * LANES).min(last)], positions[((first_panel + panels) * LANES - 1).min(last)])
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
}

/// One head of one sequence: `q`, `o` are `[query panels][dim][16]`, `k`, `v` `[key panels][dim][16]`, all aligned,
/// `lse` is `[query panels][16]`, `scores` has room for `S::PANELS * KEY_PANELS * 256`.
///
/// # Safety
/// The features of `S`; the arrays are as large as said above and do not overlap; the span has queries, whose positions
/// are below its `keys`.
#[inline(always)]
unsafe fn forward_kernel<S: Simd>(job: &Forward<'_>) {
    let (dim, positions) = (job.heads.dim, job.span.positions.as_slice());
    let query_panels = positions.len().div_ceil(LANES);
    let panel_floats = dim * LANES;
    let score_stride = KEY_PANELS * BLOCK;
    let mut strip = 0;
    while strip < query_panels {
        let panels = S::PANELS.min(query_panels - strip);
        let mut lanes = [[0.0f32; LANES]; 2];
        let (lowest, highest) = lane_positions(positions, strip, panels, &mut lanes);
        let key_panels = highest / LANES + 1;
        let first_panel = job.how.first(lowest) / LANES;
        // SAFETY: a strip is `panels` query panels below `query_panels`. A block is at most KEY_PANELS key panels, the
        // last of them `highest / LANES`, which holds a key, for positions are below `keys`. Score rows are below LANES
        // in each of them, features below `dim`.
        unsafe {
            let (q, o) = (job.q.add(strip * panel_floats), job.o.add(strip * panel_floats));
            let mut most = [S::splat(LOWEST); 2];
            let mut total = [S::splat(0.0); 2];
            let mut block = first_panel;
            while block < key_panels {
                // Blocks end at the same keys wherever a strip's window begins: a query's sums do not depend on its strip.
                let count = (key_panels - block).min(KEY_PANELS - block % KEY_PANELS);
                for kp in 0..count {
                    let key = (block + kp) * LANES;
                    let mut row = 0;
                    while row < LANES {
                        let rows = tile_rows(LANES - row, S::ROWS);
                        let from = job.k.add((block + kp) * panel_floats + row);
                        let to = job.scores.add(kp * BLOCK + row * LANES);
                        with_tile!(rows, panels, score_tile::<S>(dim, from, 1, q, panel_floats, to, score_stride));
                        row += rows;
                    }
                    if let Some(cap) = job.how.softcap {
                        for panel in 0..panels {
                            for row in 0..LANES {
                                let to = job.scores.add(panel * score_stride + kp * BLOCK + row * LANES);
                                S::store(to, S::mul(S::splat(cap), S::tanh(S::mul(S::load(to), S::splat(1.0 / cap)))));
                            }
                        }
                    }
                    if key + LANES - 1 > lowest {
                        for (panel, positions) in lanes.iter().enumerate().take(panels) {
                            let at = S::load(positions.as_ptr());
                            for row in 0..LANES {
                                let to = job.scores.add(panel * score_stride + kp * BLOCK + row * LANES);
                                let hidden = S::splat(f32::NEG_INFINITY);
                                S::store(to, S::if_gt(S::splat((key + row) as f32), at, hidden, S::load(to)));
                            }
                        }
                    }
                    if let Some(window) = job.how.window.filter(|_| key < job.how.first(highest)) {
                        for (panel, positions) in lanes.iter().enumerate().take(panels) {
                            // Visible while position - window < key.
                            let before = S::sub(S::load(positions.as_ptr()), S::splat(window as f32));
                            for row in 0..LANES {
                                let to = job.scores.add(panel * score_stride + kp * BLOCK + row * LANES);
                                let hidden = S::splat(f32::NEG_INFINITY);
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
                    total[panel] = S::fma(total[panel], shrink, sum);
                    most[panel] = new;
                    if block > first_panel {
                        for feature in 0..dim {
                            let to = o.add(panel * panel_floats + feature * LANES);
                            S::store(to, S::mul(S::load(to), shrink));
                        }
                    }
                }
                let mut row = 0;
                while row < dim {
                    let rows = tile_rows(dim - row, S::ROWS);
                    let from = job.v.add(block * panel_floats + row * LANES);
                    let to = o.add(row * LANES);
                    with_tile!(
                        rows,
                        panels,
                        sum_tile::<S>(
                            count,
                            from,
                            panel_floats,
                            job.scores,
                            BLOCK,
                            score_stride,
                            to,
                            panel_floats,
                            block > first_panel
                        )
                    );
                    row += rows;
                }
                block += count;
            }
            for panel in 0..panels {
                let inverse = S::div(S::splat(1.0), total[panel]);
                for feature in 0..dim {
                    let to = o.add(panel * panel_floats + feature * LANES);
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

dispatch! { fn forward_head = forward_kernel(job: &Forward<'_>); }

/// Attention of `q [rows, query * dim]` over `k`, `v [tokens, kv * dim]`.
///
/// Returns the mixed values `[rows, query * dim]` and the log-sum-exp of the scaled scores `[rows, query]`.
pub fn forward(q: &Act, k: &Act, v: &Act, spans: &[Span], heads: Heads, how: Scores) -> (Act, Act) {
    check(q, k, v, spans, heads);
    let pool: &Arc<Pool> = q.pool();
    let mut o = pool.act(q.tokens(), q.features());
    let mut lse = pool.act(q.tokens(), heads.query);
    if q.is_meta() {
        return (o, lse);
    }
    let (o_to, lse_to): (Shared<f32>, Shared<f32>) = (o.shared(), lse.shared());
    let (o_stride, lse_stride) = (o.stride(), lse.stride());
    let group = heads.query / heads.kv;
    let order = tasks(spans, heads.kv);
    par::run(order.len(), |task| {
        let (span, kv) = (&spans[order[task].0], order[task].1);
        if span.positions.is_empty() {
            return;
        }
        let (queries, dim) = (span.positions.len(), heads.dim);
        let (query_tokens, key_tokens) = (span.query_tokens(), span.key_tokens());
        let features = |head: usize| head * dim..(head + 1) * dim;
        let (key_floats, query_floats) =
            (span.keys.div_ceil(LANES) * LANES * dim, queries.div_ceil(LANES) * LANES * dim);
        let score_floats = 2 * KEY_PANELS * BLOCK;
        let floats = 2 * key_floats + 2 * query_floats + query_floats / dim + score_floats;
        with_scratch(floats, |scratch| {
            let mut scratch = Cutter(scratch);
            let (ks, vs) = (scratch.take(key_floats), scratch.take(key_floats));
            let (qs, os) = (scratch.take(query_floats), scratch.take(query_floats));
            let (lses, scores) = (scratch.take(query_floats / dim), scratch.take(score_floats));
            // SAFETY: `check` has held heads and spans against the activations. `scratch` has cut parts of the lengths
            // that `realign` and the kernel ask for, which do not overlap. `o` and `lse` have the rows of `q` and live
            // until all tasks are done; no other task writes these rows of these heads.
            unsafe {
                realign(k.ptr(), k.stride(), features(kv), key_tokens.clone(), 1.0, ks);
                realign(v.ptr(), v.stride(), features(kv), key_tokens, 1.0, vs);
                for head in kv * group..(kv + 1) * group {
                    realign(q.ptr(), q.stride(), features(head), query_tokens.clone(), how.scale, qs);
                    let job = Forward { heads, how, span, k: ks, v: vs, q: qs, o: os, lse: lses, scores };
                    forward_head(&job);
                    unalign(os, o_to.get(), o_stride, features(head), query_tokens.clone());
                    unalign(lses, lse_to.get(), lse_stride, head..head + 1, query_tokens.clone());
                }
            }
        });
    });
    (o, lse)
}
