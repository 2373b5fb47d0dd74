//! The lanes of [`Simd`] on x86-64: two registers of AVX2, or one of AVX-512.
//!
//! An intrinsic is unsafe for two reasons. The processor must have the instruction, which the caller of a [`Simd`] method
//! answers for; and where it takes a pointer, the memory must be there.
use super::{Number, PairLanes, Simd, TileLanes, turn};
#[allow(clippy::wildcard_imports, reason = "forty intrinsics")]
use std::arch::x86_64::*;

/// The 16 lanes of [`Simd`] in two 8-lane registers of AVX2.
#[derive(Debug, Clone, Copy)]
pub struct Avx2;

/// Both halves of a vector.
#[derive(Debug, Clone, Copy)]
pub struct Pair(__m256, __m256);

/// An intrinsic on the lower halves, then on the upper ones.
macro_rules! both {
    ($f:ident $(, $arg:ident)*) => {
        // SAFETY: registers only; the caller has AVX2 and FMA, as `Simd` asks.
        unsafe { Pair($f($($arg.0),*), $f($($arg.1),*)) }
    };
}

/// An intrinsic on whole registers.
macro_rules! one {
    ($f:ident $(, $arg:ident)*) => {
        // SAFETY: registers only; the caller has AVX-512F, as `Simd` asks.
        unsafe { $f($($arg),*) }
    };
}

