//! Checks of the output directory: the checkpoint to resume, files of an earlier run, files of others, and the run's sources.
use std::path::Path;

use crate::output;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::disk::RealDisk;
use tunesmith_base::files::{self, atomic};
use tunesmith_checkpoint::{self as checkpoint, Checkpoint, own_files};
use tunesmith_comm::Collectives;
use tunesmith_comm::rendezvous::ranks;
use tunesmith_config::{Config, Resume};
use tunesmith_telemetry::metrics;
use tunesmith_telemetry::progress::{Event, Observer};

/// Finds the checkpoint to resume. Returns `None` without `train.resume_from_checkpoint`, and for `latest` in a directory
/// without checkpoints.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`]: it does not exist, or it is damaged and there is no other.
pub fn find_checkpoint(config: &Config, observer: &dyn Observer) -> Result<Option<Checkpoint>> {
    let output_dir = &config.train.output_dir;
    match &config.train.resume_from_checkpoint {
        None => Ok(None),
        Some(Resume::Dir(directory)) if !directory.exists() => {
            Err(Error::checkpoint(format!("{}: no such folder to resume from", directory.display()))
                .hint("name a checkpoint-… folder, a run's file `latest` or `best`, or `latest` alone"))
        }
        Some(Resume::Dir(directory)) => checkpoint::load(directory).map(Some),
        Some(Resume::Latest) => {
            let (newest, damaged) = checkpoint::newest_complete(output_dir)?;
            for (path, error) in &damaged {
                observer.event(&Event::Notice(&format!(
                    "{} is damaged and skipped: {}",
                    path.display(),
                    error.message()
                )));
            }
            if newest.is_none() {
                if let Some((path, error)) = damaged.into_iter().next() {
                    return Err(error.context(format!("no complete checkpoint, and {} is damaged", path.display())));
                }
                let text = format!("no checkpoint in {}: starting at step 1", output_dir.display());
                observer.event(&Event::Notice(&text));
            }
            newest.map(checkpoint::open).transpose()
        }
    }
}

/// Refuses ranks that would resume from different steps. Each rank reads the checkpoint, or its shard, by itself.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`], naming the ranks and both sides; [`tunesmith_base::Kind::Peer`].
pub fn resume_together(comm: &dyn Collectives, found: Option<&Checkpoint>, output_dir: &Path) -> Result<()> {
    let all = comm.collect(&[found.map_or(u64::MAX, |checkpoint| checkpoint.state.step)])?;
    let others: Vec<usize> = (0..all.len()).filter(|&rank| all[rank] != all[0]).collect();
    let Some(&first) = others.first() else { return Ok(()) };
    let said = |step| if step == u64::MAX { "none".to_owned() } else { format!("that of step {step}") };
    Err(Error::checkpoint(format!(
        "the checkpoint to resume is {} on rank 0 and {} on {}: train.output_dir = {}",
        said(all[0]),
        said(all[first]),
        ranks(&others),
        output_dir.display()
    ))
    .hint("every rank reads it: give the machines one file system, or copy the checkpoint folder to each"))
}

/// Whether the folder `checkpoint` is directly in the output directory.
pub fn is_inside(checkpoint: &Path, output_dir: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    real(checkpoint).parent() == Some(real(output_dir).as_path())
}

/// Refuses a source of the run that the run would replace or remove in its output directory.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], naming both.
pub fn refuse_own_source(source: &Path, output_dir: &Path) -> Result<()> {
    let (Ok(real), Ok(output)) = (source.canonicalize(), output_dir.canonicalize()) else { return Ok(()) };
    let inside = real.strip_prefix(&output).ok().and_then(|inside| inside.iter().next()?.to_str());
    if !inside.is_some_and(|name| output::is_ours(name) || (name != output::CONFIG && output::FILES.contains(&name))) {
        return Ok(());
    }
    let message = format!("{} is inside train.output_dir = {}", source.display(), output_dir.display());
    Err(Error::config(message).hint("set another train.output_dir, because a run may replace the files in it"))
}

