//! An interleaved matrix has the numbers of the one that it was made of, and products of one order of sums, to the bit.
use super::{Init, Interleaved, Matrix, Store, Term, matmul, matmul_transposed, matvec, matvec_grouped};
use crate::activation::{Activation, Number, Pool};
use crate::quant::{EIGHTH, Eight, Format, Quantized, encode};
use crate::simd::Level;
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
            let made = Interleaved::new(store, width, Number::F32).expect(name);
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
fn a_matrix_in_pairs_has_its_numbers() {
    each_level(|_| {
        for (rows, width) in [(1, 1), (7, 33), (16, 64), (37, 128)] {
            let values: Vec<bf16> = numbers(2, rows * width).into_iter().map(bf16::from_f32).collect();
            let store = Store::Bf16((&values[..]).into());
            let made = Interleaved::new(store, width, Number::Bf16).expect("numbers of 16 bits are rearranged");
            let matrix = Matrix::rows(Store::Interleaved(&made), width);
            assert_eq!(matrix.lies_in_pairs(), crate::simd::pair_level().is_some());
            let (mut expected, mut got) = (vec![0.0; rows * width], vec![1.0; rows * width]);
            store.widen(0, &mut expected);
            Store::Interleaved(&made).widen(0, &mut got);
            assert_eq!(got, expected, "{rows} x {width}");
        }
    });
}

/// The codes' values, a number's scale, and how many columns have one; nothing where numbers have no scales apart.
fn parts(store: Store<'_>, width: usize) -> Option<(Vec<f32>, Vec<f32>, usize)> {
    match store {
        Store::Quantized(Quantized::Eight(eight)) => {
            let fp8 = eight.format() == Format::Fp8;
            let value = |&code: &u8| {
                if fp8 { crate::fp8::VALUES[usize::from(code)] } else { f32::from(code.cast_signed()) }
            };
            let scales = eight.scales().iter().map(|&scale| if fp8 { scale } else { scale * EIGHTH });
            let scales = scales.flat_map(|scale| std::iter::repeat_n(scale, width)).collect();
            Some((eight.codes().iter().map(value).collect(), scales, 256))
        }
        Store::Quantized(Quantized::Four(four)) => {
            let halves = four.codes().iter().flat_map(|pair| [pair >> 4, pair & 15]);
            let values = halves.map(|code| four.table()[usize::from(code)]).collect();
            let scales = four.scales().all();
            let scales = scales.iter().flat_map(|&scale| std::iter::repeat_n(scale, four.block())).collect();
            Some((values, scales, four.block().min(256)))
        }
        _ => None,
    }
}

/// A sum of `x` with a row, from `start` on: that of a few columns with one scale, multiplied by it, and so on.
fn row_sum(start: f32, x: &[f32], [values, scales]: [&[f32]; 2], fold: usize, level: Level) -> f32 {
    let add = |a: f32, b: f32, sum: f32| if level == Level::Portable { a * b + sum } else { a.mul_add(b, sum) };
    let chunks = x.chunks(fold).zip(values.chunks(fold)).zip(scales.chunks(fold));
    chunks.fold(start, |total, ((x, values), scales)| {
        let sum = x.iter().zip(values).fold(0.0, |sum, (&x, &value)| add(value, x, sum));
        add(sum, scales[0], total)
    })
}

#[test]
fn products_with_an_interleaved_matrix_have_one_order_of_sums() {
    each_level(|level| {
        for (rows, width) in [(1, 1), (7, 33), (16, 64), (53, 601), (100, 1152), (210, 320)] {
            for tokens in [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 40, 130] {
                let pool = Pool::new();
                let x = Activation::from_rows(&pool, &numbers(1, tokens * width), width);
                let low = Activation::from_rows(&pool, &numbers(3, tokens * 5), 5);
                let b = numbers(4, rows * 5);
                let (bias, start) = (numbers(5, rows), Activation::from_rows(&pool, &numbers(6, tokens * rows), rows));
                each_form(rows, width, |name, store| {
                    let made = Interleaved::new(store, width, Number::F32).expect(name);
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
                        let got = run(Store::Interleaved(&made));
                        let expected = match parts(store, width) {
                            // As the one that it was made of.
                            None => run(store),
                            Some((values, scales, fold)) => {
                                let (x, low, old) = (x.to_rows(), low.to_rows(), start.to_rows());
                                let of = |index: usize| {
                                    let (token, row) = (index / rows, index % rows);
                                    let first = [0.0, bias[row], old[index], old[index]][case];
                                    let own = row * width..(row + 1) * width;
                                    let x = &x[token * width..][..width];
                                    let sum = row_sum(first, x, [&values[own.clone()], &scales[own]], fold, level);
                                    let add = |sum: f32, (&a, &b): (&f32, &f32)| {
                                        if level == Level::Portable { a * b + sum } else { a.mul_add(b, sum) }
                                    };
                                    let update = b[row * 5..][..5].iter().zip(&low[token * 5..][..5]);
                                    if case % 2 == 0 { update.fold(sum, add) } else { sum }
                                };
                                (0..tokens * rows).map(of).collect()
                            }
                        };
                        assert!(got == expected, "{level:?} {name} {tokens} tokens, {rows} x {width}, case {case}");
                    }
                });
            }
        }
    });
}

