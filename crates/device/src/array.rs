//! [`Array`]: owned numbers in a device's memory.
use super::pinned::{Arrival, Fetching, Pinned, Storing};
use super::slice::{Element, Slice, SliceMut};
use super::{Device, gpu};
use std::borrow::Cow;
use std::ops::Range;

/// Owned f32: trained values, their gradients, moments, moving averages.
pub type FloatBuffer = Array<f32>;

/// Owned numbers in a device's memory, one dimension. [`Slice`] and [`SliceMut`] borrow them.
#[derive(Debug)]
pub struct Array<T>(Memory<T>);

#[derive(Debug)]
enum Memory<T> {
    Host(Vec<T>),
    /// In pinned memory of the host, which a GPU can copy from and to by itself.
    Pinned(Pinned<T>),
    /// On a GPU; its memory may have room for more.
    Gpu {
        memory: gpu::Memory,
        len: usize,
    },
    /// A number of elements without memory.
    Meta(usize),
}

impl<T: Element> Default for Array<T> {
    /// An empty array on the CPU.
    fn default() -> Self {
        Self(Memory::Host(Vec::new()))
    }
}

impl<T: Element> Clone for Array<T> {
    fn clone(&self) -> Self {
        match &self.0 {
            Memory::Host(values) => Self(Memory::Host(values.clone())),
            Memory::Pinned(_) | Memory::Gpu { .. } | Memory::Meta(_) => self.view().into(),
        }
    }
}

impl<T: Element> PartialEq for Array<T> {
    /// Whether both are on the same device and have the same length and equal numbers.
    fn eq(&self, other: &Self) -> bool {
        let [one, two] = [self, other].map(Array::device);
        one == two && self.len() == other.len() && (one == Device::Meta || self.to_host() == other.to_host())
    }
}

impl<T: Element> Array<T> {
    /// A copy on that device.
    #[must_use]
    pub fn to(&self, device: Device) -> Self {
        let mut copy = Self::uninit(device, self.len());
        copy.view_mut().copy_from(self.view());
        copy
    }

    /// `len` numbers; on a GPU they are undefined until they are written.
    pub(crate) fn uninit(device: Device, len: usize) -> Self {
        match device {
            Device::Cuda(ordinal) => Self(Memory::Gpu { memory: gpu::Memory::new(ordinal, len * size_of::<T>()), len }),
            Device::Cpu | Device::Meta => Self::zeros(device, len),
        }
    }

    /// A copy of the host's numbers on that device.
    pub fn of(device: Device, values: &[T]) -> Self {
        let mut copy = Self::uninit(device, values.len());
        copy.view_mut().write(values);
        copy
    }

    /// `len` zeros in the device's memory.
    pub fn zeros(device: Device, len: usize) -> Self {
        match device {
            Device::Cpu => Self(Memory::Host(vec![T::default(); len])),
            Device::Cuda(_) => {
                let mut zeros = Self::uninit(device, len);
                zeros.view_mut().zero();
                zeros
            }
            Device::Meta => Self(Memory::Meta(len)),
        }
    }

    /// `len` zeros of the CPU in pinned memory, which the GPU `device` copies from and to while it computes.
    pub fn pinned(device: Device, len: usize) -> Self {
        match device {
            Device::Cuda(ordinal) if !device.only_counts() => Self(Memory::Pinned(Pinned::zeros(ordinal, len))),
            Device::Cuda(_) | Device::Meta => Self::zeros(Device::Meta, len),
            Device::Cpu => Self::zeros(device, len),
        }
    }

    /// The GPU that it is pinned for.
    pub const fn pinned_for(&self) -> Option<Device> {
        match &self.0 {
            Memory::Pinned(pinned) => Some(Device::Cuda(pinned.ordinal())),
            Memory::Host(_) | Memory::Gpu { .. } | Memory::Meta(_) => None,
        }
    }

