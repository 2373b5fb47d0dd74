//! How the ranks of a run share what they train: which of them keeps what, and how their gradients come together while
//! backward still goes on.
//!
//! ```text
//!               optimizer's state   gradients                        values
//! dp, ddp       every rank's own    whole, summed once a step        whole
//! zero1         a share a rank      whole, summed once a step        whole, gathered after the update
//! zero2         a share a rank      a share, summed after each pass  whole, gathered after the update
//! zero3, fsdp   a share a rank      a share, summed after each pass  a share, gathered segment by segment (`shard`)
//! ```
//!
//! Who owns what says a [`Partition`]; it is the same for all of them, so that the norm of the gradient is too. The gradients
//! of a segment are final when backward has left it: from then on a thread sums them over ranks while the segments below
//! are walked. It alone talks to the other ranks meanwhile, about one segment after the other from the last to the first, so
//! that all do the same in the same order.
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::Duration;

use super::grad_buffer::{Sums, room};
use super::plan::ParallelPlan;
use super::replicas;
use super::timeline::Timeline;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_comm::partitioned_collectives::{PartitionedCollectives, Piece};
use tunesmith_comm::{Collectives, Partition, World};
use tunesmith_config::GradDtype;
use tunesmith_data::batch::Batch;
use tunesmith_model::grads::{Buffer, Collector};
use tunesmith_model::{Grads, Model, Params};
use tunesmith_optim::{Gradients, Optimizer, clip};
use tunesmith_plan::human_bytes;

/// Who keeps what, and what is kept for it.
#[derive(Debug)]
pub struct Sharing {
    /// Who owns what.
    pub partition: Partition,
    /// What the next step did when, where that is wanted.
    pub timeline: Option<Timeline>,
    /// The next step by number, where the values that it is computed with are then held against those of the other ranks.
    pub compares: Option<u64>,
    rank: usize,
    plan: ParallelPlan,
    /// The sums of the gradients where they are summed after every pass, or kept in bfloat16.
    sums: Sums,
    exchange: PartitionedCollectives,
}

/// What the walks of a step came to.
#[derive(Debug)]
pub struct Walked {
    /// The sum of this rank's losses.
    pub total: f64,
    /// The first micro-batch that did not fit into memory.
    pub failed: Option<(usize, Error)>,
}

/// The walk of one micro-batch.
type Walk<'a> = dyn FnMut(&mut Model, &Batch, &mut Grads<'_>) -> Result<f64> + 'a;

impl Sharing {
    /// Ranks that keep everything.
    pub fn copies(params: &Params, optimizer: &Optimizer, world: World) -> Self {
        let partition = partition(params, world.size, optimizer.legal_cuts());
        Self::new(&ParallelPlan::ddp(world.size), partition, world.rank)
    }

    /// The share of one rank; `partition` is that of all ranks.
    pub fn new(plan: &ParallelPlan, partition: Partition, rank: usize) -> Self {
        let bf16 = plan.grad_dtype == GradDtype::Bfloat16;
        let sums = if bf16 { Sums::Bf16(Vec::new()) } else { Sums::default() };
        let exchange = PartitionedCollectives::default();
        Self { partition, timeline: None, compares: None, rank, plan: *plan, sums, exchange }
    }

    /// Whether each rank keeps the optimizer's state of what it owns alone.
    pub const fn shares_state(&self) -> bool {
        self.plan.shards_optimizer()
    }

    /// Whether each rank keeps the values of what it owns alone.
    pub const fn shares_values(&self) -> bool {
        self.plan.shards_values()
    }

    /// The flat ranges whose state this rank keeps.
    pub fn kept(&self) -> Vec<Range<usize>> {
        if self.shares_state() { self.owned() } else { std::iter::once(0..self.everything()).collect() }
    }

    fn everything(&self) -> usize {
        self.partition.segments().checked_sub(1).map_or(0, |last| self.partition.segment(last).end)
    }

    /// Whether the sums are those of what this rank owns, end to end. In bfloat16 they otherwise are those of everything;
    /// in float32 the buffer for all gradients then has them.
    const fn packs(&self) -> bool {
        self.plan.reduce_every_pass && (self.shares_state() || !self.sums.is_narrow())
    }

