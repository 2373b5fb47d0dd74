//! The tensors that a run trains: all, chosen ones, or adapters with the modules that are saved with them.
use std::collections::BTreeSet;

use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{Arch, EMBEDDING, LM_HEAD};
use tunesmith_config::{Bias, Config, Mode};
use tunesmith_model::freeze;
use tunesmith_model::targets::{self, Placement, Targets};
use tunesmith_optim::{Schedule, rates};

/// Number of parameters of the whole model, with the image encoder and the connector if they are loaded.
pub fn parameters(arch: &Arch) -> u64 {
    let of_vision = arch.vision.iter().flat_map(|vision| vision.tensors());
    arch.tensors().into_iter().chain(of_vision).map(|spec| size(&spec.shape)).sum()
}

/// Number of all parameters in training, as PEFT's `print_trainable_parameters` counts them: the model's, and those of adapters
/// and of copies (`modules_to_save`). Biases are trained in place, and are already the model's.
///
/// # Errors
/// As [`tensors`].
pub fn all_parameters(config: &Config, arch: &Arch, placements: &[Placement]) -> Result<u64> {
    if !config.tuning.mode.adapts() {
        return Ok(parameters(arch));
    }
    let added = Targets { bias: Bias::None, ..Targets::of(&config.tuning) }.tensors(arch, placements)?;
    // The base still counts one matrix for embedding and head. The head's own matrix is among the copies.
    let head = if arch.separated { (arch.vocab_size * arch.hidden_size) as u64 } else { 0 };
    Ok(parameters(arch) - head + added.iter().map(|(_, shape)| size(shape)).sum::<u64>())
}

pub(crate) fn size(shape: &[usize]) -> u64 {
    shape.iter().map(|&size| size as u64).product()
}

/// Names and shapes of the trained tensors.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: a module to train does not exist.
pub fn tensors(config: &Config, arch: &Arch, placements: &[Placement]) -> Result<Vec<(String, Vec<usize>)>> {
    let tensors = arch.parameters().into_iter().map(|spec| (spec.name, spec.shape));
    let of_vision = arch.vision.iter().flat_map(|vision| vision.trained_tensors());
    let of_vision = of_vision.map(|spec| (spec.name, spec.shape));
    match config.tuning.mode {
        Mode::Full | Mode::Freeze if arch.freezes_language() => Ok(of_vision.collect()),
        Mode::Full => Ok(tensors.chain(of_vision).collect()),
        Mode::Freeze => {
            let trained: BTreeSet<String> = freeze::trained_tensors(arch, &config.tuning.freeze)?.into_iter().collect();
            let mut all = arch.tensors().into_iter().map(|spec| (spec.name, spec.shape));
            let vocabulary = all.find(|(name, _)| targets::is_vocabulary(name) && !trained.contains(name));
            if let Some((name, _)) = vocabulary.filter(|_| !arch.new_tokens.is_empty()) {
                return Err(Error::config(format!(
                    "tuning.new_tokens needs {name} to be trained, which tuning.freeze does not do"
                ))
                .hint("add embeddings and head to tuning.freeze.trainable_modules"));
            }
            Ok(tensors.filter(|(name, _)| trained.contains(name)).chain(of_vision).collect())
        }
        _ => Targets::of(&config.tuning).tensors(arch, placements),
    }
}

/// A warning if PEFT cannot load the adapter that the run will save.
pub fn peft_warning(arch: &Arch, tensors: &[(String, Vec<usize>)]) -> Option<&'static str> {
    let has = |wanted: &str| tensors.iter().any(|(name, _)| name == wanted);
    (arch.separated && has(LM_HEAD) && has(&targets::token_rows(EMBEDDING))).then_some(
        "PEFT 0.21 cannot run this adapter: rows of embed_tokens and the whole lm_head, where the model shares one matrix between \
         them; add embed_tokens to modules_to_save, or use the adapter here and after `tunesmith merge`",
    )
}

/// Checks the arguments of the schedule and the patterns of `train.learning_rates` before anything is loaded.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], naming the key.
pub fn check_rates(config: &Config, tensors: &[(String, Vec<usize>)]) -> Result<()> {
    Schedule::of(&config.train, 0, u64::MAX)?;
    rates::scales(&config.train, config.tuning.lora.loraplus_lr_ratio, tensors).map(drop)
}
