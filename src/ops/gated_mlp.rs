//! `SwiGLU`: `out = silu(gate) * up`. Shazeer, "GLU Variants Improve Transformer", 2020.
use super::panel::{Act, LANES};
use super::par;
use super::simd::{Simd, dispatch};

#[inline(always)]
unsafe fn forward_kernel<S: Simd>(gate: *const f32, up: *const f32, out: *mut f32, vectors: usize) {
    // SAFETY: `vectors` vectors each.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            let g = S::load(gate.add(at));
            S::store(out.add(at), S::mul(S::mul(g, S::sigmoid(g)), S::load(up.add(at))));
        }
    }
}

dispatch! { fn forward_panel = forward_kernel(gate: *const f32, up: *const f32, out: *mut f32, vectors: usize); }

#[inline(always)]
unsafe fn backward_kernel<S: Simd>(gate: *mut f32, up: *mut f32, d_out: *const f32, vectors: usize) {
    // SAFETY: `vectors` vectors each.
    unsafe {
        let one = S::splat(1.0);
        for at in (0..vectors * LANES).step_by(LANES) {
            let (g, u, d) = (S::load(gate.add(at)), S::load(up.add(at)), S::load(d_out.add(at)));
            let s = S::sigmoid(g);
            let silu = S::mul(g, s);
            // silu'(g) = s (1 + g (1 - s))
            let slope = S::mul(s, S::fma(g, S::sub(one, s), one));
            S::store(gate.add(at), S::mul(S::mul(d, u), slope));
            S::store(up.add(at), S::mul(d, silu));
        }
    }
}

dispatch! { fn backward_panel = backward_kernel(gate: *mut f32, up: *mut f32, d_out: *const f32, vectors: usize); }

/// `silu(gate) * up`, all `[tokens, features]`.
pub fn forward(gate: &Act, up: &Act) -> Act {
    assert_eq!((gate.tokens(), gate.features()), (up.tokens(), up.features()), "gate and up have one shape");
    let mut out = gate.pool().act(gate.tokens(), gate.features());
    let (to, stride) = (out.shared(), out.stride());
    par::run(gate.panels(), |panel| {
        let (gate, up) = (gate.panel(panel).as_ptr(), up.panel(panel).as_ptr());
        // SAFETY: a task owns its panel.
        unsafe { forward_panel(gate, up, to.get().add(panel * stride), stride / LANES) };
    });
    out
}

/// Turns `gate` and `up` into their gradients, given that of [`forward`]'s result.
pub fn backward(gate: &mut Act, up: &mut Act, d_out: &Act) {
    for other in [&*up, d_out] {
        assert_eq!((gate.tokens(), gate.features()), (other.tokens(), other.features()), "all have one shape");
    }
    let (stride, panels) = (gate.stride(), gate.panels());
    let (gate, up) = (gate.shared(), up.shared());
    par::run(panels, |panel| {
        let (gate, up) = (gate.get().wrapping_add(panel * stride), up.get().wrapping_add(panel * stride));
        // SAFETY: a task owns its panel of both.
        unsafe { backward_panel(gate, up, d_out.panel(panel).as_ptr(), stride / LANES) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::panel::Pool;
    use crate::ops::testing::{check_gradient, each_level, numbers};

    fn reference(gate: &[f64], up: &[f64]) -> Vec<f64> {
        gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
    }

    #[test]
    fn equals_the_definition_and_its_finite_differences() {
        each_level(|_| {
            let (tokens, features) = (19, 5);
            let gate: Vec<f32> = numbers(1, tokens * features).iter().map(|x| x * 8.0).collect();
            let (up, seed) = (numbers(2, tokens * features), numbers(3, tokens * features));
            let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
            let pool = Pool::new();
            let act = |x: &[f32]| Act::from_rows(&pool, x, features);
            let (mut ga, mut ua) = (act(&gate), act(&up));
            for (got, want) in forward(&ga, &ua).to_rows().iter().zip(reference(&double(&gate), &double(&up))) {
                assert!((f64::from(*got) - want).abs() < 2e-6);
            }
            backward(&mut ga, &mut ua, &act(&seed));
            let loss = |g: &[f64], u: &[f64]| -> f64 {
                reference(g, u).iter().zip(&seed).map(|(o, &s)| o * f64::from(s)).sum()
            };
            check_gradient("gate", &gate, &ga.to_rows(), |g| loss(g, &double(&up)));
            check_gradient("up", &up, &ua.to_rows(), |u| loss(&double(&gate), u));
        });
    }
}
