//! Stretches of f32 in a device's memory: weights, gains, trained values, their gradients. Above this crate their numbers
//! are not seen; [`Floats::read`] copies them to the host.
use std::ops::Range;
use tunesmith_device::Device;

/// Borrowed numbers.
#[derive(Debug, Clone, Copy)]
pub struct Floats<'a>(Numbers<'a>);

#[derive(Debug, Clone, Copy)]
enum Numbers<'a> {
    Host(&'a [f32]),
    /// So many, which have no memory.
    Meta(usize),
}

impl<'a> Floats<'a> {
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
                assert!(range.start <= range.end && range.end <= len, "a part of {len} numbers");
                Self::meta(range.len())
            }
        }
    }

    /// Copies them to the host; zeros from the meta device.
    pub fn read(self) -> Vec<f32> {
        match self.0 {
            Numbers::Host(values) => values.to_vec(),
            Numbers::Meta(len) => vec![0.0; len],
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
    pub(crate) const fn host(self) -> &'a [f32] {
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

impl<'a> FloatsMut<'a> {
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

    /// A part of them.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        match self.0 {
            NumbersMut::Host(values) => Self(NumbersMut::Host(&mut values[range])),
            NumbersMut::Meta(len) => {
                assert!(range.start <= range.end && range.end <= len, "a part of {len} numbers");
                Self::meta(range.len())
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

    /// Adds numbers of the host, one to each.
    pub fn add(self, host: &[f32]) {
        assert_eq!(self.len(), host.len(), "a summand for each number");
        if let NumbersMut::Host(values) = self.0 {
            values.iter_mut().zip(host).for_each(|(sum, value)| *sum += value);
        }
    }

    /// The numbers on the CPU.
    ///
    /// # Panics
    /// If they are not there: an op on a device takes operands of that device.
    pub(crate) const fn host(self) -> &'a mut [f32] {
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
