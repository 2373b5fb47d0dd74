//! `tunesmith bench --kernels`: the time of each op on one shape, as bytes and operations a second, on the CPU or a GPU.
use super::clock::{Clock, numbers};
use super::recurrent_bench;
use std::sync::Arc;
use tunesmith_base::error::Result;
use tunesmith_device::{Array, Device, memory};
use tunesmith_ops::activation::{Activation, Number, Pool};
use tunesmith_ops::attention::{self, Heads, Saved, Scores};
use tunesmith_ops::gated_mlp::{self, Gate};
use tunesmith_ops::gemm::{Init, Matrix, Store, Target, Term, Transposed, matmul, outer};
use tunesmith_ops::loss::linear::{Objective, Projection, WeightGradient};
use tunesmith_ops::quant::{Format, encode};
use tunesmith_ops::rms_norm::{self, Gain};
use tunesmith_ops::rope::Rope;
use tunesmith_ops::spans::full_spans;
use tunesmith_ops::{adamw, elementwise, embedding};

use half::bf16;
use tunesmith_config::arch::{Arch, AttentionSpec};

pub use super::clock::KernelLine;

/// Times each op on rows of `tokens` tokens with the sizes of the architecture. With `narrow`, activations are
/// bfloat16, on a GPU.
///
/// # Errors
/// [`tunesmith_base::Kind::Memory`]: no room for an op's operands. [`tunesmith_base::Kind::Device`].
pub fn measure(device: Device, arch: &Arch, tokens: usize, narrow: bool) -> Result<Vec<KernelLine>> {
    memory::guarded(|| {
        let mut clock = Clock::new(device);
        let pool = Pool::on(device);
        if narrow {
            pool.set_number(Number::Bf16);
        }
        let act = |features: usize| {
            let mut act = pool.act(tokens, features);
            elementwise::fill(&mut act, 0.5);
            act
        };
        lines(&mut clock, &pool, arch, &act)?;
        Ok(clock.lines)
    })
}

fn lines(clock: &mut Clock, pool: &Arc<Pool>, arch: &Arch, act: &dyn Fn(usize) -> Activation) -> Result<()> {
    let device = clock.device;
    let (hidden, wide) = (arch.hidden_size, arch.intermediate_size);
    let x = act(hidden);
    let tokens = x.tokens();
    let width = pool.number().bytes() as f64;
    let floats = |count: usize| width * count as f64;
    let shape = |features: usize| format!("[{tokens}, {features}]");
    let all = tokens * hidden;

    let mut y = act(hidden);
    clock.line("copy", shape(hidden), [floats(2 * all), 0.0], || elementwise::assign(&mut y, &x));
    clock.line("add", shape(hidden), [floats(3 * all), 0.0], || elementwise::add(&mut y, &x));

    let weight = Array::of(device, &numbers(hidden));
    let gain = || Gain { weight: weight.view(), offset: 0.0 };
    let rstd = rms_norm::stats(&x, 1, 1e-5);
    clock.line("rms_norm", shape(hidden), [floats(2 * all), 0.0], || {
        let rstd = rms_norm::stats(&x, 1, 1e-5);
        drop(rms_norm::apply(&x, &rstd, gain()));
    });
    clock.line("rms_norm backward", shape(hidden), [floats(4 * all), 0.0], || {
        rms_norm::backward(&x, &rstd, gain(), &x, &mut y, true);
    });

    let (mut gate, mut up, d_out) = (act(wide), act(wide), act(wide));
    let mlp = tokens * wide;
    clock.line("gated_mlp", shape(wide), [floats(3 * mlp), 0.0], || {
        drop(gated_mlp::forward(Gate::Silu, &gate, &up));
    });
    clock.line("gated_mlp backward", shape(wide), [floats(5 * mlp), 0.0], || {
        gated_mlp::backward(Gate::Silu, &mut gate, &mut up, &d_out);
    });
    drop((gate, d_out));

    products(clock, [hidden, wide], &x, &mut up)?;
    drop(up);
    if let Some(spec) = arch.blocks.iter().find_map(|block| block.attention()) {
        heads(clock, pool, spec, act);
    }
    recurrent_bench::lines(clock, arch, act);

    let (table, ids) = (Array::<f32>::zeros(device, 1024 * hidden), vec![7u32; tokens]);
    clock.line("embedding", shape(hidden), [floats(2 * all), 0.0], || {
        drop(embedding::forward(pool, Store::F32(table.view()), hidden, &ids, 1.0));
    });

    let rows = tokens.min(512);
    let h = x.gather(&(0..rows).collect::<Vec<_>>());
    let vocabulary = arch.vocab_size.min(32_768);
    let head = Array::of(device, &vec![bf16::from_f32(0.01); vocabulary * hidden]);
    let logits = Pool::on(device);
    logits.set_products(pool.number());
    let projection = Projection { weight: Store::Bf16(head.view()), outputs: vocabulary, softcap: None, pool: &logits };
    let targets = vec![3u32; rows];
    let work = 2.0 * 2.0 * (rows * vocabulary * hidden) as f64;
    clock.line(
        "loss and its gradient",
        format!("[{rows}, {vocabulary}]"),
        [12.0 * (rows * vocabulary) as f64, work],
        || {
            drop(projection.forward_backward(&h, &targets, Objective::default(), 1.0, WeightGradient::None));
        },
    );

    let count = 16 << 20;
    let [mut values, mut first, mut second] = [(); 3].map(|()| Array::<f32>::zeros(device, count));
    let grads = Array::of(device, &vec![0.5f32; count]);
    let step = adamw::Step {
        factor: 1.0.into(),
        rate: 1e-4,
        beta1: 0.9,
        beta2: 0.999,
        epsilon: 1e-8,
        weight_decay: 0.01,
        number: 10,
    };
    clock.line("adamw", format!("[{count}]"), [28.0 * count as f64, 0.0], || {
        adamw::update(values.view_mut(), grads.view(), first.view_mut(), second.view_mut(), &step);
    });
    Ok(())
}

