//! Token embedding: looks up one row of a table for each token, `x[t] = scale * table[tokens[t]]`. The backward pass
//! adds each token's gradient to its row.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::{Activation, Pool};
use crate::floats::FloatsMut;
use crate::gemm::Store;
use rayon::prelude::*;
use std::sync::Arc;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::Device;

/// `x[t] = scale * table[tokens[t]]`: `[tokens, features]`, with a row-major `table [vocabulary, features]`. For a pool
/// on a GPU, the table may be in the host's memory.
///
/// # Panics
/// If a token is not in the table; the data layer has refused such rows before.
pub fn forward(pool: &Arc<Pool>, table: Store<'_>, features: usize, tokens: &[u32], scale: f32) -> Activation {
    if table.device() != pool.device() {
        return from_host(pool, table, features, tokens, scale);
    }
    let mut out = pool.act(tokens.len(), features);
    match out.device() {
        Device::Cpu => cpu::forward(table, tokens, scale, &mut out),
        Device::Cuda(_) => cuda::forward(table, tokens, scale, &mut out),
        Device::Meta => {}
    }
    out
}

/// As [`forward`], with a table on the host, where the rows are looked up and then copied. On an imaginary GPU that
/// only counts memory, the table is on the meta device.
fn from_host(pool: &Arc<Pool>, table: Store<'_>, features: usize, tokens: &[u32], scale: f32) -> Activation {
    let mut rows = vec![0.0; tokens.len() * features];
    if table.device() == Device::Cpu {
        rows.par_chunks_exact_mut(features).zip(tokens).for_each(|(row, &token)| {
            table.widen(token as usize * features, row);
            for value in row {
                *value *= scale;
            }
        });
    }
    Activation::from_rows(pool, &rows, features)
}

/// Adds `scale` times each token's gradient, a row of `dx [tokens, features]`, to its row of
/// `d_table [vocabulary, features]`, in the order of the tokens. The row of `padding` gets none, as in PyTorch's
/// `Embedding(padding_idx)`.
pub fn backward(dx: &Activation, tokens: &[u32], scale: f32, padding: Option<u32>, d_table: FloatsMut<'_>) {
    match dx.device() {
        Device::Cpu => cpu::backward(dx, tokens, scale, padding, d_table.cpu_slice()),
        Device::Cuda(_) => cuda::backward(dx, tokens, scale, padding, d_table),
        Device::Meta => {}
    }
}
