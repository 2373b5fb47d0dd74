//! [`Latents`]: the cache of multi-head latent attention for one text in one layer. It holds each position's latent and
//! the rotated part of its key, in pages of sixteen positions, which copies of a cache share until one of them writes.
use crate::activation::{Activation, LANES, Pool};
use std::sync::Arc;
use tunesmith_device::{Device, memory};

/// The latent cache of one text in one layer.
#[derive(Debug, Clone)]
pub struct Latents {
    rank: usize,
    rope: usize,
    pages: Vec<Arc<Page>>,
    length: usize,
}

/// Sixteen positions, `[16][rank + rope]`: for each its normalized latent, then the rotated part of its key.
#[derive(Debug)]
struct Page(Vec<f32>);

impl Clone for Page {
    fn clone(&self) -> Self {
        memory::admit(Device::Cpu, size_of_val(self.0.as_slice()), || Self(self.0.clone()))
    }
}

impl Page {
    /// A page of zeros, if the memory budget has room for it.
    fn new(floats: usize) -> Self {
        memory::admit(Device::Cpu, floats * size_of::<f32>(), || Self(vec![0.0; floats]))
    }
}

impl Latents {
    /// An empty cache, for latents of `rank` features and keys of which `rope` features are rotated.
    pub const fn new(rank: usize, rope: usize) -> Self {
        Self { rank, rope, pages: Vec::new(), length: 0 }
    }

    /// Drops all positions.
    pub fn clear(&mut self) {
        *self = Self::new(self.rank, self.rope);
    }

    /// The features of a latent, and those of a key that are rotated: `[rank, rope]`.
    pub const fn widths(&self) -> [usize; 2] {
        [self.rank, self.rope]
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
        self.pages.iter().map(|page| size_of_val(page.0.as_slice())).sum()
    }

    /// The numbers of one position, `[rank + rope]`.
    pub(super) fn position(&self, position: usize) -> &[f32] {
        let width = self.rank + self.rope;
        &self.pages[position / LANES].0[position % LANES * width..][..width]
    }

    /// Page `number`, which holds the positions from `16 * number` on: `[16][rank + rope]`.
    pub(super) fn page(&self, number: usize) -> &[f32] {
        &self.pages[number].0
    }

    /// Appends the tokens `start..start + count` of `latent [tokens, rank]` and `k_rot [tokens, rope]`.
    ///
    /// # Panics
    /// If the shapes do not fit, or the tokens are not on the CPU.
    pub fn append(&mut self, latent: &Activation, k_rot: &Activation, start: usize, count: usize) {
        assert_eq!((latent.features(), k_rot.features()), (self.rank, self.rope), "latents and what turns");
        assert!(start + count <= latent.tokens().min(k_rot.tokens()), "tokens of the batch");
        let width = self.rank + self.rope;
        for token in start..start + count {
            if self.length == self.pages.len() * LANES {
                self.pages.push(Arc::new(Page::new(LANES * width)));
            }
            let page = Arc::make_mut(&mut self.pages[self.length / LANES]);
            let (own, turned) = page.0[self.length % LANES * width..][..width].split_at_mut(self.rank);
            for (to, act) in [(own, latent), (turned, k_rot)] {
                let panel = act.panel(token / LANES);
                let lane = token % LANES;
                to.iter_mut().zip(panel.chunks_exact(LANES)).for_each(|(to, lanes)| *to = lanes[lane]);
            }
            self.length += 1;
        }
    }

    /// Shortens the cache to its first `length` positions.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
        self.pages.truncate(self.length.div_ceil(LANES));
    }

    /// Concatenates several texts, each with the number of its first positions to take: latents `[positions, rank]` and
    /// rotated parts of keys `[positions, rope]`, in a pool of the CPU.
    ///
    /// # Panics
    /// If a text has fewer positions.
    pub fn concat(pool: &Arc<Pool>, texts: &[(&Self, usize)]) -> (Activation, Activation) {
        let [rank, rope] = texts.first().map_or([0, 0], |(text, _)| text.widths());
        let total = texts.iter().map(|(_, count)| count).sum();
        let (mut latent, mut k_rot) = (pool.act(total, rank), pool.act(total, rope));
        let positions = texts.iter().flat_map(|(text, count)| (0..*count).map(|position| text.position(position)));
        for (token, floats) in positions.enumerate() {
            let (own, turned) = floats.split_at(rank);
            for (act, from) in [(&mut latent, own), (&mut k_rot, turned)] {
                let lane = token % LANES;
                let panel = act.panel_mut(token / LANES);
                panel.chunks_exact_mut(LANES).zip(from).for_each(|(lanes, &from)| lanes[lane] = from);
            }
        }
        (latent, k_rot)
    }
}
