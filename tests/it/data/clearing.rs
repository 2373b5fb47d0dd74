//! Cleaning data: sources mixed by weight, duplicates, contamination, length filters, and what `process` writes about them.
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tunesmith::config::{Config, Contamination, DatasetSpec, Dedupe, MixStrategy};
use tunesmith::data::process::{Part, rows};
use tunesmith::data::{Dataset, Silent};

use super::{assert_refused, config, load_with, texts};

/// Writes lines under a name.
fn file(folder: &Path, name: &str, lines: impl IntoIterator<Item = String>) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, lines.into_iter().map(|line| line + "\n").collect::<String>()).unwrap();
    path
}

fn text(text: &str) -> String {
    serde_json::json!({ "text": text }).to_string()
}

fn all_texts(data: &Dataset) -> Vec<String> {
    (0..data.train.len()).map(|index| texts(data, index).0.replace("<s>", "").replace("</s>", "")).collect()
}

fn source(path: PathBuf, weight: Option<f64>) -> DatasetSpec {
    DatasetSpec { path: vec![path], weight, ..DatasetSpec::default() }
}

/// A configuration with two sources, of 10 and 40 rows.
fn mixed(folder: &Path, weights: [Option<f64>; 2]) -> Config {
    let first = file(folder, "a.jsonl", (0..10).map(|row| text(&format!("a {row}"))));
    let second =
        file(folder, "b.csv", std::iter::once("question,answer".into()).chain((0..40).map(|row| format!("b {row},x"))));
    let mut config = config(&first);
    config.data.train_path.clear();
    config.data.datasets = vec![source(first, weights[0]), source(second, weights[1])];
    config
}

#[test]
fn sources_are_mixed_by_weight_exactly_and_again_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let plain = load_with(&mixed(folder.path(), [None, None])).unwrap();
    assert_eq!(plain.train.len(), 50, "without weights every row once");
    assert_eq!(plain.report.mix.iter().map(|share| share.used).collect::<Vec<_>>(), [10, 40]);

    let weighted = mixed(folder.path(), [Some(1.0), Some(2.0)]);
    let data = load_with(&weighted).unwrap();
    assert_eq!(
        data.report.mix.iter().map(|share| (share.available, share.used)).collect::<Vec<_>>(),
        [(10, 10), (40, 20)]
    );
    let of_first = all_texts(&data).iter().filter(|text| text.starts_with('a')).count();
    assert_eq!((of_first, data.train.len()), (10, 30));
    let again = load_with(&weighted).unwrap();
    assert_eq!((all_texts(&data), &data.fingerprint), (all_texts(&again), &again.fingerprint));
    let mut other = weighted.clone();
    other.train.data_seed = Some(99);
    assert_ne!(load_with(&other).unwrap().fingerprint, data.fingerprint, "which rows are taken is drawn");

    let mut over = weighted;
    over.data.mix_strategy = MixStrategy::InterleaveOver;
    let data = load_with(&over).unwrap();
    assert_eq!(data.report.mix.iter().map(|share| share.used).collect::<Vec<_>>(), [20, 40]);
    // A row that a mix repeats is never in validation too.
    over.data.split = 0.2;
    let data = load_with(&over).unwrap();
    let mut held_out = Vec::new();
    assert_eq!(
        rows(&data, &over, Part::Validation, &Silent, &mut |row| {
            held_out.push(row.to_owned());
            Ok(())
        })
        .unwrap(),
        Some(10)
    );
    let mut trained = Vec::new();
    rows(&data, &over, Part::Train, &Silent, &mut |row| {
        trained.push(row.to_owned());
        Ok(())
    })
    .unwrap();
    assert_eq!(trained.len(), data.train.len());
    assert!(trained.iter().all(|row| !held_out.contains(row)));
}

#[test]
fn sources_keep_their_own_format_and_names_of_the_hub_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = mixed(folder.path(), [None, None]);
    config.data.datasets[1].format = Some(tunesmith::config::Format::Text);
    assert_refused(load_with(&config), &["b.csv", "text"]);
    config.data.datasets[1] = DatasetSpec { name: Some("owner/name".into()), ..DatasetSpec::default() };
    let error = load_with(&config).unwrap_err();
    assert!(error.message().contains("source 2") && error.message().contains("owner/name"), "{error}");
}

#[test]
fn repeated_rows_go_and_the_first_stays() {
    let folder = tempfile::tempdir().unwrap();
    let long =
        |word: &str| (0..60).map(|at| if at == 30 { word.to_owned() } else { format!("w{at} ") }).collect::<String>();
    let lines =
        [text("one"), text("two"), text("one"), text(&long("x")), text(&long("y")), text("One!"), text("three")];
    let path = file(folder.path(), "rows.jsonl", lines);
    let mut config = config(&path);
    config.data.dedupe = Dedupe::Exact;
    let data = load_with(&config).unwrap();
    assert_eq!((data.train.len(), data.report.train.duplicates.rows), (6, 1));
    assert!(data.report.train.duplicates.places[0].ends_with("rows.jsonl:3"), "{:?}", data.report.train.duplicates);
    assert!(
        data.report.warnings.iter().any(|warning| warning.contains("1 row left out, duplicating an earlier one")),
        "{:?}",
        data.report.warnings
    );

    config.data.dedupe = Dedupe::Minhash;
    config.data.dedupe_threshold = 0.7;
    let data = load_with(&config).unwrap();
    let kept = all_texts(&data);
    let near = &data.report.train.near_duplicates;
    assert_eq!(near.rows, 2, "{kept:?}");
    assert!(near.places[0].ends_with("rows.jsonl:5") && near.places[1].ends_with("rows.jsonl:6"), "{near:?}");
    assert!(kept[0] == "one" && kept[1] == "two" && kept[3] == "three" && kept[2].contains('x'), "{kept:?}");
    assert_eq!(data.fingerprint, load_with(&config).unwrap().fingerprint);
    config.data.dedupe_threshold = 1.0;
    assert_eq!(load_with(&config).unwrap().report.train.near_duplicates.rows, 1, "only what has the same words");
}