    /// Starts to copy a part of pinned numbers to the GPU.
    ///
    /// # Panics
    /// If they are not pinned, or are fewer.
    pub fn fetch(&self, range: Range<usize>) -> Fetching<T> {
        let Memory::Pinned(pinned) = &self.0 else { panic!("pinned numbers") };
        pinned.fetch(range)
    }

    /// Copies all numbers to `to`. Wait for the returned [`Arrival`] before `to` is used. Pinned numbers are copied
    /// while the GPU computes, other ones at once.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn send(&self, mut to: SliceMut<'_, T>) -> Arrival {
        match &self.0 {
            Memory::Pinned(pinned) if to.device() == Device::Cuda(pinned.ordinal()) => pinned.send(&mut to),
            _ => {
                to.copy_from(self.view());
                Arrival::default()
            }
        }
    }

    /// Starts to copy numbers of the GPU to the pinned ones from `start` on.
    ///
    /// # Panics
    /// As [`Array::fetch`].
    pub fn store(&mut self, start: usize, array: Self) -> Storing<T> {
        let Memory::Pinned(pinned) = &mut self.0 else { panic!("pinned numbers") };
        pinned.store(start, array)
    }

    /// Makes it `len` zeros on that device. Memory of this length is reused; other memory is freed before the new
    /// memory is allocated.
    pub fn reset(&mut self, device: Device, len: usize) {
        if self.device() == device && self.len() == len {
            self.view_mut().zero();
        } else {
            *self = Self::default();
            *self = Self::zeros(device, len);
        }
    }

    /// The number of elements.
    pub const fn len(&self) -> usize {
        match &self.0 {
            Memory::Host(values) => values.len(),
            Memory::Pinned(pinned) => pinned.len(),
            Memory::Gpu { len, .. } | Memory::Meta(len) => *len,
        }
    }

    /// Whether it has no elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The device that holds it.
    pub const fn device(&self) -> Device {
        match &self.0 {
            Memory::Host(_) | Memory::Pinned(_) => Device::Cpu,
            Memory::Gpu { memory, .. } => Device::Cuda(memory.ordinal()),
            Memory::Meta(_) => Device::Meta,
        }
    }

    /// Borrows all numbers, to read.
    pub fn view(&self) -> Slice<'_, T> {
        match &self.0 {
            Memory::Host(values) => Slice::of_host(values.as_slice()),
            Memory::Pinned(pinned) => Slice::of_host(pinned.values()),
            Memory::Gpu { memory, len } => Slice::of_gpu(memory, *len),
            Memory::Meta(len) => Slice::meta(*len),
        }
    }

    /// All numbers, to read and write.
    pub fn view_mut(&mut self) -> SliceMut<'_, T> {
        match &mut self.0 {
            Memory::Host(values) => SliceMut::of_host(values.as_mut_slice()),
            Memory::Pinned(pinned) => SliceMut::of_host(pinned.values_mut()),
            Memory::Gpu { memory, len } => SliceMut::of_gpu(memory, *len),
            Memory::Meta(len) => SliceMut::meta(*len),
        }
    }

    /// A part of the numbers, to read.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    pub fn slice(&self, range: Range<usize>) -> Slice<'_, T> {
        self.view().slice(range)
    }

    /// A part of the numbers, to read and write.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    pub fn slice_mut(&mut self, range: Range<usize>) -> SliceMut<'_, T> {
        self.view_mut().slice(range)
    }

    /// All numbers on the host: borrowed on the CPU, copied from a GPU, zeros from the meta device.
    pub fn to_host(&self) -> Cow<'_, [T]> {
        self.view().to_host()
    }

    /// Copies all numbers to the host; zeros from the meta device.
    pub fn read(&self) -> Vec<T> {
        self.view().read()
    }

    /// The memory, for changes of its length. Pinned numbers first move to ordinary memory of the host.
    fn changed(&mut self) -> &mut Memory<T> {
        if let Memory::Pinned(pinned) = &self.0 {
            self.0 = Memory::Host(pinned.values().to_vec());
        }
        &mut self.0
    }

    /// Makes room for exactly `more` numbers, so that appending them copies nothing.
    pub fn reserve(&mut self, more: usize) {
        match self.changed() {
            Memory::Host(values) => values.reserve_exact(more),
            Memory::Gpu { memory, len } => grow::<T>(memory, *len, *len + more),
            Memory::Pinned(_) | Memory::Meta(_) => {}
        }
    }

    /// Appends numbers of any device; zeros for those of the meta device.
    pub fn append(&mut self, more: Slice<'_, T>) {
        match self.changed() {
            Memory::Host(values) if more.device() == Device::Meta => {
                values.resize(values.len() + more.len(), T::default());
            }
            Memory::Host(values) => values.extend_from_slice(&more.to_host()),
            Memory::Gpu { memory, len } => {
                grow::<T>(memory, *len, *len + more.len());
                let before = std::mem::replace(len, *len + more.len());
                SliceMut::of_gpu(memory, *len).slice(before..*len).copy_from(more);
            }
            Memory::Pinned(_) => {}
            Memory::Meta(len) => *len += more.len(),
        }
    }

    /// Removes the numbers from `start` on, except for those at `kept`, which is counted from `start`.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    pub fn keep(&mut self, start: usize, kept: &Range<usize>) {
        match self.changed() {
            Memory::Host(values) => {
                values.truncate(start + kept.end);
                values.drain(start..start + kept.start);
            }
            Memory::Gpu { memory, len } => {
                assert!(kept.start <= kept.end && start + kept.end <= *len, "a part of {len} numbers");
                let all: Slice<'_, T> = Slice::of_gpu(memory, *len);
                let mut left = Self::uninit(Device::Cuda(memory.ordinal()), start);
                left.view_mut().copy_from(all.slice(0..start));
                left.append(all.slice(start + kept.start..start + kept.end));
                *self = left;
            }
            Memory::Pinned(_) => {}
            Memory::Meta(len) => *len = start + kept.len(),
        }
    }

    /// Frees capacity that was reserved and is not used.
    pub fn shrink_to_fit(&mut self) {
        match &mut self.0 {
            Memory::Host(values) => values.shrink_to_fit(),
            Memory::Pinned(_) | Memory::Gpu { .. } | Memory::Meta(_) => {}
        }
    }
}

