//! The last segment: final norm, LM head and loss, on the rows that carry a label only, chunk by chunk. A chunk's
//! gradient is made in the forward pass, so that logits of more than one chunk never exist. A head of scores is the same with
//! labels in the place of the vocabulary, or with one number and its squared error.
//!
//! Let `e = exp(logit - max)` and `s = sum e`. The gradient of `scale * nll` with respect to the normed row `h` is
//! `scale (W^T e / s - W[target])`. That of `W` is `scale (e / s - onehot) h^T`.
use super::grads::Grads;
use super::norm::Norm;
use super::pass::Pass;
use super::weight::Weight;
use std::sync::Arc;
use tunesmith_ops::gemm::{Init, Matrix, Store, Target, Term, Transposed, matmul, outer};
use tunesmith_ops::loss::{self, Terms};
use tunesmith_ops::panel::{Act, LANES, Pool};
use tunesmith_ops::softcap;
use tunesmith_plan::memory::head_chunk;

#[derive(Debug)]
pub struct Head {
    pub norm: Norm,
    /// `[vocabulary, hidden]`; shared with the embedding where the model ties them.
    pub weight: Weight,
    pub vocabulary: usize,
    /// The loss is the squared error of one number; targets are the bits of numbers.
    pub squared: bool,
    /// Outputs are labels: how many rows had theirs right is counted.
    pub counts: bool,
    /// What logits are multiplied by.
    pub scale: f32,
    /// Then they go through `cap * tanh(logit / cap)`.
    pub softcap: Option<f32>,
    /// Chunks of logits come from here, so that the walk's pool does not size them for a whole batch.
    pub pool: Arc<Pool>,
}

/// What a walk through the head came to.
#[derive(Debug)]
pub struct Walked {
    /// The sum of the rows' losses.
    pub total: f64,
    /// Rows whose target was the most probable one; of a weighted walk only where [`Head::counts`].
    pub right: usize,
    /// The gradient with respect to the rows.
    pub dx: Act,
}

impl Head {
    fn chunk(&self) -> usize {
        head_chunk(self.vocabulary)
    }

    /// The normed rows, times the head's constant, and `rstd`.
    fn normed(&self, pass: &Pass<'_>, x: &Act) -> (Act, Act) {
        let (mut h, rstd) = self.norm.forward(pass, x, 1);
        self.rescale(&mut h);
        (h, rstd)
    }

    fn rescale(&self, h: &mut Act) {
        if self.scale != 1.0 {
            h.data_mut().iter_mut().for_each(|value| *value *= self.scale);
        }
    }

    /// Logits of the rows `h`.
    fn project(&self, weight: Store<'_>, h: &Act) -> Act {
        let mut logits = self.pool.blank(h.tokens(), self.vocabulary);
        matmul(&mut logits, Init::Zero, &[Term { matrix: Matrix::rows(weight, h.features()), x: h }]);
        if let Some(cap) = self.softcap {
            softcap::forward(&mut logits, cap);
        }
        logits
    }

    /// Logits of a few rows `x [rows, hidden]`, in parts `[some rows, vocabulary]`.
    pub fn next(&self, pass: &Pass<'_>, x: &Act) -> Vec<Act> {
        let (h, _) = self.normed(pass, x);
        let weight = self.weight.view(pass.values);
        let all: Vec<usize> = (0..x.tokens()).collect();
        all.chunks(self.chunk()).map(|part| self.project(weight.store(), &h.gather(part))).collect()
    }

    /// Logits `[rows, vocabulary]`, row-major, of a few rows `x [rows, hidden]`.
    pub fn logits(&self, pass: &Pass<'_>, x: &Act) -> Vec<f32> {
        self.next(pass, x).iter().flat_map(Act::to_rows).collect()
    }

    /// Each row's negative log-likelihood of its target, for `x [rows, hidden]`.
    pub fn losses(&self, pass: &Pass<'_>, x: &Act, targets: &[u32]) -> Vec<f32> {
        self.scored_losses(pass, x, targets).into_iter().map(|(nll, _)| nll).collect()
    }