#[test]
fn training_rows_that_are_evaluated_on_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let words = |from: usize, to: usize| (from..to).map(|word| format!("word{word}")).collect::<Vec<_>>().join(" ");
    let train = [text("Short one."), text(&words(0, 40)), text(&words(100, 140)), text(&words(15, 45)), text("other")];
    let path = file(folder.path(), "train.jsonl", train);
    let held_out = file(folder.path(), "val.jsonl", [text("short ONE"), text(&words(0, 45))]);
    let mut config = config(&path);
    config.data.val_path = vec![held_out];
    assert_eq!(load_with(&config).unwrap().report.train.contaminated.rows, 0, "nobody looks unless asked");
    config.data.contamination = Contamination::Warn;
    let data = load_with(&config).unwrap();
    assert_eq!((data.train.len(), data.report.train.contaminated.rows), (5, 3));
    assert!(data.report.warnings.iter().any(|warning| warning.contains("also in the evaluation rows")));
    config.data.contamination = Contamination::Drop;
    let data = load_with(&config).unwrap();
    assert_eq!(data.train.len(), 2);
    assert!(
        all_texts(&data)[0].starts_with("word100")
            && data.report.train.contaminated.places[0].ends_with("train.jsonl:1")
    );

    // What stands in many evaluation rows is boilerplate.
    let instruction = words(200, 240);
    let rows = |answers: std::ops::Range<usize>| {
        answers.map(|row| text(&format!("{instruction} answer{row}"))).collect::<Vec<_>>()
    };
    config.data.train_path = vec![file(folder.path(), "train.jsonl", rows(0..20))];
    config.data.val_path = vec![file(folder.path(), "val.jsonl", rows(18..40))];
    let data = load_with(&config).unwrap();
    assert_eq!(data.report.train.contaminated.rows, 2, "the two that are the same");

    // Validation rows that were taken from the training rows are looked for as well.
    config.data.val_path.clear();
    config.data.split = 0.5;
    let twice = (0..10).flat_map(|row| [text(&format!("row {row}")), text(&format!("row {row}"))]);
    config.data.train_path = vec![file(folder.path(), "train.jsonl", twice)];
    let data = load_with(&config).unwrap();
    let held_out = data.validation.as_ref().unwrap();
    assert!(data.report.train.contaminated.rows > 0);
    let held_out: Vec<_> = super::examples(held_out);
    assert!(super::examples(&data.train).iter().all(|example| !held_out.contains(example)));
}

#[test]
fn rows_outside_of_the_lengths_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [2, 5, 8, 11].map(|length| format!("{{\"input_ids\": {:?}}}", vec![7; length]));
    let mut config = config(&file(folder.path(), "rows.jsonl", rows));
    config.data.min_length = Some(3);
    config.data.max_length = Some(8);
    config.model.max_seq_len = 6;
    let data = load_with(&config).unwrap();
    let counts = &data.report.train;
    assert_eq!((counts.below_min_length, counts.above_max_length, counts.truncated), (1, 1, 1));
    assert_eq!(data.train.lengths(), [5, 6]);
    config.data.min_length = Some(100);
    config.data.max_length = None;
    assert_refused(load_with(&config), &["no row can be used, of 4", "data.min_length"]);
}

#[test]
fn processed_rows_are_the_same_rows() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("deep/rows.jsonl");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let run = |words: &[&str], out: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tunesmith"));
        command.current_dir(root).args([
            "process",
            "examples/quickstart/quickstart.yaml",
            "data.use_cache=false",
            "--out",
        ]);
        command.arg(out).args(words).output().unwrap()
    };
    let done = run(&["data.max_rows=40", "data.dedupe=exact"], &out);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let report: Value = serde_json::from_slice(&std::fs::read(out.with_extension("report.json")).unwrap()).unwrap();
    let text = std::fs::read_to_string(&out).unwrap();
    assert_eq!(report["splits"]["train"]["rows"], text.lines().count());
    assert!(std::fs::read_to_string(out.with_extension("report.md")).unwrap().contains("# Data report"));
    assert!(out.with_extension("validation.jsonl").exists());
    assert!(text.lines().all(|line| serde_json::from_str::<Value>(line).unwrap()["messages"].is_array()));
    // Once more through: nothing changes.
    let again = folder.path().join("again.jsonl");
    let path = format!("data.train_path={}", out.display());
    assert!(run(&[&path, "data.max_rows=40"], &again).status.success());
    assert_eq!(std::fs::read_to_string(&again).unwrap(), text);
    // Tokens that a run adds are of the vocabulary.
    let added = file(folder.path(), "added.jsonl", [r#"{"text": "one <added> token"}"#.to_owned()]);
    let with_added = folder.path().join("with_added.jsonl");
    let added = [format!("data.train_path={}", added.display()), "data.val_path=[]".to_owned()];
    let done = run(&[&added[0], &added[1], "tuning.new_tokens=[\"<added>\"]"], &with_added);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert!(std::fs::read_to_string(&with_added).unwrap().contains("<added>"));
    let wrong = run(&[&path], &out);
    assert_eq!(wrong.status.code(), Some(2), "{}", String::from_utf8_lossy(&wrong.stderr));
    assert_eq!(std::fs::read_to_string(&out).unwrap(), text, "what is read is never replaced");
    let left = std::fs::read_dir(out.parent().unwrap())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().contains("tmp"));
    assert_eq!(left.count(), 0);
}
