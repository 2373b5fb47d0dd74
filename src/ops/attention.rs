//! Causal attention over padding-free sequences, tiled both ways: no `[tokens, tokens]` matrix ever exists.
//!
//! Forward: strips of 16 or 32 queries walk over blocks of keys with a running maximum (online softmax) and keep the
//! log-sum-exp. Backward: strips of keys walk over blocks of queries, with the probabilities made anew from it
//! (Dao et al., "FlashAttention-2", 2023, algorithms 1 and 2). Queries may be a subset of the tokens (the last
//! block needs only the rows that carry a loss). Several query heads may share a key/value head.
use super::gemm::{tile, tile_rows, transpose, with_tile};
use super::panel::{Act, LANES, Pool, realign, unalign};
use super::par::{self, Shared};
use super::simd::{Simd, dispatch};
use super::spans::Span;
use std::cell::RefCell;
use std::sync::Arc;

/// Counts of heads and their width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub query: usize,
    /// Key/value heads; divides `query`.
    pub kv: usize,
    /// Features of a head.
    pub dim: usize,
}

/// Key panels in a block of the forward pass.
const KEY_PANELS: usize = 16;
/// Query panels in a block of the backward pass.
const QUERY_PANELS: usize = 8;
const BLOCK: usize = LANES * LANES;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Lends `floats` floats of this thread's scratch memory, their values undefined.
fn with_scratch<R>(floats: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < floats {
            scratch.resize(floats, 0.0);
        }
        f(&mut scratch[..floats])
    })
}

/// Cuts a scratch into parts.
struct Cutter<'a>(&'a mut [f32]);

impl Cutter<'_> {
    fn take(&mut self, floats: usize) -> *mut f32 {
        let (part, rest) = std::mem::take(&mut self.0).split_at_mut(floats);
        self.0 = rest;
        part.as_mut_ptr()
    }
}

