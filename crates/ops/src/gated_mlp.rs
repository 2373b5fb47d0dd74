//! The gated MLP's middle: `out = act(gate) * up`, with SiLU (`SwiGLU`) or GELU by tanh (`GeGLU`). Shazeer, "GLU
//! Variants Improve Transformer", 2020; Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
use super::panel::{Act, LANES};
use super::par;
use super::simd::{Simd, dispatch};

/// What the gate goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// SiLU, `x sigmoid(x)`: Llama, Qwen.
    Silu,
    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
    GeluTanh,
}

/// `(act(x), act'(x))`.
///
/// # Safety
/// The features of `S`.
#[inline(always)]
unsafe fn both<S: Simd>(gate: Gate, x: S::V) -> (S::V, S::V) {
    // SAFETY: registers only; the caller has the features of `S`.
    unsafe {
        let one = S::splat(1.0);
        match gate {
            Gate::Silu => {
                let s = S::sigmoid(x);
                // silu'(x) = s (1 + x (1 - s))
                (S::mul(x, s), S::mul(s, S::fma(x, S::sub(one, s), one)))
            }
            Gate::GeluTanh => {
                let (root, cube) = (S::splat((2.0 / std::f64::consts::PI).sqrt() as f32), S::splat(0.044_715));
                let square = S::mul(x, x);
                let t = S::tanh(S::mul(root, S::fma(S::mul(square, x), cube, x)));
                let half = S::mul(S::splat(0.5), S::add(one, t));
                // gelu'(x) = (1 + t) / 2 + x/2 (1 - t^2) sqrt(2/pi) (1 + 3 * 0.044715 x^2)
                let inner = S::mul(root, S::fma(S::mul(S::splat(3.0), cube), square, one));
                let bend = S::mul(S::mul(S::splat(0.5), x), S::mul(S::sub(one, S::mul(t, t)), inner));
                (S::mul(x, half), S::add(half, bend))
            }
        }
    }
}

/// # Safety
/// The features of `S`; `gate`, `up` and `out` hold `vectors` vectors each.
#[inline(always)]
unsafe fn forward_kernel<S: Simd>(act: Gate, gate: *const f32, up: *const f32, out: *mut f32, vectors: usize) {
    // SAFETY: `at` stays below the floats that each of the three holds, as the caller says.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            S::store(out.add(at), S::mul(both::<S>(act, S::load(gate.add(at))).0, S::load(up.add(at))));
        }
    }
}

dispatch! {
    fn forward_panel = forward_kernel(act: Gate, gate: *const f32, up: *const f32, out: *mut f32, vectors: usize);
}

/// # Safety
/// The features of `S`; `gate`, `up` and `d_out` hold `vectors` vectors each.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(act: Gate, gate: *mut f32, up: *mut f32, d_out: *const f32, vectors: usize) {
    // SAFETY: `at` stays below the floats that each of the three holds, as the caller says.
    unsafe {
        for at in (0..vectors * LANES).step_by(LANES) {
            let (g, u, d) = (S::load(gate.add(at)), S::load(up.add(at)), S::load(d_out.add(at)));
            let (value, slope) = both::<S>(act, g);
            S::store(gate.add(at), S::mul(S::mul(d, u), slope));
            S::store(up.add(at), S::mul(d, value));
        }
    }
}

dispatch! {
    fn backward_panel = backward_kernel(act: Gate, gate: *mut f32, up: *mut f32, d_out: *const f32, vectors: usize);
}

/// `act(gate) * up`, all `[tokens, features]`.
pub fn forward(act: Gate, gate: &Act, up: &Act) -> Act {
    assert_eq!((gate.tokens(), gate.features()), (up.tokens(), up.features()), "gate and up have one shape");
    let mut out = gate.pool().blank(gate.tokens(), gate.features());
    if gate.is_meta() {
        return out;
    }
    let (to, stride) = (out.shared(), out.stride());
    par::run(gate.panels(), |panel| {
        let (gate, up) = (gate.panel(panel).as_ptr(), up.panel(panel).as_ptr());
        // SAFETY: all three have one shape, and a panel of it is `stride / LANES` vectors. That of `out` is no other
        // task's.
        unsafe { forward_panel(act, gate, up, to.get().add(panel * stride), stride / LANES) };
    });
    out
}

/// Turns `gate` and `up` into their gradients, given that of [`forward`]'s result.
pub fn backward(act: Gate, gate: &mut Act, up: &mut Act, d_out: &Act) {
    for other in [&*up, d_out] {
        assert_eq!((gate.tokens(), gate.features()), (other.tokens(), other.features()), "all have one shape");
    }
    if gate.is_meta() {
        return;
    }
    let (stride, panels) = (gate.stride(), gate.panels());
    let (gate, up) = (gate.shared(), up.shared());
    par::run(panels, |panel| {
        let (gate, up) = (gate.get().wrapping_add(panel * stride), up.get().wrapping_add(panel * stride));
        // SAFETY: all three have one shape, and a panel of it is `stride / LANES` vectors. `gate` and `up` are borrowed
        // for writing, and no other task has this panel of them.
        unsafe { backward_panel(act, gate, up, d_out.panel(panel).as_ptr(), stride / LANES) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panel::Pool;
    use crate::testing::{check_gradient, each_level, numbers};

    fn reference(act: Gate, gate: &[f64], up: &[f64]) -> Vec<f64> {
        let act = |x: f64| match act {
            Gate::Silu => x / (1.0 + (-x).exp()),
            Gate::GeluTanh => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
            }
        };
        gate.iter().zip(up).map(|(&g, u)| act(g) * u).collect()
    }

    #[test]
    fn equals_the_definition_and_its_finite_differences() {
        let run = |act: Gate| {
            let (tokens, features) = (19, 5);
            let gate: Vec<f32> = numbers(1, tokens * features).iter().map(|x| x * 8.0).collect();
            let (up, seed) = (numbers(2, tokens * features), numbers(3, tokens * features));
            let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
            let pool = Pool::new();
            let panels = |x: &[f32]| Act::from_rows(&pool, x, features);
            let (mut ga, mut ua) = (panels(&gate), panels(&up));
            for (got, want) in forward(act, &ga, &ua).to_rows().iter().zip(reference(act, &double(&gate), &double(&up)))
            {
                assert!((f64::from(*got) - want).abs() < 2e-6);
            }
            backward(act, &mut ga, &mut ua, &panels(&seed));
            let loss = |g: &[f64], u: &[f64]| -> f64 {
                reference(act, g, u).iter().zip(&seed).map(|(o, &s)| o * f64::from(s)).sum()
            };
            check_gradient("gate", &gate, &ga.to_rows(), |g| loss(g, &double(&up)));
            check_gradient("up", &up, &ua.to_rows(), |u| loss(&double(&gate), u));
        };
        each_level(|_| [Gate::Silu, Gate::GeluTanh].into_iter().for_each(run));
    }
}
