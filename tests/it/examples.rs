//! Files that ship with the repository work: the configurations resolve, and the quickstart's rows are as described.
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tunesmith::config::{self, Resolved};
use tunesmith::data::{self, Dataset, Silent};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn yamls(folder: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join(folder)).expect("the folder exists");
    let paths = entries.map(|entry| entry.expect("readable").path());
    // Files of other programs.
    let theirs = |path: &PathBuf| path.ends_with("jobset.yaml") || folder.ends_with("configs/accelerate");
    paths.filter(|path| path.extension().is_some_and(|end| end == "yaml") && !theirs(path)).collect()
}

/// The rows of a JSON Lines file: question and answer of each.
fn rows(name: &str) -> Vec<(String, String)> {
    let text = fs::read_to_string(root().join("examples/quickstart/data").join(name)).expect("readable rows");
    let pair = |line: &str| -> Option<(String, String)> {
        let row: Value = serde_json::from_str(line).ok()?;
        let content = |index: usize| Some(row["messages"][index]["content"].as_str()?.to_owned());
        Some((content(0)?, content(1)?))
    };
    text.lines().map(|line| pair(line).unwrap_or_else(|| panic!("{name}: {line}"))).collect()
}

fn quickstart() -> Resolved {
    let path = root().join("examples/quickstart/quickstart.yaml");
    let local = |key: &str, file: &str| format!("{key}={}", root().join("examples/quickstart").join(file).display());
    let words = [
        local("model.name", "model"),
        local("data.train_path", "data/train.jsonl"),
        local("data.val_path", "data/held_out.jsonl"),
        "data.use_cache=false".to_owned(),
    ];
    config::load(&path, &words, &[], &[]).expect("the quickstart's configuration")
}

fn load(resolved: &Resolved) -> Dataset {
    let folder = resolved.config.model.dir().expect("a model folder");
    data::load(&resolved.config, &folder, 1024.into(), &Silent, None).expect("the quickstart's data")
}

/// Every YAML file under `folder`.
fn all_yamls(folder: &str) -> Vec<PathBuf> {
    let mut found = yamls(folder);
    for entry in fs::read_dir(root().join(folder)).expect("the folder exists") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            found.extend(all_yamls(path.strip_prefix(root()).expect("inside").to_str().expect("a name")));
        }
    }
    found
}

/// The keys that a file's first line says this version lacks: `# not yet: train.strategy (why), tuning.mode (why)`.
fn lacking(text: &str) -> Vec<String> {
    let header = text.lines().next().and_then(|line| line.strip_prefix("# not yet: "));
    let words = header.unwrap_or_default().split([',', ' ']);
    let full = |word: &&str| config::schema::options().any(|def| def.path() == **word);
    words.filter(full).map(str::to_owned).collect()
}

/// The lines of a file and of what it includes.
fn with_includes(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).expect("readable");
    let included = text.lines().filter_map(|line| line.strip_prefix("include: "));
    let mut lines: Vec<String> = included.flat_map(|name| with_includes(&path.with_file_name(name.trim()))).collect();
    lines.extend(text.lines().map(str::to_owned));
    lines
}

/// A line without a comment that sets the key's last part.
fn sets<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let leaf = key.rsplit('.').next()?;
    line.trim_start()
        .strip_prefix(leaf)?
        .strip_prefix(": ")
        .map(|value| value.split(" #").next().unwrap_or_default().trim())
}

#[test]
fn every_shipped_configuration_resolves_or_lacks_only_what_its_header_names() {
    let model = format!("model.name={}", root().join("examples/quickstart/model").display());
    let mut counts = (0, 0);
    for path in all_yamls("configs").into_iter().chain(all_yamls("examples")) {
        let text = fs::read_to_string(&path).expect("readable");
        let keys = lacking(&text);
        assert_eq!(keys.is_empty(), !text.starts_with("# not yet"), "{}: the header names no key", path.display());
        // The folder of the reader's own model isn't there; base.yaml is only included and names no data.
        let load = |path: &Path| {
            let load = if path.ends_with("base.yaml") { config::load_partial } else { config::load };
            load(path, std::slice::from_ref(&model), &[], &[])
        };
        if keys.is_empty() {
            load(&path).unwrap_or_else(|error| panic!("{error}"));
            counts.0 += 1;
            continue;
        }
        let refusal = load(&path).expect_err("a key is missing").to_string();
        assert!(refusal.contains("not yet part of this version"), "{}: {refusal}", path.display());
        assert!(keys.iter().any(|key| refusal.contains(key.as_str())), "{}: {refusal}", path.display());
        for key in &keys {
            let lines = with_includes(&path);
            let value =
                lines.iter().rev().find_map(|line| sets(line, key)).unwrap_or_else(|| panic!("{key} is not set"));
            let error = config::try_setting(key, &config::Node::Str(value.to_owned())).expect_err(key);
            assert!(error.to_string().contains("not yet part of this version"), "{}: {error}", path.display());
        }
        // Without the keys of the header, the rest holds.
        let folder = tempfile::tempdir().expect("a folder");
        for other in yamls("configs") {
            let kept = fs::read_to_string(&other).expect("readable");
            let kept: Vec<&str> =
                kept.lines().filter(|line| !keys.iter().any(|key| sets(line, key).is_some())).collect();
            fs::write(folder.path().join(other.file_name().expect("a name")), kept.join("\n")).expect("written");
        }
        load(&folder.path().join(path.file_name().expect("a name"))).unwrap_or_else(|error| panic!("{error}"));
        counts.1 += 1;
    }
    assert!(counts.0 + counts.1 >= 20, "{counts:?}");
}