    /// As [`Head::losses`], with whether the target is the most probable token, or one of several equally probable ones.
    pub fn scored_losses(&self, pass: &Pass<'_>, x: &Act, targets: &[u32]) -> Vec<(f32, bool)> {
        let (h, _) = self.normed(pass, x);
        let weight = self.weight.view(pass.values);
        let mut losses = Vec::with_capacity(targets.len());
        let all: Vec<usize> = (0..x.tokens()).collect();
        for (part, targets) in all.chunks(self.chunk()).zip(targets.chunks(self.chunk())) {
            let mut logits = self.project(weight.store(), &h.gather(part));
            if self.squared {
                let errors = loss::squared(&mut logits, targets, &vec![0.0; targets.len()]);
                losses.extend(errors.into_iter().map(|error| (error, false)));
                continue;
            }
            // What is left of the logits are `exp(logit - max)`: 1 for the most probable.
            let nll = loss::forward(&mut logits, targets).into_iter().map(|(nll, _)| nll);
            let right = |(token, &target): (usize, &u32)| logits.at(token, target as usize) == 1.0;
            losses.extend(nll.zip(targets.iter().enumerate().map(right)));
        }
        losses
    }

    /// The sum of the rows' losses with what comes along, among it the gradient of `scale` times that sum with respect to
    /// `x [rows, hidden]`. Adds the gradients of what is trained here to `grads`.
    pub fn forward_backward(
        &self,
        pass: &Pass<'_>,
        x: &Act,
        targets: &[u32],
        scale: f32,
        grads: &mut Grads<'_>,
    ) -> Walked {
        if self.softcap.is_some() || self.squared {
            return self.weighted(pass, x, targets, &vec![1.0; targets.len()], Terms::default(), scale, grads);
        }
        let hidden = x.features();
        let (h, rstd) = self.normed(pass, x);
        let weight = self.weight.view(pass.values);
        let mut dh = x.pool().act(x.tokens(), hidden);
        let mut row = vec![0.0; hidden];
        let (mut total, mut right) = (0.0, 0);
        let all: Vec<usize> = (0..x.tokens()).collect();
        for (rows, targets) in all.chunks(self.chunk()).zip(targets.chunks(self.chunk())) {
            let mut part = self.pool.act(rows.len(), hidden);
            let (first, floats) = (rows[0] / LANES * h.stride(), part.panels() * part.stride());
            part.data_mut().copy_from_slice(&h.data()[first..first + floats]);
            let mut e = self.project(weight.store(), &part);
            let losses = loss::forward(&mut e, targets);
            total += losses.iter().map(|&(nll, _)| f64::from(nll)).sum::<f64>();
            // What is left of the logits are `exp(logit - max)`: 1 for the most probable.
            right += targets.iter().enumerate().filter(|&(token, &target)| e.at(token, target as usize) == 1.0).count();
            let mut d_part = self.pool.act(rows.len(), hidden);
            matmul(&mut d_part, Init::Zero, &[Term { matrix: Matrix::transposed(weight.store(), hidden), x: &e }]);
            for panel in 0..d_part.panels() {
                let mut factor = [0.0f32; LANES];
                for (lane, &(_, sum)) in losses[panel * LANES..].iter().take(LANES).enumerate() {
                    factor[lane] = scale / sum;
                }
                let values = d_part.panel_mut(panel);
                for lanes in values.chunks_exact_mut(LANES) {
                    lanes.iter_mut().zip(factor).for_each(|(value, factor)| *value *= factor);
                }
                for (lane, &target) in targets[panel * LANES..].iter().take(LANES).enumerate() {
                    weight.store().widen(target as usize * hidden, &mut row);
                    for (feature, w) in row.iter().enumerate() {
                        values[feature * LANES + lane] -= scale * w;
                    }
                }
                if self.weight.trains() {
                    // `h / s` for the gradient of W; lanes past the end become zero.
                    for lanes in part.panel_mut(panel).chunks_exact_mut(LANES) {
                        lanes.iter_mut().zip(factor).for_each(|(value, factor)| *value *= factor);
                    }
                }
            }
            dh.data_mut()[first..first + floats].copy_from_slice(d_part.data());
            if let Weight::Rows(_) = &self.weight {
                self.weight.add_head_gradient(&e, &part, &h.gather(rows), targets, scale, grads);
            }
            if let Some(range) = self.weight.trained() {
                let d_weight = &mut grads[range.clone()];
                outer(Target::Rows(d_weight), &e, &Transposed::new(&part));
                for (&row, &target) in rows.iter().zip(targets) {
                    let out = &mut d_weight[target as usize * hidden..][..hidden];
                    let from = &h.panel(row / LANES)[row % LANES..];
                    for (feature, value) in out.iter_mut().enumerate() {
                        *value -= scale * from[feature * LANES];
                    }
                }
            }
        }
        self.rescale(&mut dh);
        let mut dx = x.pool().act(x.tokens(), hidden);
        self.norm.backward(pass, x, &rstd, &dh, Some((&mut dx, false)), grads);
        Walked { total, right, dx }
    }
}

