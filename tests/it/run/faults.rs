//! Signals to any rank of any strategy, a rank without room for a validation, a bit that flips in a rank's memory.
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use super::fixture::{Fixture, model_config, said, train, tunesmith};
use super::ranks::{alive, children, curve, launch, send, wait_for_lines};
use super::resume::assert_same_ending;
use super::sharing::held;
use crate::comm::gloo_is_there;

/// Starts a run, sends SIGTERM to the process that `target` picks after `lines` steps, and holds what is left against the
/// promise: all have finished the same step, it is saved once, and no process stays.
fn stopped(mut command: Command, out: &Path, lines: usize, target: impl Fn(&Child) -> i32) {
    let saved = || {
        let entries = std::fs::read_dir(out).into_iter().flatten().flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("checkpoint-")).count()
    };
    let before = saved();
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_lines(out, lines);
    let all = children(child.id());
    send(target(&child), libc::SIGTERM);
    let output = child.wait_with_output().unwrap();
    let text = said(&output);
    assert_eq!(output.status.code(), Some(75), "{text}");
    assert_eq!(text.matches("everything is saved").count(), 1, "{text}");
    let step = curve(out, "step").last().copied().unwrap();
    assert!(text.contains(&format!("stopped after step {step} of")), "{text}");
    assert!(out.join(format!("checkpoint-{:06}", step as u64)).join("manifest.json").exists(), "step {step}");
    assert_eq!(saved(), before + 1, "one checkpoint");
    assert!(all.iter().all(|&process| !alive(process)), "a rank is left behind");
}

/// A run that is stopped by each signal in turn, and ends as one that nothing happened to.
fn each_signal(name: &str, start: &dyn Fn(&Path, &[&str]) -> Command, targets: &[Option<usize>]) {
    let fixture = Fixture::new();
    let extra = ["train.max_steps: 200", "train.grad_accum: 1", "train.learning_rate: 0.001"];
    let config = fixture.config("run", &extra);
    let straight = start(&config, &[]).output().unwrap();
    assert!(straight.status.success(), "{name}: {}", said(&straight));
    let out = fixture.path("stopped");
    let to = format!("train.output_dir={}", out.display());
    for (round, &target) in targets.iter().enumerate() {
        let process = |child: &Child| match target {
            Some(rank) => children(child.id())[rank],
            None => i32::try_from(child.id()).unwrap(),
        };
        stopped(start(&config, &[&to, "--resume"]), &out, 5 + 25 * round, process);
    }
    let last = start(&config, &[&to, "--resume"]).output().unwrap();
    assert!(last.status.success(), "{name}: {}", said(&last));
    assert_eq!(curve(&fixture.path("out"), "loss"), curve(&out, "loss"), "{name}: bit for bit");
    let adapter = |out: &Path| std::fs::read(out.join("adapter/adapter_model.safetensors")).unwrap();
    assert!(adapter(&fixture.path("out")) == adapter(&out), "{name}");
}

#[test]
fn a_signal_to_threads_stops_all_of_them_after_one_step() {
    for strategy in ["dp", "zero3"] {
        let strategy = format!("train.strategy={strategy}");
        let start = |config: &Path, words: &[&str]| {
            tunesmith(&[&["train", config.to_str().unwrap(), &strategy, "train.dp_ranks=2"], words].concat())
        };
        each_signal(&strategy, &start, &[None]);
    }
}

#[test]
fn a_signal_to_any_process_stops_all_of_them_after_one_step() {
    if !gloo_is_there() {
        return;
    }
    for (strategy, targets) in [("ddp", &[Some(0)][..]), ("zero3", &[None, Some(0), Some(1)])] {
        let strategy = format!("train.strategy={strategy}");
        let start = |config: &Path, words: &[&str]| {
            let launch = ["launch", "--nproc", "2", "--", "train", config.to_str().unwrap(), &strategy];
            tunesmith(&[&launch, words].concat())
        };
        each_signal(&strategy, &start, targets);
    }
}

