//! Borrowed numbers in a device's memory: weights, gains, trained values, gradients, optimizer state.
//!
//! [`Slice::cpu_slice`] and [`SliceMut::cpu_slice`] give the slice on the CPU to what runs there: the ops' CPU kernels and the
//! collectives. Everything else reads and writes copies ([`Slice::to_host`], [`SliceMut::on_host`]), which cost nothing on
//! the CPU.
use super::Device;
use half::bf16;
use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::{Deref, DerefMut, Range};

/// What a device keeps arrays of: `f32`; [`bf16`] for gradient sums of half the size; `u8` for codes of quantized moments.
pub trait Element: sealed::Sealed + Copy + Default + PartialEq + Debug + Send + Sync + 'static {}

impl Element for f32 {}
impl Element for bf16 {}
impl Element for u8 {}

mod sealed {
    /// Keeps other types out: a device's kernels know the three.
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for u8 {}
}

/// Borrowed f32, such as a weight or gradients.
pub type Floats<'a> = Slice<'a, f32>;
/// Borrowed f32 to write.
pub type FloatsMut<'a> = SliceMut<'a, f32>;

/// Borrowed numbers.
#[derive(Debug, Clone, Copy)]
pub struct Slice<'a, T>(Numbers<'a, T>);

#[derive(Debug, Clone, Copy)]
enum Numbers<'a, T> {
    Host(&'a [T]),
    /// So many, which have no memory.
    Meta(usize),
}

impl<T: Element> Default for Slice<'_, T> {
    /// None, on the CPU.
    fn default() -> Self {
        Self(Numbers::Host(&[]))
    }
}

impl<'a, T: Element> Slice<'a, T> {
    pub(super) const fn of_host(values: &'a [T]) -> Self {
        Self(Numbers::Host(values))
    }

    /// So many numbers on the meta device.
    pub const fn meta(len: usize) -> Self {
        Self(Numbers::Meta(len))
    }

    /// How many numbers there are.
    pub const fn len(self) -> usize {
        match self.0 {
            Numbers::Host(values) => values.len(),
            Numbers::Meta(len) => len,
        }
    }

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// A part of them.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        match self.0 {
            Numbers::Host(values) => Self(Numbers::Host(&values[range])),
            Numbers::Meta(len) => {
                check(&range, len);
                Self::meta(range.len())
            }
        }
    }

    /// The numbers on the host: borrowed from the CPU, a copy from elsewhere, zeros from the meta device.
    pub fn to_host(self) -> Cow<'a, [T]> {
        match self.0 {
            Numbers::Host(values) => Cow::Borrowed(values),
            Numbers::Meta(len) => Cow::Owned(vec![T::default(); len]),
        }
    }

    /// Copies them to the host; zeros from the meta device.
    pub fn read(self) -> Vec<T> {
        self.to_host().into_owned()
    }

    /// Copies them to `host`, one to each; zeros from the meta device.
    ///
    /// # Panics
    /// If there are fewer or more than `host` has.
    pub fn read_into(self, host: &mut [T]) {
        match self.0 {
            Numbers::Host(values) => host.copy_from_slice(values),
            Numbers::Meta(len) => {
                assert_eq!(host.len(), len, "a place for each number");
                host.fill(T::default());
            }
        }
    }

    /// Whether they are exactly these. Never on the meta device.
    pub fn equal(self, host: &[T]) -> bool {
        matches!(self.0, Numbers::Host(values) if values == host)
    }

    /// The numbers on the CPU.
    ///
    /// # Panics
    /// If they are not there: an op on a device takes operands of that device.
    pub const fn cpu_slice(self) -> &'a [T] {
        match self.0 {
            Numbers::Host(values) => values,
            Numbers::Meta(_) => panic!("numbers of the CPU"),
        }
    }

    /// Where they are.
    pub const fn device(self) -> Device {
        match self.0 {
            Numbers::Host(_) => Device::Cpu,
            Numbers::Meta(_) => Device::Meta,
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

/// Numbers borrowed for writing.
#[derive(Debug)]
pub struct SliceMut<'a, T>(NumbersMut<'a, T>);

#[derive(Debug)]
enum NumbersMut<'a, T> {
    Host(&'a mut [T]),
    Meta(usize),
}

impl<T: Element> Default for SliceMut<'_, T> {
    /// None, on the CPU.
    fn default() -> Self {
        Self(NumbersMut::Host(&mut []))
    }
}

impl<'a, T: Element> SliceMut<'a, T> {
    pub(super) const fn of_host(values: &'a mut [T]) -> Self {
        Self(NumbersMut::Host(values))
    }

