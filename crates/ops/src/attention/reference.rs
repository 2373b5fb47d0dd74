//! The definition for tests, on row-major f64: each score, a dense mask, a softmax.
use super::{Heads, Scores};
use crate::spans::{Span, Window};

/// Operands in f64, shaped as those of [`super::forward`].
#[derive(Debug, Clone)]
pub(super) struct Operands {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub sinks: Option<Vec<f64>>,
}

/// Whether query number `query` of a span sees the key at position j.
fn sees(span: &Span, query: usize, j: usize, window: Option<Window>) -> bool {
    if let Some(ranges) = &span.ranges {
        return ranges.first[query] as usize <= j && j < ranges.end[query] as usize;
    }
    let i = span.positions[query];
    j <= i
        && match window {
            None => true,
            Some(Window::Sliding(keys)) => i - j < keys,
            Some(Window::Chunked(keys)) => i / keys == j / keys,
        }
}

/// The outputs `[rows, query heads * v_head_dim]` and the log-sum-exp `[rows, query heads]`.
pub(super) fn forward(operands: &Operands, spans: &[Span], heads: Heads, how: Scores) -> (Vec<f64>, Vec<f64>) {
    let Operands { q, k, v, sinks } = operands;
    let Heads { query: query_heads, kv: kv_heads, head_dim, v_head_dim } = heads;
    let rows = q.len() / (query_heads * head_dim);
    let (mut out, mut lse) = (vec![0.0; rows * query_heads * v_head_dim], vec![0.0; rows * query_heads]);
    for span in spans {
        for query in 0..span.positions.len() {
            for head in 0..query_heads {
                let (row, kv) = ((span.query_start + query) * query_heads + head, head / (query_heads / kv_heads));
                let key = |j: usize| (span.key_start + j) * kv_heads + kv;
                let score = |j: usize| {
                    let (q, k) = (&q[row * head_dim..][..head_dim], &k[key(j) * head_dim..][..head_dim]);
                    let score = q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() * f64::from(how.scale);
                    how.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                };
                let visible = (0..span.keys).filter(|&j| sees(span, query, j, how.window));
                let scores: Vec<(usize, f64)> = visible.map(|j| (j, score(j))).collect();
                let sink = sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| sinks[head]);
                let top = scores.iter().fold(sink, |top, (_, score)| top.max(*score));
                let exps: Vec<(usize, f64)> = scores.iter().map(|(j, score)| (*j, (score - top).exp())).collect();
                let total = (sink - top).exp() + exps.iter().map(|(_, exp)| exp).sum::<f64>();
                lse[row] = top + total.ln();
                for (j, exp) in exps {
                    let value = &v[key(j) * v_head_dim..][..v_head_dim];
                    let out = &mut out[row * v_head_dim..][..v_head_dim];
                    out.iter_mut().zip(value).for_each(|(sum, v)| *sum += exp / total * v);
                }
            }
        }
    }
    (out, lse)
}