/// Short rows to train on; of the two batches of the validation the second, which is rank 1's, is one long row.
fn long_validation(fixture: &Fixture) {
    let mut shape = model_config();
    for (key, value) in
        [("hidden_size", 96), ("intermediate_size", 256), ("num_hidden_layers", 4), ("max_position_embeddings", 4096)]
    {
        shape[key] = json!(value);
    }
    std::fs::write(fixture.path("model/config.json"), shape.to_string()).unwrap();
    let row = |length: usize| {
        let ids: Vec<usize> = (0..length).map(|at| at * 37 % 250).collect();
        json!({ "input_ids": ids, "labels": ids }).to_string() + "\n"
    };
    std::fs::write(fixture.path("train.jsonl"), (10..34).map(row).collect::<String>()).unwrap();
    std::fs::write(fixture.path("short.jsonl"), [row(12), row(20)].concat()).unwrap();
    std::fs::write(fixture.path("long.jsonl"), [row(12), row(4000)].concat()).unwrap();
}

#[test]
fn a_rank_without_room_for_a_validation_ends_all_at_the_same_place() {
    let fixture = Fixture::new();
    long_validation(&fixture);
    let lines = [
        "model.init: random",
        "model.max_seq_len: 4096",
        "data.format: tokenized",
        "train.batch_size: 1",
        "train.grad_accum: 1",
        "train.max_steps: 4",
        "train.num_threads: 1",
        "train.eval_strategy: steps",
        "train.eval_steps: 2",
        "train.eval_batch_size: 1",
        "logging.report: false",
        "logging.tensorboard: false",
    ];
    let config = fixture.config("run", &lines);
    let run = |before: &[&str], rows: &str, words: &[&str], budget: Option<f64>| -> Output {
        let rows = format!("data.val_path={}", fixture.path(rows).display());
        let args = [before, &["train", config.to_str().unwrap(), &rows, "--overwrite"], words].concat();
        let mut command = tunesmith(&args);
        let budget = budget.map_or(8 << 30, |bytes| bytes as u64);
        command.env("TUNESMITH_MEMORY_BUDGET", budget.to_string()).output().unwrap()
    };
    let good = |before: &[&str], rows: &str, words: &[&str]| {
        let output = run(before, rows, words, None);
        assert!(output.status.success(), "{}", said(&output));
        held(&said(&output).replace("[rank 0] ", ""))
    };
    let refused = |before: &[&str], words: &[&str], budget: f64| {
        let output = run(before, "long.jsonl", words, Some(budget));
        let text = said(&output);
        assert_eq!(output.status.code(), Some(9), "{text}");
        assert!(text.contains("rank 1 had no room for a validation: ") && text.contains("4,000 tokens"), "{text}");
        assert_eq!(text.matches(" error: ").count(), 1, "{text}");
        assert_eq!(curve(&fixture.path("out"), "step"), [1.0, 2.0], "{text}");
    };
    let mut of_the_row = 0.0;
    for strategy in ["train.strategy=zero3", "train.strategy=dp"] {
        let words = [strategy, "train.dp_ranks=2"];
        let (short, long) = (good(&[], "short.jsonl", &words), good(&[], "long.jsonl", &words));
        of_the_row = long - short;
        assert!(of_the_row > f64::from(8 << 20), "the row must show: {short} and {long}");
        refused(&[], &words, short + of_the_row / 2.0);
    }
    if gloo_is_there() {
        // Each process has the budget for itself, and rank 0 has room enough.
        let launch = ["launch", "--nproc", "2", "--"];
        let short = good(&launch, "short.jsonl", &[]);
        refused(&launch, &[], short + of_the_row / 2.0);
    }
}

/// Flips a bit of a value before each place in the memory of `process` where `pattern` stands; says how many there are.
fn flip(process: i32, pattern: &[u8], before: u64) -> std::io::Result<usize> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps"))?;
    let memory: File = OpenOptions::new().read(true).write(true).open(format!("/proc/{process}/mem"))?;
    let mut found = 0;
    for line in maps.lines().filter(|line| line.contains(" rw-p ")) {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split_once(' ').unwrap().0;
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        let mut bytes = vec![0; (end - start) as usize];
        // What is mapped may be gone by now.
        if memory.read_exact_at(&mut bytes, start).is_err() {
            continue;
        }
        for at in (0..bytes.len().saturating_sub(pattern.len())).step_by(4) {
            if bytes[at..at + 4] == pattern[..4] && bytes[at..].starts_with(pattern) {
                let place = start + at as u64 - 4 * before;
                let mut value = [0; 4];
                memory.read_exact_at(&mut value, place)?;
                value[0] ^= 1;
                memory.write_all_at(&value, place)?;
                found += 1;
            }
        }
    }
    Ok(found)
}

