//! Existing adapters: `tuning.adapter`, from which training goes on and whose own settings then hold, and
//! `tuning.adapters`, which are merged into the base.
use std::path::{Path, PathBuf};

use super::progress::{Event, Observer};
use crate::checkpoint::adapter_config::copied;
use crate::checkpoint::finished::Finished;
use crate::checkpoint::peft::{self, Tensors};
use crate::checkpoint::{AdapterConfig, Checkpoint};
use crate::config::arch::Arch;
use crate::config::resolve::Source;
use crate::config::{Config, Resolved, TuningConfig};
use crate::data;
use crate::error::{Error, Result};
use crate::hub::{self, Watch};
use crate::model::adapters::Method;
use crate::model::stack::Stack;
use crate::model::targets::{Targets, placed};

/// Reads the adapter in `dir` and what it says of itself, as settings to train with.
///
/// # Errors
/// [`crate::Kind::Checkpoint`]: it cannot be read, or does not fit the model; [`crate::Kind::Config`]: the
/// configuration sets something else than the adapter has.
pub fn open(dir: &Path, resolved: &Resolved, arch: &Arch) -> Result<(TuningConfig, Tensors)> {
    let (own, tensors) = peft::load_adapter(dir)?;
    let asked = &resolved.config.tuning;
    let mut tuning = own.settings(arch, asked)?;
    let Some(about) = tuning.method().map(Method::about).filter(|about| about.mode == asked.mode) else {
        let kind = tuning.method().map_or("", |method| method.about().title);
        return Err(Error::config(format!(
            "tuning.mode = {}, and tuning.adapter = {} is {kind}",
            asked.mode,
            dir.display()
        ))
        .hint(format!("set tuning.mode: {}", tuning.mode)));
    };
    let is_set = |key: &str| *resolved.source(&format!("{}.{key}", about.section.name)) != Source::Default;
    tuning = copied(about, |key| about.training.contains(&key) && is_set(key), asked, &tuning);
    // What decides which tensors an adapter has and how they are scaled.
    let shapes = |key: &str| !about.training.contains(&key) && !about.starting.contains(&key) && is_set(key);
    let wanted = copied(about, shapes, asked, &tuning);
    let fits = placed(arch, &wanted).is_ok_and(|wanted| placed(arch, &tuning).is_ok_and(|own| own == wanted))
        && expected(arch, &wanted)? == expected(arch, &tuning)?;
    if !fits {
        let keys = about.section.options.iter().map(|def| def.name).filter(|key| shapes(key));
        let keys: Vec<_> = keys.map(|key| format!("{}.{key}", about.section.name)).collect();
        return Err(Error::config(format!(
            "tuning.adapter = {} has other settings than the configuration sets ({})",
            dir.display(),
            keys.join(", ")
        ))
        .hint("remove these keys: an adapter's own settings hold; or train a new adapter without tuning.adapter"));
    }
    peft::check_tensors(dir, &tensors, &expected(arch, &tuning)?)?;
    Ok((tuning, tensors))
}

/// The tensors that an adapter with these settings has.
fn expected(arch: &Arch, tuning: &TuningConfig) -> Result<Vec<(String, Vec<usize>)>> {
    Targets::of(tuning).tensors(arch, &placed(arch, tuning)?)
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
