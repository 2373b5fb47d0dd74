//! Products whose operands are rounded to bfloat16 and multiplied in pairs.
use super::*;
use crate::activation::{Activation, Number, Pool};
use crate::simd::{in_tiles, pair_level};
use crate::testing::{each_level, near, numbers};
use half::bf16;
use tunesmith_device::Array;

/// The nearest numbers of bfloat16.
fn rounded(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&value| bf16::from_f32(value).to_f32()).collect()
}

/// Whether both are the same sums: to the bit, or within rounding where only one of them is summed in tiles of AMX.
fn same_sums(got: &[f32], expected: &[f32]) -> bool {
    let near = |(got, expected): (&f32, &f32)| (got - expected).abs() <= 1e-4 * expected.abs().max(1.0);
    if in_tiles() { got.iter().zip(expected).all(near) } else { got == expected }
}

/// A pool of the CPU whose products round their operands to bfloat16, at each level that has such products.
fn each_pair_level(test: impl Fn(&std::sync::Arc<Pool>) + Sync) {
    each_level(|_| {
        if pair_level().is_some() {
            let pool = Pool::new();
            pool.set_products(Number::Bf16);
            test(&pool);
        }
    });
}

#[test]
fn products_that_are_cut_along_the_sum_have_the_bits_of_whole_ones() {
    each_pair_level(|pool| {
        // With so many tokens, more is rounded than a test's products may round at once; with sixteen it is not.
        let (tokens, depth, rows, few) = (500, 1200, 900, 16);
        let (x, w, low) = (numbers(1, tokens * depth), numbers(2, rows * depth), numbers(3, rows * 8));
        let (thin, bias) = (numbers(4, tokens * 8), numbers(5, rows));
        let product = |tokens: usize, transposed: bool| {
            let [x, thin] = [(&x, depth), (&thin, 8)].map(|(x, of)| Activation::from_rows(pool, &x[..tokens * of], of));
            let mut out = pool.act(tokens, rows);
            let matrix = if transposed { Matrix::transposed(&w[..], rows) } else { Matrix::rows(&w[..], depth) };
            let terms = [Term { matrix, x: &x }, Term { matrix: Matrix::rows(&low[..], 8), x: &thin }];
            matmul(&mut out, Init::Bias((&bias[..]).into()), &terms);
            out.to_rows()
        };
        for transposed in [false, true] {
            let (whole, part) = (product(few, transposed), product(tokens, transposed));
            assert!(whole == part[..few * rows], "transposed: {transposed}");
        }
    });
}

