//! Muon for matrices: Jordan et al., 2024, <https://kellerjordan.github.io/posts/muon/>. `AdamW` for everything else:
//! vectors, the embedding and the LM head.
//!
//! Equal to `torch.optim.Muon` computed in f32; PyTorch rounds the products of its Newton-Schulz iteration to bfloat16.
//!
//! ```text
//! m = m + (1 - momentum) (g - m)
//! u = orthogonal(nesterov: momentum m + (1 - momentum) g, else m)
//! w = (1 - rate decay) w - rate adjust(rows, cols) u
//! ```
use super::adamw::{AdamW, Betas};
use super::optimizer::{Slot, StateSpec, TensorUpdate, UpdateRule};
use super::share;
use rayon::prelude::*;
use tunesmith_base::error::Result;
use tunesmith_config::TrainConfig;
use tunesmith_config::arguments::Reader;
use tunesmith_ops::activation::{Activation, Pool};
use tunesmith_ops::denormal::flush_denormal;
use tunesmith_ops::elementwise;
use tunesmith_ops::gemm::{Init, Matrix, Term, matmul};
use tunesmith_ops::par::TASK;

/// The values of `adjust_lr_fn`: how the rate depends on a matrix's sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdjustLr {
    /// The factor `sqrt(max(1, rows / cols))`.
    Original,
    /// `0.2 sqrt(max(rows, cols))`: steps as large as `AdamW`'s, so that its learning rates fit. Liu et al., "Muon is
    /// Scalable for LLM Training", 2025, <https://arxiv.org/abs/2502.16982>.
    MatchRmsAdamw,
    /// The factor `sqrt(rows / cols)`.
    SpectralUnclamped,
}

/// The update rule of Muon. Its state is `momentum_buffer` for matrices, and `AdamW`'s two moments for the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Muon {
    /// Decay of the momentum, in 0..1.
    pub momentum: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Newton-Schulz iterations of each step.
    pub ns_steps: usize,
    /// How the rate depends on a matrix's sizes.
    pub adjust_lr: AdjustLr,
    /// The hyperparameters of `AdamW` for the rest; its weight decay applies to the matrices too.
    pub rest: Betas,
}

/// Coefficients `a`, `b`, `c` of the iteration in [`orthogonal`], and the smallest divisor.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.775, 2.0315];
const LEAST_NORM: f64 = 1e-7;

impl Muon {
    /// Whether Muon updates a tensor: a matrix that is neither an embedding nor a head, nor rows of these.
    fn takes(slot: &Slot) -> bool {
        let mut parts = slot.name.split('.');
        let tables = ["embed_tokens", "embed_tokens_per_layer", "wpe", "lm_head", "score"];
        let is_table = parts.any(|part| tables.contains(&part));
        slot.shape.len() == 2 && slot.count() > 0 && !is_table
    }
}

impl AdjustLr {
    fn scale(self, rows: usize, cols: usize) -> f64 {
        let (rows, cols) = (rows as f64, cols as f64);
        match self {
            Self::Original => (rows / cols).max(1.0).sqrt(),
            Self::MatchRmsAdamw => 0.2 * rows.max(cols).sqrt(),
            Self::SpectralUnclamped => (rows / cols).sqrt(),
        }
    }
}

impl UpdateRule for Muon {
    fn of(train: &TrainConfig, args: &mut Reader<'_>) -> Result<Self> {
        let ns_steps =
            args.number("ns_steps", "an integer from 1 to 99", |it| it.fract() == 0.0 && (1.0..100.0).contains(&it))?;
        Ok(Self {
            momentum: share(args, "momentum")?.unwrap_or(0.95),
            nesterov: args.flag("nesterov")?.unwrap_or(true),
            ns_steps: ns_steps.unwrap_or(5.0) as usize,
            adjust_lr: args.word(
                "adjust_lr_fn",
                &[
                    ("original", AdjustLr::Original),
                    ("match_rms_adamw", AdjustLr::MatchRmsAdamw),
                    ("spectral_unclamped", AdjustLr::SpectralUnclamped),
                ],
            )?,
            rest: train.into(),
        })
    }

    /// For a matrix: the iterate, its copy in panels, and the next iterate in panels and in rows; and three square products
    /// with the size of the shorter side.
    fn scratch(&self, slot: &Slot) -> u64 {
        match slot.shape.as_slice() {
            [rows, cols] => 4 * (4 * slot.count() as u64 + 3 * (*rows.min(cols) as u64).pow(2)),
            _ => 0,
        }
    }

    fn state(&self, slot: &Slot) -> Vec<StateSpec> {
        if Self::takes(slot) { vec![StateSpec::like("momentum_buffer", slot)] } else { AdamW(self.rest).state(slot) }
    }

    fn grain(&self, slot: &Slot) -> usize {
        if Self::takes(slot) { slot.count() } else { 1 }
    }

