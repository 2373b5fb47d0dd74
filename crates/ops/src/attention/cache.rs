//! What attention has seen of one text in one layer: keys and values in pages of sixteen positions.
//!
//! Pages are shared: a copy of a cache (a beam, a conversation that goes on) costs a pointer a page until one of both
//! writes. Pages that a sliding window has left behind are given up, so that such a layer's memory is bounded.
use super::Heads;
use crate::activation::{Activation, LANES, Pool};
use crate::spans::Window;
use std::collections::VecDeque;
use std::sync::Arc;
use tunesmith_device::{Device, memory};

/// A vector's worth of floats, on a cache line of its own.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Line([f32; LANES]);

/// Keys `[kv head][head_dim][16 positions]`, then values `[kv head][16 positions][v_head_dim, filled up to whole lines]`.
#[derive(Debug)]
pub(super) struct Page(Vec<Line>);

impl Clone for Page {
    fn clone(&self) -> Self {
        memory::admit(Device::Cpu, size_of_val(self.0.as_slice()), || Self(self.0.clone()))
    }
}

impl Page {
    /// Of zeros, where the memory budget has room for it ([`memory::admit`]).
    fn new(lines: usize) -> Self {
        memory::admit(Device::Cpu, lines * size_of::<Line>(), || Self(vec![Line([0.0; LANES]); lines]))
    }

    pub(super) const fn ptr(&self) -> *const f32 {
        self.0.as_ptr().cast()
    }

    fn floats(&mut self) -> &mut [f32] {
        // SAFETY: a line is sixteen floats without padding (64 bytes, aligned to 64), and the vector holds `len` of
        // them, all initialised; the borrow of `self` for writing is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * LANES) }
    }
}

/// One text's keys and values in one layer.
#[derive(Debug, Clone)]
pub struct KeyValues {
    heads: Heads,
    window: Option<Window>,
    /// The front page's number: it holds the positions from `16 first` on.
    first: usize,
    pages: VecDeque<Arc<Page>>,
    length: usize,
}

impl KeyValues {
    /// Of no positions yet. The number of query heads does not matter. Keys that a `window` has left behind may be given up ([`KeyValues::trim`]).
    pub const fn new(heads: Heads, window: Option<Window>) -> Self {
        Self { heads, window, first: 0, pages: VecDeque::new(), length: 0 }
    }

    /// Drops all keys and values.
    pub fn clear(&mut self) {
        *self = Self::new(self.heads, self.window);
    }

    /// The head counts that it was made for.
    pub const fn heads(&self) -> Heads {
        self.heads
    }

    /// The number of positions it holds.
    pub const fn len(&self) -> usize {
        self.length
    }

    /// Whether it holds no position.
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Bytes of its pages, shared ones included.
    pub fn bytes(&self) -> usize {
        self.pages.len() * self.page_floats() * size_of::<f32>()
    }

    /// A value's floats in a page.
    pub(super) const fn value_floats(&self) -> usize {
        self.heads.v_head_dim.next_multiple_of(LANES)
    }

    /// Where a page's values start.
    pub(super) const fn key_floats(&self) -> usize {
        self.heads.kv * self.heads.head_dim * LANES
    }

    const fn page_floats(&self) -> usize {
        self.key_floats() + self.heads.kv * LANES * self.value_floats()
    }

    /// The page with that number, if it is still kept.
    pub(super) fn page(&self, number: usize) -> Option<&Page> {
        self.pages.get(number.checked_sub(self.first)?).map(|page| &**page)
    }

    /// Appends tokens `start..start + count` of `k [tokens, kv * head_dim]` and `v [tokens, kv * v_head_dim]`. Nothing is
    /// given up yet.
    pub fn append(&mut self, k: &Activation, v: &Activation, start: usize, count: usize) {
        let (Heads { kv, head_dim, v_head_dim, .. }, padded) = (self.heads, self.value_floats());
        let (keys, values) = (kv * head_dim, self.key_floats());
        assert_eq!((k.features(), v.features()), (keys, kv * v_head_dim), "keys and values of all heads");
        assert!(start + count <= k.tokens().min(v.tokens()), "tokens of the batch");
        for token in start..start + count {
            let lane = self.length % LANES;
            if self.length / LANES >= self.first + self.pages.len() {
                let lines = self.page_floats() / LANES;
                self.pages.push_back(Arc::new(Page::new(lines)));
            }
            let Some(page) = self.pages.back_mut() else { return };
            let page = Arc::make_mut(page).floats();
            let of = |act: &Activation, feature: usize| act.panel(token / LANES)[feature * LANES + token % LANES];
            for feature in 0..keys {
                page[feature * LANES + lane] = of(k, feature);
            }
            for feature in 0..kv * v_head_dim {
                let (head, inner) = (feature / v_head_dim, feature % v_head_dim);
                page[values + (head * LANES + lane) * padded + inner] = of(v, feature);
            }
            self.length += 1;
        }
    }

