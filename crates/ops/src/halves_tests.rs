//! Ops on a GPU with activations of 16 bits: the results of float32 on the same numbers, rounded once.
use crate::activation::{Activation, Number, Pool};
use crate::gemm::{Init, Matrix, Store, Target, Term, Transposed, matmul, outer};
use crate::latent_heads::{self, LatentHeads};
use crate::loss::linear::{Objective, Projection, WeightGradient};
use crate::quant::{Format, encode};
use crate::rms_norm::Gain;
use crate::rope::Rope;
use crate::testing::{each_engine, numbers};
use crate::{
    block_diagonal, dropout, elementwise, embedding, feature_repeat, feature_scale, gated_mlp, noise, rms_norm,
};
use half::{bf16, f16};
use std::sync::Arc;
use tunesmith_device::{Array, Device};

/// Some results, each with how often its numbers were rounded to 16 bits on the way.
type Results = Vec<(&'static str, Vec<f32>, f32)>;

/// Half of the last place of a number in each 16-bit type is at most this share of it.
const UNITS: [(Number, f32); 2] = [(Number::Bf16, 1.0 / 256.0), (Number::F16, 1.0 / 2048.0)];

/// Runs `op` in float32 and in both 16-bit types, on inputs that all three hold exactly, and calls `check` for each of its results with
/// what was expected and found and the type's unit.
pub(crate) fn run_in_each<T>(
    op: impl Fn(&Arc<Pool>, &dyn Fn(u64, usize) -> Vec<f32>) -> Vec<T> + Sync,
    check: impl Fn(T, T, Number, f32) + Sync,
) {
    each_engine(|engine| {
        if engine.is_cpu() {
            return;
        }
        for (number, unit) in UNITS {
            let round = |value: f32| match number {
                Number::Bf16 => bf16::from_f32(value).to_f32(),
                _ => f16::from_f32(value).to_f32(),
            };
            let inputs = |seed: u64, count: usize| numbers(seed, count).into_iter().map(round).collect::<Vec<_>>();
            let half = engine.pool();
            half.set_number(number);
            let (expected, found) = (op(&engine.pool(), &inputs), op(&half, &inputs));
            for (expected, found) in expected.into_iter().zip(found) {
                check(expected, found, number, unit);
            }
        }
    });
}

/// Runs `op` in float32 and in both 16-bit types, on inputs that all three hold exactly, and compares.
fn compare(op: impl Fn(&Arc<Pool>, &dyn Fn(u64, usize) -> Vec<f32>) -> Results + Sync) {
    run_in_each(op, |(what, expected, times), (_, found, _), number, step| {
        assert_eq!(expected.len(), found.len(), "{what}");
        let largest = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        for (index, (e, f)) in expected.iter().zip(&found).enumerate() {
            // Sums lose digits of their largest part.
            let limit = times * step * e.abs().max(0.25 * largest) + 1e-6;
            assert!((e - f).abs() <= limit, "{what} in {number:?} [{index}]: {f} != {e}");
        }
    });
}

const SHAPES: [(usize, usize); 4] = [(1, 2), (5, 6), (17, 34), (33, 96)];

pub(crate) fn array(pool: &Arc<Pool>, values: &[f32]) -> Array<f32> {
    Array::of(pool.device(), values)
}

#[test]
fn copies_and_sums() {
    for (tokens, features) in SHAPES {
        compare(|pool, of| {
            let act = |seed| Activation::from_rows(pool, &of(seed, tokens * features), features);
            let (x, y) = (act(1), act(2));
            let mut out: Results = vec![("to_rows", x.to_rows(), 0.0), ("row", x.row(tokens - 1), 0.0)];
            out.push(("copy", x.copy().to_rows(), 0.0));
            out.push(("columns", x.columns(1..features).to_rows(), 0.0));
            out.push(("side_by_side", Activation::side_by_side(&[&x, &y]).to_rows(), 0.0));
            let rows: Vec<usize> = (0..tokens).step_by(2).collect();
            let picked = y.gather(&rows);
            out.push(("gather", picked.to_rows(), 0.0));
            out.push(("scatter", picked.scatter(&rows, tokens).to_rows(), 0.0));
            let mut sums = x.copy();
            sums.scatter_add(&rows, Some(&vec![0.5; rows.len()]), &picked);
            out.push(("scatter_add", sums.to_rows(), 1.0));
            sums.times(&vec![1.5; tokens]);
            out.push(("times", sums.to_rows(), 2.0));
            out.push(("dot", x.dot(&y), 0.01));
            let first = tokens / 16 * 16;
            if first < tokens {
                let part = x.rows(pool, first..tokens);
                out.push(("rows", part.to_rows(), 0.0));
                let mut whole = y.copy();
                whole.put_rows(first, &part);
                out.push(("put_rows", whole.to_rows(), 0.0));
            }
            let mut zero = x.copy();
            zero.zero();
            out.push(("zero", zero.to_rows(), 0.0));
            let mut mixed = x.copy();
            elementwise::axpby(0.75, &y, -0.5, &mut mixed);
            out.push(("axpby", mixed.to_rows(), 1.0));
            elementwise::fill(&mut mixed, 0.25);
            out.push(("fill", mixed.to_rows(), 0.0));
            elementwise::add(&mut mixed, &x);
            elementwise::scale(&mut mixed, 3.0);
            elementwise::add_bias(&mut mixed, array(pool, &of(3, features)).view());
            out.push(("add, scale, add_bias", mixed.to_rows(), 5.0));
            let mut d_bias = array(pool, &of(4, features));
            elementwise::add_bias_backward(&x, d_bias.view_mut());
            out.push(("add_bias_backward", d_bias.read(), 0.01));
            out
        });
    }
}

#[test]
fn norms_gates_and_turns() {
    for (tokens, features) in SHAPES {
        compare(|pool, of| {
            let act = |seed| Activation::from_rows(pool, &of(seed, tokens * features), features);
            let (x, dh) = (act(1), act(2));
            let weight = array(pool, &of(3, features));
            let gain = Gain { weight: weight.view(), offset: 1.0 };
            let rstd = rms_norm::stats(&x, 1, 1e-5);
            let mut out: Results = vec![("stats", rstd.to_rows(), 0.01)];
            out.push(("apply", rms_norm::apply(&x, &rstd, gain).to_rows(), 1.0));
            let mut dx = act(4);
            rms_norm::backward(&x, &rstd, gain, &dh, &mut dx, true);
            out.push(("norm's gradient", dx.to_rows(), 1.0));
            let mut dw = array(pool, &of(5, features));
            rms_norm::backward_weight(&x, &rstd, &dh, dw.view_mut());
            out.push(("weight's gradient", dw.read(), 0.01));
            let (mut gate, mut up) = (act(6), act(7));
            out.push(("gated", gated_mlp::forward(gated_mlp::Gate::Silu, &gate, &up).to_rows(), 1.0));
            gated_mlp::backward(gated_mlp::Gate::GeluTanh, &mut gate, &mut up, &dh);
            out.extend([("d_gate", gate.to_rows(), 1.0), ("d_up", up.to_rows(), 1.0)]);
            let frequencies = vec![0.3f32; features / 2];
            let rope = Rope::new(pool, [tokens], |_| (&frequencies[..], 1.0));
            let mut turned = act(8);
            rope.forward(&mut turned, features, 0);
            out.push(("rope", turned.to_rows(), 1.0));
            let drop = dropout::Dropout { rate: 0.25, key: 7, first_row: 3, rows: None };
            out.push(("dropout", drop.apply(&x).to_rows(), 1.0));
            let mut noisy = act(9);
            noise::add(&mut noisy, &[0, tokens], 5.0, 11, 0);
            out.push(("noise", noisy.to_rows(), 1.0));
            let how = LatentHeads { heads: 3, nope: 5, rope: 4, value: features };
            let wide = |seed, width| Activation::from_rows(pool, &of(seed, tokens * width), width);
            let (k, v) = latent_heads::forward(&wide(15, 3 * (5 + features)), &wide(16, 4), how);
            out.extend([("latent keys", k.to_rows(), 0.0), ("latent values", v.to_rows(), 0.0)]);
            let (d_kv, d_k_rot) = latent_heads::backward(&wide(17, 27), &wide(18, 3 * features), how);
            out.extend([("d_kv", d_kv.to_rows(), 0.0), ("d_k_rot", d_k_rot.to_rows(), 1.0)]);
            out.push(("repeated", feature_repeat::forward(&x, 3).to_rows(), 0.0));
            out.push(("summed", feature_repeat::backward(&wide(19, 3 * features), 3).to_rows(), 1.0));
            let gains = array(pool, &of(10, features));
            out.push(("feature_scale", feature_scale::times(&x, gains.view()).to_rows(), 1.0));
            let mut added = act(11);
            feature_scale::add(&mut added, &x, gains.view());
            out.push(("feature_scale::add", added.to_rows(), 1.0));
            let mut magnitude = array(pool, &of(12, features));
            let norm = array(pool, &vec![2.0; features]);
            feature_scale::backward(&dh, &x, norm.view(), magnitude.view_mut());
            out.push(("magnitude", magnitude.read(), 0.01));
            let matrices = array(pool, &of(13, features * 2));
            let diagonal = block_diagonal::Diagonal { matrices: matrices.view(), size: 2 };
            let mut times = act(14);
            block_diagonal::times(diagonal, &x, true, &mut times, true);
            out.push(("block_diagonal", times.to_rows(), 1.0));
            out.push(("block_diagonal::outer", block_diagonal::outer(2, &x, &dh), 0.01));
            out
        });
    }
}

#[test]
fn embeddings_and_products() {
    for (tokens, features) in SHAPES {
        let rows = features + 3;
        compare(|pool, of| {
            let device = pool.device();
            let act = |seed, width: usize| Activation::from_rows(pool, &of(seed, tokens * width), width);
            let (x, y) = (act(1, features), act(2, rows));
            let ids: Vec<u32> = (0..tokens as u32).map(|token| token % rows as u32).collect();
            let table = array(pool, &of(3, rows * features));
            let embedded = embedding::forward(pool, table.view().into(), features, &ids, 1.5);
            let mut out: Results = vec![("embedding", embedded.to_rows(), 1.0)];
            let mut d_table = array(pool, &of(4, rows * features));
            embedding::backward(&x, &ids, 0.5, None, d_table.view_mut());
            out.push(("embedding's gradient", d_table.read(), 0.01));

            let narrow: Vec<bf16> = table.read().into_iter().map(bf16::from_f32).collect();
            let narrow = Array::of(device, &narrow);
            let bias = array(pool, &of(5, rows));
            let coded = encode::quantize(&table.read(), features, Format::Nf4, true).unwrap().to(device);
            let stores = [Store::F32(table.view()), Store::Bf16(narrow.view()), Store::Quantized(&coded)];
            for (what, store) in ["float32", "bfloat16", "NF4"].into_iter().zip(stores) {
                let matrix = Matrix::rows(store, features);
                for init in [Init::Zero, Init::Bias(bias.view()), Init::Out, Init::Add(&y)] {
                    let mut product = act(6, rows);
                    matmul(&mut product, init, &[Term { matrix, x: &x }, Term { matrix, x: &x }]);
                    // The matrix is rounded too.
                    out.push((what, product.to_rows(), 5.0));
                }
                let mut back = act(7, features);
                matmul(&mut back, Init::Zero, &[Term { matrix: Matrix::transposed(store, features), x: &y }]);
                out.push((what, back.to_rows(), 5.0));
            }
            let mut gradient = array(pool, &of(8, rows * features));
            outer(Target::Rows(gradient.view_mut()), &y, &Transposed::new(&x));
            out.push(("outer", gradient.read(), 0.01));
            out
        });
    }
}

#[test]
fn the_loss_of_a_linear_head() {
    let (tokens, hidden, outputs) = (37, 16, 50);
    compare(|pool, of| {
        let h = Activation::from_rows(pool, &of(1, tokens * hidden), hidden);
        let weight = array(pool, &of(2, outputs * hidden));
        let logits = Pool::on(pool.device());
        logits.set_products(pool.products());
        let head = Projection { weight: weight.view().into(), outputs, softcap: None, pool: &logits };
        let targets: Vec<u32> = (0..tokens as u32).collect();
        let mut d_weight = array(pool, &vec![0.0; outputs * hidden]);
        let gradient = WeightGradient::Whole(d_weight.view_mut());
        let found = head.forward_backward(&h, &targets, Objective::default(), 0.5, gradient);
        let dh = found.dh.to_rows();
        let loss = found.losses.sum().0 as f32;
        vec![("dh", dh, 4.0), ("loss", vec![loss], 1.0), ("d_weight", d_weight.read(), 8.0)]
    });
    assert_eq!(Pool::on(Device::Cpu).number(), Number::F32);
}
