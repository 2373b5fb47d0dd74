//! GPU memory offloaded to the host: copied out and back while the GPU computes.
//!
//! A separate stream makes the copies. It starts a copy when the work requested before has finished. Work after a
//! [`Leaving::buffer`] or [`Coming::buffer`] waits for the copy; the host never waits.
use crate::cuda::{Event, PinnedMemory};
use crate::gpu::PinnedFor;
use crate::{Buffer, Device, gpu};

/// Numbers of a GPU that are on the host.
#[derive(Debug)]
pub struct Away {
    ordinal: u8,
    bytes: usize,
    /// None if they are only counted.
    place: Option<PinnedMemory>,
}

/// A buffer whose numbers are being copied to the host.
#[derive(Debug)]
pub struct Leaving {
    ordinal: u8,
    buffer: Option<Buffer>,
    copied: Option<Event>,
}

/// A buffer whose numbers are being copied back.
#[derive(Debug)]
pub struct Coming {
    buffer: Option<Buffer>,
    copied: Option<Event>,
    /// Releases its place on the host after the copy has been waited for.
    from: Away,
}

/// Starts to copy the first `bytes` of a GPU's buffer to the host.
///
/// # Panics
/// If the buffer has fewer, or is not on a GPU.
pub fn leave(buffer: Buffer, bytes: usize) -> (Leaving, Away) {
    let Device::Cuda(ordinal) = buffer.device() else { panic!("a buffer of a GPU") };
    assert!(bytes as u64 <= buffer.bytes(), "a buffer of {bytes} bytes");
    let mut place = gpu::pinned(ordinal, bytes, PinnedFor::Copies);
    // SAFETY: both have so many bytes; the place is not read before the copy back, which comes later on that stream; the buffer is
    // not given back before the event, for which `Leaving` makes its next user wait.
    let copied = place
        .as_mut()
        .map(|place| unsafe { gpu::copy_out(ordinal, &mut place.as_mut_slice()[..bytes], buffer.address()) });
    (Leaving { ordinal, buffer: Some(buffer), copied }, Away { ordinal, bytes, place })
}

impl Leaving {
    /// The buffer, for computations after the copy.
    pub fn buffer(mut self) -> Option<Buffer> {
        let copied = self.copied.take();
        gpu::checked(copied.map_or(Ok(()), |copied| gpu::wait(self.ordinal, &copied)));
        self.buffer.take()
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        // If this fails, the GPU is lost, and nobody writes to the buffer any more.
        let _ = self.copied.take().map(|copied| gpu::wait(self.ordinal, &copied));
    }
}

impl Away {
    /// Starts to copy the numbers into a buffer of the GPU that they came from, and overwrites it.
    ///
    /// # Panics
    /// If the buffer is too small, or elsewhere.
    pub fn come(self, buffer: Buffer) -> Coming {
        assert_eq!(buffer.device(), Device::Cuda(self.ordinal), "a buffer of the same GPU");
        assert!(self.bytes as u64 <= buffer.bytes(), "a buffer of {} bytes", self.bytes);
        // SAFETY: both have so many bytes; nothing reads the buffer before the event, for which `Coming` makes it wait, nor writes
        // the place, which goes back after that.
        let copied = self
            .place
            .as_ref()
            .map(|place| unsafe { gpu::copy_in(self.ordinal, buffer.address(), &place.as_slice()[..self.bytes]) });
        Coming { buffer: Some(buffer), copied, from: self }
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        gpu::unpin(self.ordinal, self.place.take(), self.bytes, PinnedFor::Copies);
    }
}

impl Coming {
    /// The buffer with its numbers, for computations from here on.
    pub fn buffer(mut self) -> Option<Buffer> {
        let copied = self.copied.take();
        gpu::checked(copied.map_or(Ok(()), |copied| gpu::wait(self.from.ordinal, &copied)));
        self.buffer.take()
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        // If this fails, the GPU is lost, and nobody writes to the buffer any more.
        let _ = self.copied.take().map(|copied| gpu::wait(self.from.ordinal, &copied));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pinned::tests::PINS;
    use crate::{Array, CountedGpu, memory};
    use std::sync::PoisonError;

    #[test]
    fn numbers_leave_and_come_back_while_their_memory_is_used_for_others() {
        crate::cuda::testing::use_stand_in();
        let _alone = PINS.lock().unwrap_or_else(PoisonError::into_inner);
        let device = Device::Cuda(0);
        let filled = |value: f32| {
            let mut buffer = Buffer::new(device, 1000);
            buffer.floats_mut(0..1000).write(&[value; 1000]);
            buffer
        };
        let (mut leaving, mut away) = (Vec::new(), Vec::new());
        for value in 0..6u8 {
            let (buffer, copy) = leave(filled(f32::from(value)), 4000);
            leaving.push(buffer);
            away.push(copy);
            if leaving.len() > 1 {
                // Written again as soon as the copy is over.
                let mut buffer = leaving.remove(0).buffer().unwrap();
                buffer.floats_mut(0..1000).write(&[-1.0; 1000]);
            }
        }
        drop(leaving);
        for (value, away) in (0..6u8).zip(away) {
            let back = away.come(filled(-2.0)).buffer().unwrap();
            assert_eq!(back.floats(0..1000).read(), [f32::from(value); 1000]);
        }
    }

    #[test]
    fn the_host_does_not_write_where_a_copy_back_may_still_read() {
        crate::cuda::testing::use_stand_in();
        let _alone = PINS.lock().unwrap_or_else(PoisonError::into_inner);
        let device = Device::Cuda(0);
        // As many bytes as no other test uses.
        let (leaving, away) = leave(Buffer::new(device, 1000), 4 * 997);
        let place = away.place.as_ref().unwrap().as_slice().as_ptr();
        drop(leaving);
        drop(away.come(Buffer::new(device, 1000)));
        let mut pinned = Array::<f32>::pinned(device, 997);
        assert_ne!(pinned.view_mut().on_host().as_ptr().cast(), place);
        let (_leaving, away) = leave(Buffer::new(device, 1000), 4 * 997);
        assert_eq!(away.place.as_ref().unwrap().as_slice().as_ptr(), place, "copies run in order");
    }

    #[test]
    fn on_a_counted_gpu_the_bytes_of_both_places_are_counted() {
        let gpu = CountedGpu::take();
        let (leaving, away) = leave(Buffer::new(gpu.device(), 1024), 4096);
        assert_eq!((memory::live(gpu.device()), memory::on_host(gpu.device())), (4096, 4096));
        drop(leaving);
        assert_eq!((memory::live(gpu.device()), memory::on_host(gpu.device())), (0, 4096));
        let back = away.come(Buffer::new(gpu.device(), 1024)).buffer();
        assert_eq!((memory::live(gpu.device()), memory::on_host(gpu.device())), (4096, 0));
        drop(back);
    }
}