    fn update(&self, update: TensorUpdate<'_>) {
        if !Self::takes(update.slot) {
            return AdamW(self.rest).update(update);
        }
        let TensorUpdate { slot, values, grads, factor, rate, state, .. } = update;
        let factor = factor.known();
        let (rows, cols) = (slot.shape[0], slot.shape[1]);
        let (momentum, rest) = (self.momentum as f32, (1.0 - self.momentum) as f32);
        let mut direction = vec![0.0f32; values.len()];
        let (mut values, grads, mut buffer) = (values.on_host(), grads.to_host(), state[0].floats().on_host());
        for ((direction, grad), buffer) in direction.iter_mut().zip(&*grads).zip(&mut *buffer) {
            let grad = grad * factor;
            *buffer = flush_denormal(*buffer + rest * (grad - *buffer));
            *direction = if self.nesterov { *buffer - (*buffer - grad) * (1.0 - momentum) } else { *buffer };
        }
        let direction = orthogonal(direction, rows, cols, self.ns_steps);
        let keep = (1.0 - rate * self.rest.of(slot).weight_decay) as f32;
        let pace = (rate * self.adjust_lr.scale(rows, cols)) as f32;
        values.par_chunks_mut(TASK).zip(direction.par_chunks(TASK)).for_each(|(values, direction)| {
            for (value, direction) in values.iter_mut().zip(direction) {
                *value = *value * keep - pace * direction;
            }
        });
    }
}

/// About `U V^T` of `x = U S V^T`, `[rows, cols]`: divides `x` by its Frobenius norm, then repeats
/// `x <- a x + (b g + c g g) x` with `g = x x^T` `steps` times, which brings all singular values near 1.
fn orthogonal(x: Vec<f32>, rows: usize, cols: usize, steps: usize) -> Vec<f32> {
    let high = rows > cols;
    let (mut x, short, long) = if high { (transpose(&x, rows, cols), cols, rows) } else { (x, rows, cols) };
    let norm = x.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt().max(LEAST_NORM) as f32;
    for value in &mut x {
        *value /= norm;
    }
    let pool = Pool::new();
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..steps {
        let rows_of_x = Activation::from_rows(&pool, &x, long);
        let mut gram = pool.act(short, short);
        matmul(&mut gram, Init::Zero, &[Term { matrix: Matrix::rows(&x, long), x: &rows_of_x }]);
        let flat = gram.to_rows();
        let mut mixed = pool.act(short, short);
        matmul(&mut mixed, Init::Zero, &[Term { matrix: Matrix::rows(&flat, short), x: &gram }]);
        elementwise::axpby(b, &gram, c, &mut mixed);
        let mut next = pool.act(short, long);
        matmul(&mut next, Init::Zero, &[Term { matrix: Matrix::transposed(&x, long), x: &mixed }]);
        x.iter_mut().zip(next.to_rows()).for_each(|(x, next)| *x = a * *x + next);
    }
    if high { transpose(&x, short, long) } else { x }
}

/// Transposes row-major `[rows, cols]` to `[cols, rows]`.
fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|col| (0..rows).map(move |row| x[row * cols + col])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_a_row_for_each_token_and_vectors_are_left_to_adamw() {
        let takes = |name: &str, shape: &[usize]| {
            Muon::takes(&Slot {
                name: name.to_owned(),
                shape: shape.to_vec(),
                decay: true,
                lr_scale: 1.0,
                vision: false,
            })
        };
        assert!(takes("model.layers.0.self_attn.q_proj.weight", &[8, 8]));
        assert!(takes("model.layers.0.mlp.up_proj.lora_B.weight", &[8, 2]));
        assert!(!takes("model.layers.0.self_attn.q_proj.bias", &[8]));
        assert!(!takes("model.embed_tokens.weight", &[32, 8]) && !takes("lm_head.weight", &[32, 8]));
        assert!(!takes("model.embed_tokens.token_adapter.trainable_tokens_delta", &[2, 8]));
    }

    #[test]
    fn singular_values_come_near_1_whatever_the_sizes() {
        for (rows, cols) in [(1, 1), (3, 40), (40, 3), (20, 20)] {
            // A strong diagonal, so that no singular value is too small for five iterations.
            let diagonal = |at: usize| if at / cols == at % cols { 40.0 } else { 0.0 };
            let value = |at: usize| ((at * 37 % 101) as f32 - 50.0) / 10.0 + diagonal(at);
            let x: Vec<f32> = (0..rows * cols).map(value).collect();
            let near = orthogonal(x, rows, cols, 5);
            let squares = near.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
            let rank = rows.min(cols) as f64;
            assert!((0.4 * rank..1.7 * rank).contains(&squares), "{rows} x {cols}: {squares}");
        }
    }
}
