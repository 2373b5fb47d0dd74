//! Quantization formats with tiles against their definitions, to the bit on every device.
use super::reference::widen_tiles;
use super::tests::{bits, check_in_16_bits, uneven};
use super::tiles::{Integers, TileForm, Tiled, Zeros};
use super::*;
use crate::fp8;
use crate::testing::{each_engine, near, numbers};

/// `count` bytes, the same for the same seed.
fn bytes(seed: u64, count: usize) -> Vec<u8> {
    numbers(seed, count).into_iter().map(|value| ((value + 1.0) * 127.99) as u8).collect()
}

/// The matrix, and its numbers as the definition gives them.
type Case = (String, Quantized, Vec<f64>);

fn fp8_case(rows: usize, width: usize, tile: [usize; 2]) -> Case {
    // No NaN.
    let codes: Vec<u8> = bytes(1, rows * width).into_iter().map(|code| code ^ u8::from(code & 0x7f == 0x7f)).collect();
    let across = width.div_ceil(tile[1]);
    let scales: Vec<f32> = numbers(2, rows.div_ceil(tile[0]) * across).into_iter().map(|it| it * 0.01).collect();
    let plain: Vec<f64> = codes.iter().map(|&code| f64::from(fp8::VALUES[usize::from(code)])).collect();
    let expected = widen_tiles(&plain, width, tile, &scales, &vec![0.0; scales.len()], None);
    let tiled = Tiled::fp8(codes, width, tile, scales).unwrap();
    (format!("fp8 [{rows}, {width}] in {tile:?}"), tiled.into(), expected)
}

fn integer_case(bits: usize, [rows, width]: [usize; 2], group: usize, each: bool, sorted: bool) -> Case {
    let across = width.div_ceil(group);
    let mask = if bits == 4 { 15 } else { 255 };
    let plain: Vec<u8> = bytes(3, rows * width).into_iter().map(|code| code & mask).collect();
    let scales: Vec<f32> = numbers(4, rows * across).into_iter().map(|it| it * 0.02).collect();
    let zeros: Vec<u8> = bytes(5, rows * across).into_iter().map(|zero| zero & mask).collect();
    // As act-order leaves them: columns of a group lie anywhere.
    let groups: Vec<u32> = (0..width).map(|column| (column * 7 % width / group) as u32).collect();
    let groups = (!sorted).then_some(groups);
    let wide: Vec<f64> = plain.iter().map(|&code| f64::from(code)).collect();
    let subtracted: Vec<f64> =
        zeros.iter().map(|&zero| if each { f64::from(zero) } else { f64::from(mask / 2 + 1) }).collect();
    let expected = widen_tiles(&wide, width, [1, group], &scales, &subtracted, groups.as_deref());
    let codes = match bits {
        4 => plain.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect(),
        _ => plain.iter().map(|code| code ^ 0x80).collect(),
    };
    let zeros = if each { Zeros::Each(zeros) } else { Zeros::All(mask / 2 + 1) };
    let tiled = Tiled::integers(Integers { codes, bits, width, group, scales, zeros, groups }).unwrap();
    (format!("{bits} bits [{rows}, {width}] by {group}, each {each}, sorted {sorted}"), tiled.into(), expected)
}

fn nvfp4_case(rows: usize, width: usize) -> Case {
    let codes = bytes(6, rows * width / 2);
    let scales: Vec<u8> = bytes(7, rows * width / NV_BLOCK).into_iter().map(|code| code & 0x77).collect();
    let code = |at: usize| usize::from(codes[at / 2] >> (4 * (at % 2)) & 15);
    let scale = |at: usize| f64::from(fp8::VALUES[usize::from(scales[at / NV_BLOCK])] / 3.0);
    let expected = (0..rows * width).map(|at| f64::from(E2M1[code(at)]) * scale(at)).collect();
    let four = Four::nvfp4(codes.clone(), scales.clone(), |scale| scale / 3.0).unwrap();
    (format!("nvfp4 [{rows}, {width}]"), Quantized::Four(four), expected)
}

