//! Estimates how fast many ranks train, also on machines that do not exist: from the bytes that a step sends, the links
//! that they travel over, and the part of the communication that overlaps with computing. `docs/scaling.md` compares
//! the estimates with measurements.
//!
//! A message of B bytes takes `latency + B / bandwidth` (Thakur, Rabenseifner and Gropp, "Optimization of Collective
//! Communication Operations in MPICH", 2005).
//!
//! ```text
//! gather(B, n)  = (n-1)/n B / bandwidth + messages latency           all-gather and reduce-scatter of B bytes alike
//! all-reduce    = 2 gather
//! exposed(C, W) = max(C - W, C / pieces)      communication C beside computing W; the last piece never overlaps
//! step          = compute + exposed communication
//! ```
use super::strategies::Strategy;
use serde::Serialize;

/// A network connection, as one rank sees it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Link {
    /// Bytes a second, in each direction.
    pub bandwidth: f64,
    /// Seconds that a message takes in addition to the time for its bytes.
    pub latency: f64,
}

/// How the ranks of a collective exchange messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Every rank sends to every other: tunesmith over Gloo and over threads.
    Pairwise,
    /// A ring within a machine and a tree between machines: NCCL.
    Hierarchical,
}

/// The connections between ranks, within a machine and between machines.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Fabric {
    /// How many ranks share a machine.
    pub local: u64,
    /// The link between two ranks of a machine.
    pub inside: Link,
    /// The connection between machines: the share of it that each rank gets.
    pub between: Link,
    /// The order in which ranks exchange messages.
    pub pattern: Pattern,
}

/// The work of one rank in an optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Work {
    /// Seconds of computing, all micro-batches together.
    pub compute: f64,
    /// The share of `compute` that is the backward pass, in 0..1.
    pub backward: f64,
    /// How many micro-batches a step has.
    pub passes: u64,
    /// Bytes of all gradients. The trained values take as many.
    pub gradients: f64,
    /// Bytes of all weights; frozen ones in the precision in which they are held.
    pub weights: f64,
    /// Segments of the model that `zero3` gathers one after another.
    pub segments: u64,
    /// Bytes of gradients that are reduced in one collective (`train.ddp_bucket_cap_mb`).
    pub bucket: f64,
    /// Tokens of the step on this rank.
    pub tokens: f64,
}

/// The estimate for an optimizer step on `ranks` ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// The number of ranks of this estimate.
    pub ranks: u64,
    /// How the ranks share the run.
    pub strategy: Strategy,
    /// Bytes that a rank sends in a step.
    pub bytes: f64,
    /// Seconds of communication in a step, overlapping or not.
    pub communication: f64,
    /// Seconds of communication that do not overlap with computing.
    pub exposed: f64,
    /// Seconds of the step: computing and `exposed`.
    pub step: f64,
    /// Tokens per second of all ranks together.
    pub tokens_per_second: f64,
    /// `tokens_per_second` divided by the speed of as many ranks that do not communicate, in 0..=1.
    pub efficiency: f64,
}

/// Seconds of an all-gather or a reduce-scatter over `ranks`. `bytes` is the sum of all ranks' parts.
pub fn gather(fabric: &Fabric, bytes: f64, ranks: u64) -> f64 {
    if ranks < 2 {
        return 0.0;
    }
    let Fabric { local, inside, between, pattern } = *fabric;
    let (n, l) = (ranks as f64, local.clamp(1, ranks) as f64);
    let machines = (n / l).ceil();
    match pattern {
        Pattern::Pairwise => {
            let near = (l - 1.0) / n * bytes / inside.bandwidth + (l - 1.0) * inside.latency;
            let far = (n - l) / n * bytes / between.bandwidth + (n - l) * between.latency;
            near + far
        }
        Pattern::Hierarchical => {
            let near = (l - 1.0) / l * bytes / inside.bandwidth + (l - 1.0) * inside.latency;
            let far =
                (machines - 1.0) / machines * bytes / l / between.bandwidth + machines.log2().ceil() * between.latency;
            near + far
        }
    }
}

