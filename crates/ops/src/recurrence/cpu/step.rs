//! The recurrence token by token, as it is defined: for sequences shorter than a panel, such as the next token of a
//! text.
use super::chunk::decay_of;
use super::{Gate, Scan};
use crate::activation::LANES;
use crate::simd::{Simd, dispatch};
use std::ops::Range;

struct Step<'a> {
    /// `[rows]`.
    query: &'a [f32],
    key: &'a [f32],
    /// `[panels][16]`.
    value: &'a [f32],
    scale: f32,
    decay: f32,
    corrects: bool,
    panels: usize,
}

/// # Safety
/// The CPU has the features of `S`; `state` has `[panels][rows][16]`, `out` and the values `[panels][16]`.
#[inline(always)]
unsafe fn step_kernel<S: Simd>(step: &Step<'_>, state: &mut [f32], out: &mut [f32]) {
    let rows = step.query.len();
    for panel in 0..step.panels {
        // SAFETY: `panel` is below `panels`, rows below `rows`.
        unsafe {
            let (state, none) = (state.as_mut_ptr().add(panel * rows * LANES), S::splat(0.0));
            let (decay, mut u) = (S::splat(step.decay), S::load(step.value.as_ptr().add(panel * LANES)));
            // Four separate sums, because a single one would wait for itself.
            let total = |sums: [S::V; 4]| S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]));
            if step.corrects {
                let mut found = [none; 4];
                for (row, key) in step.key.iter().enumerate() {
                    let sum = &mut found[row % 4];
                    *sum = S::fma(S::splat(*key), S::load(state.add(row * LANES)), *sum);
                }
                u = S::sub(u, S::mul(decay, total(found)));
            }
            u = S::mul(S::splat(step.scale), u);
            let mut sums = [none; 4];
            for (row, (key, query)) in step.key.iter().zip(step.query).enumerate() {
                let place = state.add(row * LANES);
                let value = S::fma(S::splat(*key), u, S::mul(decay, S::load(place)));
                S::store(place, value);
                let sum = &mut sums[row % 4];
                *sum = S::fma(S::splat(*query), value, *sum);
            }
            S::store(out.as_mut_ptr().add(panel * LANES), total(sums));
        }
    }
}

dispatch! { fn step_at = step_kernel(step: &Step<'_>, state: &mut [f32], out: &mut [f32]); }

/// Computes the outputs of a sequence for some heads of a group, and hands them to `out(token, head, [columns])`.
/// `state(head)` is a head's state.
pub(super) fn forward(
    scan: &Scan<'_>,
    sequence: Range<usize>,
    heads: Range<usize>,
    states: &mut [&mut [f32]],
    mut write: impl FnMut(usize, usize, &[f32]),
) {
    let (rows, columns, panels) = (scan.shape.rows, scan.shape.columns, scan.shape.panels());
    let group = heads.start / scan.group();
    let (mut value, mut out) = (vec![0.0; panels * LANES], vec![0.0; panels * LANES]);
    for token in sequence {
        let [query, key] = scan.normed_row([scan.queries, scan.keys].map(|first| {
            let at = |row| scan.act.at(token, first + group * rows + row);
            (0..rows).map(at).collect()
        }));
        for (head, state) in heads.clone().zip(states.iter_mut()) {
            for (column, value) in value.iter_mut().enumerate().take(columns) {
                *value = scan.act.at(token, scan.values + head * columns + column);
            }
            let Gate { scale, g } = (scan.gate)(head, token);
            let step = Step {
                query: &query,
                key: &key,
                value: &value,
                scale,
                decay: decay_of(f64::from(g)),
                corrects: scan.corrects,
                panels,
            };
            assert_eq!(state.len(), panels * rows * LANES, "a head's state");
            // SAFETY: `state` is as asserted; `value` and `out` have the panels.
            unsafe { step_at(&step, state, &mut out) };
            if let Some(through) = scan.through {
                out.iter_mut().zip(&value).for_each(|(out, x)| *out += through[head] * x);
            }
            write(token, head, &out[..columns]);
        }
    }
}
