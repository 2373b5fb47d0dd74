//! Configurations as the guides of other toolkits print them, run with a model and rows of ours.
use std::path::{Path, PathBuf};
use std::process::Output;

use super::fixture::{Fixture, said, tunesmith};
use crate::comm::gloo_is_there;

fn printed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/config/printed").join(name)
}

/// What a user adds: the model, the rows, two steps.
fn words(fixture: &Fixture) -> Vec<String> {
    let path = |name: &str| fixture.path(name).display().to_string();
    vec![
        format!("model.name={}", path("model")),
        format!("data.train_path={}", path("train.jsonl")),
        format!("train.output_dir={}", path("out")),
        format!("data.cache_dir={}", path("cache")),
        "train.max_steps=2".to_owned(),
        "gen.num_samples=0".to_owned(),
    ]
}

fn trained(fixture: &Fixture, output: &Output) -> bool {
    let lines = std::fs::read_to_string(fixture.path("out/metrics.jsonl")).unwrap_or_default();
    output.status.success() && lines.lines().filter(|line| line.contains("\"loss\"")).count() == 2
}

#[test]
fn a_printed_configuration_trains_with_a_model_and_rows() {
    for (name, more) in [
        ("rtx4090_sli.yaml", None),
        ("a100_pair.yaml", None),
        ("h200_quad.yaml", None),
        ("multi_gpu_config.yaml", None),
        ("fast_eval.yaml", None),
        ("fast_eval.yaml", Some("val.jsonl")),
        ("deepspeed_custom.json", None),
        ("acc_single.yaml", None),
    ] {
        let fixture = Fixture::new();
        let mut args = vec!["train".to_owned(), printed(name).display().to_string()];
        args.extend(words(&fixture));
        args.extend(more.map(|file| format!("data.val_path={}", fixture.path(file).display())));
        let output = tunesmith(&args).output().unwrap();
        let text = said(&output);
        assert!(trained(&fixture, &output), "{name}: {text}");
        let once = |what: &str| text.matches(what).count() == 1;
        match (name, more) {
            ("multi_gpu_config.yaml", _) => {
                assert!(
                    once("train.dataloader_num_workers: 4 (") && once("train.dataloader_pin_memory: true ("),
                    "{text}"
                );
                assert!(once("validates nothing: there are no validation rows"), "{text}");
            }
            ("fast_eval.yaml", None) => assert!(once("validates nothing"), "{text}"),
            ("fast_eval.yaml", Some(_)) => assert!(text.contains("evaluation after step 2"), "{text}"),
            ("h200_quad.yaml", _) => assert!(once("model.max_seq_len: 128, which is what this model sees"), "{text}"),
            ("deepspeed_custom.json", _) => assert!(!text.contains("not needed: "), "{text}"),
            _ => {}
        }
    }
}

#[test]
fn files_of_deepspeed_and_accelerate_are_named_by_their_variables() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 2"]);
    let run = |args: &[&str], variable: &str, name: &str| {
        let _ = std::fs::remove_dir_all(fixture.path("out"));
        let mut args = args.to_vec();
        args.push(config.to_str().unwrap());
        let output = tunesmith(&args).env(variable, printed(name)).env("TRAIN_NUM_THREADS", "1").output().unwrap();
        assert!(trained(&fixture, &output), "{name}: {}", said(&output));
        said(&output)
    };
    run(&["train"], "DEEPSPEED_CONFIG", "deepspeed_custom.json");
    run(&["train"], "ACCELERATE_CONFIG_FILE", "acc_single.yaml");
    if gloo_is_there() {
        for name in ["acc_ddp.yaml", "acc_fsdp.yaml"] {
            let text = run(&["launch", "--", "train"], "ACCELERATE_CONFIG_FILE", name);
            assert!(text.contains("2 ranks on the CPU"), "{name}: {text}");
        }
    }
}

#[test]
fn a_model_and_rows_train_without_a_configuration() {
    let fixture = Fixture::new();
    let path = |name: &str| fixture.path(name).display().to_string();
    let (model, rows) = (path("model"), path("train.jsonl"));
    let (out, cache) = (format!("train.output_dir={}", path("out")), format!("data.cache_dir={}", path("cache")));
    let run = |args: &[&str]| tunesmith(args).current_dir(fixture.root.path()).output().unwrap();
    let output =
        run(&["train", "--model", &model, "--data", &rows, "train.max_steps=2", "gen.num_samples=0", &out, &cache]);
    assert!(trained(&fixture, &output), "{}", said(&output));
    for command in ["config", "data", "memory-check"] {
        let output = run(&[command, "--model", &model, "--data", &rows, "--data", &path("val.jsonl"), &cache]);
        assert!(output.status.success(), "{command}: {}", said(&output));
    }
    let output = run(&["plan", "--model", &model]);
    assert!(output.status.success(), "{}", said(&output));
    // Beside a file the flags go before it.
    let config = fixture.config("run", &["train.max_steps: 2", "model.name: nowhere"]);
    let output = run(&["train", config.to_str().unwrap(), "--model", &model, "--overwrite"]);
    assert!(trained(&fixture, &output), "{}", said(&output));
    let refused = |args: &[&str], expected: &str| {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains(expected), "{}", said(&output));
    };
    refused(&["train", "--model", &model], "data.train_path is not set");
    refused(&["train", "--data", &rows], "model.name is not set");
    refused(&["train"], "tunesmith train --model DIR --data rows.jsonl");
}

