//! Existing adapters: `tuning.adapter`, which the run continues to train with the adapter's own settings, and
//! `tuning.adapters`, which are merged into the base.
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_checkpoint::Checkpoint;
use tunesmith_checkpoint::adapter_config::copied;
use tunesmith_checkpoint::loaded_adapter::LoadedAdapter;
use tunesmith_checkpoint::peft::{self, Tensors};
use tunesmith_config::Source;
use tunesmith_config::arch::{Arch, Vocabulary, is_beside};
use tunesmith_config::vision::{VisionArch, VisionTraining};
use tunesmith_config::{Config, Resolved, TuningConfig};
use tunesmith_data as data;
use tunesmith_hub::{self as hub, DownloadProgress};
use tunesmith_model::adapters::{self, Method};
use tunesmith_model::stack::Stack;
use tunesmith_model::targets::{Targets, placed};
use tunesmith_telemetry::progress::{Event, Observer};

/// The adapter that a run starts from.
pub(crate) struct Start {
    /// The settings to train it with.
    pub tuning: TuningConfig,
    /// The values that trained tensors start with.
    pub tensors: Tensors,
    /// Tensors of an image encoder or a connector that the adapter contains and this run does not train. They stay as they are.
    pub kept: Tensors,
}

/// Reads the adapter in `dir`, which the run continues to train. Tensors of an image encoder or a connector that the run
/// trains, but that the adapter does not contain, start with the values of the base.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`]: it cannot be read, or does not fit the model; [`tunesmith_base::Kind::Config`]: the
/// configuration sets other values than the adapter has, or freezes what it cannot keep.
pub(crate) fn open(dir: &Path, resolved: &Resolved, arch: &Arch) -> Result<Start> {
    let Some(vision) = &arch.vision else {
        let (tuning, tensors) = read(dir, resolved, arch)?;
        return Ok(Start { tuning, tensors, kept: Tensors::new() });
    };
    if vision.training.freeze_language && !peft::leaves_language(dir)? {
        return Err(Error::config(format!(
            "tuning.freeze_language: true, but {} has trained the language model",
            dir.display()
        ))
        .hint("merge that adapter (tunesmith merge) and train on the merged model"));
    }
    let training = peft::vision_training(dir, vision)?;
    let stored = VisionArch { training, ..(**vision).clone() };
    let trained: BTreeSet<String> = vision.adapted_linears().into_iter().map(|linear| linear.name).collect();
    if let Some(linear) = stored.adapted_linears().into_iter().find(|linear| !trained.contains(&linear.name)) {
        return Err(Error::config(format!(
            "tuning.vision_target_modules: {} has an adapter on {}, which this run does not train",
            dir.display(),
            linear.name
        ))
        .hint("set vision_target_modules as in that run, or merge the adapter (tunesmith merge) and train on the merged model"));
    }
    let saved = stored.saved_modules();
    let (mut tuning, tensors) = read(dir, resolved, &Arch { vision: Some(Arc::new(stored)), ..arch.clone() })?;
    let own = vision.saved_modules();
    if let Some(modules) = tuning.modules_to_save_mut() {
        modules.retain(|module| !saved.contains(module) || own.contains(module));
    }
    let wanted: BTreeSet<String> = expected(arch, &tuning)?.into_iter().map(|(name, _)| name).collect();
    let (tensors, kept): (Tensors, Tensors) = tensors.into_iter().partition(|(name, _)| wanted.contains(name));
    Ok(Start { tuning, tensors, kept })
}

