//! The cut at a quantile on the CPU. One task takes one panel, in which a token is a lane.
use crate::activation::{Activation, LANES};
use crate::par;
use crate::simd::{Simd, dispatch};

/// A number for each lane, which is a token.
type Lanes = [f32; LANES];

/// The mean and the standard deviation of each token's features.
///
/// # Safety
/// The CPU has the features of `S`; `x` holds `dim` vectors.
#[inline(always)]
unsafe fn stats<S: Simd>(x: *const f32, dim: usize) -> [Lanes; 2] {
    // SAFETY: `feature` is below `dim`: within `x`, as the caller says.
    unsafe {
        let share = S::splat(1.0 / dim as f32);
        let mut sums = [S::splat(0.0); 2];
        for feature in 0..dim {
            sums[feature % 2] = S::add(S::load(x.add(feature * LANES)), sums[feature % 2]);
        }
        let mean = S::mul(S::add(sums[0], sums[1]), share);
        let mut squares = [S::splat(0.0); 2];
        for feature in 0..dim {
            let off = S::sub(S::load(x.add(feature * LANES)), mean);
            squares[feature % 2] = S::fma(off, off, squares[feature % 2]);
        }
        let mut lanes = [[0.0; LANES]; 2];
        S::store(lanes[0].as_mut_ptr(), mean);
        S::store(lanes[1].as_mut_ptr(), S::mul(S::add(squares[0], squares[1]), share));
        [lanes[0], lanes[1].map(f32::sqrt)]
    }
}

/// # Safety
/// The CPU has the features of `S`; `x` and `out` hold `dim` vectors.
#[inline(always)]
unsafe fn forward_kernel<S: Simd>(x: *const f32, multiplier: f32, dim: usize, out: *mut f32) {
    // SAFETY: `feature` is below `dim`: within both, as the caller says.
    unsafe {
        let [mean, deviation] = stats::<S>(x, dim);
        let (mean, deviation) = (S::load(mean.as_ptr()), S::load(deviation.as_ptr()));
        let (cut, none) = (S::fma(deviation, S::splat(multiplier), mean), S::splat(0.0));
        for feature in 0..dim {
            let above = S::sub(S::load(x.add(feature * LANES)), cut);
            S::store(out.add(feature * LANES), S::max(none, above));
        }
    }
}

dispatch! { fn forward_panel = forward_kernel(x: *const f32, multiplier: f32, dim: usize, out: *mut f32); }

/// # Safety
/// The CPU has the features of `S`; `x` and `dy` hold `dim` vectors.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(x: *const f32, multiplier: f32, dim: usize, dy: *mut f32) {
    // SAFETY: `feature` is below `dim`: within both, as the caller says.
    unsafe {
        let [mean, deviation] = stats::<S>(x, dim);
        let slope = deviation.map(|it| if it > 0.0 { multiplier / (it * dim as f32) } else { 0.0 });
        let (mean, deviation, slope) = (S::load(mean.as_ptr()), S::load(deviation.as_ptr()), S::load(slope.as_ptr()));
        let (cut, none) = (S::fma(deviation, S::splat(multiplier), mean), S::splat(0.0));
        let mut sum = none;
        for feature in 0..dim {
            let at = feature * LANES;
            let kept = S::if_gt(S::sub(S::load(x.add(at)), cut), none, S::load(dy.add(at)), none);
            S::store(dy.add(at), kept);
            sum = S::add(sum, kept);
        }
        // dx = g - (sum of g) (1 / dim + m (x - mean) / (dim std))
        let share = S::splat(1.0 / dim as f32);
        for feature in 0..dim {
            let at = feature * LANES;
            let part = S::fma(S::sub(S::load(x.add(at)), mean), slope, share);
            S::store(dy.add(at), S::sub(S::load(dy.add(at)), S::mul(sum, part)));
        }
    }
}

dispatch! { fn backward_panel = backward_kernel(x: *const f32, multiplier: f32, dim: usize, dy: *mut f32); }

pub(super) fn forward(x: &Activation, multiplier: f32, out: &mut Activation) {
    let (to, stride, dim) = (out.shared(), out.stride(), x.features());
    par::run(x.panels(), |panel| {
        // SAFETY: `super::forward` makes `out` with the shape of `x`; no other task has this panel of it.
        unsafe { forward_panel(x.panel(panel).as_ptr(), multiplier, dim, to.get().add(panel * stride)) };
    });
}

pub(super) fn backward(x: &Activation, multiplier: f32, dy: &mut Activation) {
    let (stride, dim) = (dy.stride(), x.features());
    let dy = dy.shared();
    par::run(x.panels(), |panel| {
        // SAFETY: `super::backward` asserts that both have one shape; `dy` is borrowed for writing, and no other task has this panel
        // of it.
        unsafe { backward_panel(x.panel(panel).as_ptr(), multiplier, dim, dy.get().add(panel * stride)) };
    });
}
