//! Products in tiles of AMX against what the processor's manual says of `TDPBF16PS`. They run where the processor has tiles.
use super::*;
use crate::activation::{Activation, Number, Pool};
use crate::simd::Level;
use crate::testing::{each_level, numbers};
use half::bf16;
use std::sync::Arc;

/// A pool whose products round their operands to bfloat16, on threads that use tiles.
fn in_tiles(test: impl Fn(&Arc<Pool>) + Sync) {
    each_level(|level| {
        if level == Level::Amx {
            let pool = Pool::new();
            pool.set_products(Number::Bf16);
            test(&pool);
        }
    });
}

/// `sum + a b`, as the instruction adds 32 products at a time: even and odd ones in a sum each, then both to `sum`. `a` and `b` are rounded.
fn summed(mut sum: f32, a: &[f32], b: &[f32]) -> f32 {
    let round = |value: &f32| bf16::from_f32(*value).to_f32();
    for (a, b) in a.chunks(32).zip(b.chunks(32)) {
        let mut halves = [0.0f32; 2];
        for (at, (a, b)) in a.iter().zip(b).enumerate() {
            halves[at % 2] = round(a).mul_add(round(b), halves[at % 2]);
        }
        sum += halves[0] + halves[1];
    }
    sum
}

/// Columns of `[rows, cols]`, one after the other.
fn turned(values: &[f32], cols: usize) -> Vec<f32> {
    let rows = values.len() / cols;
    (0..values.len()).map(|at| values[at % rows * cols + at / rows]).collect()
}

#[test]
fn products_in_tiles_have_the_bits_of_the_instruction() {
    in_tiles(|pool| {
        // Tiles that are whole, or lack rows, panels, or features; two blocks of the sum; activations rounded by each task (one row of
        // a large one) or for all.
        for (tokens, depth, rows) in
            [(32, 64, 64), (1, 1, 1), (17, 33, 16), (40, 700, 50), (33, 1333, 100), (300, 31, 9)]
        {
            let (x, w, start) = (numbers(1, tokens * depth), numbers(2, rows * depth), numbers(3, tokens * rows));
            let (z, b, bias) = (numbers(4, tokens * 5), numbers(5, rows * 5), numbers(6, rows));
            let (xa, za) = (Activation::from_rows(pool, &x, depth), Activation::from_rows(pool, &z, 5));
            let added = Activation::from_rows(pool, &start, rows);
            let wt = turned(&w, depth);
            let narrow = [&w, &wt].map(|values| values.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>());
            for (case, init) in
                [Init::Zero, Init::Bias((&bias[..]).into()), Init::Add(&added), Init::Out].into_iter().enumerate()
            {
                for matrix in [
                    Matrix::rows(&w[..], depth),
                    Matrix::transposed(&wt[..], rows),
                    Matrix::rows(Store::Bf16(narrow[0].as_slice().into()), depth),
                    Matrix::transposed(Store::Bf16(narrow[1].as_slice().into()), rows),
                ] {
                    let mut out = added.copy();
                    let second = Term { matrix: Matrix::rows(&b[..], 5), x: &za };
                    matmul(&mut out, init, &[Term { matrix, x: &xa }, second]);
                    for (at, got) in out.to_rows().into_iter().enumerate() {
                        let (token, row) = (at / rows, at % rows);
                        let begin = [0.0, bias[row], start[at], start[at]][case];
                        let first = summed(begin, &w[row * depth..][..depth], &x[token * depth..][..depth]);
                        let expected = summed(first, &b[row * 5..][..5], &z[token * 5..][..5]);
                        let same = got.to_bits() == expected.to_bits();
                        assert!(same, "[{tokens}, {depth}, {rows}] {case} {matrix:?}: {got} at {at}, not {expected}");
                    }
                }
            }
        }
    });
}

/// A pool whose products split activations, on threads that use tiles.
fn split(test: impl Fn(&Arc<Pool>) + Sync) {
    each_level(|level| {
        if level == Level::Amx {
            let pool = Pool::new();
            pool.set_splits(true);
            test(&pool);
        }
    });
}

/// `sum + a b`, as [`summed`] adds the products of `a` with each of the three numbers of `b`'s numbers.
fn summed_in_parts(mut sum: f32, a: &[f32], b: &[f32]) -> f32 {
    for (a, b) in a.chunks(32).zip(b.chunks(32)) {
        let mut missing = b.to_vec();
        for _ in 0..3 {
            sum = summed(sum, a, &missing);
            for x in &mut missing {
                *x -= bf16::from_f32(*x).to_f32();
            }
        }
        assert!(missing.iter().all(|&x| x == 0.0), "three numbers are all of it");
    }
    sum
}

