//! Activations: `[panel of 16 tokens][feature][16 tokens]`, from a pool that gives the same memory again.
//!
//! In this layout a token is a vector lane: norms, rope and softmax need no horizontal sums, and one row-major
//! weight serves `X W^T` and `dY W` alike. The lanes after the last token of the last panel are finite in every
//! activation and zero in every gradient, so that sums over tokens may run over whole panels.
use super::par::{self, Shared};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tunesmith_device::{Buffer, Device, Usage};

/// The number of tokens in a panel: the lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Gives activations out and takes them back on drop, so that a step in the steady state allocates nothing.
#[derive(Debug, Default)]
pub struct Pool {
    device: Device,
    buffers: Mutex<Buffers>,
    panels: AtomicUsize,
    /// Buffers are as large as asked for, in steps of powers of two, not all as large as the largest.
    stepped: bool,
    usage: Usage,
}

/// The buffers of a pool, by how many values they have room for.
#[derive(Debug, Default)]
struct Buffers {
    idle: HashMap<usize, Vec<Buffer>>,
    /// How many there are, in use and idle.
    all: HashMap<usize, usize>,
}

impl Buffers {
    /// Gives the memory of those that are idle back.
    fn clear(&mut self) {
        for (values, idle) in self.idle.drain() {
            *self.all.entry(values).or_default() -= idle.len();
        }
    }
}

/// How many buffers a pool has for activations of so many features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferCount {
    /// Features of a token.
    pub features: usize,
    /// Buffers in use now.
    pub in_use: usize,
    /// Buffers in use and idle: the most that were in use at once.
    pub all: usize,
}

impl Pool {
    /// A pool on the CPU, without buffers, all of whose activations have one length.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// A pool on the CPU for activations of very different lengths.
    pub fn stepped() -> Arc<Self> {
        Arc::new(Self { stepped: true, ..Self::default() })
    }

    /// As [`Pool::new`], on a device.
    pub fn on(device: Device) -> Arc<Self> {
        Arc::new(Self { device, ..Self::default() })
    }

    /// As [`Pool::stepped`], on a device.
    pub fn stepped_on(device: Device) -> Arc<Self> {
        Arc::new(Self { device, stepped: true, ..Self::default() })
    }

    /// Where its activations are.
    pub const fn device(&self) -> Device {
        self.device
    }

    /// Bytes of all its buffers, idle ones included, and their high-water mark.
    pub const fn usage(&self) -> &Usage {
        &self.usage
    }

    /// Panels of a buffer for so many tokens.
    fn sized(&self, tokens: usize) -> usize {
        if self.stepped {
            tokens.div_ceil(LANES).next_power_of_two()
        } else {
            self.reserve(tokens);
            // Another thread may have given all back since: no activation is smaller than what it is for.
            self.panels.load(Ordering::Relaxed).max(tokens.div_ceil(LANES))
        }
    }

    /// Makes every later activation large enough for `tokens`; memory sized for fewer is given back.
    pub fn reserve(&self, tokens: usize) {
        let wanted = tokens.div_ceil(LANES);
        if self.panels.fetch_max(wanted, Ordering::Relaxed) < wanted {
            self.buffers().clear();
        }
    }

    /// Bytes of the buffers that wait for use.
    pub fn idle_bytes(&self) -> u64 {
        self.buffers().idle.values().flatten().map(Buffer::bytes).sum()
    }

    fn buffers(&self) -> MutexGuard<'_, Buffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many buffers of each size there are, given that each has room for so many tokens.
    pub fn counts(&self, tokens: usize) -> Vec<BufferCount> {
        let (buffers, each) = (self.buffers(), self.sized(tokens) * LANES);
        let count = |(&values, &all): (&usize, &usize)| {
            let idle = buffers.idle.get(&values).map_or(0, Vec::len);
            BufferCount { features: values / each, in_use: all - idle, all }
        };
        buffers.all.iter().filter(|(_, all)| **all > 0).map(count).collect()
    }

    /// Gives all idle memory back to the system; what comes next is sized afresh.
    pub fn release(&self) {
        self.panels.store(0, Ordering::Relaxed);
        self.buffers().clear();
    }

    /// An activation of `tokens` x `features`, its values undefined but for a partly used last panel, which is zero.
    pub fn act(self: &Arc<Self>, tokens: usize, features: usize) -> Act {
        let mut act = self.blank(tokens, features);
        if !tokens.is_multiple_of(LANES) && self.device == Device::Cpu {
            act.panel_mut(tokens / LANES).fill(0.0);
        }
        act
    }