/// Seconds of communication that do not overlap, if `cost` seconds in `pieces` pieces run beside `window` seconds of
/// computing. The last piece never overlaps.
fn exposed(cost: f64, window: f64, pieces: f64) -> f64 {
    (cost - window).max(cost / pieces.max(1.0))
}

/// Estimates an optimizer step of `ranks` ranks, each with the same work.
pub fn estimate(strategy: Strategy, work: &Work, fabric: &Fabric, ranks: u64) -> Estimate {
    let Work { compute, backward, passes, gradients, weights, segments, bucket, tokens } = *work;
    let many = passes.max(1) as f64;
    let (back, forth) = (compute * backward / many, compute * (1.0 - backward) / many);
    let pieces = (gradients / bucket).ceil().max(1.0);
    // Each bucket is a collective of its own.
    let of_gradients = pieces * gather(fabric, gradients / pieces, ranks);
    let parts = segments.max(1) as f64;
    let of_weights = parts * gather(fabric, weights / parts, ranks);
    let sent = |bytes: f64| if ranks < 2 { 0.0 } else { (ranks - 1) as f64 / ranks as f64 * bytes };
    let (bytes, communication, exposed) = match strategy {
        _ if ranks < 2 => (0.0, 0.0, 0.0),
        Strategy::Single => (0.0, 0.0, 0.0),
        // One device adds up all gradients, and sends the sum to the others.
        Strategy::Dp => (2.0 * gradients, 2.0 * of_gradients * ranks as f64, 2.0 * of_gradients * ranks as f64),
        Strategy::Ddp => {
            let cost = 2.0 * of_gradients;
            (2.0 * sent(gradients), cost, exposed(cost, back, pieces))
        }
        Strategy::Zero1 | Strategy::Zero2 => {
            // ZeRO-2 keeps no whole gradient, so it reduces after every micro-batch. Updated values are gathered while
            // nothing is computed.
            let sums = if strategy == Strategy::Zero2 { many } else { 1.0 };
            let left = sums * exposed(of_gradients, back, pieces) + of_gradients;
            ((sums + 1.0) * sent(gradients), (sums + 1.0) * of_gradients, left)
        }
        Strategy::Zero3 | Strategy::Fsdp => {
            let gathers = many * 2.0;
            let gathered = exposed(of_weights, forth, parts) + exposed(of_weights, back, parts);
            let left = many * (gathered + exposed(of_gradients, back, pieces));
            let cost = gathers * of_weights + many * of_gradients;
            (gathers * sent(weights) + many * sent(gradients), cost, left)
        }
    };
    let step = compute + exposed;
    Estimate {
        ranks,
        strategy,
        bytes,
        communication,
        exposed,
        step,
        tokens_per_second: tokens * ranks as f64 / step,
        efficiency: compute / step,
    }
}

