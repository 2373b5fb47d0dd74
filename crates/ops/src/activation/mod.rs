//! [`Activation`]: a matrix `[tokens, features]`, the operand and result of most ops. Its memory comes from a
//! [`Pool`], which reuses it. On the CPU the layout is `[panel of 16 tokens][feature][16 tokens]` in float32. On a GPU
//! it is row-major in float32, float16 or bfloat16, as the pool says. Ops compute in float32 whatever the type, and
//! round what they write.
//!
//! In the CPU's layout each token is a lane of a SIMD vector: norms, rope and softmax need no horizontal sums, and one
//! row-major weight serves both `X W^T` and `dY W`. The lanes after the last token of the last panel are finite in
//! every activation and zero in every gradient, so that sums over tokens may run over whole panels.
mod away;
mod cpu;
pub(crate) mod cuda;
mod pool;
mod realign;
#[cfg(test)]
mod tests;

pub use away::{Elsewhere, Leaving};
pub(crate) use cuda::convert_at;
pub use pool::{BufferCount, Pool, Unrounded};
pub(crate) use realign::{realign, unalign};
pub use tunesmith_device::cuda::Number;

use crate::floats::{Floats, FloatsMut};
use crate::par::Shared;
use std::sync::Arc;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::{Buffer, Device};

/// The number of tokens in a panel, which is the number of lanes of a vector.
pub(crate) const LANES: usize = 16;

/// An activation `[tokens, features]`. On drop its memory goes back to its pool.
#[derive(Debug)]
pub struct Activation {
    buffer: Option<Buffer>,
    tokens: usize,
    features: usize,
    number: Number,
    pool: Arc<Pool>,
}

impl Drop for Activation {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.take_back(buffer, self.features, self.number);
        }
    }
}

impl Activation {
    /// The number of tokens.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// The number of features of a token.
    pub const fn features(&self) -> usize {
        self.features
    }

    /// The number of panels. The last one may be partly used.
    pub(crate) const fn panels(&self) -> usize {
        self.tokens.div_ceil(LANES)
    }

    /// Floats from one panel to the next.
    pub(crate) const fn stride(&self) -> usize {
        self.features * LANES
    }

    /// The device that its numbers are on.
    pub fn device(&self) -> Device {
        self.pool.device()
    }

    /// Whether it is on the meta device, where ops have nothing to do.
    pub(crate) fn is_meta(&self) -> bool {
        self.pool.device() == Device::Meta
    }

    /// The type of its numbers; float32 on the CPU.
    pub const fn number(&self) -> Number {
        self.number
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
        // as `self`, whose borrow keeps others from writing. The assertion refuses the meta device, which has none. A
        // float that nothing has written yet is lent, never read: see `Pool::blank`.
        unsafe { std::slice::from_raw_parts(self.ptr(), self.panels() * self.stride()) }
    }

    /// As [`Activation::data`], for writing.
    pub(crate) fn data_mut(&mut self) -> &mut [f32] {
        assert!(!self.ptr().is_null(), "an activation of the CPU");
        let floats = self.panels() * self.stride();
        // SAFETY: as in `data`; the borrow of `self` for writing makes this the only way to them.
        unsafe { std::slice::from_raw_parts_mut(self.shared().get(), floats) }
    }

    /// Where its numbers begin on a GPU.
    pub(crate) fn address(&self) -> u64 {
        self.buffer.as_ref().map_or(0, |buffer| buffer.floats(0..0).address())
    }

    /// How many float32 words its numbers fill on a GPU, whatever their type.
    fn words(&self) -> usize {
        (self.tokens * self.features * self.number.bytes() as usize).div_ceil(size_of::<f32>())
    }

