//! The thread that sums the gradients of a pass over ranks during the backward pass.
use std::sync::mpsc::{Receiver, Sender, SyncSender};
use std::time::Duration;

use super::grad_buffer::{GradSums, zeros};
use super::timeline::Timeline;
use tunesmith_base::error::{Error, Result};
use tunesmith_comm::partitioned_collectives::{PartitionedCollectives, Piece};
use tunesmith_comm::{Collectives, OnDevice, Partition};
use tunesmith_device::{Device, FloatBuffer, Mark, Queue, memory};
use tunesmith_model::grads::{Buffer, Collector};
use tunesmith_plan::human_bytes;

/// A message to the [`Reducer`].
pub(super) enum Message<'g> {
    /// The gradients from this offset of the flat buffer on are final when the mark is reached.
    Gradients(usize, Buffer<'g>, Mark),
    /// The pass is over: segments without gradients count as zero.
    End(Mark),
}

/// A segment's buffer that the reducer no longer needs once the mark is reached. It is memory of the ops' queue, which
/// waits for the mark before the buffer is reused or freed.
pub(super) struct Spare {
    buffer: Option<FloatBuffer>,
    free: Mark,
}

impl Spare {
    /// The buffer, for work that this thread enqueues from now on.
    fn take(mut self) -> FloatBuffer {
        self.free.wait();
        self.buffer.take().unwrap_or_default()
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if self.buffer.is_some() {
            // The error can be ignored: a GPU that fails here also fails for the next caller.
            let _ = memory::guarded(|| {
                self.free.wait();
                Ok(())
            });
        }
    }
}

/// The result of the reducer.
pub(super) struct Reduced {
    /// The error of a collective, if one failed.
    pub(super) done: Result<()>,
    /// The mark from which on the sums are complete.
    pub(super) there: Mark,
    /// Buffers that are not needed any more. They may be freed once the mark is reached.
    pub(super) left: Vec<FloatBuffer>,
}

pub(super) fn send<'g>(sender: &SyncSender<Message<'g>>, message: Message<'g>) -> Result<()> {
    // Only an error ends the thread before `Message::End`.
    sender.send(message).map_err(|_| Error::peer("the ranks' gradients are no longer summed"))
}

/// Sends the gradients of a pass to the [`Reducer`] as the backward pass completes them.
pub(super) struct GradientSender<'g> {
    pub(super) sender: SyncSender<Message<'g>>,
    /// Segment buffers that the reducer no longer needs.
    pub(super) spare: Receiver<Spare>,
    /// Whether segments alternate between two buffers, because their sums are enqueued at once and overlap the
    /// computation.
    pub(super) in_turn: bool,
    /// How many segment buffers the reducer holds.
    pub(super) sent: usize,
    /// The device of the gradients.
    pub(super) device: Device,
    pub(super) clock: Option<Clock<'g>>,
}

/// Records in the timeline when the backward pass has left a segment.
pub(super) struct Clock<'g> {
    pub(super) timeline: &'g Timeline,
    pub(super) partition: &'g Partition,
    /// The number of the pass in its step, from 0.
    pub(super) pass: usize,
    /// When the segment before was complete.
    pub(super) began: Duration,
}

impl<'g> Collector<'g> for GradientSender<'g> {
    fn buffer(&mut self, length: usize) -> FloatBuffer {
        let spare = match (self.in_turn, self.sent) {
            (false, _) => self.spare.try_recv().ok(),
            (true, 0 | 1) => None,
            // Takes the older of the two. It does not wait for long, because a reducer whose segments come out of order waits too.
            (true, _) => self.spare.recv_timeout(Duration::from_secs(1)).ok(),
        };
        self.sent -= usize::from(spare.is_some());
        zeros(spare.map_or_else(|| FloatBuffer::zeros(self.device, 0), Spare::take), length)
    }

    fn take(&mut self, start: usize, gradients: Buffer<'g>) -> Result<()> {
        if let Some(Clock { timeline, partition, pass, began }) = &self.clock {
            let starts = |&segment: &usize| partition.segment(segment).end > start;
            let segment = (0..partition.segments()).find(starts).unwrap_or_default();
            timeline.computed(format!("pass {}, backward to segment {segment}", pass + 1), *began);
        }
        self.sent += usize::from(matches!(gradients, Buffer::Owned(_)));
        send(&self.sender, Message::Gradients(start, gradients, Mark::here(self.device)))?;
        if let Some(clock) = &mut self.clock {
            clock.began = clock.timeline.now();
        }
        Ok(())
    }
}

