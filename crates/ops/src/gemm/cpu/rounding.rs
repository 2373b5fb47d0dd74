//! Activations whose numbers are rounded to bfloat16, or split into several, before they are multiplied.
use super::product::{Operands, Order, RawTerm};
use super::tile_sizes;
use crate::activation::LANES;
use crate::par::{self, Shared};
use crate::simd::amx::SPLIT;
use crate::simd::{PairLanes, dispatch_pairs};
use smallvec::SmallVec;

/// Rounds `depth` vectors of 16 floats, such as features of a panel, and pairs each with the next: `[depth / 2, rounded
/// up][16]`. An odd last one is paired with zero.
///
/// # Safety
/// The features of `P`; `x` holds `depth` vectors of 16 floats, `to` has room for `depth.div_ceil(2)`.
#[inline(always)]
pub(crate) unsafe fn round_panel<P: PairLanes>(x: *const f32, depth: usize, to: *mut f32) {
    for pair in 0..depth / 2 {
        // SAFETY: the features `2 * pair` and the next are below `depth`.
        unsafe {
            let from = x.add(2 * pair * LANES);
            P::write(to.add(pair * LANES), P::pair(P::read(from), P::read(from.add(LANES))));
        }
    }
    if !depth.is_multiple_of(2) {
        // SAFETY: the last feature, and the last pair.
        unsafe {
            let last = P::pair(P::read(x.add((depth - 1) * LANES)), P::broadcast(0.0));
            P::write(to.add(depth / 2 * LANES), last);
        }
    }
}

dispatch_pairs! { pub(super) fn round_panel_at = round_panel(x: *const f32, depth: usize, to: *mut f32); }

/// Splits `depth` vectors of 16 floats, such as features of a panel: `[step of 32][three parts][16 pairs][16]`, padded with zeros to whole
/// steps.
///
/// # Safety
/// The features of `P`; `x` holds `depth` vectors of 16 floats, `to` has room for three times the pairs of whole tiles.
#[inline(always)]
unsafe fn split_panel<P: PairLanes>(x: *const f32, depth: usize, to: *mut f32) {
    for pair in 0..tile_sizes::pairs(depth) {
        let k = 2 * pair;
        // SAFETY: feature `k` is read below `depth`, and the next one; the pair has a place in each part of its step.
        unsafe {
            let low = if k < depth { P::read(x.add(k * LANES)) } else { P::broadcast(0.0) };
            let high = if k + 1 < depth { P::read(x.add((k + 1) * LANES)) } else { P::broadcast(0.0) };
            let to = to.add((pair / LANES * SPLIT * LANES + pair % LANES) * LANES);
            for (part, pairs) in P::split_pair(low, high).into_iter().enumerate() {
                P::write(to.add(part * LANES * LANES), pairs);
            }
        }
    }
}

/// The panels `p0..p1` of a term's activation from feature `k0` on, rounded to `to`: `[panel][pair][16]`, or split, as `order` says.
///
/// # Safety
/// The features of `P`; the activation has these panels and features; `to` has room for the pairs.
#[inline(always)]
pub(super) unsafe fn round_panels<P: PairLanes>(
    term: &Operands,
    [p0, p1]: [usize; 2],
    [k0, depth]: [usize; 2],
    (to, order): (*mut f32, Order),
) {
    for p in p0..p1 {
        // SAFETY: panel `p` is one of the activation's, with `depth` features from `k0` on.
        unsafe {
            let to = to.add((p - p0) * order.pairs(depth) * LANES);
            round_one::<P>(term.x.add(p * term.stride + k0 * LANES), (depth, order), to);
        }
    }
}

/// A panel of a block of so many features, rounded or split, and padded with zeros as `order` says.
///
/// # Safety
/// The features of `P`; `x` holds the features, `to` has room for the pairs.
#[inline(always)]
unsafe fn round_one<P: PairLanes>(x: *const f32, (depth, order): (usize, Order), to: *mut f32) {
    // SAFETY: as the caller says.
    unsafe {
        if order == Order::Split {
            split_panel::<P>(x, depth, to);
        } else {
            round_panel::<P>(x, depth, to);
            (depth.div_ceil(2)..order.pairs(depth)).for_each(|pair| P::write(to.add(pair * LANES), P::broadcast(0.0)));
        }
    }
}

dispatch_pairs! { fn round_one_at = round_one(x: *const f32, block: (usize, Order), to: *mut f32); }

/// An activation that is rounded for all tasks: `[block of the sum][panel][pair][16 tokens]`.
pub(super) struct Rounding {
    x: *const f32,
    stride: usize,
    depth: usize,
    panels: usize,
    /// Features of a block.
    block: usize,
    order: Order,
    /// Floats of the activations before this one.
    at: usize,
}

/// Activations that are rounded once for all tasks of some products.
#[derive(Default)]
pub(super) struct Roundings(SmallVec<[Rounding; 4]>);

// SAFETY: the activations stay borrowed while tasks run; each reads them and writes a place that no other task has.
unsafe impl Sync for Roundings {}

impl Roundings {
    /// Where `term`'s activation begins among the floats.
    pub(super) fn add(&mut self, term: &RawTerm<'_>, panels: usize, order: Order, block: usize) -> usize {
        let Operands { x, stride, depth, .. } = term.whole;
        let wanted = (x, depth, panels, block, order);
        let same = |it: &&Rounding| (it.x, it.depth, it.panels, it.block, it.order) == wanted;
        if let Some(found) = self.0.iter().find(same) {
            return found.at;
        }
        let at = self.floats();
        self.0.push(Rounding { x, stride, depth, panels, block, order, at });
        at
    }

    pub(super) fn floats(&self) -> usize {
        self.0.last().map_or(0, |last| last.at + last.panels * last.order.pairs(last.depth) * LANES)
    }

    /// Rounds all of them.
    ///
    /// # Safety
    /// `to` has room for [`Roundings::floats`]; the activations are there.
    pub(super) unsafe fn run(&self, to: Shared<f32>) {
        let panels = self.0.iter().map(|it| it.panels).sum();
        par::run(panels, |mut panel| {
            for it in &self.0 {
                if panel >= it.panels {
                    panel -= it.panels;
                    continue;
                }
                for k0 in (0..it.depth).step_by(it.block.max(1)) {
                    let depth = it.block.min(it.depth - k0);
                    let at = it.at + (it.order.pairs(k0) * it.panels + panel * it.order.pairs(depth)) * LANES;
                    // SAFETY: a panel of an activation, which has these features; its own place, below the number of floats.
                    unsafe {
                        round_one_at(it.x.add(panel * it.stride + k0 * LANES), (depth, it.order), to.get().add(at));
                    }
                }
                return;
            }
        });
    }
}
