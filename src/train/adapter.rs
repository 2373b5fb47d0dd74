//! `tuning.adapter`: training goes on from an existing adapter, whose own settings then hold.
use std::path::Path;

use crate::checkpoint::peft::{self, Tensors};
use crate::config::arch::Arch;
use crate::config::resolve::Source;
use crate::config::{LoraConfig, Resolved};
use crate::error::{Error, Result};
use crate::model::targets::{Placement, place, saved_tensors};

/// Settings of `tuning.lora` that decide which tensors an adapter has and how they are scaled.
const SHAPING: [&str; 8] = [
    "tuning.lora.r",
    "tuning.lora.lora_alpha",
    "tuning.lora.use_rslora",
    "tuning.lora.target_modules",
    "tuning.lora.rank_pattern",
    "tuning.lora.alpha_pattern",
    "tuning.lora.layers_to_transform",
    "tuning.lora.modules_to_save",
];

/// Reads the adapter in `dir` and what it says of itself, as settings to train with.
///
/// # Errors
/// [`crate::Kind::Checkpoint`]: it cannot be read, or does not fit the model; [`crate::Kind::Config`]: the
/// configuration sets something else than the adapter has.
pub fn open(dir: &Path, resolved: &Resolved, arch: &Arch) -> Result<(LoraConfig, Tensors)> {
    let (mut own, tensors) = peft::load_adapter(dir)?;
    let asked = &resolved.config.tuning.lora;
    let is_set = |key: &str| *resolved.source(key) != Source::Default;
    if is_set("tuning.lora.lora_dropout") {
        own.lora_dropout = asked.lora_dropout;
    }
    let lora = own.lora_config(arch, asked)?;
    let set: Vec<&str> = SHAPING.into_iter().filter(|key| is_set(key)).collect();
    let wanted = with_settings(&lora, asked, &set);
    let fits = place(arch, &wanted).is_ok_and(|wanted| place(arch, &lora).is_ok_and(|own| own == wanted))
        && saved_tensors(arch, &wanted)? == saved_tensors(arch, &lora)?;
    if !fits {
        return Err(Error::config(format!(
            "tuning.adapter = {} has other settings than the configuration sets ({})",
            dir.display(),
            set.join(", ")
        ))
        .hint("remove these keys: an adapter's own settings hold; or train a new adapter without tuning.adapter"));
    }
    peft::check_tensors(dir, &tensors, &expected(arch, &lora)?)?;
    Ok((lora, tensors))
}

/// `own` with the settings that the configuration names.
fn with_settings(own: &LoraConfig, asked: &LoraConfig, set: &[&str]) -> LoraConfig {
    let mut wanted = own.clone();
    for key in set {
        match key.rsplit('.').next() {
            Some("r") => wanted.r = asked.r,
            Some("lora_alpha") => wanted.lora_alpha = asked.lora_alpha,
            Some("use_rslora") => wanted.use_rslora = asked.use_rslora,
            Some("target_modules") => wanted.target_modules.clone_from(&asked.target_modules),
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
fn expected(arch: &Arch, lora: &LoraConfig) -> Result<Vec<(String, Vec<usize>)>> {
    let placed = place(arch, lora)?;
    let mut tensors: Vec<_> =
        placed.iter().flat_map(Placement::tensors).map(|(name, shape)| (name, shape.to_vec())).collect();
    for name in saved_tensors(arch, lora)? {
        tensors.push((name.clone(), shape_of(arch, &name)));
    }
    Ok(tensors)
}

/// A base tensor's shape; a tied head, which is no tensor of its own, has the embedding's.
pub fn shape_of(arch: &Arch, name: &str) -> Vec<usize> {
    let found = arch.tensors().into_iter().find(|spec| spec.name == name);
    found.map_or_else(|| vec![arch.vocab_size, arch.hidden_size], |spec| spec.shape)
}
