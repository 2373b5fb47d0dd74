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

/// Whether the folder `checkpoint`, or a link to it, is directly in the output directory.
pub fn is_inside(checkpoint: &Path, output_dir: &Path) -> bool {
    let real = checkpoint.canonicalize().unwrap_or_else(|_| checkpoint.to_path_buf());
    [checkpoint, &real].into_iter().any(|path| files::is_same(files::parent(path), output_dir))
}

/// Refuses an output directory that is the folder of a checkpoint, an adapter, or a model: a run would replace files in it.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], naming the file that shows it; a `..` in the path behind a part that does not exist.
pub fn refuse_result_as_output(output_dir: &Path) -> Result<()> {
    files::check_parents(output_dir)?;
    let has = |name: &str| output_dir.join(name).is_file();
    // Runs have a `backend.json` in their folder too, and data may have a `config.json`.
    let (name, what) = if has(checkpoint::MANIFEST) && has(output::STAMP) {
        (checkpoint::MANIFEST, if has("state.json") { "a checkpoint's folder" } else { "the folder of a result" })
    } else if has("adapter_config.json") {
        ("adapter_config.json", "an adapter's folder")
    } else if has("config.json") && (has("model.safetensors") || has("model.safetensors.index.json")) {
        ("config.json", "a model's folder")
    } else {
        return Ok(());
    };
    let message = format!("train.output_dir = {} is {what}: it contains {name}", output_dir.display());
    Err(Error::config(message).hint("set another train.output_dir: a run would replace files in this one"))
}

/// Refuses a source of the run that the run would replace or remove in its output directory. A mount may show either a
/// second time (`mount --bind`), so that folders are compared by their place on disk too.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], naming both.
pub fn refuse_own_source(source: &Path, output_dir: &Path) -> Result<()> {
    let (Ok(real), Ok(output)) = (source.canonicalize(), output_dir.canonicalize()) else { return Ok(()) };
    let replaced = |name: &str| output::is_ours(name) || (name != output::CONFIG && output::FILES.contains(&name));
    let inside = real.strip_prefix(&output).ok().and_then(|inside| inside.iter().next()?.to_str());
    let shown_twice = || {
        std::fs::read_dir(&output).into_iter().flatten().flatten().any(|entry| {
            let is_link = entry.file_type().is_ok_and(|kind| kind.is_symlink());
            let ours = entry.file_name().to_str().is_some_and(replaced) && !is_link;
            ours && real.ancestors().any(|part| files::is_same(part, &entry.path()))
        })
    };
    if !inside.is_some_and(replaced) && !shown_twice() {
        return Ok(());
    }
    let message = format!("{} is inside train.output_dir = {}", source.display(), output_dir.display());
    Err(Error::config(message).hint("set another train.output_dir, because a run may replace the files in it"))
}

/// Refuses an output directory in which the run would replace or remove files of others.
///
/// With `replaces`, the run starts over, and folders that it will remove must contain only files of runs. With `resumes_here`,
/// it resumes from a checkpoint in the directory: damaged `latest` and `best` are allowed, and a foreign metrics file or
/// stamp is renamed.
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

/// Lets the run replace a damaged file `name` next to its checkpoints: a pointer is ignored, a metrics file or a stamp is renamed.
/// Returns `false` for other files.
fn replace_damaged(path: &Path, name: &str, observer: &dyn Observer) -> Result<bool> {
    let text = match name {
        "latest" | "best" => format!("{} is damaged: the run replaces it", path.display()),
        // Each checkpoint has a stamp of its own, which decides what the run resumes.
        output::METRICS | output::STAMP => {
            let kept = own_files::kept_name(path);
            atomic::rename(&RealDisk, path, &kept).map_err(|source| Error::io("rename", path, &source))?;
            let what = if name == output::METRICS { "a metrics file" } else { "the stamp" };
            format!("{} is not {what} of a run: renamed to {}", path.display(), kept.display())
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn folders_of_results_are_no_output_directories_and_a_linked_checkpoint_is_inside() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        for (file, refused) in [
            ("checkpoint/manifest.json", true),
            ("checkpoint/state.json", true),
            ("checkpoint/backend.json", true),
            ("adapter/adapter_config.json", true),
            ("model/config.json", true),
            ("model/model.safetensors", true),
            ("run/backend.json", false),
            ("run/metrics.jsonl", false),
            ("rows/config.json", false),
            ("rows/manifest.json", false),
        ] {
            let path = at(file);
            fs::create_dir_all(files::parent(&path)).unwrap();
            fs::write(&path, "{}").unwrap();
            let folder = files::parent(&path);
            let last = !refused
                || ["backend.json", "adapter_config.json", "model.safetensors"].iter().any(|name| path.ends_with(name));
            if last {
                assert_eq!(refuse_result_as_output(folder).is_err(), refused, "{file}");
            }
        }
        let error = refuse_result_as_output(&at("checkpoint")).unwrap_err();
        assert!(error.message().contains("a checkpoint's folder: it contains manifest.json"), "{error}");
        let error = refuse_result_as_output(&at("new/../run")).unwrap_err();
        assert!(error.message().contains("`..` stands behind"), "{error}");
        refuse_result_as_output(&at("new/deeper")).unwrap();
        std::os::unix::fs::symlink(at("checkpoint"), at("run/checkpoint-000003")).unwrap();
        assert!(is_inside(&at("run/checkpoint-000003"), &at("run")));
        assert!(!is_inside(&at("checkpoint"), &at("run")) && is_inside(&at("checkpoint"), root.path()));
    }
}
