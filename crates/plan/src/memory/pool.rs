//! The bytes of a pool of activations. The engine's pool (`ops::panel::Pool`) reuses buffers of the same size. So it
//! holds as many buffers of each size as were ever in use at once, which this pool counts along a walk.
use std::collections::BTreeMap;

/// Tokens in a panel, as in `ops::panel`.
pub const LANES: u64 = 16;
/// Bytes of a huge page. Buffers of at least two consist of whole ones.
const HUGE: u64 = 2 << 20;

/// Bytes of a buffer for `numbers` of four bytes each.
pub const fn buffer(numbers: u64) -> u64 {
    let bytes = if numbers == 0 { 4 } else { 4 * numbers };
    if bytes >= 2 * HUGE { bytes.next_multiple_of(HUGE) } else { bytes }
}

/// A buffer of the pool that is in use.
#[must_use = "what is taken is given back"]
#[derive(Debug)]
pub struct Activation {
    /// Numbers of four bytes that a token takes.
    held: u64,
    /// Features of a token: twice as many as `held` where they are stored in two bytes each.
    features: u64,
    narrow: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Class {
    out: u64,
    most: u64,
}

/// Counts of buffers by the features of their activations, all of the same tokens.
#[derive(Debug, Clone, Default)]
pub struct Pool {
    classes: BTreeMap<u64, Class>,
}

impl Pool {
    /// Takes an activation of so many features into use.
    pub fn take(&mut self, features: u64) -> Activation {
        self.out(features);
        Activation { held: features, features, narrow: false }
    }

    fn out(&mut self, held: u64) {
        let class = self.classes.entry(held).or_default();
        class.out += 1;
        class.most = class.most.max(class.out);
    }

    /// Returns a buffer, which the next of its size reuses.
    #[allow(clippy::needless_pass_by_value)] // what is given back is gone
    pub fn give(&mut self, act: Activation) {
        if let Some(class) = self.classes.get_mut(&act.held) {
            class.out -= 1;
        }
    }

    /// Returns several buffers.
    pub fn give_all(&mut self, acts: impl IntoIterator<Item = Activation>) {
        acts.into_iter().for_each(|act| self.give(act));
    }

    /// Takes activations of so many features each, all at once, and gives them back.
    pub fn pass(&mut self, features: impl IntoIterator<Item = u64>) {
        let acts: Vec<Activation> = features.into_iter().map(|features| self.take(features)).collect();
        self.give_all(acts);
    }

    /// Replaces an activation by one of two bytes a number, in a buffer of half the size.
    pub(super) fn narrow(&mut self, act: Activation) -> Activation {
        let narrow = Activation { held: act.features.div_ceil(2), features: act.features, narrow: true };
        self.out(narrow.held);
        self.give(act);
        narrow
    }

    /// Replaces an activation of [`Pool::narrow`] by one of four bytes a number.
    pub(super) fn widen(&mut self, act: Activation) -> Activation {
        if !act.narrow {
            return act;
        }
        let wide = self.take(act.features);
        self.give(act);
        wide
    }

    /// Bytes of all buffers that the pool holds, each for so many tokens.
    pub(super) fn bytes(&self, layout: Layout, tokens: u64) -> u64 {
        self.sum(|class| class.most, layout, tokens)
    }

    /// Bytes of the buffers that are in use now.
    pub(super) fn bytes_out(&self, layout: Layout, tokens: u64) -> u64 {
        self.sum(|class| class.out, layout, tokens)
    }

    fn sum(&self, count: impl Fn(&Class) -> u64, layout: Layout, tokens: u64) -> u64 {
        let bytes = |features: u64| match layout {
            Layout::Panels => buffer(features * tokens.next_multiple_of(LANES)),
            Layout::Rows(bytes) => features * tokens * bytes,
        };
        self.classes.iter().map(|(features, class)| count(class) * bytes(*features)).sum()
    }
}

/// How an activation lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Panels of f32, on the CPU.
    Panels,
    /// Row-major with so many bytes a number, on a GPU.
    Rows(u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_counts_as_often_as_it_was_out_at_once() {
        let mut pool = Pool::default();
        let (a, b) = (pool.take(8), pool.take(8));
        pool.give(a);
        let c = pool.take(8);
        let d = pool.take(3);
        assert_eq!(pool.bytes(Layout::Panels, 17), (2 * 8 + 3) * 32 * 4);
        assert_eq!(pool.bytes(Layout::Rows(2), 17), (2 * 8 + 3) * 17 * 2);
        pool.give_all([b, c]);
        assert_eq!(pool.bytes_out(Layout::Panels, 32), 3 * 32 * 4);
        let d = pool.narrow(d);
        assert_eq!(pool.bytes_out(Layout::Panels, 1), 2 * LANES * 4, "two numbers in the place of one, rounded up");
        let d = pool.widen(d);
        pool.give(d);
        assert_eq!(pool.bytes_out(Layout::Panels, 1), 0);
        assert_eq!(pool.bytes(Layout::Panels, 1), (2 * 8 + 3 + 2) * LANES * 4);
    }

    #[test]
    fn large_buffers_are_whole_huge_pages() {
        assert_eq!([0, 1, 1 << 20].map(buffer), [4, 4, 4 << 20]);
        assert_eq!(buffer((1 << 20) + 1), 6 << 20);
    }
}
