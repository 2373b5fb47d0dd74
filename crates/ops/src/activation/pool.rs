//! [`Pool`]: the memory of activations, in buffers of a device that are reused.
use super::{Activation, LANES, Number};
use crate::simd::{in_tiles, pair_level};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tunesmith_device::{Buffer, Device};

/// Lends memory to activations and takes it back when they are dropped, so that a training step allocates nothing once
/// all buffers exist.
#[derive(Debug, Default)]
pub struct Pool {
    device: Device,
    buffers: Mutex<Buffers>,
    panels: AtomicUsize,
    /// Whether each buffer has the size that was asked for, rounded up to a power of two, instead of that of the
    /// largest activation.
    stepped: bool,
    /// The number types of activations and of the operands of products, as [`coded`] writes them.
    number: AtomicU8,
    products: AtomicU8,
    tf32: AtomicBool,
    splits: AtomicBool,
}

/// The buffers of a pool. The maps' keys are sizes: how many float32 values a buffer has room for.
#[derive(Debug, Default)]
struct Buffers {
    idle: HashMap<usize, Vec<Buffer>>,
    /// How many buffers of each size exist, in use and idle.
    all: HashMap<usize, usize>,
    /// Values in use now, and the most that were in use at once since the memory was last given back.
    used: usize,
    most: usize,
}

impl Buffers {
    /// Counts a buffer that is taken into use.
    fn take(&mut self, values: usize) {
        self.used += values;
        self.most = self.most.max(self.used);
    }

    /// Frees idle buffers until the pool holds no more than was ever in use at once. Otherwise, where lengths differ
    /// from pass to pass, it would keep the largest number of buffers of each length.
    fn trim(&mut self) {
        let idle: usize = self.idle.iter().map(|(values, idle)| values * idle.len()).sum();
        let mut beyond = (self.used + idle).saturating_sub(self.most);
        while beyond > 0 {
            // The smallest buffer that is enough, or else the largest.
            let sizes = self.idle.iter().filter(|(_, idle)| !idle.is_empty()).map(|(values, _)| *values);
            let fit = sizes.min_by_key(|&values| if values < beyond { (1, usize::MAX - values) } else { (0, values) });
            let Some(values) = fit else { return };
            self.idle.get_mut(&values).and_then(Vec::pop);
            *self.all.entry(values).or_default() -= 1;
            beyond = beyond.saturating_sub(values);
        }
    }

    /// Frees all idle buffers.
    fn clear(&mut self) {
        for (values, idle) in self.idle.drain() {
            *self.all.entry(values).or_default() -= idle.len();
        }
        self.most = self.used;
    }
}

const fn coded(number: Number) -> u8 {
    match number {
        Number::F32 => 0,
        Number::F16 => 1,
        Number::Bf16 => 2,
    }
}

fn decoded(code: &AtomicU8) -> Number {
    match code.load(Ordering::Relaxed) {
        1 => Number::F16,
        2 => Number::Bf16,
        _ => Number::F32,
    }
}

/// How many float32 values `numbers` numbers of this type take the memory of.
const fn floats(numbers: usize, number: Number) -> usize {
    (numbers * number.bytes() as usize).div_ceil(size_of::<f32>())
}

/// How many buffers a pool has for activations with a certain number of features ([`Pool::counts`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferCount {
    /// Features of a token that the buffers are made for.
    pub features: usize,
    /// Buffers that activations hold now.
    pub in_use: usize,
    /// Buffers in use and idle: the most that were in use at once.
    pub all: usize,
}

impl Pool {
    /// An empty pool on the CPU for activations of one length: its buffers are all sized for the most tokens that were
    /// ever asked for.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// An empty pool on the CPU for activations of very different lengths, such as the tokens of each expert: buffer
    /// sizes are rounded up to powers of two.
    pub fn stepped() -> Arc<Self> {
        Arc::new(Self { stepped: true, ..Self::default() })
    }

    /// As [`Pool::new`], on any device.
    pub fn on(device: Device) -> Arc<Self> {
        Arc::new(Self { device, ..Self::default() })
    }

    /// As [`Pool::stepped`], on any device.
    pub fn stepped_on(device: Device) -> Arc<Self> {
        Arc::new(Self { device, stepped: true, ..Self::default() })
    }

    /// Sets the number type of the activations that a GPU's pool gives out from now on, and of the operands of their
    /// products. On the CPU activations stay float32; the operands of products follow [`Pool::set_products`].
    pub fn set_number(&self, number: Number) {
        if matches!(self.device, Device::Cuda(_)) {
            self.number.store(coded(number), Ordering::Relaxed);
        }
        self.set_products(number);
    }

    /// Sets what the operands of matrix products are rounded to when the result is of this pool. Activations keep their
    /// type. The CPU rounds to bfloat16 only, and only where it multiplies that faster
    /// ([`pair_level`](crate::simd::pair_level)).
    pub fn set_products(&self, number: Number) {
        self.products.store(coded(number), Ordering::Relaxed);
    }

