//! What is saved while a run goes and when it ends.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::output;
use super::session::Session;
use crate::checkpoint::atomic::Staging;
use crate::checkpoint::disk::RealDisk;
use crate::checkpoint::{self, AdapterConfig, Snapshot, Weights, atomic, folder, peft, pissa, store};
use crate::config::Mode;
use crate::data;
use crate::error::{Error, Result};
use crate::model;

/// Writes the checkpoint of the step that was done last, and removes those that are no longer wanted; of several ranks
/// the first does so.
///
/// # Errors
/// The disk; older checkpoints then stand as they were.
pub fn checkpoint(session: &mut Session<'_>) -> Result<PathBuf> {
    let began = Instant::now();
    if !session.writes() {
        session.saved = session.state.step;
        return Ok(store::checkpoint_dir(&session.prepared.config.train.output_dir, session.saved));
    }
    let stamp = match session.stamp.take() {
        Some(stamp) => stamp,
        None => session.prepared.stamp()?,
    };
    session.state.optimizer_step = session.optimizer.step;
    session.state.optimizer_scalars = session.optimizer.scalars();
    session.state.sampler = serde_json::to_value(session.prepared.sampler.state())
        .map_err(|error| Error::checkpoint(format!("the position in the data cannot be written: {error}")))?;
    let adapter = adapter_config(session)?;
    let tokenizer = grown_tokenizer(session)?;
    let dir = session.published(|session, trained| {
        let weights = match &adapter {
            Some(adapter) => Weights::Adapter(adapter),
            None if session.prepared.config.tuning.mode == Mode::Freeze => Weights::Part,
            None => Weights::Model(source(session, tokenizer.as_deref())),
        };
        checkpoint::save(
            &session.prepared.config.train.output_dir,
            &Snapshot {
                stamp: &stamp,
                state: &session.state,
                weights,
                specs: &session.model.params.specs,
                values: session.model.params.values(),
                trained,
                optimizer: &session.optimizer,
            },
        )
    })?;
    session.saved = session.state.step;
    session.stamp = Some(stamp);
    let best = point_best(session)?;
    let train = &session.prepared.config.train;
    if let Some(limit) = train.save_total_limit {
        checkpoint::prune(&train.output_dir, limit, best.as_deref())?;
    }
    session.done.saving += began.elapsed();
    Ok(dir)
}

/// Points `best` to the checkpoint with the lowest evaluation loss, if there is one; also after an evaluation that a
/// signal had cut off and a resume made up for.
///
/// # Errors
/// The disk.
pub fn point_best(session: &Session<'_>) -> Result<Option<PathBuf>> {
    let best = best_dir(session).filter(|_| session.writes());
    if let Some(best) = &best {
        checkpoint::set_best(&session.prepared.config.train.output_dir, best)?;
    }
    Ok(best)
}

/// The checkpoint with the lowest evaluation loss, if it is to be kept and there is one.
fn best_dir(session: &Session<'_>) -> Option<PathBuf> {
    let train = &session.prepared.config.train;
    let dir = store::checkpoint_dir(&train.output_dir, session.state.best_step?);
    (train.load_best_model_at_end && dir.is_dir()).then_some(dir)
}

/// Takes back the trained values of the checkpoint after `step`; says whether there is one (a run that was resumed
/// with other settings may not have kept it).
///
/// # Errors
/// It is damaged.
pub fn load_best(session: &mut Session<'_>, step: u64) -> Result<bool> {
    let dir = store::checkpoint_dir(&session.prepared.config.train.output_dir, step);
    if !dir.is_dir() {
        return Ok(false);
    }
    let best = checkpoint::load(&dir)?;
    let specs = session.model.params.specs.clone();
    best.restore_values(&specs, session.model.params.values_mut())?;
    Ok(true)
}

