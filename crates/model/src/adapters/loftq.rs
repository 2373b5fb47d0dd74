//! `LoftQ` (Li et al., 2023): a quantized weight, and an adapter that starts with what the quantization lost. Each
//! round quantizes `Q = quantize(W - s B A)`, and then takes for `s B A` the part of `W - Q` with the largest singular
//! values. At first `B A = 0`.
//!
//! PEFT ignores the adapter's scale `s` here. In this implementation, `Q + s B A` approximates `W` for every scale.
use super::factors::{factors, subtract};
use crate::quantized_form::How;
use crate::svd;
use rayon::prelude::*;
use tunesmith_base::error::Result;
use tunesmith_ops::quant::{Quantized, encode};

/// Runs `rounds` rounds on a weight with `cols` columns. Returns the quantized weight, A `[rank, cols]`, and B
/// `[rows, rank]`.
///
/// # Errors
/// As [`encode::quantize`].
pub fn start(
    weight: &[f32],
    cols: usize,
    how: How,
    rank: usize,
    scale: f32,
    rounds: usize,
) -> Result<(Quantized, [Vec<f32>; 2])> {
    let mut rest = weight.to_vec();
    let mut round = 1;
    loop {
        let matrix = encode::quantize(&rest, cols, how.format, how.double)?;
        let mut residual = matrix.dequantize();
        residual.par_iter_mut().zip(weight).for_each(|(lost, weight)| *lost = weight - *lost);
        let triplets = svd::exact(svd::Rows { data: &residual, cols }, rank);
        let [a, b] = factors(&triplets, weight.len() / cols, scale);
        if round == rounds {
            return Ok((matrix, [a, b]));
        }
        rest.copy_from_slice(weight);
        subtract(&mut rest, cols, scale, [&a, &b]);
        round += 1;
    }
}