/// Scales of `2^(lowest - 127)` and up to 14 times as large.
fn mxfp4_case(rows: usize, width: usize, lowest: u8) -> Case {
    let codes = bytes(8, rows * width / 2);
    let scales: Vec<u8> = bytes(9, rows * width / MX_BLOCK).into_iter().map(|code| lowest + code % 15).collect();
    let code = |at: usize| usize::from(codes[at / 2] >> (4 * (at % 2)) & 15);
    let scale = |at: usize| 2f64.powi(i32::from(scales[at / MX_BLOCK]) - 127);
    let expected = (0..rows * width).map(|at| f64::from(E2M1[code(at)]) * scale(at)).collect();
    let four = Four::mxfp4(codes.clone(), scales.clone()).unwrap();
    (format!("mxfp4 [{rows}, {width}] from 2^({lowest} - 127)"), Quantized::Four(four), expected)
}

/// Matrices of every kind with this many columns where their format allows that, with their definitions' numbers.
pub(crate) fn cases(rows: usize, width: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for tile in [[1, 1], [16, 32], [3, 5], [1, width], [rows, width], [usize::MAX, usize::MAX]] {
        cases.push(fp8_case(rows, width, tile));
    }
    for group in [1, 8, 32, 100, width] {
        for (each, sorted) in [(false, true), (true, true), (true, false)] {
            cases.push(integer_case(8, [rows, width], group, each, sorted));
            if width.is_multiple_of(2) {
                cases.push(integer_case(4, [rows, width], group, each, sorted));
            }
        }
    }
    if width.is_multiple_of(NV_BLOCK) {
        cases.push(nvfp4_case(rows, width));
    }
    if width.is_multiple_of(MX_BLOCK) {
        cases.push(mxfp4_case(rows, width, 120));
    }
    cases
}

#[test]
fn makers_formats_are_widened_as_defined_on_every_device() {
    each_engine(|engine| {
        for (rows, width) in [(1, 2), (5, 7), (9, 64), (33, 130), (40, 96)] {
            for (what, matrix, expected) in cases(rows, width) {
                let rounded: Vec<f32> = expected.iter().map(|&number| number as f32).collect();
                let there = matrix.to(engine.device());
                assert_eq!((there.device(), there.len()), (engine.device(), rows * width));
                assert_eq!(bits(&there.dequantize()), bits(&rounded), "{engine:?} {what}");
                for (start, count) in [(0, 1), (1, 5), (3, 77), (4, 64), (rounded.len() / 3, usize::MAX)] {
                    let start = start.min(rounded.len());
                    let mut part = vec![0.0; count.min(rounded.len() - start)];
                    there.widen(start, &mut part);
                    assert_eq!(bits(&part), bits(&rounded[start..start + part.len()]), "{what} from {start}");
                }
                if !engine.is_cpu() {
                    check_in_16_bits(engine, &there, &rounded, &what);
                }
            }
        }
    });
}

/// From numbers that float32 has no implicit bit for to the largest, which are infinite in float16.
#[test]
fn mxfp4_has_the_numbers_of_its_definition_at_every_scale() {
    each_engine(|engine| {
        for lowest in (0..=MX_LARGEST - 14).step_by(14) {
            let (what, matrix, expected) = mxfp4_case(9, 64, lowest);
            let rounded: Vec<f32> = expected.iter().map(|&number| number as f32).collect();
            assert!(expected.iter().zip(&rounded).all(|(number, rounded)| *number == f64::from(*rounded)), "{what}");
            let there = matrix.to(engine.device());
            assert_eq!(bits(&there.dequantize()), bits(&rounded), "{engine:?} {what}");
            if !engine.is_cpu() {
                check_in_16_bits(engine, &there, &rounded, &what);
            }
        }
        // What a merge codes in it has the same bytes, wherever it goes.
        let values = uneven(40 * 96);
        let plain = encode::quantize(&values, 96, Format::Mxfp4, false).unwrap();
        let there = encode::quantize_there(engine.array(&values).view(), 96, Format::Mxfp4, false).unwrap();
        assert_eq!(bits(&there.dequantize()), bits(&plain.dequantize()), "{engine:?}");
    });
}

