//! Vectors of pairs of bfloat16 numbers, for products whose operands are rounded to it and whose sums are float32.
use super::{Level, OF_THREAD, Portable, Simd, TileLanes, level};

/// How products of bfloat16 pairs are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PairLevel {
    /// Plain arrays: what tests hold the instruction against.
    Portable,
    /// By `vdpbf16ps`, an instruction of `AVX512_BF16`.
    Avx512Bf16,
}

/// How products of bfloat16 pairs are computed; none where no instruction does it faster than float32's. A test that asks for
/// the portable level on its threads gets plain arrays.
pub fn pair_level() -> Option<PairLevel> {
    if OF_THREAD.get() == Level::Portable as u8 {
        return Some(PairLevel::Portable);
    }
    (level() >= Level::Avx512 && has_avx512_bf16()).then_some(PairLevel::Avx512Bf16)
}

#[cfg(target_arch = "x86_64")]
fn has_avx512_bf16() -> bool {
    std::is_x86_feature_detected!("avx512bf16") && std::is_x86_feature_detected!("avx512bw")
}

#[cfg(not(target_arch = "x86_64"))]
const fn has_avx512_bf16() -> bool {
    false
}

/// Lanes of 32 bits that hold a pair of bfloat16 numbers each: `add_product` adds the products of both.
///
/// # Safety
/// Every method may run only on a processor with the features of its implementation: AVX-512F, AVX-512BW, and `AVX512_BF16`
/// for `Avx512Bf16`. A pointer must lead to as much memory as the method says; alignment does not matter.
#[allow(clippy::missing_safety_doc, reason = "stated once for the trait")]
pub trait PairLanes: TileLanes<Sum = <Self::Wide as Simd>::V> {
    /// The vectors of float32 beside them.
    type Wide: Simd;
    /// Rounds both to bfloat16, to the nearest, ties to even; `low` comes first in each pair. Subnormal numbers may become
    /// zero.
    unsafe fn pair(low: Self::Sum, high: Self::Sum) -> Self::Sum;
    /// Both numbers of each pair: those that come first, and the others.
    unsafe fn unpair(pairs: Self::Sum) -> [Self::Sum; 2];
    /// As [`PairLanes::pair`], in three vectors whose numbers add up to `low` and `high`: the rounded numbers, and twice what is still
    /// missing, rounded. That is exact, because float32 has 24 bits and bfloat16 eight; but subnormal numbers may be lost, and what is
    /// infinite becomes NaN.
    #[inline(always)]
    unsafe fn split_pair(low: Self::Sum, high: Self::Sum) -> [Self::Sum; 3] {
        // SAFETY: registers only; the caller has the features. A closure would not have them, and nothing would be inlined.
        unsafe {
            let first = Self::pair(low, high);
            let [near_low, near_high] = Self::unpair(first);
            let [low, high] = [Self::Wide::sub(low, near_low), Self::Wide::sub(high, near_high)];
            let second = Self::pair(low, high);
            let [near_low, near_high] = Self::unpair(second);
            let [low, high] = [Self::Wide::sub(low, near_low), Self::Wide::sub(high, near_high)];
            [first, second, Self::pair(low, high)]
        }
    }
    /// Sixteen bfloat16 numbers from either place, given by their bits; `low` comes first in each pair.
    unsafe fn pair_words(low: *const u16, high: *const u16) -> Self::Sum;
    /// Thirty-two bfloat16 numbers from either place, given by their bits; `low` comes first in each pair. Lane `i` of vector `half`
    /// has number [`number_of_half`].
    unsafe fn pair_word_halves(low: *const u16, high: *const u16) -> [Self::Sum; 2];
    /// Rounds 32 floats; neighbours are a pair.
    unsafe fn pair_neighbours(from: *const f32) -> Self::Sum;
}

/// Which of 32 numbers a lane of a vector of [`PairLanes::pair_word_halves`] has: fours of them lie in the first vector and in the second
/// in turn, as the processor interleaves words.
pub(crate) const fn number_of_half(half: usize, lane: usize) -> usize {
    lane / 4 * 8 + half * 4 + lane % 4
}

/// The pairs of [`PairLanes`] in plain arrays, on any processor.
#[derive(Debug, Clone, Copy)]
pub struct PortablePairs;

/// The numbers of a pair.
fn wide(pair: f32) -> [f32; 2] {
    [f32::from_bits(pair.to_bits() << 16), f32::from_bits(pair.to_bits() & 0xFFFF_0000)]
}

