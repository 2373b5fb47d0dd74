//! Coding a matrix, to the byte as bitsandbytes does it on a CPU with AVX2.
use super::{Eight, Format, Four, Nested, Quantized, Scales, map};
use crate::activation::LANES;
use crate::par::{self, Shared};
use crate::simd::{Simd, dispatch};
use rayon::prelude::*;
use tunesmith_base::error::{Error, Result};

/// Numbers that share a scale, unless a file says otherwise.
pub const BLOCK: usize = 64;
/// Scales that share a factor.
pub const NESTED_BLOCK: usize = 256;

/// The values of NF4 (Dettmers et al., 2023, appendix E).
#[allow(clippy::excessive_precision, reason = "as published")]
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_800_998_687_7,
    -0.525_073_051_452_636_7,
    -0.394_917_488_098_144_53,
    -0.284_441_381_692_886_35,
    -0.184_773_430_228_233_34,
    -0.091_050_036_251_544_95,
    0.0,
    0.079_580_299_556_255_34,
    0.160_930_201_411_247_25,
    0.246_112_301_945_686_34,
    0.337_915_241_718_292_24,
    0.440_709_829_330_444_34,
    0.562_617_003_917_694_1,
    0.722_956_836_223_602_3,
    1.0,
];

/// The values of FP4 by code.
pub const FP4: [f32; 16] = [
    0.0,
    0.0625 / 12.0,
    8.0 / 12.0,
    1.0,
    4.0 / 12.0,
    6.0 / 12.0,
    2.0 / 12.0,
    3.0 / 12.0,
    0.0,
    -0.0625 / 12.0,
    -8.0 / 12.0,
    -1.0,
    -4.0 / 12.0,
    -6.0 / 12.0,
    -2.0 / 12.0,
    -3.0 / 12.0,
];

/// The codes of FP4 by rising value. The two zeros stand for what is not above and what is above zero.
const FP4_ORDER: [u8; 16] = [11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3];
const NF4_ORDER: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// The values of a format of 4 bits.
pub const fn table(format: Format) -> &'static [f32; 16] {
    match format {
        Format::Fp4 => &FP4,
        Format::Nf4 | Format::Int8 => &NF4,
    }
}

/// What a number is held against, and which code follows.
struct Rule {
    bounds: [f32; 15],
    order: [u8; 16],
}

impl Rule {
    fn new(format: Format) -> Self {
        let (table, order) = match format {
            Format::Fp4 => (FP4, FP4_ORDER),
            Format::Nf4 | Format::Int8 => (NF4, NF4_ORDER),
        };
        let sorted = order.map(|code| table[usize::from(code)]);
        Self { bounds: std::array::from_fn(|at| f32::midpoint(sorted[at], sorted[at + 1])), order }
    }

    /// The code of a number in -1..1: the lower one at a bound.
    fn code(&self, value: f32) -> u8 {
        self.order[self.bounds.iter().filter(|&&bound| bound < value).count()]
    }
}

/// Codes whole blocks of `block` numbers each; says whether all numbers are finite.
///
/// # Safety
/// The features of `S`; `from` holds `blocks * block` numbers, `codes` half as many bytes, `scales` one number a block;
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

