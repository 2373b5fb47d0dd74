//! The tensors that an optimizer updates ([`Slot`]), and the state that it keeps beside each ([`State`]).
use std::ops::Range;
use tunesmith_device::{Array, Device, FloatBuffer, FloatsMut};

/// A trained tensor, as an optimizer sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Slot {
    /// Its name in the model, such as `model.layers.0.self_attn.q_proj.lora_A.weight`.
    pub name: String,
    /// Row-major sizes. Slots lie end to end in the flat buffer of values.
    pub shape: Vec<usize>,
    /// Whether weight decay applies to it.
    pub decay: bool,
    /// Its learning rate divided by that of the run.
    pub lr_scale: f64,
}

impl Slot {
    /// How many values it has.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }
}

/// How a state tensor's numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateDtype {
    /// IEEE float32: 4 bytes a number.
    F32,
    /// A byte: an index into a code map.
    U8,
}

/// A state tensor that a rule asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateSpec {
    /// The suffix of its name in a checkpoint, such as `exp_avg`.
    pub name: &'static str,
    /// The sizes of its dimensions, row-major.
    pub shape: Vec<usize>,
    /// How its numbers are stored.
    pub dtype: StateDtype,
    /// How many values of the trained tensor share one of its numbers: 1, or the size of a block. Not used where
    /// [`UpdateRule::grain`](super::UpdateRule::grain) keeps the tensor whole.
    pub each: usize,
}

impl StateSpec {
    /// A float for each value of the tensor.
    pub fn like(name: &'static str, slot: &Slot) -> Self {
        Self::floats(name, slot.shape.clone())
    }

    /// Floats of a shape of their own.
    pub const fn floats(name: &'static str, shape: Vec<usize>) -> Self {
        Self { name, shape, dtype: StateDtype::F32, each: 1 }
    }

    /// How many numbers it has.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// The bytes that it takes in memory and in a checkpoint.
    pub fn bytes(&self) -> u64 {
        let count = self.count() as u64;
        match self.dtype {
            StateDtype::F32 => 4 * count,
            StateDtype::U8 => count,
        }
    }

    /// Which of its numbers belong to the values `range` of `slot`.
    pub fn range(&self, slot: &Slot, range: &Range<usize>) -> Range<usize> {
        if range.len() == slot.count() {
            return 0..self.count();
        }
        range.start / self.each..range.end.div_ceil(self.each)
    }
}

/// The numbers of a state tensor, such as a moment.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    /// The numbers themselves, of [`StateDtype::F32`].
    F32(FloatBuffer),
    /// Indices into a code map, of [`StateDtype::U8`].
    U8(Array<u8>),
}

impl State {
    pub(super) fn zeros(device: Device, dtype: StateDtype, count: usize) -> Self {
        match dtype {
            StateDtype::F32 => Self::F32(FloatBuffer::zeros(device, count)),
            StateDtype::U8 => Self::U8(Array::zeros(device, count)),
        }
    }

    /// Its floats; none where it holds bytes.
    pub fn floats(&mut self) -> FloatsMut<'_> {
        match self {
            Self::F32(values) => values.view_mut(),
            Self::U8(_) => FloatsMut::default(),
        }
    }

    /// A copy in the host's memory.
    #[must_use]
    pub fn read(&self) -> Self {
        match self {
            Self::F32(values) => Self::F32(values.read().into()),
            Self::U8(values) => Self::U8(values.read().into()),
        }
    }
}
