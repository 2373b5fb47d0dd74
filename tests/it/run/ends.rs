//! Whole runs: the files that they write, how the loss falls, and the ways in which runs end.
use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use super::events;
use super::fixture::{Fixture, said, train, tunesmith};
use crate::parity::golden;
use tunesmith::config;

/// The lines of `metrics.jsonl`, steps and evaluations apart.
pub fn metrics(output_dir: &Path) -> (Vec<Value>, Vec<Value>) {
    let text = std::fs::read_to_string(output_dir.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.partition(|line| line.get("eval_loss").is_none())
}

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn a_lora_run_learns_and_leaves_adapter_metrics_events_and_report() {
    let fixture = Fixture::new();
    let config = fixture.config(
        "run",
        &[
            "train.max_steps: 30",
            "train.eval_strategy: steps",
            "train.eval_steps: 10",
            "gen.num_samples: 3",
            "gen.max_new_tokens: 6",
        ],
    );
    let output = train(&config, &["TRAIN_SEED=7"]);
    assert!(output.status.success(), "{}", said(&output));
    let out = fixture.path("out");

    let (steps, evaluations) = metrics(&out);
    assert_eq!(steps.len(), 30);
    let keys: Vec<_> = steps[0].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        keys,
        [
            "step",
            "epoch",
            "loss",
            "learning_rate",
            "grad_norm",
            "label_tokens",
            "tokens",
            "tokens_per_second",
            "peak_bytes"
        ]
    );
    assert_eq!(evaluations.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [10, 20, 30]);
    let loss = |line: &Value| line["loss"].as_f64().unwrap();
    let mean = |lines: &[Value]| lines.iter().map(loss).sum::<f64>() / lines.len() as f64;
    assert!(mean(&steps[25..]) < 0.9 * mean(&steps[..5]), "{} -> {}", mean(&steps[..5]), mean(&steps[25..]));
    assert_eq!(steps[0]["learning_rate"], 0.0, "warm-up begins at 0");
    assert!((steps[5]["epoch"].as_f64().unwrap() - 1.0).abs() < 1e-9, "24 rows in steps of 4");

    for file in ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        assert!(out.join("adapter").join(file).is_file(), "{file}: {:?}", names(&out.join("adapter")));
    }
    assert!(out.join("checkpoint-000030").is_dir(), "the end is a checkpoint: {:?}", names(&out));
    assert!(!out.join(".lock").exists());
    assert!(text(&out.join("backend.json")).contains("\"backend\""));

    // The recorded configuration is one, and says the same.
    let recorded = config::load(&out.join("config.resolved.yaml"), &[], &[], &[]).unwrap();
    let original = config::load(&config, &["TRAIN_SEED=7".to_owned()], &[], &[]).unwrap();
    assert_eq!(recorded.config, original.config);
    assert!(text(&out.join("config.resolved.yaml")).contains("seed: 7  # argument"));

    let events = events::read(&out.join("tb"));
    assert_eq!(events.scalars["train/loss"].len(), 30);
    for tag in [
        "train/learning_rate",
        "train/grad_norm",
        "train/tokens_per_second",
        "train/epoch",
        "eval/loss",
        "eval/perplexity",
    ] {
        assert!(events.scalars.contains_key(tag), "{tag}: {:?}", events.scalars.keys());
    }
    // The groups of Transformers' `Trainer`, and those of weights behind them.
    assert!(
        events.scalars.keys().all(|tag| tag.starts_with("train/") || tag.starts_with("eval/")),
        "{:?}",
        events.scalars.keys()
    );
    assert!(events.histograms.keys().all(|tag| tag.as_str() > "train/"), "{:?}", events.histograms.keys());
    assert!(events.texts["config/text_summary"].contains("train.learning_rate"));
    assert_eq!(events.histograms["weight_norm/lora_B"][0], (1, 14.0), "seven projections in two layers");
    if let Some(seen) = events::accumulate(&out.join("tb")) {
        assert_eq!(seen[0]["train/loss"].as_array().unwrap().len(), 30);
        assert_eq!(seen[0]["eval/loss"].as_array().unwrap().len(), 3);
    }

    let report = text(&out.join("report.html"));
    for wanted in ["<svg", "train.learning_rate", "argument", "exact match", "reference"] {
        assert!(report.contains(wanted), "{wanted}");
    }
    assert!(!report.contains("http"), "self-contained");

    let said = said(&output);
    for wanted in [
        "steps in all",
        "30 (5.00 epochs)",
        "= 4",
        "warm-up done",
        "step  1/30",
        "step 30/30",
        "exact match",
        "adapter",
    ] {
        assert!(said.contains(wanted), "{wanted}:\n{said}");
    }
}

