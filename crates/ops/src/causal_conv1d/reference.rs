//! The definition in f64, on rows.
use std::ops::Range;

/// `y` of `x [tokens, channels]`, `weight [channels, kernel]`.
pub(super) fn forward(
    x: &[f64],
    weight: &[f64],
    bias: Option<&[f64]>,
    silu: bool,
    channels: usize,
    sequences: &[Range<usize>],
) -> Vec<f64> {
    let kernel = weight.len() / channels;
    let mut y = vec![0.0; x.len()];
    for sequence in sequences {
        for token in sequence.clone() {
            for channel in 0..channels {
                let mut z = bias.map_or(0.0, |bias| bias[channel]);
                for tap in 0..kernel.min(token - sequence.start + 1) {
                    z += weight[channel * kernel + kernel - 1 - tap] * x[(token - tap) * channels + channel];
                }
                y[token * channels + channel] = if silu { z / (1.0 + (-z).exp()) } else { z };
            }
        }
    }
    y
}
