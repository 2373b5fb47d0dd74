//! Borrowed f32 in a device's memory: weights, gains, trained values, gradients, optimizer state.
//!
//! [`Floats::cpu_slice`] and [`FloatsMut::cpu_slice`] give the slice on the CPU to what runs there: the ops' CPU kernels and the
//! collectives. Everything else reads and writes copies ([`Floats::to_host`], [`FloatsMut::on_host`]), which cost nothing on
//! the CPU.
use super::Device;
use std::borrow::Cow;
use std::ops::{Deref, DerefMut, Range};

/// Borrowed numbers.
#[derive(Debug, Clone, Copy)]
pub struct Floats<'a>(Numbers<'a>);

#[derive(Debug, Clone, Copy)]
enum Numbers<'a> {
    Host(&'a [f32]),
    /// So many, which have no memory.
    Meta(usize),
}

impl Default for Floats<'_> {
    /// None, on the CPU.
    fn default() -> Self {
        Self(Numbers::Host(&[]))
    }
}

impl<'a> Floats<'a> {
    pub(super) const fn of_host(values: &'a [f32]) -> Self {
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
    pub fn to_host(self) -> Cow<'a, [f32]> {
        match self.0 {
            Numbers::Host(values) => Cow::Borrowed(values),
            Numbers::Meta(len) => Cow::Owned(vec![0.0; len]),
        }
    }

    /// Copies them to the host; zeros from the meta device.
    pub fn read(self) -> Vec<f32> {
        self.to_host().into_owned()
    }

    /// Copies them to `host`, one to each; zeros from the meta device.
    ///
    /// # Panics
    /// If there are fewer or more than `host` has.
    pub fn read_into(self, host: &mut [f32]) {
        match self.0 {
            Numbers::Host(values) => host.copy_from_slice(values),
            Numbers::Meta(len) => {
                assert_eq!(host.len(), len, "a place for each number");
                host.fill(0.0);
            }
        }
    }

    /// Whether they are exactly these. Never on the meta device.
    pub fn equal(self, host: &[f32]) -> bool {
        matches!(self.0, Numbers::Host(values) if values == host)
    }

    /// The numbers on the CPU.
    ///
    /// # Panics
    /// If they are not there: an op on a device takes operands of that device.
    pub const fn cpu_slice(self) -> &'a [f32] {
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

impl<'a> From<&'a [f32]> for Floats<'a> {
    fn from(values: &'a [f32]) -> Self {
        Self(Numbers::Host(values))
    }
}

impl<'a> From<&'a Vec<f32>> for Floats<'a> {
    fn from(values: &'a Vec<f32>) -> Self {
        Self(Numbers::Host(values))
    }
}

/// Numbers borrowed for writing.
#[derive(Debug)]
pub struct FloatsMut<'a>(NumbersMut<'a>);

#[derive(Debug)]
enum NumbersMut<'a> {
    Host(&'a mut [f32]),
    Meta(usize),
}

impl Default for FloatsMut<'_> {
    /// None, on the CPU.
    fn default() -> Self {
        Self(NumbersMut::Host(&mut []))
    }
}

impl<'a> FloatsMut<'a> {
    pub(super) const fn of_host(values: &'a mut [f32]) -> Self {
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
    pub const fn view(&self) -> Floats<'_> {
        match &self.0 {
            NumbersMut::Host(values) => Floats(Numbers::Host(values)),
            NumbersMut::Meta(len) => Floats::meta(*len),
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
    pub const fn reborrow(&mut self) -> FloatsMut<'_> {
        match &mut self.0 {
            NumbersMut::Host(values) => FloatsMut(NumbersMut::Host(values)),
            NumbersMut::Meta(len) => FloatsMut::meta(*len),
        }
    }

    /// Sets them to numbers of any device, one to each.
    ///
    /// # Panics
    /// If there are fewer or more.
    pub fn copy_from(self, from: Floats<'_>) {
        assert_eq!(self.len(), from.len(), "a number for each place");
        if let NumbersMut::Host(values) = self.0 {
            from.read_into(values);
        }
    }

    /// Sets them to numbers of the host, one to each.
    ///
    /// # Panics
    /// If there are fewer or more.
    pub fn write(self, host: &[f32]) {
        self.copy_from(host.into());
    }

    /// Sets them to zero.
    pub fn zero(self) {
        if let NumbersMut::Host(values) = self.0 {
            values.fill(0.0);
        }
    }

    /// Exchanges them with numbers of the same device, one with each.
    ///
    /// # Panics
    /// If there are fewer or more, or they are on another device.
    pub fn swap(self, other: FloatsMut<'_>) {
        match (self.0, other.0) {
            (NumbersMut::Host(one), NumbersMut::Host(other)) => one.swap_with_slice(other),
            (NumbersMut::Meta(one), NumbersMut::Meta(other)) => assert_eq!(one, other, "one with each"),
            (NumbersMut::Host(_), NumbersMut::Meta(_)) | (NumbersMut::Meta(_), NumbersMut::Host(_)) => {
                panic!("numbers of one device")
            }
        }
    }

    /// Adds numbers of the host, one to each.
    pub fn add(self, host: &[f32]) {
        assert_eq!(self.len(), host.len(), "a summand for each number");
        if let NumbersMut::Host(values) = self.0 {
            values.iter_mut().zip(host).for_each(|(sum, value)| *sum += value);
        }
    }

    /// The numbers on the host, to change: those of the CPU themselves. The meta device gives zeros and keeps nothing.
    pub fn on_host(self) -> HostMut<'a> {
        HostMut(match self.0 {
            NumbersMut::Host(values) => Changed::Borrowed(values),
            NumbersMut::Meta(len) => Changed::Dropped(vec![0.0; len]),
        })
    }

    /// The numbers on the CPU.
    ///
    /// # Panics
    /// If they are not there: an op on a device takes operands of that device.
    pub const fn cpu_slice(self) -> &'a mut [f32] {
        match self.0 {
            NumbersMut::Host(values) => values,
            NumbersMut::Meta(_) => panic!("numbers of the CPU"),
        }
    }
}

impl<'a> From<&'a mut [f32]> for FloatsMut<'a> {
    fn from(values: &'a mut [f32]) -> Self {
        Self(NumbersMut::Host(values))
    }
}

impl<'a> From<&'a mut Vec<f32>> for FloatsMut<'a> {
    fn from(values: &'a mut Vec<f32>) -> Self {
        Self(NumbersMut::Host(values))
    }
}

/// Numbers of a device on the host, to change ([`FloatsMut::on_host`]).
#[derive(Debug)]
pub struct HostMut<'a>(Changed<'a>);

#[derive(Debug)]
enum Changed<'a> {
    Borrowed(&'a mut [f32]),
    /// Of the meta device.
    Dropped(Vec<f32>),
}

impl Deref for HostMut<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &self.0 {
            Changed::Borrowed(values) => values,
            Changed::Dropped(values) => values,
        }
    }
}

impl DerefMut for HostMut<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        match &mut self.0 {
            Changed::Borrowed(values) => values,
            Changed::Dropped(values) => values,
        }
    }
}

fn check(range: &Range<usize>, len: usize) {
    assert!(range.start <= range.end && range.end <= len, "a part of {len} numbers");
}
