//! Gradient sums on the CPU: one task handles [`TASK`] numbers.
use super::Sum;
use crate::par::TASK;
use crate::squares;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

pub(super) fn add<T: Sum>(sums: &mut [T], grads: &[f32]) {
    sums.par_chunks_mut(TASK).zip(grads.par_chunks(TASK)).for_each(|(sums, grads)| {
        for (sum, grad) in sums.iter_mut().zip(grads) {
            *sum = T::from_f32(sum.to_f32() + grad);
        }
    });
}

pub(super) fn take<T: Sum>(sums: &mut [T], grads: &mut [f32]) {
    grads.par_chunks_mut(TASK).zip(sums.par_chunks_mut(TASK)).for_each(|(grads, sums)| {
        for (grad, sum) in grads.iter_mut().zip(sums) {
            *grad += std::mem::take(sum).to_f32();
        }
    });
}

pub(super) fn to_f32(sums: &[bf16], floats: &mut [f32]) {
    sums.convert_to_f32_slice(floats);
}

pub(super) fn squares(sums: &[bf16]) -> f64 {
    let block = |sums: &[bf16]| {
        let mut floats = vec![0.0f32; sums.len()];
        to_f32(sums, &mut floats);
        squares::sum((&floats).into())
    };
    let blocks: Vec<f64> = sums.par_chunks(TASK).map(block).collect();
    blocks.iter().sum()
}
