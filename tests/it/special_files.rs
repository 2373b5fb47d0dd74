//! A FIFO, a device or a folder in place of a file that a command reads: refused in a line that names it, never waited for, and
//! never skipped.
use crate::run::fixture::{Fixture, said, train, tunesmith};
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use tunesmith::checkpoint::publish::publish_folder;
use tunesmith::files::atomic;
use tunesmith::files::disk::{Disk, DiskFile, RealDisk};

/// Puts something else in the place of a file, which is moved away.
fn replace(path: &Path, kind: &str) {
    let _ = fs::rename(path, path.with_extension("kept"));
    match kind {
        "a FIFO" => assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
        "a folder" => fs::create_dir(path).unwrap(),
        "nowhere" => symlink("nowhere", path).unwrap(),
        "a circle" => symlink(path.file_name().unwrap(), path).unwrap(),
        _ => symlink("/dev/zero", path).unwrap(),
    }
}

fn put_back(path: &Path, kind: &str) {
    if kind == "a folder" {
        fs::remove_dir(path).unwrap();
    } else {
        fs::remove_file(path).unwrap();
    }
    let _ = fs::rename(path.with_extension("kept"), path);
}

#[test]
fn what_is_no_regular_file_is_refused_by_its_name_whoever_reads_it() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 1"]);
    assert!(train(&config, &[]).status.success());
    let text = |name: &str| fixture.path(name).display().to_string();
    let (config, model, adapter) = (config.display().to_string(), text("model"), text("out/adapter"));
    let infer = ["infer", "--model", &model, "--prompt", "a", "gen.max_new_tokens=1"];
    let adapted = ["infer", &config, "--adapter", &adapter, "--prompt", "a", "gen.max_new_tokens=1"];
    let again = format!("train.output_dir={}", text("again"));
    let (merged, data) = (text("merged"), ["data", &config]);
    let merge = ["merge", &config, "--output", &merged, "--overwrite"];
    let retrain = ["train", &config, "--overwrite", &again];
    let cases: [(&str, &[&[&str]]); 14] = [
        ("model/config.json", &[&infer, &merge, &retrain]),
        ("model/tokenizer.json", &[&infer, &data, &retrain]),
        ("model/tokenizer_config.json", &[&infer, &data]),
        ("model/chat_template.jinja", &[&infer, &data]),
        ("model/generation_config.json", &[&infer, &merge]),
        ("out/adapter/special_tokens_map.json", &[&merge]),
        ("model/model.safetensors", &[&infer, &retrain]),
        ("out/adapter/adapter_config.json", &[&adapted, &merge]),
        ("out/adapter/adapter_model.safetensors", &[&adapted, &merge]),
        ("out/adapter/tokenizer.json", &[&adapted, &merge]),
        ("out/adapter/manifest.json", &[&adapted, &merge]),
        ("out/backend.json", &[&adapted, &merge]),
        ("train.jsonl", &[&data, &retrain]),
        ("run.yaml", &[&data, &retrain]),
    ];
    for (name, calls) in cases {
        for kind in ["a FIFO", "a folder", "nowhere", "a circle", "a device"] {
            let path = fixture.path(name);
            replace(&path, kind);
            for call in calls {
                let output = tunesmith(call).stdin(Stdio::null()).output().unwrap();
                let text = said(&output);
                let file = path.file_name().unwrap().to_str().unwrap();
                assert!(matches!(output.status.code(), Some(2..=6)), "{kind} as {name}: {call:?}: {text}");
                let line = text.lines().find(|line| line.contains("error: ")).unwrap_or_default();
                assert!(line.contains(file) && !line.contains("neither"), "{kind} as {name}: {call:?}: {text}");
            }
            put_back(&path, kind);
        }
    }
    for call in [&infer[..], &adapted, &merge, &data, &retrain] {
        let output = tunesmith(call).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{call:?}: {}", said(&output));
    }
}

/// A disk on which every new file and folder is removed at once, as by another process.
struct Thief;

impl Disk for Thief {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path).and_then(|()| fs::remove_dir(path))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let file = RealDisk.create(path)?;
        fs::remove_file(path).map(|()| file)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        RealDisk.sync_dir(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        RealDisk.remove(path)
    }
}

#[test]
fn a_temporary_file_that_is_taken_away_each_time_is_not_made_without_end() {
    let root = tempfile::tempdir().unwrap();
    let target = root.path().join("adapter");
    let folder = publish_folder(&Thief, &target, |_| Ok(())).unwrap_err().to_string();
    let file = atomic::write_on(&Thief, &target, b"text").unwrap_err().to_string();
    for said in [folder, file] {
        assert!(said.contains("removed or replaced at once"), "{said}");
    }
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}
