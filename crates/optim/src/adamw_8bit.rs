//! `AdamW` whose moments take a byte each: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022,
//! <https://arxiv.org/abs/2110.02861>. Equal to bitsandbytes' blockwise `AdamW8bit`.
//!
//! A block of 256 moments shares its largest magnitude. A moment divided by that is stored as the nearest entry of a
//! dynamic code map: a signed map for the first moment, an unsigned one for the second. Tensors of under 4096 values
//! keep f32 moments.
use super::adamw::Betas;
use super::optimizer::{Slot, State, StateDtype, StateSpec, TASK, TensorUpdate, UpdateRule};
use rayon::prelude::*;
use tunesmith_base::error::Result;
use tunesmith_config::TrainConfig;
use tunesmith_config::arguments::Reader;
use tunesmith_ops::quant::map::dynamic;

/// Moments that share a scale; ranks cut a tensor only between blocks.
pub const BLOCK: usize = 256;
/// Tensors of fewer values keep f32 moments.
const MIN_8BIT_SIZE: usize = 4096;

/// The rule. Its state has bitsandbytes' names: the codes `state1` and `state2`, a byte a value, and the scales
/// `absmax1` and `absmax2`, an f32 a block.
#[derive(Debug, Clone)]
pub struct AdamW8bit {
    betas: Betas,
    signed: CodeMap,
    unsigned: CodeMap,
}

/// The 256 values that a byte can mean, rising, and the bounds between them.
#[derive(Debug, Clone)]
pub struct CodeMap {
    /// By byte, the value that it means.
    pub values: Vec<f32>,
    bounds: Vec<f32>,
}

impl CodeMap {
    /// bitsandbytes' dynamic map, over -1..=1 where `signed`, else over 0..=1.
    pub fn new(signed: bool) -> Self {
        let values = dynamic(signed).to_vec();
        let bounds = values.windows(2).map(|ends| f32::midpoint(ends[0], ends[1])).collect();
        Self { values, bounds }
    }

    /// Writes the codes of a block's values; returns its scale, the largest magnitude.
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

/// The constants of one step of [`super::adamw`]'s formula, rounded to f32 as bitsandbytes' kernel has them.
#[derive(Clone, Copy)]
struct Step {
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

impl Step {
    /// The moments after a gradient.
    fn moments(&self, grad: f32, m: f32, v: f32) -> (f32, f32) {
        (fused(grad, self.rest1, m * self.beta1), fused(self.rest2 * grad, grad, v * self.beta2))
    }

    /// The weight after a step with the new moments.
    fn value(&self, value: f32, m: f32, v: f32) -> f32 {
        value * self.keep - self.pace * (m / (v.sqrt() / self.root + self.epsilon))
    }

    /// Updates a block whose moments are bytes: decodes them, makes the step, and codes them anew.
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

impl UpdateRule for AdamW8bit {
    fn of(train: &TrainConfig, _: &mut Reader<'_>) -> Result<Self> {
        Ok(Self { betas: train.into(), signed: CodeMap::new(true), unsigned: CodeMap::new(false) })
    }

    fn state(&self, slot: &Slot) -> Vec<StateSpec> {
        if slot.count() < MIN_8BIT_SIZE {
            return vec![StateSpec::like("state1", slot), StateSpec::like("state2", slot)];
        }
        let codes = |name| StateSpec { name, shape: slot.shape.clone(), dtype: StateDtype::U8, each: 1 };
        let scales = |name| StateSpec { each: BLOCK, ..StateSpec::floats(name, vec![slot.count().div_ceil(BLOCK)]) };
        vec![codes("state1"), codes("state2"), scales("absmax1"), scales("absmax2")]
    }

    fn grain(&self, slot: &Slot) -> usize {
        if slot.count() < MIN_8BIT_SIZE { 1 } else { BLOCK }
    }

    fn update(&self, update: TensorUpdate<'_>) {
        let TensorUpdate { slot, values, grads, factor, rate, step, state } = update;
        let Betas { beta1, beta2, epsilon, weight_decay } = self.betas.of(slot);
        let exponent = step as f64;
        let formulas = Step {
            factor,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            rest1: (1.0 - beta1) as f32,
            rest2: (1.0 - beta2) as f32,
            epsilon: epsilon as f32,
            keep: (1.0 - rate * weight_decay) as f32,
            pace: (rate / (1.0 - beta1.powf(exponent))) as f32,
            root: (1.0 - beta2.powf(exponent)).sqrt() as f32,
        };
        match state {
            [State::F32(m), State::F32(v)] => {
                for (((value, grad), m), v) in values.iter_mut().zip(grads).zip(m).zip(v) {
                    (*m, *v) = formulas.moments(grad * factor, *m, *v);
                    *value = formulas.value(*value, *m, *v);
                }
            }
            [State::U8(codes1), State::U8(codes2), State::F32(scales1), State::F32(scales2)] => {
                const SCALES: usize = TASK / BLOCK;
                let codes = codes1.par_chunks_mut(TASK).zip(codes2.par_chunks_mut(TASK));
                let scales = scales1.par_chunks_mut(SCALES).zip(scales2.par_chunks_mut(SCALES));
                let parts = values.par_chunks_mut(TASK).zip(grads.par_chunks(TASK)).zip(codes.zip(scales));
                parts.for_each(|((values, grads), ((codes1, codes2), (scales1, scales2)))| {
                    let codes = codes1.chunks_mut(BLOCK).zip(codes2.chunks_mut(BLOCK));
                    let state = codes.zip(scales1.iter_mut().zip(scales2));
                    let blocks = values.chunks_mut(BLOCK).zip(grads.chunks(BLOCK)).zip(state);
                    for ((values, grads), ((codes1, codes2), (scale1, scale2))) in blocks {
                        let maps = [&self.signed, &self.unsigned];
                        formulas.block(maps, values, grads, [codes1, codes2], [scale1, scale2]);
                    }
                });
            }
            _ => {}
        }
    }
}