#[test]
fn products_in_pairs_have_the_same_bits_with_any_number_of_threads() {
    use crate::quant::{Format, encode};
    each_pair_level(|pool| {
        // Sums of exactly as many blocks, of one number more, and of three blocks.
        for (tokens, depth, rows) in [(40, 1280, 64), (33, 641, 100), (500, 640, 130), (20, 2561, 35)] {
            let (x, w, y) = (numbers(1, tokens * depth), numbers(2, rows * depth), numbers(3, tokens * rows));
            let (xa, ya) = (Activation::from_rows(pool, &x, depth), Activation::from_rows(pool, &y, rows));
            let low = numbers(4, rows * 8);
            let thin = Activation::from_rows(pool, &numbers(5, tokens * 8), 8);
            let coded = encode::quantize(&w, depth, Format::Nf4, false).unwrap();
            let all = || {
                let mut bits = Vec::new();
                for store in [Store::from(&w[..]), Store::Quantized(&coded)] {
                    let mut out = pool.act(tokens, rows);
                    let second = Term { matrix: Matrix::rows(&low[..], 8), x: &thin };
                    matmul(&mut out, Init::Zero, &[Term { matrix: Matrix::rows(store, depth), x: &xa }, second]);
                    let mut back = pool.act(tokens, depth);
                    matmul(&mut back, Init::Zero, &[Term { matrix: Matrix::transposed(store, depth), x: &ya }]);
                    bits.extend([out.to_rows(), back.to_rows()].concat());
                }
                let mut gradient = vec![0.0; rows * depth];
                outer(Target::Rows((&mut gradient[..]).into()), &ya, &Transposed::new(&xa));
                bits.extend(gradient);
                bits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let with = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(all);
            let one = with(1);
            for threads in [2, 5] {
                assert!(one == with(threads), "[{tokens}, {depth}, {rows}] with {threads} threads");
            }
        }
    });
}

#[test]
fn few_tokens_in_pairs_have_the_bits_that_they_have_among_many() {
    each_pair_level(|pool| {
        for (depth, rows) in [(1, 1), (3, 7), (33, 17), (16, 32), (700, 37), (576, 86), (64, 48)] {
            let forms = super::tests::Forms::new(rows, depth);
            let (x, z, b) = (numbers(1, 17 * depth), numbers(3, 17 * 5), numbers(4, rows * 5));
            for (kind, store) in forms.stores() {
                let run = |tokens: usize| {
                    let xa = Activation::from_rows(pool, &x[..tokens * depth], depth);
                    let za = Activation::from_rows(pool, &z[..tokens * 5], 5);
                    let mut out = pool.act(tokens, rows);
                    let second = Term { matrix: Matrix::rows(&b[..], 5), x: &za };
                    matmul(&mut out, Init::Zero, &[Term { matrix: Matrix::rows(store, depth), x: &xa }, second]);
                    out.to_rows().into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let many = run(17);
                for tokens in [1, 2, 3, 4, 5, 8, 9, 16] {
                    let few = run(tokens);
                    assert!(few == many[..few.len()], "{kind} [{depth}, {rows}], {tokens} tokens");
                }
            }
        }
    });
}

#[test]
fn a_matrix_that_lies_in_pairs_has_the_products_of_one_in_rows() {
    each_pair_level(|pool| {
        // A pool of float32 gives the same: the matrix says how it is multiplied. A second term is multiplied as the pool says.
        let plain = Pool::new();
        for (rows, width) in [(1, 1), (7, 33), (16, 64), (53, 601), (100, 1152), (210, 1301), (650, 96)] {
            let values: Vec<bf16> = numbers(2, rows * width).into_iter().map(bf16::from_f32).collect();
            let store = Store::Bf16((&values[..]).into());
            let made = Interleaved::new(store, width, Number::Bf16).expect("numbers of 16 bits are rearranged");
            let (bias, b) = (numbers(5, rows), numbers(4, rows * 5));
            for tokens in [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 40, 130] {
                let of = |pool, seed, width| Activation::from_rows(pool, &numbers(seed, tokens * width), width);
                let (x, low, start) = (of(pool, 1, width), of(pool, 3, 5), of(pool, 6, rows));
                let inits = [Init::Zero, Init::Bias((&bias[..]).into()), Init::Add(&start), Init::Out];
                for (case, init) in inits.into_iter().enumerate() {
                    let run = |pool: &std::sync::Arc<Pool>, store: Store<'_>| {
                        let mut out = Activation::from_rows(pool, &start.to_rows(), rows);
                        let whole = Term { matrix: Matrix::rows(store, width), x: &x };
                        let update = Term { matrix: Matrix::rows(&b[..], 5), x: &low };
                        matmul(&mut out, init, &[whole, update][..2 - case % 2]);
                        out.to_rows()
                    };
                    let (got, expected) = (run(pool, Store::Interleaved(&made)), run(pool, store));
                    assert!(same_sums(&got, &expected), "{tokens} tokens, {rows} x {width}, case {case}");
                    if case % 2 == 1 {
                        let of_plain = run(&plain, Store::Interleaved(&made));
                        assert!(same_sums(&of_plain, &expected), "a pool of float32, case {case}");
                    }
                    if tokens == 1 {
                        let mut out = start.copy();
                        matvec(&mut out, init, Matrix::rows(Store::Interleaved(&made), width), &x.to_vector());
                        let whole = [Term { matrix: Matrix::rows(store, width), x: &x }];
                        let mut expected = start.copy();
                        matmul(&mut expected, init, &whole);
                        let same = same_sums(&out.to_rows(), &expected.to_rows());
                        assert!(same, "a vector, {rows} x {width}, case {case}");
                    }
                }
                let matrix = Matrix::rows(Store::Interleaved(&made), width);
                if let Some(turned) = matmul_transposed(pool, rows, Term { matrix, x: &x }) {
                    let mut expected = pool.act(tokens, rows);
                    matmul(&mut expected, Init::Zero, &[Term { matrix: Matrix::rows(store, width), x: &x }]);
                    let (got, expected) = (turned.to_rows(), expected.to_rows());
                    let back: Vec<f32> =
                        (0..rows * tokens).map(|at| expected[at % tokens * rows + at / tokens]).collect();
                    assert!(same_sums(&got, &back), "transposed, {tokens} tokens, {rows} x {width}");
                } else {
                    assert!(tokens > 16, "{tokens} tokens");
                }
            }
            let x = Activation::from_rows(pool, &numbers(1, width), width).to_vector();
            let matrix = Matrix::rows(Store::Interleaved(&made), width);
            let both =
                matvec_grouped(&[(rows, Init::Zero, matrix), (rows, Init::Bias((&bias[..]).into()), matrix)], &x);
            for (got, init) in both.iter().zip([Init::Zero, Init::Bias((&bias[..]).into())]) {
                let mut expected = pool.act(1, rows);
                matvec(&mut expected, init, matrix, &x);
                assert!(same_sums(&got.to_rows(), &expected.to_rows()), "vectors, {rows} x {width}");
            }
        }
    });
}

#[test]
fn products_side_by_side_may_lie_in_pairs_or_not() {
    each_pair_level(|pool| {
        let (rows, width) = (70, 96);
        let floats = numbers(2, rows * width);
        let values: Vec<bf16> = floats.iter().copied().map(bf16::from_f32).collect();
        let store = Store::Bf16((&values[..]).into());
        let made = Interleaved::new(store, width, Number::Bf16).expect("numbers of 16 bits are rearranged");
        let b = numbers(4, rows * 5);
        for tokens in [1, 6, 40] {
            let x = Activation::from_rows(pool, &numbers(1, tokens * width), width);
            let low = Activation::from_rows(pool, &numbers(3, tokens * 5), 5);
            let whole = [store, Store::Interleaved(&made), Store::from(&floats[..])]
                .map(|store| Term { matrix: Matrix::rows(store, width), x: &x });
            let update = Term { matrix: Matrix::rows(&b[..], 5), x: &low };
            let alone = |terms: &[Term<'_>]| {
                let mut out = pool.act(tokens, rows);
                matmul(&mut out, Init::Zero, terms);
                out.to_rows()
            };
            let terms = [&[whole[1], update][..], &[whole[2]], &[whole[1]]];
            let mut outs = terms.map(|_| pool.act(tokens, rows));
            let mut products: Vec<_> =
                outs.iter_mut().zip(terms).map(|(out, terms)| Product { out, init: Init::Zero, terms }).collect();
            matmul_grouped(&mut products);
            let expected = [alone(&[whole[0], update]), alone(&[whole[2]]), alone(&[whole[0]])];
            for (out, expected) in outs.iter().zip(expected) {
                assert!(same_sums(&out.to_rows(), &expected), "{tokens} tokens");
            }
        }
    });
}

#[test]
fn matmul_in_pairs_equals_the_plain_sum_of_rounded_operands() {
    each_pair_level(|pool| {
        // More than one block of the sum, more than one task of rows and of panels, odd sizes, a rank of 16.
        for (tokens, depth, rows, low) in [
            (2, 1, 1, 1),
            (5, 3, 7, 5),
            (17, 33, 16, 16),
            (40, 600, 29, 5),
            (33, 1333, 100, 16),
            (300, 16, 130, 40),
            (700, 70, 300, 16),
            // Rounded once for all tasks.
            (40, 701, 1801, 16),
        ] {
            let (x, w) = (numbers(1, tokens * depth), numbers(2, rows * depth));
            let (z, b) = (numbers(3, tokens * low), numbers(4, rows * low));
            let (bias, addend) = (numbers(5, rows), numbers(6, tokens * rows));
            let (xa, za) = (Activation::from_rows(pool, &x, depth), Activation::from_rows(pool, &z, low));
            let added = Activation::from_rows(pool, &addend, rows);
            let turned = |values: &[f32]| (0..depth * rows).map(|i| values[i % rows * depth + i / rows]).collect();
            let (wt, spread): (Vec<f32>, Vec<f32>) = (turned(&w), w.iter().flat_map(|&value| [value, 9.0]).collect());
            let narrow = |values: &[f32]| values.iter().copied().map(bf16::from_f32).collect::<Vec<_>>();
            let [n, nt, ns] = [&w, &wt, &spread].map(|values| Array::of(Device::Cpu, &narrow(values)));
            let [w_there, wt_there, spread, b_there, bias_there] =
                [&w, &wt, &spread, &b, &bias].map(|values| Array::of(Device::Cpu, values));
            for (case, init) in
                [Init::Zero, Init::Bias(bias_there.view()), Init::Add(&added), Init::Out].into_iter().enumerate()
            {
                let start = [vec![0.0; tokens * rows], bias.repeat(tokens), addend.clone(), addend.clone()];
                let terms = [(&*rounded(&w), &*rounded(&x), depth), (&*rounded(&b), &*rounded(&z), low)];
                let expected = reference::matmul(&start[case], rows, &terms);
                let mut first: Option<Vec<f32>> = None;
                for matrix in [
                    Matrix::rows(w_there.view(), depth),
                    Matrix::transposed(wt_there.view(), rows),
                    Matrix::strided(spread.view(), 2 * depth, 2),
                    Matrix::rows(Store::Bf16(n.view()), depth),
                    Matrix::transposed(Store::Bf16(nt.view()), rows),
                    Matrix::strided(Store::Bf16(ns.view()), 2 * depth, 2),
                ] {
                    let mut out = added.copy();
                    let terms = [Term { matrix, x: &xa }, Term { matrix: Matrix::rows(b_there.view(), low), x: &za }];
                    matmul(&mut out, init, &terms);
                    let got = out.to_rows();
                    near(&format!("[{tokens}, {depth}, {rows}] {case} {matrix:?}"), &got, &expected, 1e-4);
                    // However the matrix is stored, the same sums.
                    assert!(*first.get_or_insert_with(|| got.clone()) == got, "{case} {matrix:?}");
                }
            }
        }
    });
}

#[test]
fn products_of_one_activation_that_is_rounded_once_are_those_of_each_alone() {
    each_pair_level(|pool| {
        for tokens in [17, 40, 130] {
            let (depth, sizes) = (703, [700, 64, 401]);
            let x = Activation::from_rows(pool, &numbers(1, tokens * depth), depth);
            let low = Activation::from_rows(pool, &numbers(3, tokens * 5), 5);
            let weights = sizes.map(|rows| (numbers(2, rows * depth), numbers(4, rows * 5)));
            let terms: Vec<[Term<'_>; 2]> = weights
                .iter()
                .map(|(w, b)| {
                    [
                        Term { matrix: Matrix::rows(&w[..], depth), x: &x },
                        Term { matrix: Matrix::rows(&b[..], 5), x: &low },
                    ]
                })
                .collect();
            let alone = sizes.iter().zip(&terms).map(|(&rows, terms)| {
                let mut out = pool.act(tokens, rows);
                matmul(&mut out, Init::Zero, terms);
                out.to_rows()
            });
            let mut outs = sizes.map(|rows| pool.act(tokens, rows));
            let outs_and_terms = outs.iter_mut().zip(&terms);
            let mut products: Vec<_> =
                outs_and_terms.map(|(out, terms)| Product { out, init: Init::Zero, terms }).collect();
            matmul_grouped(&mut products);
            assert!(outs.iter().map(Activation::to_rows).eq(alone), "{tokens} tokens");
        }
    });
}

#[test]
fn a_quantized_matrix_in_pairs_multiplies_as_its_values_do() {
    use crate::quant::{Format, encode};
    each_pair_level(|pool| {
        for (tokens, depth, rows) in [(2, 1, 1), (5, 3, 7), (17, 33, 16), (33, 1100, 101), (19, 64, 220)] {
            let values = numbers(2, rows * depth);
            let x = Activation::from_rows(pool, &numbers(1, tokens * depth), depth);
            for (format, double) in [(Format::Nf4, true), (Format::Int8, false)] {
                for turned in [false, true] {
                    let width = if turned { rows } else { depth };
                    let run = |store: Store<'_>| {
                        let matrix = if turned { Matrix::transposed(store, rows) } else { Matrix::rows(store, depth) };
                        let mut out = pool.act(tokens, rows);
                        matmul(&mut out, Init::Zero, &[Term { matrix, x: &x }]);
                        out.to_rows()
                    };
                    let quantized = encode::quantize(&values, width, format, double).unwrap();
                    let wide = Array::of(Device::Cpu, &quantized.dequantize());
                    let same = run(Store::Quantized(&quantized)) == run(Store::F32(wide.view()));
                    // A strip has shorter blocks of the sum; float32 sums of blocks are what they are in one.
                    assert!(same, "{format:?} [{tokens}, {depth}, {rows}] turned {turned}");
                }
            }
        }
    });
}

#[test]
fn outer_in_pairs_equals_the_plain_sum_of_rounded_operands() {
    each_pair_level(|pool| {
        for (tokens, rows, cols) in
            [(1, 1, 1), (5, 7, 3), (17, 16, 33), (40, 29, 16), (100, 130, 50), (33, 61, 70), (4200, 13, 18)]
        {
            let (y, x) = (numbers(1, tokens * rows), numbers(2, tokens * cols));
            let (ya, xa) = (Activation::from_rows(pool, &y, rows), Activation::from_rows(pool, &x, cols));
            let xt = Transposed::new(&xa);
            let [mut plain, mut turned] = [(); 2].map(|()| Array::of(Device::Cpu, &vec![1.0; rows * cols]));
            outer(Target::Rows(plain.view_mut()), &ya, &xt);
            outer(Target::Transposed(turned.view_mut()), &ya, &xt);
            let expected: Vec<f64> =
                reference::outer(&rounded(&y), rows, &rounded(&x), cols).iter().map(|sum| 1.0 + sum).collect();
            near("rows", &plain.read(), &expected, 2e-4);
            let turned_back: Vec<f32> =
                (0..rows * cols).map(|at| turned.read()[at % cols * rows + at / cols]).collect();
            near("turned", &turned_back, &expected, 2e-4);
        }
    });
}

#[test]
fn the_instruction_gives_what_plain_arrays_do() {
    let results = std::sync::Mutex::new(Vec::new());
    each_pair_level(|pool| {
        if in_tiles() {
            return;
        }
        let (tokens, depth, rows) = (37, 701, 50);
        let x = Activation::from_rows(pool, &numbers(1, tokens * depth), depth);
        let w = Array::of(Device::Cpu, &numbers(2, rows * depth));
        let mut out = pool.act(tokens, rows);
        matmul(&mut out, Init::Zero, &[Term { matrix: Matrix::rows(w.view(), depth), x: &x }]);
        results.lock().unwrap().push(out.to_rows());
    });
    let results = results.into_inner().unwrap();
    assert!(results.iter().all(|result| *result == results[0]));
}