#[test]
fn a_full_run_leaves_a_model_that_can_be_trained_again() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["tuning.mode: full", "train.learning_rate: 0.003"]);
    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    let model = fixture.path("out/model");
    assert!(
        names(&model).is_superset(&["config.json", "model.safetensors", "tokenizer.json"].map(str::to_owned).into())
    );
    let before = std::fs::read(fixture.path("model/model.safetensors")).unwrap();
    assert_ne!(std::fs::read(model.join("model.safetensors")).unwrap(), before);

    let name = format!("model.name={}", model.display());
    let out = format!("train.output_dir={}", fixture.path("again").display());
    let again = train(&config, &[&name, &out]);
    assert!(again.status.success(), "{}", said(&again));
    let (first, second) = (metrics(&fixture.path("out")).0, metrics(&fixture.path("again")).0);
    assert!(
        second[0]["loss"].as_f64().unwrap() < first[0]["loss"].as_f64().unwrap(),
        "it goes on from what was learned"
    );
}

#[test]
fn pretraining_from_random_weights_needs_no_weights_file() {
    let fixture = Fixture::new();
    std::fs::remove_file(fixture.path("model/model.safetensors")).unwrap();
    let config = fixture.config("run", &["tuning.mode: full", "model.init: random", "train.max_steps: 20"]);
    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    let steps = metrics(&fixture.path("out")).0;
    let uniform = 260f64.ln();
    assert!((steps[0]["loss"].as_f64().unwrap() - uniform).abs() < 0.3, "{}", steps[0]);
    assert!(steps[19]["loss"].as_f64().unwrap() < uniform - 1.0, "{}", steps[19]);
}

#[test]
fn random_experts_are_written_stacked_where_transformers_reads_them_so() {
    let fixture = Fixture::new();
    for (family, stacked) in [
        ("granite4_moe", "model.layers.0.block_sparse_moe.input_linear.weight"),
        ("gemma4_a4b", "model.layers.0.experts.gate_up_proj"),
    ] {
        std::fs::copy(golden(family).join("model/config.json"), fixture.path("model/config.json")).unwrap();
        let run = |name: &str, lines: &[&str]| {
            let out = format!("train.output_dir: {}", fixture.path(name).display());
            let evaluates = ["train.eval_strategy: steps", "train.eval_steps: 2"];
            let common = [&["tuning.mode: full", "train.max_steps: 2", &out][..], &evaluates].concat();
            let done = train(&fixture.config(name, &[&common[..], lines].concat()), &[]);
            assert!(done.status.success(), "{family}: {}", said(&done));
        };
        let (first, again) = (format!("{family}-random"), format!("{family}-again"));
        run(&first, &["model.init: random"]);
        let model = fixture.path(&first).join("model");
        let file = std::fs::read(model.join("model.safetensors")).unwrap();
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
        assert_eq!(header[stacked]["shape"][0], 6, "{family}: {header}");
        assert!(header.as_object().unwrap().keys().all(|name| !name.contains(".experts.0.")), "{family}: {header}");
        // The numbers are those that were trained: another run finds their loss.
        let model = format!("model.name: {}", model.display());
        run(&again, &[&model, "train.learning_rate: 1e-12", "train.warmup_steps: 0"]);
        let last = |name: &str| {
            let text = std::fs::read_to_string(fixture.path(name).join("metrics.jsonl")).unwrap();
            let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            lines.filter_map(|line| line["eval_loss"].as_f64()).next_back().unwrap()
        };
        assert!((last(&first) - last(&again)).abs() < 1e-5, "{family}: {} {}", last(&first), last(&again));
    }
}