/// Trains an example for two steps into a folder.
fn two_steps(name: &str, folder: &Path, more: &[String]) {
    let mut words = vec![
        format!("train.output_dir={}", folder.join(name).display()),
        format!("data.cache_dir={}", folder.join("cache").display()),
        "train.max_steps=2".to_owned(),
        "data.max_rows=64".to_owned(),
    ];
    if name != "classification" {
        words.extend(["gen.num_samples=1".to_owned(), "gen.max_new_tokens=4".to_owned()]);
    }
    words.extend_from_slice(more);
    let config = format!("examples/{name}/{name}.yaml");
    let mut args = vec!["train", config.as_str()];
    args.extend(words.iter().map(String::as_str));
    let output = crate::run::fixture::tunesmith(&args).current_dir(root()).output().expect("the program runs");
    let said = crate::run::fixture::said(&output);
    assert!(output.status.success(), "{name}: {said}");
    let metrics = fs::read_to_string(folder.join(name).join("metrics.jsonl")).expect("metrics");
    let losses: Vec<f64> =
        metrics.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()?["loss"].as_f64()).collect();
    assert!(losses.len() >= 2 && losses.iter().all(|loss| loss.is_finite() && *loss > 0.0), "{name}: {metrics}");
    assert!(folder.join(name).join("report.html").is_file(), "{name}: {said}");
}

#[test]
fn every_example_trains_through_the_program() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["chat", "instruction", "tools", "dapt", "classification", "caption"] {
        two_steps(name, folder.path(), &[]);
        assert!(folder.path().join(name).join("adapter/adapter_model.safetensors").is_file(), "{name}");
    }
    let adapter = format!("tuning.adapter={}", folder.path().join("chat/adapter").display());
    two_steps("continue", folder.path(), &[adapter]);
    two_steps("freeze", folder.path(), &[]);
    assert!(folder.path().join("freeze/model/model.safetensors").is_file());
}

#[test]
fn quickstart_rows_hold_strict_json_and_new_names() {
    let (train, held_out) = (rows("train.jsonl"), rows("held_out.jsonl"));
    let name = |answer: &str| -> String {
        let form: Value = serde_json::from_str(answer).unwrap_or_else(|error| panic!("{answer}: {error}"));
        assert_eq!(form.to_string(), answer, "compact, with the keys in their order");
        let keys: Vec<&str> = form.as_object().expect("an object").keys().map(String::as_str).collect();
        assert_eq!(keys, ["name", "people", "day", "time", "seat"], "{answer}");
        form["name"].as_str().expect("a name").to_owned()
    };
    let known: BTreeSet<String> = train.iter().map(|(_, answer)| name(answer)).collect();
    assert_eq!((train.len(), held_out.len()), (3000, 200));
    for (question, answer) in &held_out {
        assert!(!known.contains(&name(answer)), "{answer} is in a training row");
        assert!(question.contains(&name(answer)), "the name must be there to be copied: {question}");
    }
}

#[test]
fn quickstart_rows_fit_the_model_and_the_answers_fit_their_limit() {
    let resolved = quickstart();
    let dataset = load(&resolved);
    let held_out = dataset.validation.expect("held-out rows");
    assert_eq!((dataset.train.len(), held_out.len()), (3000, 200), "no row is dropped");
    for index in 0..held_out.len() {
        let (_, answer) = held_out.prompt(index).unwrap();
        assert!(answer.len() <= resolved.config.generation.max_new_tokens, "row {index}: {} tokens", answer.len());
    }
}
