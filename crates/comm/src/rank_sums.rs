//! Sums over ranks of numbers in a GPU's memory, added in rank order.
use tunesmith_device::cuda::{Arg, Grid, Source};
use tunesmith_device::{Device, Floats, FloatsMut, gpu};

static KERNELS: Source = Source::new("rank_sums", include_str!("rank_sums.cu"));

/// Threads of a block.
const THREADS: u32 = 256;

/// `own = r_0 + r_1 + … + r_(size - 1)`, from left to right: `own` is the share of `rank`, and `others` `[size - 1, stride]` has
/// those of the other ranks in order, of which the first `own.len()` numbers of each row count. On this thread's queue.
///
/// # Panics
/// If the numbers are not on one GPU, or `others` has fewer.
pub(super) fn add_in_order(own: &mut FloatsMut<'_>, others: Floats<'_>, stride: usize, rank: usize, size: usize) {
    let Device::Cuda(ordinal) = own.device() else { panic!("numbers of a GPU") };
    let count = own.len();
    assert!(others.len() >= (size - 2) * stride + count && others.device() == own.device(), "numbers of every rank");
    let blocks = u32::try_from(count.div_ceil(THREADS as usize)).expect("a grid has less than 2^32 blocks");
    let args = [
        Arg::Address(own.address()),
        Arg::Address(others.address()),
        Arg::U64(stride as u64),
        Arg::U32(rank as u32),
        Arg::U32(size as u32),
        Arg::U64(count as u64),
    ];
    gpu::launch(ordinal, &KERNELS, "rank_sums", &Grid { blocks: [blocks, 1, 1], threads: THREADS, shared: 0 }, &args);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_device::FloatBuffer;

    #[test]
    fn numbers_are_added_from_the_first_rank_to_the_last() {
        tunesmith_device::cuda::testing::use_stand_in();
        let device = Device::Cuda(0);
        let (size, count, stride) = (4, 1000, 1013);
        let value = |rank: usize, index: usize| ((rank * 7919 + index * 104_729) % 10_007) as f32 / 97.0 - 50.0;
        let expected: Vec<f32> =
            (0..count).map(|index| (1..size).fold(value(0, index), |sum, rank| sum + value(rank, index))).collect();
        for rank in 0..size {
            let others: Vec<f32> = (0..size)
                .filter(|&other| other != rank)
                .flat_map(|other| (0..stride).map(move |index| value(other, index)))
                .collect();
            let others = FloatBuffer::of(device, &others[..(size - 2) * stride + count]);
            let own: Vec<f32> = (0..count).map(|index| value(rank, index)).collect();
            let mut own = FloatBuffer::of(device, &own);
            add_in_order(&mut own.view_mut(), others.view(), stride, rank, size);
            assert!(own.read() == expected, "rank {rank}");
        }
    }
}
