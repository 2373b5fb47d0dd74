//! The loss of a linear head (LM head or classification head) without all logits at once. Rows are divided into chunks,
//! and the gradient of a chunk is computed in the forward pass, so that logits of more than one chunk never exist.
//! Elsewhere known as fused linear cross-entropy (Hsu et al., "Liger Kernel", 2024,
//! <https://arxiv.org/abs/2410.10989>).
//!
//! With `e = exp(logit - max)` and `s = sum e`, the gradient of `scale * nll` with respect to a row `h` is
//! `scale (W^T e / s - W[target])`, and that of `W` is `scale (e / s - onehot) h^T`.
mod cpu;
mod cuda;
mod logits;

pub use logits::Logits;

use super::{Losses, Results, Terms, cross_entropy, cuda::totals, gradient, squared};
use crate::activation::{Activation, LANES, Pool};
use crate::floats::FloatsMut;
use crate::gemm::{Init, Matrix, Store, Target, Term, Transposed, matmul, matmul_transposed, outer};
use crate::softcap;
use std::sync::Arc;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::{Array, Device};

/// The most bytes of logits in a chunk on the CPU, unless a quarter of the weight's bytes in float32 is more. A chunk
/// has at least one panel of tokens.
const CHUNK_BYTES: usize = 64 << 20;
/// The most bytes of logits in a chunk on a GPU, where products reach full speed from some hundred tokens on.
const CHUNK_BYTES_OF_GPU: usize = 256 << 20;
/// The most tokens in a chunk. With more, reading the weight is no longer what a product's time depends on.
const CHUNK_TOKENS: usize = 512;

/// How many tokens a chunk has, for a head `[outputs, hidden]`: that many logits `[chunk, outputs]` exist at once. On
/// the CPU, logits may take a quarter of the weight's bytes, because each chunk reads the whole weight, and with few
/// tokens that costs most.
pub fn chunk_tokens([outputs, hidden]: [usize; 2], device: Device) -> usize {
    let bytes = match device {
        Device::Cuda(_) => CHUNK_BYTES_OF_GPU,
        _ => CHUNK_BYTES.max(outputs * hidden),
    };
    (bytes / (outputs * size_of::<f32>()) / LANES * LANES).clamp(LANES, CHUNK_TOKENS)
}

/// A linear head, `logits = cap(W h)`, and the pool for its logits.
#[derive(Debug, Clone, Copy)]
pub struct Projection<'a> {
    /// W, `[outputs, hidden]`.
    pub weight: Store<'a>,
    /// The number of outputs: the size of the vocabulary, or the number of labels of a classification.
    pub outputs: usize,
    /// `cap(x) = c tanh(x / c)`; without one, `cap(x) = x`.
    pub softcap: Option<f32>,
    /// The pool that chunks of logits come from. It has to be separate, because the pool of a pass would size them for
    /// all tokens.
    pub pool: &'a Arc<Pool>,
}

/// What is minimised: cross-entropy with optional terms and weights, or squared errors.
#[derive(Debug, Clone, Copy, Default)]
pub struct Objective<'a> {
    /// The strengths of label smoothing and z-loss.
    pub terms: Terms,
    /// Whether the loss is the squared error of a single output. Targets are then the bits of float32 numbers.
    pub squared: bool,
    /// The weight of each row's loss; empty if each counts once.
    pub weights: &'a [f32],
}

/// Where to add the gradient of `W`.
#[derive(Debug)]
pub enum WeightGradient<'a> {
    /// Nowhere, because `W` is frozen.
    None,
    /// To the gradient of all of `W`, `[outputs, hidden]`.
    Whole(FloatsMut<'a>),
    /// To the gradient of the rows `ids` alone, `[ids.len(), hidden]`.
    Rows {
        /// The rows of `W` that are trained.
        ids: &'a [u32],
        /// The gradients of these rows, `[ids.len(), hidden]`.
        gradients: FloatsMut<'a>,
    },
}

/// The losses of a head's rows, and the gradient of its input ([`Projection::forward_backward`]).
#[derive(Debug)]
pub struct LossGradient {
    /// The rows' losses without the further terms of the objective, each with its weight.
    pub losses: RowLosses,
    /// The gradient with respect to the head's input, `[rows, hidden]`.
    pub dh: Activation,
}

/// The losses of all rows, on the device that computed them. Reading them waits for a GPU, so a caller requests the
/// GPU's further work first.
#[derive(Debug, Default)]
pub struct RowLosses(Vec<ChunkLosses>);

/// The losses and weights of a chunk; no weights if each loss counts once.
type ChunkLosses = (Losses, Vec<f32>);

impl RowLosses {
    /// The sum of the losses, each times its weight; and the number of rows whose target has the largest logit, or one
    /// of several equally large ones. Waits for a GPU.
    pub fn sum(self) -> (f64, usize) {
        let mut sums = Array::default();
        let (total, right) = self.add_up(&mut sums);
        let sums = if sums.is_empty() { vec![0.0; 2] } else { sums.read() };
        (total + sums[0], right + sums[1] as usize)
    }

