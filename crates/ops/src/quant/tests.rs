//! Codes, scales and numbers against the definitions, and those of every device against the CPU's.
use super::*;
use crate::activation::{Activation, Number};
use crate::fp8;
use crate::testing::{Engine, each_engine, near, numbers};
use half::{bf16, f16};
use tunesmith_base::Kind;

/// Codes, codes of scales, the bits of scales, and the offset's with the block of nested ones.
type Parts = ([Vec<u8>; 2], Vec<u32>, Option<(u32, usize)>);

/// What a matrix is made of, whatever device it is on.
fn parts(matrix: &Quantized) -> Parts {
    let matrix = matrix.to(Device::Cpu);
    let ([codes, nested], floats) = matrix.parts();
    let outer = match &matrix {
        Quantized::Four(Four { scales: Scales::Nested(nested), .. }) => Some((nested.offset.to_bits(), nested.block)),
        Quantized::Four(_) | Quantized::Eight(_) | Quantized::Tiled(_) => None,
    };
    ([codes, nested].map(Slice::read), bits(&floats.read()), outer)
}

pub(super) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Numbers whose blocks differ in magnitude, some of them zero.
pub(super) fn uneven(count: usize) -> Vec<f32> {
    let value = |(at, value): (usize, f32)| match at / 64 % 5 {
        3 => 0.0,
        part => value * value * value * [1.0, 1e-3, 40.0, 0.0, 3e-39][part],
    };
    numbers(count as u64, count).into_iter().enumerate().map(value).collect()
}

/// Holds a matrix on a GPU, written in 16 bits, against its numbers in float32, rounded once: to the bit, from any number on, at addresses
/// where four are written at once and others.
pub(super) fn check_in_16_bits(engine: Engine, matrix: &Quantized, wide: &[f32], what: &str) {
    for number in [Number::Bf16, Number::F16] {
        let round = |value: &f32| match number {
            Number::Bf16 => bf16::from_f32(*value).to_f32(),
            _ => f16::from_f32(*value).to_f32(),
        };
        for (start, count, at) in
            [(0, usize::MAX, 0), (0, usize::MAX, 1), (1, 5, 0), (3, 77, 1), (4, 64, 4), (8, 63, 0)]
        {
            let start = start.min(wide.len() - 1);
            let count = count.min(wide.len() - start);
            let pool = engine.pool();
            pool.set_number(number);
            let out = Activation::from_rows(&pool, &vec![7.0; at + count + 1], at + count + 1);
            matrix.widen_as(start, count, (out.address() + at as u64 * number.bytes(), number));
            let rounded = wide[start..start + count].iter().map(round);
            let expected: Vec<f32> = std::iter::repeat_n(7.0, at).chain(rounded).chain([7.0]).collect();
            assert_eq!(bits(&out.to_rows()), bits(&expected), "{what} in {number:?}, {count} from {start} at {at}");
        }
    }
}

fn code(engine: Engine, values: &[f32], width: usize, format: Format, double: bool) -> Quantized {
    encode::quantize_there(engine.array(values).view(), width, format, double).unwrap()
}

const FORMATS: [(Format, bool); 6] = [
    (Format::Nf4, false),
    (Format::Nf4, true),
    (Format::Fp4, false),
    (Format::Fp4, true),
    (Format::Int8, false),
    (Format::Fp8, false),
];

#[test]
fn a_device_codes_and_widens_to_the_bits_of_the_cpu() {
    each_engine(|engine| {
        // Odd widths begin rows within a byte; most end within a block.
        for (rows, width) in [(1, 1), (3, 7), (5, 33), (1, 64), (9, 64), (40, 129), (300, 65)] {
            let values = uneven(rows * width);
            for (format, double) in FORMATS {
                let what = format!("{engine:?} {format:?} {double} [{rows}, {width}]");
                let plain = encode::quantize(&values, width, format, double).unwrap();
                let coded = code(engine, &values, width, format, double);
                assert_eq!(coded.device(), engine.device());
                assert_eq!(parts(&coded), parts(&plain), "{what}");
                let wide = plain.dequantize();
                assert_eq!(bits(&coded.dequantize()), bits(&wide), "{what}");
                assert_eq!(bits(&plain.to(engine.device()).dequantize()), bits(&wide), "{what}");
                for (start, count) in [(0, 1), (1, 5), (3, 77), (4, 64), (values.len() / 3, usize::MAX)] {
                    let start = start.min(values.len());
                    let mut part = vec![0.0; count.min(values.len() - start)];
                    coded.widen(start, &mut part);
                    assert_eq!(bits(&part), bits(&wide[start..start + part.len()]), "{what} from {start}");
                }
            }
        }
    });
}

