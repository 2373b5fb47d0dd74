//! The time of one op, and the line that shows it.
use serde::Serialize;
use std::time::Instant;
use tunesmith_device::{Device, gpu};

/// Seconds that a kernel is measured for.
const SECONDS: f64 = 0.4;

/// The measured time of one op, and the work of a call.
#[derive(Debug, Clone, Serialize)]
pub struct KernelLine {
    /// The op, and its direction.
    pub name: &'static str,
    /// The shapes of its operands, in words.
    pub shape: String,
    /// Seconds of one call: the best of several rounds.
    pub seconds: f64,
    /// Bytes that it must read and write, each operand once.
    pub bytes: f64,
    /// Multiply-adds count as two; 0 for ops that only move numbers.
    pub operations: f64,
}

/// Times calls on a device, and keeps the lines.
pub(crate) struct Clock {
    pub(crate) device: Device,
    pub(crate) lines: Vec<KernelLine>,
}

impl Clock {
    pub(crate) const fn new(device: Device) -> Self {
        Self { device, lines: Vec::new() }
    }

    fn synchronize(&self) {
        if let Device::Cuda(ordinal) = self.device {
            gpu::synchronize(ordinal);
        }
    }

    /// Seconds of one call: the best of several rounds, each of as many calls as take a while.
    fn seconds(&self, mut call: impl FnMut()) -> f64 {
        call();
        self.synchronize();
        let once = Instant::now();
        call();
        self.synchronize();
        let calls = (SECONDS / 8.0 / once.elapsed().as_secs_f64().max(1e-6)).ceil().clamp(1.0, 10_000.0) as u32;
        let (mut best, begin) = (f64::INFINITY, Instant::now());
        while begin.elapsed().as_secs_f64() < SECONDS || best.is_infinite() {
            let round = Instant::now();
            for _ in 0..calls {
                call();
            }
            self.synchronize();
            best = best.min(round.elapsed().as_secs_f64() / f64::from(calls));
        }
        best
    }

    /// Times `call`, and keeps the result as a line, with the bytes and operations of one call.
    pub(crate) fn line(
        &mut self,
        name: &'static str,
        shape: String,
        [bytes, operations]: [f64; 2],
        call: impl FnMut(),
    ) {
        let seconds = self.seconds(call);
        self.lines.push(KernelLine { name, shape, seconds, bytes, operations });
    }
}

/// Numbers in -1..1 that vary.
pub(crate) fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|index| (index.wrapping_mul(2_654_435_761) % 2048) as f32 / 1024.0 - 1.0).collect()
}