    /// Its numbers on a GPU, row-major `[tokens, features]`. Panics unless they are float32.
    pub(crate) fn floats(&self) -> Floats<'_> {
        assert_eq!(self.number, Number::F32, "an activation in float32");
        let buffer = self.buffer.as_ref().expect("an activation has memory until it is dropped");
        buffer.floats(0..self.tokens * self.features)
    }

    /// As [`Activation::floats`], to write.
    pub(crate) fn floats_mut(&mut self) -> FloatsMut<'_> {
        assert_eq!(self.number, Number::F32, "an activation in float32");
        let buffer = self.buffer.as_mut().expect("an activation has memory until it is dropped");
        buffer.floats_mut(0..self.tokens * self.features)
    }

    /// One panel, `[features][16]`.
    pub(crate) fn panel(&self, index: usize) -> &[f32] {
        &self.data()[index * self.stride()..][..self.stride()]
    }

    /// As [`Activation::panel`], for writing.
    pub(crate) fn panel_mut(&mut self, index: usize) -> &mut [f32] {
        let stride = self.stride();
        &mut self.data_mut()[index * stride..][..stride]
    }

    /// Sets every value to zero.
    pub fn zero(&mut self) {
        match self.device() {
            Device::Cpu => self.data_mut().fill(0.0),
            Device::Cuda(_) => cuda::zero(self),
            Device::Meta => {}
        }
    }

    /// Sets the last panel to zero if it has lanes without a token.
    fn zero_last_panel(&mut self) {
        if !self.tokens.is_multiple_of(LANES) {
            match self.device() {
                Device::Cpu => self.panel_mut(self.tokens / LANES).fill(0.0),
                Device::Cuda(_) | Device::Meta => {} // no panels
            }
        }
    }

    /// A new activation of the same shape, type and pool. Its values are undefined, but a partly used last panel is
    /// zero.
    #[must_use]
    pub fn like(&self) -> Self {
        self.pool.typed(self.tokens, self.features, self.number)
    }

    /// Copies the rows `rows` to an activation of another pool: `[rows.len(), features]`. The first row has to begin a
    /// panel.
    #[must_use]
    pub fn rows(&self, pool: &Arc<Pool>, rows: std::ops::Range<usize>) -> Self {
        assert!(rows.start.is_multiple_of(LANES), "rows from the beginning of a panel on");
        let mut out = pool.typed_blank(rows.len(), self.features, self.number);
        match self.device() {
            Device::Cpu => cpu::rows(self, rows.start, &mut out),
            Device::Cuda(_) => cuda::rows(self, rows.start, &mut out),
            Device::Meta => {}
        }
        out
    }

    /// The reverse of [`Activation::rows`]: replaces the rows from `first` on by those of `part`. `first` has to begin
    /// a panel.
    pub fn put_rows(&mut self, first: usize, part: &Self) {
        assert!(first.is_multiple_of(LANES) && self.features == part.features, "rows from the beginning of a panel on");
        match self.device() {
            Device::Cpu => cpu::put_rows(self, first, part),
            Device::Cuda(_) => cuda::put_rows(self, first, part),
            Device::Meta => {}
        }
    }

    /// Copies the features of one token to the host: `[features]`.
    pub fn row(&self, token: usize) -> Vec<f32> {
        match self.device() {
            Device::Cpu => cpu::row(self, token),
            Device::Cuda(_) => cuda::row(self, token),
            Device::Meta => vec![0.0; self.features],
        }
    }

    /// The features of the only token as a vector, `[features, 1]`. On the CPU, where tokens are lanes, it takes a
    /// sixteenth of the memory.
    ///
    /// # Panics
    /// If there is more than one token, or the activation is not on the CPU.
    #[must_use]
    pub fn to_vector(&self) -> Self {
        assert_eq!((self.tokens, self.device()), (1, Device::Cpu), "one token on the CPU");
        let mut out = self.pool.blank(self.features, 1);
        cpu::to_vector(self, &mut out);
        out
    }

    /// Copies the features `columns` of every token: `[tokens, columns.len()]`.
    #[must_use]
    pub fn columns(&self, columns: std::ops::Range<usize>) -> Self {
        let mut out = self.pool.typed(self.tokens, columns.len(), self.number);
        match self.device() {
            Device::Cpu => cpu::columns(self, columns, &mut out),
            Device::Cuda(_) => cuda::columns(self, columns, &mut out),
            Device::Meta => {}
        }
        out
    }

    /// Concatenates the features of several activations with the same tokens: `[tokens, sum of features]`.
    #[must_use]
    pub fn side_by_side(parts: &[&Self]) -> Self {
        assert!(parts.iter().all(|part| part.tokens == parts[0].tokens), "all have the same tokens");
        let features = parts.iter().map(|part| part.features).sum();
        let mut out = parts[0].pool.typed(parts[0].tokens, features, parts[0].number);
        match out.device() {
            Device::Cpu => cpu::side_by_side(parts, &mut out),
            Device::Cuda(_) => cuda::side_by_side(parts, &mut out),
            Device::Meta => {}
        }
        out
    }

    /// Splits each group of `2 * width` features in its first and its second half: two activations
    /// `[tokens, features / 2]`.
    #[must_use]
    pub fn split_halves(&self, width: usize) -> [Self; 2] {
        self.split_parts([width; 2])
    }

    /// The reverse of [`Activation::split_halves`].
    #[must_use]
    pub fn join_halves(halves: [&Self; 2], width: usize) -> Self {
        Self::join_parts(halves, [width; 2])
    }

    /// Splits features that lie in groups: each group has `widths[0]` features of part 0, then `widths[1]` of part 1,
    /// and so on. Returns each part with its features of all groups, `[tokens, groups * widths[i]]`.
    #[must_use]
    pub fn split_parts<const N: usize>(&self, widths: [usize; N]) -> [Self; N] {
        let group: usize = widths.iter().sum();
        assert!(self.features.is_multiple_of(group), "features in groups of {group}");
        let groups = self.features / group;
        let mut parts = widths.map(|width| self.pool.typed(self.tokens, groups * width, self.number));
        match self.device() {
            Device::Cpu => cpu::split_parts(self, &widths, &mut parts),
            Device::Cuda(_) => cuda::split_parts(self, &widths, &mut parts),
            Device::Meta => {}
        }
        parts
    }

    /// The reverse of [`Activation::split_parts`].
    #[must_use]
    pub fn join_parts<const N: usize>(parts: [&Self; N], widths: [usize; N]) -> Self {
        let (tokens, groups) = (parts[0].tokens, parts[0].features / widths[0]);
        let fits = |(part, width): (&&Self, &usize)| (part.tokens, part.features) == (tokens, groups * width);
        assert!(parts.iter().zip(&widths).all(fits), "all have the same tokens and groups");
        let mut out = parts[0].pool.typed(tokens, groups * widths.iter().sum::<usize>(), parts[0].number);
        match out.device() {
            Device::Cpu => cpu::join_parts(&parts, &widths, &mut out),
            Device::Cuda(_) => cuda::join_parts(&parts, &widths, &mut out),
            Device::Meta => {}
        }
        out
    }

    /// The value of one feature of one token.
    pub(crate) fn at(&self, token: usize, feature: usize) -> f32 {
        self.data()[(token / LANES) * self.stride() + feature * LANES + token % LANES]
    }

    /// Copies row-major `[tokens, features]` from the host to a new activation of `pool`.
    pub fn from_rows(pool: &Arc<Pool>, rows: &[f32], features: usize) -> Self {
        let tokens = rows.len() / features;
        let mut act = pool.act(tokens, features);
        match act.device() {
            Device::Cpu => cpu::from_rows(rows, &mut act),
            Device::Cuda(_) => cuda::from_rows(&rows[..tokens * features], &mut act),
            Device::Meta => {}
        }
        act
    }

    /// Copies row-major `[tokens, features]` from a device to a new float32 activation on the same device.
    pub(crate) fn from_floats(pool: &Arc<Pool>, rows: Floats<'_>, features: usize) -> Self {
        match rows.device() {
            Device::Cpu => Self::from_rows(pool, rows.cpu_slice(), features),
            Device::Cuda(_) => {
                let mut act = pool.act_f32(rows.len() / features, features);
                cuda::from_floats(rows, &mut act);
                act
            }
            Device::Meta => pool.act_f32(rows.len() / features, features),
        }
    }

    /// Writes the features of one token, on the CPU.
    pub(crate) fn set_row(&mut self, token: usize, row: &[f32]) {
        let panel = self.panel_mut(token / LANES);
        for (feature, &value) in row.iter().enumerate() {
            panel[feature * LANES + token % LANES] = value;
        }
    }

    /// Copies all values to the host, row-major `[tokens, features]`.
    pub fn to_rows(&self) -> Vec<f32> {
        let mut rows = vec![0.0; self.tokens * self.features];
        match self.device() {
            Device::Cpu => cpu::to_rows(self, &mut rows),
            Device::Cuda(_) => cuda::to_rows(self, &mut rows),
            Device::Meta => {}
        }
        rows
    }

    /// A copy in the same pool.
    #[must_use]
    pub fn copy(&self) -> Self {
        let mut out = self.like();
        match self.device() {
            Device::Cpu => cpu::copy(self, &mut out),
            Device::Cuda(_) => cuda::copy(self, &mut out),
            Device::Meta => {}
        }
        out
    }

    /// A copy in another number type, on a GPU or the meta device.
    #[must_use]
    pub(crate) fn to(&self, number: Number) -> Self {
        let mut out = self.pool.typed(self.tokens, self.features, number);
        match self.device() {
            Device::Cpu => panic!("activations of the CPU are float32"),
            Device::Cuda(_) => cuda::convert(self, 0, &mut out, 0, self.tokens * self.features),
            Device::Meta => {}
        }
        out
    }

    /// The tokens `rows`, in that order: `[rows.len(), features]`.
    #[must_use]
    pub fn gather(&self, rows: &[usize]) -> Self {
        self.gather_to(&self.pool, rows)
    }

    /// As [`Activation::gather`], in memory of another pool.
    #[must_use]
    pub fn gather_to(&self, pool: &Arc<Pool>, rows: &[usize]) -> Self {
        let mut out = pool.typed(rows.len(), self.features, self.number);
        match self.device() {
            Device::Cpu => cpu::gather(self, rows, &mut out),
            Device::Cuda(_) => cuda::gather(self, rows, &mut out),
            Device::Meta => {}
        }
        out
    }

    /// Multiplies all features of token t by `factors[t]`.
    pub(crate) fn times(&mut self, factors: &[f32]) {
        assert_eq!(factors.len(), self.tokens, "a factor for each token");
        match self.device() {
            Device::Cpu => cpu::times(self, factors),
            Device::Cuda(_) => cuda::times(self, factors),
            Device::Meta => {}
        }
    }

    /// The inner product of each token's features with those of the same token of `other`: `[tokens]`, on the host.
    pub(crate) fn dot(&self, other: &Self) -> Vec<f32> {
        assert_eq!((self.tokens, self.features), (other.tokens, other.features), "both have one shape");
        match self.device() {
            Device::Cpu => cpu::dot(self, other),
            Device::Cuda(_) => cuda::dot(self, other),
            Device::Meta => vec![0.0; self.tokens],
        }
    }

    /// Adds token i of `from`, times `factors[i]` if given, to token `rows[i]`. `rows` has to rise.
    pub fn scatter_add(&mut self, rows: &[usize], factors: Option<&[f32]>, from: &Self) {
        assert_eq!((rows.len(), self.features), (from.tokens, from.features), "a row for each token");
        match self.device() {
            Device::Cpu => cpu::scatter_add(self, rows, factors, from),
            Device::Cuda(_) => cuda::scatter_add(self, rows, factors, from),
            Device::Meta => {}
        }
    }

    /// The reverse of [`Activation::gather`]: in the result, token `rows[i]` is token i of `self`; all other tokens are
    /// zero. `rows` has to rise.
    #[must_use]
    pub fn scatter(&self, rows: &[usize], tokens: usize) -> Self {
        let mut out = self.pool.typed(tokens, self.features, self.number);
        match self.device() {
            Device::Cpu => cpu::scatter(self, rows, &mut out),
            Device::Cuda(_) => cuda::scatter(self, rows, &mut out),
            Device::Meta => {}
        }
        out
    }
}
