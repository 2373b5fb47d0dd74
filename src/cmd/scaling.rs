//! `tunesmith plan --scaling`: predicts the speed of up to 1,024 ranks from a model of their communication.
use std::fmt::Write as _;

use serde::Serialize;

use super::columns::columns;
use super::numbers::{number, whole};
use crate::config::{Config, Mode, Range};
use crate::plan::flops::Costs;
use crate::plan::grouped;
use crate::plan::memory::{Device, Predictor};
use crate::plan::scaling::{self, Estimate, Fabric, Link, Pattern, Work};
use crate::plan::strategies::{Batch, Strategy};

/// Flags of the communication model.
#[derive(Debug, Clone, clap::Args)]
pub struct ScalingArgs {
    /// Predict the speed of 1 to 1,024 ranks (needs --tflops, or `tunesmith bench` on the CPU)
    #[arg(long)]
    pub scaling: bool,
    /// Assume this one-way bandwidth between ranks of a machine, in GB/s (default: 300 for GPUs, which is NVLink 4; 2 on the CPU)
    #[arg(long, value_name = "GB/s", requires = "scaling", value_parser = number(Range::greater_than(0.0)))]
    inside: Option<f64>,
    /// Assume this bandwidth of a rank to other machines, in GB/s (default: 45 for GPUs, which is 400 Gb/s InfiniBand; 1.1 on the
    /// CPU)
    #[arg(long, value_name = "GB/s", requires = "scaling", value_parser = number(Range::greater_than(0.0)))]
    between: Option<f64>,
    /// Assume this many ranks in a machine (default: 8 GPUs; 1 on the CPU)
    #[arg(long, value_name = "N", requires = "scaling", value_parser = whole::<u64>(Range::within(1.0, 1024.0)))]
    per_machine: Option<u64>,
}

/// World sizes in the table.
const WORLDS: [u64; 9] = [1, 2, 3, 4, 8, 16, 64, 256, 1024];
const STRATEGIES: [Strategy; 3] = [Strategy::Ddp, Strategy::Zero2, Strategy::Fsdp];

#[derive(Debug, Serialize)]
pub struct Report {
    fabric: Fabric,
    work: Work,
    estimates: Vec<Estimate>,
}

/// Estimates the speed of `predictor`'s job with batches like `batch`, on devices of `speed` FLOP/s each.
pub fn report(
    args: &ScalingArgs,
    config: &Config,
    predictor: &Predictor<'_>,
    batch: &Batch,
    device: Device,
    speed: f64,
) -> Report {
    let gpu = device == Device::Gpu;
    let fabric = Fabric {
        local: args.per_machine.unwrap_or(if gpu { 8 } else { 1 }),
        inside: Link {
            bandwidth: args.inside.unwrap_or(if gpu { 300.0 } else { 2.0 }) * 1e9,
            latency: if gpu { 5e-6 } else { 60e-6 },
        },
        between: Link {
            bandwidth: args.between.unwrap_or(if gpu { 45.0 } else { 1.1 }) * 1e9,
            latency: if gpu { 15e-6 } else { 100e-6 },
        },
        pattern: if gpu { Pattern::Hierarchical } else { Pattern::Pairwise },
    };
    let (rows, passes) = (config.train.batch_size.or(1) as f64, config.train.grad_accum.or(1) as u64);
    let rank = predictor.predict(&batch.pass());
    let one = Costs::new(&predictor.job).of([batch.length as usize], batch.length as f64 - 1.0);
    // With a frozen base, backward costs as much as forward; in full fine-tuning, twice as much.
    let backward = if config.tuning.mode == Mode::Full { 2.0 / 3.0 } else { 0.5 };
    let work = Work {
        compute: one.total() * rows * passes as f64 / speed,
        backward: (one.useful * backward + one.again) / one.total(),
        passes,
        gradients: rank.gradients as f64,
        weights: (rank.weights + rank.trained) as f64,
        segments: predictor.segments().len() as u64,
        bucket: (config.train.ddp_bucket_cap_mb << 20) as f64,
        tokens: rows * passes as f64 * batch.length as f64,
    };
    let estimates = STRATEGIES
        .into_iter()
        .flat_map(|strategy| WORLDS.map(|ranks| scaling::estimate(strategy, &work, &fabric, ranks)))
        .collect();
    Report { fabric, work, estimates }
}

pub fn show(report: &Report) -> String {
    let Report { fabric, work, estimates } = report;
    let giga = |bytes: f64| format!("{:.2}", bytes / 1e9);
    let mut out = format!(
        "\nscaling, predicted: a rank computes {:.3} s a step; {} GB of gradients, {} GB of weights; {} GB/s within a machine of {}, {} GB/s \
         between machines\n",
        work.compute,
        giga(work.gradients),
        giga(work.weights),
        giga(fabric.inside.bandwidth),
        fabric.local,
        giga(fabric.between.bandwidth)
    );
    let heads = ["strategy", "ranks", "GB sent", "ms on the way", "ms not hidden", "tokens/s", "efficiency"];
    let mut lines = vec![heads.map(str::to_owned).to_vec()];
    for one in estimates {
        lines.push(vec![
            one.strategy.name().to_owned(),
            grouped(one.ranks),
            giga(one.bytes),
            format!("{:.1}", 1e3 * one.communication),
            format!("{:.1}", 1e3 * one.exposed),
            grouped(one.tokens_per_second.round() as u64),
            format!("{:.1} %", 100.0 * one.efficiency),
        ]);
    }
    let _ = write!(out, "{}", columns(&lines));
    out
}
