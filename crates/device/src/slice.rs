//! [`Slice`] and [`SliceMut`]: borrowed numbers in a device's memory, such as weights, gains, trained values,
//! gradients, or optimizer state.
//!
//! [`CpuSlice`] gives the slice on the CPU to what runs there: the ops' CPU kernels and the
//! collectives. Everything else reads and writes copies ([`Slice::to_host`], [`SliceMut::on_host`]), which cost nothing on
//! the CPU.
use super::{Device, gpu};
use half::bf16;
use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::{Deref, DerefMut, Range};
use tunesmith_cpu_slice::CpuSlice;

/// The element types of a device's arrays: `f32`; [`bf16`] for weights and accumulated gradients; `u8` for codes;
/// integers for indices; `f64` for sums. Each is plain bytes, every bit pattern is a value, and zero bits are the
/// default.
pub trait Element: sealed::Sealed + Copy + Default + PartialEq + Debug + Send + Sync + 'static {}

mod sealed {
    /// Excludes other types, because a device's kernels support only these.
    pub trait Sealed {}
}

macro_rules! elements {
    ($($element:ty),*) => {$(
        impl Element for $element {}
        impl sealed::Sealed for $element {}
    )*};
}

elements!(f32, f64, bf16, u8, u32, u64, i32);

/// The bytes of the numbers.
pub(super) fn bytes<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: elements have no padding, so that each byte is initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of the numbers, to write.
pub(super) fn bytes_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: elements have no padding, and any bytes are values of theirs.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Numbers on a GPU: the address of the first, and their count. The memory is valid as long as its owner is borrowed.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    ordinal: u8,
    address: u64,
    len: usize,
}

impl Stretch {
    fn new<T>(memory: &gpu::Memory, len: usize) -> Self {
        assert!(len * size_of::<T>() <= memory.bytes(), "memory for {len} numbers");
        Self { ordinal: memory.ordinal(), address: memory.address(), len }
    }

    fn part<T>(self, range: &Range<usize>) -> Self {
        check(range, self.len);
        Self { address: self.address + (range.start * size_of::<T>()) as u64, len: range.len(), ..self }
    }

    fn read<T: Element>(self) -> Vec<T> {
        let mut values = vec![T::default(); self.len];
        self.read_into(&mut values);
        values
    }

    fn read_into<T: Element>(self, host: &mut [T]) {
        assert_eq!(host.len(), self.len, "a place for each number");
        // SAFETY: there is memory for `len` numbers.
        unsafe { gpu::download(self.ordinal, self.address, bytes_mut(host)) };
    }

    fn write<T: Element>(self, host: &[T]) {
        assert_eq!(host.len(), self.len, "a number for each place");
        // SAFETY: there is memory for `len` numbers.
        unsafe { gpu::upload(self.ordinal, self.address, bytes(host)) };
    }

    fn copy_from<T: Element>(self, from: Self) {
        assert_eq!(from.len, self.len, "a number for each place");
        if self.ordinal == from.ordinal {
            // SAFETY: there is memory for `len` numbers of both, and they do not overlap: one is borrowed for writing.
            unsafe { gpu::copy(self.ordinal, self.address, from.address, self.len * size_of::<T>()) };
        } else {
            self.write(&from.read::<T>());
        }
    }
}

/// How many numbers of a GPU are swapped at a time, through temporary memory.
const SWAPPED: usize = 1 << 20;

/// Borrowed f32, such as a weight or gradients.
pub type Floats<'a> = Slice<'a, f32>;
/// Borrowed f32 to write, such as a result or gradients.
pub type FloatsMut<'a> = SliceMut<'a, f32>;

/// Numbers borrowed for reading, one dimension, on any device.
#[derive(Debug, Clone, Copy)]
pub struct Slice<'a, T>(Numbers<'a, T>);

#[derive(Debug, Clone, Copy)]
enum Numbers<'a, T> {
    Host(&'a [T]),
    Gpu(Stretch),
    /// A number of elements without memory.
    Meta(usize),
}

impl<T: Element> Default for Slice<'_, T> {
    /// An empty slice on the CPU.
    fn default() -> Self {
        Self(Numbers::Host(&[]))
    }
}

impl<'a, T: Element> Slice<'a, T> {
    pub(super) const fn of_host(values: &'a [T]) -> Self {
        Self(Numbers::Host(values))
    }

