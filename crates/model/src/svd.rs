//! The largest singular values of a matrix with their vectors, in f64: for `PiSSA` (Meng et al., 2024), which starts the
//! adapter with them and leaves the base the rest. Every sum has one order, so that a resumed run finds the same bits.
//!
//! [`exact`] takes the eigenvectors of the smaller Gram matrix by Householder's reduction and the QL method (EISPACK's
//! `tred2` and `tql2`); [`rounds`] is `torch.svd_lowrank`: power iteration on a random basis.
use super::init::Stream;
use rayon::prelude::*;

/// `M ≈ sum_k u_k s_k v_k^T`, the `s` falling.
#[derive(Debug)]
pub struct Triplets {
    /// Left vectors, each as long as a column of the matrix.
    pub u: Vec<Vec<f64>>,
    pub s: Vec<f64>,
    /// Right vectors, each as long as a row.
    pub v: Vec<Vec<f64>>,
}

/// A matrix `[rows, cols]`, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    pub data: &'a [f32],
    pub cols: usize,
}

impl Rows<'_> {
    fn rows(&self) -> usize {
        self.data.len() / self.cols
    }

    fn times(&self, x: &[f64]) -> Vec<f64> {
        self.data.par_chunks(self.cols).map(|row| dot_with(row, x, f64::from)).collect()
    }

    fn transposed(&self) -> Vec<f32> {
        let (rows, cols) = (self.rows(), self.cols);
        let mut out = vec![0.0; self.data.len()];
        out.par_chunks_mut(rows).enumerate().for_each(|(col, out)| {
            out.iter_mut().enumerate().for_each(|(row, out)| *out = self.data[row * cols + col]);
        });
        out
    }
}

/// A dot product as eight interleaved sums.
fn dot_with<T: Copy>(left: &[T], right: &[f64], widen: impl Fn(T) -> f64) -> f64 {
    let mut sums = [0.0; 8];
    for (left, right) in left.chunks(8).zip(right.chunks(8)) {
        for (sum, (left, right)) in sums.iter_mut().zip(left.iter().zip(right)) {
            *sum += widen(*left) * right;
        }
    }
    sums.iter().sum()
}

fn dot(left: &[f64], right: &[f64]) -> f64 {
    dot_with(left, right, |value| value)
}

/// The `count` largest singular values with their vectors, by an exact decomposition.
pub fn exact(matrix: Rows<'_>, count: usize) -> Triplets {
    let transposed = matrix.transposed();
    let turned = Rows { data: &transposed, cols: matrix.rows() };
    // Vectors of the smaller side first; the others are their images.
    let wide = matrix.rows() < matrix.cols;
    let (small, image) = if wide { (matrix, turned) } else { (turned, matrix) };
    let (values, vectors) = symmetric_eigen(gram(small));
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&left, &right| values[right].total_cmp(&values[left]));
    let near: Vec<Vec<f64>> = order.iter().take(count).map(|&at| vectors[at].clone()).collect();
    let (mut s, mut far) = (Vec::new(), Vec::new());
    for vector in &near {
        let (value, vector) = normalized(image.times(vector));
        s.push(value);
        far.push(vector);
    }
    let (u, v) = if wide { (near, far) } else { (far, near) };
    Triplets { u, s, v }
}

/// The `count` largest singular values with their vectors, approximated by `rounds` rounds of power iteration on a
/// random basis.
pub fn rounds(matrix: Rows<'_>, count: usize, rounds: u32, stream: Stream) -> Triplets {
    let transposed = matrix.transposed();
    let turned = Rows { data: &transposed, cols: matrix.rows() };
    let basis = |matrix: Rows<'_>, vectors: &[Vec<f64>]| -> Vec<Vec<f64>> {
        orthonormal(vectors.iter().map(|vector| matrix.times(vector)).collect())
    };
    let random = stream.normals(1.0, count * matrix.cols);
    let random: Vec<Vec<f64>> =
        random.chunks(matrix.cols).map(|part| part.iter().map(|&value| f64::from(value)).collect()).collect();
    let mut q = basis(matrix, &random);
    for _ in 0..rounds {
        q = basis(matrix, &basis(turned, &q));
    }
    // The small matrix `Q^T M`. Its left singular vectors become those of M when Q multiplies them.
    let small: Vec<Vec<f64>> = q.iter().map(|vector| turned.times(vector)).collect();
    let square = small.iter().map(|left| small.iter().map(|right| dot(left, right)).collect()).collect();
    let (values, vectors) = symmetric_eigen(square);
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&left, &right| values[right].total_cmp(&values[left]));
    let mix = |parts: &[Vec<f64>], weights: &[f64]| -> Vec<f64> {
        let mut sum = vec![0.0; parts[0].len()];
        for (part, weight) in parts.iter().zip(weights) {
            sum.iter_mut().zip(part).for_each(|(sum, value)| *sum += weight * value);
        }
        sum
    };
    let mut triplets = Triplets { u: Vec::new(), s: Vec::new(), v: Vec::new() };
    for at in order {
        let (value, v) = normalized(mix(&small, &vectors[at]));
        triplets.u.push(mix(&q, &vectors[at]));
        triplets.s.push(value);
        triplets.v.push(v);
    }
    triplets
}