/// Bandwidth and latency of a link, from two measurements of [`gather`] on `ranks` ranks of one machine. `small` and
/// `large` are pairs of bytes and seconds. `None` if the larger one took no longer than the smaller one.
pub fn fit(ranks: u64, small: (f64, f64), large: (f64, f64)) -> Option<Link> {
    let n = ranks as f64;
    let ((few, short), (many, long)) = (small, large);
    let per_byte = (long - short) / (many - few);
    (ranks > 1 && per_byte > 0.0)
        .then(|| Link { bandwidth: (n - 1.0) / n / per_byte, latency: ((short - few * per_byte) / (n - 1.0)).max(0.0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FABRIC: Fabric = Fabric {
        local: 8,
        inside: Link { bandwidth: 100e9, latency: 5e-6 },
        between: Link { bandwidth: 25e9, latency: 10e-6 },
        pattern: Pattern::Hierarchical,
    };

    fn work() -> Work {
        Work {
            compute: 1.0,
            backward: 0.5,
            passes: 1,
            gradients: 4e9,
            weights: 16e9,
            segments: 34,
            bucket: 25.0 * 1024.0 * 1024.0,
            tokens: 8192.0,
        }
    }

    #[test]
    fn one_rank_sends_nothing() {
        for strategy in Strategy::ALL {
            let one = estimate(strategy, &work(), &FABRIC, 1);
            assert_eq!((one.bytes, one.exposed, one.efficiency), (0.0, 0.0, 1.0), "{strategy:?}");
        }
    }

    #[test]
    fn bytes_are_those_of_the_papers() {
        // ZeRO (Rajbhandari et al., 2020): 2 G for data parallelism, ZeRO-1 and -2; and 2 W + G with all weights shared.
        let most = |strategy| estimate(strategy, &work(), &FABRIC, 1 << 20).bytes;
        let near = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 1e-4, "{found} {expected}");
        near(most(Strategy::Ddp), 8e9);
        near(most(Strategy::Zero2), 8e9);
        near(most(Strategy::Fsdp), 36e9);
    }

    #[test]
    fn by_hand_on_two_ranks() {
        let plain = Fabric { inside: Link { bandwidth: 10e9, latency: 1e-3 }, ..FABRIC };
        assert!((gather(&plain, 1e9, 2) - (0.05 + 1e-3)).abs() < 1e-12);
        assert!((gather(&plain, 1e9, 4) - (0.075 + 3e-3)).abs() < 1e-12);
        let pairs = Fabric { local: 2, pattern: Pattern::Pairwise, ..plain };
        // Two machines of two: a quarter to the neighbour, half to the other machine.
        let by_hand = 0.25 * 1e9 / 10e9 + 1e-3 + 0.5 * 1e9 / 25e9 + 2.0 * 10e-6;
        assert!((gather(&pairs, 1e9, 4) - by_hand).abs() < 1e-12);
        let one_piece = Work { bucket: 1e12, gradients: 1e9, ..work() };
        let ddp = estimate(Strategy::Ddp, &one_piece, &plain, 2);
        assert!((ddp.communication - 0.102).abs() < 1e-9);
        assert!((ddp.exposed - 0.102).abs() < 1e-9, "one piece cannot hide: its gradients are the last");
        let pieces = Work { bucket: 1e8, ..one_piece };
        let ddp = estimate(Strategy::Ddp, &pieces, &plain, 2);
        assert!((ddp.communication - (0.1 + 20e-3)).abs() < 1e-9, "each piece has its latency");
        assert!((ddp.exposed - 0.012).abs() < 1e-9, "the last of ten does not hide");
    }

    #[test]
    fn more_ranks_and_slower_links_never_help_a_rank() {
        for strategy in [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3, Strategy::Fsdp] {
            let steps: Vec<f64> =
                [1, 2, 4, 8, 64, 1024].map(|ranks| estimate(strategy, &work(), &FABRIC, ranks).step).to_vec();
            assert!(steps.windows(2).all(|pair| pair[0] <= pair[1]), "{strategy:?} {steps:?}");
            let slow = Fabric { between: Link { bandwidth: 1e9, latency: 50e-6 }, ..FABRIC };
            assert!(estimate(strategy, &work(), &slow, 1024).step > *steps.last().unwrap_or(&0.0));
        }
    }

    #[test]
    fn a_link_is_found_from_two_times() {
        let fabric = Fabric { pattern: Pattern::Pairwise, ..FABRIC };
        for ranks in [2, 4] {
            let time = |bytes: f64| (bytes, gather(&fabric, bytes, ranks));
            let found = fit(ranks, time(1e4), time(1e8)).unwrap();
            assert!(
                (found.bandwidth / 100e9 - 1.0).abs() < 1e-9 && (found.latency / 5e-6 - 1.0).abs() < 1e-6,
                "{found:?}"
            );
        }
        assert_eq!(fit(2, (1.0, 1.0), (2.0, 1.0)), None);
    }
}
