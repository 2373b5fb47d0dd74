//! What an optimizer's update multiplies gradients by, and whether it updates at all.
use crate::cuda::Arg;
use crate::floats::Floats;

/// A factor that the host knows, or that is found on the gradients' device while the host goes on.
#[derive(Debug, Clone, Copy)]
pub enum Factor<'a> {
    /// The number.
    Known(f32),
    /// One number on a GPU. NaN says that nothing is updated.
    Found(Floats<'a>),
}

impl From<f32> for Factor<'_> {
    fn from(factor: f32) -> Self {
        Self::Known(factor)
    }
}

impl Factor<'_> {
    /// The number.
    ///
    /// # Panics
    /// If the host does not know it: only kernels of a GPU take such a factor.
    pub const fn known(self) -> f32 {
        match self {
            Self::Known(factor) => factor,
            Self::Found(_) => panic!("a factor that the host knows"),
        }
    }

    /// Two arguments of a kernel, which `factor_of` of `dev.cuh` takes: where it is found, and the number.
    pub(crate) fn args(self) -> [Arg; 2] {
        match self {
            Self::Known(factor) => [Arg::NULL, factor.into()],
            Self::Found(at) => [at.into(), 0.0f32.into()],
        }
    }
}
