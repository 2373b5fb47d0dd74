//! The strategies for sharing a run among ranks, what each of them shards, and which of them make sense on a machine.
use serde::Serialize;

use crate::memory::Device;

/// The devices that ranks run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Whether ranks compute on CPUs or on GPUs.
    pub device: Device,
    /// How many ranks; each has a device of its own.
    pub ranks: u64,
    /// Bytes of memory of each rank; [`Machine::UNKNOWN`] if they are not known.
    #[serde(skip_serializing_if = "Machine::is_unknown")]
    pub memory: u64,
}

impl Machine {
    /// Stands for unknown memory, such as that of a GPU which is not in this machine.
    pub const UNKNOWN: u64 = u64::MAX;

    #[allow(clippy::trivially_copy_pass_by_ref)] // as serde calls it
    const fn is_unknown(memory: &u64) -> bool {
        *memory == Self::UNKNOWN
    }
}

/// How ranks share a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// One rank, which shares nothing.
    Single,
    /// A copy of the model on each device of one process (`DataParallel`). The first device adds up the gradients.
    Dp,
    /// A copy of everything on each rank.
    Ddp,
    /// A copy on each rank, except that each has a share of the optimizer's state.
    Zero1,
    /// As `zero1`, and a share of the gradients.
    Zero2,
    /// As `zero2`, and a share of the weights.
    Zero3,
    /// As `zero3`, under PyTorch's name.
    Fsdp,
}

impl Strategy {
    /// All, in the order of the table.
    pub const ALL: [Self; 7] = [Self::Single, Self::Dp, Self::Ddp, Self::Zero1, Self::Zero2, Self::Zero3, Self::Fsdp];

    /// The name in configurations, such as `zero2`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Dp => "dp",
            Self::Ddp => "ddp",
            Self::Zero1 => "zero1",
            Self::Zero2 => "zero2",
            Self::Zero3 => "zero3",
            Self::Fsdp => "fsdp",
        }
    }

    /// The share of the devices' speed that remains, in 0..=1. The numbers were published by others and are not
    /// measured: about 95 % if only gradients are sent, 85 % if weights are.
    pub const fn efficiency(self) -> f64 {
        match self {
            Self::Single => 1.0,
            Self::Dp => 0.80,
            Self::Ddp | Self::Zero1 | Self::Zero2 => 0.95,
            Self::Zero3 | Self::Fsdp => 0.85,
        }
    }

    pub(super) const fn shards_weights(self) -> bool {
        matches!(self, Self::Zero3 | Self::Fsdp)
    }

    /// Whether each rank has a share of the optimizer's state.
    pub const fn shards_optimizer(self) -> bool {
        matches!(self, Self::Zero1 | Self::Zero2) || self.shards_weights()
    }
}

/// A strategy, together with what is offloaded to the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Way {
    /// How ranks share the run.
    pub strategy: Strategy,
    /// Whether the optimizer's state is in the host's memory (`train.offload_optimizer`).
    pub offload_optimizer: bool,
}

impl Way {
    /// The strategy with the optimizer's state on the device.
    pub const fn plain(strategy: Strategy) -> Self {
        Self { strategy, offload_optimizer: false }
    }

    /// All ways that make sense on a machine, in the order of the table. `offloaded` says that the configuration
    /// offloads the optimizer already.
    pub(super) fn all(machine: &Machine, offloaded: bool) -> Vec<Self> {
        let mut ways = Vec::new();
        for strategy in Strategy::ALL {
            let alone = machine.ranks == 1;
            if alone && strategy != Strategy::Single {
                continue;
            }
            let plain = Self::plain(strategy);
            ways.push(plain);
            // On the CPU, host and device have the same memory.
            let can = machine.device == Device::Gpu && !offloaded && strategy != Strategy::Dp;
            if can && (alone || strategy != Strategy::Single) {
                ways.push(Self { offload_optimizer: true, ..plain });
            }
        }
        ways
    }

    /// Its name in tables, such as `zero3 + offload`.
    pub fn name(self) -> String {
        let offload = if self.offload_optimizer { " + offload" } else { "" };
        format!("{}{offload}", self.strategy.name())
    }

    /// The position from fast to slow. Of the ways that fit, the one with the lowest number is recommended.
    pub(super) const fn rank(self) -> u8 {
        let strategy = match self.strategy {
            Strategy::Single | Strategy::Ddp => 0,
            Strategy::Zero1 => 1,
            Strategy::Zero2 => 2,
            Strategy::Fsdp => 3,
            Strategy::Zero3 => 4,
            Strategy::Dp => 5,
        };
        strategy + if self.offload_optimizer { 10 } else { 0 }
    }
}
