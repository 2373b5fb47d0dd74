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

pub(super) fn argmax_of_tokens(x: &Activation) -> Vec<u32> {
    let mut best = vec![NONE; x.features()];
    let to = Shared(best.as_mut_ptr());
    par::run(x.features(), |feature| {
        let (mut tops, mut places) = ([f32::NEG_INFINITY; LANES], [0u32; LANES]);
        let mut take = |panel: usize, count: usize| {
            let values = &x.panel(panel)[feature * LANES..][..LANES];
            let lanes = tops.iter_mut().zip(&mut places).zip(values).zip((panel * LANES) as u32..);
            // Without branches, so that a vector does it.
            for (((top, place), &value), at) in lanes.take(count) {
                let higher = above(value, *top);
                *top = if higher { value } else { *top };
                *place = if higher { at } else { *place };
            }
        };
        let whole = x.tokens() / LANES;
        (0..whole).for_each(|panel| take(panel, LANES));
        if !x.tokens().is_multiple_of(LANES) {
            take(whole, x.tokens() % LANES);
        }
        // Of equal lanes the one that holds the first token.
        let (top, place) = tops.into_iter().zip(places).fold((f32::NEG_INFINITY, 0), |best, it| {
            if above(it.0, best.0) || (it.0 == best.0 && it.1 < best.1) { it } else { best }
        });
        // SAFETY: `best` has a place for each feature, and lives until all are done; this task alone has this one.
        unsafe { *to.get().add(feature) = if top.is_finite() { place } else { NONE } };
    });
    best
}

/// Whether `value` takes the place of `top`: NaN is above all else.
fn above(value: f32, top: f32) -> bool {
    value > top || value.is_nan()
}
