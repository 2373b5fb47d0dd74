//! Which device a model is loaded to, and how much a run may hold there.
use tunesmith_base::error::Result;
use tunesmith_base::memory::limits;
use tunesmith_config::DeviceChoice;
use tunesmith_device::cuda::{Context, library};
use tunesmith_device::{Device, gpu};

/// The device that `model.device` chooses: everything of the model, and what is measured of its memory, is there. `auto` is the
/// first GPU where there is one that can be used, else the CPU.
///
/// # Errors
/// [`tunesmith_base::Kind::Device`]: a GPU was asked for, and it or a library that it needs is not there.
pub fn device(choice: DeviceChoice) -> Result<Device> {
    match choice {
        DeviceChoice::Cpu => Ok(Device::Cpu),
        DeviceChoice::Auto => Ok(usable_gpu().map_or(Device::Cpu, |()| Device::Cuda(0))),
        DeviceChoice::Cuda(ordinal) => {
            gpu::open(ordinal)?;
            for library in library::report() {
                library.found?;
            }
            Ok(Device::Cuda(ordinal))
        }
    }
}

/// Whether GPU 0 is there with all that computing on it needs.
fn usable_gpu() -> Option<()> {
    (Context::count().ok()? > 0 && library::report().into_iter().all(|it| it.found.is_ok())).then_some(())?;
    gpu::open(0).ok()
}

/// The device in words, as a run prints it: `the CPU`, or the GPU's number and name.
pub fn describe(device: Device) -> String {
    match device {
        Device::Cpu => "the CPU".to_owned(),
        Device::Cuda(ordinal) => {
            format!("GPU {ordinal} ({})", gpu::name(ordinal).unwrap_or_else(|_| "of an unknown name".to_owned()))
        }
        Device::Meta => "no device".to_owned(),
    }
}

/// Bytes that a run may hold there by itself, where its configuration sets no budget: of a GPU what is free.
pub fn usable(device: Device) -> Option<u64> {
    match device {
        Device::Cpu => limits::usable(),
        Device::Cuda(ordinal) => gpu::free_and_total(ordinal).ok().map(|(free, _)| free),
        Device::Meta => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_named_and_what_is_not_there_refused() {
        tunesmith_device::cuda::testing::stand_in();
        assert_eq!(device(DeviceChoice::Cpu).unwrap(), Device::Cpu);
        assert_eq!(device(DeviceChoice::Auto).unwrap(), Device::Cuda(0));
        assert_eq!(describe(device(DeviceChoice::Cuda(1)).unwrap()), "GPU 1 (Stand-in GPU)");
        let error = device(DeviceChoice::Cuda(9)).unwrap_err();
        assert_eq!(error.kind(), tunesmith_base::Kind::Device);
        assert!(error.message().contains("there is no GPU 9"), "{error}");
        assert!(usable(Device::Cuda(0)).unwrap() > 1 << 30);
    }
}
