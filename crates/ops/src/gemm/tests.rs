//! Both products against their plain sums.
use super::*;
use crate::activation::{Activation, Pool};
use crate::quant::Quantized;
use crate::testing::{each_engine, each_level, near, numbers};
use half::bf16;

#[test]
fn matmul_equals_the_plain_sum_on_odd_sizes() {
    each_engine(|engine| {
        for (tokens, depth, rows) in
            [(1, 1, 1), (5, 3, 7), (17, 33, 16), (40, 600, 29), (130, 600, 53), (33, 1100, 100), (300, 16, 130)]
        {
            let pool = engine.pool();
            let (x, w) = (numbers(1, tokens * depth), numbers(2, rows * depth));
            let (z, b) = (numbers(3, tokens * 5), numbers(4, rows * 5));
            let (bias, addend) = (numbers(5, rows), numbers(6, tokens * rows));
            let (xa, za) = (Activation::from_rows(&pool, &x, depth), Activation::from_rows(&pool, &z, 5));
            let added = Activation::from_rows(&pool, &addend, rows);
            let wt: Vec<f32> = (0..depth * rows).map(|i| w[i % rows * depth + i / rows]).collect();
            let [wd, wtd, bd, bias_there] = [&w, &wt, &b, &bias].map(|values| engine.array(values));
            // Every second number of both: neither stride is 1.
            let spread: Vec<f32> = w.iter().flat_map(|&value| [value, 9.0]).collect();
            let spread = engine.array(&spread);
            for (case, init) in
                [Init::Zero, Init::Bias(bias_there.view()), Init::Add(&added), Init::Out].into_iter().enumerate()
            {
                for matrix in [
                    Matrix::rows(wd.view(), depth),
                    Matrix::transposed(wtd.view(), rows),
                    Matrix::strided(spread.view(), 2 * depth, 2),
                ] {
                    let mut out = added.copy();
                    let terms = [Term { matrix, x: &xa }, Term { matrix: Matrix::rows(bd.view(), 5), x: &za }];
                    matmul(&mut out, init, &terms);
                    let start = [vec![0.0; tokens * rows], bias.repeat(tokens), addend.clone(), addend.clone()];
                    let expected = reference::matmul(&start[case], rows, &[(&w, &x, depth), (&b, &z, 5)]);
                    for (at, (got, sum)) in out.to_rows().into_iter().zip(expected).enumerate() {
                        assert!((f64::from(got) - sum).abs() < 1e-4, "{engine:?} {case} [{at}]: {got} != {sum}");
                    }
                }
            }
        }
    });
}

#[test]
fn a_bf16_matrix_multiplies_as_its_values_do() {
    each_engine(|engine| {
        for (tokens, depth, rows) in
            [(1, 1, 1), (5, 3, 7), (17, 33, 16), (40, 600, 29), (33, 1100, 100), (130, 600, 101)]
        {
            let pool = engine.pool();
            let narrow: Vec<bf16> = numbers(2, rows * depth).into_iter().map(bf16::from_f32).collect();
            let wide: Vec<f32> = narrow.iter().map(|value| value.to_f32()).collect();
            let x = Activation::from_rows(&pool, &numbers(1, tokens * depth), depth);
            let (nd, wd) = (engine.array(&narrow), engine.array(&wide));
            let run = |matrix| {
                let mut out = pool.act(tokens, rows);
                matmul(&mut out, Init::Zero, &[Term { matrix, x: &x }]);
                out.to_rows()
            };
            let same = run(Matrix::rows(Store::Bf16(nd.view()), depth)) == run(Matrix::rows(wd.view(), depth));
            assert!(same, "{engine:?} rows [{tokens}, {depth}, {rows}]");
            // The same numbers as a matrix [depth, rows], transposed.
            let turned = Matrix::transposed(Store::Bf16(nd.view()), rows);
            assert!(run(turned) == run(Matrix::transposed(wd.view(), rows)), "{engine:?} transposed");
            let mut part = vec![0.0; depth.min(rows)];
            Store::Bf16(nd.view()).widen(1.min(narrow.len() - part.len()), &mut part);
            assert!(part == wide[1.min(narrow.len() - part.len())..][..part.len()]);
        }
    });
}

