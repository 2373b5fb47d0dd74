//! Pinned numbers in the host's memory, which a GPU copies from and to while it computes. The host reads and writes
//! them like other numbers of the CPU, after waiting for a copy in progress.
use crate::cuda::{Event, PinnedMemory};
use crate::gpu::PinnedFor;
use crate::slice::{Element, SliceMut};
use crate::{Array, Device, gpu};
use std::marker::PhantomData;
use std::ops::Range;
use std::slice::{from_raw_parts, from_raw_parts_mut};
use std::sync::{Arc, Mutex, PoisonError};

/// Pinned numbers, which an [`Array`] may own.
#[derive(Debug)]
pub(crate) struct Pinned<T> {
    ordinal: u8,
    len: usize,
    /// The memory, until this is dropped.
    place: Option<PinnedMemory>,
    /// The end of the last copy from or to it.
    copied: Mutex<Option<Arc<Event>>>,
    of: PhantomData<T>,
}

/// Numbers on a GPU that are being copied there from the host.
#[derive(Debug)]
pub struct Fetching<T: Element> {
    array: Array<T>,
    copied: Option<Arc<Event>>,
    ordinal: u8,
}

/// Numbers of a GPU that are being copied to the host. Once it is dropped, what the GPU does next waits for the copy.
#[derive(Debug)]
pub struct Storing<T: Element> {
    /// Released after the copy.
    _array: Array<T>,
    copied: Option<Arc<Event>>,
    ordinal: u8,
}

/// The end of copies from the host to a GPU. Once this is dropped, whatever the GPU does next waits for the copies.
#[derive(Debug, Default)]
pub struct Arrival(Option<(u8, Arc<Event>)>);

impl Arrival {
    /// The later one of two arrivals; copies are made in order, so it covers both.
    #[must_use]
    pub fn then(mut self, mut later: Self) -> Self {
        Self(later.0.take().or_else(|| self.0.take()))
    }

    /// Makes later work of this thread's queue wait for the copies.
    pub fn wait(mut self) {
        gpu::checked(self.0.take().map_or(Ok(()), |(ordinal, copied)| gpu::wait(ordinal, &copied)));
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        // If this fails, the GPU is lost, and nobody uses the numbers any more.
        let _ = self.0.take().map(|(ordinal, copied)| gpu::wait(ordinal, &copied));
    }
}

impl<T: Element> Pinned<T> {
    pub(crate) fn zeros(ordinal: u8, len: usize) -> Self {
        let place = gpu::pinned(ordinal, len * size_of::<T>(), PinnedFor::Host);
        Self { ordinal, len, place, copied: Mutex::default(), of: PhantomData }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) const fn ordinal(&self) -> u8 {
        self.ordinal
    }

    /// Waits until the last copy from or to it has ended.
    fn settle(&self) {
        let copied = self.copied.lock().unwrap_or_else(PoisonError::into_inner).take();
        gpu::checked(copied.map_or(Ok(()), |copied| copied.synchronize()));
    }

    /// Records the end of a copy, and so of the earlier ones, because copies run in order.
    fn busy(&self, copied: Event) -> Arc<Event> {
        let copied = Arc::new(copied);
        *self.copied.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&copied));
        copied
    }

    pub(crate) fn values(&self) -> &[T] {
        self.settle();
        // SAFETY: whole pages hold `len` numbers of a type that any bytes are a value of; nobody writes to them.
        self.place.as_ref().map_or(&[], |place| unsafe { from_raw_parts(place.as_slice().as_ptr().cast(), self.len) })
    }

    pub(crate) fn values_mut(&mut self) -> &mut [T] {
        self.settle();
        let len = self.len;
        // SAFETY: as in `values`; the borrow for writing makes this the only way to them.
        let all =
            |place: &mut PinnedMemory| unsafe { from_raw_parts_mut(place.as_mut_slice().as_mut_ptr().cast(), len) };
        self.place.as_mut().map_or(&mut [], all)
    }

    fn bytes(&self, range: &Range<usize>) -> Range<usize> {
        assert!(range.start <= range.end && range.end <= self.len, "a part of {} numbers", self.len);
        range.start * size_of::<T>()..range.end * size_of::<T>()
    }

    pub(crate) fn fetch(&self, range: Range<usize>) -> Fetching<T> {
        let (bytes, ordinal) = (self.bytes(&range), self.ordinal);
        let array = Array::uninit(Device::Cuda(ordinal), range.len());
        let to = array.view().address();
        // SAFETY: the array has room for them, and is not used before the event, for which `Fetching` makes its user wait; the
        // host changes nothing here before it.
        let copy = |place: &PinnedMemory| unsafe { gpu::copy_in(ordinal, to, &place.as_slice()[bytes]) };
        let copied = self.place.as_ref().filter(|_| !range.is_empty()).map(copy).map(|copied| self.busy(copied));
        Fetching { array, copied, ordinal }
    }

    pub(crate) fn send(&self, to: &mut SliceMut<'_, T>) -> Arrival {
        assert_eq!((to.device(), to.len()), (Device::Cuda(self.ordinal), self.len), "a place for each number");
        let (ordinal, address, bytes) = (self.ordinal, to.address(), self.bytes(&(0..self.len)));
        // SAFETY: the place has room for them; the caller keeps it unused until the event, for which `Arrival` makes its user and
        // the memory's next owner wait; the host changes nothing here before it.
        let copy = |place: &PinnedMemory| unsafe { gpu::copy_in(ordinal, address, &place.as_slice()[bytes]) };
        let copied = self.place.as_ref().filter(|_| self.len > 0).map(copy).map(|copied| self.busy(copied));
        Arrival(copied.map(|copied| (ordinal, copied)))
    }

    pub(crate) fn store(&mut self, start: usize, array: Array<T>) -> Storing<T> {
        let (bytes, ordinal) = (self.bytes(&(start..start + array.len())), self.ordinal);
        assert_eq!(array.device(), Device::Cuda(ordinal), "numbers of the same GPU");
        let from = array.view().address();
        // SAFETY: the array has so many bytes, and lives until the event has been waited for; the host reads nothing here before
        // it.
        let copy = |place: &mut PinnedMemory| unsafe {
            gpu::copy_out(ordinal, &mut place.as_mut_slice()[bytes.clone()], from)
        };
        let copied = self.place.as_mut().filter(|_| !bytes.is_empty()).map(copy).map(|copied| self.busy(copied));
        Storing { _array: array, copied, ordinal }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // Whoever gets the place next may write to it at once.
        let copied = self.copied.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let _ = copied.map(|copied| copied.synchronize());
        gpu::unpin(self.ordinal, self.place.take(), self.len * size_of::<T>(), PinnedFor::Host);
    }
}

