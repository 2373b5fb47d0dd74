//! The definition on row-major f64, one token and one pair at a time.
use super::Pairing;

/// The angles of a token's pairs, and the factor on their cosines and sines.
pub(super) type Angles = (Vec<f64>, f64);

/// `x [tokens, heads * head_dim]` turned: pair i of token t by `tokens[t].0[i]`, from feature `offset` of each head on.
pub(super) fn forward(x: &[f64], tokens: &[Angles], head_dim: usize, offset: usize, pairing: Pairing) -> Vec<f64> {
    let mut out = x.to_vec();
    let width = x.len() / tokens.len();
    for (row, (angles, factor)) in tokens.iter().enumerate() {
        for head in (row * width..(row + 1) * width).step_by(head_dim) {
            for (pair, angle) in angles.iter().enumerate() {
                let (a, b) = match pairing {
                    Pairing::Half => (pair, pair + angles.len()),
                    Pairing::Interleaved => (2 * pair, 2 * pair + 1),
                };
                let (a, b) = (head + offset + a, head + offset + b);
                let (s, c) = (angle.sin() * factor, angle.cos() * factor);
                out[a] = x[a] * c - x[b] * s;
                out[b] = x[b] * c + x[a] * s;
            }
        }
    }
    out
}
