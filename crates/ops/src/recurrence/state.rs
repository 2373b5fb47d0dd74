//! The state that a text has in one mixer.
use crate::activation::LANES;
use std::ops::Range;
use tunesmith_device::{Device, FloatBuffer};

/// The sizes of a mixer's state: a matrix of each head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Heads, each with a state `[rows, columns]`.
    pub heads: usize,
    /// The width of what a token reads a state with.
    pub rows: usize,
    /// The width of a head's output.
    pub columns: usize,
}

impl Shape {
    /// Panels of 16 columns of a head, the last of them perhaps partly used.
    pub(crate) const fn panels(self) -> usize {
        self.columns.div_ceil(LANES)
    }

    /// Floats of a head's state on the CPU.
    pub(crate) const fn floats(self) -> usize {
        self.panels() * self.rows * LANES
    }
}

/// The states of all heads, in float32 on a device.
#[derive(Debug)]
pub struct State {
    shape: Shape,
    /// On a GPU `[heads][rows][columns]`; on the CPU `[heads][panels of columns][rows][16]`.
    pub(crate) floats: FloatBuffer,
}

impl State {
    /// States of zeros on `device`: those before a text's first token.
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

    /// Bytes of all heads' states, without what the CPU pads them with.
    pub const fn bytes(&self) -> usize {
        self.shape.heads * self.shape.rows * self.shape.columns * size_of::<f32>()
    }
}

impl Clone for State {
    fn clone(&self) -> Self {
        Self { shape: self.shape, floats: self.floats.to(self.floats.device()) }
    }
}

/// Holds the sequences against so many tokens, and a state for each of them, where there are some.
///
/// # Panics
/// Sequences do not lie end to end, or a state is missing or of other sizes.
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
