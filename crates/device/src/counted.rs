//! GPUs that are not there: what a model and its passes would hold on a GPU is counted, and nothing is computed.
//!
//! The ops run the very code that they run for a GPU: they take work spaces, upload indices and round operands. Memory has a
//! size and no place, launches and copies do nothing, what is read is zeros. So a count needs no description of its own, and
//! none of NVIDIA's libraries.
use crate::{Device, memory};
use std::sync::{Condvar, Mutex, PoisonError};

/// The first of the numbers that stand for GPUs which are not there. No machine has so many GPUs.
const FIRST: u8 = 192;

/// How many can be counted on at a time.
const PLACES: usize = u8::MAX as usize - FIRST as usize + 1;

static IN_USE: Mutex<[bool; PLACES]> = Mutex::new([false; PLACES]);
static LEFT: Condvar = Condvar::new();

/// Whether the GPU of that number only counts.
pub(crate) const fn counts(ordinal: u8) -> bool {
    ordinal >= FIRST
}

/// A GPU that only counts, as long as this lives. Whatever is on it must be dropped before.
#[derive(Debug)]
pub struct CountedGpu {
    ordinal: u8,
}

impl CountedGpu {
    /// One that nobody else counts on. Waits while all are taken.
    pub fn take() -> Self {
        let mut places = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(free) = places.iter().position(|taken| !taken) {
                places[free] = true;
                let taken = Self { ordinal: FIRST + free as u8 };
                memory::reset_peak(taken.device());
                return taken;
            }
            places = LEFT.wait(places).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Where tensors that are counted lie. [`crate::memory::live`] and [`crate::memory::peak`] of it are the count.
    pub const fn device(&self) -> Device {
        Device::Cuda(self.ordinal)
    }
}

impl Drop for CountedGpu {
    fn drop(&mut self) {
        IN_USE.lock().unwrap_or_else(PoisonError::into_inner)[usize::from(self.ordinal - FIRST)] = false;
        LEFT.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FloatBuffer;

    #[test]
    fn arrays_on_it_are_counted_and_read_as_zeros() {
        let (one, other) = (CountedGpu::take(), CountedGpu::take());
        assert_ne!(one.device(), other.device());
        let device = one.device();
        assert!(device.only_counts() && !Device::Cuda(0).only_counts());
        let mut buffer = FloatBuffer::zeros(device, 1 << 40);
        drop(FloatBuffer::of(device, &[1.0; 3]));
        // Each begins at a multiple of 512 bytes.
        assert_eq!((memory::live(device), memory::peak(device)), (1 << 42, (1 << 42) + 512));
        buffer.slice_mut(0..2).write(&[1.0, 2.0]);
        assert_eq!(buffer.slice(0..3).read(), [0.0; 3]);
        drop(buffer);
        assert_eq!((memory::live(device), memory::live(other.device())), (0, 0));
    }

    #[test]
    fn a_user_cannot_ask_for_one() {
        crate::cuda::testing::stand_in();
        let error = crate::gpu::open(FIRST).unwrap_err();
        assert!(error.message().contains("there is no GPU 192"), "{error}");
    }
}
