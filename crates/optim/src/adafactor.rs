//! Adafactor: Shazeer and Stern, 2018, <https://arxiv.org/abs/1804.04235>. A matrix keeps the means of its squared
//! gradients by row and by column, instead of one number per value.
//!
//! Equal to `transformers.optimization.Adafactor` as the Hugging Face Trainer sets it: `relative_step=False`, and
//! `scale_parameter=False` unless asked for.
//!
//! ```text
//! beta2 = 1 - t^decay_rate
//! r[i] = beta2 r[i] + (1 - beta2) mean_j(g[i, j]^2 + 1e-30)        c[j] likewise, the mean over i
//! u[i, j] = g[i, j] sqrt(mean(r) / (r[i] c[j]))                    vectors: g / sqrt(v), v as in AdamW
//! w = (1 - rate decay) w - rate u / max(1, rms(u) / clip_threshold)
//! ```
use super::optimizer::{Slot, State, StateSpec, TensorUpdate, UpdateRule};
use super::share;
use rayon::prelude::*;
use tunesmith_base::error::Result;
use tunesmith_config::TrainConfig;
use tunesmith_config::arguments::Reader;
use tunesmith_ops::denormal::flush_denormal;
use tunesmith_ops::par::TASK;

/// The update rule of Adafactor. Its state is `exp_avg_sq_row [.., rows]` and `exp_avg_sq_col [.., cols]` for a matrix,
/// or `exp_avg_sq` for a vector; with `beta1` also `exp_avg`, the mean of the updates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adafactor {
    /// Exponent of the step number in the second moment's decay; below 0.
    pub decay_rate: f64,
    /// The largest root mean square of an update, before the learning rate.
    pub clip_threshold: f64,
    /// Decay of the mean of updates; `None` for no such mean.
    pub beta1: Option<f64>,
    /// Whether to multiply the rate by the root mean square of the tensor's weights, at least 1e-3.
    pub scale_parameter: bool,
    /// Decoupled weight decay: a step multiplies a weight by `1 - rate * weight_decay`.
    pub weight_decay: f64,
}

/// The paper's two epsilons: added to squared gradients, and the smallest root mean square that scales a rate.
const EPSILON: (f64, f64) = (1e-30, 1e-3);

/// A tensor seen as a sequence of matrices `[rows, cols]`, its last two dimensions.
#[derive(Clone, Copy)]
struct Matrices {
    rows: usize,
    cols: usize,
}

impl Matrices {
    /// `None` for vectors, whose second moments are not factored.
    fn of(shape: &[usize]) -> Option<Self> {
        match shape {
            [.., rows, cols] => Some(Self { rows: *rows, cols: *cols }),
            _ => None,
        }
    }
}

