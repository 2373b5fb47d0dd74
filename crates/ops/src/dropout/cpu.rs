//! Dropout on the CPU: one task takes one panel. The bits of the mask come from the row and the feature by two rounds
//! of `mix`.
use super::{Dropout, mix};
use crate::activation::{Activation, LANES};
use crate::par;

pub(super) fn apply(dropout: &Dropout<'_>, x: &Activation, out: &mut Activation) {
    let (to, stride) = (out.shared(), out.stride());
    let scale = 1.0 / (1.0 - dropout.rate);
    let threshold = (f64::from(dropout.rate) * 4_294_967_296.0) as u64;
    par::run(x.panels(), |panel| {
        let from = x.panel(panel);
        let row = |lane: usize| {
            let at = panel * LANES + lane;
            // Lanes past the last row are padding: any mask will do for them.
            let token = dropout.rows.map_or(at, |rows| rows.get(at).copied().unwrap_or(at));
            mix(dropout.key.wrapping_add(dropout.first_row + token as u64))
        };
        let rows: [u64; LANES] = std::array::from_fn(row);
        for feature in 0..x.features() {
            for (lane, row) in rows.iter().enumerate() {
                let dropped = mix(row.wrapping_add(feature as u64)) >> 32 < threshold;
                let at = feature * LANES + lane;
                // SAFETY: `out` was made with the shape of `x`, so that `at` lies within the panel; no other task has
                // this panel.
                unsafe { *to.get().add(panel * stride + at) = if dropped { 0.0 } else { from[at] * scale } };
            }
        }
    });
}