#[test]
fn a_matrix_in_a_maker_s_format_multiplies_as_its_values_do() {
    use crate::quant::tiles_tests::cases;
    each_engine(|engine| {
        for (tokens, depth, rows) in [(1, 2, 1), (5, 33, 7), (19, 64, 192), (18, 600, 101), (130, 130, 101)] {
            let pool = engine.pool();
            let x = Activation::from_rows(&pool, &numbers(1, tokens * depth), depth);
            let y = Activation::from_rows(&pool, &numbers(2, tokens * rows), rows);
            // Each case anew takes long: those that differ most.
            for (what, matrix, _) in cases(rows, depth).into_iter().step_by(if depth > 100 { 4 } else { 1 }) {
                let matrix = matrix.to(engine.device());
                let wide = engine.array(&matrix.dequantize());
                let run = |store, turned: bool| {
                    let (matrix, x, out) = if turned {
                        (Matrix::transposed(store, depth), &y, depth)
                    } else {
                        (Matrix::rows(store, depth), &x, rows)
                    };
                    let mut out = pool.act(tokens, out);
                    matmul(&mut out, Init::Zero, &[Term { matrix, x }]);
                    out.to_rows()
                };
                for turned in [false, true] {
                    let same = run(Store::Quantized(&matrix), turned) == run(Store::F32(wide.view()), turned);
                    assert!(same, "{engine:?} {what}, turned {turned}");
                }
            }
        }
    });
}

#[test]
fn outer_equals_the_plain_sum_on_odd_sizes() {
    each_engine(|engine| {
        for (tokens, rows, cols) in [(1, 1, 1), (5, 7, 3), (17, 16, 33), (40, 29, 16), (100, 130, 50), (33, 61, 70)] {
            let pool = engine.pool();
            let (y, x) = (numbers(1, tokens * rows), numbers(2, tokens * cols));
            let (ya, xa) = (Activation::from_rows(&pool, &y, rows), Activation::from_rows(&pool, &x, cols));
            let xt = Transposed::new(&xa);
            let [mut plain, mut turned] = [(); 2].map(|()| engine.array(&vec![1.0; rows * cols]));
            let mut spread = engine.array(&vec![1.0; 2 * rows * cols]);
            outer(Target::Rows(plain.view_mut()), &ya, &xt);
            outer(Target::Transposed(turned.view_mut()), &ya, &xt);
            outer(Target::Strided(spread.view_mut(), 2 * cols, 2), &ya, &xt);
            let [plain, turned, spread] = [plain, turned, spread].map(|array| array.read());
            assert!(spread.iter().skip(1).step_by(2).all(|&value| value == 1.0), "{engine:?}: between");
            let expected = reference::outer(&y, rows, &x, cols);
            for m in 0..rows {
                for n in 0..cols {
                    let sum = 1.0 + expected[m * cols + n];
                    assert!((f64::from(plain[m * cols + n]) - sum).abs() < 1e-4, "{engine:?} rows [{m},{n}]");
                    let there = spread[2 * (m * cols + n)];
                    assert!((f64::from(there) - sum).abs() < 1e-4, "{engine:?} strided [{m},{n}]");
                    assert!((f64::from(turned[n * rows + m]) - sum).abs() < 1e-4, "{engine:?} turned [{m},{n}]");
                }
            }
        }
    });
}

