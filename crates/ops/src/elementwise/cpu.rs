//! Elementwise arithmetic on the CPU: one task takes one panel.
use crate::activation::{Activation, LANES};
use crate::par;

/// `x = f(x)`.
pub(super) fn map(x: &mut Activation, f: impl Fn(f32) -> f32 + Sync) {
    let (stride, panels, to) = (x.stride(), x.panels(), x.shared());
    par::run(panels, |panel| {
        // SAFETY: the panel lies within `x`, which is borrowed for writing; no other task has it.
        let values = unsafe { std::slice::from_raw_parts_mut(to.get().add(panel * stride), stride) };
        for value in values {
            *value = f(*value);
        }
    });
}

/// `y = f(y, x)`, of one shape.
pub(super) fn zip(y: &mut Activation, x: &Activation, f: impl Fn(f32, f32) -> f32 + Sync) {
    let (stride, to) = (y.stride(), y.shared());
    par::run(x.panels(), |panel| {
        // SAFETY: the panel lies within `y`, which has the shape of `x` and is borrowed for writing; no other task has it.
        let values = unsafe { std::slice::from_raw_parts_mut(to.get().add(panel * stride), stride) };
        values.iter_mut().zip(x.panel(panel)).for_each(|(y, &x)| *y = f(*y, x));
    });
}

pub(super) fn add_bias(y: &mut Activation, bias: &[f32]) {
    let (stride, panels, to) = (y.stride(), y.panels(), y.shared());
    par::run(panels, |panel| {
        // SAFETY: the panel lies within `y`, which is borrowed for writing; no other task has it.
        let values = unsafe { std::slice::from_raw_parts_mut(to.get().add(panel * stride), stride) };
        for (lanes, bias) in values.chunks_exact_mut(LANES).zip(bias) {
            for sum in lanes {
                *sum += bias;
            }
        }
    });
}

/// In a single task, so that each sum is added panel by panel, whatever the number of threads.
pub(super) fn sum_tokens(dy: &Activation, sums: &mut [f32]) {
    for panel in 0..dy.panels() {
        for (lanes, total) in dy.panel(panel).chunks_exact(LANES).zip(sums.iter_mut()) {
            *total += lanes.iter().sum::<f32>();
        }
    }
}
