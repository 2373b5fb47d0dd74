//! What is saved while a run goes and when it ends.
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::output;
use super::session::Session;
use crate::checkpoint::disk::RealDisk;
use crate::checkpoint::{self, AdapterConfig, Snapshot, Weights, atomic, folder, peft, store};
use crate::config::Mode;
use crate::error::{Error, Result};

/// Writes the checkpoint of the step that was done last, and removes those that are no longer wanted.
///
/// # Errors
/// The disk; older checkpoints then stand as they were.
pub fn checkpoint(session: &mut Session<'_>) -> Result<PathBuf> {
    let began = Instant::now();
    let stamp = match session.stamp.take() {
        Some(stamp) => stamp,
        None => session.prepared.stamp()?,
    };
    session.state.optimizer_step = session.optimizer.step;
    session.state.optimizer_scalars = session.optimizer.scalars();
    session.state.sampler = serde_json::to_value(session.prepared.sampler.state())
        .map_err(|error| Error::checkpoint(format!("the position in the data cannot be written: {error}")))?;
    let adapter = adapter_config(session);
    let dir = session.published(|session, trained| {
        let weights = match &adapter {
            Some(adapter) => Weights::Adapter(adapter),
            None => Weights::Model(&session.prepared.model_dir),
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
    let best = best_dir(session);
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
    let model_dir = &session.prepared.model_dir;
    let params = &session.model.params;
    let tensors = checkpoint::named(&params.specs, params.values());
    let target = root.join(match config.tuning.mode {
        Mode::Lora => output::ADAPTER,
        Mode::Full => output::MODEL,
    });
    atomic::publish(&RealDisk, &target, |staging| match adapter_config(session) {
        None => folder::stage(staging, model_dir, &tensors),
        Some(adapter) => {
            peft::stage(staging, &adapter, &tensors)?;
            for file in output::tokenizer_files(model_dir) {
                let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                staging.copy(&name, &file)?;
            }
            Ok(())
        }
    })?;
    if let Some(stamp) = &session.stamp {
        write_json(&root.join(output::STAMP), stamp)?;
    }
    Ok(target)
}

fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Error::checkpoint(format!("{} cannot be written: {error}", path.display())))?;
    atomic::replace_file(&RealDisk, path, &(text + "\n"))
}

/// What PEFT must know of the adapter; nothing when every weight is trained.
fn adapter_config(session: &Session<'_>) -> Option<AdapterConfig> {
    let (config, prepared) = (&session.prepared.config, &session.prepared);
    let base = match &prepared.snapshot {
        Some(snapshot) => snapshot.repo.id.as_str().into(),
        None => prepared.model_dir.to_string_lossy(),
    };
    (config.tuning.mode == Mode::Lora)
        .then(|| AdapterConfig::new(&config.tuning.lora, &prepared.placements, Some(&base)))
}