/// The tasks of a batch, longest first, so that the last ones to finish are short.
fn tasks(spans: &[Span], kv: usize) -> Vec<(usize, usize)> {
    let mut order: Vec<usize> =
        (0..spans.len()).filter(|&s| !spans[s].positions.is_empty() || spans[s].keys > 0).collect();
    order.sort_by_key(|&s| std::cmp::Reverse(spans[s].keys * spans[s].positions.len().max(1)));
    order.into_iter().flat_map(|s| (0..kv).map(move |head| (s, head))).collect()
}

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
        // SAFETY: every offset stays inside the arrays described above.
        unsafe {
            let (q, o) = (job.q.add(strip * panel_floats), job.o.add(strip * panel_floats));
            let mut most = [S::splat(f32::NEG_INFINITY); 2];
            let mut total = [S::splat(0.0); 2];
            let mut block = 0;
            while block < key_panels {
                let count = KEY_PANELS.min(key_panels - block);
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
                    if block > 0 {
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
                            block > 0
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

/// `to[panel j][row i] = sum_k matrix[i, k] x[k, panel j]`: matrix rows lie `row` floats apart, columns 16.
#[inline(always)]
unsafe fn score_tile<S: Simd, const ROWS: usize, const PANELS: usize>(
    depth: usize,
    matrix: *const f32,
    row: usize,
    x: *const f32,
    stride: usize,
    to: *mut f32,
    to_stride: usize,
) {
    // SAFETY: the caller's arrays reach that far.
    unsafe {
        let mut acc = [[S::splat(0.0); PANELS]; ROWS];
        tile::<S, ROWS, PANELS>(depth, matrix, row, LANES, x, stride, &mut acc);
        for (index, sums) in acc.iter().enumerate() {
            for (panel, sum) in sums.iter().enumerate() {
                S::store(to.add(panel * to_stride + index * LANES), *sum);
            }
        }
    }
}

/// `to[panel j][row i] (+)= sum over blocks b, lanes t of matrix[b][i][t] x[b][t][panel j]`.
#[inline(always)]
unsafe fn sum_tile<S: Simd, const ROWS: usize, const PANELS: usize>(
    blocks: usize,
    matrix: *const f32,
    matrix_step: usize,
    x: *const f32,
    x_step: usize,
    x_stride: usize,
    to: *mut f32,
    to_stride: usize,
    add: bool,
) {
    // SAFETY: the caller's arrays reach that far.
    unsafe {
        let mut acc = [[S::splat(0.0); PANELS]; ROWS];
        if add {
            for (index, sums) in acc.iter_mut().enumerate() {
                for (panel, sum) in sums.iter_mut().enumerate() {
                    *sum = S::load(to.add(panel * to_stride + index * LANES));
                }
            }
        }
        for block in 0..blocks {
            let (matrix, x) = (matrix.add(block * matrix_step), x.add(block * x_step));
            tile::<S, ROWS, PANELS>(LANES, matrix, LANES, 1, x, x_stride, &mut acc);
        }
        for (index, sums) in acc.iter().enumerate() {
            for (panel, sum) in sums.iter().enumerate() {
                S::store(to.add(panel * to_stride + index * LANES), *sum);
            }
        }
    }
}

/// Shapes and spans, before any pointer is made of them.
fn check(q: &Act, k: &Act, v: &Act, spans: &[Span], heads: Heads) {
    assert!(heads.kv > 0 && heads.query.is_multiple_of(heads.kv), "query heads share key/value heads evenly");
    assert_eq!(q.features(), heads.query * heads.dim, "q holds the query heads");
    assert_eq!((k.features(), v.features()), (heads.kv * heads.dim, heads.kv * heads.dim), "k and v hold theirs");
    assert_eq!(k.tokens(), v.tokens(), "a value for each key");
    for span in spans {
        assert!(span.key_start + span.keys <= k.tokens(), "keys inside the batch");
        assert!(span.query_start + span.positions.len() <= q.tokens(), "queries inside the batch");
        assert!(span.positions.iter().all(|&position| position < span.keys), "positions inside the sequence");
    }
}

/// Attention of `q [rows, query * dim]` over `k`, `v [tokens, kv * dim]`.
///
/// Returns the mixed values `[rows, query * dim]` and the log-sum-exp of the scaled scores `[rows, query]`.
pub fn forward(q: &Act, k: &Act, v: &Act, spans: &[Span], heads: Heads, scale: f32) -> (Act, Act) {
    check(q, k, v, spans, heads);
    let pool: &Arc<Pool> = q.pool();
    let mut o = pool.act(q.tokens(), q.features());
    let mut lse = pool.act(q.tokens(), heads.query);
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
        let (key_floats, query_floats) =
            (span.keys.div_ceil(LANES) * LANES * dim, queries.div_ceil(LANES) * LANES * dim);
        let score_floats = 2 * KEY_PANELS * BLOCK;
        let floats = 2 * key_floats + 2 * query_floats + query_floats / dim + score_floats;
        with_scratch(floats, |scratch| {
            let mut scratch = Cutter(scratch);
            let (ks, vs) = (scratch.take(key_floats), scratch.take(key_floats));
            let (qs, os) = (scratch.take(query_floats), scratch.take(query_floats));
            let (lses, scores) = (scratch.take(query_floats / dim), scratch.take(score_floats));
            // SAFETY: the spans lie inside the activations, the scratch parts are as large as `Forward` says, and
            // tasks write other heads or other rows.
            unsafe {
                realign(k.ptr(), k.stride(), kv * dim, dim, span.key_start, span.keys, 1.0, ks);
                realign(v.ptr(), v.stride(), kv * dim, dim, span.key_start, span.keys, 1.0, vs);
                for head in kv * group..(kv + 1) * group {
                    realign(q.ptr(), q.stride(), head * dim, dim, span.query_start, queries, scale, qs);
                    let job = Forward { heads, span, k: ks, v: vs, q: qs, o: os, lse: lses, scores };
                    forward_head(&job);
                    unalign(os, dim, span.query_start, queries, o_to.get(), o_stride, head * dim);
                    unalign(lses, 1, span.query_start, queries, lse_to.get(), lse_stride, head);
                }
            }
        });
    });
    (o, lse)
}

struct Backward<'a> {
    heads: Heads,
    span: &'a Span,
    k: *const f32,
    v: *const f32,
    q: *const f32,
    d_o: *const f32,
    lse: *const f32,
    delta: *const f32,
    dq: *mut f32,
    dk: *mut f32,
    dv: *mut f32,
    p: *mut f32,
    ds: *mut f32,
    turned: *mut f32,
}