#[test]
fn a_quantized_matrix_multiplies_as_its_values_do() {
    use crate::quant::{Format, encode};
    each_engine(|engine| {
        // Odd widths begin rows in the middle of a byte; most begin them in the middle of a block.
        for (tokens, depth, rows) in [
            (1, 1, 1),
            (5, 3, 7),
            (17, 33, 16),
            (33, 600, 29),
            (19, 64, 192),
            (18, 1100, 101),
            (40, 5, 200),
            (130, 600, 101),
        ] {
            let pool = engine.pool();
            let values = numbers(2, rows * depth);
            let x = Activation::from_rows(&pool, &numbers(1, tokens * depth), depth);
            let z = Activation::from_rows(&pool, &numbers(3, tokens * 5), 5);
            let b = engine.array(&numbers(4, rows * 5));
            for (format, double) in
                [(Format::Nf4, false), (Format::Nf4, true), (Format::Fp4, true), (Format::Int8, false)]
            {
                let run = |matrix| {
                    let mut out = pool.act(tokens, rows);
                    let terms = [Term { matrix, x: &x }, Term { matrix: Matrix::rows(b.view(), 5), x: &z }];
                    matmul(&mut out, Init::Zero, &terms);
                    out.to_rows()
                };
                let what = format!("{engine:?} {format:?} {double} [{tokens}, {depth}, {rows}]");
                let quantized = encode::quantize(&values, depth, format, double).unwrap().to(engine.device());
                let wide = engine.array(&quantized.dequantize());
                let same =
                    run(Matrix::rows(Store::Quantized(&quantized), depth)) == run(Matrix::rows(wide.view(), depth));
                assert!(same, "{what}");
                // The same numbers as a matrix [depth, rows], transposed.
                let quantized = encode::quantize(&values, rows, format, double).unwrap().to(engine.device());
                let wide = engine.array(&quantized.dequantize());
                let turned = Matrix::transposed(Store::Quantized(&quantized), rows);
                assert!(run(turned) == run(Matrix::transposed(wide.view(), rows)), "{what} transposed");
                let wide = wide.read();
                assert_eq!(wide, encode::quantize(&values, rows, format, double).unwrap().dequantize(), "{what}");
                for start in [0, 1, values.len() / 3] {
                    let mut part = vec![0.0; (values.len() - start).min(77)];
                    Store::Quantized(&quantized).widen(start, &mut part);
                    assert!(part == wide[start..][..part.len()], "{what} from {start}");
                }
            }
        }
    });
}

#[test]
fn a_matrix_is_widened_in_slabs_of_any_size() {
    use crate::quant::{Format, encode};
    each_engine(|engine| {
        for (tokens, depth, rows) in [(5, 33, 17), (3, 40, 64)].into_iter().filter(|_| !engine.is_cpu()) {
            let pool = engine.pool();
            let values = numbers(2, rows * depth);
            let narrow: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
            let narrow = engine.array(&narrow);
            let quantized = encode::quantize(&values, depth, Format::Nf4, true).unwrap().to(engine.device());
            let x = Activation::from_rows(&pool, &numbers(1, tokens * depth), depth);
            let added = Activation::from_rows(&pool, &numbers(3, tokens * rows), rows);
            for store in [Store::Bf16(narrow.view()), Store::Quantized(&quantized)] {
                for matrix in [Matrix::rows(store, depth), Matrix::transposed(store, rows)] {
                    for init in [Init::Zero, Init::Add(&added)] {
                        let run = |slab: usize| {
                            let mut out = pool.act(tokens, rows);
                            let term = Term { matrix, x: &x };
                            cuda::matmul(&mut Product { out: &mut out, init, terms: &[term] }, slab);
                            out.to_rows()
                        };
                        let whole: Vec<f64> = run(usize::MAX).into_iter().map(f64::from).collect();
                        for slab in [1, 100, 301] {
                            near("slabs", &run(slab), &whole, 1e-5);
                        }
                    }
                }
            }
        }
    });
}

/// Matrices of so many rows and columns in each form that products with few tokens read in a way of its own, and in one they do not.
pub(super) struct Forms {
    pub(super) wide: Vec<f32>,
    pub(super) narrow: Vec<bf16>,
    pub(super) coded: Vec<(&'static str, Quantized)>,
}

impl Forms {
    pub(super) fn new(rows: usize, depth: usize) -> Self {
        use crate::quant::{Format, Four, encode};
        let wide = numbers(2, rows * depth);
        let narrow = wide.iter().copied().map(bf16::from_f32).collect();
        let mut coded = Vec::new();
        for (name, format, double) in [
            ("nf4", Format::Nf4, false),
            ("nested nf4", Format::Nf4, true),
            ("int8", Format::Int8, false),
            ("fp8", Format::Fp8, false),
        ] {
            coded.push((name, encode::quantize(&wide, depth, format, double).unwrap()));
        }
        if depth.is_multiple_of(32) {
            let bytes = |count: usize, of: usize| (0..count).map(|at| (at * 37 % of) as u8).collect::<Vec<_>>();
            let codes = || bytes(rows * depth / 2, 256);
            let scales = bytes(rows * depth / 32, 5).into_iter().map(|scale| 124 + scale).collect();
            coded.push(("mxfp4", Quantized::Four(Four::mxfp4(codes(), scales).unwrap())));
            let scales = bytes(rows * depth / 16, 64);
            coded.push(("nvfp4", Quantized::Four(Four::nvfp4(codes(), scales, |scale| scale * 0.25).unwrap())));
        }
        Self { wide, narrow, coded }
    }

