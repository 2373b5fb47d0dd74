//! A weight as a segment sees it: frozen (a candle tensor, f32 or bf16) or trained (a part of the flat buffer).
use crate::error::{Error, Result};
use crate::ops::gemm::Store;
use candle_core::{CpuStorage, DType, Device, Storage, StorageRef, Tensor};
use std::ops::Range;

/// A matrix or vector of the model, row-major.
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
    pub fn frozen<T: candle_core::WithDType>(values: Vec<T>, shape: &[usize]) -> Result<Self> {
        Tensor::from_vec(values, shape, &Device::Cpu).map(Self::Frozen).map_err(|error| Error::model(error.to_string()))
    }

    /// Bytes of one number.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Frozen(tensor) => tensor.dtype().size_in_bytes(),
            Self::Trained(_) => DType::F32.size_in_bytes(),
        }
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

impl View<'_> {
    /// The numbers as they are stored.
    pub fn store(&self) -> Store<'_> {
        match self {
            Self::Frozen(storage) => match &**storage {
                Storage::Cpu(CpuStorage::F32(values)) => Store::F32(values),
                Storage::Cpu(CpuStorage::BF16(values)) => Store::Bf16(values),
                _ => Store::F32(&[]), // no other is ever made
            },
            Self::Trained(values) => Store::F32(values),
        }
    }

    /// The numbers of a vector, which is always f32.
    pub fn vector(&self) -> &[f32] {
        match self.store() {
            Store::F32(values) => values,
            Store::Bf16(_) => &[],
        }
    }
}
