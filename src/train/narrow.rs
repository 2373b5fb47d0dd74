//! Gradients kept in bfloat16 from pass to pass of a step (`train.grad_dtype`): two bytes a trained value instead of four.
//!
//! A pass adds up the gradients of a segment in float32, in a room that is as large as the segment; when backward has left
//! it, they are added to the sums and rounded. So a step rounds a gradient once for each of its passes. The update widens
//! the sums tensor by tensor.
use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use crate::error::Result;
use crate::model::Grads;
use crate::model::grads::{Buffer, Collector};
use crate::optim::clip;

/// Numbers that a task rounds or widens at once.
const TASK: usize = 1 << 14;

/// The sums of a step's gradients.
#[derive(Debug, Default)]
pub struct Narrow {
    sums: Vec<bf16>,
    /// A room that waits for a segment of the same size.
    spare: Vec<f32>,
}

impl Narrow {
    /// A step begins: the gradients of so many trained values are zero.
    pub fn begin(&mut self, values: usize) {
        if self.sums.len() == values {
            self.sums.fill(bf16::ZERO);
        } else {
            self.sums = vec![bf16::ZERO; values];
        }
    }

    /// Where a pass adds its gradients; [`Grads::finish`] ends it.
    pub fn grads(&mut self) -> Grads<'_> {
        Grads::rooms(Box::new(Folder { sums: &mut self.sums, spare: &mut self.spare }))
    }

    /// The passes are over: only the sums stay.
    pub fn end(&mut self) {
        self.spare = Vec::new();
    }

    /// The gradients.
    pub fn sums(&self) -> &[bf16] {
        &self.sums
    }

    /// The sum of their squares, in f64.
    pub fn squares(&self) -> f64 {
        let block = |sums: &[bf16]| {
            let mut wide = vec![0.0f32; sums.len()];
            sums.convert_to_f32_slice(&mut wide);
            clip::squares(&wide)
        };
        let blocks: Vec<f64> = self.sums.par_chunks(1 << 16).map(block).collect();
        blocks.iter().sum()
    }
}

/// Adds what rooms hold to the sums.
struct Folder<'g> {
    sums: &'g mut [bf16],
    spare: &'g mut Vec<f32>,
}

impl<'g> Collector<'g> for Folder<'g> {
    fn room(&mut self, length: usize) -> Vec<f32> {
        let mut room = std::mem::take(self.spare);
        if room.len() != length {
            // Before the next one is there: a table's is larger than any block's.
            drop(room);
            return vec![0.0; length];
        }
        room.fill(0.0);
        room
    }

    fn take(&mut self, start: usize, mut gradients: Buffer<'g>) -> Result<()> {
        let more = gradients.values();
        let sums = &mut self.sums[start..start + more.len()];
        sums.par_chunks_mut(TASK).zip(more.par_chunks_mut(TASK)).for_each(|(sums, more)| {
            for (sum, more) in sums.iter_mut().zip(more) {
                *sum = bf16::from_f32(sum.to_f32() + *more);
            }
        });
        if let Buffer::Room(room) = gradients {
            *self.spare = room;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_added_and_rounded_once_a_pass() {
        let mut narrow = Narrow::default();
        narrow.begin(7);
        for pass in 0..2 {
            let mut grads = narrow.grads();
            for range in [4..7, 0..4] {
                grads.open(range.clone());
                for (at, value) in grads[range.clone()].iter_mut().enumerate() {
                    assert_eq!(*value, 0.0, "a room is empty");
                    *value += 0.3 + (at + pass) as f32;
                }
                grads.close(&range).unwrap();
            }
            grads.finish().unwrap();
        }
        narrow.end();
        let rounded = |value: f32| bf16::from_f32(value).to_f32();
        let expected = |at: usize| rounded(rounded(0.3 + at as f32) + (0.3 + (at + 1) as f32));
        let places = [0, 1, 2, 3, 0, 1, 2];
        let sums: Vec<f32> = narrow.sums().iter().map(|sum| sum.to_f32()).collect();
        assert_eq!(sums, places.map(expected));
        assert!((narrow.squares() - sums.iter().map(|&sum| f64::from(sum).powi(2)).sum::<f64>()).abs() < 1e-9);
        narrow.begin(7);
        assert!(narrow.sums().iter().all(|sum| *sum == bf16::ZERO));
    }
}