impl<T: Element> Fetching<T> {
    /// The numbers, for computations from here on.
    pub fn array(mut self) -> Array<T> {
        let copied = self.copied.take();
        gpu::checked(copied.map_or(Ok(()), |copied| gpu::wait(self.ordinal, &copied)));
        std::mem::take(&mut self.array)
    }
}

impl<T: Element> Drop for Fetching<T> {
    fn drop(&mut self) {
        // Where that fails the GPU is lost, and nobody writes to the memory any more.
        let _ = self.copied.take().map(|copied| gpu::wait(self.ordinal, &copied));
    }
}

impl<T: Element> Drop for Storing<T> {
    fn drop(&mut self) {
        // If this fails, the GPU is lost, and nobody writes to the memory any more.
        let _ = self.copied.take().map(|copied| gpu::wait(self.ordinal, &copied));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::memory;

    /// Held by tests that pin memory for the same GPU, whose bytes are counted together.
    pub(crate) static PINS: Mutex<()> = Mutex::new(());

    #[test]
    fn numbers_on_the_host_are_changed_by_a_gpu_part_by_part() {
        crate::cuda::testing::use_stand_in();
        let _alone = PINS.lock().unwrap_or_else(PoisonError::into_inner);
        let device = Device::Cuda(0);
        let before = memory::on_host(device);
        let mut pinned = Array::<f32>::pinned(device, 1000);
        assert_eq!((pinned.device(), pinned.len(), pinned.read()), (Device::Cpu, 1000, vec![0.0; 1000]));
        assert_eq!(memory::on_host(device) - before, 4000);
        pinned.view_mut().write(&(0..1000).map(|it| it as f32).collect::<Vec<_>>());
        let mut storing = None;
        let mut next = Some(pinned.fetch(0..100));
        for start in (0..1000).step_by(100) {
            let mut part = next.take().unwrap().array();
            next = (start + 100 < 1000).then(|| pinned.fetch(start + 100..start + 200));
            part.view_mut().on_host().iter_mut().for_each(|value| *value += 0.5);
            storing = Some(pinned.store(start, part));
        }
        drop(storing);
        assert_eq!(pinned.read(), (0..1000).map(|it| it as f32 + 0.5).collect::<Vec<_>>());
        // All of them, as often as wanted, into places that exist.
        for _ in 0..2 {
            let mut there = Array::<f32>::zeros(device, 1002);
            let arrival = pinned.send(there.slice_mut(1..1001));
            arrival.wait();
            assert_eq!((there.read()[0], there.read()[1], there.read()[1000]), (0.0, 0.5, 999.5));
            drop(pinned.send(there.slice_mut(2..1002)));
        }
        // A place that is used again begins with zeros.
        drop(pinned);
        assert_eq!(Array::<f32>::pinned(device, 1000).read(), [0.0; 1000]);
        assert_eq!(Array::<u8>::pinned(device, 0).fetch(0..0).array().len(), 0);
        // On the CPU there is nothing to pin.
        assert_eq!(Array::<f32>::pinned(Device::Cpu, 3), Array::from(vec![0.0; 3]));
    }
}
