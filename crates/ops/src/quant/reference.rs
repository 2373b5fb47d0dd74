//! The definitions in f64, number by number.

/// `table[code] * scale[block]`: two codes a byte, the first in the high half, a scale for each `block` numbers.
pub(super) fn widen_four(codes: &[u8], table: &[f32; 16], scales: &[f32], block: usize, len: usize) -> Vec<f64> {
    let code = |at: usize| if at.is_multiple_of(2) { codes[at / 2] >> 4 } else { codes[at / 2] & 15 };
    (0..len).map(|at| f64::from(table[usize::from(code(at))]) * f64::from(scales[at / block])).collect()
}

/// `code * scale[row] / 127`, of rows of `width` numbers.
pub(super) fn widen_eight(codes: &[u8], scales: &[f32], width: usize) -> Vec<f64> {
    let number = |(at, code): (usize, &u8)| f64::from(code.cast_signed()) * f64::from(scales[at / width]) / 127.0;
    codes.iter().enumerate().map(number).collect()
}

/// `(-1)^sign 2^(exponent - 7) (1 + fraction / 8)`, or `2^-6 fraction / 8` where the exponent is 0, times the scale of its row.
pub(super) fn widen_fp8(codes: &[u8], scales: &[f32], width: usize) -> Vec<f64> {
    let number = |(at, &code): (usize, &u8)| {
        let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
        let size = if exponent == 0 { 2f64.powi(-6) * fraction } else { 2f64.powi(exponent - 7) * (1.0 + fraction) };
        f64::from(scales[at / width]) * if code >= 128 { -size } else { size }
    };
    codes.iter().enumerate().map(number).collect()
}

/// `(code - zero) * scale` of the tile, of codes that are numbers already: rows of `width`, tiles of `tile`; the tile of column c is
/// `groups[c]` where there are some.
pub(super) fn widen_tiles(
    codes: &[f64],
    width: usize,
    tile: [usize; 2],
    scales: &[f32],
    zeros: &[f64],
    groups: Option<&[u32]>,
) -> Vec<f64> {
    let across = width.div_ceil(tile[1]);
    let number = |(at, code): (usize, &f64)| {
        let (row, column) = (at / width, at % width);
        let beside = groups.map_or(column / tile[1], |groups| groups[column] as usize);
        let index = row / tile[0] * across + beside;
        (code - zeros[index]) * f64::from(scales[index])
    };
    codes.iter().enumerate().map(number).collect()
}

/// How far the nearest of the values `table * scale` is from a number.
pub(super) fn distance(value: f32, table: &[f32], scale: f32) -> f64 {
    let far = |at: &f32| (f64::from(*at) * f64::from(scale) - f64::from(value)).abs();
    table.iter().map(far).fold(f64::INFINITY, f64::min)
}