    fn owned(&self) -> Vec<Range<usize>> {
        self.partition.owned(self.rank)
    }

    /// Walks this rank's micro-batches of a step and sums the gradients over ranks. `most` is how many passes the rank with
    /// the most of them has. A rank that has no room for a pass goes on to take part in the sums, which are then of no use.
    ///
    /// # Errors
    /// [`Kind::Peer`]: a rank is gone or late; those of a walk other than [`Kind::Memory`].
    pub fn passes(
        &mut self,
        model: &mut Model,
        comm: &dyn Collectives,
        batches: &[Batch],
        most: usize,
        walk: &mut Walk<'_>,
    ) -> Result<Walked> {
        let mut walked = Walked { total: 0.0, failed: None };
        let (alone, narrow) = (self.partition.ranks() == 1, self.sums.is_narrow());
        if narrow || self.plan.reduce_every_pass {
            // Nobody needs the buffer for all.
            model.params.put_grads(Vec::new());
            let count = if self.packs() { self.partition.count(self.rank) } else { self.everything() };
            self.sums.begin(count);
        }
        if self.plan.reduce_every_pass {
            for pass in 0..most {
                let batch = batches.get(pass).filter(|_| walked.failed.is_none());
                let mut walk = |model: &mut Model, grads: &mut Grads<'_>| match batch {
                    Some(batch) => walk(model, batch, grads),
                    None => model.idle(grads).map(|()| 0.0),
                };
                walked.add(pass, self.round(model, comm, None, pass, &mut walk)?)?;
            }
            return Ok(walked);
        }
        let mut whole = Vec::new();
        if !narrow {
            model.params.zero_grads();
            whole = model.params.take_grads();
        }
        let last = batches.len().saturating_sub(1);
        let mut spare = Vec::new();
        for (pass, batch) in batches[..if alone { batches.len() } else { last }].iter().enumerate() {
            let began = self.timeline.as_ref().map(Timeline::now);
            let mut grads = if narrow { self.sums.grads(&mut spare) } else { Grads::whole(&mut whole) };
            let done = walk(model, batch, &mut grads);
            grads.finish()?;
            if let Some((timeline, began)) = self.timeline.as_ref().zip(began) {
                timeline.computed(format!("pass {}, forward and backward", pass + 1), began);
            }
            walked.add(pass, done)?;
            if walked.failed.is_some() {
                break;
            }
        }
        drop(spare);
        if !alone {
            let batch = batches.get(last).filter(|_| walked.failed.is_none());
            let mut walk = |model: &mut Model, grads: &mut Grads<'_>| match batch {
                Some(batch) => walk(model, batch, grads),
                None => Ok(0.0),
            };
            let whole = (!narrow).then_some(&mut whole[..]);
            walked.add(last, self.round(model, comm, whole, last, &mut walk)?)?;
        }
        model.params.put_grads(whole);
        Ok(walked)
    }

    /// One pass whose gradients are summed over ranks segment by segment. They lie in `whole`, or in rooms, and are then added
    /// to the sums. Outer error: the ranks; inner: the walk.
    fn round(
        &mut self,
        model: &mut Model,
        comm: &dyn Collectives,
        whole: Option<&mut [f32]>,
        pass: usize,
        walk: &mut dyn FnMut(&mut Model, &mut Grads<'_>) -> Result<f64>,
    ) -> Result<Result<f64>> {
        let timeline = self.timeline.take();
        // Rooms wait for the thread, so that there are no more than two. What lies in one buffer does not: room for every
        // segment, a rest and the end.
        let waiting = if whole.is_some() { self.partition.segments() + 2 } else { 0 };
        let (sender, receiver) = sync_channel(waiting);
        let (back, rooms) = channel();
        let (packs, shares_state) = (self.packs(), self.shares_state());
        let reducer = Reducer {
            comm,
            partition: &self.partition,
            rank: self.rank,
            gathers: !shares_state && !packs,
            sums: whole.is_none().then_some(&mut self.sums),
            packs,
            continues: !self.plan.reduce_every_pass,
            exchange: &mut self.exchange,
            timeline: timeline.as_ref(),
            next: self.partition.segments(),
            waiting: (0..self.partition.segments()).map(|_| None).collect(),
            group: Vec::new(),
        };
        let done = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("sums".into());
            let thread = match thread.spawn_scoped(scope, move || reducer.run(&receiver, &back)) {
                Ok(thread) => thread,
                Err(error) => return Err(Error::no_thread(&error)),
            };
            let partition = &self.partition;
            let clock = timeline.as_ref().map(|timeline| Clock { timeline, partition, pass, began: timeline.now() });
            let hand = Hand { sender: sender.clone(), rooms, clock };
            let mut grads = match whole {
                Some(values) => Grads::handed(values, Box::new(hand)),
                None => Grads::rooms(Box::new(hand)),
            };
            let walked = walk(model, &mut grads);
            let given_up = walked.as_ref().is_err_and(|error| error.kind() != Kind::Memory);
            let handed = if given_up {
                // The thread waits for more as long as anybody could hand it something.
                drop(grads);
                Ok(())
            } else {
                grads.finish().and_then(|()| send(&sender, Handed::End))
            };
            drop(sender);
            let summed = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // What ended the thread is the cause of what could not be handed to it.
            summed.and(handed).map(|()| walked)
        });
        self.timeline = timeline;
        done
    }

    /// The norm of the gradient before clipping: every rank sums what it owns, and the sums are added in the order of ranks.
    ///
    /// # Errors
    /// [`Kind::Peer`].
    pub fn norm(&self, comm: &dyn Collectives, model: &Model) -> Result<f64> {
        let grads = model.params.grads();
        let mut squares = 0.0;
        let mut at = 0;
        for range in self.owned() {
            let length = range.len();
            squares += match &self.sums {
                sums if self.packs() => sums.squares(at..at + length),
                sums if sums.is_narrow() => sums.squares(range),
                _ => clip::squares(&grads[range]),
            };
            at += length;
        }
        let mut all = [squares];
        comm.all_reduce(&mut all)?;
        Ok(all[0].sqrt())
    }

    /// Holds the values against those of the other ranks, where that is wanted. Before the update: it spreads what an owner has,
    /// right or wrong, to ranks that share the state.
    ///
    /// # Errors
    /// As [`replicas::compare_replicas`].
    pub fn compare(&mut self, comm: &dyn Collectives, model: &Model) -> Result<()> {
        self.compares.take().map_or(Ok(()), |step| replicas::compare_replicas(comm, model.params.values(), step))
    }

    /// Updates what this rank keeps the state of, and brings all values to every rank.
    ///
    /// # Errors
    /// [`Kind::Peer`].
    pub fn update(
        &mut self,
        model: &mut Model,
        optimizer: &mut Optimizer,
        comm: &dyn Collectives,
        factor: f32,
        rate: f64,
    ) -> Result<()> {
        if self.packs() && !self.shares_state() {
            // Every rank updates everything.
            model.params.zero_grads();
            let mut rest = self.sums.floats();
            for range in self.partition.owned(self.rank) {
                let (now, later) = rest.split_at(range.len());
                model.params.split_mut().1[range].copy_from_slice(now);
                rest = later;
            }
            gather(&self.partition, &mut self.exchange, comm, model.params.split_mut().1)?;
        }
        let began = self.timeline.as_ref().map(Timeline::now);
        let (values, grads) = model.params.split_mut();
        let summed = self.sums.is_narrow() || self.packs() && self.shares_state();
        let grads = if summed { self.sums.gradients() } else { Gradients::F32(grads) };
        optimizer.update(values, grads, factor, rate);
        if let Some((timeline, began)) = self.timeline.as_ref().zip(began) {
            timeline.computed("update", began);
        }
        if self.shares_state() && !self.shares_values() {
            let began = self.timeline.as_ref().map(Timeline::now);
            self.gather(comm, model.params.values_mut())?;
            if let Some((timeline, began)) = self.timeline.as_ref().zip(began) {
                timeline.exchanged("values", began);
            }
        }
        Ok(())
    }

    /// Fills in the values that other ranks own.
    ///
    /// # Errors
    /// [`Kind::Peer`].
    pub fn gather(&mut self, comm: &dyn Collectives, values: &mut [f32]) -> Result<()> {
        gather(&self.partition, &mut self.exchange, comm, values)
    }

    /// What this rank owns of a buffer for all, end to end.
    pub fn pack(&self, values: &[f32]) -> Vec<f32> {
        let mut packed = Vec::with_capacity(self.partition.count(self.rank));
        self.owned().into_iter().for_each(|range| packed.extend_from_slice(&values[range]));
        packed
    }

    /// Changes what this rank owns of a buffer for all with what is packed.
    pub fn swap(&self, values: &mut [f32], packed: &mut [f32]) {
        let mut rest = packed;
        for range in self.owned() {
            let (now, later) = rest.split_at_mut(range.len());
            values[range].swap_with_slice(now);
            rest = later;
        }
    }
}

