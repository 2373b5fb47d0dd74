//! The definition in f64, on rows.
use super::LatentHeads;

/// Keys `[tokens, heads * (nope + rope)]` and values `[tokens, heads * value]`.
pub(super) fn forward(kv: &[f64], k_rot: &[f64], how: LatentHeads) -> (Vec<f64>, Vec<f64>) {
    let LatentHeads { heads, nope, rope, value } = how;
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for (token, shared) in kv.chunks_exact(heads * (nope + value)).zip(k_rot.chunks_exact(rope)) {
        for head in token.chunks_exact(nope + value) {
            k.extend_from_slice(&head[..nope]);
            k.extend_from_slice(shared);
            v.extend_from_slice(&head[nope..]);
        }
    }
    (k, v)
}