    /// So many numbers on the meta device.
    pub const fn meta(len: usize) -> Self {
        Self(NumbersMut::Meta(len))
    }

    /// How many numbers there are.
    pub const fn len(&self) -> usize {
        match &self.0 {
            NumbersMut::Host(values) => values.len(),
            NumbersMut::Meta(len) => *len,
        }
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where they are.
    pub const fn device(&self) -> Device {
        self.view().device()
    }

    /// The numbers, to read.
    pub const fn view(&self) -> Slice<'_, T> {
        match &self.0 {
            NumbersMut::Host(values) => Slice(Numbers::Host(values)),
            NumbersMut::Meta(len) => Slice::meta(*len),
        }
    }

    /// A part of them.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        match self.0 {
            NumbersMut::Host(values) => Self(NumbersMut::Host(&mut values[range])),
            NumbersMut::Meta(len) => {
                check(&range, len);
                Self::meta(range.len())
            }
        }
    }

    /// Those before `at`, and those from there on.
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
            NumbersMut::Meta(len) => {
                check(&(0..at), len);
                (Self::meta(at), Self::meta(len - at))
            }
        }
    }

    /// Borrows them once more.
    pub const fn reborrow(&mut self) -> SliceMut<'_, T> {
        match &mut self.0 {
            NumbersMut::Host(values) => SliceMut(NumbersMut::Host(values)),
            NumbersMut::Meta(len) => SliceMut::meta(*len),
        }
    }

    /// Sets them to numbers of any device, one to each.
    ///
    /// # Panics
    /// If there are fewer or more.
    pub fn copy_from(self, from: Slice<'_, T>) {
        assert_eq!(self.len(), from.len(), "a number for each place");
        if let NumbersMut::Host(values) = self.0 {
            from.read_into(values);
        }
    }

    /// Sets them to numbers of the host, one to each.
    ///
    /// # Panics
    /// If there are fewer or more.
    pub fn write(self, host: &[T]) {
        self.copy_from(host.into());
    }

    /// Sets them to zero.
    pub fn zero(self) {
        if let NumbersMut::Host(values) = self.0 {
            values.fill(T::default());
        }
    }

    /// Exchanges them with numbers of the same device, one with each.
    ///
    /// # Panics
    /// If there are fewer or more, or they are on another device.
    pub fn swap(self, other: SliceMut<'_, T>) {
        match (self.0, other.0) {
            (NumbersMut::Host(one), NumbersMut::Host(other)) => one.swap_with_slice(other),
            (NumbersMut::Meta(one), NumbersMut::Meta(other)) => assert_eq!(one, other, "one with each"),
            (NumbersMut::Host(_), NumbersMut::Meta(_)) | (NumbersMut::Meta(_), NumbersMut::Host(_)) => {
                panic!("numbers of one device")
            }
        }
    }

    /// The numbers on the host, to change: those of the CPU themselves. The meta device gives zeros and keeps nothing.
    pub fn on_host(self) -> HostMut<'a, T> {
        HostMut(match self.0 {
            NumbersMut::Host(values) => Changed::Borrowed(values),
            NumbersMut::Meta(len) => Changed::Dropped(vec![T::default(); len]),
        })
    }

    /// The numbers on the CPU.
    ///
    /// # Panics
    /// If they are not there: an op on a device takes operands of that device.
    pub const fn cpu_slice(self) -> &'a mut [T] {
        match self.0 {
            NumbersMut::Host(values) => values,
            NumbersMut::Meta(_) => panic!("numbers of the CPU"),
        }
    }
}

impl FloatsMut<'_> {
    /// Adds numbers of the host, one to each.
    pub fn add(self, host: &[f32]) {
        assert_eq!(self.len(), host.len(), "a summand for each number");
        if let NumbersMut::Host(values) = self.0 {
            values.iter_mut().zip(host).for_each(|(sum, value)| *sum += value);
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

/// Numbers of a device on the host, to change ([`SliceMut::on_host`]).
#[derive(Debug)]
pub struct HostMut<'a, T>(Changed<'a, T>);

#[derive(Debug)]
enum Changed<'a, T> {
    Borrowed(&'a mut [T]),
    /// Of the meta device.
    Dropped(Vec<T>),
}

impl<T> Deref for HostMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Changed::Borrowed(values) => values,
            Changed::Dropped(values) => values,
        }
    }
}

impl<T> DerefMut for HostMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.0 {
            Changed::Borrowed(values) => values,
            Changed::Dropped(values) => values,
        }
    }
}

fn check(range: &Range<usize>, len: usize) {
    assert!(range.start <= range.end && range.end <= len, "a part of {len} numbers");
}