    /// Sets whether a GPU may round float32 operands of products to TF32 for its tensor cores. TF32 has bfloat16's
    /// range and 10 bits of fraction. This concerns products whose results are of this pool, and those that sum over
    /// the tokens of its activations.
    pub fn set_tf32(&self, may: bool) {
        self.tf32.store(may, Ordering::Relaxed);
    }

    /// What [`Pool::set_tf32`] set; `false` at first.
    pub fn tf32(&self) -> bool {
        self.tf32.load(Ordering::Relaxed)
    }

    /// The number type of its activations: float32 at first.
    pub fn number(&self) -> Number {
        decoded(&self.number)
    }

    /// What [`Pool::set_products`] set; float32 at first.
    pub fn products(&self) -> Number {
        decoded(&self.products)
    }

    /// Whether the CPU rounds the operands of products to bfloat16 and multiplies them in pairs.
    pub(crate) fn in_pairs(&self) -> bool {
        self.products() == Number::Bf16 && pair_level().is_some()
    }

    /// Sets whether the CPU may split float32 activations for products whose results are of this pool: each number
    /// becomes three bfloat16 numbers that add up to it, which AMX multiplies with a bfloat16 matrix. Sums are as exact
    /// as those of multiply-adds, but added in another order.
    pub fn set_splits(&self, may: bool) {
        self.splits.store(may, Ordering::Relaxed);
    }

    /// What [`Pool::set_splits`] set; `false` at first.
    fn may_split(&self) -> bool {
        self.splits.load(Ordering::Relaxed)
    }

    /// Whether the CPU splits the activations of products with bfloat16 matrices: allowed by [`Pool::set_splits`], not
    /// rounded to bfloat16 anyway, and with AMX at hand.
    pub(crate) fn splits(&self) -> bool {
        self.may_split() && self.products() != Number::Bf16 && in_tiles()
    }

    /// The device that its activations are on.
    pub const fn device(&self) -> Device {
        self.device
    }

    /// How many panels a buffer for `tokens` tokens has.
    fn sized(&self, tokens: usize) -> usize {
        if self.stepped {
            tokens.div_ceil(LANES).next_power_of_two()
        } else {
            self.reserve(tokens);
            // Another thread may have released the memory since: a buffer is never smaller than its activation.
            self.panels.load(Ordering::Relaxed).max(tokens.div_ceil(LANES))
        }
    }

    /// Sizes all later buffers for at least `tokens` tokens; idle memory that was sized for fewer is freed.
    pub fn reserve(&self, tokens: usize) {
        let wanted = tokens.div_ceil(LANES);
        if self.panels.fetch_max(wanted, Ordering::Relaxed) < wanted {
            self.buffers().clear();
        }
    }

    /// Whether idle buffers are freed to make room for one of another size. Not on a GPU, which would wait for its work
    /// each time.
    fn trims(&self) -> bool {
        self.stepped && self.device == Device::Cpu
    }

    /// Bytes of the idle buffers.
    pub fn idle_bytes(&self) -> u64 {
        self.buffers().idle.values().flatten().map(Buffer::bytes).sum()
    }

    fn buffers(&self) -> MutexGuard<'_, Buffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many buffers of each size there are. `tokens` says for how many tokens the buffers of a stepped pool were
    /// made; any other pool knows it.
    pub fn counts(&self, tokens: usize) -> Vec<BufferCount> {
        let stepped = tokens.div_ceil(LANES).next_power_of_two();
        let panels = if self.stepped { stepped } else { self.panels.load(Ordering::Relaxed) };
        let buffers = self.buffers();
        let count = |(&values, &all): (&usize, &usize)| {
            let idle = buffers.idle.get(&values).map_or(0, Vec::len);
            BufferCount { features: values / (panels * LANES).max(1), in_use: all - idle, all }
        };
        buffers.all.iter().filter(|(_, all)| **all > 0).map(count).collect()
    }

    /// Frees all idle memory. Buffers that are made from here on are sized afresh.
    pub fn release(&self) {
        self.panels.store(0, Ordering::Relaxed);
        self.buffers().clear();
    }

    /// A new activation `[tokens, features]`. Its values are undefined, but a partly used last panel is zero.
    pub fn act(self: &Arc<Self>, tokens: usize, features: usize) -> Activation {
        self.typed(tokens, features, self.number())
    }

    /// As [`Pool::act`], in float32 whatever the pool's type: for sums over many tokens or features.
    pub fn act_f32(self: &Arc<Self>, tokens: usize, features: usize) -> Activation {
        self.typed(tokens, features, Number::F32)
    }

    /// As [`Pool::act`], with an undefined last panel too: for ops that write whole panels, including the lanes without
    /// a token.
    ///
    /// Fresh memory is not initialised. Whoever takes an activation writes each float before it reads it.
    pub fn blank(self: &Arc<Self>, tokens: usize, features: usize) -> Activation {
        self.typed_blank(tokens, features, self.number())
    }

