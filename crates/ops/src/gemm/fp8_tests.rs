//! Products in FP8 on a GPU: what codes and scales give, so that products of dequantized numbers fail, and the other way round where a
//! GPU or a matrix does not allow them.
use super::*;
use crate::activation::{Number, Pool};
use crate::cuda::{Arg, Grid, launch};
use crate::fp8;
use crate::quant::{Format, Quantized, encode};
use crate::testing::{Engine, each_engine, numbers};
use half::{bf16, f16};
use std::process::Command;
use std::sync::Arc;

/// Half of the last place of a number in `number` is at most this share of it.
const fn unit(number: Number) -> f64 {
    match number {
        Number::F32 => 1.0 / (1u64 << 24) as f64,
        Number::Bf16 => 1.0 / 256.0,
        Number::F16 => 1.0 / 2048.0,
    }
}

fn round(number: Number, value: f32) -> f32 {
    match number {
        Number::F32 => value,
        Number::Bf16 => bf16::from_f32(value).to_f32(),
        Number::F16 => f16::from_f32(value).to_f32(),
    }
}

/// Rows of numbers in E4M3: what their codes mean, and a scale for each row.
struct Coded {
    values: Vec<f32>,
    scales: Vec<f32>,
}

impl Coded {
    fn new(rows: &[f32], width: usize) -> Self {
        let most = |row: &[f32]| row.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let scales: Vec<f32> = rows.chunks(width).map(|row| most(row) / fp8::LARGEST).collect();
        let code = |(at, value): (usize, &f32)| fp8::VALUES[usize::from(fp8::code(value / scales[at / width]))];
        Self { values: rows.iter().enumerate().map(code).collect(), scales }
    }

    /// `[tokens, rows]`: products with these rows as a matrix, and how far a GPU's may be off. Its sums lose bits, its sums are then rounded
    /// to bfloat16, and the result to the type of `to`.
    fn products(&self, x: &Self, width: usize, init: &[f32], to: Number) -> Vec<(f64, f64)> {
        let (rows, zeros) = (self.scales.len(), vec![0.0; init.len()]);
        let sums = reference::matmul(&zeros, rows, &[(&self.values, &x.values, width)]);
        let sizes = |values: &[f32]| values.iter().map(|value| value.abs()).collect::<Vec<_>>();
        let sizes = reference::matmul(&zeros, rows, &[(&sizes(&self.values), &sizes(&x.values), width)]);
        let each = sums.into_iter().zip(sizes).zip(init).enumerate();
        each.map(|(at, ((sum, size), &init))| {
            let scale = f64::from(self.scales[at % rows]) * f64::from(x.scales[at / rows]);
            let expected = f64::from(init) + sum * scale;
            // Tensor cores for FP8 keep some 13 bits behind the largest part of a sum.
            (expected, scale * (size / 8192.0 + unit(Number::Bf16) * sum.abs()) + unit(to) * expected.abs())
        })
        .collect()
    }
}

/// `[tokens, rows]` of rounded operands, and how far sums in float32 may be off that are rounded to the type of `to`.
fn of_dequantized([wide, x]: [&[f32]; 2], width: usize, init: &[f32], [operands, to]: [Number; 2]) -> Vec<(f64, f64)> {
    let rounded: Vec<f32> = wide.iter().map(|&value| round(operands, value)).collect();
    let rows = wide.len() / width;
    let sums = reference::matmul(init, rows, &[(&rounded, x, width)]);
    let sizes = |values: &[f32]| values.iter().map(|value| value.abs()).collect::<Vec<_>>();
    let sizes = reference::matmul(&sizes(init), rows, &[(&sizes(&rounded), &sizes(x), width)]);
    let limit = |size: f64, sum: f64| (width + 1) as f64 * unit(Number::F32) * size + unit(to) * sum.abs();
    sums.into_iter().zip(sizes).map(|(sum, size)| (sum, limit(size, sum))).collect()
}

/// Whether all numbers are within their limits.
fn fits(got: impl IntoIterator<Item = f64>, expected: &[(f64, f64)]) -> Result<(), String> {
    for (at, (got, (expected, limit))) in got.into_iter().zip(expected).enumerate() {
        if (got - expected).abs() > *limit {
            return Err(format!("[{at}]: {got} != {expected}, limit {limit}"));
        }
    }
    Ok(())
}

