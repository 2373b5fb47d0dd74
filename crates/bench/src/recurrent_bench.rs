//! The lines of `tunesmith bench --kernels` for recurrent mixers: the first of each kind that the architecture has.
use super::clock::{Clock, numbers};
use tunesmith_config::arch::{Arch, PartSpec};
use tunesmith_device::Array;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::causal_conv1d::{self, Conv};
use tunesmith_ops::{elementwise, gated_delta_rule, mamba2};

/// Times the recurrent mixers of `arch` on one sequence.
pub(crate) fn lines(clock: &mut Clock, arch: &Arch, act: &dyn Fn(usize) -> Activation) {
    let parts = || arch.blocks.iter().flat_map(|block| &block.branches).map(|branch| &branch.part);
    let delta = parts().find_map(|part| if let PartSpec::DeltaNet(spec) = part { Some(spec) } else { None });
    let mamba = parts().find_map(|part| if let PartSpec::Mamba(spec) = part { Some(spec) } else { None });
    let short = parts().find_map(|part| if let PartSpec::ShortConv(spec) = part { Some(spec) } else { None });
    if let Some(spec) = delta {
        convolution(clock, &act(spec.qkv_size()), spec.kernel, true);
        let (key, value) = (spec.key_heads, spec.value_heads);
        delta_rule(
            clock,
            gated_delta_rule::Heads { key, value, key_dim: spec.key_dim, value_dim: spec.value_dim },
            act,
        );
    }
    if let Some(spec) = mamba {
        convolution(clock, &act(spec.conv_size()), spec.kernel, true);
        let (count, groups) = (spec.heads, spec.groups);
        state_space(clock, mamba2::Heads { count, groups, dim: spec.dim, state: spec.state }, act);
    }
    if let Some(spec) = short {
        convolution(clock, &act(arch.hidden_size), spec.kernel, false);
    }
}

/// Numbers in -1..1 that vary, as `act` has them.
fn varied(act: &Activation) -> Activation {
    Activation::from_rows(act.pool(), &numbers(act.tokens() * act.features()), act.features())
}

fn convolution(clock: &mut Clock, x: &Activation, kernel: usize, silu: bool) {
    let (tokens, channels, width) = (x.tokens(), x.features(), x.number().bytes() as f64);
    let x = varied(x);
    let weight = Array::of(x.device(), &numbers(channels * kernel));
    let conv = Conv { weight: weight.view(), bias: None, silu };
    let (shape, bytes) = (format!("[{tokens}, {channels}], {kernel} taps"), width * (tokens * channels) as f64);
    let whole = 0..tokens;
    let sequences = std::slice::from_ref(&whole);
    clock.line("causal_conv1d", shape.clone(), [2.0 * bytes, 0.0], || {
        drop(causal_conv1d::forward(conv, &x, sequences));
    });
    let mut dy = x.like();
    elementwise::fill(&mut dy, 0.5);
    clock.line("causal_conv1d backward", shape, [5.0 * bytes, 0.0], || {
        drop(causal_conv1d::backward(conv, &x, dy.copy(), sequences, None));
    });
}

/// Operations on a head's state, and on the products of a token with the tokens of its chunk, for all tokens and heads.
/// Of a chunk's 64 tokens, 40 count on average, because blocks are of 16 tokens.
fn sizes(tokens: usize, heads: usize, rows: usize, columns: usize) -> [f64; 3] {
    let all = 2.0 * (tokens * heads) as f64;
    [all * (rows * columns) as f64, all * 40.0 * rows as f64, all * 40.0 * columns as f64]
}

fn delta_rule(clock: &mut Clock, heads: gated_delta_rule::Heads, act: &dyn Fn(usize) -> Activation) {
    let qkv = varied(&act(2 * heads.keys() + heads.values()));
    let (b, a, dy) = (varied(&act(heads.value)), varied(&act(heads.value)), varied(&act(heads.values())));
    let constants = Array::of(qkv.device(), &numbers(heads.value));
    let inputs = gated_delta_rule::Inputs {
        qkv: &qkv,
        b: &b,
        a: &a,
        a_log: constants.view(),
        dt_bias: constants.view(),
        beta_max: 1.0,
    };
    let tokens = qkv.tokens();
    let shape = format!("[{tokens}, {} x {} x {}]", heads.value, heads.key_dim, heads.value_dim);
    let bytes = qkv.number().bytes() as f64 * (tokens * (qkv.features() + dy.features())) as f64;
    let [state, rows, columns] = sizes(tokens, heads.value, heads.key_dim, heads.value_dim);
    let whole = 0..tokens;
    let sequences = std::slice::from_ref(&whole);
    clock.line("gated_delta_rule", shape.clone(), [bytes, 3.0 * state + 2.0 * rows + 2.0 * columns], || {
        drop(gated_delta_rule::forward(inputs, heads, sequences, None));
    });
    clock.line("gated_delta_rule backward", shape, [2.0 * bytes, 8.0 * state + 6.6 * rows + 5.0 * columns], || {
        drop(gated_delta_rule::backward(inputs, heads, sequences, &dy));
    });
}

fn state_space(clock: &mut Clock, heads: mamba2::Heads, act: &dyn Fn(usize) -> Activation) {
    let xbc = varied(&act(heads.features()));
    let (dt, dy) = (varied(&act(heads.count)), varied(&act(heads.values())));
    let constants = Array::of(xbc.device(), &numbers(heads.count));
    let [a_log, d, dt_bias] = [(); 3].map(|()| constants.view());
    let inputs = mamba2::Inputs { xbc: &xbc, dt: &dt, a_log, d, dt_bias, limits: [0.0, f32::INFINITY] };
    let tokens = xbc.tokens();
    let shape = format!("[{tokens}, {} x {} x {}]", heads.count, heads.state, heads.dim);
    let bytes = xbc.number().bytes() as f64 * (tokens * (xbc.features() + dy.features())) as f64;
    let [state, _, columns] = sizes(tokens, heads.count, heads.state, heads.dim);
    let rows = sizes(tokens, heads.groups, heads.state, heads.dim)[1];
    let whole = 0..tokens;
    let sequences = std::slice::from_ref(&whole);
    clock.line("mamba2", shape.clone(), [bytes, 2.0 * state + rows + columns], || {
        drop(mamba2::forward(inputs, heads, sequences, None));
    });
    clock.line("mamba2 backward", shape, [2.0 * bytes, 5.0 * state + 3.0 * rows + 2.0 * columns], || {
        drop(mamba2::backward(inputs, heads, sequences, &dy));
    });
}
