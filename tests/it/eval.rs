//! `tunesmith eval`, and validations that generate: what is refused, what metrics read, and that memory does not grow with the
//! number of rows.
use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};

use crate::run::fixture::{Fixture, said, train, tunesmith};

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn eval(config: &Path, words: &[&str]) -> Output {
    tunesmith(&[&["eval", config.to_str().unwrap()], words].concat()).env_remove("CONFIG").output().unwrap()
}

#[track_caller]
fn refused(output: &Output, code: i32, hint: &str) {
    assert_eq!(output.status.code(), Some(code), "{}", said(output));
    assert!(said(output).contains(hint), "{}", said(output));
    assert!(!said(output).contains("asking "), "refused before a model answers: {}", said(output));
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

#[test]
fn two_folders_of_one_name_are_both_shown_and_nonsense_is_refused_at_once() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["gen.max_new_tokens: 4", "eval.bootstrap_samples: 20"]);
    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    let [one, two] = ["one/adapter", "two/adapter"].map(|name| fixture.path(name));
    for folder in [&one, &two] {
        copy(&fixture.path("out/adapter"), folder);
    }
    let [one, two] = [one, two].map(|path| path.display().to_string());
    let output = eval(&config, &["--compare", &one, &two]);
    assert!(output.status.success(), "{}", said(&output));
    let metrics: Value =
        serde_json::from_str(&fs::read_to_string(fixture.path("out/eval/metrics.json")).unwrap()).unwrap();
    assert_eq!(metrics["models"].as_object().unwrap().keys().collect::<Vec<_>>(), [&one, &two]);
    assert_eq!(metrics["rows"], 6);
    let samples = lines(&fixture.path("out/eval/samples.jsonl"));
    assert_eq!(samples.len(), 6);
    assert_eq!(samples[0]["answers"][&one], samples[0]["answers"][&two]);
    let output = eval(&config, &["--rows", "2", "--compare", "base", &one]);
    assert!(output.status.success() && said(&output).contains("peak memory"), "{}", said(&output));
    assert_eq!(lines(&fixture.path("out/eval/samples.jsonl")).len(), 2);

    refused(&eval(&config, &["--compare", &one, &one]), 2, "both are");
    refused(&eval(&config, &["--compare", "tuned", "tuned"]), 2, "both are");
    refused(&eval(&config, &["--rows", "0"]), 2, "expected an integer, at least 1");
    fs::write(fixture.path("file"), "").unwrap();
    refused(&eval(&config, &["--output", &fixture.path("file").display().to_string()]), 6, "Not a directory");
    fs::create_dir_all(fixture.path("taken/samples.jsonl")).unwrap();
    let taken = eval(&config, &["--output", &fixture.path("taken").display().to_string()]);
    refused(&taken, 6, "samples.jsonl");
}

/// A scorer that writes down what it is asked, and a line when it starts.
fn recorder(file: &Path) -> String {
    let script = format!(
        "echo start >> {0}; while IFS= read -r line; do printf '%s\\n' \"$line\" >> {0}; echo '{{\"score\": 1}}'; done",
        file.display()
    );
    format!("eval.scorer: {}", json!(["sh", "-c", script]))
}

#[test]
fn measures_see_the_last_question_and_one_scorer_runs_whatever_the_ranks() {
    let fixture = Fixture::new();
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let rows = [
        json!({"messages": [turn("user", "ab"), turn("assistant", "c"), turn("user", "de"), turn("assistant", "f")]}),
        json!({"messages": [turn("system", "s"), turn("user", "gh"), turn("assistant", "i")]}),
    ];
    fs::write(fixture.path("val.jsonl"), rows.iter().map(|row| row.to_string() + "\n").collect::<String>()).unwrap();
    let seen = fixture.path("seen");
    let scorer = recorder(&seen);
    let config = fixture.config(
        "run",
        &[
            "train.eval_strategy: steps",
            "train.eval_steps: 3",
            "train.predict_with_generate: true",
            "train.generation_max_new_tokens: 3",
            "gen.max_new_tokens: 3",
            "eval.metrics: [\"sari\"]",
            "train.metric_for_best_model: scorer.score",
            "train.greater_is_better: true",
            &scorer,
        ],
    );
    let recorded = |sources: &[&str]| {
        let text = fs::read_to_string(&seen).unwrap();
        fs::remove_file(&seen).unwrap();
        let (starts, asked): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| *line == "start");
        let mut found: Vec<String> = asked
            .iter()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["source"].as_str().unwrap().to_owned())
            .collect();
        found.sort();
        assert_eq!(found, sources);
        starts.len()
    };
    // A trial of one row, then two validations of two rows.
    let wanted = ["de", "de", "de", "gh", "gh"];
    for words in [&[][..], &["train.strategy=dp", "train.dp_ranks=2", "train.grad_accum=1"]] {
        let output = train(&config, &[words, &["--overwrite"]].concat());
        assert!(output.status.success(), "{}", said(&output));
        assert_eq!(recorded(&wanted), 3, "{words:?}: one scorer for each validation");
        let scored: Vec<Value> = lines(&fixture.path("out/metrics.jsonl"))
            .into_iter()
            .filter(|line| line["eval_scores"]["scorer.score"] == 1.0)
            .collect();
        assert_eq!(scored.len(), 2);
    }
    let output = eval(&config, &["--base"]);
    assert!(output.status.success(), "{}", said(&output));
    // It is tried before the first model is loaded.
    assert_eq!(recorded(&["de", "gh"]), 2);
}