#[test]
fn makers_formats_are_put_together_and_joined() {
    each_engine(|engine| {
        for (what, matrix, _) in cases(12, 48) {
            let (form, ([codes, more], scales)) = (matrix.form(), matrix.parts());
            let all = [&[9; 3][..], &codes.read(), &more.read(), &[7; 5]].concat();
            let floats = [&[1.5f32][..], &scales.read(), &[2.5]].concat();
            let there = form.matrix(&Arc::new(engine.array(&all)), 3, &Arc::new(engine.array(&floats)), 1);
            assert_eq!(there.device(), engine.device());
            assert_eq!(bits(&there.dequantize()), bits(&matrix.dequantize()), "{what}");
            let joined = there.joined(&matrix.to(engine.device())).unwrap_or_else(|| panic!("{what}"));
            assert_eq!(joined.device(), engine.device());
            let twice = [matrix.dequantize(), matrix.dequantize()].concat();
            assert_eq!(bits(&joined.dequantize()), bits(&twice), "{what}");
        }
        // Other zeros, other tiles, another number of the whole matrix.
        let put = |matrix: Quantized| matrix.to(engine.device());
        let same = put(integer_case(4, [3, 32], 8, false, true).1);
        let each = put(integer_case(4, [3, 32], 8, true, true).1);
        let joined = same.joined(&each).unwrap();
        assert_eq!(bits(&joined.dequantize()), bits(&[same.dequantize(), each.dequantize()].concat()));
        let (above, below) = (put(fp8_case(5, 32, [16, 16]).1), put(fp8_case(7, 32, [3, 16]).1));
        let joined = above.joined(&below).unwrap();
        assert_eq!(bits(&joined.dequantize()), bits(&[above.dequantize(), below.dequantize()].concat()));
        assert!(above.joined(&same).is_none() && above.joined(&put(fp8_case(5, 32, [16, 32]).1)).is_none());
        let codes = || (vec![0x21; 16], vec![0x38, 0x39]);
        let four = |whole: f32| Four::nvfp4(codes().0, codes().1, |scale| scale * whole).unwrap();
        let [one, other] = [four(0.5), four(0.3)].map(|it| put(Quantized::Four(it)));
        let joined = one.joined(&other).unwrap();
        assert_eq!(bits(&joined.dequantize()), bits(&[one.dequantize(), other.dequantize()].concat()));
    });
}

#[test]
fn a_counted_matrix_takes_as_many_bytes() {
    for tile in [[16, 16], [1, 40], [usize::MAX, usize::MAX]] {
        let form = TileForm { format: Format::Fp8Tiles([1, 1]), tile, zeros: false, grouped: false };
        let counted = Quantized::Tiled(Tiled::counted(form, [20, 40], Device::Cpu));
        assert_eq!(counted.bytes(), fp8_case(20, 40, tile).1.bytes());
    }
    for (bits, format) in [(4, Format::Int4Groups), (8, Format::Int8Groups)] {
        for (zeros, grouped) in [(false, false), (true, false), (true, true)] {
            let form = TileForm { format, tile: [1, 8], zeros, grouped };
            let counted = Quantized::Tiled(Tiled::counted(form, [20, 40], Device::Cpu));
            assert_eq!(counted.bytes(), integer_case(bits, [20, 40], 8, zeros, !grouped).1.bytes());
        }
    }
    let counted = Quantized::Four(Four::counted(Format::Nvfp4, 20 * 48, Device::Cpu));
    assert_eq!(counted.bytes(), nvfp4_case(20, 48).1.bytes());
}

