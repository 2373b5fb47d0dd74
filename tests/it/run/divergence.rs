//! A run that diverges saves nothing that is not finite, leaves the earlier checkpoints unchanged, and ends with code
//! 8. Weights that are not finite are refused everywhere they are read.
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::{Value, json};
use tunesmith::Kind;
use tunesmith::config;
use tunesmith::model::weights::WeightFiles;
use tunesmith::train::run::{Options, run};
use tunesmith::train::signals::Stop;

use super::fixture::{Fixture, said, train, tunesmith};
use super::resume::StopAt;

fn checkpoints(out: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(out).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("checkpoint-")).collect()
}

/// Whether every tensor of every checkpoint is finite: those that are not are refused when they are read.
#[track_caller]
fn all_finite(out: &Path) {
    for name in checkpoints(out) {
        for file in ["adapter_model.safetensors", "optimizer.safetensors"] {
            let files = WeightFiles::open_file(&out.join(&name).join(file)).unwrap();
            for tensor in files.names().filter(|tensor| files.dtype(tensor).is_some()) {
                files.read(tensor).unwrap();
            }
        }
    }
}

/// A regression in the order of its rows, 4 a step; the loss of the steps in `bad` (from 1) is infinite.
fn regression(bad: &[usize]) -> Fixture {
    let fixture = Fixture::new();
    let mut rows = String::new();
    for row in 0..24 {
        let label = if bad.contains(&(row / 4 + 1)) { 1e30 } else { 0.1 };
        let text = char::from(b'a' + row as u8).to_string().repeat(3);
        writeln!(rows, "{}", json!({ "text": text, "label": label })).unwrap();
    }
    std::fs::write(fixture.path("train.jsonl"), &rows).unwrap();
    std::fs::write(fixture.path("val.jsonl"), rows.lines().next().unwrap()).unwrap();
    fixture
}

const REGRESSES: [&str; 10] = [
    "task: regression",
    "gen.num_samples: UNSET",
    "data.shuffle: false",
    "tuning.lora.lora_dropout: 0.0",
    "train.save_strategy: steps",
    "train.save_steps: 1",
    "train.save_total_limit: 1",
    "logging.report: false",
    "logging.tensorboard: false",
    "train.learning_rate: 0.001",
];

fn config_of(fixture: &Fixture, name: &str, more: &[&str]) -> PathBuf {
    fixture.config(name, &[&REGRESSES[..], more].concat())
}

fn names(steps: &[u64]) -> BTreeSet<String> {
    steps.iter().map(|step| format!("checkpoint-{step:06}")).collect()
}

#[test]
fn a_run_that_ends_while_it_diverges_keeps_the_checkpoint_before() {
    // 1 to 4 count, 5 and 6 do not; or only the last one does not.
    for (bad, healthy) in [(&[5usize, 6][..], 4), (&[6], 5)] {
        let fixture = regression(bad);
        for (name, more) in [("async", &["train.save_async: true"][..]), ("waits", &["train.save_async: false"])] {
            let out = fixture.path(name);
            let to = format!("train.output_dir: {}", out.display());
            let output = train(&config_of(&fixture, name, &[&[&*to], more].concat()), &[]);
            assert_eq!(output.status.code(), Some(8), "{}", said(&output));
            let last = format!("the last checkpoint is that of step {healthy}");
            assert!(said(&output).contains(&last), "{}", said(&output));
            assert_eq!(checkpoints(&out), names(&[healthy]));
            assert!(!out.join("adapter").exists(), "nothing worthless is saved");
            all_finite(&out);
        }
    }
}

#[test]
fn a_streak_that_ends_is_saved_after_and_prunes_nothing_meanwhile() {
    let fixture = regression(&[3, 4]);
    let config = config_of(&fixture, "run", &["train.save_steps: 3", "train.save_total_limit: 2"]);
    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    // That of step 3 was due in the streak: it is made up for after step 5.
    assert_eq!(checkpoints(&fixture.path("out")), names(&[5, 6]));
    all_finite(&fixture.path("out"));
}

#[test]
fn a_stop_while_a_run_diverges_ends_with_8_and_saves_nothing() {
    let fixture = regression(&[3, 4, 5, 6]);
    for strategy in ["auto", "dp", "zero3"] {
        let out = fixture.path(strategy);
        let to = format!("train.output_dir: {}", out.display());
        let strategy = format!("train.strategy: {strategy}");
        let ranks = if strategy.ends_with("auto") { "train.dp_ranks: UNSET" } else { "train.dp_ranks: 2" };
        let rows = if strategy.ends_with("auto") { "train.grad_accum: 2" } else { "train.grad_accum: 1" };
        let config = config_of(&fixture, "run", &[&to, &strategy, ranks, rows]);
        for (at, expected, kept) in [(4, Kind::Numeric, 2), (2, Kind::Preempted, 2)] {
            let resolved = config::load(&config, &[], &[], &[]).unwrap();
            let observer = StopAt { stop: Stop::default(), at };
            let options = Options { overwrite: true, ..Options::default() };
            let error = run(&resolved, &options, &observer.stop, &observer).unwrap_err();
            assert_eq!(error.kind(), expected, "{strategy}, stopped at {at}: {error}");
            assert_eq!(checkpoints(&out), names(&[kept]), "{strategy}");
            all_finite(&out);
        }
    }
}

