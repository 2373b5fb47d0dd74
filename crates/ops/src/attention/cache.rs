//! [`KeyValues`]: the key-value cache of one text in one attention layer, in pages of sixteen positions, on the device
//! of the activations that it was filled from.
//!
//! Pages are shared: a copy of a cache (a beam, a conversation that continues) costs one pointer per page until one of
//! the two writes. Pages that a sliding window has left behind are released, so that the memory of such a layer is
//! bounded.
use super::Heads;
use crate::activation::{Activation, LANES, Number, Pool, convert_at};
use crate::spans::Window;
use std::collections::VecDeque;
use std::sync::Arc;
use tunesmith_device::{Array, Device, memory};

/// Sixteen floats, aligned to a cache line.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(super) struct Line([f32; LANES]);

/// The keys and values of sixteen positions.
#[derive(Debug)]
pub(super) enum Page {
    /// Keys `[kv head][head_dim][16 positions]`, then values `[kv head][16 positions][v_head_dim, filled up to whole lines]`.
    Cpu(Vec<Line>),
    /// On a GPU: keys `[16 positions][kv head][head_dim]`, then values `[16 positions][kv head][v_head_dim]`, as bytes
    /// of numbers of that type, which is the type of the activations that they came from.
    Gpu(Array<u8>, Number),
}

impl Clone for Page {
    fn clone(&self) -> Self {
        match self {
            Self::Cpu(lines) => memory::admit(Device::Cpu, size_of_val(lines.as_slice()), || Self::Cpu(lines.clone())),
            Self::Gpu(bytes, number) => Self::Gpu(bytes.clone(), *number),
        }
    }
}

impl Page {
    /// A page of zeros on the CPU, if the memory budget has room for it ([`memory::admit`]).
    fn new(lines: usize) -> Self {
        memory::admit(Device::Cpu, lines * size_of::<Line>(), || Self::Cpu(vec![Line([0.0; LANES]); lines]))
    }

    fn lines(&self) -> &[Line] {
        match self {
            Self::Cpu(lines) => lines,
            Self::Gpu(..) => panic!("a page of the CPU"),
        }
    }

    pub(super) fn ptr(&self) -> *const f32 {
        self.lines().as_ptr().cast()
    }

    fn floats(&mut self) -> &mut [f32] {
        let Self::Cpu(lines) = self else { panic!("a page of the CPU") };
        // SAFETY: a line is sixteen floats without padding (64 bytes, aligned to 64), and the vector holds `len` of
        // them, all initialised; the borrow of `self` for writing is the only one.
        unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * LANES) }
    }

    /// The page's address on a GPU, and the type of its numbers.
    fn on_gpu(&self) -> (u64, Number) {
        match self {
            Self::Gpu(bytes, number) => (bytes.view().address(), *number),
            Self::Cpu(_) => panic!("a page of a GPU"),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Cpu(lines) => size_of_val(lines.as_slice()),
            Self::Gpu(bytes, _) => bytes.len(),
        }
    }
}

/// The key-value cache of one text in one layer.
#[derive(Debug, Clone)]
pub struct KeyValues {
    heads: Heads,
    window: Option<Window>,
    /// The number of the first page that is still kept: it holds the positions from `16 * first` on.
    first: usize,
    pages: VecDeque<Arc<Page>>,
    length: usize,
}

impl KeyValues {
    /// An empty cache. `heads.query` does not matter. Positions that a `window` has left behind may be released later
    /// ([`KeyValues::trim`]).
    pub const fn new(heads: Heads, window: Option<Window>) -> Self {
        Self { heads, window, first: 0, pages: VecDeque::new(), length: 0 }
    }

    /// Drops all keys and values.
    pub fn clear(&mut self) {
        *self = Self::new(self.heads, self.window);
    }

    /// The numbers and sizes of heads that it was made for.
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

    /// Bytes of its pages, including those that it shares with copies.
    pub fn bytes(&self) -> usize {
        self.pages.iter().map(|page| page.bytes()).sum()
    }

    /// Floats that one value takes in a page on the CPU: `v_head_dim`, padded to whole cache lines.
    pub(super) const fn value_floats(&self) -> usize {
        self.heads.v_head_dim.next_multiple_of(LANES)
    }

    /// The place in a page, counted in numbers, at which the values begin (on any device): after the keys.
    pub(super) const fn key_floats(&self) -> usize {
        self.heads.kv * self.heads.head_dim * LANES
    }

