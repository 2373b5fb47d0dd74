//! Softmax attention over padding-free sequences: [`forward`], [`backward`], and generation with a cache, one token at
//! a time ([`decode`]).
//!
//! For a query q at position i of a sequence and one of its heads:
//!
//! ```text
//! s[j] = cap(scale * <q, k[j]>)                      for each key j that the query sees
//! lse  = ln(exp(sink) + sum over j of exp(s[j]))
//! o    = sum over j of exp(s[j] - lse) * v[j]
//! ```
//!
//! Without a soft cap `cap` is the identity; without a sink `exp(sink)` is 0. Which keys a query sees follows from the
//! causal rule, from a layer's [`Window`], or from the ranges that a [`Span`] carries. Each key/value head serves
//! `query / kv` successive query heads (grouped-query attention). Heads may have any sizes; those up to 512 are tested.
//! Queries may be a subset of the tokens: the last block needs only the rows that carry a loss.
//!
//! On a CPU with `AVX512_BF16`, operands are rounded to bfloat16 if the pool of the activations says so
//! ([`Pool::set_products`](crate::activation::Pool::set_products)); [`decode`] never rounds them.
//!
//! On a GPU, tensor cores multiply 16-bit activations whose keys and values both have a multiple of 16 features, up to 256.
//! Weights are then rounded to 16 bits, and sums are in float32. All other shapes, float32, and the new tokens of [`decode`]
//! are multiplied in float32.
mod cache;
mod cpu;
mod cuda;
#[cfg(test)]
mod decode_tests;
mod mma;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use super::activation::Activation;
use super::floats::{Floats, FloatsMut};
use super::spans::{Span, Window};
pub use cache::KeyValues;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::Device;

/// The numbers of heads, and their sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// The number of query heads.
    pub query: usize,
    /// The number of key and value heads, which divides `query`.
    pub kv: usize,
    /// Features of a query and of a key.
    pub head_dim: usize,
    /// Features of a value, and so of a head's output. Differs from `head_dim` in `DeepSeek`'s MLA: 192 and 128.
    pub v_head_dim: usize,
}

impl Heads {
    /// Heads whose values have as many features as their keys.
    pub const fn new(query: usize, kv: usize, head_dim: usize) -> Self {
        Self { query, kv, head_dim, v_head_dim: head_dim }
    }

    /// Whether keys and values have the same shape as with `other`, whatever the number of query heads.
    pub fn same_keys(self, other: Self) -> bool {
        Self { query: other.query, ..self } == other
    }
}

/// How scores are computed, and which keys a query sees unless its [`Span`] carries ranges.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scores {
    /// What the products of queries and keys are multiplied by, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// If set, scores become `cap * tanh(score / cap)`, as in Gemma 2. Sinks are not capped.
    pub softcap: Option<f32>,
    /// The layer's window. With `None`, the query at position i sees the keys `0..=i`.
    pub window: Option<Window>,
}

/// The operands and results of [`forward`], which [`backward`] needs.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// Queries `[rows, query heads * head_dim]`.
    pub q: &'a Activation,
    /// Keys `[tokens, kv heads * head_dim]`.
    pub k: &'a Activation,
    /// Values `[tokens, kv heads * v_head_dim]`.
    pub v: &'a Activation,
    /// Each query head's sink logit, `[query heads]`; `None` without sinks.
    pub sinks: Option<Floats<'a>>,
    /// The outputs of [`forward`], `[rows, query heads * v_head_dim]`.
    pub o: &'a Activation,
    /// The logarithm of the softmax's denominator, sink included: `[rows, query heads]`.
    pub lse: &'a Activation,
}

/// Attention of `q [rows, query heads * head_dim]` over `k [tokens, kv heads * head_dim]` and
/// `v [tokens, kv heads * v_head_dim]`. `sinks [query heads]` only enter the softmax's denominators (gpt-oss).
///
/// Returns the outputs `[rows, query heads * v_head_dim]` and the log-sum-exp `[rows, query heads]`.
///
/// # Panics
/// If shapes, spans or ranges do not fit.
pub fn forward(
    q: &Activation,
    k: &Activation,
    v: &Activation,
    sinks: Option<Floats<'_>>,
    spans: &[Span],
    heads: Heads,
    how: Scores,
) -> (Activation, Activation) {
    check(q, k, v, sinks, spans, heads);
    match q.device() {
        Device::Cpu => cpu::forward(q, k, v, sinks.map(Floats::cpu_slice), spans, heads, how),
        Device::Cuda(_) => cuda::forward(q, k, v, sinks, spans, heads, how),
        Device::Meta => {
            let (pool, tokens) = (q.pool(), q.tokens());
            (pool.act(tokens, heads.query * heads.v_head_dim), pool.act_f32(tokens, heads.query))
        }
    }
}

