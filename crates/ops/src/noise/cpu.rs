//! The noise on the CPU: one task takes one panel.
use crate::activation::{Activation, LANES};
use crate::dropout::mix;
use crate::par;

pub(super) fn add(x: &mut Activation, bounds: &[f32], key: u64, first_row: u64) {
    let (features, stride, to) = (x.features(), x.stride(), x.shared());
    par::run(x.panels(), |panel| {
        for (lane, bound) in bounds[panel * LANES..].iter().take(LANES).enumerate() {
            let row = mix(key.wrapping_add(first_row + (panel * LANES + lane) as u64));
            for feature in 0..features {
                // 24 random bits, which float32 holds exactly.
                let bits = mix(row.wrapping_add(feature as u64)) >> 40;
                let noise = bits as f32 / (1u32 << 23) as f32 - 1.0;
                // SAFETY: `panel`, `feature` and `lane` are below those of `x`, which is borrowed for writing; no other
                // task has this panel.
                unsafe { *to.get().add(panel * stride + feature * LANES + lane) += bound * noise };
            }
        }
    });
}