    /// As [`Pool::act`], with numbers of type `number`.
    pub(super) fn typed(self: &Arc<Self>, tokens: usize, features: usize, number: Number) -> Activation {
        let mut act = self.typed_blank(tokens, features, number);
        act.zero_last_panel();
        act
    }

    /// As [`Pool::blank`], with numbers of type `number`.
    pub(super) fn typed_blank(self: &Arc<Self>, tokens: usize, features: usize, number: Number) -> Activation {
        let values = floats(self.sized(tokens) * features * LANES, number);
        let mut buffers = self.buffers();
        buffers.take(values);
        let reused = buffers.idle.get_mut(&values).and_then(Vec::pop);
        let buffer = reused.unwrap_or_else(|| {
            if self.trims() {
                buffers.trim();
            }
            *buffers.all.entry(values).or_default() += 1;
            drop(buffers);
            Buffer::new(self.device, values)
        });
        Activation { buffer: Some(buffer), tokens, features, number, pool: Arc::clone(self) }
    }

    /// Takes back the buffer of an activation with that many features, and keeps it for the next one if it still has
    /// the right size.
    pub(super) fn take_back(&self, buffer: Buffer, features: usize, number: Number) {
        let mut buffers = self.buffers();
        buffers.used = buffers.used.saturating_sub(buffer.values());
        // A buffer from before the last `reserve` has the wrong size: it is freed.
        let wanted = floats(self.panels.load(Ordering::Relaxed) * features * LANES, number);
        if self.stepped || buffer.values() == wanted {
            buffers.idle.entry(buffer.values()).or_default().push(buffer);
        } else {
            *buffers.all.entry(buffer.values()).or_default() -= 1;
        }
    }
}

/// Until it is dropped, the CPU multiplies the operands of some pools in float32: it neither rounds nor splits them, and
/// adds products number by number in one order. The pools of a GPU stay as they are.
#[derive(Debug)]
pub struct Unrounded<'a>(Vec<(&'a Pool, Number, bool)>);

impl<'a> Unrounded<'a> {
    /// From now on those of `pools` that are on the CPU multiply in float32.
    pub fn new(pools: impl IntoIterator<Item = &'a Arc<Pool>>) -> Self {
        let of_cpu = pools.into_iter().filter(|pool| pool.device() == Device::Cpu);
        let before: Vec<(&Pool, Number, bool)> =
            of_cpu.map(|pool| (&**pool, pool.products(), pool.may_split())).collect();
        for (pool, ..) in &before {
            pool.set_products(Number::F32);
            pool.set_splits(false);
        }
        Self(before)
    }
}

impl Drop for Unrounded<'_> {
    fn drop(&mut self) {
        for &(pool, products, splits) in &self.0 {
            pool.set_products(products);
            pool.set_splits(splits);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_unrounded_for_a_while() {
        let pools = [Pool::new(), Pool::new()];
        pools[0].set_products(Number::Bf16);
        pools[1].set_splits(true);
        let products = || pools.each_ref().map(|pool| (pool.products(), pool.may_split()));
        {
            let _unrounded = Unrounded::new(&pools);
            assert_eq!(products(), [(Number::F32, false); 2]);
        }
        assert_eq!(products(), [(Number::Bf16, false), (Number::F32, true)]);
    }

    #[test]
    fn a_pool_of_many_lengths_holds_no_more_than_was_in_use_at_once() {
        let held = |pool: &Pool| pool.buffers().all.iter().map(|(values, all)| values * all).sum::<usize>();
        let pool = Pool::stepped();
        // Three of one panel and one of eight, which change their places from pass to pass.
        for pass in 0..6 {
            let lengths = (0..4).map(|expert| if expert == pass % 4 { 120 } else { 16 * (1 + pass % 2) });
            drop(lengths.map(|tokens| pool.act(tokens, 5)).collect::<Vec<_>>());
            let most = if pass == 0 { 3 + 8 } else { 3 * 2 + 8 };
            assert!(held(&pool) <= 16 * 5 * most, "{pass}");
        }
        drop([100; 3].map(|tokens| pool.act(tokens, 5)));
        assert_eq!(held(&pool), 16 * 5 * 24);
        assert_eq!(pool.idle_bytes(), 4 * 16 * 5 * 24);
        pool.release();
        drop(pool.act(16, 5));
        assert_eq!(held(&pool), 16 * 5);
    }

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
    fn buffers_are_counted_by_their_features_whatever_tokens_are_asked_for() {
        let pool = Pool::on(Device::Meta);
        let held = pool.act(100, 3);
        drop((pool.act(90, 3), pool.act(7, 5)));
        let mut counts = pool.counts(100_000);
        counts.sort_by_key(|count| count.features);
        let expected = [(3, 1, 2), (5, 0, 1)];
        assert_eq!(counts.iter().map(|it| (it.features, it.in_use, it.all)).collect::<Vec<_>>(), expected);
        drop(held);
        let stepped = Pool::stepped_on(Device::Meta);
        drop(stepped.act(33, 4));
        assert_eq!(stepped.counts(33), [BufferCount { features: 4, in_use: 0, all: 1 }]);
    }
}
