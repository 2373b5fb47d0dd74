//! Memory of a thread for the duration of a task, or of an operation that it leads.
use crate::activation::LANES;
use std::cell::RefCell;
use tunesmith_device::{Device, memory};

/// Floats in which a vector's loads cross no cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

thread_local! {
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    static SHARED: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Lends floats for all tasks of an operation that this thread leads, as [`with_scratch`] does for one task.
pub(crate) fn with_shared<R>(floats: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    // Taken away, so that work within `f` may ask for others.
    let mut own = SHARED.take();
    let result = lend(&mut own, floats, f);
    SHARED.set(own);
    result
}

/// Lends `floats` floats of this thread's scratch memory, their values undefined, where the memory budget has room for them
/// ([`memory::admit`]). They begin with a cache line.
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

/// Cuts a scratch into parts.
pub(crate) struct Cutter<'a>(pub(crate) &'a mut [f32]);

impl<'a> Cutter<'a> {
    /// The next floats.
    pub(crate) fn cut(&mut self, floats: usize) -> &'a mut [f32] {
        let (part, rest) = std::mem::take(&mut self.0).split_at_mut(floats);
        self.0 = rest;
        part
    }

    /// Where the next floats begin.
    pub(crate) fn take(&mut self, floats: usize) -> *mut f32 {
        self.cut(floats).as_mut_ptr()
    }
}