#[test]
fn a_transposed_product_has_the_same_sums() {
    each_level(|level| {
        for (rows, width) in [(1, 1), (7, 33), (16, 64), (53, 601), (210, 320)] {
            for tokens in [1, 2, 3, 4, 5, 8, 9, 16, 17] {
                let pool = Pool::new();
                let x = Activation::from_rows(&pool, &numbers(1, tokens * width), width);
                let check = |name: &str, store: Store<'_>| {
                    let term = Term { matrix: Matrix::rows(store, width), x: &x };
                    let mut expected = pool.act(tokens, rows);
                    matmul(&mut expected, Init::Zero, &[term]);
                    let got = matmul_transposed(&pool, rows, term);
                    assert_eq!(got.is_none(), tokens > 16);
                    let Some(got) = got else { return };
                    let (got, expected) = (got.to_rows(), expected.to_rows());
                    let same = (0..rows * tokens).all(|at| got[at] == expected[at % tokens * rows + at / tokens]);
                    assert!(same, "{level:?} {name} {tokens} tokens, {rows} x {width}");
                };
                each_form(rows, width, |name, store| {
                    check(name, store);
                    check(name, Store::Interleaved(&Interleaved::new(store, width, Number::F32).expect(name)));
                });
            }
        }
    });
}

#[test]
fn products_with_a_vector_have_the_sums_of_one_token() {
    each_level(|level| {
        for (rows, width) in [(1, 1), (7, 33), (16, 64), (53, 601), (210, 320)] {
            let (pool, bias) = (Pool::new(), numbers(5, rows));
            let x = Activation::from_rows(&pool, &numbers(1, width), width);
            let vector = x.to_vector();
            assert_eq!((vector.tokens(), vector.features(), vector.to_rows()), (width, 1, x.to_rows()));
            let start = Activation::from_rows(&pool, &numbers(6, rows), rows);
            let check = |name: &str, store: Store<'_>| {
                let matrix = Matrix::rows(store, width);
                let inits = [Init::Zero, Init::Bias((&bias[..]).into()), Init::Add(&start), Init::Out];
                let expected = inits.map(|init| {
                    let mut out = start.copy();
                    matmul(&mut out, init, &[Term { matrix, x: &x }]);
                    out.to_rows()
                });
                for (init, expected) in inits.into_iter().zip(&expected) {
                    let mut out = start.copy();
                    matvec(&mut out, init, matrix, &vector);
                    assert!(out.to_rows() == *expected, "{level:?} {name}, {rows} x {width}");
                }
                let both = matvec_grouped(&[(rows, inits[0], matrix), (rows, inits[1], matrix)], &vector);
                let same = both.iter().zip(&expected).all(|(got, expected)| got.to_rows() == *expected);
                assert!(same, "{level:?} {name}, {rows} x {width}");
            };
            each_form(rows, width, |name, store| {
                check(name, store);
                check(name, Store::Interleaved(&Interleaved::new(store, width, Number::F32).expect(name)));
            });
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
            let made = Interleaved::new(Store::from(&values[..]), width, Number::Bf16).expect("floats are rearranged");
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
    assert!(Interleaved::new(Store::Quantized(&four), 32, Number::F32).is_none());
    let eight = Eight::new(vec![1; 8], vec![1.0; 2], 4).map(Quantized::Eight).unwrap();
    assert!(Interleaved::new(Store::Quantized(&eight), 8, Number::F32).is_none(), "another width");
}
