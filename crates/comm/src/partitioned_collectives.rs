//! Reduce-scatter and all-gather over parts at any place. A contiguous piece of medium size is sent directly. Short pieces share
//! a message; a long piece takes several. Buffers take at most [`Limits::bucket`](super::Limits) bytes. Sums go from the first
//! rank to the last, as everywhere in [`super`], so the division into messages and parts does not change a bit.
//!
//! If the engine sends from a GPU's memory ([`OnDevice`]), nothing is packed or copied to the host: each part is sent
//! from its place and summed on the GPU.
use std::borrow::Cow;
use std::ops::Range;

use super::bytes::{self, Element as _};
use super::on_device::{OnDevice, Transfer};
use super::{Collectives, World, rank_sums};
use tunesmith_base::error::Result;
use tunesmith_device::{Device, FloatBuffer, FloatsMut, HostMut};

/// Values of which each rank owns a part.
#[derive(Debug)]
pub struct Piece<'a> {
    /// All values, those of other ranks included.
    pub values: FloatsMut<'a>,
    /// The range of each rank's part in `values`.
    pub parts: Vec<Range<usize>>,
}

/// The operations, with buffers that are reused from one message to the next.
#[derive(Debug, Default)]
pub struct PartitionedCollectives {
    send: Vec<f32>,
    receive: Vec<f32>,
    /// What other ranks sent, on the GPU and its communication queue.
    arrived: FloatBuffer,
}

/// Pieces of at least this many bytes do not share a message.
const LARGE: usize = 64 << 10;

impl Piece<'_> {
    /// The bytes of all values.
    pub(super) const fn bytes(&self) -> usize {
        size_of::<f32>() * self.values.len()
    }

    /// All values on the host, where messages come from and go to.
    fn on_host(&mut self) -> HostMut<'_, f32> {
        self.values.reborrow().on_host()
    }

    /// Some of the values on the host.
    fn read(&self, range: &Range<usize>) -> Cow<'_, [f32]> {
        self.values.view().slice(range.clone()).to_host()
    }

    fn write(&mut self, range: &Range<usize>, values: &[f32]) {
        self.values.reborrow().slice(range.clone()).write(values);
    }

    /// The range of each rank's part in bytes, if the parts cover `values` in rank order and their size is within `bytes`.
    fn whole(&self, bytes: Range<usize>) -> Option<Vec<Range<usize>>> {
        let ends = std::iter::once(0).chain(self.parts.iter().map(|part| part.end));
        let whole = self.parts.iter().zip(ends).all(|(part, end)| part.start == end && part.end >= end)
            && self.parts.last().is_some_and(|last| last.end == self.values.len())
            && bytes.contains(&self.bytes());
        let width = size_of::<f32>();
        whole.then(|| self.parts.iter().map(|part| part.start * width..part.end * width).collect())
    }
}

/// A section of a rank's parts: the number of the piece, and the range in its values.
type Stretch = (usize, Range<usize>);

