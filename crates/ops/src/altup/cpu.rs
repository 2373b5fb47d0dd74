//! `AltUp` on the CPU. One task computes one panel. A token is a lane, so a token's weights are vectors as its
//! features are.
use crate::activation::{Activation, LANES};
use crate::par;
use crate::simd::{Simd, dispatch};
use std::ops::Range;

/// # Safety
/// The CPU has the features of `S`; `x` and `out` hold `streams * dim` vectors, `coefs` holds `streams * streams`. With `turned`,
/// the weight of stream j in stream i is `c[j, i]`: the transposed matrix.
#[inline(always)]
unsafe fn mix_kernel<S: Simd>(
    x: *const f32,
    coefs: *const f32,
    [streams, dim]: [usize; 2],
    turned: bool,
    out: *mut f32,
) {
    // SAFETY: streams are below `streams` and `feature` is below `dim`: within all, as the caller says.
    unsafe {
        for to in 0..streams {
            for feature in 0..dim {
                let at = |stream: usize| (stream * dim + feature) * LANES;
                let mut sum = S::load(x.add(at(to)));
                for from in 0..streams {
                    let weight = if turned { from * streams + to } else { to * streams + from };
                    sum = S::fma(S::load(coefs.add(weight * LANES)), S::load(x.add(at(from))), sum);
                }
                S::store(out.add(at(to)), sum);
            }
        }
    }
}

dispatch! {
    fn mix_panel = mix_kernel(x: *const f32, coefs: *const f32, sizes: [usize; 2], turned: bool, out: *mut f32);
}

/// `sum over features of a (b - c)`; without `c`, of `a b`.
///
/// # Safety
/// The CPU has the features of `S`; all hold `dim` vectors but for `c`, which may be null, and `out`, which has room for one.
#[inline(always)]
unsafe fn dot_kernel<S: Simd>(a: *const f32, b: *const f32, c: *const f32, dim: usize, out: *mut f32) {
    // SAFETY: `feature` is below `dim`: within all, as the caller says.
    unsafe {
        let mut sums = [S::splat(0.0); 2];
        for feature in 0..dim {
            let at = feature * LANES;
            let mut b = S::load(b.add(at));
            if !c.is_null() {
                b = S::sub(b, S::load(c.add(at)));
            }
            sums[feature % 2] = S::fma(S::load(a.add(at)), b, sums[feature % 2]);
        }
        S::store(out, S::add(sums[0], sums[1]));
    }
}

dispatch! { fn dot_panel = dot_kernel(a: *const f32, b: *const f32, c: *const f32, dim: usize, out: *mut f32); }

/// # Safety
/// The CPU has the features of `S`; `p` holds `streams * dim` vectors, `u` holds `dim`, `coefs` holds `streams`.
#[inline(always)]
unsafe fn correct_kernel<S: Simd>(
    p: *mut f32,
    u: *const f32,
    coefs: *const f32,
    [streams, dim]: [usize; 2],
    active: usize,
) {
    // SAFETY: streams are below `streams` and `feature` is below `dim`: within all, as the caller says.
    unsafe {
        for feature in 0..dim {
            let change = S::sub(S::load(u.add(feature * LANES)), S::load(p.add((active * dim + feature) * LANES)));
            for stream in 0..streams {
                let at = p.add((stream * dim + feature) * LANES);
                let weight = S::add(S::load(coefs.add(stream * LANES)), S::splat(1.0));
                S::store(at, S::fma(weight, change, S::load(at)));
            }
        }
    }
}

dispatch! {
    fn correct_panel = correct_kernel(p: *mut f32, u: *const f32, coefs: *const f32, sizes: [usize; 2], active: usize);
}

/// # Safety
/// As [`correct_kernel`], with `d` in the place of `p`; `du` has room for `dim` vectors.
#[inline(always)]
unsafe fn back_kernel<S: Simd>(
    d: *mut f32,
    coefs: *const f32,
    [streams, dim]: [usize; 2],
    active: usize,
    du: *mut f32,
) {
    // SAFETY: streams are below `streams` and `feature` is below `dim`: within all, as the caller says.
    unsafe {
        for feature in 0..dim {
            let mut sum = S::splat(0.0);
            for stream in 0..streams {
                let weight = S::add(S::load(coefs.add(stream * LANES)), S::splat(1.0));
                sum = S::fma(weight, S::load(d.add((stream * dim + feature) * LANES)), sum);
            }
            S::store(du.add(feature * LANES), sum);
            let own = d.add((active * dim + feature) * LANES);
            S::store(own, S::sub(S::load(own), sum));
        }
    }
}

dispatch! {
    fn back_panel = back_kernel(d: *mut f32, coefs: *const f32, sizes: [usize; 2], active: usize, du: *mut f32);
}

