//! Memory that threads share during a collective operation: each rank reads the others' buffers, and none continues before all
//! have read. The only `unsafe` here is to read and write through these pointers.
use std::ops::Range;

/// A rank's bytes. Until the operation ends, others may read them, and the owner may write where others do not read.
#[derive(Debug, Clone, Copy)]
pub struct SharedBuffer {
    start: *mut u8,
    length: usize,
}

// SAFETY: a place and a length; whoever reads or writes there does so by the functions below, whose callers keep the
// rules of an exchange ([`super::threads`]).
unsafe impl Send for SharedBuffer {}
// SAFETY: as for `Send`: a shared reference gives the place and the length, and nothing else.
unsafe impl Sync for SharedBuffer {}

/// Numbers summed at a time; they fit into the L1 cache.
const BLOCK: usize = 2048;

impl SharedBuffer {
    /// For others to read; the owner does not change it during the operation.
    pub fn to_read(bytes: &[u8]) -> Self {
        Self { start: bytes.as_ptr().cast_mut(), length: bytes.len() }
    }

    /// For others to read in part, while the owner changes the rest through this buffer.
    pub fn to_change(bytes: &mut [u8]) -> Self {
        Self { start: bytes.as_mut_ptr(), length: bytes.len() }
    }

    /// Copies `range` of the buffer into `into`.
    ///
    /// # Safety
    /// The owner takes part in the same operation, and nobody writes in `range` meanwhile.
    ///
    /// # Panics
    /// If `range` exceeds the buffer, or has another length than `into`.
    pub unsafe fn read(self, range: &Range<usize>, into: &mut [u8]) {
        assert!(range.start <= range.end && range.end <= self.length && range.len() == into.len(), "within the buffer");
        // SAFETY: within, by the assertion; valid and unchanged, as the caller says; `into` is exclusive, so that they
        // do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(self.start.add(range.start), into.as_mut_ptr(), range.len()) }
    }

    /// Copies `range` of another rank's buffer to the same place in this one.
    ///
    /// # Safety
    /// Both owners are in an exchange, this one's by this thread, made by [`SharedBuffer::to_change`]; nobody writes in `range`
    /// of the other, and nobody reads or writes in `range` of this one.
    ///
    /// # Panics
    /// If `range` exceeds one of the buffers.
    pub unsafe fn copy(self, other: Self, range: &Range<usize>) {
        let shorter = self.length.min(other.length);
        assert!(range.start <= range.end && range.end <= shorter, "within both buffers");
        // SAFETY: within both, by the assertion; two ranks' memory does not overlap; the rest is the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(other.start.add(range.start), self.start.add(range.start), range.len()) }
    }

    /// Replaces the numbers at `range` in `all[rank]` by their sums over `all` ranks, rank 0 first.
    ///
    /// # Safety
    /// As [`SharedBuffer::copy`]: all owners take part in the operation, and only this thread touches `range` of any of them.
    ///
    /// # Panics
    /// If `range`, in numbers, exceeds one of the buffers, or a buffer is not aligned for f32.
    #[allow(clippy::cast_ptr_alignment, reason = "asserted")]
    pub unsafe fn sum(all: &[Self], rank: usize, range: &Range<usize>) {
        let shortest = all.iter().map(|shared| shared.length / size_of::<f32>()).min().unwrap_or(0);
        assert!(range.start <= range.end && range.end <= shortest && rank < all.len(), "within what all have lent");
        assert!(all.iter().all(|shared| shared.start.cast::<f32>().is_aligned()), "numbers are lent");
        let mut sums = [0.0f32; BLOCK];
        for start in range.clone().step_by(BLOCK) {
            let count = BLOCK.min(range.end - start);
            // SAFETY: within and aligned, by the assertions; every pattern of bits is an f32. `range` of all ranks is
            // left to this thread, as the caller says, which writes there only when these slices are gone.
            let values =
                |shared: &Self| unsafe { std::slice::from_raw_parts(shared.start.cast::<f32>().add(start), count) };
            let sums = &mut sums[..count];
            for (index, shared) in all.iter().enumerate() {
                if index == 0 {
                    sums.copy_from_slice(values(shared));
                } else {
                    sums.iter_mut().zip(values(shared)).for_each(|(sum, value)| *sum += value);
                }
            }
            // SAFETY: within and aligned, by the assertions; `sums` is an array of this function, so that they do not
            // overlap. The slices that were read are gone, and nobody else looks at `range`.
            unsafe { std::ptr::copy_nonoverlapping(sums.as_ptr(), all[rank].start.cast::<f32>().add(start), count) };
        }
    }
}
