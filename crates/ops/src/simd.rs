//! Vectors of 16 `f32` lanes over AVX-512, AVX2 + FMA, NEON, or plain arrays; the level is chosen at run time.
//!
//! A kernel is written once, generic over [`Simd`] and `#[inline(always)]`; `dispatch!`
//! makes an entry that calls it inside a function with the right `#[target_feature]`.
use std::cell::Cell;
use std::sync::atomic::{AtomicU8, Ordering};

pub(crate) mod amx;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pairs;
mod tile_lanes;
mod turn;
#[cfg(target_arch = "x86_64")]
mod x86;

/// The instruction set that kernels run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Plain Rust arrays; the compiler uses what the target has (SSE2).
    Portable = 1,
    /// NEON: four vectors of 4 floats. Each ARM processor of 64 bits has it.
    Neon = 2,
    /// AVX2 with FMA: two vectors of 8 floats.
    Avx2 = 3,
    /// AVX-512F: one vector of 16 floats.
    Avx512 = 4,
    /// As `Avx512`, and AMX: tiles of 16 rows of 32 bfloat16 numbers. Products of float32 matrices are those of `Avx512`.
    Amx = 5,
}

impl Level {
    /// The levels that a processor of this architecture may have, the best last.
    #[cfg(target_arch = "x86_64")]
    pub const ALL: &[Self] = &[Self::Portable, Self::Avx2, Self::Avx512, Self::Amx];
    /// The levels that a processor of this architecture may have, the best last.
    #[cfg(target_arch = "aarch64")]
    pub const ALL: &[Self] = &[Self::Portable, Self::Neon];
    /// The levels that a processor of this architecture may have, the best last.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub const ALL: &[Self] = &[Self::Portable];

    /// The name that `--simd` takes and reports print.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }

    /// The level of vectors that it has.
    #[must_use]
    pub const fn vectors(self) -> Self {
        match self {
            Self::Amx => Self::Avx512,
            other => other,
        }
    }

    /// The level that `code` stands for in [`LEVEL`].
    const fn from_code(code: u8) -> Self {
        match code {
            5 => Self::Amx,
            4 => Self::Avx512,
            3 => Self::Avx2,
            2 => Self::Neon,
            _ => Self::Portable,
        }
    }
}

static LEVEL: AtomicU8 = AtomicU8::new(0);

thread_local! {
    /// The code of the level that [`use_on_thread`] set for this thread; 0: none.
    static OF_THREAD: Cell<u8> = const { Cell::new(0) };
}

/// The best level of this processor.
pub fn detect() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        if amx::usable() {
            return Level::Amx;
        }
        if std::is_x86_feature_detected!("avx512f") {
            return Level::Avx512;
        }
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
            return Level::Avx2;
        }
    }
    if cfg!(target_arch = "aarch64") { Level::Neon } else { Level::Portable }
}

/// The level in use: the best one, unless [`force`] lowered it, or a test on its threads.
pub fn level() -> Level {
    match OF_THREAD.get() {
        0 => of_process(),
        code => Level::from_code(code),
    }
}

/// Whether products whose operands are rounded to bfloat16 are multiplied in AMX's tiles.
pub(crate) fn in_tiles() -> bool {
    level() == Level::Amx
}

fn of_process() -> Level {
    match LEVEL.load(Ordering::Relaxed) {
        0 => {
            let best = detect();
            LEVEL.store(best as u8, Ordering::Relaxed);
            best
        }
        code => Level::from_code(code),
    }
}

/// Uses `wanted` on the current thread from now on, or the best level of this processor if that is lower. For tests,
/// which run side by side in one process: another test's level would change a sum's last bits.
pub(crate) fn use_on_thread(wanted: Level) {
    OF_THREAD.set(wanted.min(detect()) as u8);
}

/// Uses `wanted` from now on, or the best level of this processor if that is lower; returns what is in use.
/// For `tuning.backend` and `bench --simd`: results differ between levels by rounding only.
pub fn force(wanted: Level) -> Level {
    let used = wanted.min(detect());
    LEVEL.store(used as u8, Ordering::Relaxed);
    used
}