    /// As [`Pool::act`], the last panel undefined too: for what writes whole panels, lanes without a token among them.
    ///
    /// Fresh memory is not initialised. Whoever takes an activation writes each float before it reads it.
    pub fn blank(self: &Arc<Self>, tokens: usize, features: usize) -> Act {
        let values = self.sized(tokens) * features * LANES;
        let reused = self.buffers().idle.get_mut(&values).and_then(Vec::pop);
        let buffer = reused.unwrap_or_else(|| {
            let buffer = Buffer::new(self.device, values, &self.usage);
            *self.buffers().all.entry(values).or_default() += 1;
            buffer
        });
        Act { buffer: Some(buffer), tokens, features, pool: Arc::clone(self) }
    }
}

/// An activation `[tokens, features]` in panels, whose memory goes back to its pool on drop.
#[derive(Debug)]
pub struct Act {
    buffer: Option<Buffer>,
    tokens: usize,
    features: usize,
    pool: Arc<Pool>,
}

impl Drop for Act {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            let mut buffers = self.pool.buffers();
            // Memory from before the last `reserve` is not wanted any more.
            let wanted = self.pool.panels.load(Ordering::Relaxed) * self.features * LANES;
            if self.pool.stepped || buffer.values() == wanted {
                buffers.idle.entry(buffer.values()).or_default().push(buffer);
            } else {
                *buffers.all.entry(buffer.values()).or_default() -= 1;
            }
        }
    }
}

impl Act {
    /// The number of tokens.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// The number of features of a token.
    pub const fn features(&self) -> usize {
        self.features
    }

    /// How many panels, the last of them perhaps partly used.
    pub(crate) const fn panels(&self) -> usize {
        self.tokens.div_ceil(LANES)
    }

    /// Floats from one panel to the next.
    pub(crate) const fn stride(&self) -> usize {
        self.features * LANES
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        self.pool.device
    }

    /// Whether it is on the meta device, where ops have nothing to do.
    pub(crate) fn is_meta(&self) -> bool {
        self.pool.device == Device::Meta
    }

    /// The pool that this one came from.
    pub const fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The first float of the first panel.
    pub(crate) fn ptr(&self) -> *const f32 {
        self.buffer.as_ref().map_or(std::ptr::null(), |buffer| buffer.start().cast_const())
    }

    /// The first float of the first panel, to share among tasks that write disjoint parts.
    pub(crate) fn shared(&mut self) -> Shared<f32> {
        Shared(self.buffer.as_ref().map_or(std::ptr::null_mut(), Buffer::start))
    }

    /// All panels, `[panels][features][16]`.
    pub(crate) fn data(&self) -> &[f32] {
        assert!(!self.ptr().is_null(), "an activation of the CPU");
        // SAFETY: the pool sized the buffer for at least that many floats, aligned to 64 bytes, and they live as long
        // as `self`, whose borrow keeps others from writing. On the meta device no op asks for them. A float that nothing has written yet is lent, never read:
        // see `Pool::blank`.
        unsafe { std::slice::from_raw_parts(self.ptr(), self.panels() * self.stride()) }
    }

    /// As [`Act::data`], for writing.
    pub(crate) fn data_mut(&mut self) -> &mut [f32] {
        assert!(!self.ptr().is_null(), "an activation of the CPU");
        let floats = self.panels() * self.stride();
        // SAFETY: as in `data`; the borrow of `self` for writing makes this the only way to them.
        unsafe { std::slice::from_raw_parts_mut(self.shared().get(), floats) }
    }

    /// One panel, `[features][16]`.
    pub(crate) fn panel(&self, index: usize) -> &[f32] {
        &self.data()[index * self.stride()..][..self.stride()]
    }

    /// As [`Act::panel`], for writing.
    pub(crate) fn panel_mut(&mut self, index: usize) -> &mut [f32] {
        let stride = self.stride();
        &mut self.data_mut()[index * stride..][..stride]
    }

    /// Sets every value to zero.
    pub fn zero(&mut self) {
        if !self.is_meta() {
            self.data_mut().fill(0.0);
        }
    }

    /// Another one of the same shape, its values undefined.
    #[must_use]
    pub fn like(&self) -> Self {
        self.pool.act(self.tokens, self.features)
    }

    /// The rows `rows`, which begin with a panel, as an activation of another pool.
    pub(crate) fn rows(&self, pool: &Arc<Pool>, rows: std::ops::Range<usize>) -> Self {
        assert!(rows.start.is_multiple_of(LANES), "rows from the beginning of a panel on");
        let mut out = pool.blank(rows.len(), self.features);
        if self.is_meta() {
            return out;
        }
        let first = rows.start / LANES * self.stride();
        let floats = out.panels() * out.stride();
        out.data_mut().copy_from_slice(&self.data()[first..first + floats]);
        out
    }