    pub(super) fn stores(&self) -> Vec<(&'static str, Store<'_>)> {
        let mut stores = vec![("f32", Store::F32((&self.wide).into())), ("bf16", Store::Bf16((&self.narrow).into()))];
        stores.extend(self.coded.iter().map(|(name, matrix)| (*name, Store::Quantized(matrix))));
        stores
    }
}

#[test]
fn few_tokens_have_the_bits_that_they_have_among_many() {
    each_level(|level| {
        // Fewer rows than lanes, and more by one or many; whole chunks of columns, less than one, and odd ones; more than one stretch.
        for (depth, rows) in [(1, 1), (3, 7), (33, 17), (16, 32), (600, 37), (1100, 33), (576, 86), (64, 48)] {
            let (pool, forms) = (Pool::new(), Forms::new(rows, depth));
            let (b, bias) = (numbers(4, rows * 5), numbers(5, rows));
            let (x, z, rest) = (numbers(1, 17 * depth), numbers(3, 17 * 5), numbers(6, 17 * rows));
            let act = |tokens: usize, values: &[f32], width: usize| {
                Activation::from_rows(&pool, &values[..tokens * width], width)
            };
            for (index, (kind, store)) in forms.stores().into_iter().enumerate() {
                for case in if index < 2 { 0..4 } else { index % 4..index % 4 + 1 } {
                    let run = |tokens: usize| {
                        let (xa, za, added) = (act(tokens, &x, depth), act(tokens, &z, 5), act(tokens, &rest, rows));
                        let init = [Init::Zero, Init::Bias((&bias).into()), Init::Add(&added), Init::Out][case];
                        let mut out = added.copy();
                        let matrix = Matrix::rows(store, depth);
                        matmul(
                            &mut out,
                            init,
                            &[Term { matrix, x: &xa }, Term { matrix: Matrix::rows(&b[..], 5), x: &za }],
                        );
                        assert!(out.data().iter().all(|value| value.is_finite()));
                        out.to_rows().into_iter().map(f32::to_bits).collect::<Vec<_>>()
                    };
                    let many = run(17);
                    for tokens in [1, 2, 3, 4, 5, 8, 9, 16] {
                        let few = run(tokens);
                        assert!(few == many[..few.len()], "{level:?} {kind} case {case} [{depth}, {rows}], {tokens}");
                    }
                }
            }
        }
    });
}

#[test]
fn few_tokens_take_a_part_of_wider_rows() {
    each_level(|level| {
        let (pool, wide, depth, rows) = (Pool::new(), 200, 70, 40);
        let values = numbers(2, rows * wide);
        let cut: Vec<f32> = values.chunks(wide).flat_map(|row| &row[64..64 + depth]).copied().collect();
        for tokens in [1, 3, 7, 16] {
            let x = Activation::from_rows(&pool, &numbers(1, tokens * depth), depth);
            let run = |matrix| {
                let mut out = pool.act(tokens, rows);
                matmul(&mut out, Init::Zero, &[Term { matrix, x: &x }]);
                out.to_rows()
            };
            let part = Store::F32((&values[64..]).into());
            assert!(run(Matrix::rows(part, wide)) == run(Matrix::rows(&cut[..], depth)), "{level:?} {tokens}");
        }
    });
}

#[test]
fn products_of_a_group_have_the_bits_that_each_has_alone() {
    use crate::quant::{Format, encode};
    each_level(|level| {
        let pool = Pool::new();
        // Tokens, depth and rows of each: those of few tokens have rows in the lanes.
        for shapes in [
            vec![[1, 33, 17], [1, 600, 100], [1, 33, 5]],
            vec![[5, 3, 7], [40, 600, 29], [1, 33, 257], [33, 1100, 101], [300, 16, 130]],
        ] {
            let numbers = |seed: u64, count: usize| numbers(seed + 10 * count as u64, count);
            let shapes: Vec<_> = shapes.into_iter().map(|[tokens, depth, rows]| (tokens, depth, rows)).collect();
            let act =
                |seed, tokens: usize, width: usize| Activation::from_rows(&pool, &numbers(seed, tokens * width), width);
            let values: Vec<_> = shapes.iter().map(|&(_, depth, rows)| numbers(1, depth * rows)).collect();
            let halves: Vec<Vec<bf16>> =
                values.iter().map(|values| values.iter().copied().map(bf16::from_f32).collect()).collect();
            let quantized: Vec<_> = (values.iter().zip(&shapes))
                .map(|(values, &(_, depth, _))| encode::quantize(values, depth, Format::Nf4, true).unwrap())
                .collect();
            let (b, bias) = (numbers(2, 5 * 300), numbers(3, 300));
            let xs: Vec<_> = shapes.iter().map(|&(tokens, depth, _)| act(4, tokens, depth)).collect();
            let lows: Vec<_> = shapes.iter().map(|&(tokens, ..)| act(5, tokens, 5)).collect();
            let before: Vec<_> = shapes.iter().map(|&(tokens, _, rows)| act(6, tokens, rows)).collect();
            for kind in 0..3 {
                let terms: Vec<[Term<'_>; 2]> = (0..shapes.len())
                    .map(|at| {
                        let (_, depth, rows) = shapes[at];
                        let store = [
                            Store::F32((&values[at]).into()),
                            Store::Bf16((&halves[at]).into()),
                            Store::Quantized(&quantized[at]),
                        ][(at + kind) % 3];
                        let low = Matrix::rows(&b[..5 * rows], 5);
                        [Term { matrix: Matrix::rows(store, depth), x: &xs[at] }, Term { matrix: low, x: &lows[at] }]
                    })
                    .collect();
                let init = |at: usize| match (at + kind) % 4 {
                    0 => Init::Zero,
                    1 => Init::Bias(bias[..shapes[at].2].into()),
                    2 => Init::Out,
                    _ => Init::Add(&before[at]),
                };
                let mut together: Vec<_> = before.iter().map(Activation::copy).collect();
                let mut products: Vec<_> = (together.iter_mut().zip(&terms).enumerate())
                    .map(|(at, (out, terms))| Product { out, init: init(at), terms: &terms[..=(at + kind) % 2] })
                    .collect();
                matmul_grouped(&mut products);
                for (at, out) in together.iter().enumerate() {
                    let mut alone = before[at].copy();
                    matmul(&mut alone, init(at), &terms[at][..=(at + kind) % 2]);
                    assert!(alone.data() == out.data(), "{level:?} {kind}: product {at} of {shapes:?}");
                }
            }
        }
        matmul_grouped(&mut []);
    });
}

#[test]
fn many_terms_have_the_bits_of_products_that_add_to_one_another() {
    each_level(|level| {
        for tokens in [1, 5, 40] {
            let (pool, rows) = (Pool::new(), 29);
            // Wide and low-rank ones by turns, as the gradient of what q, k and v share.
            let depths = [600, 5, 33, 700, 8, 3];
            let xs: Vec<_> = (depths.iter())
                .map(|&depth| Activation::from_rows(&pool, &numbers(depth as u64, tokens * depth), depth))
                .collect();
            let matrices: Vec<_> = depths.iter().map(|&depth| numbers(7 + depth as u64, rows * depth)).collect();
            let narrow: Vec<bf16> = matrices[3].iter().copied().map(bf16::from_f32).collect();
            for transposed in [false, true] {
                let terms: Vec<Term<'_>> = (depths.iter().zip(&xs).enumerate())
                    .map(|(at, (&depth, x))| {
                        let store =
                            if at == 3 { Store::Bf16((&narrow).into()) } else { Store::F32((&matrices[at]).into()) };
                        let matrix =
                            if transposed { Matrix::transposed(store, rows) } else { Matrix::rows(store, depth) };
                        Term { matrix, x }
                    })
                    .collect();
                let start = Activation::from_rows(&pool, &numbers(3, tokens * rows), rows);
                let (mut once, mut one_by_one) = (start.copy(), start.copy());
                matmul(&mut once, Init::Out, &terms);
                for &term in &terms {
                    matmul(&mut one_by_one, Init::Out, &[term]);
                }
                assert!(once.data() == one_by_one.data(), "{level:?} {tokens} tokens, transposed: {transposed}");
            }
        }
    });
}

#[test]
fn a_gpu_may_round_operands_to_tf32() {
    each_engine(|engine| {
        let round = |values: &[f32]| -> Vec<f32> {
            let of = |&value: &f32| f32::from_bits((value.to_bits() + 0xfff + ((value.to_bits() >> 13) & 1)) & !0x1fff);
            values.iter().map(of).collect()
        };
        for may in [false, true].into_iter().filter(|_| !engine.is_cpu()) {
            let (tokens, depth, rows) = (17, 33, 16);
            let pool = engine.pool();
            pool.set_tf32(may);
            let (x, w, y) = (numbers(1, tokens * depth), numbers(2, rows * depth), numbers(3, tokens * rows));
            let as_read = |values: &[f32]| if may { round(values) } else { values.to_vec() };
            let (xa, ya) = (Activation::from_rows(&pool, &x, depth), Activation::from_rows(&pool, &y, rows));
            let wa = engine.array(&w);
            let mut out = pool.act(tokens, rows);
            matmul(&mut out, Init::Zero, &[Term { matrix: Matrix::rows(Store::F32(wa.view()), depth), x: &xa }]);
            let mut gradient = engine.array(&vec![0.0; rows * depth]);
            outer(Target::Rows(gradient.view_mut()), &ya, &Transposed::new(&xa));
            let expected = reference::matmul(&vec![0.0; tokens * rows], rows, &[(&as_read(&w), &as_read(&x), depth)]);
            let of_outer = reference::outer(&as_read(&y), rows, &as_read(&x), depth);
            for (got, sum) in out.to_rows().into_iter().zip(expected).chain(gradient.read().into_iter().zip(of_outer)) {
                assert!((f64::from(got) - sum).abs() < 2e-5, "{may}: {got} != {sum}");
            }
        }
    });
}

#[test]
fn a_gpu_multiplies_in_bfloat16_what_rounded_operands_give() {
    use crate::activation::Number;
    use crate::quant::{Format, encode};
    each_engine(|engine| {
        let round = |values: &[f32]| values.iter().map(|&value| bf16::from_f32(value).to_f32()).collect::<Vec<_>>();
        for (tokens, depth, rows) in
            [(1, 1, 1), (5, 3, 7), (17, 33, 16), (40, 300, 29)].into_iter().filter(|_| !engine.is_cpu())
        {
            let pool = engine.pool();
            pool.set_products(Number::Bf16);
            let (x, w) = (numbers(1, tokens * depth), numbers(2, rows * depth));
            let xa = Activation::from_rows(&pool, &x, depth);
            let narrow: Vec<bf16> = w.iter().copied().map(bf16::from_f32).collect();
            let (wide, narrow) = (engine.array(&w), engine.array(&narrow));
            let coded = encode::quantize(&w, depth, Format::Nf4, true).unwrap();
            let (coded, codes) = (coded.to(engine.device()), round(&coded.dequantize()));
            for (what, store, values) in [
                ("f32", Store::F32(wide.view()), round(&w)),
                ("bf16", Store::Bf16(narrow.view()), round(&w)),
                ("nf4", Store::Quantized(&coded), codes),
            ] {
                let mut out = pool.act(tokens, rows);
                matmul(&mut out, Init::Zero, &[Term { matrix: Matrix::rows(store, depth), x: &xa }]);
                let expected = reference::matmul(&vec![0.0; tokens * rows], rows, &[(&values, &round(&x), depth)]);
                for (got, sum) in out.to_rows().into_iter().zip(expected) {
                    assert!((f64::from(got) - sum).abs() < 1e-4, "{what} [{tokens}, {depth}, {rows}]: {got} != {sum}");
                }
            }
            let y = numbers(3, tokens * rows);
            let mut gradient = engine.array(&vec![0.0; rows * depth]);
            let ya = Activation::from_rows(&pool, &y, rows);
            outer(Target::Rows(gradient.view_mut()), &ya, &Transposed::new(&xa));
            for (got, sum) in gradient.read().into_iter().zip(reference::outer(&round(&y), rows, &round(&x), depth)) {
                assert!((f64::from(got) - sum).abs() < 1e-4, "outer [{tokens}, {depth}, {rows}]: {got} != {sum}");
            }
        }
    });
}