/// Objectives beside plain cross-entropy, rows that count more or less than others, and capped logits. Here the gradient
/// of the logits is formed: one pass more over a chunk.
impl Head {
    /// As [`Head::forward_backward`], each row's loss counting `weights[row]` times, with further `terms` in the gradient.
    /// The sum is that of the plain losses by their weights.
    #[allow(clippy::too_many_arguments)] // the plain case's, and what makes it not plain
    pub fn weighted(
        &self,
        pass: &Pass<'_>,
        x: &Act,
        targets: &[u32],
        weights: &[f32],
        terms: Terms,
        scale: f32,
        grads: &mut Grads<'_>,
    ) -> Walked {
        let hidden = x.features();
        let (h, rstd) = self.normed(pass, x);
        let weight = self.weight.view(pass.values);
        let mut dh = x.pool().act(x.tokens(), hidden);
        let (mut total, mut right) = (0.0, 0);
        let all: Vec<usize> = (0..x.tokens()).collect();
        for rows in all.chunks(self.chunk()) {
            let (targets, weights) = (&targets[rows[0]..][..rows.len()], &weights[rows[0]..][..rows.len()]);
            let mut part = self.pool.act(rows.len(), hidden);
            let (first, floats) = (rows[0] / LANES * h.stride(), part.panels() * part.stride());
            part.data_mut().copy_from_slice(&h.data()[first..first + floats]);
            let mut logits = self.project(weight.store(), &part);
            // The cap's slope is found from the capped logits, which the gradient overwrites.
            let capped = self.softcap.map(|cap| (logits.columns(0..self.vocabulary), cap));
            if self.counts {
                let of = |token| (0..self.vocabulary).map(move |label| (token, label));
                let most = |token| of(token).map(|(token, label)| logits.at(token, label)).fold(f32::MIN, f32::max);
                let is_right = |&(token, &target): &(usize, &u32)| logits.at(token, target as usize) >= most(token);
                right += targets.iter().enumerate().filter(is_right).count();
            }
            let scales: Vec<f32> = weights.iter().map(|weight| scale * weight).collect();
            let losses = if self.squared {
                loss::squared(&mut logits, targets, &scales)
            } else {
                loss::gradient(&mut logits, targets, &scales, terms)
            };
            if let Some((capped, cap)) = &capped {
                softcap::backward(capped, *cap, &mut logits);
            }
            total += losses.iter().zip(weights).map(|(&nll, &weight)| f64::from(nll) * f64::from(weight)).sum::<f64>();
            let mut d_part = self.pool.act(rows.len(), hidden);
            matmul(&mut d_part, Init::Zero, &[Term { matrix: Matrix::transposed(weight.store(), hidden), x: &logits }]);
            dh.data_mut()[first..first + floats].copy_from_slice(d_part.data());
            self.weight.add_head_gradient(&logits, &part, &part, &[], 0.0, grads);
            if let Some(range) = self.weight.trained() {
                outer(Target::Rows(&mut grads[range.clone()]), &logits, &Transposed::new(&part));
            }
        }
        self.rescale(&mut dh);
        let mut dx = x.pool().act(x.tokens(), hidden);
        self.norm.backward(pass, x, &rstd, &dh, Some((&mut dx, false)), grads);
        Walked { total, right, dx }
    }
}
