//! Copies a sequence out of an activation, and back. Attention and recurrences work on panels that begin with the
//! sequence's first token.
use super::LANES;
use std::ops::Range;

/// Copies `tokens` and `features` of an activation into aligned panels `[tokens / 16, rounded up][features][16]`,
/// multiplied by `scale`. Lanes past the end become zero.
///
/// # Safety
/// `from` points to panels of `stride` floats that hold those tokens and features. `to` has room for the result. Nobody
/// writes to either meanwhile.
pub(crate) unsafe fn realign(
    from: *const f32,
    stride: usize,
    features: Range<usize>,
    tokens: Range<usize>,
    scale: f32,
    to: *mut f32,
) {
    let (start, count, f0, nf) = (tokens.start, tokens.len(), features.start, features.len());
    let shift = start % LANES;
    for panel in 0..count.div_ceil(LANES) {
        let lanes = (count - panel * LANES).min(LANES);
        let first = (start / LANES + panel) * stride + f0 * LANES;
        let head = lanes.min(LANES - shift);
        if head == LANES && scale == 1.0 {
            // SAFETY: a whole panel of the source is one of the result: `nf` vectors that lie end to end in both.
            unsafe { std::ptr::copy_nonoverlapping(from.add(first), to.add(panel * nf * LANES), nf * LANES) };
            continue;
        }
        if head == LANES {
            for at in 0..nf * LANES {
                // SAFETY: as above.
                unsafe { *to.add(panel * nf * LANES + at) = *from.add(first + at) * scale };
            }
            continue;
        }
        for feature in 0..nf {
            // SAFETY: by the caller's promise the first source panel holds the first `head` lanes. The second one is
            // read only where the tokens reach into it. Its place is made by `wrapping_add`, because it may not be
            // there. `to` holds `panel * nf + feature` vectors and this one.
            unsafe {
                let out = to.add((panel * nf + feature) * LANES);
                let source = from.add(first + feature * LANES + shift);
                for lane in 0..head {
                    *out.add(lane) = *source.add(lane) * scale;
                }
                let source = from.wrapping_add(first + stride + feature * LANES);
                for lane in head..lanes {
                    *out.add(lane) = *source.add(lane - head) * scale;
                }
                for lane in lanes..LANES {
                    *out.add(lane) = 0.0;
                }
            }
        }
    }
}

/// The reverse of [`realign`]: copies aligned panels to `tokens` and `features` of an activation. Writes only the lanes of
/// those tokens.
///
/// # Safety
/// As for [`realign`], with source and destination exchanged. The two do not overlap, and no other task reads or writes
/// those features of those tokens meanwhile.
pub(crate) unsafe fn unalign(
    from: *const f32,
    to: *mut f32,
    stride: usize,
    features: Range<usize>,
    tokens: Range<usize>,
) {
    let (start, count, f0, nf) = (tokens.start, tokens.len(), features.start, features.len());
    let shift = start % LANES;
    for panel in 0..count.div_ceil(LANES) {
        let lanes = (count - panel * LANES).min(LANES);
        let first = (start / LANES + panel) * stride + f0 * LANES;
        let head = lanes.min(LANES - shift);
        if head == LANES {
            // SAFETY: as in `realign`.
            unsafe { std::ptr::copy_nonoverlapping(from.add(panel * nf * LANES), to.add(first), nf * LANES) };
            continue;
        }
        for feature in 0..nf {
            // SAFETY: as in `realign`: the second panel of `to` is written only where the tokens reach into it (a copy
            // of nothing needs no memory). The two do not overlap: `from` is a task's scratch.
            unsafe {
                let source = from.add((panel * nf + feature) * LANES);
                let out = to.add(first + feature * LANES + shift);
                std::ptr::copy_nonoverlapping(source, out, head);
                let out = to.wrapping_add(first + stride + feature * LANES);
                std::ptr::copy_nonoverlapping(source.add(head), out, lanes - head);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activation::{Activation, Pool};

    #[test]
    fn realign_and_back_is_the_identity() {
        let pool = Pool::new();
        let rows: Vec<f32> = (0..50 * 4).map(|i| i as f32 + 1.0).collect();
        let act = Activation::from_rows(&pool, &rows, 4);
        for (start, count) in [(0usize, 50usize), (3, 40), (15, 2), (16, 17), (31, 1), (7, 9)] {
            let mut panels = vec![f32::NAN; count.div_ceil(LANES) * 2 * LANES];
            let mut back = pool.act(50, 4);
            back.zero();
            // SAFETY: the ranges are inside `act` and `panels`.
            unsafe {
                realign(act.ptr(), act.stride(), 1..3, start..start + count, 1.0, panels.as_mut_ptr());
                unalign(panels.as_ptr(), back.shared().get(), act.stride(), 1..3, start..start + count);
            }
            assert!(panels.iter().all(|value| value.is_finite()));
            for token in 0..50 {
                let inside = (start..start + count).contains(&token);
                for feature in 0..4 {
                    let kept = inside && (1..3).contains(&feature);
                    assert_eq!(back.at(token, feature), if kept { act.at(token, feature) } else { 0.0 });
                }
            }
        }
    }
}
