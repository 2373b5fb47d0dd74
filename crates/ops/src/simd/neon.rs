//! The lanes of [`Simd`] on ARM's 64-bit processors: four registers of NEON, which each of them has.
//!
//! An intrinsic is unsafe only where it takes a pointer: the memory must be there.
use super::Simd;
#[allow(clippy::wildcard_imports, reason = "forty intrinsics")]
use std::arch::aarch64::*;

/// The 16 lanes of [`Simd`] in four 4-lane registers of NEON.
#[derive(Debug, Clone, Copy)]
pub struct Neon;

/// The quarters of a vector.
type Quarters = [float32x4_t; 4];

/// `f` of each quarter of the operands.
#[inline(always)]
fn each<const N: usize>(operands: [Quarters; N], f: impl Fn([float32x4_t; N]) -> float32x4_t) -> Quarters {
    std::array::from_fn(|quarter| f(operands.map(|operand| operand[quarter])))
}

/// Four rows of four lanes turned into their columns.
#[inline(always)]
fn four(rows: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: registers only.
    unsafe {
        let (even01, odd01) = (vtrn1q_f32(rows[0], rows[1]), vtrn2q_f32(rows[0], rows[1]));
        let (even23, odd23) = (vtrn1q_f32(rows[2], rows[3]), vtrn2q_f32(rows[2], rows[3]));
        let pairs = |a, b| (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
        let ((e01, e23), (o01, o23)) = (pairs(even01, even23), pairs(odd01, odd23));
        [vtrn1q_f64(e01, e23), vtrn1q_f64(o01, o23), vtrn2q_f64(e01, e23), vtrn2q_f64(o01, o23)]
            .map(|lanes| vreinterpretq_f32_f64(lanes))
    }
}

/// `table[code]` for sixteen codes below 16.
#[inline(always)]
fn chosen(table: Quarters, codes: uint8x16_t) -> Quarters {
    /// For each quarter, which code each of its bytes belongs to.
    const OF: [[u8; 16]; 4] = {
        let mut of = [[0; 16]; 4];
        let mut at = 0;
        while at < 64 {
            of[at / 16][at % 16] = (at / 4) as u8;
            at += 1;
        }
        of
    };
    const BYTE: [u8; 16] = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3];
    // SAFETY: the arrays hold 16 bytes.
    unsafe {
        let bytes = table.map(|lanes| vreinterpretq_u8_f32(lanes));
        let table = uint8x16x4_t(bytes[0], bytes[1], bytes[2], bytes[3]);
        std::array::from_fn(|quarter| {
            // The four bytes of number `code` are at `4 code` and behind it.
            let code = vqtbl1q_u8(codes, vld1q_u8(OF[quarter].as_ptr()));
            let place = vaddq_u8(vshlq_n_u8::<2>(code), vld1q_u8(BYTE.as_ptr()));
            vreinterpretq_f32_u8(vqtbl4q_u8(table, place))
        })
    }
}

