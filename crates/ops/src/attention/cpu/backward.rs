//! The backward pass: strips of keys walk over blocks of queries.
use super::{BLOCK, tasks};
use crate::activation::{Activation, LANES, realign, unalign};
use crate::attention::{Heads, Saved, Scores};
use crate::floats::Floats;
use crate::gemm::cpu::{score_tile, sum_tile, tile_rows, transpose, with_tile};
use crate::par::{self, Shared};
use crate::scratch::{Cutter, with_scratch};
use crate::simd::{Simd, dispatch};
use crate::spans::Span;
use tunesmith_cpu_slice::CpuSlice as _;

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

/// One head of one sequence. Layouts as in the forward pass; `q` carries the scale, `delta` is `[query panels][16]`,
/// `dq`, `dk`, `dv` are added to, `p`, `ds`, `turned` each have room for `S::PANELS * QUERY_PANELS * 256`.
///
/// # Safety
/// The features of `S`; the arrays are as large as said above and do not overlap; the keys that queries of the span see
/// are below its `keys`.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(job: &Backward<'_>) {
    let Heads { head_dim, v_head_dim, .. } = job.heads;
    let (visibility, key_panels) = (job.span.visibility(job.how.window), job.span.keys.div_ceil(LANES));
    let (key_panel, value_panel) = (head_dim * LANES, v_head_dim * LANES);
    let stride = QUERY_PANELS * BLOCK;
    let mut iota = [0.0f32; LANES];
    for (lane, value) in iota.iter_mut().enumerate() {
        *value = lane as f32;
    }
    let mut strip = 0;
    while strip < key_panels {
        let panels = S::PANELS.min(key_panels - strip);
        let (key, last_key) = (strip * LANES, (strip + panels) * LANES - 1);
        let seeing = visibility.queries_of(key..last_key + 1);
        let (mut block, query_panels) = (seeing.start / LANES, seeing.end.div_ceil(LANES));
        // SAFETY: a strip is `panels` key panels below `key_panels`. A block is `count <= QUERY_PANELS` query panels
        // below `query_panels`, so that queries stay below those of `lse` and `delta`. Score rows are below LANES in
        // each of them, features below `head_dim` or `v_head_dim`; `p`, `ds` and `turned` have room for
        // `S::PANELS * QUERY_PANELS` blocks of 256.
        unsafe {
            let (k, v) = (job.k.add(strip * key_panel), job.v.add(strip * value_panel));
            let (dk, dv) = (job.dk.add(strip * key_panel), job.dv.add(strip * value_panel));
            while block < query_panels {
                let count = QUERY_PANELS.min(query_panels - block);
                for qp in 0..count {
                    let panel = block + qp;
                    let mut row = 0;
                    while row < LANES {
                        let rows = tile_rows(LANES - row, S::ROWS);
                        let to = qp * BLOCK + row * LANES;
                        let (q, d_o) = (job.q.add(panel * key_panel + row), job.d_o.add(panel * value_panel + row));
                        let (p, ds) = (job.p.add(to), job.ds.add(to));
                        with_tile!(rows, panels, score_tile::<S>(head_dim, q, 1, k, key_panel, p, stride));
                        with_tile!(rows, panels, score_tile::<S>(v_head_dim, d_o, 1, v, value_panel, ds, stride));
                        row += rows;
                    }
                    for row in 0..LANES {
                        let query = (block + qp) * LANES + row;
                        let seen = visibility.keys_of(query.min(visibility.queries() - 1));
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
                            if last_key >= seen.end || seen.start > key {
                                let keys = S::add(S::load(iota.as_ptr()), S::splat((key + panel * LANES) as f32));
                                p = S::if_gt(keys, S::splat((seen.end - 1) as f32), S::splat(0.0), p);
                                p = S::if_gt(S::splat(seen.start as f32), keys, S::splat(0.0), p);
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
                let (q, d_o) = (job.q.add(block * key_panel), job.d_o.add(block * value_panel));
                let mut row = 0;
                while row < v_head_dim {
                    let rows = tile_rows(v_head_dim - row, S::ROWS);
                    let (from, to, step) = (d_o.add(row * LANES), dv.add(row * LANES), value_panel);
                    with_tile!(rows, panels, sum_tile::<S>(count, from, step, job.p, BLOCK, stride, to, step, true));
                    row += rows;
                }
                let (step, mut row) = (key_panel, 0);
                while row < head_dim {
                    let rows = tile_rows(head_dim - row, S::ROWS);
                    let (from, to) = (q.add(row * LANES), dk.add(row * LANES));
                    with_tile!(rows, panels, sum_tile::<S>(count, from, step, job.ds, BLOCK, stride, to, step, true));
                    row += rows;
                }
                let mut qp = 0;
                while qp < count {
                    let pair = S::PANELS.min(count - qp);
                    let dq = job.dq.add((block + qp) * key_panel);
                    let (x, stride) = (job.turned.add(qp * panels * BLOCK), panels * BLOCK);
                    let mut row = 0;
                    while row < head_dim {
                        let rows = tile_rows(head_dim - row, S::ROWS);
                        let (from, to) = (k.add(row * LANES), dq.add(row * LANES));
                        with_tile!(rows, pair, sum_tile::<S>(panels, from, step, x, BLOCK, stride, to, step, true));
                        row += rows;
                    }
                    qp += pair;
                }
                block += count;
            }
        }
        strip += panels;
    }
}

dispatch! { fn backward_head = backward_kernel(job: &Backward<'_>); }

/// [`crate::attention::backward`], whose checks have passed.
pub(in crate::attention) fn backward(
    saved: Saved<'_>,
    d_o: &Activation,
    spans: &[Span],
    heads: Heads,
    how: Scores,
    d_sinks: Option<&mut [f32]>,
) -> (Activation, Activation, Activation) {
    let Saved { q, k, v, sinks, o, lse } = saved;
    let Heads { head_dim, v_head_dim, .. } = heads;
    let pool = q.pool();
    let mut dq = pool.act(q.tokens(), q.features());
    let (mut dk, mut dv) = (pool.act(k.tokens(), k.features()), pool.act(v.tokens(), v.features()));
    let (dq_to, dk_to, dv_to) = (dq.shared(), dk.shared(), dv.shared());
    let (q_stride, k_stride, v_stride) = (q.stride(), k.stride(), v.stride());
    let group = heads.query / heads.kv;
    // A sink's gradient within each sequence: `[spans][query heads]`. Summed in order below, whoever did what.
    let sinks = sinks.filter(|_| d_sinks.is_some()).map(Floats::cpu_slice);
    let mut d_sink = vec![0.0f32; if sinks.is_some() { spans.len() * heads.query } else { 0 }];
    let d_sink_to = Shared(d_sink.as_mut_ptr());
    let order = tasks(spans, heads.kv);
    par::run(order.len(), |task| {
        let (index, kv) = order[task];
        let span = &spans[index];
        let (query_tokens, key_tokens) = (span.query_tokens(), span.key_tokens());
        let features = |head: usize, dim: usize| head * dim..(head + 1) * dim;
        let (queries, keys) = (query_tokens.len().next_multiple_of(LANES), key_tokens.len().next_multiple_of(LANES));
        let block_floats = 2 * QUERY_PANELS * BLOCK;
        let floats = 2 * (keys + queries) * (head_dim + v_head_dim) + 2 * queries + 3 * block_floats;
        with_scratch(floats, |scratch| {
            let mut scratch = Cutter(scratch);
            let (ks, dks) = (scratch.take(keys * head_dim), scratch.take(keys * head_dim));
            let (vs, dvs) = (scratch.take(keys * v_head_dim), scratch.take(keys * v_head_dim));
            let (qs, dqs) = (scratch.take(queries * head_dim), scratch.take(queries * head_dim));
            let (os, dos) = (scratch.take(queries * v_head_dim), scratch.take(queries * v_head_dim));
            let (lses, deltas) = (scratch.take(queries), scratch.take(queries));
            let mut block = || scratch.take(block_floats);
            let (p, ds, turned) = (block(), block(), block());
            // SAFETY: heads, spans, `o`, `d_o` and `lse` have been held against the activations. `scratch` has cut parts
            // of the lengths that `realign` and the kernel ask for, all initialised, which do not overlap. `dq`, `dk`,
            // `dv` and `d_sink` live until all tasks are done; no other task writes these rows, these tokens, or this
            // sequence's gradient of these heads.
            unsafe {
                realign(k.ptr(), k.stride(), features(kv, head_dim), key_tokens.clone(), 1.0, ks);
                realign(v.ptr(), v.stride(), features(kv, v_head_dim), key_tokens.clone(), 1.0, vs);
                std::slice::from_raw_parts_mut(dks, keys * head_dim).fill(0.0);
                std::slice::from_raw_parts_mut(dvs, keys * v_head_dim).fill(0.0);
                for head in kv * group..(kv + 1) * group {
                    if queries == 0 {
                        break;
                    }
                    realign(q.ptr(), q.stride(), features(head, head_dim), query_tokens.clone(), how.scale, qs);
                    realign(o.ptr(), o.stride(), features(head, v_head_dim), query_tokens.clone(), 1.0, os);
                    realign(d_o.ptr(), d_o.stride(), features(head, v_head_dim), query_tokens.clone(), 1.0, dos);
                    realign(lse.ptr(), lse.stride(), head..head + 1, query_tokens.clone(), 1.0, lses);
                    for panel in 0..queries / LANES {
                        for lane in 0..LANES {
                            let at = panel * v_head_dim * LANES + lane;
                            let dot = |feature| *os.add(at + feature * LANES) * *dos.add(at + feature * LANES);
                            *deltas.add(panel * LANES + lane) = (0..v_head_dim).map(dot).sum();
                        }
                    }
                    if let Some(sinks) = sinks {
                        // The sink is a key whose value is zero: its probability times (0 - delta).
                        let of = |query| (sinks[head] - *lses.add(query)).exp() * *deltas.add(query);
                        *d_sink_to.get().add(index * heads.query + head) =
                            -(0..query_tokens.len()).map(of).sum::<f32>();
                    }
                    std::slice::from_raw_parts_mut(dqs, queries * head_dim).fill(0.0);
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
                    for value in std::slice::from_raw_parts_mut(dqs, queries * head_dim) {
                        *value *= how.scale;
                    }
                    unalign(dqs, dq_to.get(), q_stride, features(head, head_dim), query_tokens.clone());
                }
                unalign(dks, dk_to.get(), k_stride, features(kv, head_dim), key_tokens.clone());
                unalign(dvs, dv_to.get(), v_stride, features(kv, v_head_dim), key_tokens);
            }
        });
    });
    if let Some(d_sinks) = d_sinks {
        for (head, sum) in d_sinks.iter_mut().enumerate() {
            *sum += d_sink.iter().skip(head).step_by(heads.query).sum::<f32>();
        }
    }
    (dq, dk, dv)
}
