//! What a chunk reads and writes of activations in panels.
use crate::activation::{Activation, LANES};
use crate::gated_delta_rule::{Heads, Inputs, NORM_EPS};
use crate::par;
use crate::recurrence::Chunk;
use tunesmith_cpu_slice::CpuSlice as _;

/// `q̂` and `k̂` of every token, row by row.
#[derive(Debug)]
pub(in crate::gated_delta_rule) struct Normed {
    /// In a panel `[key heads][q, k][16 tokens][keys]`.
    rows: Activation,
    keys: usize,
}

impl Normed {
    pub(in crate::gated_delta_rule) fn new(qkv: &Activation, heads: Heads) -> Self {
        let keys = heads.state().padded();
        let mut rows = qkv.pool().act_f32(qkv.tokens(), 2 * heads.key * keys);
        if !qkv.is_meta() {
            let (to, stride) = (rows.shared(), rows.stride());
            par::run(qkv.panels() * heads.key, |task| {
                let (panel, key) = (task / heads.key, task % heads.key);
                for which in 0..2 {
                    let first = which * heads.keys() + key * heads.key_dim;
                    let lanes = &qkv.panel(panel)[first * LANES..][..heads.key_dim * LANES];
                    // SAFETY: the panel has `2 * heads.key` times 16 rows of `keys` floats; this task alone has these.
                    let rows = unsafe {
                        let place = to.get().add(panel * stride + (2 * key + which) * LANES * keys);
                        std::slice::from_raw_parts_mut(place, LANES * keys)
                    };
                    let scale = if which == 0 { (heads.key_dim as f32).sqrt().recip() } else { 1.0 };
                    let roots = roots(lanes).map(|root| root * scale);
                    rows.fill(0.0);
                    for (feature, lanes) in lanes.chunks_exact(LANES).enumerate() {
                        for (lane, (value, root)) in lanes.iter().zip(&roots).enumerate() {
                            rows[lane * keys + feature] = value * root;
                        }
                    }
                }
            });
        }
        Self { rows, keys }
    }

    /// `q̂` and `k̂` of a chunk's tokens.
    pub(super) fn at(&self, key: usize, chunk: &Chunk) -> [*const f32; 2] {
        let panel = self.rows.panel(chunk.panel);
        [0, 1].map(|which| panel[((2 * key + which) * LANES + chunk.first) * self.keys..].as_ptr())
    }
}

/// `1 / sqrt(sum x^2 + eps)` of sixteen tokens, `lanes` is `[features][16]`.
fn roots(lanes: &[f32]) -> [f32; LANES] {
    let mut sums = [0.0f32; LANES];
    for lanes in lanes.chunks_exact(LANES) {
        sums.iter_mut().zip(lanes).for_each(|(sum, x)| *sum += x * x);
    }
    sums.map(|sum| (sum + NORM_EPS).sqrt().recip())
}

/// Turns the gradients of `q̂` and `k̂` of a key head into those of q and k, at a chunk's tokens.
///
/// # Safety
/// `panel` is the gradients' panel of the chunk, and nobody else has these features at its tokens.
pub(super) unsafe fn norm_backward(qkv: &Activation, heads: Heads, key: usize, chunk: &Chunk, panel: *mut f32) {
    for which in 0..2 {
        let first = which * heads.keys() + key * heads.key_dim;
        let lanes = &qkv.panel(chunk.panel)[first * LANES..][..heads.key_dim * LANES];
        let scale = if which == 0 { (heads.key_dim as f32).sqrt().recip() } else { 1.0 };
        let roots = roots(lanes);
        for lane in chunk.lanes() {
            let (root, mut dot) = (roots[lane], 0.0);
            // dx = root (d - x̂ (x̂ · d)), with d the gradient of x̂ = root x.
            for feature in 0..heads.key_dim {
                // SAFETY: as the caller says.
                let d = unsafe { *panel.add((first + feature) * LANES + lane) } * scale;
                dot += lanes[feature * LANES + lane] * root * d;
            }
            for feature in 0..heads.key_dim {
                // SAFETY: as the caller says.
                unsafe {
                    let place = panel.add((first + feature) * LANES + lane);
                    *place = root * (*place * scale - lanes[feature * LANES + lane] * root * dot);
                }
            }
        }
    }
}

/// The gates of a chunk's tokens for one head.
pub(super) struct Gate {
    pub(super) beta: [f32; LANES],
    /// `exp(g)`.
    pub(super) decay: [f32; LANES],
    g: [f32; LANES],
    /// The derivative of `g` by `a`.
    slope: [f32; LANES],
    beta_max: f32,
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

impl Gate {
    pub(super) fn of_chunk(inputs: &Inputs<'_>, head: usize, chunk: &Chunk) -> Self {
        let rate = -inputs.a_log.cpu_slice()[head].exp();
        let shift = inputs.dt_bias.cpu_slice()[head];
        let none = [0.0; LANES];
        let mut gates = Self { beta: none, decay: none, g: none, slope: none, beta_max: inputs.beta_max };
        for (index, lane) in chunk.lanes().enumerate() {
            let at = |act: &Activation| act.at(chunk.panel * LANES + lane, head);
            let x = at(inputs.a) + shift;
            // As PyTorch: beyond 20 softplus is the identity.
            let (softplus, slope) = if x > 20.0 { (x, 1.0) } else { (x.exp().ln_1p(), sigmoid(x)) };
            gates.beta[index] = inputs.beta_max * sigmoid(at(inputs.b));
            gates.g[index] = rate * softplus;
            gates.decay[index] = gates.g[index].exp();
            gates.slope[index] = rate * slope;
        }
        gates
    }

    /// From the gradients of `beta` and `g` of a token to those of `b`, of `a`, and of `A_log`.
    pub(super) fn chain(&self, index: usize, d_beta: f32, d_g: f32) -> [f32; 3] {
        let beta = self.beta[index];
        [d_beta * beta * (1.0 - beta / self.beta_max), d_g * self.slope[index], d_g * self.g[index]]
    }
}
