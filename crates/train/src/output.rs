//! The output directory: the files that a run writes, renames, and removes there.
use std::path::{Path, PathBuf};

use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::{atomic, disk::RealDisk};
use tunesmith_checkpoint::own_files;
use tunesmith_config::Config;
use tunesmith_config::arch::COMPANIONS;

/// The metrics, one line per step and per evaluation.
pub const METRICS: &str = "metrics.jsonl";
/// The report of the run.
pub(crate) const REPORT: &str = "report.html";
/// The configuration of the run: every setting with its source.
pub const CONFIG: &str = "config.resolved.yaml";
/// The stamp of the final weights: base model, data, engine, and settings.
pub(crate) const STAMP: &str = "backend.json";
/// The folder of the trained adapter.
pub const ADAPTER: &str = "adapter";
/// The folder of the trained model, with `tuning.mode: full` and `freeze`.
pub const MODEL: &str = "model";
pub use tunesmith_checkpoint::own_files::EVENTS;

/// The folder of TensorBoard's event files.
pub(crate) fn events_dir(config: &Config) -> PathBuf {
    config.logging.logging_dir.clone().unwrap_or_else(|| config.train.output_dir.join(EVENTS))
}

/// The files of `model_dir` that belong to its tokenizer.
pub(crate) fn tokenizer_files(model_dir: &Path) -> Vec<PathBuf> {
    COMPANIONS.iter().map(|name| model_dir.join(name)).filter(|path| tunesmith_base::files::is_there(path)).collect()
}

/// Bytes of `files` on disk.
pub(crate) fn size_of(files: &[PathBuf]) -> u64 {
    files.iter().filter_map(|path| path.metadata().ok()).map(|metadata| metadata.len()).sum()
}

/// The checkpoints and trained weights of an earlier run in `directory`, sorted.
pub(crate) fn earlier_run(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries.map(|entry| entry.path()).filter(|path| is_worth_keeping(path)).collect();
    found.sort();
    found
}

fn is_worth_keeping(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    path.is_dir() && name != EVENTS && is_ours(name) && !name.contains(".tmp")
}

/// Files that each run replaces.
pub(crate) const FILES: [&str; 6] = [METRICS, REPORT, CONFIG, STAMP, "latest", "best"];

/// Whether runs write folders of this name. A run may replace and remove such a folder if it wrote all files in it.
pub(crate) fn is_ours(name: &str) -> bool {
    if name.contains(".kept-") {
        return false;
    }
    let step = name.strip_prefix("checkpoint-").map(|rest| rest.split('.').next().unwrap_or_default());
    let numbered = step.is_some_and(|step| !step.is_empty() && step.bytes().all(|byte| byte.is_ascii_digit()));
    numbered || [ADAPTER, MODEL, EVENTS].contains(&name)
}

/// Bytes of the checkpoints and trained weights in `directory`.
pub(crate) fn bytes_of_runs(directory: &Path) -> u64 {
    let files = |folder: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    };
    earlier_run(directory).iter().map(|folder| size_of(&files(folder))).sum()
}

/// Renames checkpoints of steps after `step` (to `checkpoint-000200.later`), because the run resumes from `step` and will
/// write its own checkpoints of these steps. Returns the new paths.
///
/// # Errors
/// One cannot be renamed.
pub(crate) fn set_aside_later(directory: &Path, step: u64) -> Result<Vec<PathBuf>> {
    let mut moved = Vec::new();
    for path in earlier_run(directory) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let later = name.strip_prefix("checkpoint-").and_then(|digits| digits.parse::<u64>().ok());
        if later.is_some_and(|later| later > step) {
            let aside = path.with_file_name(format!("{name}.later"));
            // An earlier resume left one of this name, which the newer one replaces.
            if aside.symlink_metadata().is_ok() {
                own_files::discard(&RealDisk, &aside, &aside).map_err(|source| Error::io("remove", &aside, &source))?;
            }
            atomic::rename(&RealDisk, &path, &aside).map_err(|source| Error::io("rename", &path, &source))?;
            moved.push(aside);
        }
    }
    Ok(moved)
}