/// Refuses an output directory in which the run would replace or remove files of others.
///
/// With `replaces`, the run starts over, and folders that it will remove must contain only files of runs. With `resumes_here`,
/// it resumes from a checkpoint in the directory: damaged `latest` and `best` are allowed, and a foreign metrics file is
/// renamed.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: a file that no run has written. [`tunesmith_base::Kind::Io`]: a path is not a regular file
/// or not a folder, or a folder to remove contains a foreign file.
pub fn refuse_foreign(config: &Config, replaces: bool, resumes_here: bool, observer: &dyn Observer) -> Result<()> {
    let output_dir = &config.train.output_dir;
    for name in output::FILES {
        let path = output_dir.join(name);
        let Ok(metadata) = path.symlink_metadata() else { continue };
        if !metadata.is_file() {
            let message = format!("cannot write {}: it is not a regular file", path.display());
            return Err(
                Error::new(tunesmith_base::Kind::Io, message).hint("remove it, or set another train.output_dir")
            );
        }
        if !replaces && !is_of_a_run(&path, name) {
            if resumes_here && replace_damaged(&path, name, observer)? {
                continue;
            }
            let message = format!("{} exists, but no run has written it", path.display());
            let resumes = config.train.resume_from_checkpoint.is_some();
            return Err(Error::config(message).hint(if resumes {
                "move it away, or set another train.output_dir"
            } else {
                "move it away, or set another train.output_dir; --overwrite replaces it"
            }));
        }
    }
    let folders = [output::ADAPTER, output::MODEL].map(|name| output_dir.join(name));
    for path in folders.into_iter().chain([output::events_dir(config)]) {
        if path.symlink_metadata().is_ok() && !path.is_dir() {
            let message = format!("cannot write {}: it is not a folder", path.display());
            return Err(
                Error::new(tunesmith_base::Kind::Io, message).hint("remove it, or set another train.output_dir")
            );
        }
    }
    if replaces { output::refuse_foreign(output_dir) } else { Ok(()) }
}

/// Lets the run replace a damaged file `name` next to its checkpoints: a pointer is ignored, a metrics file is renamed.
/// Returns `false` for other files.
fn replace_damaged(path: &Path, name: &str, observer: &dyn Observer) -> Result<bool> {
    let text = match name {
        "latest" | "best" => format!("{} is damaged: the run replaces it", path.display()),
        output::METRICS => {
            let kept = own_files::kept_name(path);
            atomic::rename(&RealDisk, path, &kept).map_err(|source| Error::io("rename", path, &source))?;
            format!("{} is not a metrics file of a run: renamed to {}", path.display(), kept.display())
        }
        _ => return Ok(false),
    };
    observer.event(&Event::Notice(&text));
    Ok(true)
}

/// Whether the contents of the file `name` look like those that runs write.
fn is_of_a_run(path: &Path, name: &str) -> bool {
    // A killed run may have left half of a metrics file.
    let Ok(text) = files::read_own(path, files::SMALL).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()) else {
        return name == output::METRICS;
    };
    let begins = |with: &str| text.is_empty() || text.starts_with(with);
    match name {
        output::METRICS => metrics::begins_as_written(&text),
        output::REPORT => begins("<!doctype html>") && text.contains("tunesmith"),
        output::CONFIG => begins("# The configuration of a run"),
        output::STAMP => begins("{"),
        _ => begins("checkpoint-"),
    }
}

/// Refuses an output directory with an earlier run.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], naming what is there.
pub fn refuse_earlier_run(output_dir: &Path) -> Result<()> {
    let earlier = output::earlier_run(output_dir);
    let Some(first) = earlier.first() else { return Ok(()) };
    let more = if earlier.len() > 1 { format!(" and {} more", earlier.len() - 1) } else { String::new() };
    Err(Error::config(format!(
        "train.output_dir = {} contains an earlier run ({}{more})",
        output_dir.display(),
        first.file_name().unwrap_or_default().to_string_lossy(),
    ))
    .hint("resume it: --resume; start over: --overwrite (removes it); keep it: set another train.output_dir"))
}
