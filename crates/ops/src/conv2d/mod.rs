//! A 2-D convolution of one picture, as `torch.nn.functional.conv2d` computes it. The places of the picture, row by
//! row, are tokens, and its channels are features:
//! `y[(r, c), m] = bias[m] + sum over i, j, k of W[m, k, i, j] x[(r stride + i - before, c stride + j - before), k]`,
//! where places outside of the picture count as zero. Forward only: the encoders that make latents are frozen.
//!
//! It is one matrix product for each place `(i, j)` of the kernel, of the numbers that this place sees (im2col, one
//! column block at a time), so that a GPU needs no kernel of its own. In 16-bit activations each of these products
//! would be rounded: take a pool of float32.
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use crate::floats::Floats;
use crate::gemm::{Init, Matrix, Store, Term, matmul};

/// The weights of a convolution as files store them: `[out, in, side, side]`, or of a causal 3-D convolution
/// `[out, in, planes, side, side]`. A single frame meets only the last plane; the planes before it see zeros.
#[derive(Debug, Clone, Copy)]
pub struct Kernel<'a> {
    /// The weights, `[out, in, side, side]`, or with `planes` before the sides. They cannot be quantized.
    pub weight: Store<'a>,
    /// Added to each output channel, `[out]`.
    pub bias: Floats<'a>,
    /// Planes in time; 1 for a 2-D convolution.
    pub planes: usize,
    /// Rows of the kernel, which are as many as its columns.
    pub side: usize,
}

/// Stride and padding of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steps {
    /// How many places the kernel moves at a time, in both directions.
    pub stride: usize,
    /// How many rows and columns of zeros are added before the picture, and after it.
    pub padding: [usize; 2],
}

impl Steps {
    /// Rows and columns of the result for a picture of `size` rows and columns and a kernel of `side`. The padded
    /// picture has to be at least as large as the kernel.
    #[must_use]
    pub fn size(self, size: [usize; 2], side: usize) -> [usize; 2] {
        size.map(|length| (length + self.padding[0] + self.padding[1] - side) / self.stride + 1)
    }
}

/// The convolution of `x [rows * columns, in]`: `[rows' * columns', out]`, with the rows and columns of [`Steps::size`].
///
/// # Panics
/// If the shapes do not fit, or the weight is quantized.
pub fn forward(x: &Activation, size: [usize; 2], kernel: Kernel<'_>, steps: Steps) -> Activation {
    let (places, channels, out) = (size[0] * size[1], x.features(), kernel.bias.len());
    let Kernel { planes, side, .. } = kernel;
    assert_eq!(x.tokens(), places, "a token for each place");
    assert_eq!(kernel.weight.len(), out * channels * planes * side * side, "weights of these channels");
    let mut y = x.pool().act_f32(steps.size(size, side).iter().product(), out);
    let taps = side * side;
    let apart = planes * taps;
    // One more token, of zeros, stands for all places outside of the picture.
    let padded = (taps > 1 || steps.stride > 1).then(|| x.scatter(&(0..places).collect::<Vec<_>>(), places + 1));
    for tap in 0..taps {
        let seen = padded.as_ref().map(|padded| padded.gather(&seen(size, [tap / side, tap % side], side, steps)));
        let data = kernel.weight.after((planes - 1) * taps + tap);
        let matrix = Matrix::strided(data, channels * apart, apart);
        let init = if tap == 0 { Init::Bias(kernel.bias) } else { Init::Out };
        matmul(&mut y, init, &[Term { matrix, x: seen.as_ref().unwrap_or(x) }]);
    }
    y
}

/// For each place of the result, the place of the picture that `(row, column)` of the kernel sees. `rows * columns`
/// stands for places outside of the picture.
fn seen([rows, columns]: [usize; 2], [row, column]: [usize; 2], side: usize, steps: Steps) -> Vec<usize> {
    let [down, across] = steps.size([rows, columns], side);
    let at = |place: usize, tap: usize, length: usize| {
        (place * steps.stride + tap).checked_sub(steps.padding[0]).filter(|at| *at < length)
    };
    let line = move |place: usize| {
        let row = at(place, row, rows);
        (0..across).map(move |place| match (row, at(place, column, columns)) {
            (Some(row), Some(column)) => row * columns + column,
            _ => rows * columns,
        })
    };
    (0..down).flat_map(line).collect()
}
