//! A weight as a segment sees it: frozen (a candle tensor) or trained (a part of the flat buffer).
use crate::error::{Error, Result};
use candle_core::{Device, Storage, StorageRef, Tensor};
use std::ops::{Deref, Range};

/// A matrix or vector of the model, f32, row-major.
#[derive(Debug, Clone)]
pub enum Weight {
    /// Not trained.
    Frozen(Tensor),
    /// Trained: its place in [`Params`](super::params::Params).
    Trained(Range<usize>),
}

/// Borrowed values of a [`Weight`].
pub enum View<'a> {
    /// Of a candle tensor, whose lock is held meanwhile.
    Frozen(StorageRef<'a>),
    /// Of the flat buffer.
    Trained(&'a [f32]),
}

impl Weight {
    /// Takes values that will not be trained.
    ///
    /// # Errors
    /// Candle's, as [`crate::Kind::Model`].
    pub fn frozen(values: Vec<f32>, shape: &[usize]) -> Result<Self> {
        Tensor::from_vec(values, shape, &Device::Cpu).map(Self::Frozen).map_err(|error| Error::model(error.to_string()))
    }

    /// The values, out of the flat buffer `values` where the weight is trained.
    pub fn view<'a>(&'a self, values: &'a [f32]) -> View<'a> {
        match self {
            Self::Frozen(tensor) => View::Frozen(tensor.storage_and_layout().0),
            Self::Trained(range) => View::Trained(&values[range.clone()]),
        }
    }

    /// The place in the flat buffer, if trained.
    pub const fn trained(&self) -> Option<&Range<usize>> {
        match self {
            Self::Frozen(_) => None,
            Self::Trained(range) => Some(range),
        }
    }
}

impl Deref for View<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Frozen(storage) => match &**storage {
                Storage::Cpu(cpu) => cpu.as_slice::<f32>().unwrap_or(&[]),
                _ => &[],
            },
            Self::Trained(values) => values,
        }
    }
}
