//! Quantizes a matrix on the CPU. The bytes are those that bitsandbytes makes on a CPU with AVX2.
use crate::activation::LANES;
use crate::fp8::{self, LARGEST};
use crate::par::{self, Shared};
use crate::quant::map;
use crate::quant::rule::{NESTED_BLOCK, Rule};
use crate::simd::{Simd, dispatch};
use rayon::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// Quantizes whole blocks of `block` numbers each. Returns whether all numbers are finite.
///
/// # Safety
/// The CPU has the features of `S`; `from` holds `blocks * block` numbers, `codes` half as many bytes, `scales` one number a block;
/// `block` is a multiple of 16.
#[inline(always)]
unsafe fn code_blocks<S: Simd>(
    rule: &Rule,
    from: *const f32,
    block: usize,
    blocks: usize,
    codes: *mut u8,
    scales: *mut f32,
) -> bool {
    let mut finite = true;
    // SAFETY: `index` is below `blocks` and `at` a multiple of 16 below `block`: vectors within `from`, of which the
    // codes are the 8 bytes from half their number on, and the scale number `index`. `lanes` holds 16 floats.
    unsafe {
        let (one, zero) = (S::splat(1.0), S::splat(0.0));
        for index in 0..blocks {
            let from = from.add(index * block);
            let (mut most, mut sum) = (zero, zero);
            for at in (0..block).step_by(LANES) {
                let x = S::load(from.add(at));
                most = S::max(most, S::max(x, S::sub(zero, x)));
                sum = S::add(sum, S::mul(x, zero));
            }
            let mut lanes = [0.0f32; LANES];
            S::store(lanes.as_mut_ptr(), sum);
            finite &= lanes.iter().all(|&lane| lane == 0.0);
            S::store(lanes.as_mut_ptr(), most);
            let most = lanes.iter().fold(0.0f32, |most, &lane| most.max(lane));
            *scales.add(index) = most;
            let inverse = S::splat(1.0 / most.max(1e-38));
            for at in (0..block).step_by(LANES) {
                let x = S::mul(S::load(from.add(at)), inverse);
                let mut above = zero;
                for &bound in &rule.bounds {
                    above = S::add(above, S::if_gt(x, S::splat(bound), one, zero));
                }
                S::store(lanes.as_mut_ptr(), above);
                let codes = codes.add(usize::midpoint(index * block, at));
                for (pair, lanes) in lanes.chunks_exact(2).enumerate() {
                    let [high, low] = [lanes[0], lanes[1]].map(|count| rule.order[count as usize & 15]);
                    *codes.add(pair) = high << 4 | low;
                }
            }
        }
    }
    finite
}

dispatch! { fn code_blocks_at = code_blocks(rule: &Rule, from: *const f32, block: usize, blocks: usize, codes: *mut u8, scales: *mut f32) -> bool; }

/// Quantizes `values` to 4 bits each, in blocks of `block` numbers, a multiple of 16. `codes` has a byte for each two
/// values, `scales` a number for each block. Returns whether all values are finite.
pub(in crate::quant) fn four(rule: &Rule, values: &[f32], block: usize, codes: &mut [u8], scales: &mut [f32]) -> bool {
    let (len, whole, per_task) = (values.len(), values.len() / block, (1 << 16) / block);
    assert_eq!((codes.len(), scales.len()), (len.div_ceil(2), len.div_ceil(block)), "room for codes and scales");
    let (codes_at, scales_at) = (Shared(codes.as_mut_ptr()), Shared(scales.as_mut_ptr()));
    let odd = AtomicBool::new(false);
    par::run(whole.div_ceil(per_task), |task| {
        let first = task * per_task;
        let blocks = per_task.min(whole - first);
        // SAFETY: `first + blocks <= whole`, so that the blocks lie within `values`, `codes` and `scales`, which live
        // until all tasks are done; `block` is one of BLOCKS, multiples of 16. No other task has these blocks.
        let finite = unsafe {
            let from = values.as_ptr().add(first * block);
            let codes = codes_at.get().add(first * block / 2);
            code_blocks_at(rule, from, block, blocks, codes, scales_at.get().add(first))
        };
        odd.fetch_or(!finite, Ordering::Relaxed);
    });
    let rest = &values[whole * block..];
    if let Some(scale) = scales.get_mut(whole) {
        // Like bitsandbytes, this divides by the scale in the last, partial block, and multiplies by its reciprocal in
        // whole blocks.
        *scale = rest.iter().fold(0.0f32, |most, value| most.max(value.abs())).max(1e-38);
        for (at, value) in rest.iter().enumerate() {
            let (at, code) = (whole * block + at, rule.code(value / *scale));
            codes[at / 2] |= if at.is_multiple_of(2) { code << 4 } else { code };
        }
        if !len.is_multiple_of(2) {
            codes[len / 2] |= rule.code(0.0);
        }
    }
    !odd.into_inner() && rest.iter().all(|value| value.is_finite())
}

