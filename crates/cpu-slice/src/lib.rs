//! The slice behind numbers on the CPU.
//!
//! Whoever takes the slice can compute on the CPU only. So the method is in a crate of its own, and the compiler refuses it to every
//! crate that does not depend on this one: only `device`, which implements it, and `ops`, whose kernels it is for, do. Everything
//! else reads and writes copies, which any device can give.

/// Numbers that may be on the CPU.
pub trait CpuSlice {
    /// `&[T]` or `&mut [T]`.
    type Slice;

    /// The numbers on the CPU.
    ///
    /// # Panics
    /// If they are not there: an op on a device takes operands of that device.
    fn cpu_slice(self) -> Self::Slice;
}
