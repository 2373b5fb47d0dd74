//! Which device a model is loaded to, and how much a run may hold there.
use tunesmith_base::error::{Error, Result};
use tunesmith_base::memory::limits;
use tunesmith_config::DeviceChoice;
use tunesmith_device::Device;

/// The device that `model.device` chooses: everything of the model, and what is measured of its memory, is there.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: this build does not compute there.
pub fn device(choice: DeviceChoice) -> Result<Device> {
    match choice {
        DeviceChoice::Auto | DeviceChoice::Cpu => Ok(Device::Cpu),
        DeviceChoice::Cuda(_) => {
            Err(Error::config(format!("model.device: {choice}, and this build computes on the CPU"))
                .hint("set model.device: cpu, or auto"))
        }
    }
}

/// Bytes that a run may hold there by itself, where its configuration sets no budget.
pub fn usable(device: Device) -> Option<u64> {
    match device {
        Device::Cpu => limits::usable(),
        Device::Meta => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_base::Kind;

    #[test]
    fn a_device_that_is_not_there_is_refused_by_its_name() {
        assert_eq!(device(DeviceChoice::Auto).unwrap(), Device::Cpu);
        assert_eq!(device(DeviceChoice::Cpu).unwrap(), Device::Cpu);
        let error = device(DeviceChoice::Cuda(1)).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert!(error.message().contains("model.device: cuda:1"), "{error}");
    }
}
