//! Initial values of LoRA's A and B (`tuning.lora.init_lora_weights`).
use std::sync::Arc;

use super::factors::{factors, subtract};
use super::{Attach, Rank, loftq};
use crate::init::Stream;
use crate::svd;
use crate::weight::Weight;
use tunesmith_base::error::Result;
use tunesmith_config::InitLora;
use tunesmith_device::FloatBuffer;

/// A and B of a module. An initialization that changes the base (`PiSSA`, `LoftQ`) also replaces the module's weight.
///
/// # Errors
/// The weight cannot be read.
pub(super) fn matrices(at: &mut dyn Attach, rank: Rank, [outputs, inputs]: [usize; 2]) -> Result<[Vec<f32>; 2]> {
    if at.device().only_counts() {
        if at.config().tuning.lora.init_lora_weights.is_pissa() {
            // The base that is left has its own values, in single precision.
            at.replace(Weight::Frozen(FloatBuffer::zeros(at.device(), outputs * inputs).into()))?;
        }
        return Ok([Vec::new(), Vec::new()]);
    }
    let (lora, Rank { r, scale, .. }) = (&at.config().tuning.lora, rank);
    match (lora.init_lora_weights, at.how()) {
        (InitLora::Pissa | InitLora::PissaRounds(_), _) => {
            let mut values = at.values()?;
            let rounds = match lora.init_lora_weights {
                InitLora::PissaRounds(rounds) => Some((rounds, at.stream(&at.weight_name()))),
                _ => None,
            };
            let start = pissa(&mut values, inputs, r, scale, rounds);
            at.replace(Weight::frozen(values, at.device()))?;
            Ok(start)
        }
        (InitLora::Loftq, Some(how)) => {
            let (values, rounds) = (at.values()?, lora.loftq_iter);
            let (matrix, start) = loftq::start(&values, inputs, how, r, scale, rounds)
                .map_err(|error| error.context(format!("tensor {:?}", at.weight_name())))?;
            at.replace(Weight::Quantized(Arc::new(matrix.to(at.device()))))?;
            Ok(start)
        }
        (how, _) => Ok(fresh(how, at, r, [outputs, inputs])),
    }
}

/// A and B of all experts of a block.
pub(super) fn of_experts(at: &dyn Attach, experts: usize, r: usize, shape: [usize; 2]) -> [Vec<f32>; 2] {
    if at.device().only_counts() {
        return [Vec::new(), Vec::new()];
    }
    let how = at.config().tuning.lora.init_lora_weights;
    let mut start = fresh(how, at, r * experts, shape);
    if how == InitLora::Gaussian {
        // The deviation is that of one expert's rank.
        start[0].iter_mut().for_each(|value| *value *= experts as f32);
    }
    start
}

/// A `[rank, inputs]` and B `[outputs, rank]`, as PEFT draws them. A is uniform within `1 / sqrt(inputs)` (Kaiming's
/// rule with a = sqrt 5) or normal with deviation `1 / rank`. B is zero, unless the adapter is to change the model from
/// the start.
fn fresh(how: InitLora, at: &dyn Attach, rank: usize, [outputs, inputs]: [usize; 2]) -> [Vec<f32>; 2] {
    let stream = |index: usize| at.stream(&at.tensor_name(index));
    let uniform = |index, fan_in: usize, count| stream(index).uniforms(1.0 / (fan_in as f64).sqrt(), count);
    let (a, b) = (rank * inputs, rank * outputs);
    match how {
        InitLora::Gaussian => [stream(0).normals(1.0 / rank as f64, a), vec![0.0; b]],
        InitLora::Random => [uniform(0, inputs, a), uniform(1, rank, b)],
        // LoftQ where nothing is quantized: there is nothing to make up for.
        InitLora::Kaiming | InitLora::Pissa | InitLora::PissaRounds(_) | InitLora::Loftq => {
            [uniform(0, inputs, a), vec![0.0; b]]
        }
    }
}

/// `PiSSA`'s A and B for a weight `[rows, cols]`: `W = W_rest + scale B A`, and the weight becomes `W_rest`.
/// `scale B A` has the `rank` largest singular values, found exactly, or by `rounds` of a randomized method.
pub fn pissa(weight: &mut [f32], cols: usize, rank: usize, scale: f32, rounds: Option<(u32, Stream)>) -> [Vec<f32>; 2] {
    let matrix = svd::Rows { data: weight, cols };
    let triplets = match rounds {
        Some((rounds, stream)) => svd::rounds(matrix, rank, rounds, stream),
        None => svd::exact(matrix, rank),
    };
    let [a, b] = factors(&triplets, weight.len() / cols, scale);
    subtract(weight, cols, scale, [&a, &b]);
    [a, b]
}
