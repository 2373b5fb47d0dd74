//! The embedding on the CPU. In the forward pass one task computes one panel. The backward pass is a single task, so
//! that each sum is added token by token, whatever the number of threads.
use crate::activation::{Activation, LANES};
use crate::gemm::Store;
use crate::par;

pub(super) fn forward(table: Store<'_>, tokens: &[u32], scale: f32, out: &mut Activation) {
    let (features, to, stride) = (out.features(), out.shared(), out.stride());
    par::run(tokens.len().div_ceil(LANES), |panel| {
        let mut row = vec![0.0; features];
        for (lane, &token) in tokens[panel * LANES..].iter().take(LANES).enumerate() {
            table.widen(token as usize * features, &mut row);
            for (feature, &value) in row.iter().enumerate() {
                // SAFETY: `out` was made with a token for each of `tokens`, so that `panel` and `feature` are below its
                // own; `lane` is below LANES. It is borrowed for writing, and no other task has this panel.
                unsafe { *to.get().add(panel * stride + feature * LANES + lane) = value * scale };
            }
        }
    });
}

pub(super) fn backward(dx: &Activation, tokens: &[u32], scale: f32, padding: Option<u32>, d_table: &mut [f32]) {
    let features = dx.features();
    for (at, &token) in tokens.iter().enumerate().filter(|&(_, &token)| Some(token) != padding) {
        let from = &dx.panel(at / LANES)[at % LANES..];
        let row = &mut d_table[token as usize * features..][..features];
        for (feature, value) in row.iter_mut().enumerate() {
            *value += scale * from[feature * LANES];
        }
    }
}
