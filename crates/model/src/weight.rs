//! A weight of the model. It is frozen, or trained (a part of the flat buffer), or a table with some trained rows. A
//! frozen weight is an array in f32 or bf16, a quantized matrix, or sharded over ranks. All of it is on the model's
//! device.
use super::grads::Grads;
use super::segment::{Shared, SharedView};
use super::values::{Values, placed, write_rows};
use half::bf16;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use tunesmith_device::{Array, Device, Element, FloatBuffer};
use tunesmith_ops::activation::{Activation, Number};
use tunesmith_ops::embedding;
use tunesmith_ops::floats::Floats;
use tunesmith_ops::gemm::{Interleaved, Store};
use tunesmith_ops::loss::linear::WeightGradient;
use tunesmith_ops::quant::Quantized;

/// A matrix or vector of the model, row-major.
#[derive(Debug, Clone)]
pub enum Weight {
    /// A base weight that is not trained.
    Frozen(Frozen),
    /// Not trained, in 4 or 8 bits a number.
    Quantized(Arc<Quantized>),
    /// Not trained, rearranged for inference on the CPU.
    Interleaved(Arc<Interleaved>),
    /// Not trained, sharded over ranks, and readable only while its segment is gathered.
    Shared(Shared),
    /// Trained: its place in [`Params`](super::params::Params).
    Trained(Range<usize>),
    /// A table of which some rows are trained.
    Rows(Rows),
}

/// Base numbers that are not trained, row-major. Copies of a weight, such as a head that is the embedding, share them.
#[derive(Debug, Clone)]
pub enum Frozen {
    /// Single precision.
    F32(Arc<Array<f32>>),
    /// bfloat16: matrices only, since ops take vectors in f32.
    Bf16(Arc<Array<bf16>>),
}

impl From<Array<f32>> for Frozen {
    fn from(values: Array<f32>) -> Self {
        Self::F32(Arc::new(values))
    }
}

impl From<Array<bf16>> for Frozen {
    fn from(values: Array<bf16>) -> Self {
        Self::Bf16(Arc::new(values))
    }
}

impl Frozen {
    /// These numbers with `below` appended; `None` if they are not of one type.
    pub(super) fn joined(self, below: &Self) -> Option<Self> {
        match (self, below) {
            (Self::F32(above), Self::F32(below)) => Some(end_to_end(above, below).into()),
            (Self::Bf16(above), Self::Bf16(below)) => Some(end_to_end(above, below).into()),
            (Self::F32(_), Self::Bf16(_)) | (Self::Bf16(_), Self::F32(_)) => None,
        }
    }

    /// The device that they are on.
    pub(super) fn device(&self) -> Device {
        self.store().device()
    }

    fn store(&self) -> Store<'_> {
        match self {
            Self::F32(values) => Store::F32(values.view()),
            Self::Bf16(values) => Store::Bf16(values.view()),
        }
    }
}

fn end_to_end<T: Element>(above: Arc<Array<T>>, below: &Array<T>) -> Array<T> {
    let mut joined = Arc::unwrap_or_clone(above);
    joined.reserve(below.len());
    joined.append(below.view());
    joined
}

/// A table whose rows `ids` are trained. The trained rows lie in the flat buffer, and are copied into the table before
/// each pass.
#[derive(Debug, Clone)]
pub struct Rows {
    table: Table,
    ids: Arc<[u32]>,
    range: Range<usize>,
}

/// All rows of a table.
#[derive(Debug, Clone)]
enum Table {
    Own(Arc<RwLock<FloatBuffer>>),
    /// Sharded over ranks. The trained rows are written into it when the segment is gathered.
    Shared(Shared),
}

impl Rows {
    /// Replaces the table by that of a sharded segment.
    pub(super) fn share(&mut self, shared: Shared) {
        self.table = Table::Shared(shared);
    }

    /// Which rows are trained, and their place in the flat buffer.
    pub(super) fn trained(&self) -> (Arc<[u32]>, Range<usize>) {
        (Arc::clone(&self.ids), self.range.clone())
    }
}

