//! The backward pass: strips of keys walk over blocks of queries.
use super::amx::{InTiles, TilesTo, fits, padded};
use super::operands::{Operands, Pairs, Panels, Part, Singles, round_panel, split_scale};
use super::{BLOCK, tasks};
use crate::activation::{Activation, LANES, unalign};
use crate::attention::{Heads, Saved, Scores};
use crate::floats::Floats;
use crate::par::{self, Shared};
use crate::scratch::{Cutter, with_scratch};
use crate::simd::{PairLanes, Simd, TileLanes, dispatch, dispatch_pairs};
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
    /// `k`, `q` and `d_o` once more, as operands of sums over tokens: `[panels][features][16]`, or 8 pairs along the tokens.
    sum_k: *const f32,
    sum_q: *const f32,
    sum_d_o: *const f32,
    /// What scores are multiplied by; `q` carries the rest of the scale.
    scale: f32,
    lse: *const f32,
    delta: *const f32,
    dq: *mut f32,
    dk: *mut f32,
    dv: *mut f32,
    p: *mut f32,
    ds: *mut f32,
    turned: *mut f32,
}

/// One head of one sequence. Layouts as in the forward pass; `delta` is `[query panels][16]`,
/// `dq`, `dk`, `dv` are added to, `p`, `ds`, `turned` each have room for `PANELS * QUERY_PANELS * 256` of a tile's panels. Pairs
/// are along the features of `k`, `v`, `q` and `d_o`.
///
/// # Safety
/// The features of `O`; the arrays are as large as said above and do not overlap; the keys that queries of the span see
/// are below its `keys`.
#[inline(always)]
unsafe fn backward_kernel<O: Operands<Wide = S, Tile = T>, S: Simd, T: TileLanes<Sum = S::V>>(job: &Backward<'_>) {
    let Heads { head_dim, v_head_dim, .. } = job.heads;
    let visibility = job.span.visibility(job.how.window);
    let [queries, key_panels] =
        [visibility.queries(), job.span.keys].map(|tokens| tokens.div_ceil(LANES).next_multiple_of(O::STEP));
    let (key_panel, value_panel) = (head_dim * LANES, v_head_dim * LANES);
    // Of operands along features, and of those along tokens.
    let (by_features, value_by_features) = (O::score_panel(head_dim), O::score_panel(v_head_dim));
    let (along_k, along_q, along_d_o) =
        (O::along(head_dim, key_panels), O::along(head_dim, queries), O::along(v_head_dim, queries));
    let block_floats = BLOCK / O::NUMBERS;
    // SAFETY: the caller says so.
    let engine = unsafe { O::engine() };
    let stride = QUERY_PANELS * BLOCK;
    let mut iota = [0.0f32; LANES];
    for (lane, value) in iota.iter_mut().enumerate() {
        *value = lane as f32;
    }
    let mut strip = 0;
    while strip < key_panels {
        let panels = T::TILE_PANELS.min(key_panels - strip);
        let (key, last_key) = (strip * LANES, (strip + panels) * LANES - 1);
        let seeing = visibility.queries_of(key..last_key + 1);
        let mut block = seeing.start / LANES / O::STEP * O::STEP;
        let query_panels = seeing.end.div_ceil(LANES).next_multiple_of(O::STEP);
        // SAFETY: a strip is `panels` key panels below `key_panels`. A block is `count <= QUERY_PANELS` query panels
        // below `query_panels`, so that queries stay below those of `lse` and `delta`. Score rows are below LANES in
        // each of them, features below `head_dim` or `v_head_dim`; `p`, `ds` and `turned` have room for
        // `T::TILE_PANELS * QUERY_PANELS` blocks of 256.
        unsafe {
            let (k, v) = (job.k.add(strip * by_features), job.v.add(strip * value_by_features));
            let sum_k = job.sum_k.add(strip * along_k.panel);
            let (dk, dv) = (job.dk.add(strip * key_panel), job.dv.add(strip * value_panel));
            while block < query_panels {
                let count = QUERY_PANELS.min(query_panels - block);
                let [keys, values] = [(k, by_features), (v, value_by_features)].map(|(first, apart)| Panels {
                    first,
                    apart,
                    count: panels,
                });
                let [p, ds] = [job.p, job.ds].map(|first| Panels { first, apart: stride, count: panels });
                O::scores(&engine, head_dim, (job.q.add(block * by_features), count), keys, p);
                O::scores(&engine, v_head_dim, (job.d_o.add(block * value_by_features), count), values, ds);
                for qp in 0..count {
                    for row in 0..LANES {
                        let query = (block + qp) * LANES + row;
                        let seen = visibility.keys_of(query.min(visibility.queries() - 1));
                        let (lse, delta) = (S::splat(*job.lse.add(query)), S::splat(*job.delta.add(query)));
                        for panel in 0..panels {
                            let offset = panel * stride + qp * BLOCK + row * LANES;
                            let (p_at, ds_at) = (job.p.add(offset), job.ds.add(offset));
                            let mut score = S::mul(S::load(p_at), S::splat(job.scale));
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
                        let (from, to) = (panel * stride + qp * BLOCK, panel * stride + qp * block_floats);
                        O::transposed(job.ds.add(from), job.turned.add((qp * panels + panel) * block_floats));
                        O::move_along_rows(LANES, job.ds.add(from), job.ds.add(to));
                        O::move_along_rows(LANES, job.p.add(from), job.p.add(to));
                    }
                }
                let [p, ds] = [p, ds].map(Panels::to_read);
                let d_o = (job.sum_d_o.add(block * along_d_o.panel), along_d_o, count);
                O::sums(&engine, v_head_dim, d_o, p, Panels { first: dv, apart: value_panel, count: panels }, true);
                let q = (job.sum_q.add(block * along_q.panel), along_q, count);
                O::sums(&engine, head_dim, q, ds, Panels { first: dk, apart: key_panel, count: panels }, true);
                let mut qp = 0;
                while qp < count {
                    let pair = T::TILE_PANELS.min(count - qp);
                    let turned = job.turned.add(qp * panels * block_floats).cast_const();
                    let x = Panels { first: turned, apart: panels * block_floats, count: pair };
                    let dq = Panels { first: job.dq.add((block + qp) * key_panel), apart: key_panel, count: pair };
                    O::sums(&engine, head_dim, (sum_k, along_k, panels), x, dq, true);
                    qp += pair;
                }
                block += count;
            }
        }
        strip += panels;
    }
}

/// # Safety
/// As [`backward_kernel`].
#[inline(always)]
unsafe fn backward_singles<S: Simd>(job: &Backward<'_>) {
    // SAFETY: as the caller says.
    unsafe { backward_kernel::<Singles<S>, S, S>(job) }
}

/// # Safety
/// As [`backward_kernel`].
#[inline(always)]
unsafe fn backward_pairs<P: PairLanes>(job: &Backward<'_>) {
    // SAFETY: as the caller says.
    unsafe { backward_kernel::<Pairs<P>, P::Wide, P>(job) }
}

/// # Safety
/// As [`backward_kernel`]; the processor has tiles.
#[inline(always)]
unsafe fn backward_tiles<P: PairLanes>(job: &Backward<'_>) {
    // SAFETY: as the caller says.
    unsafe { backward_kernel::<InTiles<P>, P::Wide, P>(job) }
}

dispatch! { fn backward_head = backward_singles(job: &Backward<'_>); }
dispatch_pairs! { fn backward_head_in_pairs = backward_pairs(job: &Backward<'_>); }
dispatch_pairs! { fn backward_head_in_tiles = backward_tiles(job: &Backward<'_>); }

/// `to[token] = sum over features of one times other`, of panels `[features][16]`, in the order of the features.
///
/// # Safety
/// Both hold the panel, `to` has room for 16 floats.
unsafe fn dot_panel(features: usize, one: *const f32, other: *const f32, to: *mut f32) {
    let mut sums = [0.0f32; LANES];
    for feature in 0..features {
        for (lane, sum) in sums.iter_mut().enumerate() {
            let at = feature * LANES + lane;
            // SAFETY: feature and lane are those of the panels.
            unsafe { *sum += *one.add(at) * *other.add(at) };
        }
    }
    // SAFETY: as the caller says.
    unsafe { std::ptr::copy_nonoverlapping(sums.as_ptr(), to, LANES) };
}

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
    let (mut dk, mut dv) = (k.like(), v.like());
    let (dq_to, dk_to, dv_to) = (dq.shared(), dk.shared(), dv.shared());
    let (q_stride, k_stride, v_stride) = (q.stride(), k.stride(), v.stride());
    let group = heads.query / heads.kv;
    // A sink's gradient within each sequence: `[spans][query heads]`. Summed in order below, whoever did what.
    let sinks = sinks.filter(|_| d_sinks.is_some()).map(Floats::cpu_slice);
    let mut d_sink = vec![0.0f32; if sinks.is_some() { spans.len() * heads.query } else { 0 }];
    let d_sink_to = Shared(d_sink.as_mut_ptr());
    let (order, pairs) = (tasks(spans, heads.kv), q.pool().in_pairs());
    let tiles = pairs && fits(heads);
    let [step, even] = padded(tiles);
    let (of_queries, scale) = if pairs { split_scale(how.scale) } else { (how.scale, 1.0) };
    par::run(order.len(), |task| {
        let (index, kv) = order[task];
        let span = &spans[index];
        let (query_tokens, key_tokens) = (span.query_tokens(), span.key_tokens());
        let features = |head: usize, dim: usize| head * dim..(head + 1) * dim;
        let [queries, keys] = [&query_tokens, &key_tokens].map(|tokens| tokens.len().next_multiple_of(step));
        let block_floats = 2 * QUERY_PANELS * BLOCK;
        // Operands along features and along tokens are half of the numbers each.
        let [key_features, value_features] = [head_dim, v_head_dim].map(|features| features.next_multiple_of(even));
        let panel = LANES * key_features.max(value_features);
        let floats = 2 * (keys + queries) * (key_features + value_features) + 2 * queries + 3 * block_floats + panel;
        with_scratch(floats, |scratch| {
            let mut scratch = Cutter(scratch);
            let (ks, dks) = (scratch.take(keys * key_features), scratch.take(keys * head_dim));
            let (vs, dvs) = (scratch.take(keys * value_features), scratch.take(keys * v_head_dim));
            let (qs, dqs) = (scratch.take(queries * key_features), scratch.take(queries * head_dim));
            let (os, dos) = (scratch.take(queries * v_head_dim), scratch.take(queries * value_features));
            let (lses, deltas) = (scratch.take(queries), scratch.take(queries));
            let mut block = || scratch.take(block_floats);
            let (p, ds, turned) = (block(), block(), block());
            let temporary = scratch.take(panel);
            // Where operands along tokens are: behind those along features.
            let behind = |part: *mut f32, floats: usize| if pairs { part.wrapping_add(floats / 2) } else { part };
            let (sum_k, sum_q) = (behind(ks, keys * key_features), behind(qs, queries * key_features));
            let sum_d_o = behind(dos, queries * value_features);
            // SAFETY: heads, spans, `o`, `d_o` and `lse` have been held against the activations. `scratch` has cut parts
            // of the lengths that `realign` and the kernel ask for, all initialised, which do not overlap. `dq`, `dk`,
            // `dv` and `d_sink` live until all tasks are done; no other task writes these rows, these tokens, or this
            // sequence's gradient of these heads.
            unsafe {
                let part_k = Part::of(k, features(kv, head_dim), &key_tokens);
                let part_v = Part::of(v, features(kv, v_head_dim), &key_tokens);
                if tiles {
                    part_k.to_tiles(temporary, TilesTo { columns: ks, sums: sum_k, ..TilesTo::NONE });
                    part_v.to_tiles(temporary, TilesTo { columns: vs, ..TilesTo::NONE });
                } else if pairs {
                    part_k.to_pairs(temporary, ks, sum_k);
                    part_v.to_pairs(temporary, vs, std::ptr::null_mut());
                } else {
                    part_k.to_panels(ks);
                    part_v.to_panels(vs);
                }
                std::slice::from_raw_parts_mut(dks, keys * head_dim).fill(0.0);
                std::slice::from_raw_parts_mut(dvs, keys * v_head_dim).fill(0.0);
                for head in kv * group..(kv + 1) * group {
                    if queries == 0 {
                        break;
                    }
                    let part_q = Part { scale: of_queries, ..Part::of(q, features(head, head_dim), &query_tokens) };
                    Part::of(o, features(head, v_head_dim), &query_tokens).to_panels(os);
                    let part_d_o = Part::of(d_o, features(head, v_head_dim), &query_tokens);
                    Part::of(lse, head..head + 1, &query_tokens).to_panels(lses);
                    let value_panel = v_head_dim * LANES;
                    if pairs {
                        let d_o_to = TilesTo { rows: dos, sums: sum_d_o, ..TilesTo::NONE };
                        if tiles {
                            part_q.to_tiles(temporary, TilesTo { rows: qs, sums: sum_q, ..TilesTo::NONE });
                            part_d_o.to_tiles(temporary, d_o_to);
                            // No query is in the rest of the last tile.
                            let rest = part_d_o.panels() * LANES..queries;
                            for to in [lses, deltas] {
                                to.add(rest.start).write_bytes(0, rest.len());
                            }
                        } else {
                            part_q.to_pairs(temporary, qs, sum_q);
                        }
                        for panel in 0..part_d_o.panels() {
                            part_d_o.panel(panel, temporary);
                            dot_panel(v_head_dim, os.add(panel * value_panel), temporary, deltas.add(panel * LANES));
                            if !tiles {
                                round_panel(panel, v_head_dim, temporary, dos, sum_d_o);
                            }
                        }
                    } else {
                        part_q.to_panels(qs);
                        part_d_o.to_panels(dos);
                        for panel in 0..queries / LANES {
                            let at = panel * value_panel;
                            dot_panel(v_head_dim, os.add(at), dos.add(at), deltas.add(panel * LANES));
                        }
                    }
                    if let Some(sinks) = sinks {
                        // The sink is a key whose value is zero: its probability times (0 - delta).
                        let of = |query| (sinks[head] - *lses.add(query)).exp() * *deltas.add(query);
                        *d_sink_to.get().add(index * heads.query + head) =
                            -(0..query_tokens.len()).map(of).sum::<f32>();
                    }
                    std::slice::from_raw_parts_mut(dqs, queries * head_dim).fill(0.0);
                    let job = Backward {
                        heads,
                        how,
                        span,
                        k: ks,
                        v: vs,
                        q: qs,
                        d_o: dos,
                        sum_k,
                        sum_q,
                        sum_d_o,
                        scale,
                        lse: lses,
                        delta: deltas,
                        dq: dqs,
                        dk: dks,
                        dv: dvs,
                        p,
                        ds,
                        turned,
                    };
                    if tiles {
                        backward_head_in_tiles(&job);
                    } else if pairs {
                        backward_head_in_pairs(&job);
                    } else {
                        backward_head(&job);
                    }
                    for value in std::slice::from_raw_parts_mut(dqs, queries * head_dim) {
                        *value *= how.scale;
                    }
                    unalign(dqs, dq_to.get(), q_stride, features(head, head_dim), query_tokens.clone());
                }
                if scale != 1.0 {
                    for value in std::slice::from_raw_parts_mut(dks, keys * head_dim) {
                        *value *= scale;
                    }
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
