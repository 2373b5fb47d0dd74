//! The sum on the CPU: sums of blocks of [`TASK`] numbers, added in the order of the blocks.
use crate::par::TASK;
use rayon::prelude::*;

pub(super) fn sum(x: &[f32]) -> f64 {
    // Eight separate sums, so that the processor need not wait for one of them.
    let block = |block: &[f32]| {
        let mut sums = [0.0f64; 8];
        for (index, &x) in block.iter().enumerate() {
            sums[index % 8] += f64::from(x) * f64::from(x);
        }
        sums.iter().sum::<f64>()
    };
    let blocks: Vec<f64> = x.par_chunks(TASK).map(block).collect();
    blocks.iter().sum::<f64>()
}
