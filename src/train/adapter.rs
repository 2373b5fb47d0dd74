//! Existing adapters: `tuning.adapter`, from which training goes on and whose own settings then hold, and
//! `tuning.adapters`, which are merged into the base.
use std::path::{Path, PathBuf};

use super::progress::{Event, Observer};
use crate::checkpoint::finished::Finished;
use crate::checkpoint::peft::{self, Tensors};
use crate::checkpoint::{AdapterConfig, Checkpoint};
use crate::config::arch::Arch;
use crate::config::resolve::Source;
use crate::config::{Config, LoraConfig, Mode, Resolved, TuningConfig};
use crate::data;
use crate::error::{Error, Result};
use crate::hub::{self, Watch};
use crate::model::stack::Stack;
use crate::model::targets::{Placement, Targets, placed};

/// Settings of `tuning.lora` that decide which tensors an adapter has and how they are scaled.
const SHAPING: [&str; 12] = [
    "tuning.lora.r",
    "tuning.lora.lora_alpha",
    "tuning.lora.use_rslora",
    "tuning.lora.use_dora",
    "tuning.lora.target_modules",
    "tuning.lora.target_parameters",
    "tuning.lora.exclude_modules",
    "tuning.lora.bias",
    "tuning.lora.rank_pattern",
    "tuning.lora.alpha_pattern",
    "tuning.lora.layers_to_transform",
    "tuning.lora.modules_to_save",
];

/// Settings of `tuning.ia3`, which all decide that.
const SHAPING_IA3: [&str; 4] = [
    "tuning.ia3.target_modules",
    "tuning.ia3.feedforward_modules",
    "tuning.ia3.exclude_modules",
    "tuning.ia3.modules_to_save",
];

/// Reads the adapter in `dir` and what it says of itself, as settings to train with.
///
/// # Errors
/// [`crate::Kind::Checkpoint`]: it cannot be read, or does not fit the model; [`crate::Kind::Config`]: the
/// configuration sets something else than the adapter has.
pub fn open(dir: &Path, resolved: &Resolved, arch: &Arch) -> Result<(TuningConfig, Tensors)> {
    let (mut own, tensors) = peft::load_adapter(dir)?;
    let asked = &resolved.config.tuning;
    let is_set = |key: &str| *resolved.source(key) != Source::Default;
    let (mut tuning, mut wanted) = (asked.clone(), asked.clone());
    let (mode, kind) = if own.targets.feedforward.is_some() { (Mode::Ia3, "(IA)³") } else { (Mode::Lora, "LoRA") };
    if mode != asked.mode {
        return Err(Error::config(format!(
            "tuning.mode = {}, and tuning.adapter = {} is {kind}",
            asked.mode,
            dir.display()
        ))
        .hint(format!("set tuning.mode: {mode}")));
    }
    let set: Vec<&str> = if mode == Mode::Ia3 {
        tuning.ia3 = own.ia3_config(arch)?;
        SHAPING_IA3.into_iter().filter(|key| is_set(key)).collect()
    } else {
        if is_set("tuning.lora.lora_dropout") {
            own.lora_dropout = asked.lora.lora_dropout;
        }
        tuning.lora = own.lora_config(arch, &asked.lora)?;
        SHAPING.into_iter().filter(|key| is_set(key)).collect()
    };
    if mode == Mode::Lora {
        wanted.lora = with_settings(&tuning.lora, &asked.lora, &set);
    } else if set.is_empty() {
        wanted.ia3 = tuning.ia3.clone();
    }
    let fits = placed(arch, &wanted).is_ok_and(|wanted| placed(arch, &tuning).is_ok_and(|own| own == wanted))
        && expected(arch, &wanted)? == expected(arch, &tuning)?;
    if !fits {
        return Err(Error::config(format!(
            "tuning.adapter = {} has other settings than the configuration sets ({})",
            dir.display(),
            set.join(", ")
        ))
        .hint("remove these keys: an adapter's own settings hold; or train a new adapter without tuning.adapter"));
    }
    peft::check_tensors(dir, &tensors, &expected(arch, &tuning)?)?;
    Ok((tuning, tensors))
}

