//! Repeated features on the CPU. One task takes one panel, in which a feature is a vector of 16 tokens.
use crate::activation::{Activation, LANES};
use crate::par;

pub(super) fn forward(x: &Activation, y: &mut Activation, times: usize) {
    let (to, stride) = (y.shared(), y.stride());
    par::run(x.panels(), |panel| {
        // SAFETY: `y` was made with as many panels as `x`, of `stride` floats each; no other task has this one.
        let out = unsafe { std::slice::from_raw_parts_mut(to.get().add(panel * stride), stride) };
        for (lanes, copies) in x.panel(panel).chunks_exact(LANES).zip(out.chunks_exact_mut(times * LANES)) {
            copies.chunks_exact_mut(LANES).for_each(|copy| copy.copy_from_slice(lanes));
        }
    });
}

pub(super) fn backward(dy: &Activation, dx: &mut Activation, times: usize) {
    let (to, stride) = (dx.shared(), dx.stride());
    par::run(dy.panels(), |panel| {
        // SAFETY: `dx` was made with as many panels as `dy`, of `stride` floats each; no other task has this one.
        let out = unsafe { std::slice::from_raw_parts_mut(to.get().add(panel * stride), stride) };
        out.fill(0.0);
        for (sums, copies) in out.chunks_exact_mut(LANES).zip(dy.panel(panel).chunks_exact(times * LANES)) {
            for copy in copies.chunks_exact(LANES) {
                sums.iter_mut().zip(copy).for_each(|(sum, one)| *sum += one);
            }
        }
    });
}
