//! Dequantizes a range of numbers of a quantized matrix, with vector instructions. Matrix products and everything else
//! use this kernel. A number has the same bits at every SIMD level, and wherever the range begins.
use crate::activation::LANES;
use crate::fp8;
use crate::quant::tiles::{Tiled, Zeros};
use crate::quant::{EIGHTH, Eight, Format, Four, Quantized};
use crate::simd::{Simd, dispatch};
use tunesmith_cpu_slice::CpuSlice as _;

/// Dequantizes `count` numbers of a 4-bit matrix, from index `at` on, to `to`.
///
/// # Safety
/// The CPU has the features of `S`; `at + count` is at most the matrix's length; `to` has room for `count` floats.
#[inline(always)]
unsafe fn four_run<S: Simd>(four: &Four, mut at: usize, mut to: *mut f32, mut count: usize) {
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

/// As [`four_run`], for a matrix in int8 or FP8 with a scale for each row.
///
/// # Safety
/// As for [`four_run`].
#[inline(always)]
unsafe fn eight_run<S: Simd>(eight: &Eight, mut at: usize, mut to: *mut f32, mut count: usize) {
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
                while done + LANES <= here {
                    S::store(to.add(done), S::mul(S::load_e4m3(codes.add(at + done)), factor));
                    done += LANES;
                }
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

/// The integers 0 to 15.
const CODES: [f32; 16] = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

/// As [`four_run`], for a matrix with a scale for each tile.
///
/// # Safety
/// As for [`four_run`].
#[inline(always)]
unsafe fn tiled_run<S: Simd>(tiled: &Tiled, mut at: usize, mut to: *mut f32, mut count: usize) {
    let (codes, scales): (*const u8, &[f32]) = (tiled.codes.as_ptr(), &tiled.scales);
    let groups = tiled.groups.as_ref().map(|groups| groups.view());
    let groups = groups.as_ref().map(|groups| groups.cpu_slice());
    let Tiled { width, tile: [high, wide], across, format, .. } = *tiled;
    let zero_of = |tile: usize| match &tiled.zeros {
        Zeros::All(zero) => f32::from(*zero),
        Zeros::Each(zeros) => f32::from(zeros[tile]),
    };
    let values = &*fp8::VALUES;
    // What is subtracted from a code of 8 bits: it is stored 128 less.
    let lower = if format == Format::Int8Groups { 128.0 } else { 0.0 };
    // SAFETY: `Tiled::of` has held the parts against each other: a byte for each number, or each two, a scale and a zero for each tile,
    // which are looked up with a check. `at + done` is below the length, and a whole vector is taken where 16 numbers of the tile's
    // row are left: 16 bytes, or 8 from a whole byte on, as `at + done` is even by then.
    unsafe {
        let one = |at: usize| match format {
            Format::Fp8Tiles(_) => values[usize::from(*codes.add(at))],
            Format::Int8Groups => f32::from((*codes.add(at)).cast_signed()),
            _ => {
                let pair = *codes.add(at / 2);
                f32::from(if at & 1 == 0 { pair >> 4 } else { pair & 15 })
            }
        };
        while count > 0 {
            let (row, column) = (at / width, at % width);
            let line = row / high * across;
            if let Some(groups) = groups {
                let here = count.min(width - column);
                for (done, &group) in groups[column..column + here].iter().enumerate() {
                    let tile = line + group as usize;
                    *to.add(done) = (one(at + done) - (zero_of(tile) - lower)) * scales[tile];
                }
                at += here;
                to = to.add(here);
                count -= here;
                continue;
            }
            let tile = line + column / wide;
            let here = count.min(wide - column % wide).min(width - column);
            let (scale, zero) = (scales[tile], zero_of(tile) - lower);
            let mut done = 0;
            match format {
                Format::Fp8Tiles(_) => {
                    let factor = S::splat(scale);
                    while done + LANES <= here {
                        S::store(to.add(done), S::mul(S::load_e4m3(codes.add(at + done)), factor));
                        done += LANES;
                    }
                    while done < here {
                        *to.add(done) = one(at + done) * scale;
                        done += 1;
                    }
                }
                Format::Int8Groups => {
                    let (factor, zero) = (S::splat(scale), S::splat(zero));
                    while done + LANES <= here {
                        let value = S::sub(S::load_i8(codes.add(at + done)), zero);
                        S::store(to.add(done), S::mul(value, factor));
                        done += LANES;
                    }
                }
                _ => {
                    if at & 1 == 1 {
                        *to = (one(at) - zero) * scale;
                        done = 1;
                    }
                    let (factor, table) = (S::splat(scale), S::sub(S::load(CODES.as_ptr()), S::splat(zero)));
                    while done + LANES <= here {
                        let value = S::lookup(table, codes.add(usize::midpoint(at, done)));
                        S::store(to.add(done), S::mul(value, factor));
                        done += LANES;
                    }
                }
            }
            while done < here {
                *to.add(done) = (one(at + done) - zero) * scale;
                done += 1;
            }
            at += here;
            to = to.add(here);
            count -= here;
        }
    }
}

/// As [`four_run`], for a quantized matrix of any format.
///
/// # Safety
/// As for [`four_run`].
#[inline(always)]
pub(crate) unsafe fn any_run<S: Simd>(matrix: &Quantized, at: usize, to: *mut f32, count: usize) {
    // SAFETY: all kinds ask what this function asks.
    unsafe {
        match matrix {
            Quantized::Four(four) => four_run::<S>(four, at, to, count),
            Quantized::Eight(eight) => eight_run::<S>(eight, at, to, count),
            Quantized::Tiled(tiled) => tiled_run::<S>(tiled, at, to, count),
        }
    }
}

dispatch! {
    /// Dequantizes `count` numbers of a matrix, from index `at` on, to `to`.
    pub(in crate) fn widen_run = any_run(matrix: &Quantized, at: usize, to: *mut f32, count: usize);
}
