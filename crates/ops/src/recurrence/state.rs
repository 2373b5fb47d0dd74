//! [`State`]: the recurrent state of a text in one mixer, kept from one pass to the next.
use crate::activation::LANES;
use std::ops::Range;
use tunesmith_device::{Device, FloatBuffer};

/// The sizes of a mixer's state: one matrix for each head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Heads, each with a state `[rows, columns]`.
    pub heads: usize,
    /// The features of a query or key, which read and write the state.
    pub rows: usize,
    /// The features of a head's value and output.
    pub columns: usize,
}

impl Shape {
    /// Panels of 16 columns of a head's state. The last one may be partly used.
    pub(crate) const fn panels(self) -> usize {
        self.columns.div_ceil(LANES)
    }

    /// How many floats a head's state takes on the CPU.
    pub(crate) const fn floats(self) -> usize {
        self.panels() * self.rows * LANES
    }
}

/// The states of all heads of one mixer for one text, in float32 on a device.
#[derive(Debug)]
pub struct State {
    shape: Shape,
    /// On a GPU `[heads][rows][columns]`; on the CPU `[heads][panels of columns][rows][16]`.
    pub(crate) floats: FloatBuffer,
}

impl State {
    /// States of zeros on `device`, as before a text's first token.
    pub fn new(device: Device, shape: Shape) -> Self {
        let floats = match device {
            Device::Cpu | Device::Meta => shape.heads * shape.floats(),
            Device::Cuda(_) => shape.heads * shape.rows * shape.columns,
        };
        Self { shape, floats: FloatBuffer::zeros(device, floats) }
    }

    /// The sizes that it was made for.
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// Bytes of all heads' states, without the CPU's padding.
    pub const fn bytes(&self) -> usize {
        self.shape.heads * self.shape.rows * self.shape.columns * size_of::<f32>()
    }
}

impl Clone for State {
    fn clone(&self) -> Self {
        Self { shape: self.shape, floats: self.floats.to(self.floats.device()) }
    }
}

/// Checks that the sequences lie end to end and hold `tokens` tokens, and that there is a state of the right sizes for
/// each of them, if states are given.
///
/// # Panics
/// If a check fails.
pub(crate) fn check_sequences(tokens: usize, sequences: &[Range<usize>], states: Option<&[&mut State]>, shape: Shape) {
    let mut end = 0;
    for sequence in sequences {
        assert!(sequence.start == end && sequence.end >= end, "sequences lie end to end");
        end = sequence.end;
    }
    assert_eq!(end, tokens, "each token is in a sequence");
    if let Some(states) = states {
        assert_eq!(states.len(), sequences.len(), "a state for each sequence");
        assert!(states.iter().all(|state| state.shape() == shape), "states of these heads");
    }
}