/// The sections of the values `from..to` of a rank, counted over its parts in all pieces.
fn stretches(pieces: &[&mut Piece<'_>], rank: usize, from: usize, to: usize) -> Vec<Stretch> {
    let (mut found, mut at) = (Vec::new(), 0);
    for (index, piece) in pieces.iter().enumerate() {
        let part = &piece.parts[rank];
        let (low, high) = (from.max(at), to.min(at + part.len()));
        if low < high {
            found.push((index, part.start + low - at..part.start + high - at));
        }
        at += part.len();
    }
    found
}

/// One message: the same number of values of each rank, or fewer at the end of its parts.
struct Message {
    /// By rank: the stretches that it owns.
    stretches: Vec<Vec<Stretch>>,
    /// The byte range of each rank's values in the message.
    parts: Vec<Range<usize>>,
}

/// Divides all values of `pieces` into messages of at most `bucket` bytes.
fn messages(pieces: &[&mut Piece<'_>], size: usize, bucket: usize) -> Vec<Message> {
    let count = |rank: usize| pieces.iter().map(|piece| piece.parts[rank].len()).sum::<usize>();
    let most = (0..size).map(count).max().unwrap_or(0);
    let step = (bucket / (size * size_of::<f32>())).max(1);
    let message = |from: usize| {
        let stretches: Vec<_> =
            (0..size).map(|rank| stretches(pieces, rank, from, from.saturating_add(step))).collect();
        let mut end = 0;
        let parts = stretches.iter().map(|of_rank: &Vec<Stretch>| {
            let start = end;
            end += of_rank.iter().map(|(_, range)| size_of::<f32>() * range.len()).sum::<usize>();
            start..end
        });
        let parts = parts.collect();
        Message { stretches, parts }
    };
    (0..most).step_by(step).map(message).collect()
}

impl PartitionedCollectives {
    /// Replaces this rank's parts by their sums over ranks. The other values are unchanged.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a peer is gone or late.
    pub fn reduce_scatter(&mut self, comm: &dyn Collectives, pieces: &mut [Piece<'_>]) -> Result<()> {
        let World { rank, size, .. } = comm.world();
        if size == 1 {
            return Ok(());
        }
        if let Some(threads) = comm.shared_memory() {
            return threads.sum_parts(pieces);
        }
        if let Some(engine) = on_device(comm, pieces) {
            return self.sum_on_device(engine, comm, pieces);
        }
        let bucket = comm.limits().bucket;
        let mut rest = Vec::new();
        for piece in pieces {
            let Some(parts) = piece.whole(LARGE..bucket.saturating_add(1)) else {
                rest.push(piece);
                continue;
            };
            let own = piece.parts[rank].clone();
            let receive = room(&mut self.receive, own.len() * size);
            let mut values = piece.on_host();
            comm.all_to_all_bytes(bytes::of(&values), &parts, bytes::of_mut(receive))?;
            f32::sum(&mut values[own], receive);
        }
        for Message { stretches, parts } in messages(&rest, size, bucket) {
            self.send.clear();
            for (piece, range) in stretches.iter().flatten() {
                self.send.extend_from_slice(&rest[*piece].read(range));
            }
            let own = parts[rank].len() / size_of::<f32>();
            let receive = room(&mut self.receive, own * size);
            comm.all_to_all_bytes(bytes::of(&self.send), &parts, bytes::of_mut(receive))?;
            let sums = &mut self.send[..own];
            f32::sum(sums, receive);
            let mut sums = &sums[..];
            for (piece, range) in &stretches[rank] {
                let (now, later) = sums.split_at(range.len());
                rest[*piece].write(range, now);
                sums = later;
            }
        }
        Ok(())
    }

    /// Fills in the parts of the other ranks.
    ///
    /// # Errors
    /// As [`PartitionedCollectives::reduce_scatter`].
    pub fn all_gather(&mut self, comm: &dyn Collectives, pieces: &mut [Piece<'_>]) -> Result<()> {
        let World { rank, size, .. } = comm.world();
        if size == 1 {
            return Ok(());
        }
        if let Some(threads) = comm.shared_memory() {
            return threads.fill_parts(pieces);
        }
        if let Some(engine) = on_device(comm, pieces) {
            let bytes = |part: &Range<usize>| part.start * size_of::<f32>()..part.end * size_of::<f32>();
            let stretch = |piece: &Piece<'_>| (piece.values.address(), piece.parts.iter().map(bytes).collect());
            return engine.all_gather(&pieces.iter().map(stretch).collect::<Vec<_>>());
        }
        let mut rest = Vec::new();
        for piece in pieces {
            match piece.whole(LARGE..usize::MAX) {
                Some(parts) => comm.all_gather_bytes(bytes::of_mut(&mut piece.on_host()), &parts)?,
                None => rest.push(piece),
            }
        }
        for Message { stretches, parts } in messages(&rest, size, comm.limits().bucket) {
            let floats = |range: &Range<usize>| range.start / size_of::<f32>()..range.end / size_of::<f32>();
            let message = room(&mut self.receive, floats(&parts[size - 1]).end);
            let mut own = &mut message[floats(&parts[rank])];
            for (piece, range) in &stretches[rank] {
                let (now, later) = own.split_at_mut(range.len());
                now.copy_from_slice(&rest[*piece].read(range));
                own = later;
            }
            comm.all_gather_bytes(bytes::of_mut(message), &parts)?;
            let mut all = &message[..];
            for (piece, range) in stretches.iter().flatten() {
                let (now, later) = all.split_at(range.len());
                rest[*piece].write(range, now);
                all = later;
            }
        }
        Ok(())
    }
}

impl PartitionedCollectives {
    /// As [`PartitionedCollectives::reduce_scatter`], from the GPU's memory to it. The host waits for nothing.
    fn sum_on_device(&mut self, engine: &dyn OnDevice, comm: &dyn Collectives, pieces: &mut [Piece<'_>]) -> Result<()> {
        let World { rank, size, .. } = comm.world();
        engine.queue().cross(|| {
            let mut all: Vec<&mut Piece<'_>> = pieces.iter_mut().collect();
            for Message { stretches, parts } in messages(&all, size, comm.limits().bucket) {
                let own = parts[rank].len() / size_of::<f32>();
                let device = Device::Cuda(engine.queue().ordinal());
                if self.arrived.len() < own * (size - 1) || self.arrived.device() != device {
                    drop(std::mem::take(&mut self.arrived));
                    self.arrived = FloatBuffer::zeros(device, own * (size - 1));
                }
                let others = || (0..size).filter(|&peer| peer != rank);
                let sends = others().flat_map(|peer| {
                    stretches[peer].iter().map(move |stretch| (peer, stretch)).map(|(peer, (piece, range))| Transfer {
                        peer,
                        address: all[*piece].values.view().slice(range.clone()).address(),
                        bytes: range.len() * size_of::<f32>(),
                    })
                });
                // By row, which is a peer: its numbers for each stretch of this rank.
                let starts = stretches[rank].iter().scan(0, |at, (_, range)| {
                    *at += range.len();
                    Some(*at - range.len())
                });
                let starts: Vec<usize> = starts.collect();
                let (arrived, starts) = (&self.arrived, &starts);
                let receives = others().enumerate().flat_map(|(row, peer)| {
                    stretches[rank].iter().zip(starts).map(move |((_, range), start)| Transfer {
                        peer,
                        address: arrived.slice(row * own + start..row * own + start + range.len()).address(),
                        bytes: range.len() * size_of::<f32>(),
                    })
                });
                engine.exchange(&sends.collect::<Vec<_>>(), &receives.collect::<Vec<_>>())?;
                for ((piece, range), &start) in stretches[rank].iter().zip(starts) {
                    let others = arrived.slice(start..arrived.len());
                    let mut values = all[*piece].values.reborrow().slice(range.clone());
                    rank_sums::add_in_order(&mut values, others, own, rank, size);
                }
            }
            Ok(())
        })
    }
}

/// The engine, if it sends these pieces directly from the GPU.
fn on_device<'c>(comm: &'c dyn Collectives, pieces: &[Piece<'_>]) -> Option<&'c dyn OnDevice> {
    let engine = comm.on_device()?;
    let device = Device::Cuda(engine.queue().ordinal());
    pieces.iter().all(|piece| piece.values.device() == device).then_some(engine)
}

/// The first `length` numbers of a buffer, which is enlarged if needed. Their values are arbitrary.
fn room(buffer: &mut Vec<f32>, length: usize) -> &mut [f32] {
    if buffer.len() < length {
        buffer.resize(length, 0.0);
    }
    &mut buffer[..length]
}

#[cfg(test)]
mod tests {
    use super::super::{Limits, part, threads};
    use super::*;
    use proptest::prelude::*;

    /// What rank `rank` holds at `index`: nothing that sums exactly.
    fn value(rank: usize, index: usize) -> f32 {
        ((rank * 7919 + index * 104_729) % 10_007) as f32 / 97.0 - 50.0
    }

    /// Threads that do not look into each other's memory.
    struct Apart(threads::Threads);

    impl Collectives for Apart {
        fn world(&self) -> World {
            self.0.world()
        }

        fn limits(&self) -> Limits {
            self.0.limits()
        }

        fn name(&self) -> &'static str {
            "apart"
        }

        fn all_to_all_bytes(&self, send: &[u8], parts: &[Range<usize>], receive: &mut [u8]) -> Result<()> {
            self.0.all_to_all_bytes(send, parts, receive)
        }

        fn all_gather_bytes(&self, data: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
            self.0.all_gather_bytes(data, parts)
        }

        fn broadcast_bytes(&self, data: &mut [u8], root: usize) -> Result<()> {
            self.0.broadcast_bytes(data, root)
        }

        fn barrier(&self) -> Result<()> {
            self.0.barrier()
        }

        fn new_group(&self, group: super::super::Group) -> Result<Box<dyn Collectives>> {
            self.0.new_group(group)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
        #[test]
        fn pieces_of_any_size_are_summed_and_gathered_in_messages_of_any_size(
            lengths in prop::collection::vec(prop_oneof![4 => 0usize..300, 1 => 16_000usize..40_000], 1..6), size in 2usize..5,
            bucket in prop_oneof![4usize..3000, 100_000usize..200_000], shift in 0usize..40,
            messages: bool,
        ) {
            let total: usize = lengths.iter().sum();
            let column = |index: usize| (1..size).fold(value(0, index), |sum, rank| sum + value(rank, index));
            let whole: Vec<f32> = (0..total).map(column).collect();
            // Parts need not be even.
            let parts = |length: usize| -> Vec<Range<usize>> {
                let end = |rank: usize| if rank == size { length } else { (part(length, size, rank).start + shift * rank.min(1)).min(length) };
                (0..size).map(|rank| end(rank)..end(rank + 1)).collect()
            };
            let limits = Limits { bucket, ..Limits::default() };
            let found: Vec<(Vec<f32>, Vec<f32>)> = std::thread::scope(|scope| {
                let work = |comm: threads::Threads| {
                    let (lengths, parts) = (&lengths, &parts);
                    scope.spawn(move || {
                        let comm: Box<dyn Collectives> = if messages { Box::new(Apart(comm)) } else { Box::new(comm) };
                        let rank = comm.world().rank;
                        let mut values: Vec<f32> = (0..total).map(|index| value(rank, index)).collect();
                        let mut exchange = PartitionedCollectives::default();
                        let pieces = |values: &mut Vec<f32>, act: &mut dyn FnMut(&mut [Piece<'_>])| {
                            let mut rest = &mut values[..];
                            let mut pieces = Vec::new();
                            for &length in lengths {
                                let (now, later) = rest.split_at_mut(length);
                                pieces.push(Piece { values: now.into(), parts: parts(length) });
                                rest = later;
                            }
                            act(&mut pieces);
                        };
                        pieces(&mut values, &mut |pieces| exchange.reduce_scatter(&*comm, pieces).unwrap());
                        let summed = values.clone();
                        pieces(&mut values, &mut |pieces| exchange.all_gather(&*comm, pieces).unwrap());
                        (summed, values)
                    })
                };
                let running: Vec<_> = threads::world(size, limits).into_iter().map(work).collect();
                running.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            for (rank, (summed, gathered)) in found.into_iter().enumerate() {
                prop_assert!(gathered == whole, "the sums in the order of ranks, to the bit");
                let mut start = 0;
                for &length in &lengths {
                    for index in 0..length {
                        let own = parts(length)[rank].contains(&index);
                        let expected = if own { whole[start + index] } else { value(rank, start + index) };
                        prop_assert_eq!(summed[start + index], expected);
                    }
                    start += length;
                }
            }
        }
    }
}