#[test]
fn a_warm_up_that_is_longer_than_the_run_is_told() {
    let text = Fixture::new();
    let config = text.config("run", &["train.max_steps: 2", "train.warmup_steps: 1000"]);
    let done = super::fixture::train(&config, &[]);
    assert!(done.status.success(), "{}", said(&done));
    assert!(said(&done).contains("warning: train.warmup_steps: 1000, and this run has 2 steps"), "{}", said(&done));
}

#[test]
fn what_is_wrong_with_the_rows_is_a_warning_whatever_the_command() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 1", "train.warmup_steps: 0", "data.max_length: 12"]);
    let written = fixture.path("written.jsonl");
    let process = ["process", "--out", written.to_str().unwrap()];
    let commands: [&[&str]; 6] =
        [&["data"], &process, &["memory-check"], &["train"], &["plan", "--run"], &["eval", "--base", "--rows", "1"]];
    for args in commands {
        let output = tunesmith(&[args, &[config.to_str().unwrap()]].concat()).output().unwrap();
        let text = said(&output);
        assert!(output.status.success(), "{args:?}: {text}");
        assert_eq!(text.matches("warning: train: ").count(), 1, "{args:?}: {text}");
        assert!(text.contains("above data.max_length left out") && !text.contains("note: train: "), "{args:?}: {text}");
    }
}

#[test]
fn rows_that_are_cut_and_rows_that_lose_their_labels_are_told_by_training_and_by_measuring() {
    let fixture = Fixture::new();
    let long = "a".repeat(100);
    let chat = |question: &str, answer: &str| serde_json::json!({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]});
    let label = |text: &str, label: &str| serde_json::json!({"text": text, "label": label});
    let held = fixture.path("val.jsonl");
    let write = |rows: &[serde_json::Value]| {
        let lines: Vec<String> = rows.iter().map(|row| format!("{row}\n")).collect();
        std::fs::write(&held, lines.concat()).unwrap();
    };
    let told = |config: &Path, warnings: &[String]| {
        let config = config.to_str().unwrap();
        for args in [&["train", config, "--overwrite"][..], &["eval", config, "--rows", "1"]] {
            let output = tunesmith(args).output().unwrap();
            let text = said(&output);
            assert!(output.status.success(), "{args:?}: {text}");
            for warning in warnings {
                assert_eq!(text.matches(warning.as_str()).count(), 1, "{args:?}: {warning}: {text}");
            }
        }
    };
    write(&[chat("ab", "ba"), chat("ab", &long), chat(&long, "ba")]);
    let lost = format!(
        "warning: validation: 1 of 3 rows left out without labels, 1 of them because truncation cut the labels off \
         (first: {}:3): raise model.max_seq_len, or set data.truncation: left",
        held.display()
    );
    let cut = "warning: validation: 1 row cut to 64 tokens".to_owned();
    let short = ["train.max_steps: 1", "train.warmup_steps: 0", "gen.max_new_tokens: 2", "eval.bootstrap_samples: 20"];
    told(&fixture.config("run", &short), &[cut.clone(), lost]);

    write(&[label("ab", "x"), label(&long, "y"), label("cd", "y")]);
    std::fs::write(fixture.path("train.jsonl"), format!("{}\n{}\n", label("ab", "x"), label("cd", "y"))).unwrap();
    let classifies = ["task: classification", "gen.num_samples: UNSET", "gen.max_new_tokens: UNSET"];
    told(&fixture.config("classifies", &[&short[..], &classifies].concat()), &[cut]);
}

#[test]
fn a_run_without_held_out_rows_says_why_it_shows_no_samples() {
    let fixture = Fixture::new();
    let words = ["train.max_steps: 1", "train.warmup_steps: 0"];
    let without = [&words[..], &["gen.num_samples: 2", "data.val_path: UNSET"]].concat();
    for (lines, noted) in [(&without[..], true), (&[&words[..], &["data.val_path: UNSET"]].concat(), false)] {
        let output = super::fixture::train(&fixture.config("run", lines), &["--overwrite"]);
        assert!(output.status.success(), "{}", said(&output));
        assert_eq!(said(&output).contains("no rows are held out: set data.split"), noted, "{}", said(&output));
    }
}