/// Double quantization: quantizes the scales to one byte each, after `offset` is subtracted.
pub(in crate::quant) fn nested(scales: &[f32], offset: f32, codes: &mut [u8], absmax: &mut [f32]) {
    for ((scales, codes), most) in scales.chunks(NESTED_BLOCK).zip(codes.chunks_mut(NESTED_BLOCK)).zip(absmax) {
        *most = scales.iter().fold(0.0f32, |most, scale| most.max((scale - offset).abs()));
        if *most > 0.0 {
            let inverse = 1.0 / *most;
            for (code, scale) in codes.iter_mut().zip(scales) {
                *code = map::code((scale - offset) * inverse);
            }
        }
    }
}

/// The sum as `torch.sum` computes it in one thread on a CPU with AVX2: pairs of partial sums in four levels, each of
/// four vectors of eight, then across the vector. Another order would give other last bits, and the result is stored as
/// the offset of the scales.
pub(in crate::quant) fn torch_sum(values: &[f32]) -> f32 {
    const WIDTH: usize = 8;
    if values.len() < WIDTH {
        return row_sum::<1>(values)[0];
    }
    let vectors = values.len() / WIDTH * WIDTH;
    let sums = row_sum::<WIDTH>(&values[..vectors]);
    let rest = values[vectors..].iter().fold(0.0f32, |sum, value| sum + value);
    sums.iter().fold(rest, |sum, value| sum + value)
}

/// `row_sum` of PyTorch's `SumKernel.cpp`, for vectors of `WIDTH` numbers.
fn row_sum<const WIDTH: usize>(values: &[f32]) -> [f32; WIDTH] {
    const ROWS: usize = 4;
    const LEVELS: usize = 4;
    let vector = |at: usize| -> [f32; WIDTH] { std::array::from_fn(|lane| values[at * WIDTH + lane]) };
    let add = |sum: &mut [f32; WIDTH], more: [f32; WIDTH]| {
        sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    };
    let count = values.len() / WIDTH;
    let size = count / ROWS;
    let ceil_log2 = size.max(1).next_power_of_two().trailing_zeros() as usize;
    let power = (ceil_log2 / LEVELS).max(4);
    let step = 1usize << power;
    let mut levels = [[[0.0f32; WIDTH]; ROWS]; LEVELS];
    let mut at = 0;
    while at + step <= size {
        for _ in 0..step {
            for (row, sum) in levels[0].iter_mut().enumerate() {
                add(sum, vector(at * ROWS + row));
            }
            at += 1;
        }
        for level in 1..LEVELS {
            let (below, here) = levels.split_at_mut(level);
            for (sum, more) in here[0].iter_mut().zip(&mut below[level - 1]) {
                add(sum, std::mem::replace(more, [0.0; WIDTH]));
            }
            if at & ((step - 1) << (level * power)) != 0 {
                break;
            }
        }
    }
    for at in at..size {
        for (row, sum) in levels[0].iter_mut().enumerate() {
            add(sum, vector(at * ROWS + row));
        }
    }
    let [mut rows, above @ ..] = levels;
    for level in above {
        for (sum, more) in rows.iter_mut().zip(level) {
            add(sum, more);
        }
    }
    for at in size * ROWS..count {
        add(&mut rows[0], vector(at));
    }
    let [mut sum, others @ ..] = rows;
    for row in others {
        add(&mut sum, row);
    }
    sum
}

/// Quantizes rows of `width` numbers to int8. Returns whether all numbers are finite.
pub(in crate::quant) fn eight(values: &[f32], width: usize, codes: &mut [u8], scales: &mut [f32]) -> bool {
    if values.par_iter().any(|value| !value.is_finite()) {
        return false;
    }
    let rows = values.par_chunks(width).zip(codes.par_chunks_mut(width)).zip(scales);
    rows.for_each(|((row, codes), scale)| {
        let most = row.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let factor = 127.0 / most;
        for (code, value) in codes.iter_mut().zip(row) {
            // In a row of zeros, 0 times infinity is NaN, which becomes the code 0.
            *code = ((value * factor).round_ties_even() as i8).cast_unsigned();
        }
        *scale = most;
    });
    true
}

/// Quantizes rows of `width` numbers to FP8. Returns whether all numbers are finite.
pub(in crate::quant) fn fp8(values: &[f32], width: usize, codes: &mut [u8], scales: &mut [f32]) -> bool {
    if values.par_iter().any(|value| !value.is_finite()) {
        return false;
    }
    let rows = values.par_chunks(width).zip(codes.par_chunks_mut(width)).zip(scales);
    rows.for_each(|((row, codes), scale)| {
        *scale = row.iter().fold(0.0f32, |most, value| most.max(value.abs())) / LARGEST;
        for (code, value) in codes.iter_mut().zip(row) {
            // A row of zeros, or of numbers that no scale can hold, has the scale 0.
            *code = if *scale > 0.0 { fp8::code(value / *scale) } else { 0 };
        }
    });
    true
}
