//! Data parallelism: which part of the optimizer state, gradients and trained values each rank keeps, and how a step
//! combines them.
//!
//! ```text
//!               optimizer state   gradients                              values
//! dp, ddp       whole             whole, reduced once a step             whole
//! zero1         sharded           whole, reduced once a step             whole, gathered after the update
//! zero2         sharded           sharded, reduced after each pass       whole, gathered after the update
//! zero3, fsdp   sharded           sharded, reduced after each pass       sharded, gathered segment by segment
//! ```
//!
//! A [`Partition`] says which rank owns which values. It is the same under every strategy, and so is the norm of the
//! gradient. The gradients of a segment are final when the backward pass has left it. A thread then sums them over
//! ranks while the backward pass continues below. Until the pass ends, only this thread uses the collectives, segment
//! by segment from the last to the first, so that all ranks call them in the same order.
use std::ops::Range;
use std::sync::mpsc::{channel, sync_channel};

use super::grad_buffer::GradSums;
use super::plan::ParallelPlan;
use super::reducer::{Clock, GradientSender, Message, Reduced, Reducer, send, takes};
use super::replicas;
use super::timeline::Timeline;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_comm::partitioned_collectives::{PartitionedCollectives, Piece};
use tunesmith_comm::{Collectives, Partition, World};
use tunesmith_config::GradDtype;
use tunesmith_data::batch::Batch;
use tunesmith_device::{Array, FloatBuffer, Floats, FloatsMut, Mark};
use tunesmith_model::{Grads, Model, Params};
use tunesmith_ops::factor::Factor;
use tunesmith_ops::squares::{self, Limits, Verdict};
use tunesmith_optim::{Gradients, Optimizer};

/// One rank's part of a run: what it keeps, and how it works with the other ranks.
#[derive(Debug)]
pub struct Sharing {
    /// Which rank owns which trained values.
    pub partition: Partition,
    /// Records the timeline of the next step, if set.
    pub timeline: Option<Timeline>,
    /// The number of the next step, if the trained values are to be compared with those of the other ranks in it.
    pub compares: Option<u64>,
    rank: usize,
    plan: ParallelPlan,
    /// The gradients of the step so far, if they are reduced after every pass or kept in bfloat16. Otherwise they are in the
    /// gradient buffer of [`Params`], and this is empty.
    sums: GradSums,
    exchange: PartitionedCollectives,
}

/// The outcome of the passes of a step.
#[derive(Debug)]
pub struct Walked {
    /// The first micro-batch that did not fit into memory, and the error.
    pub failed: Option<(usize, Error)>,
}

/// Runs the forward and backward pass of one micro-batch, and adds its gradients to the [`Grads`] and its loss to the model's
/// totals.
type Walk<'a> = dyn FnMut(&mut Model, &Batch, &mut Grads<'_>) -> Result<()> + 'a;

impl Sharing {
    /// Plain DDP, in which every rank keeps everything.
    pub fn copies(params: &Params, optimizer: &Optimizer, world: World) -> Self {
        let partition = partition(params, world.size, optimizer.legal_cuts());
        Self::new(&ParallelPlan::ddp(world.size), partition, world.rank)
    }

    /// The part of rank `rank` in a run with this plan, whose values `partition` divides among the ranks.
    pub fn new(plan: &ParallelPlan, partition: Partition, rank: usize) -> Self {
        let bf16 = plan.grad_dtype == GradDtype::Bfloat16;
        let sums = if bf16 { GradSums::Bf16(Array::default()) } else { GradSums::default() };
        let exchange = PartitionedCollectives::default();
        Self { partition, timeline: None, compares: None, rank, plan: *plan, sums, exchange }
    }

    /// Whether the optimizer's state is sharded: this rank keeps it only for the values that it owns.
    pub const fn shares_state(&self) -> bool {
        self.plan.shards_optimizer()
    }

    /// Whether the trained values are sharded: this rank keeps only those that it owns.
    pub const fn shares_values(&self) -> bool {
        self.plan.shards_values()
    }

    /// The ranges of the flat buffer whose optimizer state this rank keeps.
    pub fn kept(&self) -> Vec<Range<usize>> {
        if self.shares_state() { self.owned() } else { std::iter::once(0..self.everything()).collect() }
    }

    fn everything(&self) -> usize {
        self.partition.segments().checked_sub(1).map_or(0, |last| self.partition.segment(last).end)
    }

    /// Whether `sums` holds only the gradients of the values that this rank owns, end to end. Otherwise bfloat16 sums hold
    /// all gradients, and float32 sums are not used.
    const fn packs(&self) -> bool {
        self.plan.reduce_every_pass && (self.shares_state() || !self.sums.is_narrow())
    }

    fn owned(&self) -> Vec<Range<usize>> {
        self.partition.owned(self.rank)
    }