#[test]
fn blocks_of_any_size_are_coded_alike() {
    each_engine(|engine| {
        for block in BLOCKS {
            for len in [block, 2 * block + 1] {
                let values = uneven(len);
                let four = encode::four(&values, Format::Nf4, block, true).unwrap();
                let there = encode::four_there(engine.array(&values).view(), Format::Nf4, block, true).unwrap();
                assert_eq!(bits(&there.scales().all()), bits(&four.scales().all()), "{engine:?} {block}");
                let [there, four] = [there, four].map(Quantized::Four);
                assert_eq!(parts(&there), parts(&four), "{engine:?} {block}");
            }
        }
    });
}

#[test]
fn numbers_are_near_and_as_defined() {
    each_engine(|engine| {
        let (width, values) = (37, numbers(3, 20 * 37));
        for (format, double) in FORMATS {
            let coded = code(engine, &values, width, format, double);
            let (wide, coded) = (coded.dequantize(), coded.to(Device::Cpu));
            match &coded {
                Quantized::Four(four) => {
                    let (table, scales) = (four.table(), four.scales().all());
                    let expected = reference::widen_four(four.codes(), table, &scales, four.block(), values.len());
                    near("four", &wide, &expected, 1e-6);
                    if !double {
                        for (at, (value, wide)) in values.iter().zip(&wide).enumerate() {
                            let nearest = reference::distance(*value, table, scales[at / four.block()]);
                            assert!(f64::from((value - wide).abs()) <= nearest + 1e-6, "{format:?} {at}");
                        }
                    }
                }
                Quantized::Eight(eight) if format == Format::Fp8 => {
                    let expected = reference::widen_fp8(eight.codes(), eight.scales(), width);
                    near("fp8", &wide, &expected, 1e-6);
                    for (value, wide) in values.iter().zip(&wide) {
                        // Three bits of fraction; below the smallest exponent even steps.
                        let step = (value.abs() / 16.0).max(2f32.powi(-10) / 448.0);
                        assert!((value - wide).abs() <= 1.001 * step, "{value} {wide}");
                    }
                }
                Quantized::Eight(eight) => {
                    let expected = reference::widen_eight(eight.codes(), eight.scales(), width);
                    near("eight", &wide, &expected, 1e-6);
                    for (at, (value, wide)) in values.iter().zip(&wide).enumerate() {
                        assert!((value - wide).abs() <= eight.scales()[at / width] / 253.0, "{at}");
                    }
                }
                Quantized::Tiled(_) => panic!("{format:?} has no tiles"),
            }
        }
    });
}

#[test]
fn scales_are_added_up_in_the_order_of_the_cpu() {
    // Through all levels of the sum, and with every kind of rest.
    let all: Vec<f32> = numbers(1, 150_000).into_iter().map(|value| value.abs() * 3.0).collect();
    each_engine(|engine| {
        let lengths = [1, 3, 4, 7, 8, 31, 32, 33, 100, 511, 512, 530, 1055, 8191, 8192, 16_400, 139_319, 150_000];
        for len in lengths.into_iter().filter(|_| !engine.is_cpu()) {
            let there = cuda::torch_sum(engine.array(&all[..len]).view());
            assert_eq!(there.to_bits(), cpu::torch_sum(&all[..len]).to_bits(), "{len}");
        }
    });
}

#[test]
fn what_cannot_be_coded_is_refused_everywhere() {
    each_engine(|engine| {
        for (at, odd) in [(0, f32::NAN), (70, f32::INFINITY), (99, f32::NEG_INFINITY)] {
            let mut values = numbers(4, 100);
            values[at] = odd;
            for (format, double) in FORMATS {
                let result = encode::quantize_there(engine.array(&values).view(), 10, format, double);
                assert_eq!(result.unwrap_err().kind(), Kind::Model, "{engine:?} {format:?} {odd}");
            }
        }
    });
}

#[test]
fn joined_matrices_have_the_numbers_of_both() {
    each_engine(|engine| {
        let (above, below) = (uneven(6 * 64), uneven(5 * 64));
        for (format, double) in FORMATS {
            let [one, other] = [&above, &below].map(|values| code(engine, values, 64, format, double));
            let joined = one.joined(&other).unwrap();
            assert_eq!(joined.device(), engine.device());
            assert_eq!(bits(&joined.dequantize()), bits(&[one.dequantize(), other.dequantize()].concat()));
        }
    });
}

