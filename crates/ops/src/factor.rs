//! [`Factor`]: what an optimizer's update multiplies gradients by, and whether it updates at all.
use crate::cuda::Arg;
use crate::floats::Floats;

/// The factor on the gradients of an update. Either the host knows it, or a GPU computes it while the host goes on.
#[derive(Debug, Clone, Copy)]
pub enum Factor<'a> {
    /// A factor that the host knows.
    Known(f32),
    /// A factor in the GPU's memory: one number. If it is NaN, the update changes nothing.
    Found(Floats<'a>),
}

impl From<f32> for Factor<'_> {
    fn from(factor: f32) -> Self {
        Self::Known(factor)
    }
}

impl Factor<'_> {
    /// The factor on the host.
    ///
    /// # Panics
    /// If only the GPU knows it: such a factor is for GPU kernels alone.
    pub const fn known(self) -> f32 {
        match self {
            Self::Known(factor) => factor,
            Self::Found(_) => panic!("a factor that the host knows"),
        }
    }

    /// The two arguments of a kernel that `factor_of` in `dev.cuh` reads: the address of a factor on the GPU (or null),
    /// and the number.
    pub(crate) fn args(self) -> [Arg; 2] {
        match self {
            Self::Known(factor) => [Arg::NULL, factor.into()],
            Self::Found(at) => [at.into(), 0.0f32.into()],
        }
    }
}