#[test]
fn a_row_s_loss_weight_counts_in_eval_as_in_validation() {
    let fixture = Fixture::new();
    let rows = lines(&fixture.path("val.jsonl"));
    let weighed = |(index, mut row): (usize, Value)| {
        row["loss_weight"] = [json!(0), json!(1), json!(2.5)][index % 3].clone();
        row.to_string() + "\n"
    };
    let text: String = rows.into_iter().enumerate().map(weighed).collect();
    fs::write(fixture.path("val.jsonl"), &text).unwrap();
    let evaluates = ["train.eval_strategy: steps", "train.eval_steps: 6", "gen.max_new_tokens: 2"];
    let config = fixture.config("run", &evaluates);
    let trained = train(&config, &[]);
    assert!(trained.status.success(), "{}", said(&trained));
    let output = eval(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    let last = lines(&fixture.path("out/metrics.jsonl")).into_iter().rfind(|line| line["eval_loss"].is_f64()).unwrap();
    let text = fs::read_to_string(fixture.path("out/eval/metrics.json")).unwrap();
    let metrics: Value = serde_json::from_str(&text).unwrap();
    let scores = &metrics["models"]["tuned"]["scores"];
    let near = |name: &str, wanted: &Value| {
        let [found, wanted] = [&scores[name]["value"], wanted].map(|value| value.as_f64().unwrap());
        assert!((found - wanted).abs() < 1e-5 * wanted, "{name}: {found} in eval, {wanted} in training");
    };
    near("loss", &last["eval_loss"]);
    near("perplexity", &last["eval_scores"]["perplexity"]);
    near("byte_perplexity", &last["eval_scores"]["byte_perplexity"]);
}

/// The peak bytes that a process with a memory budget reports.
#[track_caller]
fn held(output: &Output) -> f64 {
    assert!(output.status.success(), "{}", said(output));
    let text = said(output);
    let line = text.lines().find(|line| line.ends_with("in use at most")).expect("a summary");
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "of").unwrap();
    let unit = match words[at - 1] {
        "KiB" => 1024.0,
        "MiB" => 1_048_576.0,
        other => panic!("{other}"),
    };
    words[at - 2].parse::<f64>().unwrap() * unit
}

/// Eight times the rows, and the same memory, but for where the rows lie in their file: no logits, texts or scores are kept.
#[test]
fn memory_does_not_grow_with_the_rows_of_an_evaluation() {
    const ALLOWED: f64 = 512.0 * 1024.0;
    let fixture = Fixture::new();
    let rows = |count: usize| {
        let row = |number: usize| {
            let word: String = (0..24).map(|at| char::from(b'a' + ((number * 7 + at * 3) % 26) as u8)).collect();
            json!({"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word}]}).to_string()
                + "\n"
        };
        let path = fixture.path(&format!("val{count}.jsonl"));
        fs::write(&path, (0..count).map(row).collect::<String>()).unwrap();
        format!("data.val_path={}", path.display())
    };
    let (few, many) = (rows(64), rows(512));
    let config = fixture.config(
        "run",
        &[
            "train.eval_strategy: steps",
            "train.eval_steps: 100",
            "train.eval_on_start: true",
            "train.max_steps: 1",
            "train.final_eval: false",
            "gen.max_new_tokens: 4",
            "eval.bootstrap_samples: 50",
            "logging.report: false",
            "train.num_threads: 2",
            "train.memory_budget: 8GiB",
        ],
    );
    for (what, word) in [("loss", "train.predict_with_generate=false"), ("answers", "train.predict_with_generate=true")]
    {
        let [few, many] = [&few, &many].map(|rows| held(&train(&config, &[rows, word, "--overwrite"])));
        assert!(many - few < ALLOWED, "{what}: {few} bytes for 64 rows, {many} for 512");
    }
    let [few, many] = [&few, &many].map(|rows| held(&eval(&config, &["--compare", "base", "tuned", rows])));
    assert!(many - few < ALLOWED, "eval: {few} bytes for 64 rows, {many} for 512");
}
