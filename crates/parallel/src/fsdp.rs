//! Weights that ranks share: who keeps which part of a segment, and how the parts are brought together
//! (`docs/distributed.md`).
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use super::optimizer;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::are;
use tunesmith_comm::comm_thread::CommThread;
use tunesmith_comm::{Collectives, Group, Partition, bytes};
use tunesmith_config::{Sharding, Strategy, TrainConfig};
use tunesmith_model::ParamSpec;
use tunesmith_model::shards::{Flat, Kind, Peers, Shards};
use tunesmith_optim::optimizer::legal_cuts;
use tunesmith_optim::rule;

/// The way to the ranks with which weights are shared. Its messages meet no others: segments are brought together by a
/// thread while the ranks talk about other things.
#[derive(Debug, Clone)]
pub struct Gatherer {
    /// All ranks, which make passes together.
    all: Arc<CommThread>,
    /// Those among whom a segment is divided: all, or those of this machine.
    group: Arc<CommThread>,
    how: Sharding,
    train: Arc<TrainConfig>,
}

/// What a configuration's strategy makes of the weights; nothing where every rank has all of them.
pub fn sharding(train: &TrainConfig) -> Option<Sharding> {
    match train.strategy {
        Strategy::Zero3 => Some(Sharding::FullShard),
        Strategy::Fsdp => Some(train.fsdp_sharding_strategy).filter(|&how| how != Sharding::NoShard),
        _ => None,
    }
}

/// Whether ranks share what is trained too.
pub fn shares_values(train: &TrainConfig) -> bool {
    matches!(sharding(train), Some(Sharding::FullShard | Sharding::ShardGradOp))
}

impl Gatherer {
    /// For a run of several ranks that share weights; nothing for any other. Every rank calls it.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: the ranks do not meet; [`tunesmith_base::Kind::Io`]: the system has no thread left.
    pub fn new(train: &TrainConfig, comm: &dyn Collectives) -> Result<Option<Self>> {
        let Some(how) = sharding(train).filter(|_| comm.world().size > 1) else { return Ok(None) };
        let line = |who| comm.new_group(who).and_then(CommThread::new).map(Arc::new);
        let all = line(Group::All)?;
        let group = if how == Sharding::HybridShard { line(Group::Node)? } else { Arc::clone(&all) };
        Ok(Some(Self { all, group, how, train: Arc::new(train.clone()) }))
    }

    /// For one model.
    pub fn shards(&self) -> Shards {
        Shards::new(Box::new(self.clone()), self.how == Sharding::ShardGradOp)
    }
}

/// Completes every kind of numbers.
fn complete(comm: &dyn Collectives, mut numbers: Flat) -> Result<Flat> {
    comm.all_gather(&mut numbers.floats)?;
    comm.all_gather(&mut numbers.halves)?;
    comm.all_gather(&mut numbers.bytes)?;
    for stretch in &mut numbers.trained {
        let width = size_of::<f32>();
        let parts: Vec<_> = stretch.parts.iter().map(|part| part.start * width..part.end * width).collect();
        comm.all_gather_bytes(bytes::of_mut(&mut stretch.values), &parts)?;
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
        // An optimizer that does not exist has been refused before.
        let rule = rule(&self.train).ok().filter(|_| shares_values(&self.train))?;
        let end = specs.last().map_or(start, |spec| spec.range().end);
        let legal = legal_cuts(&*rule, &optimizer::slots(specs));
        Some(Partition::new(&[start, end], self.all.world().size, legal).parts(0))
    }

    fn begin(&self, numbers: Flat) -> Receiver<Result<Flat>> {
        self.group.begin(|comm| complete(comm, numbers))
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
                .hint("start all ranks with the same version and configuration; then go on with --resume"))
            }
        }
    }
}
