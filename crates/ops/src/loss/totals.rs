//! Sums over the passes of a step, on the device that computes them: nobody waits for a GPU before the step's end.
use super::linear::RowLosses;
use tunesmith_device::{Array, Device, Slice};

/// The sum of losses, each by its weight, and the number of rows whose target has the largest logit, or one of several equal ones.
#[derive(Debug, Default)]
pub struct Totals {
    /// What the host computed.
    host: [f64; 2],
    /// What a GPU computed, both numbers; none elsewhere.
    gpu: Array<f64>,
}

impl Totals {
    /// Begins with zeros, for what is computed on that device.
    pub fn begin(&mut self, device: Device) {
        self.host = [0.0; 2];
        match device {
            Device::Cuda(_) => self.gpu.reset(device, 2),
            Device::Cpu | Device::Meta => self.gpu = Array::default(),
        }
    }

    /// Adds the losses of a pass, and a loss that is none of a row's.
    pub fn add(&mut self, losses: RowLosses, other: f64) {
        let (total, right) = losses.add_up(&mut self.gpu);
        self.host[0] += total + other;
        self.host[1] += right as f64;
    }

    /// What a GPU computed, if one did. What is not finite shows in the first number.
    pub fn on_gpu(&self) -> Option<Slice<'_, f64>> {
        (!self.gpu.is_empty()).then(|| self.gpu.view())
    }

    /// The sum of the losses that the host computed.
    pub const fn on_host(&self) -> f64 {
        self.host[0]
    }

    /// The sum of the losses, and the number of rows. Waits for a GPU.
    pub fn read(&self) -> (f64, u64) {
        if self.gpu.is_empty() { self.with(&[0.0; 2]) } else { self.with(&self.gpu.to_host()) }
    }

    /// As [`Totals::read`], given a copy of what the GPU computed.
    pub fn with(&self, gpu: &[f64]) -> (f64, u64) {
        (self.host[0] + gpu[0], (self.host[1] + gpu[1]) as u64)
    }
}