/// A product of `x [tokens, width]` with `matrix`, which starts from each kind of addend in turn. `expected` gives what it should be and
/// how far it may be off, given the numbers of `x` and of the addend.
fn check(
    pool: &Arc<Pool>,
    (matrix, rows): (Matrix<'_>, usize),
    (tokens, width): (usize, usize),
    expected: impl Fn(&[f32], &[f32]) -> Vec<(f64, f64)>,
    what: &str,
) {
    let x = Activation::from_rows(pool, &numbers(1, tokens * width), width);
    let added = Activation::from_rows(pool, &numbers(2, tokens * rows), rows);
    let bias = numbers(3, rows);
    let there = tunesmith_device::Array::of(pool.device(), &bias);
    let rounded: Vec<f32> = bias.iter().map(|&value| round(pool.number(), value)).collect();
    for (case, init) in [Init::Zero, Init::Bias(there.view()), Init::Add(&added), Init::Out].into_iter().enumerate() {
        let mut out = added.copy();
        matmul(&mut out, init, &[Term { matrix, x: &x }]);
        let start = [vec![0.0; tokens * rows], rounded.repeat(tokens), added.to_rows(), added.to_rows()];
        let expected = expected(&x.to_rows(), &start[case]);
        let fits = fits(out.to_rows().into_iter().map(f64::from), &expected);
        fits.unwrap_or_else(|error| panic!("{what} case {case}: {error}"));
    }
}

/// Pools whose products have operands of 16 bits, with activations of each type.
fn pools(engine: Engine) -> Vec<Arc<Pool>> {
    let of = |number: Number| {
        let pool = engine.pool();
        pool.set_number(number);
        if number == Number::F32 {
            pool.set_products(Number::Bf16);
        }
        pool
    };
    [Number::F32, Number::Bf16, Number::F16].map(of).into()
}

/// A matrix `[rows, width]`, and its numbers when they are dequantized.
fn matrix(engine: Engine, rows: usize, width: usize) -> (Quantized, Vec<f32>) {
    let coded = encode::quantize(&numbers(4, rows * width), width, Format::Fp8, false).unwrap();
    let wide = coded.dequantize();
    (coded.to(engine.device()), wide)
}

fn turned(wide: &[f32], width: usize) -> Vec<f32> {
    let rows = wide.len() / width;
    (0..wide.len()).map(|at| wide[at % rows * width + at / rows]).collect()
}

#[test]
fn a_gpu_multiplies_fp8_by_rows_and_by_columns() {
    each_engine(|engine| {
        let shapes = [(1, 16, 16), (5, 48, 32), (33, 64, 80), (17, 320, 48)];
        for (tokens, width, rows) in shapes.into_iter().filter(|_| engine.multiplies_fp8()) {
            let (coded, wide) = matrix(engine, rows, width);
            let store = Store::Quantized(&coded);
            for pool in pools(engine) {
                let number = pool.number();
                // Forward by the rows of W, backward by those of its transpose, which are quantized once more.
                for (matrix, rows, width, wide) in [
                    (Matrix::rows(store, width), rows, width, wide.clone()),
                    (Matrix::transposed(store, width), width, rows, turned(&wide, width)),
                ] {
                    let codes = Coded::new(&wide, width);
                    let what = format!("{number:?} [{tokens}, {width}, {rows}]");
                    let expected = |x: &[f32], init: &[f32]| {
                        let expected = codes.products(&Coded::new(x, width), width, init, number);
                        // The product of dequantized numbers is another one.
                        let other = of_dequantized([&wide, x], width, init, [Number::F32, number]);
                        assert!(fits(other.iter().map(|(sum, _)| *sum), &expected).is_err(), "{what}");
                        expected
                    };
                    check(&pool, (matrix, rows), (tokens, width), expected, &what);
                }
            }
        }
    });
}

fn check_dequantized(engine: Engine, tokens: usize, width: usize, rows: usize) {
    let (coded, wide) = matrix(engine, rows, width);
    let store = Store::Quantized(&coded);
    for pool in pools(engine) {
        let number = pool.number();
        let operands = if number == Number::F32 { Number::Bf16 } else { number };
        for (matrix, rows, width, wide) in [
            (Matrix::rows(store, width), rows, width, wide.clone()),
            (Matrix::transposed(store, width), width, rows, turned(&wide, width)),
        ] {
            let what = format!("{number:?} [{tokens}, {width}, {rows}]");
            let expected = |x: &[f32], init: &[f32]| {
                let x: Vec<f32> = x.iter().map(|&value| round(operands, value)).collect();
                of_dequantized([&wide, &x], width, init, [operands, number])
            };
            check(&pool, (matrix, rows), (tokens, width), expected, &what);
        }
    }
}

#[test]
fn a_matrix_whose_sides_are_no_multiples_of_16_is_dequantized() {
    each_engine(|engine| {
        for (tokens, width, rows) in [(1, 1, 1), (5, 48, 20), (17, 33, 64)].into_iter().filter(|_| !engine.is_cpu()) {
            check_dequantized(engine, tokens, width, rows);
        }
    });
}

/// In a process of its own, whose stand-in is an A100; or on this machine's GPU if it is as old.
#[test]
fn a_gpu_older_than_ada_multiplies_dequantized_numbers() {
    const CAPABILITY: &str = "TUNESMITH_STAND_IN_CAPABILITY";
    let here = std::env::var_os("TUNESMITH_TEST_GPU").is_some();
    if !here && std::env::var(CAPABILITY).as_deref() != Ok("80") {
        let name = "gemm::fp8_tests::a_gpu_older_than_ada_multiplies_dequantized_numbers";
        let mut again = Command::new(std::env::current_exe().unwrap());
        let ended = again.args(["--exact", name]).env(CAPABILITY, "80").output().unwrap();
        let said = String::from_utf8_lossy(&ended.stdout);
        return assert!(ended.status.success() && said.contains("1 passed"), "{said}");
    }
    each_engine(|engine| {
        assert!(here || !engine.multiplies_fp8(), "compute capability 8.0");
        let old = !engine.is_cpu() && !engine.multiplies_fp8();
        for (tokens, width, rows) in [(1, 16, 16), (33, 64, 80)].into_iter().filter(|_| old) {
            // No transpose is stored.
            assert_eq!(matrix(engine, rows, width).0.bytes(), rows * width + 4 * rows);
            check_dequantized(engine, tokens, width, rows);
        }
    });
}

#[test]
fn both_scales_multiply_a_sum_before_the_addend_joins() {
    each_engine(|engine| {
        for (tokens, rows) in [(1, 16), (7, 48), (33, 80)].into_iter().filter(|_| !engine.is_cpu()) {
            let sums: Vec<bf16> = numbers(1, tokens * rows).into_iter().map(|it| bf16::from_f32(100.0 * it)).collect();
            let (by_row, by_token) = (numbers(2, rows), numbers(3, tokens));
            let (there, of_rows, of_tokens) = (engine.array(&sums), engine.array(&by_row), engine.array(&by_token));
            for number in [Number::F32, Number::Bf16, Number::F16] {
                let pool = engine.pool();
                pool.set_number(number);
                let addend = Activation::from_rows(&pool, &numbers(4, tokens * rows), rows);
                for add in [false, true] {
                    let mut out = pool.act(tokens, rows);
                    let args = [
                        (&there).into(),
                        (&of_rows).into(),
                        (&of_tokens).into(),
                        if add { (&addend).into() } else { Arg::NULL },
                        (&mut out).into(),
                        Arg::count(tokens),
                        Arg::count(rows),
                    ];
                    let grid = Grid::packs(tokens * rows, Number::Bf16);
                    launch(engine.device(), super::cuda::KERNELS.of(number), "gemm_scale", grid, &args);
                    let start = if add { addend.to_rows() } else { vec![0.0; tokens * rows] };
                    let expected: Vec<(f64, f64)> = (0..tokens * rows)
                        .map(|at| {
                            let scale = f64::from(by_row[at % rows]) * f64::from(by_token[at / rows]);
                            let product = f64::from(sums[at].to_f32()) * scale;
                            let sum = f64::from(start[at]) + product;
                            // Two products and a sum in float32, and what is stored.
                            (sum, 4.0 * unit(Number::F32) * (product.abs() + sum.abs()) + unit(number) * sum.abs())
                        })
                        .collect();
                    let fits = fits(out.to_rows().into_iter().map(f64::from), &expected);
                    fits.unwrap_or_else(|error| panic!("{number:?}, addend {add}: {error}"));
                }
            }
        }
    });
}
