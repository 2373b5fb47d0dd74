//! Vectors of 16 `f32` lanes over AVX-512, AVX2 + FMA, or plain arrays; the level is chosen at run time.
//!
//! A kernel is written once, generic over [`Simd`] and `#[inline(always)]`; `dispatch!`
//! makes an entry that calls it inside a function with the right `#[target_feature]`.
use std::sync::atomic::{AtomicU8, Ordering};

mod turn;

/// The instruction set that kernels run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Plain Rust arrays; the compiler uses what the target has (SSE2, NEON).
    Portable = 1,
    /// AVX2 with FMA.
    Avx2 = 2,
    /// AVX-512F.
    Avx512 = 3,
}

impl Level {
    /// The name that `--simd` takes and reports print.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// The level that `code` stands for in [`LEVEL`].
    const fn from_code(code: u8) -> Self {
        match code {
            3 => Self::Avx512,
            2 => Self::Avx2,
            _ => Self::Portable,
        }
    }
}

static LEVEL: AtomicU8 = AtomicU8::new(0);

/// The best level of this processor.
pub fn detect() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f") {
            return Level::Avx512;
        }
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
            return Level::Avx2;
        }
    }
    Level::Portable
}

/// The level in use: the best one, unless [`force`] lowered it.
pub fn level() -> Level {
    match LEVEL.load(Ordering::Relaxed) {
        0 => {
            let best = detect();
            LEVEL.store(best as u8, Ordering::Relaxed);
            best
        }
        code => Level::from_code(code),
    }
}

/// Uses `wanted` from now on, or the best level of this processor if that is lower; returns what is in use.
/// For `tuning.backend`, `bench --simd` and tests: results differ between levels by rounding only.
pub fn force(wanted: Level) -> Level {
    let used = wanted.min(detect());
    LEVEL.store(used as u8, Ordering::Relaxed);
    used
}