/// Writes the trained weights as Hugging Face's libraries load them, with the tokenizer: `adapter/` or `model/`; and
/// the stamp beside them.
///
/// # Errors
/// The disk.
pub fn final_weights(session: &mut Session<'_>) -> Result<PathBuf> {
    let config = &session.prepared.config;
    let root = &config.train.output_dir;
    let params = &session.model.params;
    let tensors = checkpoint::named(&params.specs, params.values());
    let target = root.join(match config.tuning.mode {
        Mode::Lora | Mode::Ia3 => output::ADAPTER,
        Mode::Full | Mode::Freeze => output::MODEL,
    });
    let (adapter, tokenizer) = (adapter_config(session)?, grown_tokenizer(session)?);
    let source = source(session, tokenizer.as_deref());
    atomic::publish(&RealDisk, &target, |staging| {
        let Some(adapter) = &adapter else { return stage_model(staging, session, source, &tensors) };
        if let Some(start) = params.start() {
            let start: Vec<&[f32]> = params.specs.iter().map(|spec| &start[spec.range()]).collect();
            let (adapter, tensors) = pissa::as_lora(adapter, &tensors, &start);
            let tensors: Vec<_> =
                tensors.iter().map(|(name, shape, values)| (name.clone(), shape.clone(), &values[..])).collect();
            peft::stage(staging, &adapter, &tensors)?;
        } else {
            peft::stage(staging, adapter, &tensors)?;
        }
        folder::stage_companions(staging, source)
    })?;
    if let Some(stamp) = &session.stamp {
        write_json(&root.join(output::STAMP), stamp)?;
    }
    Ok(target)
}

/// The whole model: what was trained, and with `mode: freeze` the rest as it was.
fn stage_model(
    staging: &mut Staging<'_>,
    session: &Session<'_>,
    source: folder::Source<'_>,
    tensors: &[(String, Vec<usize>, &[f32])],
) -> Result<()> {
    let prepared = &session.prepared;
    let trained: BTreeSet<&str> = tensors.iter().map(|(name, ..)| name.as_str()).collect();
    let specs = prepared.arch.tensors().into_iter().map(|spec| (spec.name, spec.shape));
    let rest: Vec<_> = specs.filter(|(name, _)| !trained.contains(name.as_str())).collect();
    let sizes: BTreeMap<&str, usize> =
        rest.iter().map(|(name, shape)| (name.as_str(), shape.iter().product())).collect();
    let base = model::Source {
        arch: &prepared.arch,
        weights: prepared.weights.as_ref(),
        config: &prepared.config,
        stack: &prepared.stack,
    };
    let fetch = |name: &str| base.values(name, sizes.get(name).copied().unwrap_or_default());
    folder::stage(staging, source, tensors, &folder::Rest { tensors: &rest, fetch: &fetch })
}

/// The text of `tokenizer.json` with `tuning.new_tokens`.
fn grown_tokenizer(session: &Session<'_>) -> Result<Option<String>> {
    match session.prepared.config.tuning.new_tokens.as_slice() {
        [] => Ok(None),
        tokens => data::with_tokens(&session.prepared.model_dir, tokens).map(|(text, _)| Some(text)),
    }
}

fn source<'a>(session: &'a Session<'_>, tokenizer: Option<&'a str>) -> folder::Source<'a> {
    let prepared = &session.prepared;
    folder::Source { dir: &prepared.model_dir, grown: tokenizer.map(|text| (text, prepared.arch.vocab_size)) }
}

fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Error::checkpoint(format!("{} cannot be written: {error}", path.display())))?;
    atomic::replace_file(&RealDisk, path, &(text + "\n"))
}

/// What PEFT must know of the adapter; nothing when weights of the model itself are trained.
fn adapter_config(session: &Session<'_>) -> Result<Option<AdapterConfig>> {
    let (config, prepared) = (&session.prepared.config, &session.prepared);
    if !config.tuning.mode.adapts() {
        return Ok(None);
    }
    let base = match &prepared.snapshot {
        Some(snapshot) => snapshot.repo.id.as_str().into(),
        None => prepared.model_dir.to_string_lossy(),
    };
    let adapter = AdapterConfig::of(&config.tuning, &prepared.placements, Some(&base));
    adapter.with_tokens(&prepared.arch).map(Some)
}