/// Whether the engine communicates directly from the memory of `device`, without a copy in main memory.
pub(super) fn takes(engine: &dyn OnDevice, device: Device) -> bool {
    device == Device::Cuda(engine.queue().ordinal())
}

/// Sums gradients over ranks, segment by segment from the last to the first. Where all gradients are in one buffer, short
/// segments are summed together.
pub(super) struct Reducer<'r, 'g> {
    pub(super) comm: &'r dyn Collectives,
    pub(super) partition: &'r Partition,
    pub(super) rank: usize,
    /// Whether every rank needs all sums: an all-reduce instead of a reduce-scatter.
    pub(super) gathers: bool,
    /// If each segment has its own buffer: the sums to which it is added.
    pub(super) sums: Option<&'r mut GradSums>,
    /// Whether `sums` holds only this rank's part of each segment, end to end.
    pub(super) packs: bool,
    /// Whether `sums` holds this rank's earlier passes, which are summed over ranks together with this one.
    pub(super) continues: bool,
    pub(super) exchange: &'r mut PartitionedCollectives,
    /// The device of the gradients.
    pub(super) device: Device,
    pub(super) timeline: Option<&'r Timeline>,
    /// Segments with this number and higher are summed already, or are in `group`.
    pub(super) next: usize,
    /// For each segment, its gradients if they came before their turn.
    pub(super) waiting: Vec<Option<Buffer<'g>>>,
    /// The segments of the next reduction, from the last to the first.
    pub(super) group: Vec<(usize, Buffer<'g>)>,
    /// Returns segment buffers to the backward pass, which uses them again.
    pub(super) back: Sender<Spare>,
    /// Buffers that the backward pass does not use again.
    pub(super) left: Vec<FloatBuffer>,
}

impl<'g> Reducer<'_, 'g> {
    /// Sums until [`Message::End`]. If the senders end without it, the rest is not summed. If the engine works on GPU
    /// memory, all work is on the engine's queue, in parallel to the pass.
    pub(super) fn run(mut self, receiver: &Receiver<Message<'g>>) -> Reduced {
        let device = self.device;
        let done = match self.comm.on_device() {
            Some(engine) if takes(engine, device) => engine.queue().run(|| (self.sum(receiver), Mark::here(device))),
            _ => (self.sum(receiver), Mark::here(device)),
        };
        let waiting = self.waiting.into_iter().flatten();
        let buffers = waiting.chain(self.group.into_iter().map(|(_, buffer)| buffer));
        let owned = buffers.filter_map(|buffer| match buffer {
            Buffer::Owned(buffer) => Some(buffer),
            Buffer::Borrowed(_) => None,
        });
        self.left.extend(owned);
        let (done, there) = done;
        Reduced { done, there, left: self.left }
    }

    fn sum(&mut self, receiver: &Receiver<Message<'g>>) -> Result<()> {
        while let Ok(message) = receiver.recv() {
            match message {
                Message::Gradients(start, buffer, there) => {
                    there.wait();
                    self.split(start, buffer);
                    self.advance(false)?;
                }
                Message::End(there) => {
                    there.wait();
                    return self.advance(true);
                }
            }
        }
        Ok(())
    }

    /// Puts the segments of a buffer, which begins at `start` of the flat buffer, into `waiting`.
    fn split(&mut self, start: usize, buffer: Buffer<'g>) {
        match buffer {
            Buffer::Borrowed(mut values) => {
                for index in (0..self.partition.segments()).rev() {
                    let segment = self.partition.segment(index);
                    if segment.start >= start && segment.end == start + values.len() && !segment.is_empty() {
                        let (rest, own) = values.split_at(segment.start - start);
                        self.waiting[index] = Some(Buffer::Borrowed(own));
                        values = rest;
                    }
                }
            }
            buffer @ Buffer::Owned(_) => {
                let is_here = |&index: &usize| {
                    let segment = self.partition.segment(index);
                    segment.start == start && !segment.is_empty()
                };
                if let Some(index) = (0..self.partition.segments()).find(is_here) {
                    self.waiting[index] = Some(buffer);
                }
            }
        }
    }

