//! Gradient clipping by global norm, equal to `torch.nn.utils.clip_grad_norm_`. Pascanu, Mikolov and Bengio, "On the
//! Difficulty of Training Recurrent Neural Networks", 2013, <https://arxiv.org/abs/1211.5063>.

/// The Euclidean norm of all gradients together, summed in f64. Infinite or NaN where any gradient is.
pub fn norm(grads: &[f32]) -> f64 {
    squares(grads).sqrt()
}

/// The sum of squares in f64, for ranks that add theirs before the root. It does not depend on the number of threads.
pub fn squares(grads: &[f32]) -> f64 {
    use rayon::prelude::*;
    // Eight sums in turn, so that the processor need not wait for one; blocks are added in their order.
    let block = |block: &[f32]| {
        let mut sums = [0.0f64; 8];
        for (index, &g) in block.iter().enumerate() {
            sums[index % 8] += f64::from(g) * f64::from(g);
        }
        sums.iter().sum::<f64>()
    };
    let blocks: Vec<f64> = grads.par_chunks(1 << 16).map(block).collect();
    blocks.iter().sum::<f64>()
}

/// What gradients of norm `norm` are multiplied by so that their norm is at most `most`: `most / (norm + 1e-6)`, at
/// most
/// 1. A `most` of 0 turns clipping off.
pub fn factor(norm: f64, most: f64) -> f32 {
    if most > 0.0 { (most / (norm + 1e-6)).min(1.0) as f32 } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_down_and_never_up() {
        assert_eq!(norm(&[3.0, 4.0]), 5.0);
        assert!((f64::from(factor(5.0, 1.0)) - 0.2).abs() < 1e-6);
        assert_eq!((factor(0.5, 1.0), factor(5.0, 0.0)), (1.0, 1.0));
        assert!(norm(&[1.0, f32::NAN]).is_nan() && norm(&[f32::INFINITY]).is_infinite());
    }
}