#[test]
fn an_adapter_is_the_start_of_another_run() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 20", "tuning.lora.lora_dropout: 0"]);
    assert!(train(&config, &[]).status.success());
    let adapter = format!("tuning.adapter={}", fixture.path("out/adapter").display());
    let out = format!("train.output_dir={}", fixture.path("again").display());
    let again = train(&config, &[&adapter, &out]);
    assert!(again.status.success(), "{}", said(&again));
    let (first, second) = (metrics(&fixture.path("out")).0, metrics(&fixture.path("again")).0);
    assert!(second[0]["loss"].as_f64().unwrap() < 0.9 * first[0]["loss"].as_f64().unwrap());
    let other = train(&config, &[&adapter, &out, "tuning.lora.r=2", "--overwrite"]);
    assert_ne!(other.status.code(), Some(0), "another rank does not fit");
}

#[test]
fn splitting_a_micro_batch_changes_memory_and_not_the_result() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.batch_size: 6", "train.grad_accum: 1"]);
    assert!(train(&config, &[]).status.success());
    let out = format!("train.output_dir={}", fixture.path("parts").display());
    assert!(train(&config, &["train.max_tokens_per_pass=20", &out]).status.success());
    let (whole, parts) = (metrics(&fixture.path("out")).0, metrics(&fixture.path("parts")).0);
    for (whole, parts) in whole.iter().zip(&parts) {
        assert_eq!(whole["label_tokens"], parts["label_tokens"]);
        let difference = whole["loss"].as_f64().unwrap() - parts["loss"].as_f64().unwrap();
        assert!(difference.abs() < 1e-5, "{whole} {parts}");
    }
}

#[test]
fn early_stopping_ends_a_run_that_no_longer_improves() {
    let fixture = Fixture::new();
    let config = fixture.config(
        "run",
        &[
            "train.learning_rate: 0",
            "train.max_steps: 50",
            "train.eval_strategy: steps",
            "train.eval_steps: 2",
            "train.early_stopping_patience: 2",
        ],
    );
    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    let (steps, evaluations) = metrics(&fixture.path("out"));
    assert_eq!((steps.len(), evaluations.len()), (6, 3), "the first evaluation is the best, two more do not improve");
    assert!(said(&output).contains("stopped early"), "{}", said(&output));
    assert!(fixture.path("out/checkpoint-000006").is_dir() && fixture.path("out/adapter").is_dir());
}

#[test]
fn the_best_weights_come_back_at_the_end() {
    let fixture = Fixture::new();
    // The rate soon rises far too high: the loss falls and then climbs.
    let config = fixture.config(
        "run",
        &[
            "train.learning_rate: 5",
            "train.lr_scheduler_type: linear",
            "train.warmup_steps: 40",
            "train.max_steps: 16",
            "train.eval_strategy: steps",
            "train.eval_steps: 2",
            "train.save_strategy: steps",
            "train.save_steps: 2",
            "train.save_total_limit: 1",
            "train.load_best_model_at_end: true",
        ],
    );
    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    let (_, evaluations) = metrics(&fixture.path("out"));
    let loss = |line: &Value| line["eval_loss"].as_f64().unwrap_or(f64::INFINITY);
    let best = evaluations.iter().min_by(|a, b| loss(a).total_cmp(&loss(b))).unwrap()["step"].as_u64().unwrap();
    assert!((2..16).contains(&best), "the test needs a best in the middle: {evaluations:?}");
    let out = fixture.path("out");
    let checkpoints: Vec<_> = names(&out).into_iter().filter(|name| name.starts_with("checkpoint-")).collect();
    assert_eq!(
        checkpoints,
        [format!("checkpoint-{best:06}"), "checkpoint-000016".to_owned()],
        "the last one and the best"
    );
    let adapter = |folder: &str| std::fs::read(out.join(folder).join("adapter_model.safetensors")).unwrap();
    assert_eq!(adapter("adapter"), adapter(&checkpoints[0]));
    assert_ne!(adapter("adapter"), adapter("checkpoint-000016"));
}

