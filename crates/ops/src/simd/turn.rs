//! Sixteen rows of sixteen lanes turned into their columns, in registers.

/// Plain arrays.
#[inline(always)]
pub(super) fn portable(rows: &[[f32; 16]; 16]) -> [[f32; 16]; 16] {
    std::array::from_fn(|column| std::array::from_fn(|row| rows[row][column]))
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{avx2, avx512, eight};

#[cfg(target_arch = "x86_64")]
mod x86 {
    #[allow(clippy::wildcard_imports, reason = "a dozen intrinsics")]
    use std::arch::x86_64::*;

    /// Eight rows of eight.
    ///
    /// # Safety
    /// AVX2.
    #[inline(always)]
    pub(in super::super) unsafe fn eight(rows: [__m256; 8]) -> [__m256; 8] {
        // SAFETY: registers only; the caller has AVX2.
        unsafe {
            let zero = _mm256_setzero_ps();
            // Of four rows, column `c` in the lower half of the register and column `4 + c` in the upper.
            let mut fours = [[zero; 4]; 2];
            for (columns, rows) in fours.iter_mut().zip(rows.chunks_exact(4)) {
                let (low01, high01) = (_mm256_unpacklo_ps(rows[0], rows[1]), _mm256_unpackhi_ps(rows[0], rows[1]));
                let (low23, high23) = (_mm256_unpacklo_ps(rows[2], rows[3]), _mm256_unpackhi_ps(rows[2], rows[3]));
                *columns = [
                    _mm256_shuffle_ps::<0x44>(low01, low23),
                    _mm256_shuffle_ps::<0xEE>(low01, low23),
                    _mm256_shuffle_ps::<0x44>(high01, high23),
                    _mm256_shuffle_ps::<0xEE>(high01, high23),
                ];
            }
            let mut out = [zero; 8];
            for column in 0..4 {
                out[column] = _mm256_permute2f128_ps::<0x20>(fours[0][column], fours[1][column]);
                out[4 + column] = _mm256_permute2f128_ps::<0x31>(fours[0][column], fours[1][column]);
            }
            out
        }
    }

    /// Rows and columns as their lower and upper eight lanes.
    ///
    /// # Safety
    /// AVX2.
    #[inline(always)]
    pub(in super::super) unsafe fn avx2(low: &[__m256; 16], high: &[__m256; 16]) -> [[__m256; 2]; 16] {
        // SAFETY: registers only; the caller has AVX2.
        unsafe {
            let zero = _mm256_setzero_ps();
            let mut out = [[zero; 2]; 16];
            for (columns, rows) in [(0, low), (8, high)] {
                for part in 0..2 {
                    let mut block = [zero; 8];
                    block.copy_from_slice(&rows[part * 8..part * 8 + 8]);
                    for (column, lanes) in eight(block).into_iter().enumerate() {
                        out[columns + column][part] = lanes;
                    }
                }
            }
            out
        }
    }

    /// One register a row.
    ///
    /// # Safety
    /// AVX-512F.
    #[inline(always)]
    pub(in super::super) unsafe fn avx512(rows: &[__m512; 16]) -> [__m512; 16] {
        // SAFETY: registers only; the caller has AVX-512F.
        unsafe {
            let zero = _mm512_setzero_ps();
            // Of four rows, column `4 l + c` in quarter `l` of the register.
            let mut fours = [[zero; 4]; 4];
            for (columns, rows) in fours.iter_mut().zip(rows.chunks_exact(4)) {
                let (low01, high01) = (_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[0], rows[1]));
                let (low23, high23) = (_mm512_unpacklo_ps(rows[2], rows[3]), _mm512_unpackhi_ps(rows[2], rows[3]));
                *columns = [
                    _mm512_shuffle_ps::<0x44>(low01, low23),
                    _mm512_shuffle_ps::<0xEE>(low01, low23),
                    _mm512_shuffle_ps::<0x44>(high01, high23),
                    _mm512_shuffle_ps::<0xEE>(high01, high23),
                ];
            }
            let mut out = [zero; 16];
            for column in 0..4 {
                let [a, b, c, d] = [fours[0][column], fours[1][column], fours[2][column], fours[3][column]];
                let (even_ab, odd_ab) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b));
                let (even_cd, odd_cd) = (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xDD>(c, d));
                out[column] = _mm512_shuffle_f32x4::<0x88>(even_ab, even_cd);
                out[4 + column] = _mm512_shuffle_f32x4::<0x88>(odd_ab, odd_cd);
                out[8 + column] = _mm512_shuffle_f32x4::<0xDD>(even_ab, even_cd);
                out[12 + column] = _mm512_shuffle_f32x4::<0xDD>(odd_ab, odd_cd);
            }
            out
        }
    }
}