/// Asks for the cache line at `place`, which need not be valid.
#[inline(always)]
pub fn prefetch(place: *const f32) {
    #[cfg(target_arch = "x86_64")]
    fetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// As [`prefetch`], into the second cache: for what is read much later.
#[inline(always)]
pub fn prefetch_far(place: *const f32) {
    #[cfg(target_arch = "x86_64")]
    fetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(place);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// Asks for a cache line with a hint of the processor's.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn fetch<const HINT: i32>(place: *const f32) {
    // SAFETY: every processor of this architecture has SSE, and a prefetch is a hint: no address faults, none is
    // accessed.
    unsafe { std::arch::x86_64::_mm_prefetch::<HINT>(place.cast()) }
}

/// A number as a matrix holds it.
pub trait Number: Copy {
    /// Eight of them, widened, in a register of AVX2.
    ///
    /// # Safety
    /// AVX2; `from` holds eight.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load_eight(from: *const Self) -> std::arch::x86_64::__m256;
    /// The value in single precision.
    fn wide(self) -> f32;
}

impl Number for f32 {
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_eight(from: *const Self) -> std::arch::x86_64::__m256 {
        // SAFETY: the caller has AVX2, and `from` holds 8 floats, at any alignment.
        unsafe { std::arch::x86_64::_mm256_loadu_ps(from) }
    }
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
}

/// The bits of a bfloat16.
impl Number for u16 {
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_eight(from: *const Self) -> std::arch::x86_64::__m256 {
        // SAFETY: the caller has AVX2, and `from` holds 8 numbers of 16 bits.
        unsafe { x86::eight_bf16(from) }
    }
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }
}

/// Sixteen lanes of `f32`.
///
/// # Safety
/// Every method may run only on a processor with the features of its implementation: AVX2 and FMA for `Avx2`, AVX-512F
/// for `Avx512`, none for [`Portable`]. A kernel generic over `Simd` hands this demand on to its caller, up to the
/// function that `dispatch!` makes, which has asked the processor. A pointer must lead to as much memory as the method
/// says; alignment does not matter.
#[allow(clippy::missing_safety_doc, reason = "stated once for the trait")]
pub trait Simd: Copy + 'static {
    /// 16 floats in registers.
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
    /// Reads 16 numbers of FP8 (E4M3), given by their bits.
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> Self::V {
        let values = &*crate::fp8::VALUES;
        let mut lanes = [0.0f32; 16];
        // SAFETY: the caller has the features of `Self`, and `from` holds 16 bytes.
        unsafe {
            for (at, lane) in lanes.iter_mut().enumerate() {
                *lane = values[usize::from(*from.add(at))];
            }
            Self::load(lanes.as_ptr())
        }
    }
    /// `table[code]` for 16 codes of 4 bits in 8 bytes, two a byte, the first in the high half.
    unsafe fn lookup(table: Self::V, codes: *const u8) -> Self::V;
    /// `table[code]` for the codes of 4 bits in the high halves of 16 bytes, and for those in their low halves.
    unsafe fn lookup_pairs(table: Self::V, bytes: *const u8) -> [Self::V; 2];
    /// `table[code]` for the codes of 4 bits from bit `4 at` on of 16 words; `at` is below 8.
    unsafe fn lookup_words(table: Self::V, words: *const u32, at: usize) -> Self::V;
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
    /// The columns of 16 rows of 8 numbers, widened; a row begins `step` numbers after the one before it.
    #[inline(always)]
    unsafe fn turn_eight<T: Number>(from: *const T, step: usize) -> [Self::V; 8] {
        // SAFETY: the caller has the features of `Self`; the rows hold 8 numbers each.
        unsafe {
            let mut columns = [Self::splat(0.0); 8];
            for (index, column) in columns.iter_mut().enumerate() {
                let mut lanes = [0.0f32; 16];
                for (row, lane) in lanes.iter_mut().enumerate() {
                    *lane = (*from.add(row * step + index)).wide();
                }
                *column = Self::load(lanes.as_ptr());
            }
            columns
        }
    }

    /// `e^x` with a relative error of about 1e-7; 0 below -87.3, where the result would be subnormal.
    #[inline(always)]
    unsafe fn exp(x: Self::V) -> Self::V {
        // Cody-Waite reduction x = n ln2 + r, |r| <= ln2 / 2, and the Taylor polynomial of degree 7 in r.
        // SAFETY: registers only; the caller has the features of `Self`.
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
        // SAFETY: registers only; the caller has the features of `Self`.
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
        // SAFETY: registers only; the caller has the features of `Self`.
        unsafe {
            let one = Self::splat(1.0);
            Self::div(one, Self::add(one, Self::exp(Self::sub(Self::splat(0.0), x))))
        }
    }
}