/// The length of a vector and the vector of length 1 (zero stays zero).
fn normalized(mut vector: Vec<f64>) -> (f64, Vec<f64>) {
    let norm = dot(&vector, &vector).sqrt();
    if norm > 0.0 {
        for value in &mut vector {
            *value /= norm;
        }
    }
    (norm, vector)
}

/// Gram and Schmidt's method, each vector twice, which is as good as Householder's.
fn orthonormal(mut vectors: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    for at in 0..vectors.len() {
        let (done, rest) = vectors.split_at_mut(at);
        for _ in 0..2 {
            for other in done.iter() {
                let along = dot(other, &rest[0]);
                rest[0].iter_mut().zip(other).for_each(|(value, other)| *value -= along * other);
            }
        }
        rest[0] = normalized(std::mem::take(&mut rest[0])).1;
    }
    vectors
}

/// The dot products of all rows with each other.
fn gram(matrix: Rows<'_>) -> Vec<Vec<f64>> {
    let rows: Vec<Vec<f64>> =
        matrix.data.chunks(matrix.cols).map(|row| row.iter().map(|&value| f64::from(value)).collect()).collect();
    rows.par_iter().map(|left| rows.iter().map(|right| dot(left, right)).collect()).collect()
}

/// Eigenvalues and, in the same order, eigenvectors of a symmetric matrix.
pub fn symmetric_eigen(mut columns: Vec<Vec<f64>>) -> (Vec<f64>, Vec<Vec<f64>>) {
    let (mut diagonal, mut beside) = (vec![0.0; columns.len()], vec![0.0; columns.len()]);
    if !columns.is_empty() {
        tridiagonalize(&mut columns, &mut diagonal, &mut beside);
        diagonalize(&mut columns, &mut diagonal, &mut beside);
    }
    (diagonal, columns)
}

/// EISPACK's `tred2`: Householder's reduction to a tridiagonal matrix. `v[j][k]` is row k of column j.
fn tridiagonalize(v: &mut [Vec<f64>], d: &mut [f64], e: &mut [f64]) {
    let n = d.len();
    for (d, column) in d.iter_mut().zip(v.iter()) {
        *d = column[n - 1];
    }
    for i in (1..n).rev() {
        let scale: f64 = d[..i].iter().map(|value| value.abs()).sum();
        let mut h = 0.0;
        if scale == 0.0 {
            e[i] = d[i - 1];
            for j in 0..i {
                d[j] = v[j][i - 1];
                v[j][i] = 0.0;
                v[i][j] = 0.0;
            }
        } else {
            for value in &mut d[..i] {
                *value /= scale;
                h += *value * *value;
            }
            let f = d[i - 1];
            let g = if f > 0.0 { -h.sqrt() } else { h.sqrt() };
            e[i] = scale * g;
            h -= f * g;
            d[i - 1] = f - g;
            e[..i].fill(0.0);
            for j in 0..i {
                let f = d[j];
                v[i][j] = f;
                let column = &v[j];
                let mut g = e[j] + column[j] * f;
                g += dot(&column[j + 1..i], &d[j + 1..i]);
                e[j + 1..i].iter_mut().zip(&column[j + 1..i]).for_each(|(e, value)| *e += value * f);
                e[j] = g;
            }
            let mut f = 0.0;
            for j in 0..i {
                e[j] /= h;
                f += e[j] * d[j];
            }
            let hh = f / (h + h);
            for j in 0..i {
                e[j] -= hh * d[j];
            }
            for j in 0..i {
                let (f, g) = (d[j], e[j]);
                let column = &mut v[j];
                let pairs = e[j..i].iter().zip(&d[j..i]);
                column[j..i].iter_mut().zip(pairs).for_each(|(value, (e, d))| *value -= f * e + g * d);
                d[j] = column[i - 1];
                column[i] = 0.0;
            }
        }
        d[i] = h;
    }
    for i in 0..n - 1 {
        v[i][n - 1] = v[i][i];
        v[i][i] = 1.0;
        let h = d[i + 1];
        let (left, right) = v.split_at_mut(i + 1);
        let next = &mut right[0];
        if h != 0.0 {
            for k in 0..=i {
                d[k] = next[k] / h;
            }
            for column in left {
                let g = dot(&next[..=i], &column[..=i]);
                column[..=i].iter_mut().zip(&d[..=i]).for_each(|(value, d)| *value -= g * d);
            }
        }
        next[..=i].fill(0.0);
    }
    for (d, column) in d.iter_mut().zip(v.iter_mut()) {
        *d = column[n - 1];
        column[n - 1] = 0.0;
    }
    v[n - 1][n - 1] = 1.0;
    e[0] = 0.0;
}