    /// Returns the part of [`RowLosses::sum`] that the host computed. The part that a GPU computed is added to the two
    /// numbers in `to`, on the GPU; an empty `to` starts with zeros.
    pub(super) fn add_up(self, to: &mut Array<f64>) -> (f64, usize) {
        let (mut total, mut right) = (0.0, 0);
        for (losses, weights) in self.0 {
            if let Results::Gpu(losses) = &losses.0 {
                if to.is_empty() {
                    to.reset(losses.device(), 2);
                }
                totals(losses, &weights, to);
                continue;
            }
            let losses = losses.read();
            right += losses.iter().filter(|loss| loss.right).count();
            let each = losses.iter().map(|loss| f64::from(loss.nll));
            total += if weights.is_empty() {
                each.sum::<f64>()
            } else {
                each.zip(&weights).map(|(loss, &weight)| loss * f64::from(weight)).sum()
            };
        }
        (total, right)
    }
}

impl Projection<'_> {
    fn project(&self, h: &Activation) -> Activation {
        let mut logits = self.pool.blank(h.tokens(), self.outputs);
        matmul(&mut logits, Init::Zero, &[Term { matrix: Matrix::rows(self.weight, h.features()), x: h }]);
        if let Some(cap) = self.softcap {
            softcap::forward(&mut logits, cap);
        }
        logits
    }

    /// The logits of the rows `h [rows, hidden]`, one chunk of rows after the other.
    pub fn logits(&self, h: &Activation) -> Vec<Logits> {
        let all: Vec<usize> = (0..h.tokens()).collect();
        let parts = all.chunks(chunk_tokens([self.outputs, h.features()], self.pool.device()));
        parts.map(|part| self.part(&h.gather(part))).collect()
    }

    fn part(&self, h: &Activation) -> Logits {
        let term = Term { matrix: Matrix::rows(self.weight, h.features()), x: h };
        let Some(mut logits) = matmul_transposed(self.pool, self.outputs, term) else {
            return Logits::new(self.project(h), false);
        };
        if let Some(cap) = self.softcap {
            softcap::forward(&mut logits, cap);
        }
        Logits::new(logits, true)
    }

    /// Each row's loss, and whether its target is the most probable output, or one of several equally probable ones.
    /// With `squares`, the loss is the squared error of a single output, and no row is right.
    pub fn losses(&self, h: &Activation, targets: &[u32], squares: bool) -> Vec<(f32, bool)> {
        let mut losses = Vec::new();
        let (all, chunk): (Vec<usize>, usize) =
            ((0..h.tokens()).collect(), chunk_tokens([self.outputs, h.features()], self.pool.device()));
        for (part, targets) in all.chunks(chunk).zip(targets.chunks(chunk)) {
            let mut logits = self.project(&h.gather(part));
            losses.push(if squares {
                squared(&mut logits, targets, &vec![0.0; targets.len()])
            } else {
                cross_entropy(&mut logits, targets)
            });
        }
        losses.into_iter().flat_map(Losses::read).map(|loss| (loss.nll, loss.right)).collect()
    }

    /// The rows' losses, and the gradient of `scale` times the objective with respect to `h [rows, hidden]`. Adds the
    /// gradient of `W` to `d_weight`. `targets` has one of `outputs` for each row.
    pub fn forward_backward(
        &self,
        h: &Activation,
        targets: &[u32],
        objective: Objective<'_>,
        scale: f32,
        mut d_weight: WeightGradient<'_>,
    ) -> LossGradient {
        let (hidden, chunk) = (h.features(), chunk_tokens([self.outputs, h.features()], self.pool.device()));
        let mut found = LossGradient { losses: RowLosses::default(), dh: h.pool().act(h.tokens(), hidden) };
        let plain =
            objective.terms.is_plain() && objective.weights.is_empty() && !objective.squared && self.softcap.is_none();
        for first in (0..h.tokens()).step_by(chunk) {
            let rows = first..h.tokens().min(first + chunk);
            let targets = &targets[rows.clone()];
            let part = h.rows(self.pool, rows.clone());
            let (d_part, losses) = if plain {
                let chunk = Chunk { h, rows, part, targets };
                self.plain(chunk, scale, &mut d_weight)
            } else {
                let ones;
                let weights = if objective.weights.is_empty() {
                    ones = vec![1.0; targets.len()];
                    &ones[..]
                } else {
                    &objective.weights[rows]
                };
                self.weighted(&part, targets, weights, objective, scale, &mut d_weight)
            };
            found.dh.put_rows(first, &d_part);
            found.losses.0.push(losses);
        }
        found
    }

    /// A chunk with plain cross-entropy. The gradient of its logits is never formed: the exponentials are multiplied by
    /// `W`, and each token is corrected by a factor and one row of `W`.
    fn plain(&self, chunk: Chunk<'_>, scale: f32, d_weight: &mut WeightGradient<'_>) -> (Activation, ChunkLosses) {
        let Chunk { h, rows, mut part, targets } = chunk;
        let hidden = part.features();
        let mut e = self.project(&part);
        let losses = cross_entropy(&mut e, targets);
        let mut d_part = self.pool.act_f32(part.tokens(), hidden);
        matmul(&mut d_part, Init::Zero, &[Term { matrix: Matrix::transposed(self.weight, hidden), x: &e }]);
        let h_over_s = (!matches!(d_weight, WeightGradient::None)).then_some(&mut part);
        self.correct(&mut d_part, h_over_s, &losses, targets, scale);
        match d_weight {
            WeightGradient::None => {}
            WeightGradient::Rows { ids, gradients } => {
                add_rows(ids, gradients.reborrow(), &e, &part);
                subtract_targets(gradients.reborrow(), Some(ids), targets, h, rows.start, scale);
            }
            WeightGradient::Whole(gradients) => {
                outer(Target::Rows(gradients.reborrow()), &e, &Transposed::new(&part));
                subtract_targets(gradients.reborrow(), None, targets, h, rows.start, scale);
            }
        }
        (d_part, (losses, Vec::new()))
    }

    /// Turns `d_part = W^T e` into the gradient `scale (W^T e / s - W[target])`, and `h_over_s`, which holds the rows
    /// h, into `scale h / s`; both in place.
    fn correct(
        &self,
        d_part: &mut Activation,
        h_over_s: Option<&mut Activation>,
        losses: &Losses,
        targets: &[u32],
        scale: f32,
    ) {
        match &losses.0 {
            Results::Host(_) if d_part.is_meta() => {}
            Results::Host(losses) => cpu::correct(self.weight, d_part, h_over_s, losses, targets, scale),
            Results::Gpu(losses) => cuda::correct(self.weight, d_part, h_over_s, losses, targets, scale),
        }
    }

    /// A chunk with further terms, weights, capped logits, or squared errors. Here the gradient of the logits is
    /// formed, which is one more pass over the chunk.
    fn weighted(
        &self,
        part: &Activation,
        targets: &[u32],
        weights: &[f32],
        objective: Objective<'_>,
        scale: f32,
        d_weight: &mut WeightGradient<'_>,
    ) -> (Activation, ChunkLosses) {
        let hidden = part.features();
        let mut logits = self.project(part);
        // The slope of the cap depends on the capped logits, which the gradient overwrites: a copy is kept.
        let capped = self.softcap.map(|cap| (logits.columns(0..self.outputs), cap));
        let scales: Vec<f32> = weights.iter().map(|weight| scale * weight).collect();
        let losses = if objective.squared {
            squared(&mut logits, targets, &scales)
        } else {
            gradient(&mut logits, targets, &scales, objective.terms)
        };
        if let Some((capped, cap)) = &capped {
            softcap::backward(capped, *cap, &mut logits);
        }
        let mut d_part = self.pool.act(part.tokens(), hidden);
        matmul(&mut d_part, Init::Zero, &[Term { matrix: Matrix::transposed(self.weight, hidden), x: &logits }]);
        match d_weight {
            WeightGradient::None => {}
            WeightGradient::Rows { ids, gradients } => add_rows(ids, gradients.reborrow(), &logits, part),
            WeightGradient::Whole(gradients) => {
                outer(Target::Rows(gradients.reborrow()), &logits, &Transposed::new(part));
            }
        }
        (d_part, (losses, weights.to_vec()))
    }
}

