//! Saves checkpoints during a run and the final weights at its end.
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::model_source::ModelSource;
use super::output;
use super::run_plan::RunPlan;
use super::session::Session;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::disk::RealDisk;
use tunesmith_checkpoint::encoders::EncoderFiles;
use tunesmith_checkpoint::publish::{StagedFolder, publish_folder};
use tunesmith_checkpoint::{
    self as checkpoint, Retention, ShardedState, Snapshot, Weights, folder, own_files, peft, pissa, store,
};
use tunesmith_config::Mode;
use tunesmith_config::arch::{EMBEDDING, TensorSpec};
use tunesmith_data::{self as data, Dataset};
use tunesmith_device::Floats;
use tunesmith_model::weights::{Dtype, Wrapping};
use tunesmith_parallel::gather_optimizer::Gathered;
use tunesmith_parallel::gather_params::Fetch;
use tunesmith_telemetry::metrics::MetricsWriter;

/// Whether a checkpoint is due after the last step.
pub fn is_due(session: &Session<'_>) -> bool {
    let (step, plan) = (session.state.step, &session.plan);
    let best = plan.saving.load_best_at_end && session.state.best_step == Some(step);
    best || plan.saving.when.is_due(step, &plan.steps)
}

/// Saves a checkpoint of the last step, and removes checkpoints that are no longer wanted.
///
/// With `train.save_async` and without `wait`, this only copies the state, and a thread writes it;
/// [`Session::poll_saving`] gets the result. The first rank saves. If ranks shard the state, all take part until it is
/// written.
///
/// # Errors
/// Those of the disk, of this save or of the one before. Older checkpoints stay as they were.
pub fn checkpoint(session: &mut Session<'_>, wait: bool) -> Result<()> {
    let shares = session.sharing.shares_state();
    session.refuse_non_finite()?;
    if !session.writes() && !shares {
        (session.begun, session.saved) = (session.state.step, session.state.step);
        return Ok(());
    }
    let (began, before) = (Instant::now(), session.done.saving);
    session.metrics.as_ref().map_or(Ok(()), MetricsWriter::sync)?;
    session.state.optimizer_step = session.optimizer.step;
    session.state.optimizer_image_step = session.optimizer.stored_image_step();
    session.state.optimizer_scalars = session.optimizer.scalars();
    session.state.sampler = serde_json::to_value(session.sampler.state())
        .map_err(|error| Error::checkpoint("the position in the data cannot be written").caused_by(error))?;
    let adapter = session.plan.model.adapter.clone();
    let tokenizer = grown_tokenizer(session)?;
    let in_background = session.plan.saving.in_background && !wait && !shares;
    let keep = Retention { last: session.plan.saving.keep_last, best: best_path(session) };
    if !in_background {
        session.wait_for_saving()?;
        // No pass runs meanwhile, so its buffers make room for those of writing.
        session.model.release();
    }
    let written = session.published(|session, trained| {
        let writes = session.writes();
        let vision = session.source.arch.vision.as_ref();
        // Whether an image encoder comes from a checkpoint of its own.
        let is_pair = vision.is_some_and(|vision| vision.folder.is_some() || vision.world.is_some());
        let Session { plan, source, dataset, model, optimizer, state, stamp, saver, sharing, comm, .. } = session;
        let specs = &model.params.specs[..];
        let gathered = shares.then(|| Gathered::new(&**comm, sharing, optimizer, specs, trained));
        let values = sharing.shares_values().then(|| model.params.values());
        let fetch = values.map(|values| Fetch::new(&**comm, sharing, optimizer, specs, values));
        let write = |name: &str, writer: &mut dyn Write| {
            // The values are written before the state.
            fetch.as_ref().map_or(Ok(()), Fetch::end).map_err(io::Error::other)?;
            gathered.as_ref().map_or(Err(io::ErrorKind::NotFound.into()), |gathered| gathered.write(name, writer))
        };
        // An adapter is gathered at once, a model tensor by tensor while it is written.
        let of_model = fetch.as_ref().filter(|_| adapter.is_none());
        let names: Vec<_> =
            specs.iter().filter(|_| of_model.is_some()).map(|spec| (spec.name.clone(), spec.shape.clone())).collect();
        let ask = |name: &str| of_model.map_or_else(|| Ok(Vec::new()), |fetch| fetch.values(name));
        let rest = folder::LazyTensors { tensors: &names, fetch: &ask };
        let values = of_model.map(|_| &rest);
        let shared =
            gathered.as_ref().map(|gathered| ShardedState { tensors: &gathered.tensors, write: &write, values });
        let lost = |written| match &gathered {
            Some(gathered) => gathered.cause(written),
            None => written,
        };
        if let (Some(fetch), false) = (&fetch, writes) {
            fetch.follow()?;
        }
        if let (Some(shared), false) = (&shared, writes) {
            let followed = shared.write_to(&mut io::sink());
            let followed = followed.map_err(|error| Error::io("gather", "a checkpoint", &error));
            return Ok(lost(followed.map(|()| None)));
        }
        let adapted = fetch.as_ref().filter(|_| adapter.is_some()).map(Fetch::all).transpose()?;
        let snapshot = Snapshot {
            stamp,
            state,
            weights: match &adapter {
                Some(adapter) => Weights::Adapter(adapter),
                None if plan.model.mode == Mode::Freeze || source.arch.has_buffers() || is_pair => Weights::Part,
                None => Weights::Model(folder_source(plan, source, dataset, tokenizer.as_deref())),
            },
            specs,
            values: adapted.as_ref().map_or(model.params.values(), Floats::from),
            trained: trained.filter(|_| !shares),
            optimizer: if shares { Vec::new() } else { optimizer.tensors() },
            shared,
        };
        let root = &plan.output_dir;
        Ok(if in_background {
            saver.begin(root, &snapshot, keep)
        } else {
            let written = lost(checkpoint::write(&RealDisk, root, &snapshot, &keep).map(Some));
            fetch.as_ref().filter(|_| written.is_ok()).map_or(Ok(()), Fetch::end)?;
            written
        })
    })?;
    if !session.writes() {
        session.saved = session.state.step;
    }
    session.record_written(written)?;
    session.begun = session.state.step;
    session.done.saving = before + began.elapsed();
    Ok(())
}