#[test]
fn fp8_is_coded_by_tiles_as_near_as_it_can_be() {
    for (rows, width, tile) in [(20, 37, [8, 16]), (5, 64, [1, 64]), (9, 10, [usize::MAX, usize::MAX])] {
        let values = uneven(rows * width);
        let Quantized::Tiled(coded) =
            encode::quantize(&values, width, Format::Fp8Tiles(tile.map(|it| it as u32)), false).unwrap()
        else {
            panic!("tiles")
        };
        let across = width.div_ceil(tile[1]);
        let scale =
            |at: usize| coded.scales()[at / width / tile[0].min(rows) * across + at % width / tile[1].min(width)];
        for (at, (value, code)) in values.iter().zip(coded.codes()).enumerate() {
            let wide = f64::from(fp8::VALUES[usize::from(*code)]) * f64::from(scale(at));
            let nearest =
                reference::distance(*value, &fp8::VALUES.map(|it| if it.is_nan() { 0.0 } else { it }), scale(at));
            assert!((wide - f64::from(*value)).abs() <= nearest * 1.001 + 1e-12, "{value} in {tile:?}");
        }
        // Coded again, nothing changes.
        let wide = Quantized::Tiled(coded).dequantize();
        let again = encode::quantize(&wide, width, Format::Fp8Tiles(tile.map(|it| it as u32)), false).unwrap();
        near("again", &again.dequantize(), &wide.iter().map(|&it| f64::from(it)).collect::<Vec<_>>(), 1e-6);
    }
    let error = encode::quantize(&[1.0, f32::NAN], 2, Format::Fp8Tiles([1, 1]), false).unwrap_err();
    assert!(error.message().contains("NaN"), "{error}");
    for format in [Format::Int4Groups, Format::Int8Groups, Format::Nvfp4] {
        assert!(encode::quantize(&[1.0; 16], 16, format, false).unwrap_err().message().contains(&format.words()));
    }
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let refused = |result: Result<Tiled, String>, text: &str| {
        let error = result.unwrap_err();
        assert!(error.contains(text), "{error}");
    };
    refused(Tiled::fp8(vec![0x7f, 1], 2, [1, 1], vec![1.0; 2]), "NaN");
    refused(Tiled::fp8(vec![0, 1], 2, [1, 1], vec![1.0, f32::INFINITY]), "scale of inf");
    refused(Tiled::fp8(vec![0, 1], 2, [1, 1], vec![1.0, 1e38]), "scale of 1");
    refused(Tiled::fp8(vec![0; 6], 3, [1, 2], vec![1.0; 3]), "3 scales, expected 4");
    refused(Tiled::fp8(vec![0; 6], 4, [1, 2], vec![1.0; 3]), "rows of 4");
    refused(Tiled::fp8(Vec::new(), 4, [1, 2], Vec::new()), "0 numbers");
    refused(Tiled::fp8(vec![0; 4], 4, [0, 2], vec![1.0]), "tiles of [0, 2]");
    let parts = || Integers {
        codes: vec![0; 8],
        bits: 4,
        width: 8,
        group: 4,
        scales: vec![1.0; 4],
        zeros: Zeros::Each(vec![1; 4]),
        groups: None,
    };
    assert!(Tiled::integers(parts()).is_ok());
    refused(Tiled::integers(Integers { zeros: Zeros::Each(vec![1; 3]), ..parts() }), "4 scales");
    refused(Tiled::integers(Integers { groups: Some(vec![0; 7]), ..parts() }), "7 columns");
    refused(Tiled::integers(Integers { groups: Some(vec![0, 1, 2, 0, 0, 0, 0, 0]), ..parts() }), "group 2");
    let odd = Integers { codes: vec![0; 9], width: 3, group: 3, scales: vec![1.0; 6], zeros: Zeros::All(8), ..parts() };
    refused(Tiled::integers(odd), "even number");
    assert!(Four::nvfp4(vec![0; 16], vec![0x7f, 0], |scale| scale).unwrap_err().contains("NaN"));
    assert!(Four::nvfp4(vec![0; 16], vec![0; 3], |scale| scale).is_err());
    assert!(Four::nvfp4(vec![0; 16], vec![0; 2], |scale| scale / 0.0).is_err());
}

#[test]
fn rows_of_four_bits_are_taken_apart() {
    let values = uneven(6 * 128);
    for double in [false, true] {
        let four = encode::four(&values, Format::Nf4, 64, double).unwrap();
        let wide = Quantized::Four(four.clone()).dequantize();
        for first in [0, 1] {
            let part = Quantized::Four(four.rows(128, first, 2).unwrap()).dequantize();
            let expected: Vec<f32> = wide.chunks(128).skip(first).step_by(2).flatten().copied().collect();
            assert_eq!(bits(&part), bits(&expected));
        }
        assert!(four.rows(96, 0, 2).is_none() && four.rows(0, 0, 2).is_none());
    }
}
