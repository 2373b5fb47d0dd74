//! Quantized matrices and a whole checkpoint, compared bit for bit with those of bitsandbytes.
use half::{bf16, f16};
use tunesmith::Kind;
use tunesmith::ops::quant::{Format, Quantized, Scales, encode};

use super::super::parity::{self, Forward};
use super::{Golden, bits, golden, model, open, stored};

#[test]
fn codes_scales_and_numbers_are_those_of_bitsandbytes_to_the_bit() {
    let golden = Golden(stored(&golden("matrices.safetensors")));
    let names: Vec<&str> = golden.0.keys().filter_map(|name| name.strip_suffix(".w")).collect();
    assert_eq!(names.len(), 7);
    for name in names {
        let (values, shape) = (golden.floats(&format!("{name}.w")), golden.shape(&format!("{name}.w")));
        for (label, format, double) in [
            ("nf4", Format::Nf4, false),
            ("nf4dq", Format::Nf4, true),
            ("fp4", Format::Fp4, false),
            ("fp4dq", Format::Fp4, true),
        ] {
            let what = format!("{name}.{label}");
            let coded = encode::four(values, format, 64, double).unwrap();
            assert_eq!(coded.codes(), golden.bytes(&format!("{what}.codes")), "{what} codes");
            assert_eq!(bits(coded.table()), bits(golden.floats(&format!("{}_quant_map", format.name()))));
            match coded.scales() {
                Scales::Plain(scales) => {
                    assert_eq!(bits(scales), bits(golden.floats(&format!("{what}.absmax"))), "{what}");
                }
                Scales::Nested(nested) => {
                    assert_eq!(&*nested.codes, golden.bytes(&format!("{what}.absmax")), "{what} scales");
                    assert_eq!(bits(&nested.absmax), bits(golden.floats(&format!("{what}.nested_absmax"))), "{what}");
                    assert_eq!(bits(&[nested.offset]), bits(golden.floats(&format!("{what}.offset"))), "{what} offset");
                    assert_eq!(bits(&nested.map[..]), bits(golden.floats("nested_quant_map")));
                }
            }
            let mut numbers = Quantized::Four(coded).dequantize();
            if name == "bf16" {
                // bitsandbytes rounds to the type that the matrix had.
                for value in &mut numbers {
                    *value = bf16::from_f32(*value).to_f32();
                }
            }
            assert!(numbers == golden.floats(&format!("{what}.numbers")), "{what} numbers");
        }
        if golden.0.contains_key(&format!("{name}.int8.codes")) {
            let coded = encode::eight(values, shape[1]).unwrap();
            assert_eq!(coded.codes(), golden.bytes(&format!("{name}.int8.codes")), "{name} int8");
            assert_eq!(bits(coded.scales()), bits(golden.floats(&format!("{name}.int8.scales"))));
            let numbers = Quantized::Eight(coded).dequantize();
            assert!(numbers == golden.floats(&format!("{name}.int8.numbers")), "{name} int8 numbers");
        }
    }
    for block in [32, 128, 4096] {
        let coded = encode::four(golden.floats("nested.w"), Format::Nf4, block, false).unwrap();
        assert_eq!(coded.codes(), golden.bytes(&format!("block{block}.codes")));
        assert_eq!(bits(&coded.scales().all()), bits(golden.floats(&format!("block{block}.absmax"))));
    }
    for odd in [f32::NAN, f32::INFINITY] {
        for at in [0, 70] {
            let mut values = vec![0.5; 77];
            values[at] = odd;
            assert_eq!(encode::four(&values, Format::Nf4, 64, true).unwrap_err().kind(), Kind::Model);
            assert_eq!(encode::eight(&values, 7).unwrap_err().kind(), Kind::Model);
        }
    }
}

