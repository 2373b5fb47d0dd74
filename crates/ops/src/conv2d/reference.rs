//! The definition in f64, on rows.
use super::Steps;

/// `x [rows * columns, channels]`, `weight [out, channels, planes, side, side]`, `bias [out]`.
pub(super) fn forward(
    x: &[f64],
    [rows, columns]: [usize; 2],
    (weight, bias): (&[f64], &[f64]),
    [planes, side]: [usize; 2],
    steps: Steps,
) -> Vec<f64> {
    let channels = x.len() / (rows * columns);
    let [down, across] = steps.size([rows, columns], side);
    let mut out = Vec::new();
    for (row, column) in (0..down).flat_map(|row| (0..across).map(move |column| (row, column))) {
        for (m, bias) in bias.iter().enumerate() {
            let mut sum = *bias;
            for (i, j) in (0..side).flat_map(|i| (0..side).map(move |j| (i, j))) {
                let at =
                    [row * steps.stride + i, column * steps.stride + j].map(|at| at as i64 - steps.padding[0] as i64);
                let inside = (0..rows as i64).contains(&at[0]) && (0..columns as i64).contains(&at[1]);
                for k in 0..if inside { channels } else { 0 } {
                    let of = ((m * channels + k) * planes + planes - 1) * side * side + i * side + j;
                    sum += weight[of] * x[(at[0] as usize * columns + at[1] as usize) * channels + k];
                }
            }
            out.push(sum);
        }
    }
    out
}
