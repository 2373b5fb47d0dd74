//! How the ranks of a run share its work, decided once from the configuration.
use tunesmith_comm::Limits;
use tunesmith_config::{GradDtype, Sharding, Strategy as Chosen, TrainConfig};
use tunesmith_plan::strategies::Strategy;

/// The strategy of the ranks: what each keeps, and when gradients are summed. Every rank has the same plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParallelPlan {
    /// The world size: ranks on all machines.
    pub ranks: usize,
    /// The strategy that runs: [`Strategy::Single`] with one rank, [`Strategy::Zero2`] for `hybrid_shard`, and
    /// [`Strategy::Ddp`] for `auto` with several ranks and for `no_shard`.
    pub strategy: Strategy,
    /// If weights are sharded: among which ranks, and whether they stay gathered between forward and backward. Never
    /// [`Sharding::NoShard`].
    pub weights: Option<Sharding>,
    /// Whether gradients are summed over ranks after every pass instead of once per step.
    pub reduce_every_pass: bool,
    /// How gradients are kept between the passes of a step and its update.
    pub grad_dtype: GradDtype,
    /// Bytes of gradients that are summed over ranks at a time.
    pub bucket_bytes: usize,
}

impl ParallelPlan {
    /// The plan of `train` for this many ranks.
    pub fn new(train: &TrainConfig, ranks: usize) -> Self {
        let weights = match train.strategy {
            _ if ranks < 2 => None,
            Chosen::Zero3 => Some(Sharding::FullShard),
            Chosen::Fsdp => Some(train.fsdp_sharding_strategy).filter(|&sharding| sharding != Sharding::NoShard),
            _ => None,
        };
        let strategy = match train.strategy {
            _ if ranks < 2 => Strategy::Single,
            _ if weights == Some(Sharding::HybridShard) => Strategy::Zero2,
            Chosen::Dp => Strategy::Dp,
            Chosen::Zero1 => Strategy::Zero1,
            Chosen::Zero2 => Strategy::Zero2,
            Chosen::Zero3 => Strategy::Zero3,
            Chosen::Fsdp if weights.is_some() => Strategy::Fsdp,
            _ => Strategy::Ddp,
        };
        let shards_gradients = matches!(strategy, Strategy::Zero2 | Strategy::Zero3 | Strategy::Fsdp);
        Self {
            ranks,
            strategy,
            weights,
            reduce_every_pass: shards_gradients || ranks > 1 && train.reduce_every_pass,
            grad_dtype: train.grad_dtype,
            bucket_bytes: train.ddp_bucket_cap_mb << 20,
        }
    }

    /// Every rank keeps everything, and gradients are summed once per step, in float32.
    pub fn ddp(ranks: usize) -> Self {
        Self {
            ranks,
            strategy: if ranks < 2 { Strategy::Single } else { Strategy::Ddp },
            weights: None,
            reduce_every_pass: false,
            grad_dtype: GradDtype::Float32,
            bucket_bytes: Limits::default().bucket,
        }
    }

    /// Whether a rank keeps the optimizer's state of its part of the trained values alone.
    pub const fn shards_optimizer(&self) -> bool {
        self.strategy.shards_optimizer()
    }

    /// Whether a rank keeps the trained values of its part alone.
    pub const fn shards_values(&self) -> bool {
        matches!(self.weights, Some(Sharding::FullShard | Sharding::ShardGradOp))
    }
}