#[test]
fn every_matrix_of_the_second_set_is_coded_and_widened_to_the_bit() {
    let golden = Golden(stored(&golden("nf4_matrices.safetensors")));
    let names: Vec<&str> = golden.0.keys().filter_map(|name| name.strip_suffix(".w")).collect();
    assert_eq!(names.len(), 12);
    let mut compared = names.len();
    for name in names {
        let values = golden.floats(&format!("{name}.w"));
        for (label, double) in [("nf4", false), ("nf4dq", true)] {
            let what = |part: &str| format!("{name}.{label}.{part}");
            let coded = encode::four(values, Format::Nf4, 64, double).unwrap();
            assert_eq!(bits(coded.table()), bits(golden.floats("nf4_code")));
            assert_eq!(coded.codes(), golden.bytes(&what("packed")), "{}", what("packed"));
            compared += 3;
            match coded.scales() {
                Scales::Plain(scales) => assert_eq!(bits(scales), bits(golden.floats(&what("absmax"))), "{name}"),
                Scales::Nested(nested) => {
                    assert_eq!(&*nested.codes, golden.bytes(&what("absmax")), "{name}");
                    assert_eq!(bits(&nested.absmax), bits(golden.floats(&what("nested_absmax"))), "{name}");
                    assert_eq!(bits(&[nested.offset]), bits(golden.floats(&what("offset"))), "{name}");
                    assert_eq!(bits(&nested.map[..]), bits(golden.floats("nested_quant_map")), "{name}");
                    assert_eq!(bits(&coded.scales().all()), bits(golden.floats(&what("absmax_dequant"))), "{name}");
                    compared += 3;
                }
            }
            // bitsandbytes rounds to the type that the matrix had.
            let round = |value: f32| match name.split('_').next() {
                Some("bf16") => bf16::from_f32(value).to_f32(),
                Some("f16") => f16::from_f32(value).to_f32(),
                _ => value,
            };
            let numbers: Vec<f32> = Quantized::Four(coded).dequantize().into_iter().map(round).collect();
            assert_eq!(numbers, golden.floats(&what("dequant")), "{}", what("dequant"));
        }
    }
    assert_eq!(compared + 2, golden.0.len(), "nothing of the file is left out");
}

#[test]
fn checkpoints_in_fp4_and_int8_are_read_as_transformers_saves_them() {
    let forward = Forward::read("llama");
    let (_, dense) = open(&parity::golden("llama/model"));
    for (label, format) in [("fp4", Format::Fp4), ("int8", Format::Int8)] {
        let dir = golden(&format!("llama_{label}"));
        let expected = parity::tensors(&dir.join("forward.safetensors"));
        let (arch, files) = open(&dir.join("model"));
        assert_eq!(files.quantization(), Some(format));
        forward.check(&model(&dir.join("model"), &parity::recipe()), &expected, "_base");
        let matrices = tunesmith::model::quantize::matrices(&arch, &[]).unwrap();
        assert_eq!(matrices.len(), 14);
        for name in matrices {
            assert_eq!(files.format_of(&name), Some(format), "{name}");
            let (shape, mut values) = dense.read(&name).unwrap();
            if format == Format::Int8 {
                // Transformers passes weights through float16 on their way to int8.
                for value in &mut values {
                    *value = f16::from_f32(*value).to_f32();
                }
            }
            let ours = encode::quantize(&values, shape[1], format, true).unwrap().dequantize();
            let theirs = files.read_quantized(&name).unwrap().dequantize();
            if format == Format::Int8 {
                // And divides in float16: where a quotient lies between two codes, it may take the other one.
                for (row, (ours, theirs)) in ours.chunks(shape[1]).zip(theirs.chunks(shape[1])).enumerate() {
                    let most = theirs.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                    let apart = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(apart <= 1.01 * most / 127.0, "{name} row {row}: {apart}, of {most}");
                    let others = ours.iter().zip(theirs).filter(|(a, b)| (*a - *b).abs() > 0.1 * most / 127.0).count();
                    assert!(others <= 1 + shape[1] / 20, "{name} row {row}: {others} other codes");
                }
                continue;
            }
            assert_eq!(bits(&ours), bits(&theirs), "{label}: {name}");
        }
    }
}