/// Points the file `best` to the best checkpoint, if there is one. This is needed after a resumed run repeated an evaluation
/// that a signal had interrupted.
///
/// # Errors
/// Those of the disk.
pub fn update_best_pointer(session: &mut Session<'_>) -> Result<()> {
    let root = &session.plan.output_dir;
    let Some(best) =
        best_dir(session).filter(|best| session.writes() && store::named(root, "best").as_ref() != Some(best))
    else {
        return Ok(());
    };
    session.wait_for_saving()?;
    store::write_pointer(&RealDisk, &session.plan.output_dir, "best", Some(&best))
}

/// The folder of the best checkpoint, which may not be written yet; `None` without `train.load_best_model_at_end`.
fn best_path(session: &Session<'_>) -> Option<PathBuf> {
    let path = store::checkpoint_dir(&session.plan.output_dir, session.state.best_step?);
    session.plan.saving.load_best_at_end.then_some(path)
}

/// The folder of the best checkpoint, if it exists.
pub fn best_dir(session: &Session<'_>) -> Option<PathBuf> {
    best_path(session).filter(|dir| dir.is_dir())
}

/// Restores the trained values of the checkpoint of `step`. Returns whether it exists; a run that was resumed with other
/// settings may not have kept it.
///
/// Only the first rank reads the checkpoint. If ranks shard the values, all call this, and the first sends each its shard.
///
/// # Errors
/// The checkpoint is damaged; [`tunesmith_base::Kind::Peer`].
pub fn load_best(session: &mut Session<'_>, step: u64) -> Result<bool> {
    let root = &session.plan.output_dir;
    let dir = store::checkpoint_dir(root, step);
    let is_there = session.writes() && store::named(root, "best").as_ref() == Some(&dir) && dir.is_dir();
    let best = is_there.then(|| checkpoint::load(&dir)).transpose()?;
    if let Some(best) = &best {
        session.done.hashing += best.hashing;
    }
    let Session { comm, sharing, model, .. } = session;
    let specs = model.params.specs.clone();
    if !sharing.shares_values() {
        let Some(best) = best else { return Ok(false) };
        best.restore_values(&specs, model.params.values_mut())?;
        return Ok(true);
    }
    let mut found = [u64::from(best.is_some())];
    comm.broadcast(&mut found, 0)?;
    if found == [0] {
        return Ok(false);
    }
    let (all, at_once) = (model.params.len(), (comm.limits().bucket / size_of::<f32>()).max(1));
    let mut message = Vec::new();
    for start in (0..all).step_by(at_once) {
        let place = start..all.min(start + at_once);
        message.resize(place.len(), 0.0f32);
        if let Some(best) = &best {
            best.restore_kept_values(&specs, &mut message, std::slice::from_ref(&place))?;
        }
        comm.broadcast(&mut message, 0)?;
        model.params.put(&place, &message);
    }
    Ok(true)
}

