//! What the kernels read of activations in panels: B and C row by row, and the time steps.
use crate::activation::{Activation, LANES};
use crate::mamba2::{Heads, Inputs};
use crate::par;
use crate::recurrence::Chunk;
use tunesmith_cpu_slice::CpuSlice as _;

/// B and C of every token, row by row.
#[derive(Debug)]
pub(in crate::mamba2) struct Turned {
    /// In a panel `[groups][B, C][16 tokens][rows]`.
    rows: Activation,
    width: usize,
}

impl Turned {
    pub(in crate::mamba2) fn new(xbc: &Activation, heads: Heads) -> Self {
        let width = heads.state().padded();
        let mut rows = xbc.pool().act_f32(xbc.tokens(), 2 * heads.groups * width);
        if !xbc.is_meta() {
            let (to, stride) = (rows.shared(), rows.stride());
            par::run(xbc.panels() * heads.groups, |task| {
                let (panel, group) = (task / heads.groups, task % heads.groups);
                for which in 0..2 {
                    let first = heads.values() + (which * heads.groups + group) * heads.state;
                    let lanes = &xbc.panel(panel)[first * LANES..][..heads.state * LANES];
                    // SAFETY: the panel has `2 * heads.groups` times 16 rows of `width` floats; this task alone has these.
                    let rows = unsafe {
                        let place = to.get().add(panel * stride + (2 * group + which) * LANES * width);
                        std::slice::from_raw_parts_mut(place, LANES * width)
                    };
                    rows.fill(0.0);
                    for (feature, lanes) in lanes.chunks_exact(LANES).enumerate() {
                        for (lane, value) in lanes.iter().enumerate() {
                            rows[lane * width + feature] = *value;
                        }
                    }
                }
            });
        }
        Self { rows, width }
    }

    /// B and C of a chunk's tokens.
    pub(super) fn at(&self, group: usize, chunk: &Chunk) -> [*const f32; 2] {
        let panel = self.rows.panel(chunk.panel);
        [0, 1].map(|which| panel[((2 * group + which) * LANES + chunk.first) * self.width..].as_ptr())
    }
}

/// The time steps of a chunk's tokens for one head.
#[derive(Default)]
pub(super) struct Steps {
    /// `t`.
    pub(super) step: [f32; LANES],
    /// `exp(g)`.
    pub(super) decay: [f32; LANES],
    g: [f32; LANES],
    /// The derivative of `t` by `dt`: 0 where it was cut.
    slope: [f32; LANES],
    /// `-exp(A_log)`.
    rate: f32,
}

impl Steps {
    pub(super) fn of_chunk(inputs: &Inputs<'_>, head: usize, chunk: &Chunk) -> Self {
        let mut steps = Self { rate: -inputs.a_log.cpu_slice()[head].exp(), ..Self::default() };
        let (shift, [low, high]) = (inputs.dt_bias.cpu_slice()[head], inputs.limits);
        for (index, lane) in chunk.lanes().enumerate() {
            let x = inputs.dt.at(chunk.panel * LANES + lane, head) + shift;
            // As PyTorch: beyond 20 softplus is the identity.
            let (step, slope) = if x > 20.0 { (x, 1.0) } else { (x.exp().ln_1p(), 1.0 / (1.0 + (-x).exp())) };
            steps.slope[index] = if (low..=high).contains(&step) { slope } else { 0.0 };
            steps.step[index] = step.max(low).min(high);
            steps.g[index] = steps.rate * steps.step[index];
            steps.decay[index] = steps.g[index].exp();
        }
        steps
    }

    /// From the gradients of the time step, without what its decay adds, and of `g` of a token to those of `dt` and `A_log`.
    pub(super) fn chain(&self, index: usize, d_step: f32, d_g: f32) -> [f32; 2] {
        [(d_step + self.rate * d_g) * self.slope[index], d_g * self.g[index]]
    }
}