    const fn page_floats(&self) -> usize {
        self.key_floats() + self.heads.kv * LANES * self.value_floats()
    }

    /// Page `number`, unless it was released.
    pub(super) fn page(&self, number: usize) -> Option<&Page> {
        self.pages.get(number.checked_sub(self.first)?).map(|page| &**page)
    }

    /// Whether page `number` is still kept.
    pub(super) fn keeps(&self, number: usize) -> bool {
        self.page(number).is_some()
    }

    /// The address of page `number` on a GPU; 0 if it was released.
    pub(super) fn address(&self, number: usize) -> u64 {
        self.page(number).map_or(0, |page| page.on_gpu().0)
    }

    /// The number type of its pages on a GPU; `None` while it is empty.
    pub(super) fn number(&self) -> Option<Number> {
        self.pages.back().map(|page| page.on_gpu().1)
    }

    /// Appends the tokens `start..start + count` of `k [tokens, kv * head_dim]` and `v [tokens, kv * v_head_dim]`.
    /// Releases no page.
    pub fn append(&mut self, k: &Activation, v: &Activation, start: usize, count: usize) {
        let Heads { kv, head_dim, v_head_dim, .. } = self.heads;
        assert_eq!((k.features(), v.features()), (kv * head_dim, kv * v_head_dim), "keys and values of all heads");
        assert!(start + count <= k.tokens().min(v.tokens()), "tokens of the batch");
        match k.device() {
            Device::Cpu => self.append_cpu(k, v, start, count),
            Device::Cuda(_) => self.append_cuda(k, v, start, count),
            Device::Meta => panic!("a cache has numbers"),
        }
    }

    /// Appends one token, whose features are `k [kv * head_dim, 1]` and `v [kv * v_head_dim, 1]`
    /// ([`Activation::to_vector`]).
    pub fn append_vectors(&mut self, k: &Activation, v: &Activation) {
        let Heads { kv, head_dim, v_head_dim, .. } = self.heads;
        assert_eq!((k.tokens(), v.tokens()), (kv * head_dim, kv * v_head_dim), "keys and values of all heads");
        assert_eq!((k.features(), v.features(), k.device()), (1, 1, Device::Cpu), "one token on the CPU");
        let (k, v) = (&k.data()[..k.tokens()], &v.data()[..v.tokens()]);
        self.push(k.iter().copied(), v.iter().copied());
    }

    fn append_cpu(&mut self, k: &Activation, v: &Activation, start: usize, count: usize) {
        fn features(act: &Activation, token: usize) -> impl Iterator<Item = f32> {
            act.panel(token / LANES)[token % LANES..].iter().step_by(LANES).copied()
        }
        for token in start..start + count {
            self.push(features(k, token), features(v, token));
        }
    }

    /// Appends a token's key and value, feature by feature.
    fn push(&mut self, key: impl Iterator<Item = f32>, value: impl Iterator<Item = f32>) {
        let (v_head_dim, padded, values) = (self.heads.v_head_dim, self.value_floats(), self.key_floats());
        let lane = self.length % LANES;
        if self.length / LANES >= self.first + self.pages.len() {
            let lines = self.page_floats() / LANES;
            self.pages.push_back(Arc::new(Page::new(lines)));
        }
        let Some(page) = self.pages.back_mut() else { return };
        let page = Arc::make_mut(page).floats();
        page[lane..].iter_mut().step_by(LANES).zip(key).for_each(|(to, from)| *to = from);
        for (feature, from) in value.enumerate() {
            let (head, inner) = (feature / v_head_dim, feature % v_head_dim);
            page[values + (head * LANES + lane) * padded + inner] = from;
        }
        self.length += 1;
    }

    fn append_cuda(&mut self, k: &Activation, v: &Activation, start: usize, count: usize) {
        let (mut token, end) = (start, start + count);
        while token < end {
            let lane = self.length % LANES;
            if self.length / LANES >= self.first + self.pages.len() {
                let bytes = LANES * (k.features() + v.features()) * k.number().bytes() as usize;
                self.pages.push_back(Arc::new(Page::Gpu(Array::zeros(k.device(), bytes), k.number())));
            }
            let values = self.key_floats();
            let Some(page) = self.pages.back_mut() else { return };
            let page = Arc::make_mut(page).on_gpu();
            // As many tokens as fit into the page: its rows have the layout of the activations' rows.
            let more = (end - token).min(LANES - lane);
            for (act, at) in [(k, 0), (v, values)] {
                let (from, width) = ((act.address(), act.number()), act.features());
                convert_at(act.device(), from, token * width, page, at + lane * width, more * width);
            }
            self.length += more;
            token += more;
        }
    }