fn mix(x: &Activation, coefs: &Activation, streams: usize, turned: bool, out: &mut Activation) {
    let (to, stride, sizes) = (out.shared(), out.stride(), [streams, x.features() / streams]);
    par::run(x.panels(), |panel| {
        let (x, coefs) = (x.panel(panel).as_ptr(), coefs.panel(panel).as_ptr());
        // SAFETY: the functions of `super` hold the shapes against each other and make `out` with that of `x`; no other task
        // has this panel of it.
        unsafe { mix_panel(x, coefs, sizes, turned, to.get().add(panel * stride)) };
    });
}

pub(super) fn predict(x: &Activation, coefs: &Activation, streams: usize, out: &mut Activation) {
    mix(x, coefs, streams, false, out);
}

pub(super) fn predict_backward(
    x: &Activation,
    coefs: &Activation,
    streams: usize,
    d_out: &Activation,
    dx: &mut Activation,
    d_coefs: &mut Activation,
) {
    mix(d_out, coefs, streams, true, dx);
    let (to, stride, dim) = (d_coefs.shared(), d_coefs.stride(), x.features() / streams);
    par::run(x.panels(), |panel| {
        let (x, d_out) = (x.panel(panel), d_out.panel(panel));
        let stream = |of: &[f32], index: usize| of[index * dim * LANES..][..dim * LANES].as_ptr();
        for weight in 0..streams * streams {
            let (d, x) = (stream(d_out, weight / streams), stream(x, weight % streams));
            // SAFETY: both are `dim` vectors; `d_coefs` was made with `streams * streams` features for these tokens, and no other
            // task has this panel of it.
            unsafe { dot_panel(d, x, std::ptr::null(), dim, to.get().add(panel * stride + weight * LANES)) };
        }
    });
}

pub(super) fn correct(p: &mut Activation, u: &Activation, coefs: &Activation, active: usize) {
    let (panels, stride, sizes) = (p.panels(), p.stride(), [coefs.features(), u.features()]);
    let to = p.shared();
    par::run(panels, |panel| {
        let (u, coefs) = (u.panel(panel).as_ptr(), coefs.panel(panel).as_ptr());
        // SAFETY: `super::correct` holds all shapes against each other; `p` is borrowed for writing, and no other task has this
        // panel of it.
        unsafe { correct_panel(to.get().add(panel * stride), u, coefs, sizes, active) };
    });
}

pub(super) fn correct_backward(
    [p, u, coefs]: [&Activation; 3],
    active: usize,
    d: &mut Activation,
    du: &mut Activation,
    d_coefs: &mut Activation,
) {
    let (streams, dim) = (coefs.features(), u.features());
    let (panels, strides) = (d.panels(), [d.stride(), du.stride(), d_coefs.stride()]);
    let (d, du, d_coefs) = (d.shared(), du.shared(), d_coefs.shared());
    par::run(panels, |panel| {
        let (p, u, coefs) = (p.panel(panel).as_ptr(), u.panel(panel).as_ptr(), coefs.panel(panel).as_ptr());
        let [d, du, d_coefs] = [(&d, strides[0]), (&du, strides[1]), (&d_coefs, strides[2])]
            .map(|(all, stride)| all.get().wrapping_add(panel * stride));
        // SAFETY: `super::correct_backward` holds all shapes against each other; what is written was made or is borrowed for
        // that, and no other task has this panel of it.
        unsafe {
            for stream in 0..streams {
                dot_panel(d.add(stream * dim * LANES), u, p, dim, d_coefs.add(stream * LANES));
            }
            back_panel(d, coefs, [streams, dim], active, du);
        }
    });
}

pub(super) fn add(y: &mut Activation, x: &Activation, streams: Range<usize>) {
    let (panels, stride, own) = (y.panels(), y.stride(), x.stride());
    let to = y.shared();
    par::run(panels, |panel| {
        // SAFETY: `y` has `stride` floats a panel and is borrowed for writing; no other task has this panel of it.
        let y = unsafe { std::slice::from_raw_parts_mut(to.get().add(panel * stride), stride) };
        for stream in y[streams.start * own..streams.end * own].chunks_exact_mut(own) {
            stream.iter_mut().zip(x.panel(panel)).for_each(|(y, x)| *y += x);
        }
    });
}

pub(super) fn sum(y: &Activation, streams: Range<usize>, out: &mut Activation) {
    let (to, own) = (out.shared(), out.stride());
    par::run(y.panels(), |panel| {
        // SAFETY: `out` was made with as many panels as `y`, of `own` floats each; no other task has this one.
        let out = unsafe { std::slice::from_raw_parts_mut(to.get().add(panel * own), own) };
        let mut streams = y.panel(panel)[streams.start * own..streams.end * own].chunks_exact(own);
        streams.next().into_iter().for_each(|first| out.copy_from_slice(first));
        for stream in streams {
            out.iter_mut().zip(stream).for_each(|(sum, y)| *sum += y);
        }
    });
}