/// `own` with the settings that the configuration names.
fn with_settings(own: &LoraConfig, asked: &LoraConfig, set: &[&str]) -> LoraConfig {
    let mut wanted = own.clone();
    for key in set {
        match key.rsplit('.').next() {
            Some("r") => wanted.r = asked.r,
            Some("lora_alpha") => wanted.lora_alpha = asked.lora_alpha,
            Some("use_rslora") => wanted.use_rslora = asked.use_rslora,
            Some("use_dora") => wanted.use_dora = asked.use_dora,
            Some("target_parameters") => wanted.target_parameters.clone_from(&asked.target_parameters),
            Some("target_modules") => wanted.target_modules.clone_from(&asked.target_modules),
            Some("exclude_modules") => wanted.exclude_modules.clone_from(&asked.exclude_modules),
            Some("bias") => wanted.bias = asked.bias,
            Some("rank_pattern") => wanted.rank_pattern.clone_from(&asked.rank_pattern),
            Some("alpha_pattern") => wanted.alpha_pattern.clone_from(&asked.alpha_pattern),
            Some("layers_to_transform") => wanted.layers_to_transform.clone_from(&asked.layers_to_transform),
            Some("modules_to_save") => wanted.modules_to_save.clone_from(&asked.modules_to_save),
            _ => {}
        }
    }
    wanted
}

/// The tensors that an adapter with these settings has.
fn expected(arch: &Arch, tuning: &TuningConfig) -> Result<Vec<(String, Vec<usize>)>> {
    let placed = placed(arch, tuning)?;
    let mut tensors: Vec<_> = placed.iter().flat_map(Placement::tensors).collect();
    tensors.extend(Targets::of(tuning).beside(arch, &placed)?);
    Ok(tensors)
}

/// The rows of the embedding that the adapter in `dir` trains by themselves, if it does.
///
/// # Errors
/// [`crate::Kind::Checkpoint`]: its settings cannot be read.
fn trained_tokens(dir: &Path) -> Result<Vec<u32>> {
    Ok(AdapterConfig::from_dir(dir)?.trained_tokens)
}

/// Opens the adapters of `tuning.adapters`, and says what they are, for the stamp.
///
/// # Errors
/// [`crate::Kind::Checkpoint`]: one cannot be read, does not fit the model, or cannot be merged.
pub fn stack(dirs: &[PathBuf], arch: &Arch) -> Result<(Stack, Vec<String>)> {
    let (mut stack, mut hashes) = (Stack::default(), Vec::new());
    for dir in dirs {
        if !trained_tokens(dir)?.is_empty() {
            return Err(Error::checkpoint(format!(
                "{}: not yet: an adapter with tokens of its own among tuning.adapters",
                dir.display()
            ))
            .hint("go on from it with tuning.adapter"));
        }
        stack.0.push(Finished::open(dir, arch)?.frozen(arch)?.into());
        hashes.push(peft::open_weights(dir)?.fingerprint()?);
    }
    Ok((stack, hashes))
}

/// The folder of `tuning.adapter`; if it is gone and the run goes on from a checkpoint, the checkpoint, which holds an
/// adapter with the same settings.
///
/// # Errors
/// The hub's.
pub fn source(
    config: &Config,
    resume: Option<&Checkpoint>,
    watch: &dyn Watch,
    observer: &dyn Observer,
) -> Result<Option<PathBuf>> {
    let Some(dir) = &config.tuning.adapter else { return Ok(None) };
    let Some(checkpoint) = resume.filter(|_| !dir.is_dir()) else { return hub::adapter_dir(dir, watch).map(Some) };
    let text = format!("{} is gone: its settings are read from {}", dir.display(), checkpoint.dir.display());
    observer.event(&Event::Notice(&text));
    Ok(Some(checkpoint.dir.clone()))
}

/// The ids of `tuning.new_tokens`, held against those that the adapter in `source` trains.
///
/// # Errors
/// [`crate::Kind::Config`]: they are known already, or not those of the adapter.
pub fn new_tokens(config: &Config, model_dir: &Path, source: Option<&Path>, rows: usize) -> Result<Vec<u32>> {
    let ids = match config.tuning.new_tokens.as_slice() {
        [] => Vec::new(),
        tokens => data::new_token_ids(model_dir, tokens)?,
    };
    let Some(source) = source else { return Ok(ids) };
    let trained = trained_tokens(source)?;
    let known = trained.iter().all(|&id| (id as usize) < rows);
    if trained == ids || (ids.is_empty() && known) {
        return Ok(trained);
    }
    Err(Error::config(format!(
        "tuning.new_tokens are the ids {ids:?}, the adapter {} trains those of {trained:?}",
        source.display()
    ))
    .hint("set tuning.new_tokens to the tokens that the adapter was trained with, in their order"))
}