/// Writes the trained weights and the tokenizer to `adapter/` or `model/`, in the format of Hugging Face's libraries. Also
/// writes the stamp. Returns the folder.
///
/// # Errors
/// Those of the disk.
pub fn final_weights(session: &mut Session<'_>) -> Result<PathBuf> {
    let root = &session.plan.output_dir;
    let params = &session.model.params;
    let adapts = session.plan.model.mode.adapts();
    let fetch = fetch(session, params.values());
    let values = params.values().to_host();
    let all = fetch.as_ref().filter(|_| adapts).map(Fetch::all).transpose()?;
    let start = params.start().map(|start| start_of(session, start)).transpose()?;
    let tensors = match (&fetch, &all) {
        // A sharded model is gathered tensor by tensor while it is written.
        (Some(_), None) => Vec::new(),
        _ => checkpoint::named(&params.specs, all.as_deref().unwrap_or(&values)),
    };
    let target = root.join(if adapts { output::ADAPTER } else { output::MODEL });
    let (adapter, tokenizer) = (session.plan.model.adapter.clone(), grown_tokenizer(session)?);
    let source = folder_source(&session.plan, &session.source, &session.dataset, tokenizer.as_deref());
    checkpoint::preflight(root, final_bytes(session), checkpoint::FILES)?;
    let published = publish_folder(&RealDisk, &target, |staging| {
        let Some(adapter) = &adapter else {
            return stage_model(staging, session, source, &tensors, fetch.as_ref());
        };
        if let Some(start) = &start {
            let start: Vec<&[f32]> = params.specs.iter().map(|spec| &start[spec.range()]).collect();
            let (adapter, tensors) = pissa::as_lora(adapter, &tensors, &start);
            let tensors: Vec<_> =
                tensors.iter().map(|(name, shape, values)| (name.clone(), shape.clone(), &values[..])).collect();
            peft::stage(staging, &adapter, &tensors)?;
        } else {
            peft::stage(staging, adapter, &tensors)?;
        }
        // The files of an adapter do not contain the labels.
        if session.source.arch.score.is_some() {
            folder::stage_config(staging, source)?;
        }
        folder::stage_companions(staging, source)
    })?;
    fetch.as_ref().map_or(Ok(()), Fetch::end)?;
    write_json(&root.join(output::STAMP), &session.stamp)?;
    session.done.hashing += published.hashing;
    session.report_kept_files(&target, published.kept.as_deref());
    Ok(target)
}

/// Sends the shards of this rank while the first rank writes the final weights, if ranks shard them.
///
/// # Errors
/// [`tunesmith_base::Kind::Peer`].
pub fn follow_final_weights(session: &Session<'_>) -> Result<()> {
    let params = &session.model.params;
    fetch(session, params.values()).map_or(Ok(()), |fetch| fetch.follow())?;
    let start = params.start().and_then(|start| fetch(session, start));
    start.map_or(Ok(()), |fetch| fetch.follow())
}

/// What gathers sharded `values` on the first rank; `None` if every rank has all of them.
fn fetch<'a>(session: &'a Session<'_>, values: Floats<'a>) -> Option<Fetch<'a>> {
    let Session { comm, sharing, optimizer, model, .. } = session;
    sharing.shares_values().then(|| Fetch::new(&**comm, sharing, optimizer, &model.params.specs, values))
}

/// The trained values before training (`start`), gathered on the rank that writes.
fn start_of(session: &Session<'_>, start: Floats<'_>) -> Result<Vec<f32>> {
    fetch(session, start).map_or_else(|| Ok(start.read()), |fetch| fetch.all())
}

/// Approximate bytes of the final weights and the copied files: the trained values of an adapter, or the whole model. A
/// `PiSSA` adapter counts twice, because it becomes plain LoRA of twice the rank.
fn final_bytes(session: &Session<'_>) -> u64 {
    let Session { plan, source, .. } = session;
    let values = match plan.model.mode {
        Mode::Full | Mode::Freeze => plan.model.all_parameters,
        _ if session.model.params.start().is_some() => 2 * plan.model.trained_parameters,
        _ => plan.model.trained_parameters,
    };
    let adapts = plan.model.mode.adapts();
    let beside = source.wrapping.as_ref().filter(|_| !adapts).map_or(0, Wrapping::bytes);
    // The file of an adapter contains a tied embedding under both names.
    let shared = session.model.params.find(EMBEDDING).filter(|_| adapts && source.arch.ties_head());
    let values = values + shared.map_or(0, |spec| spec.range().len() as u64);
    let copied = if adapts { source.untouched.bytes() } else { 0 };
    4 * values + copied + beside + folder::companion_bytes(&source.dir) + (1 << 20)
}

