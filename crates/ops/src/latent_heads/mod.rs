//! Assembles the keys and values of multi-head latent attention (MLA) from a token's projections. For each head, the
//! projection has the unrotated part of the key and the value side by side; all heads share one rotated part of the
//! key. `DeepSeek-AI`, "DeepSeek-V2", 2024, <https://arxiv.org/abs/2405.04434>.
//!
//! ```text
//! k[t, h] = [kv[t, h, ..nope], k_rot[t]]        v[t, h] = kv[t, h, nope..]
//! d_kv[t, h] = [dk[t, h, ..nope], dv[t, h]]     d_k_rot[t] = sum over h of dk[t, h, nope..]
//! ```
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use tunesmith_device::Device;

/// The number of heads, and how many features each part has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentHeads {
    /// The number of heads.
    pub heads: usize,
    /// Features of a key that are not rotated (`qk_nope_head_dim`).
    pub nope: usize,
    /// Features of a key that are rotated (`qk_rope_head_dim`).
    pub rope: usize,
    /// Features of a head's value (`v_head_dim`).
    pub value: usize,
}

impl LatentHeads {
    /// Features of a key, which are those of a query too.
    pub const fn key(self) -> usize {
        self.nope + self.rope
    }
}

/// Keys `[tokens, heads * (nope + rope)]` and values `[tokens, heads * value]` from `kv [tokens, heads * (nope + value)]` and
/// `k_rot [tokens, rope]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn forward(kv: &Activation, k_rot: &Activation, how: LatentHeads) -> (Activation, Activation) {
    assert_eq!(kv.features(), how.heads * (how.nope + how.value), "parts of keys, and values, of all heads");
    assert_eq!((k_rot.tokens(), k_rot.features()), (kv.tokens(), how.rope), "one part of a key a token");
    let (pool, tokens) = (kv.pool(), kv.tokens());
    let mut k = pool.blank(tokens, how.heads * how.key());
    let mut v = pool.blank(tokens, how.heads * how.value);
    match kv.device() {
        Device::Cpu => cpu::forward(kv, k_rot, &mut k, &mut v, how),
        Device::Cuda(_) => cuda::forward(kv, k_rot, &mut k, &mut v, how),
        Device::Meta => {}
    }
    (k, v)
}

/// The gradients of `kv` and `k_rot`, from those of [`forward`]'s keys and values.
///
/// # Panics
/// If the shapes do not fit.
pub fn backward(dk: &Activation, dv: &Activation, how: LatentHeads) -> (Activation, Activation) {
    assert_eq!(dk.features(), how.heads * how.key(), "keys of all heads");
    assert_eq!((dv.tokens(), dv.features()), (dk.tokens(), how.heads * how.value), "a value for each key");
    let (pool, tokens) = (dk.pool(), dk.tokens());
    let mut d_kv = pool.blank(tokens, how.heads * (how.nope + how.value));
    let mut d_k_rot = pool.blank(tokens, how.rope);
    match dk.device() {
        Device::Cpu => cpu::backward(dk, dv, &mut d_kv, &mut d_k_rot, how),
        Device::Cuda(_) => cuda::backward(dk, dv, &mut d_kv, &mut d_k_rot, how),
        Device::Meta => {}
    }
    (d_kv, d_k_rot)
}