/// Who owns what of a model's trained values, which may be cut where `legal` says.
pub fn partition(params: &Params, ranks: usize, legal: impl Fn(usize) -> usize) -> Partition {
    if ranks == 1 { Partition::alone(params.len()) } else { Partition::new(&params.segments(), ranks, legal) }
}

impl Walked {
    /// Takes the outcome of a pass into account.
    fn add(&mut self, pass: usize, done: Result<f64>) -> Result<()> {
        match done {
            Ok(loss) => self.total += loss,
            Err(error) if error.kind() == Kind::Memory => {
                self.failed.get_or_insert((pass, error));
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

fn gather(
    partition: &Partition,
    exchange: &mut PartitionedCollectives,
    comm: &dyn Collectives,
    values: &mut [f32],
) -> Result<()> {
    let (mut rest, mut pieces) = (values, Vec::new());
    for segment in 0..partition.segments() {
        let (values, later) = rest.split_at_mut(partition.segment(segment).len());
        pieces.push(Piece { values, parts: partition.parts(segment) });
        rest = later;
    }
    exchange.all_gather(comm, &mut pieces)
}

/// What goes to the thread.
enum Handed<'g> {
    /// The gradients from a flat place on are final.
    Gradients(usize, Buffer<'g>),
    /// No more of them come: what is missing is zero.
    End,
}

fn send<'g>(sender: &SyncSender<Handed<'g>>, handed: Handed<'g>) -> Result<()> {
    // Only an error ends the thread before it is told to.
    sender.send(handed).map_err(|_| Error::peer("the ranks' gradients are no longer summed"))
}

/// Hands gradients to the thread.
struct Hand<'g> {
    sender: SyncSender<Handed<'g>>,
    rooms: Receiver<Vec<f32>>,
    clock: Option<Clock<'g>>,
}

/// Since when a pass is on its way to the next segment's gradients.
struct Clock<'g> {
    timeline: &'g Timeline,
    partition: &'g Partition,
    pass: usize,
    began: Duration,
}

impl<'g> Collector<'g> for Hand<'g> {
    fn room(&mut self, length: usize) -> Vec<f32> {
        room(self.rooms.try_recv().unwrap_or_default(), length)
    }