#[test]
fn products_of_split_activations_have_the_bits_of_the_instruction() {
    split(|pool| {
        // As above; the last one is cut along the sum.
        for (tokens, depth, rows) in
            [(32, 64, 64), (1, 1, 1), (17, 33, 16), (40, 700, 50), (33, 1333, 100), (300, 31, 9), (300, 2100, 8)]
        {
            let (x, w, start) = (numbers(1, tokens * depth), numbers(2, rows * depth), numbers(3, tokens * rows));
            let (z, b, bias) = (numbers(4, tokens * 5), numbers(5, rows * 5), numbers(6, rows));
            let (xa, za) = (Activation::from_rows(pool, &x, depth), Activation::from_rows(pool, &z, 5));
            let added = Activation::from_rows(pool, &start, rows);
            let narrow =
                [w.clone(), turned(&w, depth)].map(|values| values.into_iter().map(bf16::from_f32).collect::<Vec<_>>());
            for (case, init) in
                [Init::Zero, Init::Bias((&bias[..]).into()), Init::Add(&added), Init::Out].into_iter().enumerate()
            {
                for matrix in [
                    Matrix::rows(Store::Bf16(narrow[0].as_slice().into()), depth),
                    Matrix::transposed(Store::Bf16(narrow[1].as_slice().into()), rows),
                ] {
                    let second = Term { matrix: Matrix::rows(&b[..], 5), x: &za };
                    let (mut alone, mut both) = (added.copy(), added.copy());
                    matmul(&mut alone, init, &[Term { matrix, x: &xa }]);
                    matmul(&mut both, init, &[Term { matrix, x: &xa }, second]);
                    let both = both.to_rows();
                    for (at, got) in alone.to_rows().into_iter().enumerate() {
                        let (token, row) = (at / rows, at % rows);
                        let begin = [0.0, bias[row], start[at], start[at]][case];
                        let expected = summed_in_parts(begin, &w[row * depth..][..depth], &x[token * depth..][..depth]);
                        let (b, z) = (&b[row * 5..][..5], &z[token * 5..][..5]);
                        let then = b.iter().zip(z).fold(expected, |sum, (b, z)| b.mul_add(*z, sum));
                        let same = [got, both[at]].map(f32::to_bits) == [expected, then].map(f32::to_bits);
                        assert!(same, "[{tokens}, {depth}, {rows}] {case} {matrix:?}: {got} at {at}, not {expected}");
                    }
                }
            }
        }
    });
}

/// The root of the mean squared error of products of a pool, beside sums in float64.
fn error_of_products(pool: &Arc<Pool>) -> f64 {
    let (tokens, depth, rows) = (48, 3000, 40);
    let narrow: Vec<bf16> = numbers(1, rows * depth).into_iter().map(bf16::from_f32).collect();
    let x = numbers(2, tokens * depth);
    let mut out = pool.blank(tokens, rows);
    let matrix = Matrix::rows(Store::Bf16(narrow.as_slice().into()), depth);
    matmul(&mut out, Init::Zero, &[Term { matrix, x: &Activation::from_rows(pool, &x, depth) }]);
    let errors = out.to_rows().into_iter().enumerate().map(|(at, got)| {
        let (row, token) = (&narrow[at % rows * depth..][..depth], &x[at / rows * depth..][..depth]);
        let exact: f64 = row.iter().zip(token).map(|(a, b)| a.to_f64() * f64::from(*b)).sum();
        (f64::from(got) - exact).powi(2)
    });
    (errors.sum::<f64>() / (tokens * rows) as f64).sqrt()
}

#[test]
fn products_of_split_activations_are_as_exact_as_those_in_float32() {
    split(|pool| {
        let [splits, plain] = [error_of_products(pool), error_of_products(&Pool::new())];
        assert!(splits <= plain, "{splits:e}, {plain:e}");
    });
}

#[test]
fn gradients_in_tiles_have_the_bits_of_the_instruction() {
    in_tiles(|pool| {
        for (tokens, rows, cols) in [(32, 64, 64), (1, 1, 1), (17, 16, 33), (48, 16, 96), (100, 130, 16), (33, 61, 70)]
        {
            let (y, x, start) = (numbers(1, tokens * rows), numbers(2, tokens * cols), numbers(3, rows * cols));
            let (ya, xa) = (Activation::from_rows(pool, &y, rows), Activation::from_rows(pool, &x, cols));
            let xt = Transposed::new(&xa);
            let (mut plain, mut back) = (start.clone(), turned(&start, cols));
            outer(Target::Rows((&mut plain[..]).into()), &ya, &xt);
            outer(Target::Transposed((&mut back[..]).into()), &ya, &xt);
            let (yt, xt) = (turned(&y, rows), turned(&x, cols));
            let back = turned(&back, rows);
            for at in 0..rows * cols {
                let (row, col) = (at / cols, at % cols);
                let (y, x) = (&yt[row * tokens..][..tokens], &xt[col * tokens..][..tokens]);
                // Whole tiles that lie end to end are summed in place, others on their own.
                let [in_place, alone] = [summed(start[at], y, x), start[at] + summed(0.0, y, x)];
                let whole = |from: usize, all: usize| (all - from / 32 * 32).min(32).is_multiple_of(16);
                let expected = if whole(row, rows) && whole(col, cols) { in_place } else { alone };
                assert!(plain[at].to_bits() == expected.to_bits(), "[{tokens}, {rows}, {cols}] at {at}");
                assert!(back[at].to_bits() == alone.to_bits(), "[{tokens}, {rows}, {cols}] transposed, at {at}");
            }
        }
    });
}
