//! The backward pass: strips of keys walk over blocks of queries.
use super::realign::{realign, unalign};
use super::{BLOCK, Cutter, Heads, Scores, check, score_tile, sum_tile, tasks, with_scratch};
use crate::gemm::{tile_rows, transpose, with_tile};
use crate::panel::{Act, LANES};
use crate::par;
use crate::simd::{Simd, dispatch};
use crate::spans::Span;

/// Query panels in a block of the backward pass.
const QUERY_PANELS: usize = 8;
struct Backward<'a> {
    heads: Heads,
    how: Scores,
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
///
/// # Safety
/// The features of `S`; the arrays are as large as said above and do not overlap; the positions of the span are below
/// its `keys`.
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
        // And the panel past the last one that sees the strip's last key.
        let seen = positions.partition_point(|&position| job.how.first(position) <= last_key);
        let query_panels = query_panels.min(seen.div_ceil(LANES));
        // SAFETY: a strip is `panels` key panels below `key_panels`. A block is `count <= QUERY_PANELS` query panels
        // below `query_panels`, so that queries stay below those of `lse` and `delta`. Score rows are below LANES in
        // each of them, features below `dim`; `p`, `ds` and `turned` have room for `S::PANELS * QUERY_PANELS` blocks of
        // 256.
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
                        let first = job.how.first(position);
                        let (lse, delta) = (S::splat(*job.lse.add(query)), S::splat(*job.delta.add(query)));
                        for panel in 0..panels {
                            let offset = panel * stride + qp * BLOCK + row * LANES;
                            let (p_at, ds_at) = (job.p.add(offset), job.ds.add(offset));
                            let mut score = S::load(p_at);
                            let mut slope = S::splat(1.0);
                            if let Some(cap) = job.how.softcap {
                                let t = S::tanh(S::mul(score, S::splat(1.0 / cap)));
                                slope = S::sub(slope, S::mul(t, t));
                                score = S::mul(S::splat(cap), t);
                            }
                            let mut p = S::exp(S::sub(score, lse));
                            if last_key > position || first > key {
                                let keys = S::add(S::load(iota.as_ptr()), S::splat((key + panel * LANES) as f32));
                                p = S::if_gt(keys, S::splat(position as f32), S::splat(0.0), p);
                                p = S::if_gt(S::splat(first as f32), keys, S::splat(0.0), p);
                            }
                            S::store(p_at, p);
                            let ds = S::mul(p, S::sub(S::load(ds_at), delta));
                            S::store(ds_at, if job.how.softcap.is_some() { S::mul(ds, slope) } else { ds });
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

/// What [`super::forward`] took and gave.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// Queries `[rows, query heads * dim]`.
    pub q: &'a Act,
    /// Keys `[tokens, kv heads * dim]`.
    pub k: &'a Act,
    /// Values `[tokens, kv heads * dim]`.
    pub v: &'a Act,
    /// The mixed values, shaped as `q`.
    pub o: &'a Act,
    /// The logarithm of the sum of the exponentials of the scores, `[rows, query heads]`.
    pub lse: &'a Act,
}

/// The gradients `(dq, dk, dv)` of [`super::forward`] from `d_o`, the gradient of its first result `o`.
pub fn backward(saved: Saved<'_>, d_o: &Act, spans: &[Span], heads: Heads, how: Scores) -> (Act, Act, Act) {
    let Saved { q, k, v, o, lse } = saved;
    check(q, k, v, spans, heads);
    assert_eq!((o.tokens(), o.features()), (q.tokens(), q.features()), "o is shaped as q");
    assert_eq!((d_o.tokens(), d_o.features()), (q.tokens(), q.features()), "d_o is shaped as q");
    assert_eq!((lse.tokens(), lse.features()), (q.tokens(), heads.query), "one sum for each head");
    let apart = |pair: &[Span]| pair[0].key_start + pair[0].keys <= pair[1].key_start;
    assert!(spans.windows(2).all(apart), "keys of one sequence after the other");
    let pool = q.pool();
    let mut dq = pool.act(q.tokens(), q.features());
    let (mut dk, mut dv) = (pool.act(k.tokens(), k.features()), pool.act(v.tokens(), v.features()));
    if q.is_meta() {
        return (dq, dk, dv);
    }
    let (dq_to, dk_to, dv_to) = (dq.shared(), dk.shared(), dv.shared());
    let (q_stride, k_stride) = (q.stride(), k.stride());
    let group = heads.query / heads.kv;
    let order = tasks(spans, heads.kv);
    par::run(order.len(), |task| {
        let (span, kv) = (&spans[order[task].0], order[task].1);
        let (queries, dim) = (span.positions.len(), heads.dim);
        let (query_tokens, key_tokens) = (span.query_tokens(), span.key_tokens());
        let features = |head: usize| head * dim..(head + 1) * dim;
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
            // SAFETY: `check` has held heads and spans against the activations, the assertions `o`, `d_o` and `lse`.
            // `scratch` has cut parts of the lengths that `realign` and the kernel ask for, all initialised, which do
            // not overlap. `dq`, `dk` and `dv` live until all tasks are done; no other task writes these rows or these
            // tokens of these heads.
            unsafe {
                realign(k.ptr(), k.stride(), features(kv), key_tokens.clone(), 1.0, ks);
                realign(v.ptr(), v.stride(), features(kv), key_tokens.clone(), 1.0, vs);
                std::slice::from_raw_parts_mut(dks, key_floats).fill(0.0);
                std::slice::from_raw_parts_mut(dvs, key_floats).fill(0.0);
                for head in kv * group..(kv + 1) * group {
                    if queries == 0 {
                        break;
                    }
                    realign(q.ptr(), q.stride(), features(head), query_tokens.clone(), how.scale, qs);
                    realign(o.ptr(), o.stride(), features(head), query_tokens.clone(), 1.0, os);
                    realign(d_o.ptr(), d_o.stride(), features(head), query_tokens.clone(), 1.0, dos);
                    realign(lse.ptr(), lse.stride(), head..head + 1, query_tokens.clone(), 1.0, lses);
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
                        how,
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
                        *value *= how.scale;
                    }
                    unalign(dqs, dq_to.get(), q_stride, features(head), query_tokens.clone());
                }
                unalign(dks, dk_to.get(), k_stride, features(kv), key_tokens.clone());
                unalign(dvs, dv_to.get(), k_stride, features(kv), key_tokens);
            }
        });
    });
    (dq, dk, dv)
}