/// A chunk of the rows `h`.
struct Chunk<'a> {
    h: &'a Activation,
    rows: std::ops::Range<usize>,
    /// A copy of the chunk's rows.
    part: Activation,
    targets: &'a [u32],
}

/// `gradients[i] += sum_t d[t, ids[i]] x[t]`: `gradients [ids.len(), hidden]`, `d [rows, outputs]`, `x [rows, hidden]`.
fn add_rows(ids: &[u32], gradients: FloatsMut<'_>, d: &Activation, x: &Activation) {
    let mut columns = d.pool().act(d.tokens(), ids.len());
    match d.device() {
        Device::Cpu => cpu::pick_columns(d, ids, &mut columns),
        Device::Cuda(_) => cuda::pick_columns(d, ids, &mut columns),
        Device::Meta => {}
    }
    outer(Target::Rows(gradients), &columns, &Transposed::new(x));
}

/// `gradients[target] -= scale h[row]` for each of `targets`, where `first` is the row of the first target. With `ids`,
/// `gradients` has only the rows `ids` of W, and other targets are left out.
fn subtract_targets(
    gradients: FloatsMut<'_>,
    ids: Option<&[u32]>,
    targets: &[u32],
    h: &Activation,
    first: usize,
    scale: f32,
) {
    match h.device() {
        Device::Cpu => cpu::subtract_targets(gradients.cpu_slice(), ids, targets, h, first, scale),
        Device::Cuda(_) => cuda::subtract_targets(gradients, ids, targets, h, first, scale),
        Device::Meta => {}
    }
}
