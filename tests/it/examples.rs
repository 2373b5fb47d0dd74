//! What ships with the repository holds: its configurations resolve, and the quickstart's rows are what the quickstart says.
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
    paths.filter(|path| path.extension().is_some_and(|end| end == "yaml")).collect()
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
    data::load(&resolved.config, &folder, 1024, &Silent).expect("the quickstart's data")
}

#[test]
fn every_shipped_configuration_resolves() {
    let paths: Vec<PathBuf> = ["configs", "examples/quickstart"].into_iter().flat_map(yamls).collect();
    assert!(paths.len() >= 4, "{paths:?}");
    for path in paths {
        // The folder of the reader's own model isn't there; base.yaml is only included and names no data.
        let words = [format!("model.name={}", root().join("examples/quickstart/model").display())];
        let load = if path.ends_with("base.yaml") { config::load_partial } else { config::load };
        load(&path, &words, &[], &[]).unwrap_or_else(|error| panic!("{error}"));
    }
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
