//! The turn of all heads of a panel: two vectors of 16 tokens a pair.
use super::{Pairing, Rope};
use crate::panel::{Act, LANES};
use crate::par;
use crate::simd::{Simd, dispatch};

/// Where the pairs of a head lie, and how they turn.
struct Turn {
    heads: usize,
    head_dim: usize,
    /// The first feature that turns.
    offset: usize,
    pairs: usize,
    /// Features from one pair to the next, and from a pair's first feature to its second.
    step: usize,
    apart: usize,
    /// -1 turns backwards.
    sign: f32,
}

/// Turns all heads of `x`, whose shape has been held against the table.
pub(super) fn turn(rope: &Rope, x: &mut Act, head_dim: usize, offset: usize, sign: f32) {
    let pairs = rope.cos.features();
    let (step, apart) = match rope.pairing {
        Pairing::Half => (1, pairs),
        Pairing::Interleaved => (2, 1),
    };
    let how = Turn { heads: x.features() / head_dim, head_dim, offset, pairs, step, apart, sign };
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
/// The features of `S`; `x` holds `heads * head_dim` vectors, `cos` and `sin` hold `pairs` each, and the pairs lie
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