    /// Borrows the first `len` numbers of a GPU's memory.
    ///
    /// # Panics
    /// If it has room for fewer.
    pub(super) fn of_gpu(memory: &'a gpu::Memory, len: usize) -> Self {
        Self(Numbers::Gpu(Stretch::new::<T>(memory, len)))
    }

    /// The address of the first number, on a GPU.
    ///
    /// # Panics
    /// If they are on another device: an op takes operands of its own device.
    pub const fn address(self) -> u64 {
        match self.0 {
            Numbers::Gpu(stretch) => stretch.address,
            Numbers::Host(_) | Numbers::Meta(_) => panic!("numbers of a GPU"),
        }
    }

    /// `len` numbers on the meta device.
    pub const fn meta(len: usize) -> Self {
        Self(Numbers::Meta(len))
    }

    /// How many numbers there are.
    pub const fn len(self) -> usize {
        match self.0 {
            Numbers::Host(values) => values.len(),
            Numbers::Gpu(stretch) => stretch.len,
            Numbers::Meta(len) => len,
        }
    }

    /// Whether there are no numbers.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The numbers at `range`.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        match self.0 {
            Numbers::Host(values) => Self(Numbers::Host(&values[range])),
            Numbers::Gpu(stretch) => Self(Numbers::Gpu(stretch.part::<T>(&range))),
            Numbers::Meta(len) => {
                check(&range, len);
                Self::meta(range.len())
            }
        }
    }

    /// The numbers on the host: borrowed on the CPU, copied from a GPU, zeros from the meta device.
    pub fn to_host(self) -> Cow<'a, [T]> {
        match self.0 {
            Numbers::Host(values) => Cow::Borrowed(values),
            Numbers::Gpu(stretch) => Cow::Owned(stretch.read()),
            Numbers::Meta(len) => Cow::Owned(vec![T::default(); len]),
        }
    }

    /// Copies the numbers to the host; zeros from the meta device.
    pub fn read(self) -> Vec<T> {
        self.to_host().into_owned()
    }

    /// Copies the numbers to `host`, which has the same length; zeros from the meta device.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn read_into(self, host: &mut [T]) {
        match self.0 {
            Numbers::Host(values) => host.copy_from_slice(values),
            Numbers::Gpu(stretch) => stretch.read_into(host),
            Numbers::Meta(len) => {
                assert_eq!(host.len(), len, "a place for each number");
                host.fill(T::default());
            }
        }
    }

    /// Whether the numbers equal those of `host` exactly. Always false on the meta device.
    pub fn equal(self, host: &[T]) -> bool {
        match self.0 {
            Numbers::Host(values) => values == host,
            Numbers::Gpu(stretch) => stretch.len == host.len() && stretch.read::<T>() == host,
            Numbers::Meta(_) => false,
        }
    }

    /// The device that holds the numbers.
    pub const fn device(self) -> Device {
        match self.0 {
            Numbers::Host(_) => Device::Cpu,
            Numbers::Gpu(stretch) => Device::Cuda(stretch.ordinal),
            Numbers::Meta(_) => Device::Meta,
        }
    }
}

impl<'a, T: Element> CpuSlice for Slice<'a, T> {
    type Slice = &'a [T];

    fn cpu_slice(self) -> &'a [T] {
        match self.0 {
            Numbers::Host(values) => values,
            Numbers::Gpu(_) | Numbers::Meta(_) => panic!("numbers of the CPU"),
        }
    }
}

impl<'a, T: Element> From<&'a [T]> for Slice<'a, T> {
    fn from(values: &'a [T]) -> Self {
        Self(Numbers::Host(values))
    }
}

impl<'a, T: Element> From<&'a Vec<T>> for Slice<'a, T> {
    fn from(values: &'a Vec<T>) -> Self {
        Self(Numbers::Host(values))
    }
}

/// Numbers borrowed for writing, one dimension, on any device.
#[derive(Debug)]
pub struct SliceMut<'a, T>(NumbersMut<'a, T>);

#[derive(Debug)]
enum NumbersMut<'a, T> {
    Host(&'a mut [T]),
    Gpu(Stretch),
    Meta(usize),
}

impl<T: Element> Default for SliceMut<'_, T> {
    /// An empty slice on the CPU.
    fn default() -> Self {
        Self(NumbersMut::Host(&mut []))
    }
}

