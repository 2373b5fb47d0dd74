//! The argmax on the CPU. One task searches some features of a panel; then the best of a token's tasks wins.
use super::NONE;
use crate::activation::{Activation, LANES};
use crate::par::{self, Shared};
use crate::simd::{Simd, dispatch};

/// How many features one task searches.
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

/// Finds the largest value of each lane in `panels` vectors, and the vector that has it (the first of equal ones). It
/// replaces what `tops` holds where it is [`above`] that.
///
/// # Safety
/// The CPU has the features of `S`; the vectors lie `apart` floats from one another, from `first` on.
#[inline(always)]
unsafe fn highest_kernel<S: Simd>(first: *const f32, apart: usize, panels: usize, tops: &mut Tops) {
    let Tops { mut values, mut panels_of } = *tops;
    for panel in 0..panels {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: the vector is there, as the caller says, and so are the features.
        unsafe { S::store(lanes.as_mut_ptr(), S::load(first.add(panel * apart))) };
        // Without branches, so that the compiler uses vector instructions.
        for lane in 0..LANES {
            let higher = above(lanes[lane], values[lane]);
            values[lane] = if higher { lanes[lane] } else { values[lane] };
            panels_of[lane] = if higher { panel as u32 } else { panels_of[lane] };
        }
    }
    *tops = Tops { values, panels_of };
}

dispatch! { fn highest = highest_kernel(first: *const f32, apart: usize, panels: usize, tops: &mut Tops); }

/// The largest value of each lane so far, and the number of the panel that has it.
struct Tops {
    values: [f32; LANES],
    panels_of: [u32; LANES],
}

pub(super) fn argmax_of_tokens(x: &Activation) -> Vec<u32> {
    let mut best = vec![NONE; x.features()];
    let to = Shared(best.as_mut_ptr());
    par::run(x.features(), |feature| {
        let mut tops = Tops { values: [f32::NEG_INFINITY; LANES], panels_of: [0; LANES] };
        let whole = x.tokens() / LANES;
        if whole > 0 {
            let first = x.panel(0)[feature * LANES..].as_ptr();
            // SAFETY: each of these panels has sixteen numbers of the feature.
            unsafe { highest(first, x.stride(), whole, &mut tops) };
        }
        if !x.tokens().is_multiple_of(LANES) {
            let lanes = &x.panel(whole)[feature * LANES..][..x.tokens() % LANES];
            for ((top, panel), &value) in tops.values.iter_mut().zip(&mut tops.panels_of).zip(lanes) {
                if above(value, *top) {
                    (*top, *panel) = (value, whole as u32);
                }
            }
        }
        // Of equal lanes, the one with the first token wins.
        let lanes = tops.values.into_iter().zip(tops.panels_of).zip(0u32..);
        let (top, place) = lanes.map(|((top, panel), lane)| (top, panel * LANES as u32 + lane)).fold(
            (f32::NEG_INFINITY, 0),
            |best, it| {
                if above(it.0, best.0) || (it.0 == best.0 && it.1 < best.1) { it } else { best }
            },
        );
        // SAFETY: `best` has a place for each feature, and lives until all are done; this task alone has this one.
        unsafe { *to.get().add(feature) = if top.is_finite() { place } else { NONE } };
    });
    best
}

/// Whether `value` takes the place of `top`: NaN is above all else.
#[inline(always)]
fn above(value: f32, top: f32) -> bool {
    (value > top) | value.is_nan()
}