/// Makes room for `wanted` numbers in memory that holds `len` numbers, which are kept.
fn grow<T: Element>(memory: &mut gpu::Memory, len: usize, wanted: usize) {
    if wanted * size_of::<T>() > memory.bytes() {
        let larger = gpu::Memory::new(memory.ordinal(), wanted * size_of::<T>());
        SliceMut::<T>::of_gpu(&larger, len).copy_from(Slice::of_gpu(memory, len));
        *memory = larger;
    }
}

impl<T: Element> From<Vec<T>> for Array<T> {
    /// An array on the CPU, in the same memory.
    fn from(values: Vec<T>) -> Self {
        Self(Memory::Host(values))
    }
}

impl<T: Element> From<Slice<'_, T>> for Array<T> {
    /// A copy, where the numbers are.
    fn from(values: Slice<'_, T>) -> Self {
        match values.device() {
            Device::Cpu => Self(Memory::Host(values.read())),
            device @ (Device::Cuda(_) | Device::Meta) => {
                let mut copy = Self::uninit(device, values.len());
                copy.view_mut().copy_from(values);
                copy
            }
        }
    }
}

impl<'a, T: Element> From<&'a Array<T>> for Slice<'a, T> {
    fn from(buffer: &'a Array<T>) -> Self {
        buffer.view()
    }
}

impl<'a, T: Element> From<&'a mut Array<T>> for SliceMut<'a, T> {
    fn from(buffer: &'a mut Array<T>) -> Self {
        buffer.view_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Floats;
    use tunesmith_cpu_slice::CpuSlice as _;

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
