//! A task looks through some features of a panel; the largest of a token's tasks wins.
use super::NONE;
use crate::activation::{Activation, LANES};
use crate::par::{self, Shared};

/// Features that one task looks through.
pub(super) const SPAN: usize = 4096;

pub(super) fn argmax(x: &Activation) -> Vec<u32> {
    let (spans, features) = (x.features().div_ceil(SPAN), x.features());
    let mut tops = vec![[(f32::NEG_INFINITY, 0u32); LANES]; x.panels() * spans];
    let to = Shared(tops.as_mut_ptr());
    par::run(x.panels() * spans, |task| {
        let (panel, start) = (task / spans, task % spans * SPAN);
        let lanes = &x.panel(panel)[start * LANES..features.min(start + SPAN) * LANES];
        let mut top = [(f32::NEG_INFINITY, start as u32); LANES];
        for (feature, lanes) in (start as u32..).zip(lanes.chunks_exact(LANES)) {
            for (top, &value) in top.iter_mut().zip(lanes) {
                if above(value, top.0) {
                    *top = (value, feature);
                }
            }
        }
        // SAFETY: `tops` has a place for each task, and lives until all are done; this task alone has this one.
        unsafe { *to.get().add(task) = top };
    });
    let of = |token: usize| {
        let tops = tops[token / LANES * spans..][..spans].iter().map(|lanes| &lanes[token % LANES]);
        let (top, place) =
            tops.fold((f32::NEG_INFINITY, 0), |best, &top| if above(top.0, best.0) { top } else { best });
        if top.is_finite() { place } else { NONE }
    };
    (0..x.tokens()).map(of).collect()
}

/// Whether `value` takes the place of `top`: NaN is above all else.
fn above(value: f32, top: f32) -> bool {
    value > top || value.is_nan()
}
