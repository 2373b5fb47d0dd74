//! An interleaved matrix has the numbers of the one that it was made of, and the same products, to the bit.
use super::{Init, Interleaved, Matrix, Store, Term, matmul};
use crate::activation::{Activation, Number, Pool};
use crate::quant::{Eight, Format, Quantized, encode};
use crate::testing::{each_level, numbers};
use half::bf16;

/// Calls `test` with a matrix of `rows` rows in every form that is interleaved, and its name.
fn each_form(rows: usize, width: usize, test: impl Fn(&str, Store<'_>)) {
    let values = numbers(2, rows * width);
    test("f32", Store::from(&values[..]));
    let narrow: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
    test("bf16", Store::Bf16((&narrow[..]).into()));
    for format in [Format::Int8, Format::Fp8] {
        let coded = encode::quantize(&values, width, format, false).unwrap();
        test(format.name(), Store::Quantized(&coded));
    }
    for format in [Format::Nf4, Format::Fp4] {
        for double in [false, true] {
            if width.is_multiple_of(64) {
                let coded = encode::quantize(&values, width, format, double).unwrap();
                test(format.name(), Store::Quantized(&coded));
            }
        }
    }
    if width.is_multiple_of(32) {
        let codes = (0..rows * width / 2).map(|at| (at * 37 + at / 7) as u8).collect();
        let scales = (0..rows * width / 32).map(|at| 120 + (at % 9) as u8).collect();
        let coded = Quantized::Four(crate::quant::Four::mxfp4(codes, scales).unwrap());
        test("mxfp4", Store::Quantized(&coded));
    }
}

#[test]
fn an_interleaved_matrix_has_its_numbers() {
    for (rows, width) in [(1, 1), (7, 33), (16, 64), (37, 128), (50, 192)] {
        each_form(rows, width, |name, store| {
            let made = Interleaved::new(store, width).expect(name);
            assert_eq!((made.len(), made.width()), (rows * width, width), "{name}");
            let (mut expected, mut got) = (vec![0.0; rows * width], vec![1.0; rows * width]);
            store.widen(0, &mut expected);
            Store::Interleaved(&made).widen(0, &mut got);
            assert_eq!(got, expected, "{name} {rows} x {width}");
            let part = rows * width / 3;
            Store::Interleaved(&made).widen(part, &mut got[part..]);
            assert_eq!(got, expected, "{name} {rows} x {width}, a part");
        });
    }
}

#[test]
fn products_with_an_interleaved_matrix_have_the_same_bits() {
    each_level(|level| {
        for (rows, width) in [(1, 1), (7, 33), (16, 64), (53, 601), (100, 1152), (210, 320)] {
            for tokens in [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 40, 130] {
                let pool = Pool::new();
                let x = Activation::from_rows(&pool, &numbers(1, tokens * width), width);
                let low = Activation::from_rows(&pool, &numbers(3, tokens * 5), 5);
                let b = numbers(4, rows * 5);
                let (bias, start) = (numbers(5, rows), Activation::from_rows(&pool, &numbers(6, tokens * rows), rows));
                each_form(rows, width, |name, store| {
                    let made = Interleaved::new(store, width).expect(name);
                    for (case, init) in [Init::Zero, Init::Bias((&bias[..]).into()), Init::Add(&start), Init::Out]
                        .into_iter()
                        .enumerate()
                    {
                        let run = |store: Store<'_>| {
                            let mut out = start.copy();
                            let whole = Term { matrix: Matrix::rows(store, width), x: &x };
                            let update = Term { matrix: Matrix::rows(&b[..], 5), x: &low };
                            let terms = [whole, update];
                            matmul(&mut out, init, &terms[..2 - case % 2]);
                            out.to_rows()
                        };
                        let (got, expected) = (run(Store::Interleaved(&made)), run(store));
                        assert!(got == expected, "{level:?} {name} {tokens} tokens, {rows} x {width}, case {case}");
                    }
                });
            }
        }
    });
}

#[test]
fn an_interleaved_matrix_is_multiplied_in_float32_where_others_are_rounded() {
    each_level(|_| {
        for tokens in [3, 40, 200] {
            let (rows, width) = (70, 96);
            let (wide, pairs) = (Pool::new(), Pool::new());
            pairs.set_products(Number::Bf16);
            let (x, values) = (numbers(1, tokens * width), numbers(2, rows * width));
            let made = Interleaved::new(Store::from(&values[..]), width).expect("floats are rearranged");
            let run = |pool, store: Store<'_>| {
                let x = Activation::from_rows(pool, &x, width);
                let mut out = pool.act(tokens, rows);
                matmul(&mut out, Init::Zero, &[Term { matrix: Matrix::rows(store, width), x: &x }]);
                out.to_rows()
            };
            assert!(run(&pairs, Store::Interleaved(&made)) == run(&wide, Store::from(&values[..])), "{tokens} tokens");
        }
    });
}

#[test]
fn what_cannot_be_interleaved_stays() {
    // Blocks of 64 numbers do not end with rows of 32.
    let four = encode::quantize(&numbers(1, 64), 32, Format::Nf4, false).unwrap();
    assert!(Interleaved::new(Store::Quantized(&four), 32).is_none());
    let eight = Eight::new(vec![1; 8], vec![1.0; 2], 4).map(Quantized::Eight).unwrap();
    assert!(Interleaved::new(Store::Quantized(&eight), 8).is_none(), "another width");
}