#[test]
fn a_bit_that_flips_in_the_memory_of_a_rank_is_noticed_and_the_rank_named() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    // So small a rate moves no value that is not zero: what is in memory is what the run has begun with.
    let extra = [
        "train.learning_rate: 1e-30",
        "train.warmup_steps: 0",
        "train.grad_accum: 1",
        "train.replica_check_steps: 1",
        "train.logging_steps: 1000000",
    ];
    let config = fixture.config("run", &extra);
    let first = train(&config, &["train.max_steps=1"]);
    assert!(first.status.success(), "{}", said(&first));
    let file = std::fs::read(fixture.path("out/adapter/adapter_model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let half = |name: &str| tensors.tensor(name).unwrap().data()[64..].to_vec();
    let patterns: Vec<_> = tensors.names().into_iter().filter(|name| name.contains("lora_A")).map(half).collect();
    assert!(patterns.len() > 2 && patterns.iter().all(|pattern| pattern.len() >= 64));
    for (strategy, count, victim) in [("ddp", 3, 0), ("zero1", 2, 1), ("zero2", 2, 1)] {
        let to = format!("train.output_dir={}", fixture.path(strategy).display());
        let how = format!("train.strategy={strategy}");
        let mut launcher = launch(&config, count, &[&to, &how, "train.max_steps=1000000"]);
        wait_for_lines(&fixture.path(strategy), 3);
        let process = children(launcher.id())[victim];
        let (began, mut flipped) = (Instant::now(), 0);
        // Where ranks share the state, one that flips during an update is overwritten, or becomes everybody's.
        'until: for before in (1..16).cycle() {
            for pattern in &patterns {
                match flip(process, pattern, before) {
                    Ok(found) => flipped += found,
                    Err(error) if flipped == 0 => panic!("the memory of rank {victim}: {error}"),
                    Err(_) => break 'until,
                }
                if launcher.try_wait().unwrap().is_some() {
                    break 'until;
                }
            }
            assert!(flipped > 0, "{strategy}: the values are nowhere in memory");
            assert!(began.elapsed() < Duration::from_secs(60), "{strategy}: {flipped} bits, and nobody has noticed");
        }
        let output = launcher.wait_with_output().unwrap();
        let text = said(&output);
        assert_eq!(output.status.code(), Some(8), "{strategy}: {text}");
        let named = format!("the trained values of rank {victim} differ from those of the others");
        assert!(text.contains(&named), "{strategy}: {text}");
        assert_eq!(text.matches(" error: ").count(), 1, "{strategy}: {text}");
    }
}

/// `just rank-test`.
#[test]
#[ignore = "minutes"]
fn a_rank_killed_at_any_of_ten_moments_is_made_up_for_by_a_restart() {
    assert!(gloo_is_there(), "this test is asked for by name");
    let fixture = Fixture::new();
    let extra = ["train.max_steps: 60", "train.grad_accum: 1", "train.save_strategy: steps", "train.save_steps: 3"];
    let config = fixture.config("run", &extra);
    let straight = launch(&config, 3, &[]).wait_with_output().unwrap();
    assert!(straight.status.success(), "{}", said(&straight));
    for round in 0..10 {
        let strategy = ["ddp", "zero3"][round % 2];
        let out = fixture.path(&format!("lost-{round}"));
        let words = [format!("train.output_dir={}", out.display()), format!("train.strategy={strategy}")];
        let args = ["launch", "--nproc", "3", "--max-restarts", "1", "--", "train", config.to_str().unwrap()];
        let mut command = tunesmith(&[&args[..], &[&words[0], &words[1]]].concat());
        let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for_lines(&out, 1 + round * 17 % 35);
        let before = children(launcher.id());
        send(before[round % 3], libc::SIGKILL);
        let output = launcher.wait_with_output().unwrap();
        let text = said(&output);
        assert!(output.status.success() && text.contains("restart 1 of 1"), "round {round}: {text}");
        assert!(before.iter().all(|&rank| !alive(rank)), "round {round}: a rank is left behind");
        assert_eq!(curve(&fixture.path("out"), "loss"), curve(&out, "loss"), "round {round}: bit for bit");
        assert_same_ending(&fixture.path("out"), &out, 60, false);
    }
    println!("10 kills, 10 restarts, every curve that of a run without");
}