    /// Sums the segments whose turn it is. With `ends` the pass is over, so that segments without gradients count as zero and
    /// all are summed.
    fn advance(&mut self, ends: bool) -> Result<()> {
        while let Some(index) = self.next.checked_sub(1) {
            let length = self.partition.segment(index).len();
            let buffer = match self.waiting[index].take() {
                Some(buffer) => buffer,
                None if ends || length == 0 => Buffer::Owned(self.no_gradients(length)),
                None => break,
            };
            self.next = index;
            if length > 0 {
                self.group.push((index, buffer));
            }
            let values: usize = self.group.iter().map(|(index, _)| self.partition.segment(*index).len()).sum();
            // A segment's own buffer is summed alone, so that it goes back as soon as possible.
            if self.sums.is_some() || values * size_of::<f32>() >= self.comm.limits().bucket {
                self.sum_group()?;
            }
        }
        if self.next == 0 { self.sum_group() } else { Ok(()) }
    }

    /// Zeros for a segment without gradients, in memory of the ops' queue, like the buffers of the pass.
    fn no_gradients(&self, length: usize) -> FloatBuffer {
        let (zeros, there) = Queue::leave(|| (FloatBuffer::zeros(self.device, length), Mark::here(self.device)));
        there.wait();
        zeros
    }

    fn sum_group(&mut self) -> Result<()> {
        if self.group.is_empty() {
            return Ok(());
        }
        let began = self.timeline.map(Timeline::now);
        let mut group = std::mem::take(&mut self.group);
        let segments = group.iter().map(|(index, _)| *index);
        let indices: Vec<usize> = segments.collect();
        let mut pieces = Vec::with_capacity(group.len());
        for (index, buffer) in &mut group {
            pieces.push(Piece { values: buffer.values(), parts: self.partition.parts(*index) });
        }
        let bytes: usize = pieces.iter().map(|piece| size_of::<f32>() * piece.values.len()).sum();
        if let Some(sums) = self.sums.as_deref_mut().filter(|_| self.continues) {
            for (&index, piece) in indices.iter().zip(&mut pieces) {
                sums.move_to(self.partition.segment(index).start, piece.values.reborrow());
            }
        }
        let mut summed = self.exchange.reduce_scatter(self.comm, &mut pieces);
        if self.gathers {
            summed = summed.and_then(|()| self.exchange.all_gather(self.comm, &mut pieces));
        }
        if let Err(error) = summed {
            drop(pieces);
            self.group = group;
            return Err(error);
        }
        if let Some(sums) = self.sums.as_deref_mut() {
            for (&index, piece) in indices.iter().zip(&pieces) {
                let own = piece.parts[self.rank].clone();
                let before = (0..index).map(|segment| self.partition.part(segment, self.rank).len()).sum::<usize>();
                let start = self.partition.segment(index).start;
                let values = piece.values.view();
                match (self.packs, self.gathers) {
                    (true, _) => sums.add(before, values.slice(own)),
                    (false, true) => sums.add(start, values),
                    (false, false) => sums.add(start + own.start, values.slice(own)),
                }
            }
        }
        if let Some((timeline, began)) = self.timeline.zip(began) {
            let what = match indices.as_slice() {
                [one] => format!("segment {one}"),
                several => format!("segments {} to {}", several[0], several[several.len() - 1]),
            };
            timeline.exchanged(format!("{what}, {}", human_bytes(bytes as u64)), began);
        }
        for (_, buffer) in group {
            if let Buffer::Owned(buffer) = buffer {
                let spare = Spare { buffer: Some(buffer), free: Mark::here(self.device) };
                if let Err(mut unsent) = self.back.send(spare) {
                    // The pass is over.
                    self.left.extend(unsent.0.buffer.take());
                }
            }
        }
        Ok(())
    }
}
