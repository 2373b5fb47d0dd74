//! The rotation on the CPU: one task rotates all heads of one panel, two vectors of 16 tokens for each pair.
use super::{Pairing, Rope};
use crate::activation::{Activation, LANES};
use crate::par;
use crate::simd::{Simd, dispatch};

/// Where the pairs of a head are, and in which direction they are rotated.
struct Turn {
    heads: usize,
    head_dim: usize,
    /// The first feature of a head that is rotated.
    offset: usize,
    pairs: usize,
    /// How many features lie from one pair to the next, and from the first to the second feature of a pair.
    step: usize,
    apart: usize,
    /// 1 for forward, -1 for backward.
    sign: f32,
}

/// Fills both tables by `angle(token, frequency)`, which returns a cosine and a sine.
pub(super) fn tables(cos: &mut Activation, sin: &mut Activation, angle: impl Fn(usize, usize) -> (f32, f32) + Sync) {
    let (tokens, pairs, stride, panels) = (cos.tokens(), cos.features(), cos.stride(), cos.panels());
    let (cos_to, sin_to) = (cos.shared(), sin.shared());
    par::run(panels, |panel| {
        for lane in 0..LANES.min(tokens - panel * LANES) {
            for feature in 0..pairs {
                let (c, s) = angle(panel * LANES + lane, feature);
                let at = panel * stride + feature * LANES + lane;
                // SAFETY: both tables have one shape, whose panels and features these are; they are borrowed for writing, and
                // no other task has this panel.
                unsafe {
                    *cos_to.get().add(at) = c;
                    *sin_to.get().add(at) = s;
                }
            }
        }
    });
}

impl Turn {
    fn new(rope: &Rope, features: usize, head_dim: usize, offset: usize, sign: f32) -> Self {
        let pairs = rope.cos.features();
        let (step, apart) = match rope.pairing {
            Pairing::Half => (1, pairs),
            Pairing::Interleaved => (2, 1),
        };
        Self { heads: features / head_dim, head_dim, offset, pairs, step, apart, sign }
    }
}

/// Rotates all heads of one token, whose features lie side by side. The caller has checked the shapes.
pub(super) fn turn_vector(rope: &Rope, x: &mut Activation, head_dim: usize, offset: usize) {
    let how = Turn::new(rope, x.tokens(), head_dim, offset, 1.0);
    let (cos, sin) = (rope.cos.panel(0).as_ptr(), rope.sin.panel(0).as_ptr());
    // SAFETY: `x` has `heads * head_dim` floats, one panel of the tables a vector for each pair; the rest as in `turn`.
    unsafe { turn_features(x.shared().get(), cos, sin, &how) };
}

/// # Safety
/// The CPU has the features of `S`; `x` holds `heads * head_dim` floats, `cos` and `sin` hold a vector for each pair, whose first lane is meant, and
/// the pairs lie within `offset..head_dim`.
#[inline(always)]
unsafe fn vector_kernel<S: Simd>(x: *mut f32, cos: *const f32, sin: *const f32, how: &Turn) {
    // SAFETY: a pair is below `pairs`, and both of its features lie within the head, as the caller says. Vectors are those of arrays.
    unsafe {
        for start in (0..how.pairs).step_by(LANES) {
            let count = LANES.min(how.pairs - start);
            let (mut c, mut s) = ([0.0f32; LANES], [0.0f32; LANES]);
            for lane in 0..count {
                c[lane] = *cos.add((start + lane) * LANES);
                s[lane] = *sin.add((start + lane) * LANES);
            }
            let (c, s) = (S::load(c.as_ptr()), S::mul(S::splat(how.sign), S::load(s.as_ptr())));
            for head in 0..how.heads {
                let first = x.add(head * how.head_dim + how.offset + start * how.step);
                let (mut a, mut b) = ([0.0f32; LANES], [0.0f32; LANES]);
                for lane in 0..count {
                    a[lane] = *first.add(lane * how.step);
                    b[lane] = *first.add(lane * how.step + how.apart);
                }
                let (old_a, old_b) = (S::load(a.as_ptr()), S::load(b.as_ptr()));
                S::store(a.as_mut_ptr(), S::sub(S::mul(old_a, c), S::mul(old_b, s)));
                S::store(b.as_mut_ptr(), S::fma(old_b, c, S::mul(old_a, s)));
                for lane in 0..count {
                    *first.add(lane * how.step) = a[lane];
                    *first.add(lane * how.step + how.apart) = b[lane];
                }
            }
        }
    }
}

dispatch! { fn turn_features = vector_kernel(x: *mut f32, cos: *const f32, sin: *const f32, how: &Turn); }

/// Rotates all heads of `x`. The caller has checked the shapes.
pub(super) fn turn(rope: &Rope, x: &mut Activation, head_dim: usize, offset: usize, sign: f32) {
    let how = Turn::new(rope, x.features(), head_dim, offset, sign);
    let (stride, to) = (x.stride(), x.shared());
    par::run(x.panels(), |panel| {
        let (cos, sin) = (rope.cos.panel(panel).as_ptr(), rope.sin.panel(panel).as_ptr());
        // SAFETY: a panel of `x` has `heads * head_dim` vectors, one of the tables `pairs`. The caller has held offset
        // and pairs against `head_dim`; both pairings stay within `2 * pairs` features. `x` is borrowed for writing,
        // and no other task has this panel.
        unsafe { turn_panel(to.get().add(panel * stride), cos, sin, &how) };
    });
}

/// # Safety
/// The CPU has the features of `S`; `x` holds `heads * head_dim` vectors, `cos` and `sin` hold `pairs` each, and the pairs lie
/// within `offset..head_dim`.
#[inline(always)]
unsafe fn turn_kernel<S: Simd>(x: *mut f32, cos: *const f32, sin: *const f32, how: &Turn) {
    // SAFETY: both features of a pair are vectors within the head, as the caller says.
    unsafe {
        let sign = S::splat(how.sign);
        for head in 0..how.heads {
            for pair in 0..how.pairs {
                let first = x.add((head * how.head_dim + how.offset + pair * how.step) * LANES);
                let second = first.add(how.apart * LANES);
                let (a, b) = (S::load(first), S::load(second));
                let (c, s) = (S::load(cos.add(pair * LANES)), S::mul(sign, S::load(sin.add(pair * LANES))));
                S::store(first, S::sub(S::mul(a, c), S::mul(b, s)));
                S::store(second, S::fma(b, c, S::mul(a, s)));
            }
        }
    }
}

dispatch! { fn turn_panel = turn_kernel(x: *mut f32, cos: *const f32, sin: *const f32, how: &Turn); }