/// Codes `values` in 4 bits each, in blocks of `block`; `double` codes the scales too.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: a number is NaN or infinite, or the format or block does not exist.
pub fn four(values: &[f32], format: Format, block: usize, double: bool) -> Result<Four> {
    let (rule, len) = (Rule::new(format), values.len());
    let (mut codes, mut scales) = (vec![0u8; len.div_ceil(2)], vec![0.0f32; len.div_ceil(block.max(1))]);
    if !super::BLOCKS.contains(&block) {
        return Err(Error::model(format!("blocks of {block} numbers, expected one of {:?}", super::BLOCKS)));
    }
    let whole = len / block;
    let per_task = (1 << 16) / block;
    let (codes_at, scales_at) = (Shared(codes.as_mut_ptr()), Shared(scales.as_mut_ptr()));
    let odd = std::sync::atomic::AtomicBool::new(false);
    par::run(whole.div_ceil(per_task), |task| {
        let first = task * per_task;
        let blocks = per_task.min(whole - first);
        // SAFETY: `first + blocks <= whole`, so that the blocks lie within `values`, `codes` and `scales`, which live
        // until all tasks are done; `block` is one of BLOCKS, multiples of 16. No other task has these blocks.
        let finite = unsafe {
            let from = values.as_ptr().add(first * block);
            code_blocks_at(
                &rule,
                from,
                block,
                blocks,
                codes_at.get().add(first * block / 2),
                scales_at.get().add(first),
            )
        };
        odd.fetch_or(!finite, std::sync::atomic::Ordering::Relaxed);
    });
    let rest = &values[whole * block..];
    if let Some(scale) = scales.get_mut(whole) {
        // bitsandbytes divides here, and multiplies by the reciprocal in whole blocks.
        *scale = rest.iter().fold(0.0f32, |most, value| most.max(value.abs())).max(1e-38);
        for (at, value) in rest.iter().enumerate() {
            let (at, code) = (whole * block + at, rule.code(value / *scale));
            codes[at / 2] |= if at.is_multiple_of(2) { code << 4 } else { code };
        }
        if !len.is_multiple_of(2) {
            codes[len / 2] |= rule.code(0.0);
        }
    }
    if odd.into_inner() || rest.iter().any(|value| !value.is_finite()) {
        return Err(Error::model("has a number that is NaN or infinite, which cannot be quantized"));
    }
    let scales = if double { Scales::Nested(nested(&scales)) } else { Scales::Plain(scales.into()) };
    Four::new(format, codes, len, block, *table(format), scales).map_err(Error::model)
}

/// Codes scales in a byte each.
fn nested(scales: &[f32]) -> Nested {
    let offset = torch_sum(scales) / scales.len() as f32;
    let (mut codes, mut absmax) = (vec![0u8; scales.len()], Vec::new());
    for (scales, codes) in scales.chunks(NESTED_BLOCK).zip(codes.chunks_mut(NESTED_BLOCK)) {
        let most = scales.iter().fold(0.0f32, |most, scale| most.max((scale - offset).abs()));
        absmax.push(most);
        if most > 0.0 {
            let inverse = 1.0 / most;
            for (code, scale) in codes.iter_mut().zip(scales) {
                *code = map::code((scale - offset) * inverse);
            }
        }
    }
    Nested { codes: codes.into(), map: map::signed(), absmax: absmax.into(), block: NESTED_BLOCK, offset }
}

/// The sum as `torch.sum` makes it on a CPU with AVX2 by one thread: pairs of partial sums in four levels, each of four
/// vectors of eight, then across. Another order gives other last bits, and the offset of the scales is stored.
fn torch_sum(values: &[f32]) -> f32 {
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

/// Codes rows of `width` numbers in 8 bits each, as `int8_vectorwise_quant` does it.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: a number is NaN or infinite, or `values` are no rows of that width.
pub fn eight(values: &[f32], width: usize) -> Result<Eight> {
    if values.par_iter().any(|value| !value.is_finite()) {
        return Err(Error::model("has a number that is NaN or infinite, which cannot be quantized"));
    }
    let mut codes = vec![0u8; values.len()];
    let rows = values.par_chunks(width.max(1)).zip(codes.par_chunks_mut(width.max(1)));
    let scales = rows.map(|(row, codes)| {
        let most = row.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let factor = 127.0 / most;
        for (code, value) in codes.iter_mut().zip(row) {
            // A row of zeros: 0 times infinity is NaN, and that becomes 0.
            *code = ((value * factor).round_ties_even() as i8).cast_unsigned();
        }
        most
    });
    let scales = scales.collect();
    Eight::new(codes, scales, width).map_err(Error::model)
}

/// Codes a matrix whose rows are `width` numbers long: in blocks of 64, or by rows for int8.
///
/// # Errors
/// As [`four`] and [`eight`].
pub fn quantize(values: &[f32], width: usize, format: Format, double: bool) -> Result<Quantized> {
    match format {
        Format::Nf4 | Format::Fp4 => four(values, format, BLOCK, double).map(Quantized::Four),
        Format::Int8 => eight(values, width).map(Quantized::Eight),
    }
}