#[test]
fn steps_that_are_not_finite_are_skipped_and_end_the_run_with_code_8() {
    let fixture = Fixture::new();
    let config = fixture.config(
        "run",
        &[
            "train.learning_rate: 1e30",
            "train.warmup_steps: 0",
            "train.max_nonfinite_steps: 3",
            "train.max_steps: 50",
            "train.lr_scheduler_type: constant",
        ],
    );
    let output = train(&config, &[]);
    assert_eq!(output.status.code(), Some(8), "{}", said(&output));
    let said = said(&output);
    assert!(said.contains("3 steps in a row") && said.contains("hint: lower train.learning_rate"), "{said}");
    let (steps, _) = metrics(&fixture.path("out"));
    assert!(steps.len() < 10, "{} steps", steps.len());
    assert!(steps.iter().rev().take(3).all(|line| line["grad_norm"].is_null() || line["loss"].is_null()), "{steps:?}");
    assert!(!fixture.path("out/adapter").exists(), "nothing worthless is saved");
}

#[test]
fn a_run_in_which_no_step_counts_fails_however_short() {
    let fixture = Fixture::new();
    let lines = ["train.max_steps: 2", "train.fp16: true", "train.initial_scale_power: 40"];
    let output = train(&fixture.config("run", &lines), &[]);
    assert_eq!(output.status.code(), Some(8), "{}", said(&output));
    assert!(said(&output).contains("2 steps in a row"), "{}", said(&output));
    assert!(!fixture.path("out/adapter").exists(), "nothing worthless is saved");
}

#[test]
fn what_a_run_reads_is_never_what_it_clears() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &[]);
    assert!(train(&config, &[]).status.success());
    let adapter = format!("tuning.adapter={}", fixture.path("out/adapter").display());
    let out = format!("train.output_dir={}", fixture.path("").display());
    for words in [["--overwrite", &adapter], ["--overwrite", &out]] {
        let output = train(&config, &words);
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains("set another train.output_dir"), "{}", said(&output));
    }
    assert!(fixture.path("out/adapter/adapter_model.safetensors").exists());
    assert!(fixture.path("model/model.safetensors").exists());
}

