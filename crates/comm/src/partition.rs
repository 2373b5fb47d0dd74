//! Decides which rank owns which part of the trained values, in the same way for every strategy.
//!
//! Trained tensors lie end to end in one flat buffer, segment by segment (embedding, blocks, head). Each segment is cut
//! into one contiguous part per rank, rank 0 first. So a segment's gradients or values load all ranks alike:
//!
//! ```text
//! flat     |     segment 0     |         segment 1         |    segment 2    |
//! 2 ranks  |    0    |    1    |      0      |      1      |   0    |    1   |
//! packed   rank 0: its parts end to end; rank 1: likewise
//! ```
//!
//! A cut lies where the optimizer allows a tensor to be cut. It does not depend on the strategy or the size of
//! messages. So the gradient norm, which is summed part by part, is the same to the bit under all strategies.
use std::ops::Range;

use super::part;

/// The flat ranges that each rank owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    ranks: usize,
    /// `[segments][ranks + 1]`: where parts begin and end.
    cuts: Vec<Vec<usize>>,
}

impl Partition {
    /// Cuts segments, which begin at `segments` and end where the next one begins (the last entry is the end), among
    /// `ranks`. `legal` is the place nearest to one where a cut may be; it must not fall when its argument rises.
    pub fn new(segments: &[usize], ranks: usize, legal: impl Fn(usize) -> usize) -> Self {
        let cut = |ends: &[usize]| -> Vec<usize> {
            let (start, end) = (ends[0], ends[1]);
            let inner = |rank| legal(start + part(end - start, ranks, rank).start).clamp(start, end);
            [start].into_iter().chain((1..ranks).map(inner)).chain([end]).collect()
        };
        Self { ranks, cuts: segments.windows(2).map(cut).collect() }
    }

    /// Everything belongs to one rank, in one piece.
    pub fn alone(length: usize) -> Self {
        Self { ranks: 1, cuts: vec![vec![0, length]] }
    }

    /// How many ranks there are.
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    /// How many segments there are, empty ones included.
    pub const fn segments(&self) -> usize {
        self.cuts.len()
    }

    /// The range of a segment in the flat buffer of values.
    pub fn segment(&self, segment: usize) -> Range<usize> {
        self.cuts[segment][0]..self.cuts[segment][self.ranks]
    }

    /// A rank's part of a segment, as a flat range.
    pub fn part(&self, segment: usize, rank: usize) -> Range<usize> {
        self.cuts[segment][rank]..self.cuts[segment][rank + 1]
    }

    /// Every rank's part of a segment, counted from the segment's start.
    pub fn parts(&self, segment: usize) -> Vec<Range<usize>> {
        let start = self.segment(segment).start;
        let part = |rank| self.part(segment, rank);
        (0..self.ranks).map(|rank| part(rank).start - start..part(rank).end - start).collect()
    }

    /// A rank's flat ranges, rising; empty ones are left out.
    pub fn owned(&self, rank: usize) -> Vec<Range<usize>> {
        (0..self.segments()).map(|segment| self.part(segment, rank)).filter(|part| !part.is_empty()).collect()
    }

    /// How many values a rank owns: the length of a buffer that holds them end to end.
    pub fn count(&self, rank: usize) -> usize {
        (0..self.segments()).map(|segment| self.part(segment, rank).len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_value_has_one_owner_and_shares_are_even(
            lengths in prop::collection::vec(0usize..5000, 1..9), ranks in 1usize..9, grain in prop::sample::select(vec![1usize, 7, 256]),
        ) {
            let mut segments = vec![0];
            for length in &lengths {
                segments.push(segments[segments.len() - 1] + length);
            }
            let nearest = |at: usize| (at + grain / 2) / grain * grain;
            let partition = Partition::new(&segments, ranks, nearest);
            prop_assert_eq!((partition.ranks(), partition.segments()), (ranks, lengths.len()));
            let mut at = 0;
            for (segment, length) in lengths.iter().enumerate() {
                prop_assert_eq!(partition.segment(segment), at..at + length);
                for (rank, relative) in partition.parts(segment).into_iter().enumerate() {
                    let part = partition.part(segment, rank);
                    prop_assert_eq!(part.start, at, "no gap, no overlap");
                    prop_assert_eq!(relative.start + partition.segment(segment).start, part.start);
                    prop_assert_eq!(relative.len(), part.len());
                    let fair = length / ranks;
                    prop_assert!(part.len().abs_diff(fair) <= grain + 1, "{} of {length}", part.len());
                    let ends = partition.segment(segment);
                    prop_assert!([ends.start, ends.end].contains(&part.end) || part.end.is_multiple_of(grain));
                    at = part.end;
                }
            }
            prop_assert_eq!(at, segments[lengths.len()]);
            let counts: usize = (0..ranks).map(|rank| partition.count(rank)).sum();
            prop_assert_eq!(counts, at);
            for rank in 0..ranks {
                let owned = partition.owned(rank);
                prop_assert_eq!(owned.iter().map(ExactSizeIterator::len).sum::<usize>(), partition.count(rank));
                prop_assert!(owned.windows(2).all(|pair| pair[0].end <= pair[1].start));
            }
        }
    }

    #[test]
    fn one_rank_owns_everything_in_one_piece() {
        let alone = Partition::alone(11);
        assert_eq!((alone.owned(0).as_slice(), alone.count(0)), (std::slice::from_ref(&(0..11)), 11));
    }
}