    /// The reverse of [`Act::rows`]: replaces the rows from `first` on by those of `part`.
    pub(crate) fn put_rows(&mut self, first: usize, part: &Self) {
        assert!(first.is_multiple_of(LANES) && self.features == part.features, "rows from the beginning of a panel on");
        if self.is_meta() {
            return;
        }
        let (start, floats) = (first / LANES * self.stride(), part.panels() * part.stride());
        self.data_mut()[start..start + floats].copy_from_slice(part.data());
    }

    /// Copies the features of one token to the host: `[features]`.
    pub fn row(&self, token: usize) -> Vec<f32> {
        if self.is_meta() {
            return vec![0.0; self.features];
        }
        self.panel(token / LANES)[token % LANES..].iter().step_by(LANES).copied().collect()
    }

    /// Some features of every token, from one on, as an activation of its own.
    #[must_use]
    pub fn columns(&self, columns: std::ops::Range<usize>) -> Self {
        let mut out = self.pool.act(self.tokens, columns.len());
        if self.is_meta() {
            return out;
        }
        for panel in 0..self.panels() {
            let from = &self.panel(panel)[columns.start * LANES..columns.end * LANES];
            out.panel_mut(panel).copy_from_slice(from);
        }
        out
    }

    /// The features of several with the same tokens, one after the other.
    #[must_use]
    pub fn side_by_side(parts: &[&Self]) -> Self {
        let features = parts.iter().map(|part| part.features).sum();
        let mut out = parts[0].pool.act(parts[0].tokens, features);
        if out.is_meta() {
            return out;
        }
        for panel in 0..out.panels() {
            let mut rest = out.panel_mut(panel);
            for part in parts {
                let (to, after) = rest.split_at_mut(part.stride());
                to.copy_from_slice(part.panel(panel));
                rest = after;
            }
        }
        out
    }

    /// The value of one feature of one token.
    pub(crate) fn at(&self, token: usize, feature: usize) -> f32 {
        self.data()[(token / LANES) * self.stride() + feature * LANES + token % LANES]
    }

    /// Copies row-major `[tokens, features]` into panels.
    pub fn from_rows(pool: &Arc<Pool>, rows: &[f32], features: usize) -> Self {
        let tokens = rows.len() / features;
        let mut act = pool.act(tokens, features);
        if act.is_meta() {
            return act;
        }
        for (token, row) in rows.chunks_exact(features).enumerate() {
            act.set_row(token, row);
        }
        act
    }

    /// Writes the features of one token.
    pub(crate) fn set_row(&mut self, token: usize, row: &[f32]) {
        let panel = self.panel_mut(token / LANES);
        for (feature, &value) in row.iter().enumerate() {
            panel[feature * LANES + token % LANES] = value;
        }
    }

    /// Copies the panels to row-major `[tokens, features]`.
    pub fn to_rows(&self) -> Vec<f32> {
        let mut rows = vec![0.0; self.tokens * self.features];
        if self.is_meta() {
            return rows;
        }
        for (token, row) in rows.chunks_exact_mut(self.features.max(1)).enumerate() {
            let panel = self.panel(token / LANES);
            for (feature, value) in row.iter_mut().enumerate() {
                *value = panel[feature * LANES + token % LANES];
            }
        }
        rows
    }

    /// A copy in the same pool.
    #[must_use]
    pub fn copy(&self) -> Self {
        let mut out = self.pool.act(self.tokens, self.features);
        if self.is_meta() {
            return out;
        }
        let (stride, to) = (self.stride(), out.shared());
        par::run(self.panels(), |panel| {
            // SAFETY: both hold `panels` panels of `stride` floats; each task owns one panel of `out`.
            unsafe {
                std::ptr::copy_nonoverlapping(self.ptr().add(panel * stride), to.get().add(panel * stride), stride);
            };
        });
        out
    }

    /// The tokens `rows`, in that order: `[rows.len(), features]`.
    #[must_use]
    pub fn gather(&self, rows: &[usize]) -> Self {
        self.gather_to(&self.pool, rows)
    }

