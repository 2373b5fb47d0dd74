//! Imaginary GPUs that count the memory which a model and its passes would hold, and compute nothing.
//!
//! Ops run the same code as for a real GPU: they allocate work spaces, upload indices and round operands. Memory has a
//! size and no address, launches and copies do nothing, and reads return zeros. So counting needs neither a second
//! description of the ops nor NVIDIA's libraries.
use crate::{Device, memory};
use std::sync::{Condvar, Mutex, PoisonError};

/// The first device number of an imaginary GPU. No machine has this many GPUs.
const FIRST: u8 = 192;

/// How many can be in use at a time.
const PLACES: usize = u8::MAX as usize - FIRST as usize + 1;

static IN_USE: Mutex<[bool; PLACES]> = Mutex::new([false; PLACES]);
static LEFT: Condvar = Condvar::new();

/// Whether the GPU of that number only counts.
pub(crate) const fn counts(ordinal: u8) -> bool {
    ordinal >= FIRST
}

/// A GPU that only counts, while this lives. Everything on it must be dropped first.
#[derive(Debug)]
pub struct CountedGpu {
    ordinal: u8,
}

impl CountedGpu {
    /// One that nothing else uses. Waits while all are in use.
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

    /// The device of counted tensors. [`crate::memory::live`] and [`crate::memory::peak`] return its count.
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
        crate::cuda::testing::use_stand_in();
        let error = crate::gpu::open(FIRST).unwrap_err();
        assert!(error.message().contains("there is no GPU 192"), "{error}");
    }
}
