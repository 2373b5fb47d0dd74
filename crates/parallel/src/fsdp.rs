//! Sharded weights, as in FSDP: says which rank keeps which part of a segment, and gathers a segment from all ranks when a
//! pass needs it (`docs/distributed.md`).
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use super::optimizer;
use super::plan::ParallelPlan;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::are;
use tunesmith_comm::comm_thread::CommThread;
use tunesmith_comm::{Collectives, Group, Partition};
use tunesmith_config::Sharding;
use tunesmith_device::{Device, Mark};
use tunesmith_model::ParamSpec;
use tunesmith_model::shards::{Flat, Kind, Peers, Shards};
use tunesmith_optim::UpdateRule;
use tunesmith_optim::optimizer::legal_cuts;

/// Gathers segments of sharded weights. It has communicators of its own, so that its thread can gather a segment while the
/// ranks use other collectives.
#[derive(Debug, Clone)]
pub struct Gatherer {
    /// The group of all ranks, in which they agree on the next pass.
    all: Arc<CommThread>,
    /// The ranks among which frozen weights are sharded: all, or those of this machine.
    group: Arc<CommThread>,
    sharding: Sharding,
    /// The optimizer's rule, which says where trained values may be cut, if they are sharded.
    rule: Option<Arc<dyn UpdateRule>>,
}

impl Gatherer {
    /// Opens the communicators if `plan` shards weights. Every rank calls it.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: the ranks do not meet; [`tunesmith_base::Kind::Io`]: the system has no thread left.
    pub fn new(plan: &ParallelPlan, rule: &Arc<dyn UpdateRule>, comm: &dyn Collectives) -> Result<Option<Self>> {
        let Some(sharding) = plan.weights else { return Ok(None) };
        let thread = |ranks| comm.new_group(ranks).and_then(CommThread::new).map(Arc::new);
        let all = thread(Group::All)?;
        let group = if sharding == Sharding::HybridShard { thread(Group::Node)? } else { Arc::clone(&all) };
        let rule = plan.shards_values().then(|| Arc::clone(rule));
        Ok(Some(Self { all, group, sharding, rule }))
    }

    /// The shards of one model, to load it with.
    pub fn shards(&self) -> Shards {
        Shards::new(Box::new(self.clone()), self.sharding == Sharding::ShardGradOp)
    }
}

/// All-gathers each kind of numbers of a segment: floats, 16-bit numbers, quantized codes, their scales, and trained values.
fn fill(comm: &dyn Collectives, numbers: &mut Flat) -> Result<()> {
    comm.all_gather_numbers(numbers.floats.view_mut())?;
    comm.all_gather_numbers(numbers.halves.view_mut())?;
    comm.all_gather_numbers(numbers.codes.view_mut())?;
    comm.all_gather_numbers(numbers.scales.view_mut())?;
    for stretch in &mut numbers.trained {
        comm.all_gather_parts(stretch.values.view_mut(), &stretch.parts)?;
    }
    Ok(())
}

/// Gathers the parts of `numbers` that other ranks keep. This rank's part is ready from the mark `ready` on. If the engine
/// works on GPU memory, all of them are there from [`Flat::arrived`] on, and the GPU computes meanwhile.
fn complete(comm: &dyn Collectives, mut numbers: Flat, ready: &Mark) -> Result<Flat> {
    let device = numbers.floats.device();
    let copied = std::mem::take(&mut numbers.copied);
    let filled = match comm.on_device() {
        Some(engine) if device == Device::Cuda(engine.queue().ordinal()) => engine.queue().run(|| {
            ready.wait();
            copied.wait();
            fill(comm, &mut numbers)?;
            numbers.arrived = Mark::here(device);
            Ok(())
        }),
        _ => {
            copied.wait();
            fill(comm, &mut numbers)
        }
    };
    if let Err(error) = filled {
        // The GPU may still write there.
        std::mem::forget(numbers);
        return Err(error);
    }
    Ok(numbers)
}

impl Peers for Gatherer {
    fn part(&self, length: usize) -> Range<usize> {
        self.group.world().part(length)
    }

    fn rank(&self) -> usize {
        self.all.world().rank
    }

    fn cuts(&self, specs: &[ParamSpec], start: usize) -> Option<Vec<Range<usize>>> {
        let rule = self.rule.as_deref()?;
        let end = specs.last().map_or(start, |spec| spec.range().end);
        let legal = legal_cuts(rule, &optimizer::slots(specs));
        Some(Partition::new(&[start, end], self.all.world().size, legal).parts(0))
    }

    fn begin(&self, numbers: Flat) -> Receiver<Result<Flat>> {
        let ready = Mark::here(numbers.floats.device());
        self.group.begin(move |comm| complete(comm, numbers, &ready))
    }

    fn next(&self, own: Option<Kind>) -> Result<Option<Kind>> {
        let mut votes = [u64::from(own == Some(Kind::Forward)), u64::from(own == Some(Kind::Train))];
        self.all.idle().all_reduce(&mut votes)?;
        match votes {
            [0, 0] => Ok(None),
            [_, 0] => Ok(Some(Kind::Forward)),
            [0, _] => Ok(Some(Kind::Train)),
            [forward, train] => {
                let rank = self.all.world().rank;
                Err(Error::peer(format!(
                    "rank {rank}: {} at an evaluation, {} at a training step",
                    are(forward, "rank"),
                    are(train, "rank")
                ))
                .hint("start all ranks with the same version and configuration; then continue with --resume"))
            }
        }
    }
}
