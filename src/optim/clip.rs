//! Gradient clipping by global norm, equal to `torch.nn.utils.clip_grad_norm_`.

/// The Euclidean norm, summed in f64. Infinite or NaN where any gradient is.
pub fn norm(grads: &[f32]) -> f64 {
    let block = |block: &[f32]| block.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>();
    grads.chunks(4096).map(block).sum::<f64>().sqrt()
}

/// What gradients of norm `norm` are multiplied by so that it is at most `most`; 1 where `most` is 0 (off).
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
