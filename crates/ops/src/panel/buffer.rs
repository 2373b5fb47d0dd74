//! The memory of an activation.
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use tunesmith_base::memory;

/// Memory of floats aligned to cache lines, or to huge pages where it is large.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) start: *mut f32,
    pub(super) floats: usize,
}

// SAFETY: a Buffer owns its memory, which belongs to no thread, and holds plain numbers.
unsafe impl Send for Buffer {}
// SAFETY: a shared reference gives the place and the length; whoever reads there holds the Act that owns the Buffer.
unsafe impl Sync for Buffer {}

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

impl Buffer {
    /// The size of a buffer of so many floats.
    pub(super) fn bytes(floats: usize) -> usize {
        let bytes = floats.max(1) * size_of::<f32>();
        if bytes >= 2 * HUGE { bytes.next_multiple_of(HUGE) } else { bytes }
    }

    fn layout(floats: usize) -> Layout {
        let bytes = Self::bytes(floats);
        let align = if bytes >= 2 * HUGE { HUGE } else { 64 };
        Layout::from_size_align(bytes, align).expect("an activation fits the address space")
    }

    pub(super) fn new(floats: usize) -> Self {
        let layout = Self::layout(floats);
        // SAFETY: the layout's size is not zero, for `bytes` counts at least one float.
        let start = memory::admit(layout.size(), || unsafe { alloc(layout) });
        if start.is_null() {
            handle_alloc_error(layout);
        }
        #[cfg(target_os = "linux")]
        if layout.align() == HUGE {
            // SAFETY: the range was just allocated and begins at a page; the advice does not change what it holds. A
            // refusal costs only speed.
            unsafe { libc::madvise(start.cast(), layout.size(), libc::MADV_HUGEPAGE) };
        }
        Self { start: start.cast(), floats }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `new` allocated it with this layout, which follows from `floats`, and nothing but this frees it.
        unsafe { dealloc(self.start.cast(), Self::layout(self.floats)) };
    }
}