impl<'a, T: Element> SliceMut<'a, T> {
    pub(super) const fn of_host(values: &'a mut [T]) -> Self {
        Self(NumbersMut::Host(values))
    }

    /// As [`Slice::of_gpu`], for memory that is owned or borrowed for writing.
    pub(super) fn of_gpu(memory: &'a gpu::Memory, len: usize) -> Self {
        Self(NumbersMut::Gpu(Stretch::new::<T>(memory, len)))
    }

    /// As [`Slice::address`].
    ///
    /// # Panics
    /// As [`Slice::address`].
    pub const fn address(&self) -> u64 {
        self.view().address()
    }

    /// `len` numbers on the meta device.
    pub const fn meta(len: usize) -> Self {
        Self(NumbersMut::Meta(len))
    }

    /// How many numbers there are.
    pub const fn len(&self) -> usize {
        match &self.0 {
            NumbersMut::Host(values) => values.len(),
            NumbersMut::Gpu(stretch) => stretch.len,
            NumbersMut::Meta(len) => *len,
        }
    }

    /// Whether there are no numbers.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The device that holds the numbers.
    pub const fn device(&self) -> Device {
        self.view().device()
    }

    /// Borrows the numbers, to read.
    pub const fn view(&self) -> Slice<'_, T> {
        match &self.0 {
            NumbersMut::Host(values) => Slice(Numbers::Host(values)),
            NumbersMut::Gpu(stretch) => Slice(Numbers::Gpu(*stretch)),
            NumbersMut::Meta(len) => Slice::meta(*len),
        }
    }

    /// The numbers at `range`.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        match self.0 {
            NumbersMut::Host(values) => Self(NumbersMut::Host(&mut values[range])),
            NumbersMut::Gpu(stretch) => Self(NumbersMut::Gpu(stretch.part::<T>(&range))),
            NumbersMut::Meta(len) => {
                check(&range, len);
                Self::meta(range.len())
            }
        }
    }

    /// Splits the numbers in two: those before `at`, and those from there on.
    ///
    /// # Panics
    /// If there are fewer than `at`.
    #[must_use]
    pub fn split_at(self, at: usize) -> (Self, Self) {
        match self.0 {
            NumbersMut::Host(values) => {
                let (low, high) = values.split_at_mut(at);
                (Self(NumbersMut::Host(low)), Self(NumbersMut::Host(high)))
            }
            NumbersMut::Gpu(stretch) => {
                let part = |range: Range<usize>| Self(NumbersMut::Gpu(stretch.part::<T>(&range)));
                (part(0..at), part(at..stretch.len))
            }
            NumbersMut::Meta(len) => {
                check(&(0..at), len);
                (Self::meta(at), Self::meta(len - at))
            }
        }
    }

    /// The same numbers, borrowed for writing for a shorter time.
    pub const fn reborrow(&mut self) -> SliceMut<'_, T> {
        match &mut self.0 {
            NumbersMut::Host(values) => SliceMut(NumbersMut::Host(values)),
            NumbersMut::Gpu(stretch) => SliceMut(NumbersMut::Gpu(*stretch)),
            NumbersMut::Meta(len) => SliceMut::meta(*len),
        }
    }

    /// Copies numbers from any device, which are as many.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_from(self, from: Slice<'_, T>) {
        assert_eq!(self.len(), from.len(), "a number for each place");
        match (self.0, from.0) {
            (NumbersMut::Host(values), _) => from.read_into(values),
            (NumbersMut::Gpu(to), Numbers::Gpu(from)) => to.copy_from::<T>(from),
            (NumbersMut::Gpu(to), Numbers::Host(values)) => to.write(values),
            (NumbersMut::Gpu(to), Numbers::Meta(_)) => Self(NumbersMut::Gpu(to)).zero(),
            (NumbersMut::Meta(_), _) => {}
        }
    }

    /// Copies numbers from the host, which are as many.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn write(self, host: &[T]) {
        self.copy_from(host.into());
    }

    /// Sets all numbers to zero.
    pub fn zero(self) {
        match self.0 {
            NumbersMut::Host(values) => values.fill(T::default()),
            // SAFETY: there is memory for `len` numbers, whose default is zero bytes.
            NumbersMut::Gpu(to) => unsafe { gpu::zero(to.ordinal, to.address, to.len * size_of::<T>()) },
            NumbersMut::Meta(_) => {}
        }
    }

    /// Swaps the numbers with those of `other`, which are as many and on the same device.
    ///
    /// # Panics
    /// If the lengths or the devices differ.
    pub fn swap(self, other: SliceMut<'_, T>) {
        match (self.0, other.0) {
            (NumbersMut::Host(one), NumbersMut::Host(other)) => one.swap_with_slice(other),
            (NumbersMut::Meta(one), NumbersMut::Meta(other)) => assert_eq!(one, other, "one with each"),
            (NumbersMut::Gpu(one), NumbersMut::Gpu(other)) if one.ordinal == other.ordinal => {
                assert_eq!(one.len, other.len, "one with each");
                let kept = gpu::Memory::new(one.ordinal, one.len.min(SWAPPED) * size_of::<T>());
                for start in (0..one.len).step_by(SWAPPED) {
                    let range = start..one.len.min(start + SWAPPED);
                    let (one, other) = (one.part::<T>(&range), other.part::<T>(&range));
                    let between = Stretch::new::<T>(&kept, range.len());
                    between.copy_from::<T>(one);
                    one.copy_from::<T>(other);
                    other.copy_from::<T>(between);
                }
            }
            (NumbersMut::Host(_) | NumbersMut::Gpu(_) | NumbersMut::Meta(_), _) => panic!("numbers of one device"),
        }
    }

    /// Access to the numbers from the host, to change them: on the CPU the numbers themselves; on a GPU a copy, which
    /// is written back on drop. The meta device gives zeros and stores nothing.
    pub fn on_host(self) -> HostMut<'a, T> {
        HostMut(match self.0 {
            NumbersMut::Host(values) => Changed::Borrowed(values),
            NumbersMut::Gpu(stretch) => Changed::Copied(stretch.read(), stretch),
            NumbersMut::Meta(len) => Changed::Dropped(vec![T::default(); len]),
        })
    }
}