/// Borrowed values of a [`Weight`].
pub enum View<'a> {
    /// Numbers that are not trained.
    Frozen(&'a Frozen),
    /// The codes and scales of a quantized matrix.
    Quantized(&'a Quantized),
    /// Rearranged for inference on the CPU.
    Interleaved(&'a Interleaved),
    /// Values of a segment that is sharded over ranks.
    Shared(SharedView<'a>),
    /// A part of the flat buffer of trained values.
    Trained(Floats<'a>),
    /// A table with some trained rows, whose lock is held as long as the view lives.
    Rows(RwLockReadGuard<'a, FloatBuffer>),
}

impl Weight {
    /// Makes a weight of values that will not be trained, on `device`. On the CPU they stay in the memory that they are
    /// in.
    pub fn frozen<T: Element>(values: Vec<T>, device: Device) -> Self
    where
        Frozen: From<Array<T>>,
    {
        Self::Frozen(placed(values, device).into())
    }

    /// The values of the weight. Those of a trained weight are taken from `values`.
    pub fn view<'a>(&'a self, values: Values<'a>) -> View<'a> {
        match self {
            Self::Frozen(frozen) => View::Frozen(frozen),
            Self::Quantized(matrix) => View::Quantized(matrix),
            Self::Interleaved(matrix) => View::Interleaved(matrix),
            Self::Shared(shared) | Self::Rows(Rows { table: Table::Shared(shared), .. }) => View::Shared(shared.view()),
            Self::Trained(range) => View::Trained(values.at(range)),
            Self::Rows(Rows { table: Table::Own(table), .. }) => {
                View::Rows(table.read().unwrap_or_else(PoisonError::into_inner))
            }
        }
    }

    /// Rearranges a matrix `[rows, width]` for inference, for products that round their operands to `products`. Weights
    /// of forms that cannot be rearranged stay as they are.
    pub fn interleave(&mut self, width: usize, products: Number) {
        let store = match self {
            Self::Frozen(frozen) => frozen.store(),
            Self::Quantized(matrix) => Store::Quantized(matrix),
            Self::Interleaved(_) | Self::Shared(_) | Self::Trained(_) | Self::Rows(_) => return,
        };
        if let Some(matrix) = Interleaved::new(store, width, products) {
            *self = Self::Interleaved(Arc::new(matrix));
        }
    }

    /// A table whose rows `ids` are trained, at `range` of the flat buffer.
    pub fn rows(table: FloatBuffer, ids: &[u32], range: Range<usize>) -> Self {
        Self::Rows(Rows { table: Table::Own(Arc::new(RwLock::new(table))), ids: ids.into(), range })
    }

    /// The place in the flat buffer, if the whole weight is trained.
    pub const fn trained(&self) -> Option<&Range<usize>> {
        match self {
            Self::Frozen(_) | Self::Quantized(_) | Self::Interleaved(_) | Self::Shared(_) | Self::Rows(_) => None,
            Self::Trained(range) => Some(range),
        }
    }

    /// The place in the flat buffer of what is trained of the weight: all, or some rows.
    pub const fn place(&self) -> Option<&Range<usize>> {
        match self {
            Self::Frozen(_) | Self::Quantized(_) | Self::Interleaved(_) | Self::Shared(_) => None,
            Self::Trained(range) | Self::Rows(Rows { range, .. }) => Some(range),
        }
    }

    /// Whether anything in it is trained.
    pub const fn trains(&self) -> bool {
        !matches!(self, Self::Frozen(_) | Self::Quantized(_) | Self::Interleaved(_) | Self::Shared(_))
    }

    /// Copies trained rows from the flat buffer into their table. Call it before a pass reads the table.
    pub fn refresh(&self, values: Values<'_>) {
        let Self::Rows(Rows { table: Table::Own(table), ids, range }) = self else { return };
        write_rows(table.write().unwrap_or_else(PoisonError::into_inner).view_mut(), ids, range, values);
    }

    /// Adds the gradient of an embedding table to `grads`, if it or some of its rows are trained. `dx` is the gradient
    /// of the embedding of `tokens`, which was `scale` times the table's rows. The token `padding` adds nothing.
    pub fn add_embedding_gradient(
        &self,
        dx: &Activation,
        tokens: &[u32],
        scale: f32,
        padding: Option<u32>,
        grads: &mut Grads<'_>,
    ) {
        match self {
            Self::Frozen(_) | Self::Quantized(_) | Self::Interleaved(_) | Self::Shared(_) => {}
            Self::Trained(range) => embedding::backward(dx, tokens, scale, padding, grads.at(range)),
            Self::Rows(Rows { ids, range, .. }) => {
                // A token's place among the trained rows; that past the last stands for all others.
                let place = |token: &u32| ids.iter().position(|id| id == token).unwrap_or(ids.len()) as u32;
                let places: Vec<u32> = tokens
                    .iter()
                    .map(|token| if padding == Some(*token) { ids.len() as u32 } else { place(token) })
                    .collect();
                embedding::backward(dx, &places, scale, Some(ids.len() as u32), grads.at(range));
            }
        }
    }

    /// Where the gradient of a head is added, if this weight is the head's matrix.
    pub fn head_gradient<'g>(&'g self, grads: &'g mut Grads<'_>) -> WeightGradient<'g> {
        match self {
            Self::Frozen(_) | Self::Quantized(_) | Self::Interleaved(_) | Self::Shared(_) => WeightGradient::None,
            Self::Trained(range) => WeightGradient::Whole(grads.at(range)),
            Self::Rows(Rows { ids, range, .. }) => WeightGradient::Rows { ids, gradients: grads.at(range) },
        }
    }
}

impl View<'_> {
    /// The numbers as they are stored.
    pub fn store(&self) -> Store<'_> {
        match self {
            Self::Frozen(frozen) => frozen.store(),
            Self::Quantized(matrix) => Store::Quantized(matrix),
            Self::Interleaved(matrix) => Store::Interleaved(matrix),
            Self::Shared(shared) => shared.store(),
            Self::Trained(values) => Store::F32(*values),
            Self::Rows(table) => Store::F32(table.view()),
        }
    }

    /// The numbers of a vector, which is always f32.
    pub fn vector(&self) -> Floats<'_> {
        match self.store() {
            Store::F32(values) => values,
            Store::Bf16(_) | Store::Quantized(_) | Store::Interleaved(_) => Floats::default(),
        }
    }
}