/// The 16 lanes of [`Simd`] in a plain array, on any processor.
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
        // SAFETY: `from` holds 16 floats, read at any alignment.
        unsafe { from.cast::<[f32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::V) {
        // SAFETY: `to` has room for 16 floats, written at any alignment.
        unsafe { to.cast::<[f32; 16]>().write_unaligned(value) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::V {
        // SAFETY: `from` holds 16 numbers of 16 bits, read at any alignment; each pattern of bits is a `u16`.
        let bits = unsafe { from.cast::<[u16; 16]>().read_unaligned() };
        lanes!(i => f32::from_bits(u32::from(bits[i]) << 16))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::V {
        // SAFETY: `from` holds 16 bytes; each pattern of bits is an `i8`.
        let bytes = unsafe { from.cast::<[i8; 16]>().read_unaligned() };
        lanes!(i => f32::from(bytes[i]))
    }
    #[inline(always)]
    unsafe fn lookup(table: Self::V, codes: *const u8) -> Self::V {
        // SAFETY: `codes` holds 8 bytes.
        let pairs = unsafe { codes.cast::<[u8; 8]>().read_unaligned() };
        lanes!(i => table[usize::from(if i % 2 == 0 { pairs[i / 2] >> 4 } else { pairs[i / 2] & 15 })])
    }
    #[inline(always)]
    unsafe fn lookup_pairs(table: Self::V, bytes: *const u8) -> [Self::V; 2] {
        // SAFETY: `bytes` holds 16 bytes.
        let pairs = unsafe { bytes.cast::<[u8; 16]>().read_unaligned() };
        [lanes!(i => table[usize::from(pairs[i] >> 4)]), lanes!(i => table[usize::from(pairs[i] & 15)])]
    }
    #[inline(always)]
    unsafe fn lookup_words(table: Self::V, words: *const u32, at: usize) -> Self::V {
        // SAFETY: `words` holds 16 of them.
        let words = unsafe { words.cast::<[u32; 16]>().read_unaligned() };
        lanes!(i => table[(words[i] >> (4 * at) & 15) as usize])
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, value: Self::V) {
        let mut bits = [0u16; 16];
        for (slot, value) in bits.iter_mut().zip(value) {
            *slot = half::bf16::from_f32(value).to_bits();
        }
        // SAFETY: `to` has room for 16 numbers of 16 bits, written at any alignment.
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

pub(crate) use pairs::{PairLanes, PortablePairs, dispatch_pairs, number_of_half};
pub use pairs::{PairLevel, pair_level};
pub use tile_lanes::TileLanes;
pub(crate) use turn::{Bytes as TurnedBytes, bytes as turn_bytes};

#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::Avx512Bf16;
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

/// Makes `fn name(args)`, which runs the generic kernel `kernel::<S>(args)` at the current [`level`].
///
/// The kernel and all that it calls are `#[inline(always)]`: they become part of a function that is compiled for the
/// features of `S`. The made function answers for those features. What the kernel asks of its arguments stays with the
/// caller.
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident = $kernel:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;) => {
        $(#[$meta])*
        #[doc = ""]
        #[doc = "# Safety"]
        #[doc = concat!("What `", stringify!($kernel), "` asks of its arguments; the features of `S` are there.")]
        $vis unsafe fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                /// # Safety
                /// AVX-512F, and what the kernel asks of its arguments.
                #[target_feature(enable = "avx512f")]
                unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: this function has the features of `Avx512`; the arguments are as the caller says.
                    unsafe { $kernel::<$crate::simd::Avx512>($($arg),*) }
                }
                /// # Safety
                /// AVX2 and FMA, and what the kernel asks of its arguments.
                #[target_feature(enable = "avx2,fma")]
                unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: this function has the features of `Avx2`; the arguments are as the caller says.
                    unsafe { $kernel::<$crate::simd::Avx2>($($arg),*) }
                }
                match $crate::simd::level() {
                    // SAFETY: `level` is never above `detect`, which found AVX-512F; the arguments are as the caller
                    // says.
                    $crate::simd::Level::Avx512 | $crate::simd::Level::Amx => return unsafe { avx512($($arg),*) },
                    // SAFETY: `level` is never above `detect`, which found AVX2 and FMA, or AVX-512F, which no
                    // processor has without them; the arguments are as the caller says.
                    $crate::simd::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::simd::Level::Portable | $crate::simd::Level::Neon => {}
                }
            }
            #[cfg(target_arch = "aarch64")]
            if $crate::simd::level() == $crate::simd::Level::Neon {
                // SAFETY: each processor of this architecture has NEON; the arguments are as the caller says.
                return unsafe { $kernel::<$crate::simd::Neon>($($arg),*) };
            }
            // SAFETY: `Portable` needs no features; the arguments are as the caller says.
            unsafe { $kernel::<$crate::simd::Portable>($($arg),*) }
        }
    };
}
pub(crate) use dispatch;

#[cfg(test)]
mod tests;