/// Asks for the cache line at `place`, which need not be valid.
#[inline(always)]
pub fn prefetch(place: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; every processor of this architecture has it, and no address faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// Sixteen lanes of `f32`.
///
/// # Safety
/// Each method needs the processor features of its implementation; `load` and `store` touch 16 floats at any alignment.
#[allow(clippy::missing_safety_doc, reason = "stated once for the trait")]
pub trait Simd: Copy + 'static {
    /// The vector.
    type V: Copy;
    /// Rows of the largest GEMM tile.
    const ROWS: usize;
    /// Panels of the largest GEMM tile.
    const PANELS: usize;
    /// All lanes `value`.
    unsafe fn splat(value: f32) -> Self::V;
    /// Reads 16 floats.
    unsafe fn load(from: *const f32) -> Self::V;
    /// Writes 16 floats.
    unsafe fn store(to: *mut f32, value: Self::V);
    /// Reads 16 bfloat16 numbers, given by their bits.
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    /// Reads 16 integers of 8 bits, signed, given by their bits.
    unsafe fn load_i8(from: *const u8) -> Self::V;
    /// `table[code]` for 16 codes of 4 bits, two a byte, the first in the high half.
    unsafe fn lookup(table: Self::V, codes: *const u8) -> Self::V;
    /// Writes 16 bfloat16 numbers, rounded to the nearest, ties to even; NaN stays NaN.
    unsafe fn store_bf16(to: *mut u16, value: Self::V);
    /// `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a + b`.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// The larger, lane by lane; `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller, lane by lane; `b` where either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `if a > b { x } else { y }`, lane by lane.
    unsafe fn if_gt(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// The nearest integer, ties to even.
    unsafe fn round(a: Self::V) -> Self::V;
    /// `2^n` for integral lanes n in -126..=127.
    unsafe fn exp2i(n: Self::V) -> Self::V;
    /// The columns of 16 rows.
    unsafe fn turn(rows: &[Self::V; 16]) -> [Self::V; 16];

    /// `e^x` with a relative error of about 1e-7; 0 below -87.3, where the result would be subnormal.
    #[inline(always)]
    unsafe fn exp(x: Self::V) -> Self::V {
        // Cody-Waite reduction x = n ln2 + r, |r| <= ln2 / 2, and the Taylor polynomial of degree 7 in r.
        unsafe {
            let low = Self::splat(-87.3);
            // `x` as the second operand: NaN passes through.
            let clamped = Self::min(Self::splat(88.0), Self::max(low, x));
            let n = Self::round(Self::mul(clamped, Self::splat(std::f32::consts::LOG2_E)));
            let r = Self::fma(n, Self::splat(-0.693_359_4), clamped);
            let r = Self::fma(n, Self::splat(2.121_944_4e-4), r);
            let mut p = Self::splat(1.0 / 5040.0);
            p = Self::fma(p, r, Self::splat(1.0 / 720.0));
            p = Self::fma(p, r, Self::splat(1.0 / 120.0));
            p = Self::fma(p, r, Self::splat(1.0 / 24.0));
            p = Self::fma(p, r, Self::splat(1.0 / 6.0));
            p = Self::fma(p, r, Self::splat(0.5));
            p = Self::fma(p, r, Self::splat(1.0));
            p = Self::fma(p, r, Self::splat(1.0));
            Self::if_gt(low, x, Self::splat(0.0), Self::mul(p, Self::exp2i(n)))
        }
    }

    /// `tanh x` with a relative error of about 2e-7.
    #[inline(always)]
    unsafe fn tanh(x: Self::V) -> Self::V {
        // Small arguments by the Taylor polynomial, where the quotient below would lose digits; the rest by exp.
        unsafe {
            let square = Self::mul(x, x);
            let mut p = Self::splat(-1382.0 / 155_925.0);
            p = Self::fma(p, square, Self::splat(62.0 / 2835.0));
            p = Self::fma(p, square, Self::splat(-17.0 / 315.0));
            p = Self::fma(p, square, Self::splat(2.0 / 15.0));
            p = Self::fma(p, square, Self::splat(-1.0 / 3.0));
            let small = Self::fma(Self::mul(p, square), x, x);
            let e = Self::exp(Self::min(Self::splat(40.0), Self::mul(Self::splat(2.0), x)));
            let one = Self::splat(1.0);
            let large = Self::div(Self::sub(e, one), Self::add(e, one));
            Self::if_gt(Self::splat(0.35 * 0.35), square, small, large)
        }
    }

    /// `1 / (1 + e^-x)`.
    #[inline(always)]
    unsafe fn sigmoid(x: Self::V) -> Self::V {
        unsafe {
            let one = Self::splat(1.0);
            Self::div(one, Self::add(one, Self::exp(Self::sub(Self::splat(0.0), x))))
        }
    }
}

/// Plain arrays.
#[derive(Debug, Clone, Copy)]
pub struct Portable;

macro_rules! lanes {
    ($lane:ident => $value:expr) => {{
        let mut out = [0.0f32; 16];
        for ($lane, slot) in out.iter_mut().enumerate() {
            *slot = $value;
        }
        out
    }};
}

impl Simd for Portable {
    type V = [f32; 16];
    const ROWS: usize = 4;
    const PANELS: usize = 1;
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::V {
        [value; 16]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { from.cast::<[f32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::V) {
        unsafe { to.cast::<[f32; 16]>().write_unaligned(value) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::V {
        let bits = unsafe { from.cast::<[u16; 16]>().read_unaligned() };
        lanes!(i => f32::from_bits(u32::from(bits[i]) << 16))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::V {
        let bytes = unsafe { from.cast::<[i8; 16]>().read_unaligned() };
        lanes!(i => f32::from(bytes[i]))
    }
    #[inline(always)]
    unsafe fn lookup(table: Self::V, codes: *const u8) -> Self::V {
        let pairs = unsafe { codes.cast::<[u8; 8]>().read_unaligned() };
        lanes!(i => table[usize::from(if i % 2 == 0 { pairs[i / 2] >> 4 } else { pairs[i / 2] & 15 })])
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, value: Self::V) {
        let mut bits = [0u16; 16];
        for (slot, value) in bits.iter_mut().zip(value) {
            *slot = half::bf16::from_f32(value).to_bits();
        }
        unsafe { to.cast::<[u16; 16]>().write_unaligned(bits) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanes!(i => a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn if_gt(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        lanes!(i => if a[i] > b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        // Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits, for |a| < 2^22.
        const MAGIC: f32 = 12_582_912.0;
        lanes!(i => (a[i] + MAGIC) - MAGIC)
    }
    #[inline(always)]
    unsafe fn exp2i(n: Self::V) -> Self::V {
        lanes!(i => f32::from_bits(((n[i] as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn turn(rows: &[Self::V; 16]) -> [Self::V; 16] {
        turn::portable(rows)
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Simd, turn};
    #[allow(clippy::wildcard_imports, reason = "forty intrinsics")]
    use std::arch::x86_64::*;

    /// Two 8-lane registers.
    #[derive(Debug, Clone, Copy)]
    pub struct Avx2;

    /// Both halves of a vector.
    #[derive(Debug, Clone, Copy)]
    pub struct Pair(__m256, __m256);

    macro_rules! both {
        ($f:ident $(, $arg:ident)*) => { unsafe { Pair($f($($arg.0),*), $f($($arg.1),*)) } };
    }

    impl Simd for Avx2 {
        type V = Pair;
        const ROWS: usize = 6;
        const PANELS: usize = 1;
        #[inline(always)]
        unsafe fn splat(value: f32) -> Pair {
            unsafe { Pair(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Pair {
            unsafe { Pair(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
        }
        #[inline(always)]
        unsafe fn store(to: *mut f32, value: Pair) {
            unsafe {
                _mm256_storeu_ps(to, value.0);
                _mm256_storeu_ps(to.add(8), value.1);
            }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> Pair {
            #[inline(always)]
            unsafe fn half(from: *const u16) -> __m256 {
                unsafe {
                    let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
                }
            }
            unsafe { Pair(half(from), half(from.add(8))) }
        }
        #[inline(always)]
        unsafe fn load_i8(from: *const u8) -> Pair {
            unsafe {
                let (low, high) = (_mm_loadl_epi64(from.cast()), _mm_loadl_epi64(from.add(8).cast()));
                let (low, high) = (_mm256_cvtepi8_epi32(low), _mm256_cvtepi8_epi32(high));
                Pair(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
            }
        }
        #[inline(always)]
        unsafe fn lookup(table: Pair, codes: *const u8) -> Pair {
            #[inline(always)]
            unsafe fn half(table: Pair, codes: *const u8) -> __m256 {
                unsafe {
                    // A byte in each 64 bits; its high half into the lower 32, its low half into the upper.
                    let wide = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(codes.cast::<i32>().read_unaligned()));
                    let index = _mm256_or_si256(_mm256_srli_epi64::<4>(wide), _mm256_slli_epi64::<32>(wide));
                    // A permutation sees three bits of an index; the fourth chooses between the table's halves.
                    let (low, high) =
                        (_mm256_permutevar8x32_ps(table.0, index), _mm256_permutevar8x32_ps(table.1, index));
                    _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)))
                }
            }
            unsafe { Pair(half(table, codes), half(table, codes.add(4))) }
        }
        #[inline(always)]
        unsafe fn store_bf16(to: *mut u16, value: Pair) {
            #[inline(always)]
            unsafe fn half(to: *mut u16, value: __m256) {
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
            unsafe { Pair(_mm256_round_ps::<MODE>(a.0), _mm256_round_ps::<MODE>(a.1)) }
        }
        #[inline(always)]
        unsafe fn exp2i(n: Pair) -> Pair {
            #[inline(always)]
            unsafe fn half(n: __m256) -> __m256 {
                unsafe {
                    let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
                }
            }
            unsafe { Pair(half(n.0), half(n.1)) }
        }
        #[inline(always)]
        unsafe fn turn(rows: &[Pair; 16]) -> [Pair; 16] {
            unsafe { turn::avx2(&rows.map(|row| row.0), &rows.map(|row| row.1)).map(|[low, high]| Pair(low, high)) }
        }
    }

    /// One 16-lane register.
    #[derive(Debug, Clone, Copy)]
    pub struct Avx512;

    impl Simd for Avx512 {
        type V = __m512;
        const ROWS: usize = 12;
        const PANELS: usize = 2;
        #[inline(always)]
        unsafe fn splat(value: f32) -> __m512 {
            unsafe { _mm512_set1_ps(value) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> __m512 {
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(to: *mut f32, value: __m512) {
            unsafe { _mm512_storeu_ps(to, value) }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> __m512 {
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
        }
        #[inline(always)]
        unsafe fn load_i8(from: *const u8) -> __m512 {
            unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
        }
        #[inline(always)]
        unsafe fn lookup(table: __m512, codes: *const u8) -> __m512 {
            unsafe {
                // As for AVX2; a permutation sees four bits of an index.
                let wide = _mm512_cvtepu8_epi64(_mm_loadl_epi64(codes.cast()));
                let index = _mm512_or_si512(_mm512_srli_epi64::<4>(wide), _mm512_slli_epi64::<32>(wide));
                _mm512_permutexvar_ps(index, table)
            }
        }
        #[inline(always)]
        unsafe fn store_bf16(to: *mut u16, value: __m512) {
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
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn add(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sub(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_sub_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn mul(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn div(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_div_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn max(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_max_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn min(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_min_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn if_gt(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
            unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), y, x) }
        }
        #[inline(always)]
        unsafe fn round(a: __m512) -> __m512 {
            unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT }>(a) }
        }
        #[inline(always)]
        unsafe fn exp2i(n: __m512) -> __m512 {
            unsafe {
                let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
            }
        }
        #[inline(always)]
        unsafe fn turn(rows: &[__m512; 16]) -> [__m512; 16] {
            unsafe { turn::avx512(rows) }
        }
    }
}

/// Makes `fn name(args)`, which runs the generic kernel `kernel::<S>(args)` at the current [`level`].
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident = $kernel:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;) => {
        $(#[$meta])*
        $vis unsafe fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f")]
                unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
                    unsafe { $kernel::<$crate::simd::Avx512>($($arg),*) }
                }
                #[target_feature(enable = "avx2,fma")]
                unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
                    unsafe { $kernel::<$crate::simd::Avx2>($($arg),*) }
                }
                match $crate::simd::level() {
                    $crate::simd::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    $crate::simd::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::simd::Level::Portable => {}
                }
            }
            unsafe { $kernel::<$crate::simd::Portable>($($arg),*) }
        }
    };
}
pub(crate) use dispatch;

#[cfg(test)]
mod tests;