/// Reads the settings and the tensors of the adapter in `dir`. `arch` must train the same parts of the image encoder and the
/// connector as the adapter does.
fn read(dir: &Path, resolved: &Resolved, arch: &Arch) -> Result<(TuningConfig, Tensors)> {
    let configured = &resolved.config.tuning;
    if let Some(tensors) = before_language(dir, configured, arch)? {
        return Ok((configured.clone(), tensors));
    }
    let (own, tensors) = peft::open_adapter(dir, arch)?;
    let mut tuning = own.settings(arch, configured)?;
    let Some(about) = adapters::of(&tuning).map(Method::about).filter(|about| about.mode == configured.mode) else {
        let kind = adapters::of(&tuning).map_or("", |method| method.about().title);
        return Err(Error::config(format!(
            "tuning.mode = {}, but tuning.adapter = {} is {kind}",
            configured.mode,
            dir.display()
        ))
        .hint(format!("set tuning.mode: {}", tuning.mode)));
    };
    let is_set = |key: &str| *resolved.source(&format!("{}.{key}", about.section.name)) != Source::Default;
    tuning = copied(about, |key| about.training.contains(&key) && is_set(key), configured, &tuning);
    // The settings that decide which tensors an adapter has and how they are scaled.
    let shapes = |key: &str| !about.training.contains(&key) && !about.starting.contains(&key) && is_set(key);
    let wanted = copied(about, shapes, configured, &tuning);
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
        .hint("remove these keys, because the adapter's own settings apply; or train a new adapter without tuning.adapter"));
    }
    peft::check_tensors(dir, &tensors, &expected(arch, &tuning)?)?;
    Ok((tuning, tensors))
}

/// For the second stage of multimodal training: the tensors of an adapter that was trained while the language model was
/// frozen, if this run trains the language model too. Returns `None` for any other adapter.
///
/// The run's settings alone decide which modules of the language model get an adapter. Tensors that the run trains and the
/// file does not contain start as in the base.
fn before_language(dir: &Path, configured: &TuningConfig, arch: &Arch) -> Result<Option<Tensors>> {
    let Some(vision) = arch.vision.as_ref().filter(|vision| !vision.training.freeze_language) else { return Ok(None) };
    if adapters::of(configured).is_none() || !peft::leaves_language(dir)? {
        return Ok(None);
    }
    let training = VisionTraining { freeze_language: true, ..vision.training.clone() };
    let frozen = Arch { vision: Some(Arc::new(VisionArch { training, ..(**vision).clone() })), ..arch.clone() };
    let (_, tensors) = peft::open_adapter(dir, &frozen)?;
    let mut wanted = expected(&frozen, configured)?;
    wanted.retain(|(name, _)| tensors.contains_key(name) || !is_beside(name));
    peft::check_tensors(dir, &tensors, &wanted)?;
    Ok(Some(tensors))
}

/// Names and shapes of the tensors of an adapter with these settings.
fn expected(arch: &Arch, tuning: &TuningConfig) -> Result<Vec<(String, Vec<usize>)>> {
    Targets::of(tuning).tensors(arch, &placed(arch, tuning)?)
}

/// Opens the adapters of `tuning.adapters`. Returns them with their hashes for the stamp. Unties the head of `arch` from the
/// embedding if one of them needs that.
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
            .hint("continue to train it with tuning.adapter"));
        }
        arch.separate_for(&vocabulary);
        stack.0.push(LoadedAdapter::open(dir, arch)?.frozen(arch)?.into());
        hashes.push(peft::open_weights(dir)?.fingerprint()?);
    }
    Ok((stack, hashes))
}

/// The folder of `tuning.adapter`. If it is gone and the run resumes, the folder of the checkpoint, which holds an adapter
/// with the same settings.
///
/// # Errors
/// Those of the download from the hub.
pub(crate) fn source(
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

/// Adds `tuning.new_tokens` to the vocabulary of `arch`, and the token rows that the adapter in `source` trains.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the model already has these tokens, or the adapter was trained with others.
pub(crate) fn grow(config: &Config, model_dir: &Path, source: Option<&Path>, arch: &mut Arch) -> Result<()> {
    let ids = match config.tuning.new_tokens.as_slice() {
        [] => Vec::new(),
        tokens => data::new_token_ids(model_dir, tokens)?,
    };
    let before = arch.vocab_size;
    arch.grow(ids.clone());
    arch.check_growth()?;
    let Some(source) = source else { return Ok(()) };
    let vocabulary = peft::vocabulary(source)?;
    let Vocabulary { rows, whole, .. } = &vocabulary;
    arch.fit(&vocabulary)?;
    peft::refuse_frozen_tables(source, arch)?;
    let has = |table: &[u32]| table == ids || table.is_empty();
    let fits = match ids.iter().max() {
        // The adapter trains only rows of tokens that the model already has.
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
        "tuning.new_tokens are the ids {ids:?} of a model with {before} tokens, but the adapter {} trains {trains}",
        source.display()
    ))
    .hint("set tuning.new_tokens to the tokens that the adapter was trained with, in the same order"))
}
