//! `GroupNorm` on the CPU: first one task for each group sums in f64, then one task for each panel normalizes.
use crate::activation::{Activation, LANES};
use crate::par;
use rayon::prelude::*;

pub(super) fn forward(x: &Activation, groups: usize, eps: f32, [weight, bias]: [&[f32]; 2], out: &mut Activation) {
    let size = x.features() / groups;
    let count = (x.tokens() * size) as f64;
    // The sum of `of(number)` over all numbers of a group. Lanes without a token are left out.
    let sum = |group: usize, of: &dyn Fn(f64) -> f64| -> f64 {
        let of_panel = |panel: usize| {
            let lanes = (x.tokens() - panel * LANES).min(LANES);
            let own = x.panel(panel)[group * size * LANES..(group + 1) * size * LANES].chunks_exact(LANES);
            own.flat_map(|line| &line[..lanes]).map(|&value| of(f64::from(value))).sum::<f64>()
        };
        (0..x.panels()).map(of_panel).sum()
    };
    let stats = |group: usize| {
        let mean = sum(group, &|value| value) / count;
        let var = sum(group, &|value| (value - mean) * (value - mean)) / count;
        (mean as f32, (1.0 / (var + f64::from(eps)).sqrt()) as f32)
    };
    let stats: Vec<(f32, f32)> = (0..groups).into_par_iter().map(stats).collect();
    let (stride, to) = (out.stride(), out.shared());
    par::run(x.panels(), |panel| {
        // SAFETY: the panel lies within `out`, which has the shape of `x` and is borrowed for writing; no other task has it.
        let values = unsafe { std::slice::from_raw_parts_mut(to.get().add(panel * stride), stride) };
        let lanes = (x.tokens() - panel * LANES).min(LANES);
        let lines = values.chunks_exact_mut(LANES).zip(x.panel(panel).chunks_exact(LANES));
        for (feature, (to, from)) in lines.enumerate() {
            let (mean, rstd) = stats[feature / size];
            for (to, from) in to[..lanes].iter_mut().zip(from) {
                *to = (from - mean) * rstd * weight[feature] + bias[feature];
            }
        }
    });
}
