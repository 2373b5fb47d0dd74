//! Transposes sixteen rows of sixteen lanes in registers.

/// Plain arrays.
#[inline(always)]
pub(super) fn portable(rows: &[[f32; 16]; 16]) -> [[f32; 16]; 16] {
    std::array::from_fn(|column| std::array::from_fn(|row| rows[row][column]))
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{avx2, avx512, eight, sixteen_by_eight};

/// Sixteen columns of sixteen bytes, end to end.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Bytes(pub [u8; 256]);

/// Writes the columns of sixteen rows of sixteen bytes; a row begins `step` bytes after the one before it.
///
/// # Safety
/// `from` reaches the rows.
#[inline(always)]
pub unsafe fn bytes(from: *const u8, step: usize, to: &mut Bytes) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as the caller says.
    unsafe {
        x86::bytes(from, step, to);
    }
    #[cfg(not(target_arch = "x86_64"))]
    for row in 0..16 {
        for column in 0..16 {
            // SAFETY: row `row` holds sixteen bytes.
            to.0[column * 16 + row] = unsafe { *from.add(row * step + column) };
        }
    }
}

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

    /// Each quarter of four rows, turned: column `c` of it is the quarter of register `c`.
    ///
    /// # Safety
    /// AVX-512F.
    #[inline(always)]
    unsafe fn quarters(rows: [__m512; 4]) -> [__m512; 4] {
        // SAFETY: registers only; the caller has AVX-512F.
        unsafe {
            let (low01, high01) = (_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[0], rows[1]));
            let (low23, high23) = (_mm512_unpacklo_ps(rows[2], rows[3]), _mm512_unpackhi_ps(rows[2], rows[3]));
            [
                _mm512_shuffle_ps::<0x44>(low01, low23),
                _mm512_shuffle_ps::<0xEE>(low01, low23),
                _mm512_shuffle_ps::<0x44>(high01, high23),
                _mm512_shuffle_ps::<0xEE>(high01, high23),
            ]
        }
    }

    /// Sixteen rows of eight: the lower halves are the rows 0 to 3 and 8 to 11, the upper ones those four further.
    ///
    /// # Safety
    /// AVX-512F.
    #[inline(always)]
    pub(in super::super) unsafe fn sixteen_by_eight(rows: [__m512; 8]) -> [__m512; 8] {
        // SAFETY: registers only; the caller has AVX-512F.
        unsafe {
            let zero = _mm512_setzero_ps();
            // Of eight rows, column `c` in the quarters 0 and 2 of the register and column `4 + c` in 1 and 3.
            let mut fours = [[zero; 4]; 2];
            for (columns, rows) in fours.iter_mut().zip(rows.chunks_exact(4)) {
                *columns = quarters([rows[0], rows[1], rows[2], rows[3]]);
            }
            let mut out = [zero; 8];
            for column in 0..4 {
                out[column] = _mm512_shuffle_f32x4::<0x88>(fours[0][column], fours[1][column]);
                out[4 + column] = _mm512_shuffle_f32x4::<0xDD>(fours[0][column], fours[1][column]);
            }
            out
        }
    }

    /// As [`bytes`](super::bytes).
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub(super) unsafe fn bytes(from: *const u8, step: usize, to: &mut super::Bytes) {
        // SAFETY: every processor of this architecture has SSE2; `from` reaches the bytes, at any alignment.
        unsafe {
            let mut rows = [_mm_setzero_si128(); 16];
            for (index, row) in rows.iter_mut().enumerate() {
                *row = _mm_loadu_si128(from.add(index * step).cast());
            }
            // A byte's place has four bits of its row and four of its column. Each round moves the row's highest bit behind the column's
            // lowest one, and after four of them rows and columns have changed places.
            for _ in 0..4 {
                let mut next = rows;
                for index in 0..8 {
                    next[2 * index] = _mm_unpacklo_epi8(rows[index], rows[index + 8]);
                    next[2 * index + 1] = _mm_unpackhi_epi8(rows[index], rows[index + 8]);
                }
                rows = next;
            }
            for (index, column) in rows.iter().enumerate() {
                _mm_storeu_si128(to.0.as_mut_ptr().add(index * 16).cast(), *column);
            }
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
                *columns = quarters([rows[0], rows[1], rows[2], rows[3]]);
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
