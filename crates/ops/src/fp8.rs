//! The 8-bit floating-point format E4M3 (NVIDIA's FP8, and `F8_E4M3` of safetensors): converts codes to numbers and
//! back. A code has a sign, four bits of exponent with bias 7, and three of fraction. There are no infinities; `0x7f`
//! and `0xff` are NaN. Micikevicius et al., "FP8 Formats for Deep Learning", 2022, <https://arxiv.org/abs/2209.05433>.
use std::sync::LazyLock;

/// The largest finite number of E4M3.
pub const LARGEST: f32 = 448.0;

/// The number that each code stands for: `VALUES[code]`.
pub static VALUES: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|code| value(code as u8)));

fn value(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * 2f32.powi(-9),
        _ => (8.0 + fraction) * 2f32.powi(exponent - 10),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// The code of the number that is nearest to `x`, ties to even. Beyond the largest number it is the code of the largest
/// (saturation); NaN stays NaN.
pub fn code(x: f32) -> u8 {
    let (sign, size) = (((x.to_bits() >> 24) & 0x80) as u8, x.abs());
    if size.is_nan() {
        return sign | 0x7f;
    }
    let size = size.min(LARGEST);
    // Below 2^-6, numbers are multiples of 2^-9. From there on, the fraction is rounded to three bits.
    let code = if size < 2f32.powi(-6) {
        (size * 512.0).round_ties_even() as u8
    } else {
        let bits = size.to_bits();
        let rounded = bits + 0x7ffff + (bits >> 20 & 1);
        ((rounded >> 20) - (120 << 3)) as u8
    };
    sign | code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_is_the_nearest_to_its_number_and_ties_go_to_even() {
        assert_eq!([VALUES[0x38], VALUES[0x7e], VALUES[1], VALUES[8]], [1.0, LARGEST, 2f32.powi(-9), 2f32.powi(-6)]);
        for (this, next) in (0..0x7eu8).map(|this| (this, this + 1)) {
            let (low, high) = (VALUES[usize::from(this)], VALUES[usize::from(next)]);
            assert_eq!((code(low), code(-low)), (this, this | 0x80));
            let middle = f32::midpoint(low, high);
            let even = if this.is_multiple_of(2) { this } else { next };
            assert_eq!(code(middle), even, "{middle}");
            assert_eq!(code(f32::from_bits(middle.to_bits() - 1)), this);
            assert_eq!(code(f32::from_bits(middle.to_bits() + 1)), next);
        }
        assert_eq!([code(1e9), code(f32::NEG_INFINITY), code(f32::NAN)], [0x7e, 0xfe, 0x7f]);
    }
}
