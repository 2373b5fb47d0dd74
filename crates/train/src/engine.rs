//! Chooses the kernels of a run by `tuning.backend`, and describes them with their data types for the plan.
use super::model_source::ModelSource;
use super::run_plan::EnginePlan;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::{Backend, Config};
use tunesmith_device::Device;
use tunesmith_model::device::{chosen, describe, kernels};
use tunesmith_model::quantize::{Held, How};
use tunesmith_ops::simd::{self, Level};

/// The kernels of a backend: `reference` or `fused`.
pub const fn engine(backend: Backend) -> &'static str {
    match backend {
        Backend::Reference => "reference",
        Backend::Fused | Backend::Unsloth | Backend::Bnb => "fused",
    }
}

/// Sets the kernels of this process: portable ones for `reference`, else the best vector instructions of the processor.
pub fn choose(backend: Backend) {
    simd::force(match backend {
        Backend::Reference => Level::Portable,
        Backend::Fused | Backend::Unsloth | Backend::Bnb => simd::detect(),
    });
}

/// The kernels and types of a run. Call [`choose`] first.
///
/// # Errors
/// The configuration and the model's files contradict each other about quantization. [`tunesmith_base::Kind::Device`].
pub(crate) fn plan(config: &Config, source: &ModelSource) -> Result<EnginePlan> {
    if config.tuning.backend == Backend::Reference && matches!(source.device, Device::Cuda(_)) {
        return Err(Error::config(format!(
            "tuning.backend: reference is the CPU's portable kernels, but the run computes on {}",
            describe(source.device)
        ))
        .hint("set model.device: cpu, or leave out tuning.backend"));
    }
    let skip = || config.model.quantization_skip_modules.clone();
    let how = source.quantization()?;
    let held = how.map(|how| Held { how, skip: skip() });
    Ok(EnginePlan {
        backend: config.tuning.backend,
        kernels: engine(config.tuning.backend),
        simd: kernels(source.device, config)?,
        device: source.device,
        device_name: chosen(config.model.device, source.device),
        base_dtype: source.base_dtype(),
        activations: match (config.train.bf16, config.train.fp16) {
            (true, _) => "bfloat16",
            (_, true) => "float16",
            _ if config.train.tf32 && source.device != Device::Cpu => "float32, products in TF32",
            _ => "float32",
        },
        quantization: Held::describe(held.as_ref()),
        quantized: how.map(How::setting),
    })
}