    /// Gives up the pages that no later query sees.
    pub fn trim(&mut self) {
        let Some(window) = self.window else { return };
        let first = window.first(self.length) / LANES;
        while self.first < first && !self.pages.is_empty() {
            self.pages.pop_front();
            self.first += 1;
        }
    }

    /// Goes back to the first `length` positions; says whether it can: what a window has given up they may need.
    pub fn truncate(&mut self, length: usize) -> bool {
        if length >= self.length {
            return true;
        }
        let needed = self.window.map_or(0, |window| window.first(length)) / LANES;
        if self.first > needed {
            return false;
        }
        self.pages.truncate(length.div_ceil(LANES) - self.first);
        self.length = length;
        true
    }

    /// Writes the keys and values of all positions to tokens `start..` of `k` and `v`; those given up are zero.
    pub fn write(&self, k: &mut Activation, v: &mut Activation, start: usize) {
        let (Heads { kv, head_dim, v_head_dim, .. }, padded) = (self.heads, self.value_floats());
        let values = self.key_floats();
        for position in 0..self.length {
            let (token, lane) = (start + position, position % LANES);
            let page = self.page(position / LANES).map(|page| &page.0);
            let at = |float: usize| page.map_or(0.0, |lines| lines[float / LANES].0[float % LANES]);
            for feature in 0..kv * head_dim {
                k.panel_mut(token / LANES)[feature * LANES + token % LANES] = at(feature * LANES + lane);
            }
            for feature in 0..kv * v_head_dim {
                let (head, inner) = (feature / v_head_dim, feature % v_head_dim);
                let value = at(values + (head * LANES + lane) * padded + inner);
                v.panel_mut(token / LANES)[feature * LANES + token % LANES] = value;
            }
        }
    }

    /// Keys `[positions, kv * head_dim]` and values `[positions, kv * v_head_dim]` of several texts, end to end.
    pub fn concat(pool: &Arc<Pool>, texts: &[&Self]) -> (Activation, Activation) {
        let widths = |text: &&Self| (text.heads.kv * text.heads.head_dim, text.heads.kv * text.heads.v_head_dim);
        let (keys, values) = texts.first().map_or((0, 0), widths);
        let total = texts.iter().map(|text| text.length).sum();
        let (mut k, mut v) = (pool.act(total, keys), pool.act(total, values));
        let mut start = 0;
        for text in texts {
            text.write(&mut k, &mut v, start);
            start += text.length;
        }
        (k, v)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    #[test]
    fn pages_give_back_what_was_written_and_forget_what_the_window_left() {
        let (pool, heads) = (Pool::new(), Heads { query: 4, kv: 2, head_dim: 10, v_head_dim: 7 });
        let (keys, values) = (numbers(1, 70 * 20), numbers(2, 70 * 14));
        let (k, v) = (Activation::from_rows(&pool, &keys, 20), Activation::from_rows(&pool, &values, 14));
        // A query at position 70 sees the keys from 51 or from 60 on; their page begins at 48.
        for (window, kept) in [(None, 0), (Some(Window::Sliding(20)), 48), (Some(Window::Chunked(30)), 48)] {
            let mut cache = KeyValues::new(heads, window);
            for (start, count) in [(0, 18), (18, 1), (19, 40), (59, 11)] {
                cache.append(&k, &v, start, count);
                cache.trim();
            }
            let (k_back, v_back) = KeyValues::concat(&pool, &[&cache]);
            for (back, rows) in [(k_back, &keys), (v_back, &values)] {
                let (back, width) = (back.to_rows(), back.features());
                assert!(back[..kept * width].iter().all(|&value| value == 0.0));
                assert_eq!(back[kept * width..], rows[kept * width..]);
            }
            assert_eq!(cache.bytes(), (5 - kept / 16) * (20 + 2 * 16) * 16 * 4);
            // Back within the window, but not to before what it has left.
            assert!(cache.truncate(69) && cache.len() == 69);
            assert_eq!(cache.truncate(40), window.is_none());
        }
    }

    #[test]
    fn a_copy_goes_its_own_way() {
        let (pool, heads) = (Pool::new(), Heads::new(1, 1, 4));
        let act = |seed| Activation::from_rows(&pool, &numbers(seed, 20 * 4), 4);
        let (k, other) = (act(1), act(2));
        let mut cache = KeyValues::new(heads, None);
        cache.append(&k, &k, 0, 18);
        let mut copy = cache.clone();
        copy.append(&other, &other, 18, 1);
        cache.append(&k, &k, 18, 1);
        let last = |cache: &KeyValues| KeyValues::concat(&pool, &[cache]).0.to_rows()[18 * 4..].to_vec();
        assert_eq!(last(&cache), k.to_rows()[18 * 4..19 * 4]);
        assert_eq!(last(&copy), other.to_rows()[18 * 4..19 * 4]);
    }
}