#[test]
fn a_matrix_put_together_elsewhere_is_the_same() {
    each_engine(|engine| {
        let values = numbers(1, 20 * 33);
        for (format, double) in FORMATS {
            let matrix = encode::quantize(&values, 33, format, double).unwrap();
            let (form, ([codes, nested], scales)) = (matrix.form(), matrix.parts());
            assert_eq!((form.bytes() + 4 * form.floats()), matrix.bytes());
            // Something else lies before and behind.
            let bytes = [&[9; 3][..], &codes.read(), &nested.read(), &[7; 5]].concat();
            let floats = [&[1.5f32][..], &scales.read(), &[2.5]].concat();
            let there = form.matrix(&Arc::new(engine.array(&bytes)), 3, &Arc::new(engine.array(&floats)), 1);
            let again = there.form().matrix(&Arc::new(bytes), 3, &Arc::new(floats), 1);
            assert_eq!((there.device(), again.device()), (engine.device(), Device::Cpu));
            for put in [there, again] {
                assert_eq!(bits(&put.dequantize()), bits(&matrix.dequantize()));
                assert_eq!(put.format(), matrix.format());
            }
        }
    });
}

#[test]
fn a_gpu_widens_to_16_bits_what_it_widens_to_float32_rounded_once() {
    each_engine(|engine| {
        for (rows, width) in [(1, 1), (3, 7), (5, 33), (9, 64), (40, 129)].into_iter().filter(|_| !engine.is_cpu()) {
            let values = uneven(rows * width);
            for (format, double) in FORMATS {
                let plain = encode::quantize(&values, width, format, double).unwrap();
                let what = format!("{format:?} {double} [{rows}, {width}]");
                check_in_16_bits(engine, &plain.to(engine.device()), &plain.dequantize(), &what);
            }
        }
    });
}

/// Tokens of FP8 by definition: the code of NaN where a number is not finite or its token has an infinite one.
fn fp8_of(rows: &[f32], width: usize) -> (Vec<u8>, Vec<u32>) {
    let mut codes = Vec::new();
    let scales = rows.chunks(width).map(|row| {
        let most = row.iter().filter(|it| !it.is_nan()).fold(0.0f32, |most, value| most.max(value.abs()));
        let scale = most / fp8::LARGEST;
        codes.extend(row.iter().map(|value| if scale > 0.0 { fp8::code(value / scale) } else { 0 }));
        scale.to_bits()
    });
    let scales = scales.collect();
    (codes, scales)
}

#[test]
fn a_gpu_codes_activations_of_every_type_in_fp8_as_defined() {
    each_engine(|engine| {
        let shapes = [(1, 1), (3, 7), (5, 33), (17, 300), (2, 1024)];
        for (tokens, features) in shapes.into_iter().filter(|_| !engine.is_cpu()) {
            for number in [Number::F32, Number::Bf16, Number::F16] {
                let pool = engine.pool();
                pool.set_number(number);
                let mut values = uneven(tokens * features);
                if tokens > 2 {
                    values[features..2 * features].fill(0.0);
                    values[2 * features] = f32::INFINITY;
                    values[features - 1] = f32::NAN;
                }
                let x = Activation::from_rows(&pool, &values, features);
                let (codes, scales) = fp8_rows(&x);
                let (expected, expected_scales) = fp8_of(&x.to_rows(), features);
                let what = format!("{number:?} [{tokens}, {features}]");
                // NaN has two codes.
                let code = |code: &u8| if code & 0x7f == 0x7f { 0x7f } else { *code };
                let plain = |codes: &[u8]| codes.iter().map(code).collect::<Vec<u8>>();
                assert_eq!((plain(&codes.read()), bits(&scales.read())), (plain(&expected), expected_scales), "{what}");
            }
        }
    });
}

#[test]
fn the_transpose_in_fp8_is_coded_by_its_own_rows() {
    each_engine(|engine| {
        let shapes = [(1, 1), (7, 33), (33, 7), (16, 16), (80, 64), (300, 65)];
        for (rows, width) in shapes.into_iter().filter(|_| engine.multiplies_fp8()) {
            // Rows of very different sizes, some of zeros, and a column of zeros.
            let mut values = uneven(rows * width);
            values.iter_mut().skip(width - 1).step_by(width).for_each(|value| *value = 0.0);
            let plain = encode::quantize(&values, width, Format::Fp8, false).unwrap();
            let wide = plain.dequantize();
            let Quantized::Eight(there) = plain.to(engine.device()) else { panic!("8 bits") };
            let (codes, scales, turned) = there.products().expect("this GPU multiplies FP8");
            let of_rows = plain.parts();
            assert_eq!((codes.read(), bits(&scales.read())), (of_rows.0[0].read(), bits(&of_rows.1.read())));
            let transpose: Vec<f32> = (0..rows * width).map(|at| wide[at % rows * width + at / rows]).collect();
            let found = (turned.codes.read(), bits(&turned.scales.read()));
            assert_eq!(found, fp8_of(&transpose, rows), "[{rows}, {width}]");
        }
    });
}