/// The folders in `directory` with names that runs use, whatever their contents.
fn folders(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let named = |path: &PathBuf| is_ours(path.file_name().and_then(|name| name.to_str()).unwrap_or_default());
    let mut found: Vec<_> = entries.map(|entry| entry.path()).filter(named).collect();
    found.sort();
    found
}

/// Refuses to start over in `directory` if a folder to remove contains a file that the program did not write.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`], naming the file.
pub(crate) fn refuse_foreign(directory: &Path) -> Result<()> {
    for folder in folders(directory) {
        let foreign = own_files::foreign_in(&folder).map_err(|source| Error::io("read", &folder, &source))?;
        if let Some(file) = foreign {
            let message = format!(
                "{}: tunesmith did not write it, so --overwrite does not remove {}",
                file.display(),
                folder.display()
            );
            return Err(Error::new(tunesmith_base::Kind::Io, message)
                .hint("move it away, or set another train.output_dir: only folders that tunesmith wrote are removed"));
        }
    }
    Ok(())
}

/// Removes the files and folders of runs from `directory`. Other files stay.
///
/// # Errors
/// As [`refuse_foreign`], or a file cannot be removed.
pub(crate) fn clear(directory: &Path) -> Result<()> {
    refuse_foreign(directory)?;
    for path in folders(directory) {
        let gone = own_files::discard(&RealDisk, &path, &path);
        gone.map_err(|source| Error::io("remove", &path, &source))?;
    }
    for path in FILES.map(|name| directory.join(name)) {
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io("remove", &path, &source));
            }
            _ => {}
        }
    }
    Ok(())
}

/// What other commands wrote in `directory` by default from the weights of a run: names, sorted. A run that starts over leaves them there.
pub(crate) fn outputs_of_weights(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_output = |name: &String| {
        ["eval", "merged", "export-hf", "export-peft"].contains(&name.as_str())
            || Path::new(name).extension().is_some_and(|end| end == "gguf")
    };
    let mut found: Vec<String> = names.filter(is_output).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clearing_removes_only_our_files_and_later_checkpoints_are_renamed() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["checkpoint-000010", "checkpoint-000020.tmp-7", "adapter", "tb", "checkpoint-notes"] {
            std::fs::create_dir(root.path().join(folder)).unwrap();
        }
        assert!(outputs_of_weights(root.path()).is_empty());
        for file in ["metrics.jsonl", "report.html", "README.md", "latest"] {
            std::fs::write(root.path().join(file), "x").unwrap();
        }
        let names = |paths: Vec<PathBuf>| -> Vec<String> {
            paths.iter().map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect()
        };
        assert_eq!(names(earlier_run(root.path())), ["adapter", "checkpoint-000010"]);
        assert_eq!(names(set_aside_later(root.path(), 9).unwrap()), ["checkpoint-000010.later"]);
        assert!(set_aside_later(root.path(), 9).unwrap().is_empty());
        let mine = root.path().join("adapter/mine.txt");
        std::fs::write(&mine, "mine").unwrap();
        let error = clear(root.path()).unwrap_err();
        assert!(error.kind() == tunesmith_base::Kind::Io && error.message().contains("adapter/mine.txt"), "{error}");
        assert!(root.path().join("checkpoint-000010.later").exists(), "nothing goes before all may go");
        std::fs::remove_file(&mine).unwrap();
        clear(root.path()).unwrap();
        let mut left = names(std::fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().path()).collect());
        left.sort();
        assert_eq!(left, ["README.md", "checkpoint-notes"]);
        assert!(earlier_run(&root.path().join("no such")).is_empty());
        std::fs::create_dir(root.path().join("merged")).unwrap();
        std::fs::write(root.path().join("base.q8_0.gguf"), "x").unwrap();
        assert_eq!(outputs_of_weights(root.path()), ["base.q8_0.gguf", "merged"]);
    }
}