impl Simd for Avx2 {
    type V = Pair;
    const ROWS: usize = 6;
    const PANELS: usize = 1;
    #[inline(always)]
    unsafe fn splat(value: f32) -> Pair {
        // SAFETY: registers only; the caller has AVX2.
        unsafe { Pair(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Pair {
        // SAFETY: the caller has AVX2, and `from` holds 16 floats, at any alignment.
        unsafe { Pair(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Pair) {
        // SAFETY: the caller has AVX2, and `to` has room for 16 floats, at any alignment.
        unsafe {
            _mm256_storeu_ps(to, value.0);
            _mm256_storeu_ps(to.add(8), value.1);
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Pair {
        // SAFETY: the caller has AVX2, and `from` holds 16 numbers: 8 at each place.
        unsafe { Pair(eight_bf16(from), eight_bf16(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Pair {
        // SAFETY: the caller has AVX2, and `from` holds 16 bytes, read as 8 and 8.
        unsafe {
            let (low, high) = (_mm_loadl_epi64(from.cast()), _mm_loadl_epi64(from.add(8).cast()));
            let (low, high) = (_mm256_cvtepi8_epi32(low), _mm256_cvtepi8_epi32(high));
            Pair(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> Pair {
        /// One half: eight lanes.
        ///
        /// # Safety
        /// AVX2; `from` holds 8 bytes.
        #[inline(always)]
        unsafe fn half(from: *const u8) -> __m256 {
            // SAFETY: the caller has AVX2, and `from` holds the 8 bytes that are read, at any alignment.
            unsafe {
                let wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
                let size = _mm256_and_si256(wide, _mm256_set1_epi32(0x7F));
                // Exponent and fraction, where float32 has its own: 120 more is the difference of the biases.
                let normal = _mm256_add_epi32(_mm256_slli_epi32::<20>(size), _mm256_set1_epi32(120 << 23));
                let small = _mm256_mul_ps(_mm256_cvtepi32_ps(size), _mm256_set1_ps(1.0 / 512.0));
                let is_normal = _mm256_castsi256_ps(_mm256_cmpgt_epi32(size, _mm256_set1_epi32(7)));
                let value = _mm256_blendv_ps(small, _mm256_castsi256_ps(normal), is_normal);
                let is_nan = _mm256_castsi256_ps(_mm256_cmpeq_epi32(size, _mm256_set1_epi32(0x7F)));
                let value = _mm256_blendv_ps(value, _mm256_set1_ps(f32::NAN), is_nan);
                let sign = _mm256_slli_epi32::<24>(_mm256_xor_si256(wide, size));
                _mm256_or_ps(value, _mm256_castsi256_ps(sign))
            }
        }
        // SAFETY: the caller has AVX2, and `from` holds 16 bytes: 8 at each place.
        unsafe { Pair(half(from), half(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn lookup(table: Pair, codes: *const u8) -> Pair {
        /// One half: eight lanes.
        ///
        /// # Safety
        /// AVX2; `codes` holds 4 bytes.
        #[inline(always)]
        unsafe fn half(table: Pair, codes: *const u8) -> __m256 {
            // SAFETY: the caller has AVX2, and `codes` holds the 4 bytes that are read, at any alignment.
            unsafe {
                // A byte in each 64 bits; its high half into the lower 32, its low half into the upper.
                let wide = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(codes.cast::<i32>().read_unaligned()));
                let index = _mm256_or_si256(_mm256_srli_epi64::<4>(wide), _mm256_slli_epi64::<32>(wide));
                chosen(table, index)
            }
        }
        // SAFETY: the caller has AVX2, and `codes` holds 8 bytes: 4 at each place.
        unsafe { Pair(half(table, codes), half(table, codes.add(4))) }
    }
    #[inline(always)]
    unsafe fn lookup_pairs(table: Pair, bytes: *const u8) -> [Pair; 2] {
        // SAFETY: the caller has AVX2, and `bytes` holds 16 bytes: 8 at each place.
        unsafe {
            let wide = |at: usize| _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes.add(at).cast()));
            let (low, high) = (wide(0), wide(8));
            let first = Pair(chosen(table, _mm256_srli_epi32::<4>(low)), chosen(table, _mm256_srli_epi32::<4>(high)));
            [first, Pair(chosen(table, low), chosen(table, high))]
        }
    }
    #[inline(always)]
    unsafe fn lookup_words(table: Pair, words: *const u32, at: usize) -> Pair {
        // SAFETY: the caller has AVX2, and `words` holds 16 of them: 8 at each place.
        unsafe {
            let half = |first: usize| {
                let words = _mm256_loadu_si256(words.add(first).cast());
                chosen(table, _mm256_srlv_epi32(words, _mm256_set1_epi32(4 * at as i32)))
            };
            Pair(half(0), half(8))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, value: Pair) {
        /// One half: eight lanes.
        ///
        /// # Safety
        /// AVX2; `to` has room for 8 numbers of 16 bits.
        #[inline(always)]
        unsafe fn half(to: *mut u16, value: __m256) {
            // SAFETY: the caller has AVX2, and `to` has room for the 16 bytes that are written, at any alignment.
            unsafe {
                let bits = _mm256_castps_si256(value);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
                let rounded = _mm256_srli_epi32::<16>(rounded);
                let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
                let words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
                let packed = _mm256_packus_epi32(words, words);
                let low = _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b1000>(packed));
                _mm_storeu_si128(to.cast(), low);
            }
        }
        // SAFETY: the caller has AVX2, and `to` has room for 16 numbers: 8 at each place.
        unsafe {
            half(to, value.0);
            half(to.add(8), value.1);
        }
    }
    #[inline(always)]
    unsafe fn fma(a: Pair, b: Pair, c: Pair) -> Pair {
        both!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    unsafe fn add(a: Pair, b: Pair) -> Pair {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: Pair, b: Pair) -> Pair {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: Pair, b: Pair) -> Pair {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    unsafe fn div(a: Pair, b: Pair) -> Pair {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    unsafe fn max(a: Pair, b: Pair) -> Pair {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    unsafe fn min(a: Pair, b: Pair) -> Pair {
        both!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    unsafe fn if_gt(a: Pair, b: Pair, x: Pair, y: Pair) -> Pair {
        // SAFETY: registers only; the caller has AVX2.
        unsafe {
            Pair(
                _mm256_blendv_ps(y.0, x.0, _mm256_cmp_ps::<_CMP_GT_OQ>(a.0, b.0)),
                _mm256_blendv_ps(y.1, x.1, _mm256_cmp_ps::<_CMP_GT_OQ>(a.1, b.1)),
            )
        }
    }
    #[inline(always)]
    unsafe fn round(a: Pair) -> Pair {
        const MODE: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // SAFETY: registers only; the caller has AVX2.
        unsafe { Pair(_mm256_round_ps::<MODE>(a.0), _mm256_round_ps::<MODE>(a.1)) }
    }
    #[inline(always)]
    unsafe fn exp2i(n: Pair) -> Pair {
        /// One half: eight lanes.
        ///
        /// # Safety
        /// AVX2.
        #[inline(always)]
        unsafe fn half(n: __m256) -> __m256 {
            // SAFETY: registers only; the caller has AVX2.
            unsafe {
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
            }
        }
        // SAFETY: registers only; the caller has AVX2.
        unsafe { Pair(half(n.0), half(n.1)) }
    }
    #[inline(always)]
    unsafe fn turn(rows: &[Pair; 16]) -> [Pair; 16] {
        // SAFETY: registers only; the caller has AVX2.
        unsafe { turn::avx2(&rows.map(|row| row.0), &rows.map(|row| row.1)).map(|[low, high]| Pair(low, high)) }
    }
    #[inline(always)]
    unsafe fn turn_eight<T: Number>(from: *const T, step: usize) -> [Pair; 8] {
        // SAFETY: the caller has AVX2; the rows hold 8 numbers each.
        unsafe {
            // Loops, as closures do not have the features.
            let mut halves = [[_mm256_setzero_ps(); 8]; 2];
            for (half, columns) in halves.iter_mut().enumerate() {
                let mut rows = *columns;
                for (row, lanes) in rows.iter_mut().enumerate() {
                    *lanes = T::load_eight(from.add((8 * half + row) * step));
                }
                *columns = turn::eight(rows);
            }
            let mut columns = [Self::splat(0.0); 8];
            for (at, column) in columns.iter_mut().enumerate() {
                *column = Pair(halves[0][at], halves[1][at]);
            }
            columns
        }
    }
}

/// `table[index]` for eight indices, of which the lowest four bits count.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn chosen(table: Pair, index: __m256i) -> __m256 {
    // SAFETY: registers only; the caller has AVX2.
    unsafe {
        // A permutation sees three bits of an index; the fourth chooses between the table's halves.
        let (low, high) = (_mm256_permutevar8x32_ps(table.0, index), _mm256_permutevar8x32_ps(table.1, index));
        _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)))
    }
}

/// Eight bfloat16 numbers, given by their bits.
///
/// # Safety
/// AVX2; `from` holds 8 numbers of 16 bits.
#[inline(always)]
pub(super) unsafe fn eight_bf16(from: *const u16) -> __m256 {
    // SAFETY: the caller has AVX2, and `from` holds the 16 bytes that are read, at any alignment.
    unsafe {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    }
}

/// The 16 lanes of [`Simd`] in one register of AVX-512.
#[derive(Debug, Clone, Copy)]
pub struct Avx512;

impl Simd for Avx512 {
    type V = __m512;
    const ROWS: usize = 12;
    const PANELS: usize = 2;
    #[inline(always)]
    unsafe fn turn_eight<T: Number>(from: *const T, step: usize) -> [__m512; 8] {
        // SAFETY: the caller has AVX-512F, which includes AVX2; the rows hold 8 numbers each.
        unsafe {
            let mut rows = [_mm512_setzero_ps(); 8];
            for (index, lanes) in rows.iter_mut().enumerate() {
                let from = from.add((index + index / 4 * 4) * step);
                let low = _mm512_castps_pd(_mm512_castps256_ps512(T::load_eight(from)));
                let high = _mm256_castps_pd(T::load_eight(from.add(4 * step)));
                *lanes = _mm512_castpd_ps(_mm512_insertf64x4::<1>(low, high));
            }
            turn::sixteen_by_eight(rows)
        }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        // SAFETY: registers only; the caller has AVX-512F.
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: the caller has AVX-512F, and `from` holds 16 floats, at any alignment.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m512) {
        // SAFETY: the caller has AVX-512F, and `to` has room for 16 floats, at any alignment.
        unsafe { _mm512_storeu_ps(to, value) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        // SAFETY: the caller has AVX-512F, and `from` holds the 32 bytes that are read, at any alignment.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> __m512 {
        // SAFETY: the caller has AVX-512F, and `from` holds the 16 bytes that are read, at any alignment.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> __m512 {
        // SAFETY: the caller has AVX-512F, and `from` holds the 16 bytes that are read, at any alignment.
        unsafe {
            let wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            let size = _mm512_and_si512(wide, _mm512_set1_epi32(0x7F));
            // As for AVX2.
            let normal = _mm512_add_epi32(_mm512_slli_epi32::<20>(size), _mm512_set1_epi32(120 << 23));
            let small = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(size), _mm512_set1_ps(1.0 / 512.0)));
            let is_normal = _mm512_cmpgt_epi32_mask(size, _mm512_set1_epi32(7));
            let value = _mm512_mask_blend_epi32(is_normal, small, normal);
            let is_nan = _mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(0x7F));
            let value = _mm512_mask_blend_epi32(is_nan, value, _mm512_set1_epi32(0x7FC0_0000));
            let sign = _mm512_slli_epi32::<24>(_mm512_xor_si512(wide, size));
            _mm512_castsi512_ps(_mm512_or_si512(value, sign))
        }
    }
    #[inline(always)]
    unsafe fn lookup(table: __m512, codes: *const u8) -> __m512 {
        // SAFETY: the caller has AVX-512F, and `codes` holds the 8 bytes that are read, at any alignment.
        unsafe {
            // As for AVX2; a permutation sees four bits of an index.
            let wide = _mm512_cvtepu8_epi64(_mm_loadl_epi64(codes.cast()));
            let index = _mm512_or_si512(_mm512_srli_epi64::<4>(wide), _mm512_slli_epi64::<32>(wide));
            _mm512_permutexvar_ps(index, table)
        }
    }
    #[inline(always)]
    unsafe fn lookup_pairs(table: __m512, bytes: *const u8) -> [__m512; 2] {
        // SAFETY: the caller has AVX-512F, and `bytes` holds the 16 bytes that are read, at any alignment.
        unsafe {
            let wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.cast()));
            // A permutation sees four bits of an index.
            [_mm512_permutexvar_ps(_mm512_srli_epi32::<4>(wide), table), _mm512_permutexvar_ps(wide, table)]
        }
    }
    #[inline(always)]
    unsafe fn lookup_words(table: __m512, words: *const u32, at: usize) -> __m512 {
        // SAFETY: the caller has AVX-512F, and `words` holds the 64 bytes that are read, at any alignment.
        unsafe {
            let words = _mm512_loadu_si512(words.cast());
            // A permutation sees four bits of an index.
            _mm512_permutexvar_ps(_mm512_srlv_epi32(words, _mm512_set1_epi32(4 * at as i32)), table)
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, value: __m512) {
        // SAFETY: the caller has AVX-512F, and `to` has room for the 32 bytes that are written, at any alignment.
        unsafe {
            let bits = _mm512_castps_si512(value);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
            let rounded = _mm512_srli_epi32::<16>(rounded);
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
            let words = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7FC0));
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(words));
        }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        one!(_mm512_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        one!(_mm512_add_ps, a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        one!(_mm512_sub_ps, a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        one!(_mm512_mul_ps, a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        one!(_mm512_div_ps, a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        one!(_mm512_max_ps, a, b)
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        one!(_mm512_min_ps, a, b)
    }
    #[inline(always)]
    unsafe fn if_gt(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        // SAFETY: registers only; the caller has AVX-512F.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), y, x) }
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        // SAFETY: registers only; the caller has AVX-512F.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT }>(a) }
    }
    #[inline(always)]
    unsafe fn exp2i(n: __m512) -> __m512 {
        // SAFETY: registers only; the caller has AVX-512F.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }
    #[inline(always)]
    unsafe fn turn(rows: &[__m512; 16]) -> [__m512; 16] {
        // SAFETY: registers only; the caller has AVX-512F.
        unsafe { turn::avx512(rows) }
    }
}

/// One register of sixteen pairs.
#[derive(Debug, Clone, Copy)]
pub struct Avx512Bf16;

/// The same bits as pairs.
#[inline(always)]
const fn bits(lanes: __m512) -> __m512bh {
    // SAFETY: both are 64 bytes, and every pattern of bits is a value of either.
    unsafe { std::mem::transmute(lanes) }
}

/// Where the numbers of pairs come from, of two vectors of 16 end to end: one of the first, one of the second, in turn.
const ORDER: [u16; 32] = {
    let mut order = [0; 32];
    let mut lane = 0;
    while lane < 16 {
        order[2 * lane] = lane as u16;
        order[2 * lane + 1] = lane as u16 + 16;
        lane += 1;
    }
    order
};

impl TileLanes for Avx512Bf16 {
    type Sum = __m512;
    const TILE_ROWS: usize = 12;
    const TILE_PANELS: usize = 2;
    #[inline(always)]
    unsafe fn broadcast(value: f32) -> __m512 {
        // SAFETY: registers only; the caller has AVX-512F.
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn read(from: *const f32) -> __m512 {
        // SAFETY: the caller has AVX-512F, and `from` holds 16 floats, at any alignment.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn write(to: *mut f32, value: __m512) {
        // SAFETY: the caller has AVX-512F, and `to` has room for 16 floats, at any alignment.
        unsafe { _mm512_storeu_ps(to, value) }
    }
    #[inline(always)]
    unsafe fn add_product(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: registers only; the caller has AVX512_BF16.
        unsafe { _mm512_dpbf16_ps(c, bits(a), bits(b)) }
    }
}

impl PairLanes for Avx512Bf16 {
    type Wide = Avx512;
    #[inline(always)]
    unsafe fn pair(low: __m512, high: __m512) -> __m512 {
        // SAFETY: registers only; the caller has AVX-512BW and AVX512_BF16.
        unsafe {
            // `low` in the lower half of the register, `high` in the upper.
            let halves: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
            let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves))
        }
    }
    #[inline(always)]
    unsafe fn unpair(pairs: __m512) -> [__m512; 2] {
        // SAFETY: registers only; the caller has AVX-512F.
        unsafe {
            let bits = _mm512_castps_si512(pairs);
            let upper = _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed());
            let [low, high] = [_mm512_slli_epi32::<16>(bits), _mm512_and_si512(bits, upper)];
            [_mm512_castsi512_ps(low), _mm512_castsi512_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn pair_words(low: *const u16, high: *const u16) -> __m512 {
        // SAFETY: the caller has AVX-512F, and 16 numbers at each place, at any alignment.
        unsafe {
            let low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(low.cast()));
            let high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(high.cast()));
            _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32::<16>(high)))
        }
    }
    #[inline(always)]
    unsafe fn pair_word_halves(low: *const u16, high: *const u16) -> [__m512; 2] {
        // SAFETY: the caller has 32 numbers at each place, and this processor's features; the loads need no alignment.
        unsafe {
            let (low, high) = (_mm512_loadu_si512(low.cast()), _mm512_loadu_si512(high.cast()));
            let halves = [_mm512_unpacklo_epi16(low, high), _mm512_unpackhi_epi16(low, high)];
            halves.map(|half| _mm512_castsi512_ps(half))
        }
    }
    #[inline(always)]
    unsafe fn pair_neighbours(from: *const f32) -> __m512 {
        // SAFETY: the caller has AVX512_BF16, and `from` holds 32 floats, at any alignment.
        unsafe {
            let pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from.add(16)), _mm512_loadu_ps(from));
            std::mem::transmute::<__m512bh, __m512>(pairs)
        }
    }
}
