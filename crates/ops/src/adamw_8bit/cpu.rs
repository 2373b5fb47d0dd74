//! The update with 8-bit moments on the CPU: one task updates [`TASK`] values, which are whole blocks except at the
//! end.
use super::{BLOCK, CodeMap};
use crate::adamw::Step;
use crate::denormal::flush_denormal;
use crate::par::TASK;
use rayon::prelude::*;

impl CodeMap {
    /// Writes the codes of a block's values. Returns the block's scale, its largest magnitude.
    fn encode(&self, values: &[f32], codes: &mut [u8]) -> f32 {
        let most = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let inverse = 1.0 / most.max(1e-38);
        for (code, value) in codes.iter_mut().zip(values) {
            let value = (value * inverse).clamp(-1.0, 1.0);
            *code = self.bounds.partition_point(|&bound| bound < value) as u8;
        }
        most
    }
}

/// `a * b + c`, rounded once.
fn fused(a: f32, b: f32, c: f32) -> f32 {
    (f64::from(a) * f64::from(b) + f64::from(c)) as f32
}

/// The constants of a [`Step`], rounded to f32 where bitsandbytes' kernel rounds them.
#[derive(Clone, Copy)]
struct Rounded {
    factor: f32,
    beta1: f32,
    beta2: f32,
    rest1: f32,
    rest2: f32,
    epsilon: f32,
    keep: f32,
    pace: f32,
    root: f32,
}

impl From<&Step<'_>> for Rounded {
    fn from(step: &Step) -> Self {
        let [keep, pace, root] = step.rounded();
        Self {
            factor: step.factor.known(),
            beta1: step.beta1 as f32,
            beta2: step.beta2 as f32,
            rest1: (1.0 - step.beta1) as f32,
            rest2: (1.0 - step.beta2) as f32,
            epsilon: step.epsilon as f32,
            keep,
            pace,
            root,
        }
    }
}

impl Rounded {
    /// Both moments after one more gradient.
    fn moments(&self, grad: f32, m: f32, v: f32) -> (f32, f32) {
        let m = fused(grad, self.rest1, m * self.beta1);
        let v = fused(self.rest2 * grad, grad, v * self.beta2);
        (flush_denormal(m), flush_denormal(v))
    }

    /// The weight after a step with these new moments.
    fn value(&self, value: f32, m: f32, v: f32) -> f32 {
        value * self.keep - self.pace * (m / (v.sqrt() / self.root + self.epsilon))
    }

    /// Updates one block: decodes its moments, makes the step, and encodes the moments again.
    fn block(
        &self,
        maps: [&CodeMap; 2],
        values: &mut [f32],
        grads: &[f32],
        codes: [&mut [u8]; 2],
        scales: [&mut f32; 2],
    ) {
        let [codes1, codes2] = codes;
        let [scale1, scale2] = scales;
        let (mut first, mut second) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
        for (at, (value, grad)) in values.iter_mut().zip(grads).enumerate() {
            let m = maps[0].values[usize::from(codes1[at])] * *scale1;
            let v = maps[1].values[usize::from(codes2[at])] * *scale2;
            let (m, v) = self.moments(grad * self.factor, m, v);
            *value = self.value(*value, m, v);
            (first[at], second[at]) = (m, v);
        }
        *scale1 = maps[0].encode(&first[..values.len()], codes1);
        *scale2 = maps[1].encode(&second[..values.len()], codes2);
    }
}

pub(super) fn update(
    values: &mut [f32],
    grads: &[f32],
    [codes1, codes2]: [&mut [u8]; 2],
    [scales1, scales2]: [&mut [f32]; 2],
    maps: [&CodeMap; 2],
    step: &Step,
) {
    const SCALES: usize = TASK / BLOCK;
    let formulas = Rounded::from(step);
    let codes = codes1.par_chunks_mut(TASK).zip(codes2.par_chunks_mut(TASK));
    let scales = scales1.par_chunks_mut(SCALES).zip(scales2.par_chunks_mut(SCALES));
    let parts = values.par_chunks_mut(TASK).zip(grads.par_chunks(TASK)).zip(codes.zip(scales));
    parts.for_each(|((values, grads), ((codes1, codes2), (scales1, scales2)))| {
        let codes = codes1.chunks_mut(BLOCK).zip(codes2.chunks_mut(BLOCK));
        let state = codes.zip(scales1.iter_mut().zip(scales2));
        let blocks = values.chunks_mut(BLOCK).zip(grads.chunks(BLOCK)).zip(state);
        for ((values, grads), ((codes1, codes2), (scale1, scale2))) in blocks {
            formulas.block(maps, values, grads, [codes1, codes2], [scale1, scale2]);
        }
    });
}

pub(super) fn update_small(values: &mut [f32], grads: &[f32], m: &mut [f32], v: &mut [f32], step: &Step) {
    let formulas = Rounded::from(step);
    for (((value, grad), m), v) in values.iter_mut().zip(grads).zip(m).zip(v) {
        (*m, *v) = formulas.moments(grad * formulas.factor, *m, *v);
        *value = formulas.value(*value, *m, *v);
    }
}