    fn take(&mut self, start: usize, gradients: Buffer<'g>) -> Result<()> {
        if let Some(Clock { timeline, partition, pass, began }) = &self.clock {
            let starts = |&segment: &usize| partition.segment(segment).end > start;
            let segment = (0..partition.segments()).find(starts).unwrap_or_default();
            timeline.computed(format!("pass {}, backward to segment {segment}", pass + 1), *began);
        }
        send(&self.sender, Handed::Gradients(start, gradients))?;
        if let Some(clock) = &mut self.clock {
            clock.began = clock.timeline.now();
        }
        Ok(())
    }
}

/// Sums gradients over ranks, segment by segment from the last to the first; short ones together where they lie in one
/// buffer.
struct Reducer<'r, 'g> {
    comm: &'r dyn Collectives,
    partition: &'r Partition,
    rank: usize,
    /// Every rank needs all sums.
    gathers: bool,
    /// What the sums are added to, where gradients lie in rooms: those of what this rank owns, or of everything.
    sums: Option<&'r mut Sums>,
    packs: bool,
    /// They hold what this rank has summed by itself, which becomes part of what is summed over ranks.
    continues: bool,
    exchange: &'r mut PartitionedCollectives,
    timeline: Option<&'r Timeline>,
    /// The segments from here on have been summed or are in the group.
    next: usize,
    /// Gradients by segment, which came before their turn.
    waiting: Vec<Option<Buffer<'g>>>,
    /// What goes into the next message: segments, falling.
    group: Vec<(usize, Buffer<'g>)>,
}

impl<'g> Reducer<'_, 'g> {
    /// Works until it is told that no more comes; nothing more is summed where nobody says so.
    fn run(mut self, receiver: &Receiver<Handed<'g>>, back: &Sender<Vec<f32>>) -> Result<()> {
        let mut done = Ok(());
        while let Ok(handed) = receiver.recv() {
            let ends = matches!(handed, Handed::End);
            if let Handed::Gradients(start, buffer) = handed {
                self.lay(start, buffer);
            }
            done = self.advance(ends, back);
            if ends || done.is_err() {
                break;
            }
        }
        done
    }

