//! `AdamW` whose moments take a byte each: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022,
//! <https://arxiv.org/abs/2110.02861>. Equal to bitsandbytes' blockwise `AdamW8bit`.
//!
//! A block of 256 moments shares its largest magnitude. A moment divided by that is stored as the nearest entry of a
//! dynamic code map: a signed map for the first moment, an unsigned one for the second. Tensors of under 4096 values
//! keep f32 moments.
use super::adamw::Betas;
use super::optimizer::{Slot, State, StateDtype, StateSpec, TensorUpdate, UpdateRule};
use tunesmith_base::error::Result;
use tunesmith_config::TrainConfig;
use tunesmith_config::arguments::Reader;
use tunesmith_ops::adamw_8bit::{self, BLOCK, CodeMap};

/// Tensors with fewer values than this keep float32 moments.
const MIN_8BIT_SIZE: usize = 4096;

/// The update rule of 8-bit `AdamW`. Its state has bitsandbytes' names: the codes `state1` and `state2`, one byte for
/// each value, and the scales `absmax1` and `absmax2`, one float32 for each block.
#[derive(Debug, Clone)]
pub struct AdamW8bit {
    betas: Betas,
    signed: CodeMap,
    unsigned: CodeMap,
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

    fn takes_found_factor(&self) -> bool {
        true
    }

    fn update(&self, update: TensorUpdate<'_>) {
        let step = self.betas.step(&update);
        let TensorUpdate { values, grads, state, .. } = update;
        match state {
            [State::F32(m), State::F32(v)] => {
                adamw_8bit::update_small(values, grads, m.view_mut(), v.view_mut(), &step);
            }
            [State::U8(codes1), State::U8(codes2), State::F32(absmax1), State::F32(absmax2)] => {
                let (codes, absmax) =
                    ([codes1.view_mut(), codes2.view_mut()], [absmax1.view_mut(), absmax2.view_mut()]);
                adamw_8bit::update(values, grads, codes, absmax, [&self.signed, &self.unsigned], &step);
            }
            _ => {}
        }
    }
}