#[test]
fn an_overflow_that_a_lower_scale_answers_saves_as_usual() {
    let fixture = Fixture::new();
    // The scale that is doubled each two steps overflows once in a while.
    let more =
        ["train.fp16: true", "train.initial_scale_power: 38", "train.save_strategy: steps", "train.save_steps: 1"];
    let config = fixture.config("run", &[&more[..], &["train.max_steps: 30", "train.hysteresis: 1"]].concat());
    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("steps skipped for overflow"), "{}", said(&output));
    all_finite(&fixture.path("out"));
    // None of them counted.
    let output = train(&config, &["train.max_steps=1", "train.initial_scale_power=40", "--overwrite"]);
    assert_eq!(output.status.code(), Some(8), "{}", said(&output));
    assert!(said(&output).contains("no checkpoint was written"), "{}", said(&output));
}

#[test]
fn values_that_are_not_finite_are_never_saved() {
    let fixture = Fixture::new();
    // Infinite as a float32: the first update destroys every value, and its loss was finite.
    let lines =
        ["train.learning_rate: 1e39", "train.warmup_steps: 0", "train.save_strategy: steps", "train.save_steps: 1"];
    let cases: [(&str, &[&str]); 6] = [
        ("async", &["train.save_async: true"]),
        ("waits", &["train.save_async: false"]),
        ("averages", &["train.ema_decay: 0.9"]),
        ("best", &["train.load_best_model_at_end: true", "train.eval_strategy: steps", "train.eval_steps: 1"]),
        ("copies", &["train.strategy: dp", "train.dp_ranks: 2"]),
        ("shares", &["train.strategy: zero3", "train.dp_ranks: 2"]),
    ];
    for (name, more) in cases {
        let to = format!("train.output_dir: {}", fixture.path(name).display());
        let config = fixture.config(name, &[&lines[..], more, &[&to]].concat());
        let output = train(&config, &[]);
        assert_eq!(output.status.code(), Some(8), "{name}: {}", said(&output));
        let text = said(&output);
        assert!(text.contains("NaN or infinite after step 1: nothing is saved"), "{name}: {text}");
        assert!(text.contains("no checkpoint was written"), "{name}: {text}");
        assert_eq!(text.matches("error: ").count(), 1, "{name}: {text}");
        assert!(checkpoints(&fixture.path(name)).is_empty() && !fixture.path(name).join("adapter").exists(), "{name}");
    }
}

/// Puts a number into a tensor of a file.
fn poison(path: &Path, tensor: &str, value: f32) {
    let mut bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let at = 8 + length + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize + 4;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    std::fs::write(path, bytes).unwrap();
}

#[track_caller]
fn refused(output: &Output, code: i32, file: &str, tensor: &str) {
    let text = said(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains(file) && text.contains(&format!("{tensor:?}")), "{text}");
    assert!(text.contains("NaN or infinite") && text.contains("index 1 of"), "{text}");
}

#[test]
fn weights_that_are_not_finite_are_refused_wherever_they_are_read() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 2", "train.save_strategy: steps", "gen.max_new_tokens: 2"]);
    assert!(train(&config, &[]).status.success());
    let (config, path) = (config.to_str().unwrap(), |name: &str| fixture.path(name).display().to_string());
    let ask = |args: &[&str]| {
        let mut command = tunesmith(args);
        command.env_remove("CONFIG").stdin(std::process::Stdio::null()).output().unwrap()
    };
    let file = "adapter_model.safetensors";
    let tensor = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight";
    // With its manifest, the file would be refused because it was changed.
    let manifest = fixture.path("out/adapter/manifest.json");
    let listed = std::fs::read(&manifest).unwrap();
    std::fs::remove_file(&manifest).unwrap();
    poison(&fixture.path("out/adapter").join(file), tensor, f32::NAN);
    let (model, adapter, target) = (path("model"), path("out/adapter"), path("target"));
    let parts = ["--base", &*model, "--adapter", &*adapter, "--output", &*target];
    for args in [
        &["infer", config, "--prompt", "abc"][..],
        &["infer", "--model", &model, "--adapter", &adapter, "--prompt", "abc"],
        &["chat", config],
        &["eval", config, "--alone"],
        &[&["merge"], &parts[..]].concat(),
        &[&["export", "--hf"], &parts[..]].concat(),
        &[&["export", "--peft"], &parts[..]].concat(),
        &["train", config, &format!("tuning.adapter={adapter}"), &format!("train.output_dir={target}")],
        &["train", config, &format!("tuning.adapters=[{adapter}]"), &format!("train.output_dir={target}")],
    ] {
        refused(&ask(args), 5, file, tensor);
        assert!(!fixture.path("target").join("model.safetensors").exists(), "{args:?}");
    }
    std::fs::write(&manifest, listed).unwrap();
    let (file, tensor) = ("model.safetensors", "model.layers.0.mlp.up_proj.weight");
    poison(&fixture.path("model").join(file), tensor, f32::NEG_INFINITY);
    for args in [
        &["infer", "--model", &*model, "--prompt", "abc"][..],
        &["train", config, "--overwrite"],
        &["eval", config, "--base"],
        &["export", "--hf", "--base", &model, "--output", &target],
    ] {
        refused(&ask(args), 4, file, tensor);
    }
}
