//! [`Buffer`]: memory for activations.
use super::{Device, gpu, memory};
use crate::slice::{Floats, FloatsMut, Slice, SliceMut};
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::Range;
use std::ptr;

/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Bytes of a buffer for this number of values, at least one. A buffer of at least two huge pages consists of whole
/// ones.
pub const fn buffer_bytes(values: usize) -> usize {
    let bytes = (if values == 0 { 1 } else { values }) * size_of::<f32>();
    if bytes >= 2 * HUGE_PAGE { bytes.next_multiple_of(HUGE_PAGE) } else { bytes }
}

/// Uninitialized memory for f32. On the CPU it is aligned to cache lines, or to huge pages if it is large. On the meta
/// device it has a size and no memory.
#[derive(Debug)]
pub struct Buffer {
    /// Null unless on the CPU.
    start: *mut f32,
    /// Its memory on a GPU.
    memory: Option<Box<gpu::Memory>>,
    values: usize,
    device: Device,
}

// SAFETY: a Buffer owns its memory, which belongs to no thread, and holds plain numbers.
unsafe impl Send for Buffer {}
// SAFETY: a shared reference gives the place and the length; whoever reads there holds what owns the Buffer.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Memory for this number of values, within the memory budget ([`memory::admit`]).
    pub fn new(device: Device, values: usize) -> Self {
        let (start, memory) = match device {
            Device::Cpu => (allocate(layout(buffer_bytes(values))), None),
            Device::Cuda(ordinal) => (ptr::null_mut(), Some(Box::new(gpu::Memory::new(ordinal, buffer_bytes(values))))),
            Device::Meta => (ptr::null_mut(), None),
        };
        Self { start, memory, values, device }
    }

    /// Borrows the values `range` of a buffer on a GPU.
    ///
    /// # Panics
    /// If the buffer is not on a GPU, or has fewer values.
    pub fn floats(&self, range: Range<usize>) -> Floats<'_> {
        let memory = self.memory.as_deref().expect("memory of a GPU");
        Slice::of_gpu(memory, self.values).slice(range)
    }

    /// As [`Buffer::floats`], to write.
    ///
    /// # Panics
    /// As [`Buffer::floats`].
    pub fn floats_mut(&mut self, range: Range<usize>) -> FloatsMut<'_> {
        let memory = self.memory.as_deref().expect("memory of a GPU");
        SliceMut::of_gpu(memory, self.values).slice(range)
    }

    /// A pointer to the first value; null unless on the CPU. The memory lives as long as the buffer.
    pub const fn start(&self) -> *mut f32 {
        self.start
    }

    /// The device that holds it.
    pub const fn device(&self) -> Device {
        self.device
    }

    /// Its address on a GPU; else 0.
    pub(crate) fn address(&self) -> u64 {
        self.memory.as_deref().map_or(0, gpu::Memory::address)
    }

    /// The number of values that fit.
    pub const fn values(&self) -> usize {
        self.values
    }

    /// Its size in bytes.
    pub const fn bytes(&self) -> u64 {
        buffer_bytes(self.values) as u64
    }
}

fn layout(bytes: usize) -> Layout {
    let align = if bytes >= 2 * HUGE_PAGE { HUGE_PAGE } else { 64 };
    Layout::from_size_align(bytes, align).expect("an activation fits the address space")
}

fn allocate(layout: Layout) -> *mut f32 {
    // SAFETY: the layout's size is not zero, for `buffer_bytes` counts at least one value.
    let start = memory::admit(Device::Cpu, layout.size(), || unsafe { alloc(layout) });
    if start.is_null() {
        handle_alloc_error(layout);
    }
    #[cfg(target_os = "linux")]
    if layout.align() == HUGE_PAGE {
        // SAFETY: the range was just allocated and begins at a page; the advice does not change what it holds. A refusal
        // costs only speed.
        unsafe { libc::madvise(start.cast(), layout.size(), libc::MADV_HUGEPAGE) };
    }
    start.cast()
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.device == Device::Cpu {
            // SAFETY: `new` allocated it with this layout, which follows from `values`, and nothing but this frees it.
            unsafe { dealloc(self.start.cast(), layout(buffer_bytes(self.values))) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_buffers_are_whole_huge_pages() {
        assert_eq!([0, 1, 1 << 20].map(buffer_bytes), [4, 4, 4 << 20]);
        assert_eq!(buffer_bytes((1 << 20) + 1), 6 << 20);
    }

    #[test]
    fn the_meta_device_counts_and_takes_nothing() {
        let buffer = Buffer::new(Device::Meta, 1 << 50);
        assert!(buffer.start().is_null());
        assert_eq!(buffer.bytes(), 1 << 52);
    }
}