    /// As [`Act::gather`], in memory of another pool.
    #[must_use]
    pub(crate) fn gather_to(&self, pool: &Arc<Pool>, rows: &[usize]) -> Self {
        let mut out = pool.act(rows.len(), self.features);
        if self.is_meta() {
            return out;
        }
        let (stride, features, to) = (self.stride(), self.features, out.shared());
        par::run(rows.len().div_ceil(LANES), |panel| {
            let rows = &rows[panel * LANES..rows.len().min((panel + 1) * LANES)];
            for (lane, &row) in rows.iter().enumerate() {
                let from = &self.panel(row / LANES)[row % LANES..];
                for feature in 0..features {
                    // SAFETY: `out` has a token for each row and as many features, so that the place lies within it; no
                    // other task has this panel.
                    unsafe { *to.get().add(panel * stride + feature * LANES + lane) = from[feature * LANES] };
                }
            }
        });
        out
    }

    /// Multiplies every token by a number of its own.
    pub(crate) fn times(&mut self, factors: &[f32]) {
        assert_eq!(factors.len(), self.tokens, "a factor for each token");
        if self.is_meta() {
            return;
        }
        for (panel, factors) in factors.chunks(LANES).enumerate() {
            for lanes in self.panel_mut(panel).chunks_exact_mut(LANES) {
                lanes.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
            }
        }
    }

    /// The product of each token's features with those of `other`, summed.
    pub(crate) fn dot(&self, other: &Self) -> Vec<f32> {
        assert_eq!((self.tokens, self.features), (other.tokens, other.features), "both have one shape");
        if self.is_meta() {
            return vec![0.0; self.tokens];
        }
        let mut sums = Vec::with_capacity(self.tokens);
        for panel in 0..self.panels() {
            let mut lanes = [0.0f32; LANES];
            let pairs = self.panel(panel).chunks_exact(LANES).zip(other.panel(panel).chunks_exact(LANES));
            for (a, b) in pairs {
                for lane in 0..LANES {
                    lanes[lane] += a[lane] * b[lane];
                }
            }
            sums.extend(&lanes[..LANES.min(self.tokens - panel * LANES)]);
        }
        sums
    }

    /// Adds token i of `from`, times `factors[i]`, to token `rows[i]`; the rows rise.
    pub(crate) fn scatter_add(&mut self, rows: &[usize], factors: Option<&[f32]>, from: &Self) {
        assert_eq!((rows.len(), self.features), (from.tokens, from.features), "a row for each token");
        if self.is_meta() {
            return;
        }
        for (index, &row) in rows.iter().enumerate() {
            let factor = factors.map_or(1.0, |factors| factors[index]);
            let source = &from.panel(index / LANES)[index % LANES..];
            let to = &mut self.panel_mut(row / LANES)[row % LANES..];
            for feature in 0..from.features {
                to[feature * LANES] += factor * source[feature * LANES];
            }
        }
    }

    /// The reverse of [`Act::gather`]: token `rows[i]` becomes `self`'s token i, all others zero.
    #[must_use]
    pub fn scatter(&self, rows: &[usize], tokens: usize) -> Self {
        let mut out = self.pool.act(tokens, self.features);
        if self.is_meta() {
            return out;
        }
        out.zero();
        for (index, &row) in rows.iter().enumerate() {
            let from = &self.panel(index / LANES)[index % LANES..];
            let to = &mut out.panel_mut(row / LANES)[row % LANES..];
            for feature in 0..self.features {
                to[feature * LANES] = from[feature * LANES];
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_pool_holds_nothing_and_sizes_afresh() {
        let pool = Pool::new();
        drop((pool.act(1000, 3), pool.act(5, 7)));
        let idle = |pool: &Pool| pool.buffers().idle.values().flatten().map(Buffer::values).sum::<usize>();
        assert_eq!(idle(&pool), 1008 * 10);
        let held = pool.act(1000, 3);
        pool.release();
        assert_eq!(idle(&pool), 0);
        drop(held);
        assert_eq!(idle(&pool), 0, "a buffer of the old size does not come back");
        drop(pool.act(5, 7));
        assert_eq!(idle(&pool), 16 * 7);
    }

    #[test]
    fn rows_go_in_and_come_back() {
        let pool = Pool::new();
        for tokens in [1, 15, 16, 17, 40] {
            let rows: Vec<f32> = (0..tokens * 5).map(|i| i as f32).collect();
            let act = Act::from_rows(&pool, &rows, 5);
            assert_eq!(act.to_rows(), rows);
            let picked: Vec<usize> = (0..tokens).step_by(3).collect();
            let gathered = act.gather(&picked);
            assert_eq!(gathered.at(gathered.tokens() - 1, 4), act.at(picked[picked.len() - 1], 4));
            let back = gathered.scatter(&picked, tokens);
            for token in 0..tokens {
                let expected = if token % 3 == 0 { act.at(token, 2) } else { 0.0 };
                assert_eq!(back.at(token, 2), expected);
            }
        }
    }
}
