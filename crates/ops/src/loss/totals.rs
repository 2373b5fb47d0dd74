//! [`Totals`]: sums the losses of a step's passes on the device that computes them, so that nothing waits for a GPU
//! before the end of the step.
use super::linear::RowLosses;
use tunesmith_device::{Array, Device, Slice};

/// The sum of losses, each times its weight, and the number of rows whose target has the largest logit, or one of
/// several equally large ones.
#[derive(Debug, Default)]
pub struct Totals {
    /// Both numbers of what the host computed.
    host: [f64; 2],
    /// Both numbers of what a GPU computed; empty on other devices.
    gpu: Array<f64>,
}

impl Totals {
    /// Starts from zero, for passes on that device.
    pub fn begin(&mut self, device: Device) {
        self.host = [0.0; 2];
        match device {
            Device::Cuda(_) => self.gpu.reset(device, 2),
            Device::Cpu | Device::Meta => self.gpu = Array::default(),
        }
    }

    /// Adds the losses of a pass, and `other`, a loss that does not belong to a row.
    pub fn add(&mut self, losses: RowLosses, other: f64) {
        let (total, right) = losses.add_up(&mut self.gpu);
        self.host[0] += total + other;
        self.host[1] += right as f64;
    }

    /// Both numbers of what a GPU computed, if one did. If a loss is not finite, the first number is not finite either.
    pub fn on_gpu(&self) -> Option<Slice<'_, f64>> {
        (!self.gpu.is_empty()).then(|| self.gpu.view())
    }

    /// The sum of the losses that the host computed.
    pub const fn on_host(&self) -> f64 {
        self.host[0]
    }

    /// The sum of the losses, and the number of right rows. Waits for a GPU.
    pub fn read(&self) -> (f64, u64) {
        if self.gpu.is_empty() { self.with(&[0.0; 2]) } else { self.with(&self.gpu.to_host()) }
    }

    /// As [`Totals::read`], with a copy of the GPU's two numbers that the caller already has.
    pub fn with(&self, gpu: &[f64]) -> (f64, u64) {
        (self.host[0] + gpu[0], (self.host[1] + gpu[1]) as u64)
    }
}
