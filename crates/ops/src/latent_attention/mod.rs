//! Generation with multi-head latent attention (MLA): single queries over a cache of latents. The keys and values of
//! all heads at a position are projections of one latent. The projections are absorbed into the query and the output,
//! so that neither keys nor values are ever computed: `DeepSeek-AI`, "DeepSeek-V2", 2024,
//! <https://arxiv.org/abs/2405.04434>, section 2.1.2.
//!
//! With `W = [K; V]` the rows of a head in the projection, `c[j]` the latent of position j, and `r[j]` the rotated part
//! of its key:
//!
//! ```text
//! s[j] = scale * (<K^T q_nope, c[j]> + <q_rope, r[j]>)      = scale * <q, [K c[j], r[j]]>
//! o    = V * sum over j of softmax(s)[j] * c[j]             = sum over j of softmax(s)[j] * V c[j]
//! ```
//!
//! `LoRA` adds `s B A` to `W`, which is applied as two products too. Results differ by rounding from those of
//! [`attention`](crate::attention) over keys and values. Only on the CPU.
mod cache;
mod cpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use cache::Latents;

use crate::activation::Activation;
use crate::gemm::Store;
use crate::latent_heads::LatentHeads;
use tunesmith_device::Device;

/// The projection from a latent to the values and the unrotated parts of the keys of all heads.
#[derive(Debug, Clone, Copy)]
pub struct Projection<'a> {
    /// The weight, row-major `[heads * (nope + value), rank]`.
    pub weight: Store<'a>,
    /// What a `LoRA` adapter adds to the weight, if there is one.
    pub low_rank: Option<LowRank<'a>>,
    /// Features of a latent.
    pub rank: usize,
}

/// A `LoRA` adapter's update of a weight, `scale B A`.
#[derive(Debug, Clone, Copy)]
pub struct LowRank<'a> {
    /// A, row-major `[width, rank]`.
    pub a: &'a [f32],
    /// B, row-major `[heads * (nope + value), width]`.
    pub b: &'a [f32],
    /// The inner size of the product, which `LoRA` calls its rank.
    pub width: usize,
    /// What the product is multiplied by.
    pub scale: f32,
}

/// The outputs `[queries, heads * value]` of `q [queries, heads * (nope + rope)]`. Each query attends to the cache of
/// its text up to its own position, which the cache has to hold. A query's result does not depend on other queries.
///
/// # Panics
/// If shapes do not fit, a cache lacks a position, or the device is not the CPU.
pub fn decode(
    q: &Activation,
    queries: &[(&Latents, usize)],
    projection: Projection<'_>,
    heads: LatentHeads,
    scale: f32,
) -> Activation {
    assert_eq!(q.device(), Device::Cpu, "latents are kept on the CPU");
    let (rank, rows) = (projection.rank, heads.heads * (heads.nope + heads.value));
    assert_eq!((q.tokens(), q.features()), (queries.len(), heads.heads * heads.key()), "a cache for each query");
    assert_eq!(projection.weight.len(), rows * rank, "the projection of all heads");
    if let Some(low) = &projection.low_rank {
        assert_eq!((low.a.len(), low.b.len()), (low.width * rank, rows * low.width), "A and B of the projection");
    }
    let fits = |(cache, position): &(&Latents, usize)| cache.widths() == [rank, heads.rope] && *position < cache.len();
    assert!(queries.iter().all(fits), "caches of such latents with these positions");
    cpu::decode(q, queries, projection, heads, scale)
}