/// One head of one sequence. Layouts as in [`Forward`]; `q` carries the scale, `delta` is `[query panels][16]`, `dq`,
/// `dk`, `dv` are added to, `p`, `ds`, `turned` each have room for `S::PANELS * QUERY_PANELS * 256`.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(job: &Backward<'_>) {
    let (dim, positions) = (job.heads.dim, job.span.positions.as_slice());
    let (query_panels, key_panels) = (positions.len().div_ceil(LANES), job.span.keys.div_ceil(LANES));
    let panel_floats = dim * LANES;
    let stride = QUERY_PANELS * BLOCK;
    let mut iota = [0.0f32; LANES];
    for (lane, value) in iota.iter_mut().enumerate() {
        *value = lane as f32;
    }
    let mut strip = 0;
    while strip < key_panels {
        let panels = S::PANELS.min(key_panels - strip);
        let (key, last_key) = (strip * LANES, (strip + panels) * LANES - 1);
        // The first query that sees the strip's first key.
        let mut block = positions.partition_point(|&position| position < key) / LANES;
        // SAFETY: every offset stays inside the arrays described above.
        unsafe {
            let (k, v) = (job.k.add(strip * panel_floats), job.v.add(strip * panel_floats));
            let (dk, dv) = (job.dk.add(strip * panel_floats), job.dv.add(strip * panel_floats));
            while block < query_panels {
                let count = QUERY_PANELS.min(query_panels - block);
                for qp in 0..count {
                    let at = (block + qp) * panel_floats;
                    let mut row = 0;
                    while row < LANES {
                        let rows = tile_rows(LANES - row, S::ROWS);
                        let to = qp * BLOCK + row * LANES;
                        let (q, d_o) = (job.q.add(at + row), job.d_o.add(at + row));
                        with_tile!(rows, panels, score_tile::<S>(dim, q, 1, k, panel_floats, job.p.add(to), stride));
                        with_tile!(rows, panels, score_tile::<S>(dim, d_o, 1, v, panel_floats, job.ds.add(to), stride));
                        row += rows;
                    }
                    for row in 0..LANES {
                        let query = (block + qp) * LANES + row;
                        let position = positions[query.min(positions.len() - 1)];
                        let (lse, delta) = (S::splat(*job.lse.add(query)), S::splat(*job.delta.add(query)));
                        for panel in 0..panels {
                            let offset = panel * stride + qp * BLOCK + row * LANES;
                            let (p_at, ds_at) = (job.p.add(offset), job.ds.add(offset));
                            let mut p = S::exp(S::sub(S::load(p_at), lse));
                            if last_key > position {
                                let keys = S::add(S::load(iota.as_ptr()), S::splat((key + panel * LANES) as f32));
                                p = S::if_gt(keys, S::splat(position as f32), S::splat(0.0), p);
                            }
                            S::store(p_at, p);
                            S::store(ds_at, S::mul(p, S::sub(S::load(ds_at), delta)));
                        }
                    }
                    for panel in 0..panels {
                        let from = job.ds.add(panel * stride + qp * BLOCK);
                        transpose(from, LANES, job.turned.add((qp * panels + panel) * BLOCK));
                    }
                }
                let (q, d_o) = (job.q.add(block * panel_floats), job.d_o.add(block * panel_floats));
                let mut row = 0;
                while row < dim {
                    let rows = tile_rows(dim - row, S::ROWS);
                    let at = row * LANES;
                    let step = panel_floats;
                    with_tile!(
                        rows,
                        panels,
                        sum_tile::<S>(count, d_o.add(at), step, job.p, BLOCK, stride, dv.add(at), step, true)
                    );
                    with_tile!(
                        rows,
                        panels,
                        sum_tile::<S>(count, q.add(at), step, job.ds, BLOCK, stride, dk.add(at), step, true)
                    );
                    let mut qp = 0;
                    while qp < count {
                        let pair = S::PANELS.min(count - qp);
                        let to = job.dq.add((block + qp) * panel_floats + at);
                        let x = job.turned.add(qp * panels * BLOCK);
                        with_tile!(
                            rows,
                            pair,
                            sum_tile::<S>(panels, k.add(at), step, x, BLOCK, panels * BLOCK, to, step, true)
                        );
                        qp += pair;
                    }
                    row += rows;
                }
                block += count;
            }
        }
        strip += panels;
    }
}

