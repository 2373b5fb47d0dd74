//! The output directory: which files a run leaves there, and how they come and go.
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A line a step.
pub const METRICS: &str = "metrics.jsonl";
/// The report.
pub const REPORT: &str = "report.html";
/// Every setting with its source.
pub const CONFIG: &str = "config.resolved.yaml";
/// What the weights belong to.
pub const STAMP: &str = "backend.json";
/// The trained adapter.
pub const ADAPTER: &str = "adapter";
/// The trained model, when every weight was trained.
pub const MODEL: &str = "model";
/// The default folder of event files.
pub const EVENTS: &str = "tb";

/// What a model folder says about text; copied beside the trained weights.
const TOKENIZER_FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
];

/// The files of `model_dir` that belong to its tokenizer.
pub fn tokenizer_files(model_dir: &Path) -> Vec<PathBuf> {
    TOKENIZER_FILES.iter().map(|name| model_dir.join(name)).filter(|path| path.is_file()).collect()
}

/// Bytes of `files` on disk.
pub fn size_of(files: &[PathBuf]) -> u64 {
    files.iter().filter_map(|path| path.metadata().ok()).map(|metadata| metadata.len()).sum()
}

/// Copies `files` into `directory`.
///
/// # Errors
/// One cannot be read or written.
pub fn copy_into(files: &[PathBuf], directory: &Path) -> Result<()> {
    for file in files {
        let Some(name) = file.file_name() else { continue };
        let target = directory.join(name);
        std::fs::copy(file, &target).map_err(|source| Error::io("copy to", &target, &source))?;
    }
    Ok(())
}

/// What an earlier run left in `directory` that is worth keeping: checkpoints and trained weights.
pub fn earlier_run(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries.map(|entry| entry.path()).filter(|path| is_worth_keeping(path)).collect();
    found.sort();
    found
}

fn is_worth_keeping(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    path.is_dir() && (name == ADAPTER || name == MODEL || (name.starts_with("checkpoint-") && !name.contains(".tmp")))
}

/// Removes what runs leave in `directory`: only files and folders that have our names.
///
/// # Errors
/// One cannot be removed.
pub fn clear(directory: &Path) -> Result<()> {
    let fail = |path: &Path, source: &std::io::Error| Error::io("remove", path, source);
    let entries = std::fs::read_dir(directory).map_err(|source| fail(directory, &source))?;
    for entry in entries {
        let path = entry.map_err(|source| fail(directory, &source))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let folder = name.starts_with("checkpoint-") || [ADAPTER, MODEL, EVENTS].contains(&name);
        if folder && path.is_dir() {
            std::fs::remove_dir_all(&path).map_err(|source| fail(&path, &source))?;
        } else if [METRICS, REPORT, CONFIG, STAMP, "latest"].contains(&name) {
            std::fs::remove_file(&path).map_err(|source| fail(&path, &source))?;
        }
    }
    Ok(())
}

/// Makes `target` anew: `fill` writes into a folder beside it, which takes its place when it is complete and on disk.
/// Whatever fails, the old folder or the new one stands there whole.
///
/// # Errors
/// `fill` fails, or the disk.
pub fn replace_dir(target: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let beside = |suffix: &str| {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        target.with_file_name(format!("{name}.{suffix}-{}", std::process::id()))
    };
    let (staged, old) = (beside("tmp"), beside("old"));
    let result = fill_and_swap(target, &staged, &old, fill);
    if result.is_err() {
        // The error that is reported is the one that made the folder useless.
        let _ = std::fs::remove_dir_all(&staged);
    }
    result
}

fn fill_and_swap(target: &Path, staged: &Path, old: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    std::fs::create_dir_all(staged).map_err(|source| Error::io("create", staged, &source))?;
    fill(staged)?;
    let entries = std::fs::read_dir(staged).map_err(|source| Error::io("read", staged, &source))?;
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()) {
        sync(&path)?;
    }
    sync(staged)?;
    let rename = |from: &Path, to: &Path| std::fs::rename(from, to).map_err(|source| Error::io("rename", from, &source));
    if target.exists() {
        rename(target, old)?;
        if let Err(failed) = rename(staged, target) {
            rename(old, target)?;
            return Err(failed);
        }
        std::fs::remove_dir_all(old).map_err(|source| Error::io("remove", old, &source))?;
    } else {
        rename(staged, target)?;
    }
    target.parent().map_or(Ok(()), sync)
}

/// Writes a small file so that it is there whole or not at all.
///
/// # Errors
/// The disk.
pub fn write_whole(path: &Path, text: &str) -> Result<()> {
    let staged = path.with_file_name(format!(
        "{}.tmp-{}",
        path.file_name().unwrap_or_default().to_string_lossy(),
        std::process::id()
    ));
    let written = std::fs::write(&staged, text).and_then(|()| std::fs::rename(&staged, path));
    written.map_err(|source| {
        let _ = std::fs::remove_file(&staged);
        Error::io("write", path, &source)
    })
}

fn sync(path: &Path) -> Result<()> {
    let synced = std::fs::File::open(path).and_then(|file| file.sync_all());
    synced.map_err(|source| Error::io("sync", path, &source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_replaced_whole_or_not_at_all() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("adapter");
        let write = |text: &'static str| move |folder: &Path| {
            std::fs::write(folder.join("weights"), text).map_err(|source| Error::io("write", folder, &source))
        };
        replace_dir(&target, write("first")).unwrap();
        replace_dir(&target, write("second")).unwrap();
        let failed = replace_dir(&target, |folder| {
            write("half")(folder)?;
            Err(Error::numeric("no"))
        });
        assert!(failed.is_err());
        assert_eq!(std::fs::read_to_string(target.join("weights")).unwrap(), "second");
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1, "nothing staged is left");
    }

    #[test]
    fn clearing_removes_our_files_only() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["checkpoint-000010", "checkpoint-000020.tmp-7", "adapter", "tb", "notes"] {
            std::fs::create_dir(root.path().join(folder)).unwrap();
        }
        for file in ["metrics.jsonl", "report.html", "README.md", "latest"] {
            std::fs::write(root.path().join(file), "x").unwrap();
        }
        let names = |paths: Vec<PathBuf>| -> Vec<String> {
            paths.iter().map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect()
        };
        assert_eq!(names(earlier_run(root.path())), ["adapter", "checkpoint-000010"]);
        clear(root.path()).unwrap();
        let mut left = names(std::fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().path()).collect());
        left.sort();
        assert_eq!(left, ["README.md", "notes"]);
        assert!(earlier_run(&root.path().join("no such")).is_empty());
    }
}
