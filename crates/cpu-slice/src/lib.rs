//! The slice behind numbers on the CPU.
//!
//! Code that takes the slice can compute on the CPU only. So the method is in a separate crate, and the compiler
//! refuses it to every crate that does not depend on this one. Only `device`, which implements it, and `ops`, whose
//! kernels need it, depend on it. Everything else reads and writes copies, which any device can give.

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