    /// Takes gradients apart into those of segments.
    fn lay(&mut self, start: usize, buffer: Buffer<'g>) {
        match buffer {
            Buffer::Lent(mut values) => {
                for index in (0..self.partition.segments()).rev() {
                    let segment = self.partition.segment(index);
                    if segment.start >= start && segment.end == start + values.len() && !segment.is_empty() {
                        let (rest, own) = values.split_at_mut(segment.start - start);
                        self.waiting[index] = Some(Buffer::Lent(own));
                        values = rest;
                    }
                }
            }
            room @ Buffer::Room(_) => {
                let is_here = |&index: &usize| {
                    let segment = self.partition.segment(index);
                    segment.start == start && !segment.is_empty()
                };
                if let Some(index) = (0..self.partition.segments()).find(is_here) {
                    self.waiting[index] = Some(room);
                }
            }
        }
    }

    /// Goes as far as there is something to sum; at the end, to the first segment.
    fn advance(&mut self, ends: bool, back: &Sender<Vec<f32>>) -> Result<()> {
        while let Some(index) = self.next.checked_sub(1) {
            let length = self.partition.segment(index).len();
            let buffer = match self.waiting[index].take() {
                Some(buffer) => buffer,
                None if ends || length == 0 => Buffer::Room(vec![0.0; length]),
                None => break,
            };
            self.next = index;
            if length > 0 {
                self.group.push((index, buffer));
            }
            let values: usize = self.group.iter().map(|(index, _)| self.partition.segment(*index).len()).sum();
            // Rooms are given back as soon as can be.
            if self.sums.is_some() || values * size_of::<f32>() >= self.comm.limits().bucket {
                self.sum_group(back)?;
            }
        }
        if self.next == 0 { self.sum_group(back) } else { Ok(()) }
    }

    fn sum_group(&mut self, back: &Sender<Vec<f32>>) -> Result<()> {
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
        let bytes: usize = pieces.iter().map(|piece| size_of_val(piece.values)).sum();
        if let Some(sums) = self.sums.as_deref_mut().filter(|_| self.continues) {
            for (&index, piece) in indices.iter().zip(&mut pieces) {
                sums.move_to(self.partition.segment(index).start, piece.values);
            }
        }
        self.exchange.reduce_scatter(self.comm, &mut pieces)?;
        if self.gathers {
            self.exchange.all_gather(self.comm, &mut pieces)?;
        }
        if let Some(sums) = self.sums.as_deref_mut() {
            for (&index, piece) in indices.iter().zip(&pieces) {
                let own = piece.parts[self.rank].clone();
                let before = (0..index).map(|segment| self.partition.part(segment, self.rank).len()).sum::<usize>();
                let start = self.partition.segment(index).start;
                match (self.packs, self.gathers) {
                    (true, _) => sums.add(before, &piece.values[own]),
                    (false, true) => sums.add(start, piece.values),
                    (false, false) => sums.add(start + own.start, &piece.values[own]),
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
            if let Buffer::Room(room) = buffer {
                // Nobody may be there any more who needs one.
                let _ = back.send(room);
            }
        }
        Ok(())
    }
}