dispatch! { fn backward_head = backward_kernel(job: &Backward<'_>); }

/// The gradients `(dq, dk, dv)` of [`forward`] from `d_o`, the gradient of its first result `o`.
pub fn backward(
    (q, k, v): (&Act, &Act, &Act),
    (o, lse): (&Act, &Act),
    d_o: &Act,
    spans: &[Span],
    heads: Heads,
    scale: f32,
) -> (Act, Act, Act) {
    check(q, k, v, spans, heads);
    assert_eq!((o.tokens(), o.features()), (q.tokens(), q.features()), "o is shaped as q");
    assert_eq!((d_o.tokens(), d_o.features()), (q.tokens(), q.features()), "d_o is shaped as q");
    assert_eq!((lse.tokens(), lse.features()), (q.tokens(), heads.query), "one sum for each head");
    let pool = q.pool();
    let mut dq = pool.act(q.tokens(), q.features());
    let (mut dk, mut dv) = (pool.act(k.tokens(), k.features()), pool.act(v.tokens(), v.features()));
    let (dq_to, dk_to, dv_to) = (dq.shared(), dk.shared(), dv.shared());
    let (q_stride, k_stride) = (q.stride(), k.stride());
    let group = heads.query / heads.kv;
    let order = tasks(spans, heads.kv);
    par::run(order.len(), |task| {
        let (span, kv) = (&spans[order[task].0], order[task].1);
        let (queries, dim) = (span.positions.len(), heads.dim);
        let (key_floats, query_floats) =
            (span.keys.div_ceil(LANES) * LANES * dim, queries.div_ceil(LANES) * LANES * dim);
        let block_floats = 2 * QUERY_PANELS * BLOCK;
        let floats = 4 * key_floats + 4 * query_floats + 2 * query_floats / dim + 3 * block_floats;
        with_scratch(floats, |scratch| {
            let mut scratch = Cutter(scratch);
            let mut keys = || scratch.take(key_floats);
            let (ks, vs, dks, dvs) = (keys(), keys(), keys(), keys());
            let mut rows = || scratch.take(query_floats);
            let (qs, dos, os, dqs) = (rows(), rows(), rows(), rows());
            let (lses, deltas) = (scratch.take(query_floats / dim), scratch.take(query_floats / dim));
            let mut block = || scratch.take(block_floats);
            let (p, ds, turned) = (block(), block(), block());
            // SAFETY: the spans lie inside the activations, the scratch parts are as large as `Backward` says, and
            // tasks write other heads or other tokens.
            unsafe {
                realign(k.ptr(), k.stride(), kv * dim, dim, span.key_start, span.keys, 1.0, ks);
                realign(v.ptr(), v.stride(), kv * dim, dim, span.key_start, span.keys, 1.0, vs);
                std::slice::from_raw_parts_mut(dks, key_floats).fill(0.0);
                std::slice::from_raw_parts_mut(dvs, key_floats).fill(0.0);
                for head in kv * group..(kv + 1) * group {
                    if queries == 0 {
                        break;
                    }
                    realign(q.ptr(), q.stride(), head * dim, dim, span.query_start, queries, scale, qs);
                    realign(o.ptr(), o.stride(), head * dim, dim, span.query_start, queries, 1.0, os);
                    realign(d_o.ptr(), d_o.stride(), head * dim, dim, span.query_start, queries, 1.0, dos);
                    realign(lse.ptr(), lse.stride(), head, 1, span.query_start, queries, 1.0, lses);
                    for panel in 0..queries.div_ceil(LANES) {
                        for lane in 0..LANES {
                            let at = panel * dim * LANES + lane;
                            let dot = |feature| *os.add(at + feature * LANES) * *dos.add(at + feature * LANES);
                            *deltas.add(panel * LANES + lane) = (0..dim).map(dot).sum();
                        }
                    }
                    std::slice::from_raw_parts_mut(dqs, query_floats).fill(0.0);
                    backward_head(&Backward {
                        heads,
                        span,
                        k: ks,
                        v: vs,
                        q: qs,
                        d_o: dos,
                        lse: lses,
                        delta: deltas,
                        dq: dqs,
                        dk: dks,
                        dv: dvs,
                        p,
                        ds,
                        turned,
                    });
                    for value in std::slice::from_raw_parts_mut(dqs, query_floats) {
                        *value *= scale;
                    }
                    unalign(dqs, dim, span.query_start, queries, dq_to.get(), q_stride, head * dim);
                }
                unalign(dks, dim, span.key_start, span.keys, dk_to.get(), k_stride, kv * dim);
                unalign(dvs, dim, span.key_start, span.keys, dv_to.get(), k_stride, kv * dim);
            }
        });
    });
    (dq, dk, dv)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::spans::{full_spans, row_spans};
    use crate::ops::testing::{check_gradient, each_level, numbers};

    /// The plain definition on row-major f64: softmax over the visible keys of each query, then their values' mean.
    fn reference(q: &[f64], k: &[f64], v: &[f64], spans: &[Span], heads: Heads, scale: f64) -> Vec<f64> {
        let (wide, narrow) = (heads.query * heads.dim, heads.kv * heads.dim);
        let mut out = vec![0.0; q.len()];
        for span in spans {
            for (index, &position) in span.positions.iter().enumerate() {
                let row = span.query_start + index;
                for head in 0..heads.query {
                    let kv = head / (heads.query / heads.kv);
                    let score = |j: usize| {
                        let key = &k[(span.key_start + j) * narrow + kv * heads.dim..][..heads.dim];
                        let query = &q[row * wide + head * heads.dim..][..heads.dim];
                        query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() * scale
                    };
                    let scores: Vec<f64> = (0..=position).map(score).collect();
                    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                    for (j, s) in scores.iter().enumerate() {
                        for d in 0..heads.dim {
                            out[row * wide + head * heads.dim + d] +=
                                (s - top).exp() / total * v[(span.key_start + j) * narrow + kv * heads.dim + d];
                        }
                    }
                }
            }
        }
        out
    }

    fn check(heads: Heads, cu_seqlens: &[usize], rows: Option<&[usize]>) {
        let tokens = cu_seqlens[cu_seqlens.len() - 1];
        let spans = rows.map_or_else(|| full_spans(cu_seqlens), |rows| row_spans(cu_seqlens, rows));
        let queries = rows.map_or(tokens, <[usize]>::len);
        let (wide, narrow) = (heads.query * heads.dim, heads.kv * heads.dim);
        let scale = 0.7;
        let q = numbers(1, queries * wide).iter().map(|x| x * 2.0).collect::<Vec<_>>();
        let (k, v, weight) = (numbers(2, tokens * narrow), numbers(3, tokens * narrow), numbers(4, queries * wide));
        let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let expected = reference(&double(&q), &double(&k), &double(&v), &spans, heads, scale);
        let pool = Pool::new();
        let act = |x: &[f32], features| Act::from_rows(&pool, x, features);
        let (qa, ka, va) = (act(&q, wide), act(&k, narrow), act(&v, narrow));
        let (o, lse) = forward(&qa, &ka, &va, &spans, heads, scale as f32);
        for (got, want) in o.to_rows().iter().zip(&expected) {
            assert!((f64::from(*got) - want).abs() < 2e-5, "{got} != {want}");
        }
        let weights = act(&weight, wide);
        let (dq, dk, dv) = backward((&qa, &ka, &va), (&o, &lse), &weights, &spans, heads, scale as f32);
        let loss = |q: &[f64], k: &[f64], v: &[f64]| -> f64 {
            let out = reference(q, k, v, &spans, heads, scale);
            out.iter().zip(&weight).map(|(o, &w)| o * f64::from(w)).sum()
        };
        check_gradient("dq", &q, &dq.to_rows(), |q| loss(q, &double(&k), &double(&v)));
        check_gradient("dk", &k, &dk.to_rows(), |k| loss(&double(&q), k, &double(&v)));
        check_gradient("dv", &v, &dv.to_rows(), |v| loss(&double(&q), &double(&k), v));
    }

    #[test]
    fn equals_the_definition_and_its_finite_differences_on_odd_sizes() {
        each_level(|_| {
            check(Heads { query: 1, kv: 1, dim: 2 }, &[0, 1], None);
            check(Heads { query: 4, kv: 2, dim: 6 }, &[0, 5, 6, 23, 40], None);
            check(Heads { query: 3, kv: 1, dim: 24 }, &[0, 37], None);
            check(Heads { query: 2, kv: 2, dim: 10 }, &[0, 17, 50], Some(&[2, 9, 16, 30, 31, 49]));
            check(Heads { query: 2, kv: 1, dim: 4 }, &[0, 9, 20], Some(&[12, 13]));
        });
    }

    #[test]
    fn long_sequences_cross_every_block() {
        each_level(|_| check(Heads { query: 1, kv: 1, dim: 4 }, &[0, 300], None));
    }
}