#[test]
fn the_written_configuration_repeats_the_run() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 3"]);
    assert!(train(&config, &[]).status.success());
    let out = format!("train.output_dir={}", fixture.path("again").display());
    let again = train(&fixture.path("out/config.resolved.yaml"), &[&out]);
    assert!(again.status.success(), "{}", said(&again));
    // An adapter's shape in the file, full training from the shell: the record of the run leaves the former out.
    let out = format!("train.output_dir={}", fixture.path("full").display());
    assert!(train(&config, &[&out, "tuning.mode=full"]).status.success());
    let out = format!("train.output_dir={}", fixture.path("full again").display());
    let full = train(&fixture.path("full/config.resolved.yaml"), &[&out]);
    assert!(full.status.success(), "{}", said(&full));
    let losses = |of: &str| metrics(&fixture.path(of)).0.iter().map(|line| line["loss"].clone()).collect::<Vec<_>>();
    assert_eq!(losses("again"), losses("out"));
    // A file of Accelerate or DeepSpeed that the shell overrules: the record does not contradict it.
    std::fs::write(fixture.path("ds.json"), "{\"zero_optimization\": {\"stage\": 2}}").unwrap();
    let files = [
        ("accelerate", Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/accelerate/multi_gpu_ddp.yaml")),
        ("deepspeed", fixture.path("ds.json")),
    ];
    for (key, file) in files {
        let named = format!("train.{key}={}", file.display());
        let out = format!("train.output_dir={}", fixture.path(key).display());
        let words = [&*out, &*named, "train.strategy=dp", "train.dp_ranks=2", "train.max_steps=1"];
        let ran = train(&config, &words);
        assert!(ran.status.success(), "{key}: {}", said(&ran));
        let record = fixture.path(key).join("config.resolved.yaml");
        assert!(text(&record).contains(&format!("  # {key}: \"")), "{}", text(&record));
        let recorded = config::load(&record, &[], &[], &[]).unwrap().config.train;
        assert_eq!((recorded.strategy, recorded.dp_ranks), (config::Strategy::Dp, Some(2)), "{key}");
        let asked = tunesmith(&["infer", record.to_str().unwrap(), "--prompt", "ab"]).output().unwrap();
        assert!(asked.status.success(), "{key}: {}", said(&asked));
    }
}

#[test]
fn a_checkpoint_from_elsewhere_does_not_take_over_another_run() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 3"]);
    assert!(train(&config, &[]).status.success());
    let other = format!("train.output_dir={}", fixture.path("other").display());
    assert!(train(&config, &[&other]).status.success());
    let checkpoint = fixture.path("other/checkpoint-000003").display().to_string();
    let output = train(&config, &["--resume", &checkpoint]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("contains an earlier run"), "{}", said(&output));
}

#[test]
fn an_earlier_run_is_not_overwritten_unasked() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &[]);
    assert!(train(&config, &[]).status.success());
    let adapter = std::fs::read(fixture.path("out/adapter/adapter_model.safetensors")).unwrap();
    let again = train(&config, &["train.seed=1"]);
    assert_eq!(again.status.code(), Some(2));
    assert!(said(&again).contains("--resume") && said(&again).contains("--overwrite"), "{}", said(&again));
    assert_eq!(std::fs::read(fixture.path("out/adapter/adapter_model.safetensors")).unwrap(), adapter);
    let both = train(&config, &["--overwrite", "train.resume_from_checkpoint=latest"]);
    assert_eq!(both.status.code(), Some(2), "{}", said(&both));
    std::fs::write(fixture.path("out/notes.txt"), "mine").unwrap();
    let over = train(&config, &["train.seed=1", "--overwrite"]);
    assert!(over.status.success(), "{}", said(&over));
    assert_ne!(std::fs::read(fixture.path("out/adapter/adapter_model.safetensors")).unwrap(), adapter);
    assert_eq!(text(&fixture.path("out/notes.txt")), "mine");
}

#[test]
fn starting_over_removes_no_file_of_others() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 2"]);
    assert!(train(&config, &[]).status.success());
    let names =
        ["adapter/mine.txt", "adapter/sub/mine.txt", "checkpoint-000777/mine.txt", "checkpoint-9/trainer_state.json"];
    for name in names {
        let path = fixture.path("out").join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "mine").unwrap();
        let output = train(&config, &["--overwrite"]);
        assert_eq!(output.status.code(), Some(6), "{name}: {}", said(&output));
        assert!(said(&output).contains("tunesmith did not write it"), "{name}: {}", said(&output));
        assert_eq!(text(&path), "mine");
        assert!(fixture.path("out/adapter/adapter_model.safetensors").exists(), "{name}");
        std::fs::remove_file(&path).unwrap();
    }
    std::fs::remove_dir(fixture.path("out/adapter/sub")).unwrap();
    let over = train(&config, &["--overwrite"]);
    assert!(over.status.success(), "{}", said(&over));
}