    /// Makes this rank's passes of a step, one for each of `batches`, and sums the gradients over ranks. `most` is the largest
    /// number of passes of any rank. A rank that runs out of memory still takes part in the reductions, whose results are
    /// then useless.
    ///
    /// # Errors
    /// [`Kind::Peer`]: a rank is gone or late; those of `walk` other than [`Kind::Memory`].
    pub fn passes(
        &mut self,
        model: &mut Model,
        comm: &dyn Collectives,
        batches: &[Batch],
        most: usize,
        walk: &mut Walk<'_>,
    ) -> Result<Walked> {
        let mut walked = Walked { failed: None };
        let (alone, narrow) = (self.partition.ranks() == 1, self.sums.is_narrow());
        let device = model.params.values().device();
        if narrow || self.plan.reduce_every_pass {
            // The buffer for all gradients is not needed.
            model.params.put_grads(FloatBuffer::default());
            let count = if self.packs() { self.partition.count(self.rank) } else { self.everything() };
            self.sums.begin(device, count);
        }
        if self.plan.reduce_every_pass {
            for pass in 0..most {
                let batch = batches.get(pass).filter(|_| walked.failed.is_none());
                let mut walk = |model: &mut Model, grads: &mut Grads<'_>| match batch {
                    Some(batch) => walk(model, batch, grads),
                    None => model.idle(grads),
                };
                walked.add(pass, self.round(model, comm, None, pass, &mut walk)?)?;
            }
            return Ok(walked);
        }
        let mut whole = FloatBuffer::default();
        if !narrow {
            model.params.zero_grads();
            whole = model.params.take_grads();
        }
        let last = batches.len().saturating_sub(1);
        let mut spare = FloatBuffer::zeros(device, 0);
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
                None => Ok(()),
            };
            let whole = (!narrow).then(|| whole.view_mut());
            walked.add(last, self.round(model, comm, whole, last, &mut walk)?)?;
        }
        model.params.put_grads(whole);
        Ok(walked)
    }

    /// One pass whose gradients are reduced segment by segment. With `whole` they are in this buffer. Otherwise each segment
    /// has a buffer of its own, which is then added to `sums`. The outer error comes from the collectives, the inner one from
    /// `walk`.
    fn round(
        &mut self,
        model: &mut Model,
        comm: &dyn Collectives,
        whole: Option<FloatsMut<'_>>,
        pass: usize,
        walk: &mut dyn FnMut(&mut Model, &mut Grads<'_>) -> Result<()>,
    ) -> Result<Result<()>> {
        let timeline = self.timeline.take();
        let device = model.params.values().device();
        // If segments have buffers of their own, the backward pass waits for the thread, so that at most two of them exist.
        // Otherwise it never waits: the channel has a place for every segment, one for the rest, and one for the end.
        let waiting = if whole.is_some() { self.partition.segments() + 2 } else { 0 };
        let (sender, receiver) = sync_channel(waiting);
        let (back, spare) = channel();
        // A reducer with a GPU queue of its own takes gradients at once, even while the GPU still works on earlier ones.
        let in_turn = comm.on_device().is_some_and(|engine| takes(engine, device));
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
            device,
            timeline: timeline.as_ref(),
            next: self.partition.segments(),
            waiting: (0..self.partition.segments()).map(|_| None).collect(),
            group: Vec::new(),
            back,
            left: Vec::new(),
        };
        let done = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("sums".into());
            let thread = match thread.spawn_scoped(scope, move || reducer.run(&receiver)) {
                Ok(thread) => thread,
                Err(error) => return Err(Error::no_thread(&error)),
            };
            let partition = &self.partition;
            let clock = timeline.as_ref().map(|timeline| Clock { timeline, partition, pass, began: timeline.now() });
            let collector = Box::new(GradientSender { sender: sender.clone(), spare, in_turn, sent: 0, device, clock });
            let mut grads = match whole {
                Some(values) => Grads::collected(values, collector),
                None => Grads::by_segment(collector),
            };
            let walked = walk(model, &mut grads);
            let failed = walked.as_ref().is_err_and(|error| error.kind() != Kind::Memory);
            let sent = if failed {
                // The thread ends when every sender is gone.
                drop(grads);
                Ok(())
            } else {
                grads.finish().and_then(|()| send(&sender, Message::End(Mark::here(device))))
            };
            drop(sender);
            let Reduced { done, there, left } = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // What follows reads the sums, and may reuse the memory of the buffers that are left.
            there.wait();
            drop(left);
            // If the thread failed, sending to it failed too. The thread's error is the cause.
            done.and(sent).map(|()| walked)
        });
        self.timeline = timeline;
        done
    }

    /// The global norm of the gradient before clipping. Every rank sums the squares of what it owns, and these sums are added
    /// in the order of ranks.
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
                _ => squares::sum(grads.slice(range)),
            };
            at += length;
        }
        let mut all = [squares];
        comm.all_reduce(&mut all)?;
        Ok(all[0].sqrt())
    }

    /// The norm of the gradient and the clipping factor that follows from it, computed on a GPU while the host continues.
    /// `most` is the maximum norm and `scale` the loss scale, as in [`Limits`]. Returns `None` if several ranks have parts of
    /// the norm, if the model is not on a GPU, or if the optimizer cannot take a factor that the host does not know.
    pub fn verdict(&self, model: &Model, optimizer: &Optimizer, most: f64, scale: f64) -> Option<Verdict> {
        let totals = model.totals.on_gpu()?;
        if self.partition.ranks() > 1 || self.packs() || !optimizer.takes_found_factor() {
            return None;
        }
        let gradients = match &self.sums {
            GradSums::Bf16(sums) => squares::Gradients::Bf16(sums.view()),
            GradSums::F32(_) => squares::Gradients::F32(model.params.grads()),
        };
        Some(squares::verdict(gradients, Limits { totals, other: model.totals.on_host(), most, scale }))
    }

    /// Compares the trained values with those of the other ranks, if [`Sharing::compares`] is set. Must be called
    /// before the update, which copies the owner's values to all ranks, right or wrong.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Numeric`], naming the ranks that differ; [`tunesmith_base::Kind::Peer`].
    pub fn compare(&mut self, comm: &dyn Collectives, model: &Model) -> Result<()> {
        self.compares.take().map_or(Ok(()), |step| replicas::compare_replicas(comm, model.params.values(), step))
    }

    /// Updates the values whose optimizer state this rank keeps, then gathers all values on every rank that keeps all.
    ///
    /// # Errors
    /// [`Kind::Peer`].
    pub fn update(
        &mut self,
        model: &mut Model,
        optimizer: &mut Optimizer,
        comm: &dyn Collectives,
        factor: Factor<'_>,
        rate: f64,
    ) -> Result<()> {
        if self.packs() && !self.shares_state() {
            // Every rank has the state of all values and updates them all.
            model.params.zero_grads();
            let (sums, mut at) = (self.sums.floats(), 0);
            for range in self.partition.owned(self.rank) {
                let end = at + range.len();
                model.params.split_mut().1.slice(range).copy_from(sums.slice(at..end));
                at = end;
            }
            gather(&self.partition, &mut self.exchange, comm, model.params.split_mut().1)?;
        }
        let began = self.timeline.as_ref().map(Timeline::now);
        let (values, grads) = model.params.split_mut();
        let summed = self.sums.is_narrow() || self.packs() && self.shares_state();
        let grads = if summed { self.sums.gradients() } else { Gradients::F32(grads.view()) };
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

    /// Fills in the values that other ranks own: an all-gather of the flat buffer.
    ///
    /// # Errors
    /// [`Kind::Peer`].
    pub fn gather(&mut self, comm: &dyn Collectives, values: FloatsMut<'_>) -> Result<()> {
        gather(&self.partition, &mut self.exchange, comm, values)
    }

    /// The part of a flat buffer that this rank owns, end to end.
    pub fn pack(&self, values: Floats<'_>) -> FloatBuffer {
        let mut packed = FloatBuffer::zeros(values.device(), 0);
        packed.reserve(self.partition.count(self.rank));
        for range in self.owned() {
            packed.append(values.slice(range));
        }
        packed
    }

    /// Swaps the part of the flat buffer `values` that this rank owns with `packed`.
    pub fn swap(&self, mut values: FloatsMut<'_>, packed: FloatsMut<'_>) {
        let mut rest = packed;
        for range in self.owned() {
            let (now, later) = rest.split_at(range.len());
            values.reborrow().slice(range).swap(now);
            rest = later;
        }
    }
}

/// Divides a model's trained values among ranks. `legal` maps a place of the flat buffer to the nearest one where it may be
/// cut.
pub fn partition(params: &Params, ranks: usize, legal: impl Fn(usize) -> usize) -> Partition {
    if ranks == 1 { Partition::alone(params.len()) } else { Partition::new(&params.segments(), ranks, legal) }
}

impl Walked {
    /// Adds the outcome of a pass. Running out of memory is no error yet.
    fn add(&mut self, pass: usize, done: Result<()>) -> Result<()> {
        match done {
            Ok(()) => {}
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
    values: FloatsMut<'_>,
) -> Result<()> {
    let (mut rest, mut pieces) = (values, Vec::new());
    for segment in 0..partition.segments() {
        let (values, later) = rest.split_at(partition.segment(segment).len());
        pieces.push(Piece { values, parts: partition.parts(segment) });
        rest = later;
    }
    exchange.all_gather(comm, &mut pieces)
}
