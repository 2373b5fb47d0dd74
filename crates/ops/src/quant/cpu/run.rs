//! A stretch of numbers of a quantized matrix, widened in vectors: the kernel that matrix products share with everybody else.
//! A number is the same to the bit at every level and wherever the stretch begins.
use crate::activation::LANES;
use crate::quant::{Eight, Format, Four, Quantized, fp8};
use crate::simd::{Simd, dispatch};

/// 1 / 127 as bitsandbytes writes it.
const EIGHTH: f32 = 7.874_016e-3;

/// Writes `count` numbers from `at` on to `to`.
///
/// # Safety
/// The features of `S`; `at + count` is at most the matrix's length; `to` has room for `count` floats.
#[inline(always)]
pub(crate) unsafe fn four_run<S: Simd>(four: &Four, mut at: usize, mut to: *mut f32, mut count: usize) {
    let block = 1usize << four.shift;
    let (codes, scales) = (four.codes.as_ptr(), four.scales.look());
    // SAFETY: `Four::new` has held the parts against each other: a byte for each two numbers, a scale for each block.
    // Code `at` is in byte `at / 2`, below the codes' length. A whole vector is taken where 16 numbers of the block are
    // left. They are the 8 bytes from there on, as `at + done` is even by then. A code is below 16, the table's length.
    unsafe {
        let table = S::load(four.table.as_ptr());
        while count > 0 {
            let scale = scales.at(at >> four.shift);
            let here = count.min(block - (at & (block - 1)));
            let one = |at: usize| {
                let pair = *codes.add(at / 2);
                let code = if at & 1 == 0 { pair >> 4 } else { pair & 15 };
                *four.table.get_unchecked(usize::from(code)) * scale
            };
            let mut done = 0;
            if at & 1 == 1 {
                *to = one(at);
                done = 1;
            }
            let factor = S::splat(scale);
            while done + LANES <= here {
                S::store(to.add(done), S::mul(S::lookup(table, codes.add(usize::midpoint(at, done))), factor));
                done += LANES;
            }
            while done < here {
                *to.add(done) = one(at + done);
                done += 1;
            }
            at += here;
            to = to.add(here);
            count -= here;
        }
    }
}

/// As [`four_run`], for 8 bits a number.
///
/// # Safety
/// As there.
#[inline(always)]
pub(crate) unsafe fn eight_run<S: Simd>(eight: &Eight, mut at: usize, mut to: *mut f32, mut count: usize) {
    // SAFETY: `Eight::new` has held the parts against each other: a byte for each number. A whole vector is taken where
    // 16 numbers of the row are left, single ones below `here`; scales are looked up with a check.
    unsafe {
        let (codes, scales): (_, &[f32]) = (eight.codes.as_ptr(), &eight.scales);
        let values = &*fp8::VALUES;
        while count > 0 {
            let scale = scales[at / eight.width];
            let here = count.min(eight.width - at % eight.width);
            let (factor, eighth) = (S::splat(scale), S::splat(EIGHTH));
            let mut done = 0;
            if eight.format == Format::Fp8 {
                while done < here {
                    *to.add(done) = values[usize::from(*codes.add(at + done))] * scale;
                    done += 1;
                }
            }
            while done + LANES <= here {
                let value = S::mul(S::load_i8(codes.add(at + done)), factor);
                S::store(to.add(done), S::mul(value, eighth));
                done += LANES;
            }
            while done < here {
                *to.add(done) = f32::from((*codes.add(at + done)).cast_signed()) * scale * EIGHTH;
                done += 1;
            }
            at += here;
            to = to.add(here);
            count -= here;
        }
    }
}

/// As [`four_run`], for either.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn any_run<S: Simd>(matrix: &Quantized, at: usize, to: *mut f32, count: usize) {
    // SAFETY: both kinds ask what this function asks.
    unsafe {
        match matrix {
            Quantized::Four(four) => four_run::<S>(four, at, to, count),
            Quantized::Eight(eight) => eight_run::<S>(eight, at, to, count),
        }
    }
}

dispatch! {
    /// Writes `count` numbers of a matrix from `at` on to `to`.
    pub(in crate) fn widen_run = any_run(matrix: &Quantized, at: usize, to: *mut f32, count: usize);
}