impl UpdateRule for Adafactor {
    fn of(train: &TrainConfig, args: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            decay_rate: args.number("decay_rate", "a number below 0", |number| number < 0.0)?.unwrap_or(-0.8),
            clip_threshold: args.number("clip_threshold", "a number above 0", |number| number > 0.0)?.unwrap_or(1.0),
            beta1: share(args, "beta1")?,
            scale_parameter: args.flag("scale_parameter")?.unwrap_or(false),
            weight_decay: train.weight_decay,
        })
    }

    fn scratch(&self, slot: &Slot) -> u64 {
        4 * slot.count() as u64
    }

    fn state(&self, slot: &Slot) -> Vec<StateSpec> {
        let shape = &slot.shape;
        let mut specs = match shape.as_slice() {
            [outer @ .., rows, cols] => vec![
                StateSpec::floats("exp_avg_sq_row", [outer, &[*rows]].concat()),
                StateSpec::floats("exp_avg_sq_col", [outer, &[*cols]].concat()),
            ],
            _ => vec![StateSpec::like("exp_avg_sq", slot)],
        };
        if self.beta1.is_some() {
            specs.push(StateSpec::like("exp_avg", slot));
        }
        specs
    }

    fn grain(&self, slot: &Slot) -> usize {
        slot.count()
    }

    fn update(&self, update: TensorUpdate<'_>) {
        let TensorUpdate { slot, values, grads, factor, rate, step, state } = update;
        let factor = factor.known();
        if values.is_empty() {
            return;
        }
        let (mut values, grads) = (values.on_host(), grads.to_host());
        let beta2 = 1.0 - (step as f64).powf(self.decay_rate);
        let rate = if self.scale_parameter { rate * EPSILON.1.max(rms(values.iter().copied())) } else { rate };
        let (moments, first) = state.split_at_mut(if slot.shape.len() < 2 { 1 } else { 2 });
        // `direction` is the gradient divided by the root of the second moment.
        let mut direction = vec![0.0f32; values.len()];
        match (Matrices::of(&slot.shape), moments) {
            (Some(matrices), [row, col]) => {
                let each = matrices.rows * matrices.cols;
                let (mut row, mut col) = (row.floats().on_host(), col.floats().on_host());
                let (row, col) = (row.chunks_mut(matrices.rows), col.chunks_mut(matrices.cols));
                let parts = direction.chunks_mut(each).zip(grads.chunks(each));
                for ((direction, grads), (row, col)) in parts.zip(row.zip(col)) {
                    factored(direction, grads, factor, row, col, beta2);
                }
            }
            (_, [State::F32(moment), ..]) => {
                let (rest, mut moment) = ((1.0 - beta2) as f32, moment.view_mut().on_host());
                for ((direction, grad), moment) in direction.iter_mut().zip(&*grads).zip(&mut *moment) {
                    let grad = grad * factor;
                    *moment = beta2 as f32 * *moment + rest * (grad * grad + EPSILON.0 as f32);
                    *direction = grad / moment.sqrt();
                }
            }
            _ => return,
        }
        let most = (rms(direction.iter().copied()) / self.clip_threshold).max(1.0);
        let pace = (rate / most) as f32;
        let decay = if slot.decay { (self.weight_decay * rate) as f32 } else { 0.0 };
        match (self.beta1, first) {
            (Some(beta1), [State::F32(first)]) => {
                let (beta1, rest, mut first) = (beta1 as f32, (1.0 - beta1) as f32, first.view_mut().on_host());
                for ((value, direction), first) in values.iter_mut().zip(&direction).zip(&mut *first) {
                    *first = flush_denormal(beta1 * *first + rest * (pace * direction));
                    *value = *value - decay * *value - *first;
                }
            }
            _ => values.par_chunks_mut(TASK).zip(direction.par_chunks(TASK)).for_each(|(values, direction)| {
                for (value, direction) in values.iter_mut().zip(direction) {
                    *value = *value - decay * *value - pace * direction;
                }
            }),
        }
    }
}

/// The root of the mean square, summed in f64.
fn rms(values: impl ExactSizeIterator<Item = f32>) -> f64 {
    let count = values.len() as f64;
    (values.map(|value| f64::from(value).powi(2)).sum::<f64>() / count).sqrt()
}

/// Updates the moments `row [rows]` and `col [cols]` of a matrix, then writes `u` of the module's head to `direction`.
fn factored(direction: &mut [f32], grads: &[f32], factor: f32, row: &mut [f32], col: &mut [f32], beta2: f64) {
    let cols = col.len();
    // A task takes whole rows. The sums by column are added task by task, so that they do not depend on the number of
    // threads.
    let rows_of_task = (TASK / cols).max(1);
    let sums = grads.par_chunks(rows_of_task * cols).zip(row.par_chunks_mut(rows_of_task)).map(|(grads, row)| {
        let mut by_col = vec![0.0f64; cols];
        for (grads, row) in grads.chunks(cols).zip(row) {
            let mut sum = 0.0;
            for (grad, by_col) in grads.iter().zip(&mut by_col) {
                let grad = f64::from(grad * factor);
                let square = grad * grad + EPSILON.0;
                sum += square;
                *by_col += square;
            }
            *row = (beta2 * f64::from(*row) + (1.0 - beta2) * sum / cols as f64) as f32;
        }
        by_col
    });
    let sums: Vec<Vec<f64>> = sums.collect();
    for (index, col) in col.iter_mut().enumerate() {
        let sum: f64 = sums.iter().map(|sums| sums[index]).sum();
        *col = (beta2 * f64::from(*col) + (1.0 - beta2) * sum / row.len() as f64) as f32;
    }
    let mean = row.iter().map(|&row| f64::from(row)).sum::<f64>() / row.len() as f64;
    let by_col: Vec<f32> = col.iter().map(|&col| (1.0 / f64::from(col).sqrt()) as f32).collect();
    let parts = direction.par_chunks_mut(rows_of_task * cols).zip(grads.par_chunks(rows_of_task * cols));
    parts.zip(row.par_chunks(rows_of_task)).for_each(|((direction, grads), row)| {
        for ((direction, grads), row) in direction.chunks_mut(cols).zip(grads.chunks(cols)).zip(row) {
            let by_row = (mean / f64::from(*row)).sqrt() as f32;
            for ((direction, grad), by_col) in direction.iter_mut().zip(grads).zip(&by_col) {
                *direction = by_row * by_col * (grad * factor);
            }
        }
    });
}