    /// Releases the pages that no later query sees because the window has left them behind.
    pub fn trim(&mut self) {
        let Some(window) = self.window else { return };
        let first = window.first(self.length) / LANES;
        while self.first < first && !self.pages.is_empty() {
            self.pages.pop_front();
            self.first += 1;
        }
    }

    /// Shortens the cache to its first `length` positions. Returns `false`, and changes nothing, if a query there may
    /// need pages that were released.
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

    /// Copies the keys and values of all positions to the tokens from `start` on of `k` and `v`. Released positions
    /// become zero.
    pub fn write(&self, k: &mut Activation, v: &mut Activation, start: usize) {
        match k.device() {
            Device::Cpu => self.write_cpu(k, v, start),
            Device::Cuda(_) => self.write_cuda(k, v, start),
            Device::Meta => panic!("a cache has numbers"),
        }
    }

    fn write_cpu(&self, k: &mut Activation, v: &mut Activation, start: usize) {
        let (Heads { kv, head_dim, v_head_dim, .. }, padded) = (self.heads, self.value_floats());
        let values = self.key_floats();
        for position in 0..self.length {
            let (token, lane) = (start + position, position % LANES);
            let page = self.page(position / LANES).map(Page::lines);
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

    fn write_cuda(&self, k: &mut Activation, v: &mut Activation, start: usize) {
        for number in 0..self.length.div_ceil(LANES) {
            let (first, count) = (start + number * LANES, LANES.min(self.length - number * LANES));
            for (act, at) in [(&mut *k, 0), (&mut *v, self.key_floats())] {
                let (device, to, width) = (act.device(), (act.address(), act.number()), act.features());
                let zeros = self.page(number).is_none().then(|| Array::<f32>::zeros(device, count * width));
                let (from, at) = match (self.page(number), &zeros) {
                    (Some(page), _) => (page.on_gpu(), at),
                    (None, zeros) => ((zeros.as_ref().map_or(0, |zeros| zeros.view().address()), Number::F32), 0),
                };
                convert_at(device, from, at, to, first * width, count * width);
            }
        }
    }

    /// Concatenates several texts: keys `[positions, kv * head_dim]` and values `[positions, kv * v_head_dim]`, in a
    /// `pool` on the device of the caches.
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
    use crate::testing::{each_engine, numbers};

    #[test]
    fn pages_give_back_what_was_written_and_forget_what_the_window_left() {
        each_engine(|engine| {
            let (pool, heads) = (engine.pool(), Heads { query: 4, kv: 2, head_dim: 10, v_head_dim: 7 });
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
                // On the CPU a value is filled up to a line.
                let value = if engine.is_cpu() { 16 } else { 7 };
                assert_eq!(cache.bytes(), (5 - kept / 16) * (20 + 2 * value) * 16 * 4);
                // Back within the window, but not to before what it has left.
                assert!(cache.truncate(69) && cache.len() == 69);
                assert_eq!(cache.truncate(40), window.is_none());
            }
        });
    }

    #[test]
    fn texts_lie_end_to_end() {
        each_engine(|engine| {
            let (pool, heads) = (engine.pool(), Heads { query: 1, kv: 1, head_dim: 5, v_head_dim: 3 });
            let (keys, values) = (numbers(1, 40 * 5), numbers(2, 40 * 3));
            let (k, v) = (Activation::from_rows(&pool, &keys, 5), Activation::from_rows(&pool, &values, 3));
            let caches = [0..19, 19..40].map(|tokens| {
                let mut cache = KeyValues::new(heads, None);
                cache.append(&k, &v, tokens.start, tokens.len());
                cache
            });
            let (k, v) = KeyValues::concat(&pool, &[&caches[0], &caches[1]]);
            assert_eq!((k.to_rows(), v.to_rows()), (keys, values));
        });
    }

    #[test]
    fn a_copy_goes_its_own_way() {
        each_engine(|engine| {
            let (pool, heads) = (engine.pool(), Heads::new(1, 1, 4));
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
        });
    }
}
