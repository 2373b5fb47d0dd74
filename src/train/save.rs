//! What is saved while a run goes and when it ends.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::prepare::Prepared;
use super::session::Session;
use super::{output, trained};
use crate::checkpoint::atomic::Staging;
use crate::checkpoint::disk::RealDisk;
use crate::checkpoint::{self, AdapterConfig, Keep, Snapshot, Weights, atomic, folder, peft, pissa, store};
use crate::config::Mode;
use crate::data;
use crate::error::{Error, Result};
use crate::model;

/// Saves the step that was done last, and removes checkpoints that are no longer wanted. Unless it is to `wait`, or
/// `train.save_async` is off, this only copies, and a thread writes ([`Session::collect`] hears of it). Of several ranks
/// the first does so.
///
/// # Errors
/// The disk, now or at the save before; older checkpoints then stand as they were.
pub fn checkpoint(session: &mut Session<'_>, wait: bool) -> Result<()> {
    if !session.writes() {
        (session.begun, session.saved) = (session.state.step, session.state.step);
        return Ok(());
    }
    let (began, before) = (Instant::now(), session.done.saving);
    session.state.optimizer_step = session.optimizer.step;
    session.state.optimizer_scalars = session.optimizer.scalars();
    session.state.sampler = serde_json::to_value(session.prepared.sampler.state())
        .map_err(|error| Error::checkpoint(format!("the position in the data cannot be written: {error}")))?;
    let adapter = adapter_config(session)?;
    let tokenizer = grown_tokenizer(session)?;
    let train = &session.prepared.config.train;
    let beside = train.save_async && !wait;
    let keep = Keep { last: train.save_total_limit, best: best_path(session) };
    if !beside {
        session.settle()?;
        // No pass is made meanwhile: what is written goes through buffers that the budget need not hold on top.
        session.model.release();
    }
    let written = session.published(|session, trained| {
        let Session { prepared, model, optimizer, state, stamp, saver, .. } = session;
        let snapshot = Snapshot {
            stamp,
            state,
            weights: match &adapter {
                Some(adapter) => Weights::Adapter(adapter),
                None if prepared.config.tuning.mode == Mode::Freeze => Weights::Part,
                None => Weights::Model(source(prepared, tokenizer.as_deref())),
            },
            specs: &model.params.specs,
            values: model.params.values(),
            trained,
            optimizer: optimizer.tensors(),
        };
        let root = &prepared.config.train.output_dir;
        Ok(if beside {
            saver.begin(root, &snapshot, keep)
        } else {
            checkpoint::write(&RealDisk, root, &snapshot, &keep).map(Some)
        })
    })?;
    session.note(written)?;
    session.begun = session.state.step;
    session.done.saving = before + began.elapsed();
    Ok(())
}

/// Points `best` to the checkpoint that is best by `train.metric_for_best_model`, if there is one: after an evaluation that a signal
/// had cut off and a resume made up for.
///
/// # Errors
/// The disk.
pub fn point_best(session: &mut Session<'_>) -> Result<()> {
    let root = &session.prepared.config.train.output_dir;
    let Some(best) =
        best_dir(session).filter(|best| session.writes() && store::named(root, "best").as_ref() != Some(best))
    else {
        return Ok(());
    };
    session.settle()?;
    store::point(&RealDisk, &session.prepared.config.train.output_dir, "best", Some(&best))
}

/// Where the checkpoint that is best by `train.metric_for_best_model` is or will be, if it is to be kept.
fn best_path(session: &Session<'_>) -> Option<PathBuf> {
    let train = &session.prepared.config.train;
    let path = store::checkpoint_dir(&train.output_dir, session.state.best_step?);
    train.load_best_model_at_end.then_some(path)
}

/// The checkpoint that is best by `train.metric_for_best_model`, if it is to be kept and there is one.
pub fn best_dir(session: &Session<'_>) -> Option<PathBuf> {
    best_path(session).filter(|dir| dir.is_dir())
}

/// Takes back the trained values of the checkpoint after `step`; says whether there is one (a run that was resumed
/// with other settings may not have kept it).
///
/// # Errors
/// It is damaged.
pub fn load_best(session: &mut Session<'_>, step: u64) -> Result<bool> {
    let root = &session.prepared.config.train.output_dir;
    let dir = store::checkpoint_dir(root, step);
    if store::named(root, "best").as_ref() != Some(&dir) || !dir.is_dir() {
        return Ok(false);
    }
    let best = checkpoint::load(&dir)?;
    session.done.hashing += best.hashing;
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
    let source = source(&session.prepared, tokenizer.as_deref());
    checkpoint::preflight(root, final_bytes(session), checkpoint::FILES)?;
    let hashing = atomic::publish(&RealDisk, &target, |staging| {
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
        // An adapter's own files name no labels.
        if source.scored.is_some() {
            folder::stage_config(staging, source)?;
        }
        folder::stage_companions(staging, source)
    })?;
    write_json(&root.join(output::STAMP), &session.stamp)?;
    session.done.hashing += hashing;
    Ok(target)
}

/// About how many bytes the final weights take: what is trained, twice where a `PiSSA` adapter becomes plain LoRA; with
/// `mode: freeze` the whole model; and the files that are copied.
fn final_bytes(session: &Session<'_>) -> u64 {
    let prepared = &session.prepared;
    let values = match prepared.config.tuning.mode {
        Mode::Freeze => trained::values(&prepared.arch),
        _ if session.model.params.start().is_some() => 2 * prepared.trainable,
        _ => prepared.trainable,
    };
    4 * values + folder::companion_bytes(&prepared.model_dir) + (1 << 20)
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

fn source<'a>(prepared: &'a Prepared, tokenizer: Option<&'a str>) -> folder::Source<'a> {
    let data = &prepared.config.data;
    // One that the configuration names; else the tokenizer's own, which is copied.
    let named = data.template_path.is_some() || data.chat_template.is_some();
    let template = prepared.dataset.template.as_ref().filter(|_| named).map(data::ChatTemplate::source);
    folder::Source {
        dir: &prepared.model_dir,
        grown: tokenizer.map(|text| (text, prepared.arch.vocab_size)),
        template,
        scored: prepared.arch.score.as_ref().map(|_| &prepared.arch),
    }
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
