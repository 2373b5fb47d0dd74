//! Scratch memory of a thread on the CPU, for one task or for one operation that the thread leads.
use crate::activation::LANES;
use std::cell::RefCell;
use tunesmith_device::{Device, memory};

/// Sixteen floats, aligned so that a vector's load never crosses a cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

thread_local! {
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    static SHARED: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// As [`with_scratch`], for memory that all tasks of an operation share, which this thread leads.
pub(crate) fn with_shared<R>(floats: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    // The memory is taken out of its place, so that `f` may ask for shared memory itself.
    let mut own = SHARED.take();
    let result = lend(&mut own, floats, f);
    SHARED.set(own);
    result
}

/// Lends `floats` floats of this thread's scratch memory to `f`, if the memory budget has room for them
/// ([`memory::admit`]). Their values are undefined, and they begin at a cache line.
pub(crate) fn with_scratch<R>(floats: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| lend(scratch, floats, f))
}

fn lend<R>(scratch: &mut Vec<Line>, floats: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let lines = floats.div_ceil(LANES);
    if scratch.len() < lines {
        *scratch = Vec::new();
        *scratch = memory::admit(Device::Cpu, lines * size_of::<Line>(), || vec![Line([0.0; LANES]); lines]);
    }
    // SAFETY: a line is 16 floats and nothing else, so that all lines are as many floats end to end; the borrow of the
    // lines lasts as long as that of the floats.
    let all = unsafe { std::slice::from_raw_parts_mut(scratch.as_mut_ptr().cast::<f32>(), scratch.len() * LANES) };
    f(&mut all[..floats])
}

/// Divides scratch memory into parts.
pub(crate) struct Cutter<'a>(pub(crate) &'a mut [f32]);

impl<'a> Cutter<'a> {
    /// Cuts off the next `floats` floats.
    pub(crate) fn cut(&mut self, floats: usize) -> &'a mut [f32] {
        let (part, rest) = std::mem::take(&mut self.0).split_at_mut(floats);
        self.0 = rest;
        part
    }

    /// Cuts off the next `floats` floats, and returns where they begin.
    pub(crate) fn take(&mut self, floats: usize) -> *mut f32 {
        self.cut(floats).as_mut_ptr()
    }
}
