//! The gradients of a step so far, apart from those of the current pass. They are the rank's own part (`zero2`,
//! `zero3`, `fsdp`), or bfloat16 (`train.grad_dtype`), which takes two bytes per value instead of four.
//!
//! A pass adds up the gradients of a segment in float32, in a buffer of the segment's size. When the backward pass has
//! left the segment, they are added to the sums, and rounded if these are bfloat16. So a step rounds a gradient once
//! for each pass. Ranks sum in float32 too: the buffer of the last pass takes the rank's own sums in first, and only
//! the sum over ranks is rounded again. The update converts the sums to float32 tensor by tensor.
use std::ops::Range;

use half::bf16;

use tunesmith_base::error::Result;
use tunesmith_device::{Array, Device, FloatBuffer, Floats, FloatsMut};
use tunesmith_model::Grads;
use tunesmith_model::grads::{Buffer, Collector};
use tunesmith_ops::{accumulate, squares};
use tunesmith_optim::Gradients;

/// Sums of gradients: all of them, or the rank's own part end to end.
#[derive(Debug)]
pub enum GradSums {
    /// Exact sums of float32 gradients.
    F32(FloatBuffer),
    /// Sums that are rounded to bfloat16 after each pass.
    Bf16(Array<bf16>),
}

impl Default for GradSums {
    fn default() -> Self {
        Self::F32(FloatBuffer::default())
    }
}

impl GradSums {
    /// Whether the sums are bfloat16.
    pub(crate) const fn is_narrow(&self) -> bool {
        matches!(self, Self::Bf16(_))
    }

    /// Starts a step with `count` sums of zero, for gradients on `device`.
    pub fn begin(&mut self, device: Device, count: usize) {
        match self {
            Self::F32(sums) => sums.reset(device, count),
            Self::Bf16(sums) => sums.reset(device, count),
        }
    }

    /// Collects the gradients of a pass and adds them to these sums segment by segment; [`Grads::finish`] adds the last one.
    /// `spare` is a buffer on the device of the gradients, which a segment of its size reuses.
    pub fn grads<'g>(&'g mut self, spare: &'g mut FloatBuffer) -> Grads<'g> {
        Grads::by_segment(Box::new(Folder { sums: self, spare }))
    }

    /// Adds `more` to the sums from index `at` on.
    pub fn add(&mut self, at: usize, more: Floats<'_>) {
        match self {
            Self::F32(sums) => accumulate::add(sums.slice_mut(at..at + more.len()), more),
            Self::Bf16(sums) => accumulate::add(sums.slice_mut(at..at + more.len()), more),
        }
    }

    /// Adds the sums from index `at` on to `values`, and sets them to zero.
    pub fn move_to(&mut self, at: usize, values: FloatsMut<'_>) {
        let place = at..at + values.len();
        match self {
            Self::F32(sums) => accumulate::take(sums.slice_mut(place), values),
            Self::Bf16(sums) => accumulate::take(sums.slice_mut(place), values),
        }
    }

    /// The sums, if they are float32; else nothing.
    pub fn floats(&self) -> Floats<'_> {
        match self {
            Self::F32(sums) => sums.view(),
            Self::Bf16(_) => Floats::default(),
        }
    }

    /// The sums as the optimizer takes them.
    pub fn gradients(&self) -> Gradients<'_> {
        match self {
            Self::F32(sums) => Gradients::F32(sums.view()),
            Self::Bf16(sums) => Gradients::Bf16(sums.view()),
        }
    }

    /// The sum of the squares of the sums in `range`, in f64.
    pub fn squares(&self, range: Range<usize>) -> f64 {
        match self {
            Self::F32(sums) => squares::sum(sums.slice(range)),
            Self::Bf16(sums) => accumulate::squares(sums.slice(range)),
        }
    }
}

/// A buffer of `length` zeros for a segment, on the device of `spare` and in its memory if that has the same length.
/// Otherwise `spare` is freed first, because the embedding's buffer is larger than that of any block.
pub fn zeros(spare: FloatBuffer, length: usize) -> FloatBuffer {
    let mut buffer = spare;
    buffer.reset(buffer.device(), length);
    buffer
}

/// Adds the gradients of each segment to the sums as soon as the backward pass has left it.
struct Folder<'g> {
    sums: &'g mut GradSums,
    spare: &'g mut FloatBuffer,
}

impl<'g> Collector<'g> for Folder<'g> {
    fn buffer(&mut self, length: usize) -> FloatBuffer {
        let none = FloatBuffer::zeros(self.spare.device(), 0);
        zeros(std::mem::replace(self.spare, none), length)
    }

    fn take(&mut self, start: usize, mut gradients: Buffer<'g>) -> Result<()> {
        self.sums.add(start, gradients.values().view());
        if let Buffer::Owned(buffer) = gradients {
            *self.spare = buffer;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(sums: &GradSums) -> Vec<f32> {
        match sums {
            GradSums::F32(sums) => sums.read(),
            GradSums::Bf16(sums) => sums.read().iter().map(|sum| sum.to_f32()).collect(),
        }
    }

    #[test]
    fn segments_are_added_and_rounded_once_a_pass() {
        let (mut sums, mut spare) = (GradSums::Bf16(Array::default()), FloatBuffer::default());
        sums.begin(Device::Cpu, 7);
        for pass in 0..2 {
            let mut grads = sums.grads(&mut spare);
            for range in [4..7, 0..4] {
                grads.open(range.clone());
                let values: Vec<f32> = (0..range.len()).map(|at| 0.3 + (at + pass) as f32).collect();
                grads.at(&range).add(&values);
                grads.close(&range).unwrap();
            }
            grads.finish().unwrap();
        }
        let rounded = |value: f32| bf16::from_f32(value).to_f32();
        let expected = |at: usize| rounded(rounded(0.3 + at as f32) + (0.3 + (at + 1) as f32));
        let places = [0, 1, 2, 3, 0, 1, 2];
        assert_eq!(floats(&sums), places.map(expected));
        let squares: f64 = floats(&sums)[1..].iter().map(|&sum| f64::from(sum).powi(2)).sum();
        assert!((sums.squares(1..7) - squares).abs() < 1e-9);
        sums.begin(Device::Cpu, 7);
        assert_eq!(floats(&sums), [0.0; 7]);
    }

    #[test]
    fn sums_are_taken_out_as_they_are() {
        for mut sums in [GradSums::default(), GradSums::Bf16(Array::default())] {
            sums.begin(Device::Cpu, 5);
            sums.add(1, [1.5, 2.5, -4.0][..].into());
            let mut values = [0.001, 0.002];
            sums.move_to(2, values[..].as_mut().into());
            assert_eq!(values, [2.501, -3.998]);
            assert_eq!(floats(&sums), [0.0, 1.5, 0.0, 0.0, 0.0]);
        }
    }
}
