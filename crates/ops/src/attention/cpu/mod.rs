//! Attention on the CPU, tiled both ways: no `[tokens, tokens]` matrix ever exists.
//!
//! Forward: strips of 16 or 32 queries walk over blocks of keys with a running maximum (online softmax) and keep the
//! log-sum-exp. Backward: strips of keys walk over blocks of queries, with the probabilities made anew from it
//! (Dao et al., "FlashAttention-2", 2023, algorithms 1 and 2). A task is one key/value head of one sequence.
use crate::activation::LANES;
use crate::spans::Span;

mod amx;
mod backward;
mod decode;
mod forward;
mod operands;

pub(super) use backward::backward;
pub(super) use decode::{decode, decode_vector};
pub(super) use forward::forward;

const BLOCK: usize = LANES * LANES;

/// The tasks of a batch, longest first, so that the last ones to finish are short.
fn tasks(spans: &[Span], kv: usize) -> Vec<(usize, usize)> {
    let mut order: Vec<usize> =
        (0..spans.len()).filter(|&s| !spans[s].positions.is_empty() || spans[s].keys > 0).collect();
    order.sort_by_key(|&s| std::cmp::Reverse(spans[s].keys * spans[s].positions.len().max(1)));
    order.into_iter().flat_map(|s| (0..kv).map(move |head| (s, head))).collect()
}
