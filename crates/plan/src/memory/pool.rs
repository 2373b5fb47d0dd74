//! What a pool of activations comes to. The engine's pool (`ops::panel::Pool`) gives memory again by size, and so holds of
//! each size as many buffers as were ever out at once: counting takes and returns along the walk gives its bytes exactly.
use std::collections::BTreeMap;

/// Tokens in a panel.
pub const LANES: u64 = 16;
/// Buffers from twice this size on are made of whole huge pages.
const HUGE: u64 = 2 << 20;

/// Bytes of a buffer for so many numbers of four bytes.
pub const fn buffer(numbers: u64) -> u64 {
    let bytes = if numbers == 0 { 4 } else { 4 * numbers };
    if bytes >= 2 * HUGE { bytes.next_multiple_of(HUGE) } else { bytes }
}

/// An activation that is out.
#[must_use = "what is taken is given back"]
#[derive(Debug)]
pub struct Act {
    /// Numbers of four bytes a token.
    held: u64,
    /// Features, which are twice as many as `held` where they are kept in bfloat16.
    features: u64,
    narrow: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Class {
    out: u64,
    most: u64,
}

/// A pool, by the features of its activations; all have the same tokens.
#[derive(Debug, Clone, Default)]
pub struct Pool {
    classes: BTreeMap<u64, Class>,
}

impl Pool {
    /// An activation of so many features.
    pub fn take(&mut self, features: u64) -> Act {
        self.out(features);
        Act { held: features, features, narrow: false }
    }

    fn out(&mut self, held: u64) {
        let class = self.classes.entry(held).or_default();
        class.out += 1;
        class.most = class.most.max(class.out);
    }

    /// Back into the pool.
    #[allow(clippy::needless_pass_by_value)] // what is given back is gone
    pub fn give(&mut self, act: Act) {
        if let Some(class) = self.classes.get_mut(&act.held) {
            class.out -= 1;
        }
    }

    /// All of them back into the pool.
    pub fn give_all(&mut self, acts: impl IntoIterator<Item = Act>) {
        acts.into_iter().for_each(|act| self.give(act));
    }

    /// Takes and gives back at once.
    pub fn pass(&mut self, features: impl IntoIterator<Item = u64>) {
        let acts: Vec<Act> = features.into_iter().map(|features| self.take(features)).collect();
        self.give_all(acts);
    }

    /// Rounds to bfloat16, in a buffer of half the size.
    pub(super) fn narrow(&mut self, act: Act) -> Act {
        let narrow = Act { held: act.features.div_ceil(2), features: act.features, narrow: true };
        self.out(narrow.held);
        self.give(act);
        narrow
    }

    /// The reverse.
    pub(super) fn widen(&mut self, act: Act) -> Act {
        if !act.narrow {
            return act;
        }
        let wide = self.take(act.features);
        self.give(act);
        wide
    }

    /// Bytes of all buffers, each for so many tokens.
    pub(super) fn bytes(&self, layout: Layout, tokens: u64) -> u64 {
        self.sum(|class| class.most, layout, tokens)
    }

    /// Bytes of the buffers that are out now.
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
    /// In panels of f32: the CPU.
    Panels,
    /// Row-major, of so many bytes a number: a GPU.
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
