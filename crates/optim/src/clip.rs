//! Gradient clipping by global norm, equal to `torch.nn.utils.clip_grad_norm_`. Pascanu, Mikolov and Bengio, "On the
//! Difficulty of Training Recurrent Neural Networks", 2013, <https://arxiv.org/abs/1211.5063>.

/// The factor that reduces gradients of norm `norm` to a norm of at most `most`: `most / (norm + 1e-6)`, at most
/// 1. A `most` of 0 turns clipping off.
pub fn factor(norm: f64, most: f64) -> f32 {
    if most > 0.0 { (most / (norm + 1e-6)).min(1.0) as f32 } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_down_and_never_up() {
        assert!((f64::from(factor(5.0, 1.0)) - 0.2).abs() < 1e-6);
        assert_eq!((factor(0.5, 1.0), factor(5.0, 0.0)), (1.0, 1.0));
    }
}