/// Stages the whole model: the trained tensors, and with `mode: freeze` the others as they were held in training.
fn stage_model(
    staging: &mut StagedFolder<'_>,
    session: &Session<'_>,
    source: folder::SourceModel<'_>,
    tensors: &[(String, Vec<usize>, &[f32])],
    shares: Option<&Fetch<'_>>,
) -> Result<()> {
    let trained: BTreeSet<&str> = tensors.iter().map(|(name, ..)| name.as_str()).collect();
    let arch = &session.source.arch;
    let encoders = encoder_files(session)?;
    let of_model = arch.tensors().into_iter().map(|spec| (spec.name, spec.shape));
    // The files of an encoder and a connector already have what was not trained, except for a randomly initialized connector.
    let params = &session.model.params;
    let of_vision = arch.vision.iter().flat_map(|vision| vision.tensors());
    let base = session.source.base();
    let differs = |spec: &TensorSpec| params.find(&spec.name).is_some() || base.rounds(&spec.name, &spec.shape);
    let of_vision = of_vision.filter(|spec| differs(spec) || encoders.change(&spec.name));
    let rest = of_model.chain(of_vision.map(|spec| (spec.name, spec.shape)));
    let rest: Vec<_> = rest.filter(|(name, _)| !trained.contains(name.as_str())).collect();
    let shapes: BTreeMap<&str, &[usize]> = rest.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
    let fetch = |name: &str| match shares {
        Some(shares) if params.find(name).is_some() => shares.values(name),
        _ => base.frozen_values(name, shapes.get(name).copied().unwrap_or_default()),
    };
    folder::stage(staging, source, Some(&encoders), tensors, &folder::LazyTensors { tensors: &rest, fetch: &fetch })
}

/// The files of the encoder and the connector of a pair, and of a second encoder.
fn encoder_files<'a>(session: &'a Session<'_>) -> Result<EncoderFiles<'a>> {
    let vision = session.source.arch.vision.as_deref();
    let drawn = vision.filter(|vision| !vision.connector.stored).map(|vision| vision.connector.tensors());
    let is_drawn = |name: &str| drawn.iter().flatten().any(|spec| spec.name == name);
    let base = session.source.base();
    let rounded: BTreeSet<String> = (vision.iter().flat_map(|vision| vision.tensors()))
        .filter(|spec| base.rounds(&spec.name, &spec.shape))
        .map(|spec| spec.name)
        .collect();
    let changed = |name: &str| session.model.params.find(name).is_some() || is_drawn(name) || rounded.contains(name);
    EncoderFiles::of(vision, &changed, Some(Dtype::F32))
}

/// The text of `tokenizer.json` with `tuning.new_tokens`; `None` without new tokens.
fn grown_tokenizer(session: &Session<'_>) -> Result<Option<String>> {
    match session.plan.model.new_tokens.as_slice() {
        [] => Ok(None),
        tokens => data::with_tokens(&session.source.dir, tokens).map(|(text, _)| Some(text)),
    }
}

fn folder_source<'a>(
    plan: &RunPlan,
    source: &'a ModelSource,
    dataset: &'a Dataset,
    tokenizer: Option<&'a str>,
) -> folder::SourceModel<'a> {
    // Without a template in the configuration, the tokenizer's own template is copied.
    let template = dataset.template.as_ref().filter(|_| plan.model.saves_chat_template);
    folder::SourceModel {
        dir: &source.dir,
        grown: tokenizer.map(|text| (text, source.arch.vocab_size)),
        template: template.map(data::ChatTemplate::source),
        own_head: Some(&source.arch).filter(|arch| arch.score.is_some() || arch.separated),
        wrapping: source.wrapping.as_ref(),
        stacking: &source.stacking,
    }
}

fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Error::checkpoint(format!("{} cannot be written", path.display())).caused_by(error))?;
    own_files::replace_file(&RealDisk, path, &(text + "\n"))
}
