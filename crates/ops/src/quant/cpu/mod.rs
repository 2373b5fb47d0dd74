//! Quantizing and dequantizing on the CPU.
mod encode;
mod run;

pub(super) use encode::{eight, four, fp8, nested, torch_sum};
pub(crate) use run::any_run;

use super::{Look, Quantized};
use crate::par::{self, Shared};

/// Dequantizes the numbers from index `start` on to `out`.
///
/// # Panics
/// If the matrix has fewer.
pub(super) fn widen(matrix: &Quantized, start: usize, out: &mut [f32]) {
    const RUN: usize = 1 << 16;
    let within = start.checked_add(out.len()).is_some_and(|end| end <= matrix.len());
    assert!(within, "the numbers lie within the matrix");
    if out.len() <= RUN {
        // SAFETY: the assertion keeps the run within the matrix, and `out` is as long as the run.
        return unsafe { run::widen_run(matrix, start, out.as_mut_ptr(), out.len()) };
    }
    let parts: Vec<_> = out.chunks_mut(RUN).map(|part| (Shared(part.as_mut_ptr()), part.len())).collect();
    par::run(parts.len(), |task| {
        let (part, len) = parts[task];
        // SAFETY: part `task` begins at `task * RUN` of `out`, and all parts together lie within the matrix from `start` on;
        // `out` lives until all tasks are done, and no other task has this part.
        unsafe { run::widen_run(matrix, start + task * RUN, part.get(), len) };
    });
}

/// Writes the scale of every block to `out`, in float32.
pub(super) fn scales(look: Look<'_>, out: &mut [f32]) {
    for (block, scale) in out.iter_mut().enumerate() {
        *scale = look.at(block);
    }
}