/// Rounds two numbers and makes them a pair.
fn narrow(low: f32, high: f32) -> f32 {
    let bits = |value| u32::from(half::bf16::from_f32(value).to_bits());
    f32::from_bits(bits(low) | bits(high) << 16)
}

impl TileLanes for PortablePairs {
    type Sum = [f32; 16];
    const TILE_ROWS: usize = 4;
    const TILE_PANELS: usize = 1;
    #[inline(always)]
    unsafe fn broadcast(value: f32) -> Self::Sum {
        [value; 16]
    }
    #[inline(always)]
    unsafe fn read(from: *const f32) -> Self::Sum {
        // SAFETY: as the caller says.
        unsafe { Portable::load(from) }
    }
    #[inline(always)]
    unsafe fn write(to: *mut f32, value: Self::Sum) {
        // SAFETY: as the caller says.
        unsafe { Portable::store(to, value) }
    }
    #[inline(always)]
    unsafe fn add_product(a: Self::Sum, b: Self::Sum, c: Self::Sum) -> Self::Sum {
        std::array::from_fn(|lane| {
            let ([a_low, a_high], [b_low, b_high]) = (wide(a[lane]), wide(b[lane]));
            a_low.mul_add(b_low, a_high.mul_add(b_high, c[lane]))
        })
    }
}

impl PairLanes for PortablePairs {
    type Wide = Portable;
    #[inline(always)]
    unsafe fn pair(low: Self::Sum, high: Self::Sum) -> Self::Sum {
        std::array::from_fn(|lane| narrow(low[lane], high[lane]))
    }
    #[inline(always)]
    unsafe fn unpair(pairs: Self::Sum) -> [Self::Sum; 2] {
        std::array::from_fn(|at| pairs.map(|pair| wide(pair)[at]))
    }
    #[inline(always)]
    unsafe fn pair_words(low: *const u16, high: *const u16) -> Self::Sum {
        // SAFETY: the caller has 16 numbers at each place, read at any alignment.
        let [low, high] = [low, high].map(|words| unsafe { words.cast::<[u16; 16]>().read_unaligned() });
        std::array::from_fn(|lane| f32::from_bits(u32::from(low[lane]) | u32::from(high[lane]) << 16))
    }
    #[inline(always)]
    unsafe fn pair_word_halves(low: *const u16, high: *const u16) -> [Self::Sum; 2] {
        // SAFETY: the caller has 32 numbers at each place, read at any alignment.
        let [low, high] = [low, high].map(|words| unsafe { words.cast::<[u16; 32]>().read_unaligned() });
        let pair = |at: usize| f32::from_bits(u32::from(low[at]) | u32::from(high[at]) << 16);
        std::array::from_fn(|half| std::array::from_fn(|lane| pair(number_of_half(half, lane))))
    }
    #[inline(always)]
    unsafe fn pair_neighbours(from: *const f32) -> Self::Sum {
        // SAFETY: the caller has 32 floats there, read at any alignment.
        let numbers = unsafe { from.cast::<[f32; 32]>().read_unaligned() };
        std::array::from_fn(|lane| narrow(numbers[2 * lane], numbers[2 * lane + 1]))
    }
}

/// Makes `fn name(args)`, which runs the generic kernel `kernel::<P>(args)` at the current [`pair_level`]; see `dispatch!`.
macro_rules! dispatch_pairs {
    ($vis:vis fn $name:ident = $kernel:ident($($arg:ident: $ty:ty),* $(,)?);) => {
        #[doc = ""]
        #[doc = "# Safety"]
        #[doc = concat!("What `", stringify!($kernel), "` asks of its arguments; the features of `P` are there.")]
        $vis unsafe fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                /// # Safety
                /// AVX-512F, AVX-512BW, `AVX512_BF16`, and what the kernel asks of its arguments.
                #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
                unsafe fn avx512_bf16($($arg: $ty),*) {
                    // SAFETY: this function has the features of `Avx512Bf16`; the arguments are as the caller says.
                    unsafe { $kernel::<$crate::simd::Avx512Bf16>($($arg),*) }
                }
                if $crate::simd::pair_level() == Some($crate::simd::PairLevel::Avx512Bf16) {
                    // SAFETY: `pair_level` has found these features; the arguments are as the caller says.
                    return unsafe { avx512_bf16($($arg),*) };
                }
            }
            // SAFETY: `PortablePairs` needs no features; the arguments are as the caller says.
            unsafe { $kernel::<$crate::simd::PortablePairs>($($arg),*) }
        }
    };
}
pub(crate) use dispatch_pairs;
