//! The tensors that an optimizer updates ([`Slot`]), and the state of each ([`State`]).
use std::ops::Range;
use tunesmith_device::{Array, Device, Fetching, FloatBuffer, FloatsMut, Storing};

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
    /// Whether it belongs to an image encoder or a connector: only steps with images update it, as it has no gradient in others.
    pub vision: bool,
}

impl Slot {
    /// The number of its values.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The storage of a state tensor's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateDtype {
    /// IEEE float32: 4 bytes a number.
    F32,
    /// A byte: an index into a code map.
    U8,
}

/// A state tensor that a rule needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateSpec {
    /// The suffix of its name in a checkpoint, such as `exp_avg`.
    pub name: &'static str,
    /// The sizes of its dimensions, row-major.
    pub shape: Vec<usize>,
    /// How its numbers are stored.
    pub dtype: StateDtype,
    /// How many values of the trained tensor share one of its numbers: 1, or the size of a block. Not used if
    /// [`UpdateRule::grain`](super::UpdateRule::grain) keeps the tensor whole.
    pub each: usize,
}

impl StateSpec {
    /// One float per value of the tensor.
    pub fn like(name: &'static str, slot: &Slot) -> Self {
        Self::floats(name, slot.shape.clone())
    }

    /// Float32 numbers with a shape of their own.
    pub const fn floats(name: &'static str, shape: Vec<usize>) -> Self {
        Self { name, shape, dtype: StateDtype::F32, each: 1 }
    }

    /// The number of its elements.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its bytes, in memory and in a checkpoint.
    pub fn bytes(&self) -> u64 {
        let count = self.count() as u64;
        match self.dtype {
            StateDtype::F32 => 4 * count,
            StateDtype::U8 => count,
        }
    }

    /// The range of its numbers that belong to the values `range` of `slot`.
    pub fn range(&self, slot: &Slot, range: &Range<usize>) -> Range<usize> {
        if range.len() == slot.count() {
            return 0..self.count();
        }
        range.start / self.each..range.end.div_ceil(self.each)
    }
}

/// State that is being copied to a GPU.
#[derive(Debug)]
pub(super) enum FetchingState {
    F32(Fetching<f32>),
    U8(Fetching<u8>),
}

impl FetchingState {
    /// The state, for computations from here on.
    pub(super) fn state(self) -> State {
        match self {
            Self::F32(values) => State::F32(values.array()),
            Self::U8(values) => State::U8(values.array()),
        }
    }
}

/// State that is being copied from a GPU.
#[derive(Debug)]
#[expect(dead_code, reason = "it is held until the copy has been waited for")]
pub(super) enum StoringState {
    F32(Storing<f32>),
    U8(Storing<u8>),
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
    /// `count` zeros of state for values on `device`. With `offloaded`, they are in the host's memory, pinned for the
    /// device.
    pub(super) fn zeros(device: Device, offloaded: bool, dtype: StateDtype, count: usize) -> Self {
        match (dtype, offloaded) {
            (StateDtype::F32, false) => Self::F32(FloatBuffer::zeros(device, count)),
            (StateDtype::F32, true) => Self::F32(FloatBuffer::pinned(device, count)),
            (StateDtype::U8, false) => Self::U8(Array::zeros(device, count)),
            (StateDtype::U8, true) => Self::U8(Array::pinned(device, count)),
        }
    }

    /// The GPU from which it is offloaded; `None` if it is not.
    pub(super) const fn offloaded(&self) -> Option<Device> {
        match self {
            Self::F32(values) => values.pinned_for(),
            Self::U8(values) => values.pinned_for(),
        }
    }

    /// Starts to copy a part of offloaded state to its GPU.
    pub(super) fn fetch(&self, range: Range<usize>) -> FetchingState {
        match self {
            Self::F32(values) => FetchingState::F32(values.fetch(range)),
            Self::U8(values) => FetchingState::U8(values.fetch(range)),
        }
    }

    /// Starts to copy a part back to the host, to the place from `start` on.
    pub(super) fn store(&mut self, start: usize, part: Self) -> StoringState {
        match (self, part) {
            (Self::F32(values), Self::F32(part)) => StoringState::F32(values.store(start, part)),
            (Self::U8(values), Self::U8(part)) => StoringState::U8(values.store(start, part)),
            _ => unreachable!("a part has the type of the whole"),
        }
    }

    /// A copy on its GPU, of offloaded state.
    pub(super) fn fetched(&self) -> Self {
        match self {
            Self::F32(values) => self.fetch(0..values.len()),
            Self::U8(values) => self.fetch(0..values.len()),
        }
        .state()
    }

    /// Its numbers, to write; an empty slice if it holds bytes.
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