/// Products of a weight `[wide, hidden]` in each storage format, and its gradient.
fn products(clock: &mut Clock, [hidden, wide]: [usize; 2], x: &Activation, out: &mut Activation) -> Result<()> {
    let (device, tokens, count) = (clock.device, x.tokens(), hidden * wide);
    let host = numbers(count);
    let work = 2.0 * (tokens * count) as f64;
    let moved = |weight: f64| [weight + x.number().bytes() as f64 * (tokens * (hidden + wide)) as f64, work];
    let shape = format!("[{tokens}, {hidden}] x [{hidden}, {wide}]");
    let mut time = |name, bytes, store: Store<'_>, clock: &mut Clock| {
        clock.line(name, shape.clone(), moved(bytes), || {
            matmul(out, Init::Zero, &[Term { matrix: Matrix::rows(store, hidden), x }]);
        });
    };
    let weight = Array::of(device, &host);
    time("product, float32 weight", 4.0 * count as f64, Store::F32(weight.view()), clock);
    drop(weight);
    let narrow: Vec<bf16> = host.iter().map(|&value| bf16::from_f32(value)).collect();
    let weight = Array::of(device, &narrow);
    time("product, bfloat16 weight", 2.0 * count as f64, Store::Bf16(weight.view()), clock);
    drop(weight);
    let quantized = encode::quantize(&host, hidden, Format::Nf4, true)?.to(device);
    time("product, NF4 weight", quantized.bytes() as f64, Store::Quantized(&quantized), clock);
    // Little but the widening that comes before it: codes are read, numbers written, and read again.
    let few = x.pool().act(16, hidden);
    let mut few_out = x.pool().act(16, wide);
    let bytes = quantized.bytes() as f64 + 2.0 * x.number().bytes() as f64 * count as f64;
    clock.line("widening NF4, and a product of 16 tokens", format!("[{hidden}, {wide}]"), [bytes, 0.0], || {
        let weight = Matrix::rows(Store::Quantized(&quantized), hidden);
        matmul(&mut few_out, Init::Zero, &[Term { matrix: weight, x: &few }]);
    });
    drop(quantized);
    let quantized = encode::quantize(&host, hidden, Format::Fp8, false)?.to(device);
    time("product, FP8 weight", quantized.bytes() as f64, Store::Quantized(&quantized), clock);
    let mut gradient = Array::<f32>::zeros(device, count);
    clock.line("gradient of a weight", shape, moved(8.0 * count as f64), || {
        outer(Target::Rows(gradient.view_mut()), out, &Transposed::new(x));
    });
    Ok(())
}

/// Rotary embedding and attention of one sequence.
fn heads(clock: &mut Clock, pool: &Arc<Pool>, spec: &AttentionSpec, act: &dyn Fn(usize) -> Activation) {
    let heads = Heads { v_head_dim: spec.value_dim(), ..Heads::new(spec.num_heads, spec.num_kv_heads, spec.head_dim) };
    let (mut q, k, v) =
        (act(heads.query * heads.head_dim), act(heads.kv * heads.head_dim), act(heads.kv * heads.v_head_dim));
    let tokens = q.tokens();
    let frequencies = vec![0.01f32; heads.head_dim / 2];
    let rope = Rope::new(pool, [tokens], |_| (&frequencies, 1.0));
    let numbers = tokens * q.features();
    let shape = format!("[{tokens}, {} x {}]", heads.query, heads.head_dim);
    let width = q.number().bytes() as f64;
    clock.line("rope", shape, [2.0 * width * numbers as f64, 0.0], || rope.forward(&mut q, heads.head_dim, 0));

    let spans = full_spans(&[0, tokens]);
    let how = Scores { scale: (heads.head_dim as f32).sqrt().recip(), softcap: None, window: None };
    let shape = format!("causal, {} x {}, {} of keys, {tokens} tokens", heads.query, heads.head_dim, heads.kv);
    // Two products of half of all pairs forward, five backward.
    let both = heads.head_dim + heads.v_head_dim;
    let pairs = (heads.query * both) as f64 * (tokens * tokens) as f64 / 2.0;
    let bytes = width * (tokens * (heads.query + heads.kv) * both) as f64;
    clock.line("attention", shape.clone(), [bytes, 2.0 * pairs], || {
        drop(attention::forward(&q, &k, &v, None, &spans, heads, how));
    });
    let (o, lse) = attention::forward(&q, &k, &v, None, &spans, heads, how);
    let saved = Saved { q: &q, k: &k, v: &v, sinks: None, o: &o, lse: &lse };
    clock.line("attention backward", shape, [2.0 * bytes, 5.0 * pairs], || {
        drop(attention::backward(saved, &o, &spans, heads, how, None));
    });
}
