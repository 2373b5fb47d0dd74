//! Owned f32 in a device's memory.
use super::Device;
use super::floats::{Floats, FloatsMut};
use std::borrow::Cow;
use std::ops::Range;

/// Owned numbers in a device's memory: trained values, their gradients, the optimizer's state, moving averages.
/// [`Floats`] and [`FloatsMut`] borrow them.
#[derive(Debug, Clone, PartialEq)]
pub struct FloatBuffer(Memory);

#[derive(Debug, Clone, PartialEq)]
enum Memory {
    Host(Vec<f32>),
    /// So many, which have no memory.
    Meta(usize),
}

impl Default for FloatBuffer {
    /// Empty, on the CPU.
    fn default() -> Self {
        Self(Memory::Host(Vec::new()))
    }
}

impl FloatBuffer {
    /// `len` zeros.
    pub fn zeros(device: Device, len: usize) -> Self {
        Self(match device {
            Device::Cpu => Memory::Host(vec![0.0; len]),
            Device::Meta => Memory::Meta(len),
        })
    }

    /// Makes it `len` zeros of that device. It keeps its memory if it has this length already; else that is freed before
    /// the new one is taken.
    pub fn reset(&mut self, device: Device, len: usize) {
        if self.device() == device && self.len() == len {
            self.view_mut().zero();
        } else {
            *self = Self::default();
            *self = Self::zeros(device, len);
        }
    }

    /// How many numbers it has.
    pub const fn len(&self) -> usize {
        self.view().len()
    }

    /// Whether it has none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it is.
    pub const fn device(&self) -> Device {
        self.view().device()
    }

    /// All numbers, to read.
    pub const fn view(&self) -> Floats<'_> {
        match &self.0 {
            Memory::Host(values) => Floats::of_host(values.as_slice()),
            Memory::Meta(len) => Floats::meta(*len),
        }
    }

    /// All numbers, to read and write.
    pub const fn view_mut(&mut self) -> FloatsMut<'_> {
        match &mut self.0 {
            Memory::Host(values) => FloatsMut::of_host(values.as_mut_slice()),
            Memory::Meta(len) => FloatsMut::meta(*len),
        }
    }

    /// A part of the numbers, to read.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    pub fn slice(&self, range: Range<usize>) -> Floats<'_> {
        self.view().slice(range)
    }

    /// A part of the numbers, to read and write.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    pub fn slice_mut(&mut self, range: Range<usize>) -> FloatsMut<'_> {
        self.view_mut().slice(range)
    }

    /// As [`Floats::to_host`].
    pub fn to_host(&self) -> Cow<'_, [f32]> {
        self.view().to_host()
    }

    /// As [`Floats::read`].
    pub fn read(&self) -> Vec<f32> {
        self.view().read()
    }

    /// Makes room for exactly `more` numbers, so that appending them copies nothing.
    pub fn reserve(&mut self, more: usize) {
        match &mut self.0 {
            Memory::Host(values) => values.reserve_exact(more),
            Memory::Meta(_) => {}
        }
    }

    /// Appends numbers of any device.
    pub fn append(&mut self, more: Floats<'_>) {
        match &mut self.0 {
            Memory::Host(values) => values.extend_from_slice(&more.to_host()),
            Memory::Meta(len) => *len += more.len(),
        }
    }

    /// Of the numbers from `start` on, keeps those at `kept`, counted from there.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    pub fn keep(&mut self, start: usize, kept: &Range<usize>) {
        match &mut self.0 {
            Memory::Host(values) => {
                values.truncate(start + kept.end);
                values.drain(start..start + kept.start);
            }
            Memory::Meta(len) => *len = start + kept.len(),
        }
    }

    /// Gives back room that was reserved and is not used.
    pub fn shrink_to_fit(&mut self) {
        match &mut self.0 {
            Memory::Host(values) => values.shrink_to_fit(),
            Memory::Meta(_) => {}
        }
    }
}

impl From<Vec<f32>> for FloatBuffer {
    /// The same memory, on the CPU.
    fn from(values: Vec<f32>) -> Self {
        Self(Memory::Host(values))
    }
}

impl From<Floats<'_>> for FloatBuffer {
    /// A copy, where the numbers are.
    fn from(values: Floats<'_>) -> Self {
        let mut copy = Self::zeros(values.device(), 0);
        copy.append(values);
        copy
    }
}

impl<'a> From<&'a FloatBuffer> for Floats<'a> {
    fn from(buffer: &'a FloatBuffer) -> Self {
        buffer.view()
    }
}

impl<'a> From<&'a mut FloatBuffer> for FloatsMut<'a> {
    fn from(buffer: &'a mut FloatBuffer) -> Self {
        buffer.view_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_grows_without_a_copy_and_keeps_a_part() {
        let mut buffer = FloatBuffer::default();
        buffer.reserve(6);
        let place = buffer.view().cpu_slice().as_ptr();
        buffer.append([1.0, 2.0][..].into());
        buffer.append([3.0, 4.0, 5.0, 6.0][..].into());
        assert_eq!(buffer.view().cpu_slice().as_ptr(), place);
        buffer.keep(2, &(1..3));
        assert_eq!(buffer.read(), [1.0, 2.0, 4.0, 5.0]);
        buffer.reset(Device::Cpu, 4);
        assert_eq!((buffer.read(), buffer.view().cpu_slice().as_ptr()), (vec![0.0; 4], place));
    }

    #[test]
    fn parts_are_written_swapped_and_changed_on_the_host() {
        let (mut one, mut other) = (FloatBuffer::from(vec![1.0, 2.0, 3.0]), FloatBuffer::from(vec![7.0, 8.0]));
        one.slice_mut(1..3).swap(other.view_mut());
        assert_eq!((one.read(), other.read()), (vec![1.0, 7.0, 8.0], vec![2.0, 3.0]));
        one.slice_mut(0..2).copy_from(other.view());
        one.slice_mut(2..3).write(&[9.0]);
        one.view_mut().on_host()[0] += 3.0;
        let (low, high) = one.view_mut().split_at(1);
        assert_eq!((low.view().read(), high.view().read()), (vec![5.0], vec![3.0, 9.0]));
    }

    #[test]
    fn on_the_meta_device_it_has_a_length_and_no_memory() {
        let mut buffer = FloatBuffer::zeros(Device::Meta, 1 << 40);
        buffer.reserve(1 << 50);
        buffer.append(Floats::meta(1 << 41));
        buffer.view_mut().zero();
        assert_eq!((buffer.len(), buffer.device()), (3 << 40, Device::Meta));
        assert_eq!(buffer.slice(5..8).read(), [0.0; 3]);
        buffer.slice_mut(0..2).write(&[1.0, 2.0]);
        assert_eq!(*buffer.slice(0..2).to_host(), [0.0; 2]);
        buffer.keep(8, &(3..5));
        assert_eq!(buffer.len(), 10);
    }
}