impl Simd for Neon {
    type V = Quarters;
    // 24 sums, a panel of four registers and one for a row's number, of 32 registers.
    const ROWS: usize = 6;
    const PANELS: usize = 1;
    #[inline(always)]
    unsafe fn splat(value: f32) -> Quarters {
        // SAFETY: registers only.
        [unsafe { vdupq_n_f32(value) }; 4]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Quarters {
        // SAFETY: `from` holds 16 floats, at any alignment.
        std::array::from_fn(|quarter| unsafe { vld1q_f32(from.add(4 * quarter)) })
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Quarters) {
        for (quarter, lanes) in value.into_iter().enumerate() {
            // SAFETY: `to` has room for 16 floats, at any alignment.
            unsafe { vst1q_f32(to.add(4 * quarter), lanes) };
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Quarters {
        std::array::from_fn(|quarter| {
            // SAFETY: `from` holds 16 numbers of 16 bits, at any alignment.
            unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.add(4 * quarter)))) }
        })
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Quarters {
        // SAFETY: `from` holds 16 bytes, at any alignment.
        unsafe {
            let bytes = vld1q_s8(from.cast());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes)));
            [vget_low_s16(low), vget_high_s16(low), vget_low_s16(high), vget_high_s16(high)]
                .map(|words| vcvtq_f32_s32(vmovl_s16(words)))
        }
    }
    #[inline(always)]
    unsafe fn lookup(table: Quarters, codes: *const u8) -> Quarters {
        // SAFETY: `codes` holds 8 bytes, at any alignment.
        unsafe {
            let pairs = vld1_u8(codes);
            let (first, second) = (vshr_n_u8::<4>(pairs), vand_u8(pairs, vdup_n_u8(15)));
            chosen(table, vcombine_u8(vzip1_u8(first, second), vzip2_u8(first, second)))
        }
    }
    #[inline(always)]
    unsafe fn lookup_pairs(table: Quarters, bytes: *const u8) -> [Quarters; 2] {
        // SAFETY: `bytes` holds 16 bytes, at any alignment.
        unsafe {
            let pairs = vld1q_u8(bytes);
            [chosen(table, vshrq_n_u8::<4>(pairs)), chosen(table, vandq_u8(pairs, vdupq_n_u8(15)))]
        }
    }
    #[inline(always)]
    unsafe fn lookup_words(table: Quarters, words: *const u32, at: usize) -> Quarters {
        // SAFETY: `words` holds 16 of them, at any alignment.
        unsafe {
            // Shifted to the right.
            let shift = vdupq_n_s32(-4 * (at as i32));
            let halves = |first: usize| vmovn_u32(vshlq_u32(vld1q_u32(words.add(first)), shift));
            let bytes = |first: usize| vmovn_u16(vcombine_u16(halves(first), halves(first + 4)));
            chosen(table, vandq_u8(vcombine_u8(bytes(0), bytes(8)), vdupq_n_u8(15)))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, value: Quarters) {
        for (quarter, lanes) in value.into_iter().enumerate() {
            // SAFETY: `to` has room for 16 numbers of 16 bits, at any alignment.
            unsafe {
                let bits = vreinterpretq_u32_f32(lanes);
                let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
                let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
                let number = vceqq_f32(lanes, lanes);
                let words = vbslq_u32(number, vshrq_n_u32::<16>(rounded), vdupq_n_u32(0x7FC0));
                vst1_u16(to.add(4 * quarter), vmovn_u32(words));
            }
        }
    }
    #[inline(always)]
    unsafe fn fma(a: Quarters, b: Quarters, c: Quarters) -> Quarters {
        // SAFETY: registers only.
        each([a, b, c], |[a, b, c]| unsafe { vfmaq_f32(c, a, b) })
    }
    #[inline(always)]
    unsafe fn add(a: Quarters, b: Quarters) -> Quarters {
        // SAFETY: registers only.
        each([a, b], |[a, b]| unsafe { vaddq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn sub(a: Quarters, b: Quarters) -> Quarters {
        // SAFETY: registers only.
        each([a, b], |[a, b]| unsafe { vsubq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn mul(a: Quarters, b: Quarters) -> Quarters {
        // SAFETY: registers only.
        each([a, b], |[a, b]| unsafe { vmulq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn div(a: Quarters, b: Quarters) -> Quarters {
        // SAFETY: registers only.
        each([a, b], |[a, b]| unsafe { vdivq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn max(a: Quarters, b: Quarters) -> Quarters {
        // Not `vmaxq_f32`, which gives NaN where `a` is one.
        // SAFETY: registers only.
        each([a, b], |[a, b]| unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) })
    }
    #[inline(always)]
    unsafe fn min(a: Quarters, b: Quarters) -> Quarters {
        // SAFETY: registers only.
        each([a, b], |[a, b]| unsafe { vbslq_f32(vcltq_f32(a, b), a, b) })
    }
    #[inline(always)]
    unsafe fn if_gt(a: Quarters, b: Quarters, x: Quarters, y: Quarters) -> Quarters {
        // SAFETY: registers only.
        each([a, b, x, y], |[a, b, x, y]| unsafe { vbslq_f32(vcgtq_f32(a, b), x, y) })
    }
    #[inline(always)]
    unsafe fn round(a: Quarters) -> Quarters {
        // SAFETY: registers only.
        each([a], |[a]| unsafe { vrndnq_f32(a) })
    }
    #[inline(always)]
    unsafe fn exp2i(n: Quarters) -> Quarters {
        each([n], |[n]| {
            // SAFETY: registers only.
            unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)))) }
        })
    }
    #[inline(always)]
    unsafe fn turn(rows: &[Quarters; 16]) -> [Quarters; 16] {
        let mut out = *rows;
        for row in 0..4 {
            for quarter in 0..4 {
                let block = four(std::array::from_fn(|lane| rows[4 * row + lane][quarter]));
                for (column, lanes) in block.into_iter().enumerate() {
                    out[4 * quarter + column][row] = lanes;
                }
            }
        }
        out
    }
}