/// The gradients `(dq, dk, dv)` of [`forward`], from `d_o`, the gradient of its first result. Adds the gradient of the
/// sinks, `[query heads]`, to `d_sinks` if given.
///
/// # Panics
/// As [`forward`], if two sequences share keys, or if the gradient of sinks is asked for where there are none.
pub fn backward(
    saved: Saved<'_>,
    d_o: &Activation,
    spans: &[Span],
    heads: Heads,
    how: Scores,
    d_sinks: Option<FloatsMut<'_>>,
) -> (Activation, Activation, Activation) {
    let Saved { q, k, v, sinks, o, lse } = saved;
    check(q, k, v, sinks, spans, heads);
    let shape = (q.tokens(), heads.query * heads.v_head_dim);
    assert_eq!((o.tokens(), o.features()), shape, "o holds a value for each query");
    assert_eq!((d_o.tokens(), d_o.features()), shape, "d_o is shaped as o");
    assert_eq!((lse.tokens(), lse.features()), (q.tokens(), heads.query), "one sum for each head");
    let apart = |pair: &[Span]| pair[0].key_start + pair[0].keys <= pair[1].key_start;
    assert!(spans.windows(2).all(apart), "keys of one sequence after the other");
    if let Some(d_sinks) = &d_sinks {
        assert_eq!(sinks.map(Floats::len), Some(d_sinks.len()), "a gradient for each sink");
    }
    match q.device() {
        Device::Cpu => cpu::backward(saved, d_o, spans, heads, how, d_sinks.map(FloatsMut::cpu_slice)),
        Device::Cuda(_) => cuda::backward(saved, d_o, spans, heads, how, d_sinks),
        Device::Meta => (q.like(), k.like(), v.like()),
    }
}

/// Attention of single queries `q [queries, query heads * head_dim]`, each over the cache of its own text. `queries`
/// has each query's cache and position. The cache holds that position too, and may hold later ones, which the causal
/// rule and the window hide. Returns the outputs `[queries, query heads * v_head_dim]`. They equal those of [`forward`]
/// to the last bit, except where that uses tensor cores (16-bit activations on a GPU, heads with a multiple of 16
/// features up to 256): there they differ by its rounding.
///
/// # Panics
/// If shapes do not fit, or a cache lacks a query's position or has released a position that the query sees.
pub fn decode(
    q: &Activation,
    queries: &[(&KeyValues, usize)],
    sinks: Option<Floats<'_>>,
    heads: Heads,
    how: Scores,
) -> Activation {
    check_heads(heads, sinks);
    assert_eq!((q.tokens(), q.features()), (queries.len(), heads.query * heads.head_dim), "a cache for each query");
    let fits = |(cache, position): &(&KeyValues, usize)| cache.heads().same_keys(heads) && *position < cache.len();
    assert!(queries.iter().all(fits), "caches of these heads with these positions");
    let kept = |(cache, position): &(&KeyValues, usize)| {
        let seen = Window::causal(how.window, *position);
        cache.keeps(seen.start / super::activation::LANES)
    };
    assert!(queries.iter().all(kept), "caches that keep what these positions see");
    match q.device() {
        Device::Cpu => cpu::decode(q, queries, sinks.map(Floats::cpu_slice), heads, how),
        Device::Cuda(_) => cuda::decode(q, queries, sinks, heads, how),
        Device::Meta => q.pool().act(q.tokens(), heads.query * heads.v_head_dim),
    }
}

/// As [`decode`] for one query on the CPU, whose features are the vector `q [query heads * head_dim, 1]`
/// ([`Activation::to_vector`]). Returns a vector too: `[query heads * v_head_dim, 1]`.
///
/// # Panics
/// As [`decode`], or if the device is not the CPU.
pub fn decode_vector(
    q: &Activation,
    (cache, position): (&KeyValues, usize),
    sinks: Option<Floats<'_>>,
    heads: Heads,
    how: Scores,
) -> Activation {
    check_heads(heads, sinks);
    assert_eq!((q.tokens(), q.features()), (heads.query * heads.head_dim, 1), "the features of all heads");
    assert_eq!(q.device(), Device::Cpu, "one token on the CPU");
    assert!(cache.heads().same_keys(heads) && position < cache.len(), "a cache of these heads with this position");
    let seen = Window::causal(how.window, position);
    assert!(cache.keeps(seen.start / super::activation::LANES), "a cache that keeps what this position sees");
    cpu::decode_vector(q, (cache, position), sinks.map(Floats::cpu_slice), heads, how)
}

fn check_heads(heads: Heads, sinks: Option<Floats<'_>>) {
    assert!(heads.kv > 0 && heads.query.is_multiple_of(heads.kv), "query heads share key/value heads evenly");
    assert!(sinks.is_none_or(|sinks| sinks.len() == heads.query), "a sink for each query head");
}

/// Checks shapes and spans before any pointer is made of them. Afterwards every task reads within the operands, and no
/// two tasks write to the same place, because no row is a query of two spans.
fn check(q: &Activation, k: &Activation, v: &Activation, sinks: Option<Floats<'_>>, spans: &[Span], heads: Heads) {
    check_heads(heads, sinks);
    assert_eq!(q.features(), heads.query * heads.head_dim, "q holds the query heads");
    let wanted = (heads.kv * heads.head_dim, heads.kv * heads.v_head_dim);
    assert_eq!((k.features(), v.features()), wanted, "k and v hold theirs");
    assert_eq!(k.tokens(), v.tokens(), "a value for each key");
    let within = |start: usize, count: usize, all: usize| start.checked_add(count).is_some_and(|end| end <= all);
    for span in spans {
        let queries = span.positions.len();
        assert!(within(span.key_start, span.keys, k.tokens()), "keys inside the batch");
        assert!(within(span.query_start, queries, q.tokens()), "queries inside the batch");
        assert!(span.positions.iter().all(|&position| position < span.keys), "positions inside the sequence");
        if let Some(ranges) = &span.ranges {
            assert_eq!((ranges.first.len(), ranges.end.len()), (queries, queries), "a range for each query");
            let inside = |(&first, &end): (&u32, &u32)| first < end && end as usize <= span.keys;
            assert!(ranges.first.iter().zip(&ranges.end).all(inside), "ranges of keys inside the sequence");
        }
    }
    let apart = |pair: &[Span]| pair[0].query_start + pair[0].positions.len() <= pair[1].query_start;
    assert!(spans.windows(2).all(apart), "queries of one sequence after the other");
}
