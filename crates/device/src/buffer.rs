//! Memory for activations.
use super::usage::{Held, Usage};
use super::{Device, HUGE_PAGE};
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr;
use tunesmith_base::memory;

/// Uninitialised memory for f32 on the CPU, aligned to cache lines, or to huge pages where it is large. On the meta device
/// it has a size and no memory.
#[derive(Debug)]
pub struct Buffer {
    /// Null on the meta device.
    start: *mut f32,
    values: usize,
    device: Device,
    held: Held,
}

// SAFETY: a Buffer owns its memory, which belongs to no thread, and holds plain numbers.
unsafe impl Send for Buffer {}
// SAFETY: a shared reference gives the place and the length; whoever reads there holds what owns the Buffer.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Memory for so many values, where the memory budget has room for it ([`memory::admit`]); `usage` counts it.
    pub fn new(device: Device, values: usize, usage: &Usage) -> Self {
        let bytes = device.layout().bytes(values);
        let start = match device {
            Device::Cpu => allocate(layout(bytes)),
            Device::Meta(_) => ptr::null_mut(),
        };
        Self { start, values, device, held: usage.hold(bytes as u64) }
    }

    /// The first value; null on the meta device. The memory lives as long as the buffer.
    pub const fn start(&self) -> *mut f32 {
        self.start
    }

    /// How many values it has room for.
    pub const fn values(&self) -> usize {
        self.values
    }

    /// Its size in bytes.
    pub const fn bytes(&self) -> u64 {
        self.held.bytes()
    }
}

fn layout(bytes: usize) -> Layout {
    let align = if bytes >= 2 * HUGE_PAGE { HUGE_PAGE } else { 64 };
    Layout::from_size_align(bytes, align).expect("an activation fits the address space")
}

fn allocate(layout: Layout) -> *mut f32 {
    // SAFETY: the layout's size is not zero, for `Layout::bytes` counts at least one value.
    let start = memory::admit(layout.size(), || unsafe { alloc(layout) });
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
            unsafe { dealloc(self.start.cast(), layout(self.device.layout().bytes(self.values))) };
        }
    }
}