/// EISPACK's `tql2`: the QL method with implicit shifts.
fn diagonalize(v: &mut [Vec<f64>], d: &mut [f64], e: &mut [f64]) {
    let n = d.len();
    e.rotate_left(1);
    e[n - 1] = 0.0;
    let (mut f, mut largest) = (0.0, 0.0f64);
    for l in 0..n {
        largest = largest.max(d[l].abs() + e[l].abs());
        let small = f64::EPSILON * largest;
        let m = (l..n).find(|&m| e[m].abs() <= small).unwrap_or(n - 1);
        // The method takes two or three turns; the bound keeps NaN from going round for ever.
        for _ in 0..if m > l { 60 } else { 0 } {
            let g = d[l];
            let mut p = (d[l + 1] - g) / (2.0 * e[l]);
            let r = if p < 0.0 { -p.hypot(1.0) } else { p.hypot(1.0) };
            d[l] = e[l] / (p + r);
            d[l + 1] = e[l] * (p + r);
            let (dl1, h) = (d[l + 1], g - d[l]);
            d[l + 2..].iter_mut().for_each(|value| *value -= h);
            f += h;
            p = d[m];
            let (mut c, mut c2, mut c3) = (1.0, 1.0, 1.0);
            let (el1, mut s, mut s2) = (e[l + 1], 0.0, 0.0);
            for i in (l..m).rev() {
                (c3, c2, s2) = (c2, c, s);
                let (g, h, r) = (c * e[i], c * p, p.hypot(e[i]));
                e[i + 1] = s * r;
                (s, c) = (e[i] / r, p / r);
                p = c * d[i] - s * g;
                d[i + 1] = h + s * (c * g + s * d[i]);
                let (left, right) = v.split_at_mut(i + 1);
                for (low, high) in left[i].iter_mut().zip(&mut right[0]) {
                    let h = *high;
                    *high = s * *low + c * h;
                    *low = c * *low - s * h;
                }
            }
            p = -s * s2 * c3 * el1 * e[l] / dl1;
            e[l] = s * p;
            d[l] = c * p;
            if e[l].abs() <= small {
                break;
            }
        }
        d[l] += f;
        e[l] = 0.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_ops::testing::numbers;

    /// A matrix with the singular values 1, 1/2, 1/4, … along random directions.
    fn falling(rows: usize, cols: usize) -> Vec<f32> {
        let wide = |seed, count: usize, length: usize| -> Vec<Vec<f64>> {
            let numbers = numbers(seed, count * length);
            orthonormal(numbers.chunks(length).map(|part| part.iter().map(|&x| f64::from(x)).collect()).collect())
        };
        let rank = rows.min(cols);
        let (u, v) = (wide(1, rank, rows), wide(2, rank, cols));
        let mut out = vec![0.0; rows * cols];
        for (k, (u, v)) in u.iter().zip(&v).enumerate() {
            for (i, u) in u.iter().enumerate() {
                for (j, v) in v.iter().enumerate() {
                    out[i * cols + j] += 0.5f64.powi(k as i32) * u * v;
                }
            }
        }
        out.into_iter().map(|value| value as f32).collect()
    }

    #[test]
    fn both_methods_find_the_largest_singular_values() {
        for (rows, cols) in [(23, 17), (17, 23), (9, 9), (1, 5), (5, 1)] {
            let data = falling(rows, cols);
            let matrix = Rows { data: &data, cols };
            let count = 4.min(rows).min(cols);
            for (found, limit) in [(exact(matrix, count), 1e-6), (rounds(matrix, count, 12, Stream::new(1, "x")), 1e-5)]
            {
                for k in 0..count {
                    let value = 0.5f64.powi(k as i32);
                    assert!((found.s[k] - value).abs() < limit, "{rows}x{cols} {k}: {} != {value}", found.s[k]);
                    let image = matrix.times(&found.v[k]);
                    let off = image.iter().zip(&found.u[k]).map(|(image, u)| (image - found.s[k] * u).abs());
                    assert!(off.fold(0.0, f64::max) < limit, "{rows}x{cols} {k}: M v = s u");
                    assert!((dot(&found.u[k], &found.u[k]) - 1.0).abs() < 1e-9);
                }
            }
        }
    }

    #[test]
    fn eigenvectors_diagonalize_a_matrix_with_equal_and_zero_eigenvalues() {
        let n = 6;
        let mut matrix = vec![vec![0.0; n]; n];
        for (i, row) in matrix.iter_mut().enumerate() {
            row[i] = if i < 3 { 2.0 } else { 0.0 };
        }
        (matrix[0][5], matrix[5][0]) = (1.0, 1.0);
        let (values, vectors) = symmetric_eigen(matrix.clone());
        for (value, vector) in values.iter().zip(&vectors) {
            let image: Vec<f64> = matrix.iter().map(|row| dot(row, vector)).collect();
            assert!(image.iter().zip(vector).all(|(image, x)| (image - value * x).abs() < 1e-12));
        }
    }
}
