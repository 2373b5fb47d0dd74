//! Rotations by Cayley's transform of skew-symmetric matrices, and their gradient, in f64.
use rayon::prelude::*;

use tunesmith_ops::block_diagonal::Diagonal;
use tunesmith_ops::floats::Floats;
/// The shape of the rotation of a module's inputs: blocks along the diagonal.
#[derive(Debug, Clone, Copy)]
pub(super) struct Blocks {
    pub(super) size: usize,
    /// How many different blocks there are: 1 if all are the same.
    pub(super) count: usize,
    /// Terms of the Neumann series; `None` for the exact inverse.
    pub(super) terms: Option<usize>,
}

impl Blocks {
    /// How many values of a block are trained: those above the diagonal of Q.
    pub(super) const fn trained(self) -> usize {
        self.size * (self.size - 1) / 2
    }

    /// The matrices `[count, size, size]` as a block-diagonal operand.
    pub(super) const fn diagonal(self, matrices: Floats<'_>) -> Diagonal<'_> {
        Diagonal { matrices, size: self.size }
    }

    /// The skew-symmetric Q `[size, size]` of a block's trained values.
    pub(super) fn skew(self, weight: &[f32]) -> Vec<f64> {
        let (size, mut at) = (self.size, 0);
        let mut skew = vec![0.0; size * size];
        for row in 0..size {
            for col in row + 1..size {
                let value = f64::from(weight[at]);
                (skew[row * size + col], skew[col * size + row]) = (value, -value);
                at += 1;
            }
        }
        skew
    }

    /// The factors of the powers of Q in the Neumann series, from the first power on: PEFT's `_cayley_batch`.
    fn series(terms: usize) -> Vec<f64> {
        match terms {
            0 | 1 => Vec::new(),
            2 => vec![2.0],
            _ => [vec![2.0; (terms - 2).max(2)], vec![1.0]].concat(),
        }
    }

    /// The rotation R `[size, size]` of a block's trained values: `(I - Q) (I + Q)^-1`, or its Neumann series.
    fn rotation(self, weight: &[f32]) -> Vec<f64> {
        let (size, skew) = (self.size, self.skew(weight));
        let mut sum = identity(size);
        let Some(terms) = self.terms else {
            let plus = inverse(add(&sum, 1.0, &skew), size);
            return product(&add(&sum, -1.0, &skew), &plus, size);
        };
        let mut power = identity(size);
        for factor in Self::series(terms) {
            power = product(&power, &skew, size);
            sum = add(&sum, factor, &power);
        }
        sum
    }

    /// The rotations of all blocks, `[count, size, size]`.
    pub(super) fn make(self, weight: &[f32]) -> Vec<f32> {
        let blocks: Vec<Vec<f64>> =
            weight.par_chunks_exact(self.trained()).map(|weight| self.rotation(weight)).collect();
        blocks.into_iter().flatten().map(|value| value as f32).collect()
    }

    /// The gradient of a block's trained values, given `d_matrix`, that of its R.
    pub(super) fn gradient(self, weight: &[f32], d_matrix: &[f32]) -> Vec<f32> {
        let (size, skew) = (self.size, self.skew(weight));
        let d_matrix: Vec<f64> = d_matrix.iter().map(|&value| f64::from(value)).collect();
        let d_matrix = &d_matrix[..];
        let (one, turned) = (identity(size), transposed(&skew, size));
        let d_skew = if let Some(terms) = self.terms {
            let series = Self::series(terms);
            let mut powers = vec![one];
            for at in 1..series.len() {
                powers.push(product(&powers[at - 1], &skew, size));
            }
            let (mut sum, mut d_power) = (vec![0.0; size * size], vec![0.0; size * size]);
            for (factor, below) in series.iter().zip(&powers).rev() {
                // The gradient of a power `P = P' Q`, where `P'` is the power below it.
                d_power = add(&product(&d_power, &turned, size), *factor, d_matrix);
                sum = add(&sum, 1.0, &product(&transposed(below, size), &d_power, size));
            }
            sum
        } else {
            let plus = inverse(add(&one, 1.0, &skew), size);
            let matrix = add(&product(&add(&one, -1.0, &skew), &plus, size), 1.0, &one);
            let left = product(&transposed(&matrix, size), d_matrix, size);
            add(&vec![0.0; size * size], -1.0, &product(&left, &transposed(&plus, size), size))
        };
        let pairs = (0..size).flat_map(|row| (row + 1..size).map(move |col| (row, col)));
        pairs.map(|(row, col)| (d_skew[row * size + col] - d_skew[col * size + row]) as f32).collect()
    }
}

pub(super) fn identity(size: usize) -> Vec<f64> {
    (0..size * size).map(|at| if at / size == at % size { 1.0 } else { 0.0 }).collect()
}

pub(super) fn add(left: &[f64], factor: f64, right: &[f64]) -> Vec<f64> {
    left.iter().zip(right).map(|(left, right)| left + factor * right).collect()
}

fn transposed(matrix: &[f64], size: usize) -> Vec<f64> {
    (0..size * size).map(|at| matrix[at % size * size + at / size]).collect()
}

pub(super) fn product(left: &[f64], right: &[f64], size: usize) -> Vec<f64> {
    let mut out = vec![0.0; size * size];
    for (out, left) in out.chunks_exact_mut(size).zip(left.chunks_exact(size)) {
        for (left, right) in left.iter().zip(right.chunks_exact(size)) {
            out.iter_mut().zip(right).for_each(|(out, right)| *out += left * right);
        }
    }
    out
}

/// The inverse of `I + Q`, by elimination. Its symmetric part is the identity, so no pivoting is needed.
pub(super) fn inverse(mut matrix: Vec<f64>, size: usize) -> Vec<f64> {
    let mut out = identity(size);
    for pivot in 0..size {
        let by = 1.0 / matrix[pivot * size + pivot];
        for row in [&mut matrix, &mut out] {
            row[pivot * size..][..size].iter_mut().for_each(|value| *value *= by);
        }
        let (own, own_out) = (matrix[pivot * size..][..size].to_vec(), out[pivot * size..][..size].to_vec());
        for row in (0..size).filter(|&row| row != pivot) {
            let by = matrix[row * size + pivot];
            let less = |values: &mut [f64], own: &[f64]| {
                values[row * size..][..size].iter_mut().zip(own).for_each(|(value, own)| *value -= by * own);
            };
            less(&mut matrix, &own);
            less(&mut out, &own_out);
        }
    }
    out
}