impl FloatsMut<'_> {
    /// Adds as many numbers of the host, elementwise.
    pub fn add(self, host: &[f32]) {
        assert_eq!(self.len(), host.len(), "a summand for each number");
        self.on_host().iter_mut().zip(host).for_each(|(sum, value)| *sum += value);
    }
}

impl<'a, T: Element> CpuSlice for SliceMut<'a, T> {
    type Slice = &'a mut [T];

    fn cpu_slice(self) -> &'a mut [T] {
        match self.0 {
            NumbersMut::Host(values) => values,
            NumbersMut::Gpu(_) | NumbersMut::Meta(_) => panic!("numbers of the CPU"),
        }
    }
}

impl<'a, T: Element> From<&'a mut [T]> for SliceMut<'a, T> {
    fn from(values: &'a mut [T]) -> Self {
        Self(NumbersMut::Host(values))
    }
}

impl<'a, T: Element> From<&'a mut Vec<T>> for SliceMut<'a, T> {
    fn from(values: &'a mut Vec<T>) -> Self {
        Self(NumbersMut::Host(values))
    }
}

/// Numbers of a device that the host may change ([`SliceMut::on_host`]).
#[derive(Debug)]
pub struct HostMut<'a, T: Element>(Changed<'a, T>);

#[derive(Debug)]
enum Changed<'a, T> {
    Borrowed(&'a mut [T]),
    /// A copy of a GPU's numbers, which is written back on drop.
    Copied(Vec<T>, Stretch),
    /// Zeros of the meta device.
    Dropped(Vec<T>),
}

impl<T: Element> Drop for HostMut<'_, T> {
    fn drop(&mut self) {
        // A GPU that fails unwinds; a second unwinding would end the process.
        if let Changed::Copied(values, to) = &self.0
            && !std::thread::panicking()
        {
            to.write(values);
        }
    }
}

impl<T: Element> Deref for HostMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Changed::Borrowed(values) => values,
            Changed::Copied(values, _) | Changed::Dropped(values) => values,
        }
    }
}

impl<T: Element> DerefMut for HostMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.0 {
            Changed::Borrowed(values) => values,
            Changed::Copied(values, _) | Changed::Dropped(values) => values,
        }
    }
}

fn check(range: &Range<usize>, len: usize) {
    assert!(range.start <= range.end && range.end <= len, "a part of {len} numbers");
}
