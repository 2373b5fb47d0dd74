//! Existing adapters: `tuning.adapter`, from which training goes on and whose own settings then hold, and
//! `tuning.adapters`, which are merged into the base.
use std::path::{Path, PathBuf};

use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_checkpoint::Checkpoint;
use tunesmith_checkpoint::adapter_config::copied;
use tunesmith_checkpoint::loaded_adapter::LoadedAdapter;
use tunesmith_checkpoint::peft::{self, Tensors};
use tunesmith_config::Source;
use tunesmith_config::arch::{Arch, Vocabulary};
use tunesmith_config::{Config, Resolved, TuningConfig};
use tunesmith_data as data;
use tunesmith_hub::{self as hub, DownloadProgress};
use tunesmith_model::adapters::{self, Method};
use tunesmith_model::stack::Stack;
use tunesmith_model::targets::{Targets, placed};
use tunesmith_telemetry::progress::{Event, Observer};

/// Reads the adapter in `dir` and what it says of itself, as settings to train with.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`]: it cannot be read, or does not fit the model; [`tunesmith_base::Kind::Config`]: the
/// configuration sets something else than the adapter has.
pub fn open(dir: &Path, resolved: &Resolved, arch: &Arch) -> Result<(TuningConfig, Tensors)> {
    let (own, tensors) = peft::open_adapter(dir, arch)?;
    let asked = &resolved.config.tuning;
    let mut tuning = own.settings(arch, asked)?;
    let Some(about) = adapters::of(&tuning).map(Method::about).filter(|about| about.mode == asked.mode) else {
        let kind = adapters::of(&tuning).map_or("", |method| method.about().title);
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
    let ties = |tuning| Targets::of(tuning).ensure_weight_tying;
    let fits = ties(&wanted) == ties(&tuning)
        && placed(arch, &wanted).is_ok_and(|wanted| placed(arch, &tuning).is_ok_and(|own| own == wanted))
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

/// Opens the adapters of `tuning.adapters`, and says what they are, for the stamp. The head gets a matrix of its own where one of
/// them needs it.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`]: one cannot be read, does not fit the model, or cannot be merged.
pub fn stack(dirs: &[PathBuf], arch: &mut Arch) -> Result<(Stack, Vec<String>)> {
    let (mut stack, mut hashes) = (Stack::default(), Vec::new());
    for dir in dirs {
        let mut grown = arch.clone();
        let vocabulary = peft::vocabulary(dir)?;
        grown.fit(&vocabulary)?;
        if grown.vocab_size != arch.vocab_size {
            return Err(Error::checkpoint(format!(
                "{}: not yet: an adapter with tokens of its own among tuning.adapters",
                dir.display()
            ))
            .hint("go on from it with tuning.adapter"));
        }
        arch.separate_for(&vocabulary);
        stack.0.push(LoadedAdapter::open(dir, arch)?.frozen(arch)?.into());
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
    progress: &dyn DownloadProgress,
    observer: &dyn Observer,
) -> Result<Option<PathBuf>> {
    let Some(dir) = &config.tuning.adapter else { return Ok(None) };
    let Some(checkpoint) = resume.filter(|_| !dir.is_dir()) else { return hub::adapter_dir(dir, progress).map(Some) };
    let text = format!("{} is gone: its settings are read from {}", dir.display(), checkpoint.dir.display());
    observer.event(&Event::Notice(&text));
    Ok(Some(checkpoint.dir.clone()))
}

/// Makes room for `tuning.new_tokens`, held against those of the adapter in `source`, and trains the rows that it trains.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: they are known already, or not those of the adapter.
pub fn grow(config: &Config, model_dir: &Path, source: Option<&Path>, arch: &mut Arch) -> Result<()> {
    let ids = match config.tuning.new_tokens.as_slice() {
        [] => Vec::new(),
        tokens => data::new_token_ids(model_dir, tokens)?,
    };
    let before = arch.vocab_size;
    arch.grow(ids.clone());
    let Some(source) = source else { return Ok(()) };
    let vocabulary = peft::vocabulary(source)?;
    let Vocabulary { rows, whole, .. } = &vocabulary;
    arch.fit(&vocabulary)?;
    peft::refuse_frozen_tables(source, arch)?;
    let has = |table: &[u32]| table == ids || table.is_empty();
    let fits = match ids.iter().max() {
        // Its rows are those of tokens that the model has.
        None => arch.vocab_size == before,
        Some(&last) if rows.is_empty() => *whole > last as usize,
        Some(_) => has(&rows.embedding) && has(&rows.head),
    };
    if fits {
        return Ok(());
    }
    let trains = match (rows.ids().as_slice(), *whole) {
        ([], 0) => "no new tokens".to_owned(),
        ([], whole) => format!("a vocabulary of {}", count(whole, "token")),
        (ids, _) => format!("those of {ids:?}"),
    };
    Err(Error::config(format!(
        "tuning.new_tokens are the ids {ids:?} of a model with {before} tokens, the adapter {} trains {trains}",
        source.display()
    ))
    .hint("set tuning.new_tokens to the tokens that the adapter was trained with, in their order"))
}
