//! Which device a model is loaded to, and how much a run may hold there.
use std::sync::Arc;
use tunesmith_base::error::Result;
use tunesmith_base::memory::limits;
use tunesmith_config::{Config, DeviceChoice};
use tunesmith_device::cuda::{Context, library};
use tunesmith_device::{Device, gpu, memory};
use tunesmith_ops::activation::{Number, Pool};
use tunesmith_ops::simd::{self, PairLevel};

/// The device that `model.device` chooses. The whole model is there. `auto` means the first GPU where there is one that
/// can be used, else the CPU ([`chosen`] says why).
///
/// # Errors
/// [`tunesmith_base::Kind::Device`]: a GPU was asked for, and it or a library that it needs is not there.
pub fn device(choice: DeviceChoice) -> Result<Device> {
    match choice {
        DeviceChoice::Auto if usable_gpu().is_ok() => device(DeviceChoice::Cuda(Some(0))),
        DeviceChoice::Cpu | DeviceChoice::Auto => Ok(Device::Cpu),
        DeviceChoice::Cuda(ordinal) => {
            let ordinal = ordinal.unwrap_or(0);
            gpu::open(ordinal)?;
            for library in library::report() {
                library.found?;
            }
            gpu::prepare(ordinal)?;
            Ok(Device::Cuda(ordinal))
        }
    }
}

/// The device of one of several processes on a machine. Unless the choice names a GPU by its number, each process gets
/// a GPU of its own; if there are fewer GPUs than processes, they are given out in turn.
///
/// # Errors
/// [`tunesmith_base::Kind::Device`]: GPUs were asked for, and there is no driver.
pub fn of_rank(choice: DeviceChoice, local_rank: usize) -> Result<DeviceChoice> {
    match choice {
        DeviceChoice::Cpu | DeviceChoice::Cuda(Some(_)) => Ok(choice),
        DeviceChoice::Auto if usable_gpu().is_err() => Ok(choice),
        DeviceChoice::Auto | DeviceChoice::Cuda(None) => {
            let count = Context::count()?.clamp(1, 256) as usize;
            Ok(DeviceChoice::Cuda(Some((local_rank % count) as u8)))
        }
    }
}

/// An error if GPU 0 or a library that computing on it needs is missing.
fn usable_gpu() -> Result<()> {
    gpu::open(0)?;
    library::report().into_iter().try_for_each(|library| library.found.map(drop))
}

/// Why `model.device: auto` chose the CPU, on a machine that has NVIDIA's driver; else `None`.
fn why_cpu(device: Device) -> Option<String> {
    if device != Device::Cpu || !library::driver_is_installed() {
        return None;
    }
    let error = usable_gpu().err()?;
    let hint = error.hint_text().map_or_else(String::new, |hint| format!(" ({hint})"));
    Some(format!("{}{hint}", error.message()))
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

/// What a command prints about the device that `choice` has chosen: nothing for the CPU, unless `auto` chose it.
pub fn chosen(choice: DeviceChoice, device: Device) -> Option<String> {
    match choice {
        DeviceChoice::Cpu => None,
        DeviceChoice::Cuda(_) => Some(describe(device)),
        DeviceChoice::Auto => {
            let why = why_cpu(device).map_or_else(String::new, |why| format!(": {why}"));
            Some(format!("{}, chosen by model.device: auto{why}", describe(device)))
        }
    }
}

/// The type of a GPU's activations, and of the operands of matrix products: 16 bits with `train.bf16` or `train.fp16`,
/// else float32. The CPU multiplies in float32, except in bfloat16 if the processor has the instruction.
pub(crate) const fn number(config: &Config) -> Number {
    match (config.train.bf16, config.train.fp16) {
        (true, _) => Number::Bf16,
        (false, true) => Number::F16,
        (false, false) => Number::F32,
    }
}

/// A pool of activations of the type that the configuration chooses.
pub(crate) fn pool(device: Device, config: &Config) -> Arc<Pool> {
    typed(Pool::on(device), config)
}

/// Two pools for experts' activations: one for all blocks but the last, and one for the last block, which may compute
/// fewer tokens. Blocks are computed one after the other, so that they can use the same memory.
pub(crate) fn expert_pools(device: Device, config: &Config) -> [Arc<Pool>; 2] {
    [(); 2].map(|()| typed(Pool::stepped_on(device), config))
}

/// Sets a pool's types to those that the configuration chooses.
fn typed(pool: Arc<Pool>, config: &Config) -> Arc<Pool> {
    pool.set_number(number(config));
    of_products(pool, config)
}

/// Sets how a pool's products in float32 are computed.
fn of_products(pool: Arc<Pool>, config: &Config) -> Arc<Pool> {
    pool.set_tf32(config.train.tf32);
    pool.set_splits(true);
    pool
}

/// A pool for logits. Logits are float32, and the operands of their products have the type that the configuration
/// chooses.
pub(crate) fn logits_pool(device: Device, config: &Config) -> Arc<Pool> {
    let pool = Pool::on(device);
    pool.set_products(number(config));
    of_products(pool, config)
}

/// What the last bits of results depend on: the instruction set of the processor's products, or a GPU and its
/// libraries.
///
/// # Errors
/// [`tunesmith_base::Kind::Device`]: the GPU or a library is not there.
pub fn kernels(device: Device, config: &Config) -> Result<String> {
    match device {
        Device::Cpu | Device::Meta => Ok(instructions(config).to_owned()),
        Device::Cuda(ordinal) => gpu::identity(ordinal),
    }
}

/// The instruction set of the CPU's products.
fn instructions(config: &Config) -> &'static str {
    match (number(config), simd::pair_level()) {
        (Number::Bf16, Some(PairLevel::Avx512Bf16)) if simd::level() == simd::Level::Amx => "amx_bf16",
        (Number::Bf16, Some(PairLevel::Avx512Bf16)) => "avx512_bf16",
        _ => simd::level().name(),
    }
}

/// How much of a GPU's free bytes a run may hold without a configured budget: 90 %.
pub const fn share_of_free(free: u64) -> u64 {
    free / 10 * 9
}

/// Bytes that a run may hold on the device where its configuration sets no budget; of a GPU, 90 % of what other
/// programs leave free. `None` if that is not known.
pub fn usable(device: Device) -> Option<u64> {
    match device {
        Device::Cpu => limits::usable(),
        Device::Cuda(ordinal) => {
            let (free, _) = gpu::free_and_total(ordinal).ok()?;
            Some(share_of_free(free + memory::live(device)))
        }
        Device::Meta => None,
    }
}

/// The device's total memory in bytes, whoever uses it; `None` if that is not known.
pub fn total(device: Device) -> Option<u64> {
    match device {
        Device::Cpu => limits::total(),
        Device::Cuda(ordinal) => gpu::free_and_total(ordinal).ok().map(|(_, total)| total),
        Device::Meta => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_named_and_what_is_not_there_refused() {
        tunesmith_device::cuda::testing::use_stand_in();
        assert_eq!(device(DeviceChoice::Cpu).unwrap(), Device::Cpu);
        assert_eq!(device(DeviceChoice::Auto).unwrap(), Device::Cuda(0));
        assert_eq!(describe(device(DeviceChoice::Cuda(Some(1))).unwrap()), "GPU 1 (Stand-in GPU)");
        let error = device(DeviceChoice::Cuda(Some(9))).unwrap_err();
        assert_eq!(error.kind(), tunesmith_base::Kind::Device);
        assert!(error.message().contains("there is no GPU 9"), "{error}");
        assert!(usable(Device::Cuda(0)).unwrap() > 1 << 30);
    }
}
