//! Rescaling to another root mean square on the CPU: one task takes one panel, in which a token is a lane.
use super::FLOOR;
use crate::activation::{Activation, LANES};
use crate::par;
use crate::simd::{Simd, dispatch};

/// One number for each lane, which is a token.
type Lanes = [f32; LANES];

/// `sum over features of a b`.
///
/// # Safety
/// The CPU has the features of `S`; `a` and `b` hold `dim` vectors.
#[inline(always)]
unsafe fn dot<S: Simd>(a: *const f32, b: *const f32, dim: usize) -> Lanes {
    // SAFETY: `feature` is below `dim`: within both, as the caller says.
    unsafe {
        let mut sums = [S::splat(0.0); 2];
        for feature in 0..dim {
            let at = feature * LANES;
            sums[feature % 2] = S::fma(S::load(a.add(at)), S::load(b.add(at)), sums[feature % 2]);
        }
        let mut lanes = [0.0; LANES];
        S::store(lanes.as_mut_ptr(), S::add(sums[0], sums[1]));
        lanes
    }
}

/// `out = x factor`, plus `y other` unless `y` is null; added to what is there if `add`.
///
/// # Safety
/// The CPU has the features of `S`; `x`, `out` and `y`, which may be null, hold `dim` vectors.
#[inline(always)]
unsafe fn combine<S: Simd>(
    x: *const f32,
    factor: &Lanes,
    y: *const f32,
    other: &Lanes,
    dim: usize,
    out: *mut f32,
    add: bool,
) {
    // SAFETY: `feature` is below `dim`: within all, as the caller says.
    unsafe {
        let (factor, other) = (S::load(factor.as_ptr()), S::load(other.as_ptr()));
        for feature in 0..dim {
            let at = feature * LANES;
            let mut value = S::mul(S::load(x.add(at)), factor);
            if !y.is_null() {
                value = S::fma(S::load(y.add(at)), other, value);
            }
            S::store(out.add(at), if add { S::add(S::load(out.add(at)), value) } else { value });
        }
    }
}

/// The root mean square of `x`, at least the floor's; that of `r`; and whether that of `x` was above the floor.
///
/// # Safety
/// The CPU has the features of `S`; `x` and `r` hold `dim` vectors.
#[inline(always)]
unsafe fn roots<S: Simd>(x: *const f32, r: *const f32, dim: usize) -> (Lanes, Lanes, [bool; LANES]) {
    // SAFETY: as the caller says.
    let (own, target) = unsafe { (dot::<S>(x, x, dim), dot::<S>(r, r, dim)) };
    let means = own.map(|sum| sum / dim as f32);
    (means.map(|mean| mean.max(FLOOR).sqrt()), target.map(|sum| (sum / dim as f32).sqrt()), means.map(|it| it >= FLOOR))
}

/// # Safety
/// The CPU has the features of `S`; all hold `dim` vectors.
#[inline(always)]
unsafe fn forward_kernel<S: Simd>(x: *const f32, r: *const f32, dim: usize, out: *mut f32) {
    // SAFETY: as the caller says.
    unsafe {
        let (own, target, _) = roots::<S>(x, r, dim);
        let factor = std::array::from_fn(|lane| target[lane] / own[lane]);
        combine::<S>(x, &factor, std::ptr::null(), &factor, dim, out, false);
    }
}

dispatch! { fn forward_panel = forward_kernel(x: *const f32, r: *const f32, dim: usize, out: *mut f32); }

/// # Safety
/// The CPU has the features of `S`; all hold `dim` vectors.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(
    x: *const f32,
    r: *const f32,
    dy: *const f32,
    dim: usize,
    dx: *mut f32,
    dr: *mut f32,
) {
    // SAFETY: as the caller says.
    unsafe {
        let ((own, target, above), along) = (roots::<S>(x, r, dim), dot::<S>(dy, x, dim));
        let factor: Lanes = std::array::from_fn(|lane| target[lane] / own[lane]);
        // dx = dy t / n - x <dy, x> t / (dim n^3), the last for rows above the floor
        let pull: Lanes = std::array::from_fn(|lane| {
            let pull = along[lane] * target[lane] / (dim as f32 * own[lane] * own[lane] * own[lane]);
            if above[lane] { -pull } else { 0.0 }
        });
        combine::<S>(dy, &factor, x, &pull, dim, dx, false);
        // dr = r <dy, x> / (n dim t)
        let own: Lanes = std::array::from_fn(|lane| {
            let below = own[lane] * dim as f32 * target[lane];
            if target[lane] > 0.0 { along[lane] / below } else { 0.0 }
        });
        combine::<S>(r, &own, std::ptr::null(), &own, dim, dr, true);
    }
}

dispatch! {
    fn backward_panel = backward_kernel(
        x: *const f32, r: *const f32, dy: *const f32, dim: usize, dx: *mut f32, dr: *mut f32,
    );
}

pub(super) fn forward(x: &Activation, r: &Activation, out: &mut Activation) {
    let (to, stride, dim) = (out.shared(), out.stride(), x.features());
    par::run(x.panels(), |panel| {
        let (x, r) = (x.panel(panel).as_ptr(), r.panel(panel).as_ptr());
        // SAFETY: `super::forward` asserts that both have one shape and makes `out` with it; no other task has this panel of it.
        unsafe { forward_panel(x, r, dim, to.get().add(panel * stride)) };
    });
}

pub(super) fn backward(x: &Activation, r: &Activation, dy: &Activation, dx: &mut Activation, dr: &mut Activation) {
    let (stride, dim) = (dx.stride(), x.features());
    let (dx, dr) = (dx.shared(), dr.shared());
    par::run(x.panels(), |panel| {
        let (x, r, dy) = (x.panel(panel).as_ptr(), r.panel(panel).as_ptr(), dy.panel(panel).as_ptr());
        let (dx, dr) = (dx.get().wrapping_add(panel * stride), dr.get().wrapping_add(panel * stride));
        // SAFETY: `super::backward` asserts that all have one shape; `dx` was made for this and `dr` is borrowed for writing, and no
        // other task has this panel of them.
        unsafe { backward_panel(x, r, dy, dim, dx, dr) };
    });
}
