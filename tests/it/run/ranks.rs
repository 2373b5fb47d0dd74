//! Several ranks: threads of one process, processes under the launcher; the curve is that of one, and no rank is left
//! behind when another is lost.
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::fixture::{Fixture, said, train, tunesmith};
use crate::comm::gloo_is_there;

pub(super) fn launch(config: &Path, nproc: usize, words: &[&str]) -> Child {
    launch_with(&["--nproc", &nproc.to_string()], config, words)
}

fn launch_with(flags: &[&str], config: &Path, words: &[&str]) -> Child {
    let args = [&["launch"], flags, &["--", "train", config.to_str().unwrap()], words].concat();
    tunesmith(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn lines(out: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

pub(super) fn wait_for_lines(out: &Path, count: usize) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while lines(out).len() < count {
        assert!(Instant::now() < deadline, "no {count} lines in {}", out.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// `key` of each line that has it.
pub(super) fn curve(out: &Path, key: &str) -> Vec<f64> {
    lines(out).iter().filter_map(|line| line[key].as_f64()).collect()
}

/// The largest relative difference of two curves.
pub(super) fn apart(first: &[f64], second: &[f64]) -> f64 {
    assert_eq!(first.len(), second.len());
    assert!(!first.is_empty());
    first.iter().zip(second).map(|(a, b)| ((a - b) / a).abs()).fold(0.0, f64::max)
}

/// Processes whose parent is `parent`.
pub(super) fn children(parent: u32) -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_child = |process: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        after_name.split_whitespace().nth(1).and_then(|ppid| ppid.parse().ok()) == Some(parent)
    };
    let mut found: Vec<i32> = numbers.filter(is_child).collect();
    found.sort_unstable();
    found
}

pub(super) fn alive(process: i32) -> bool {
    // SAFETY: `kill` touches no memory, and signal 0 only asks whether the process is there.
    unsafe { libc::kill(process, 0) == 0 }
}

pub(super) fn send(process: i32, signal: i32) {
    // SAFETY: `kill` touches no memory; the process is one that a test has started.
    assert_eq!(unsafe { libc::kill(process, signal) }, 0);
}

#[test]
fn ranks_as_threads_and_as_processes_train_the_curve_of_one_process() {
    let fixture = Fixture::new();
    // 22 rows by 8 a step: the last step of an epoch is short, and for 4 ranks there is nothing for some.
    let extra = ["train.max_steps: 9", "data.max_rows: 22", "train.eval_strategy: steps", "train.eval_steps: 3"];
    let config = fixture.config("run", &extra);
    let out = |name: &str| fixture.path(name);
    let run = |name: &str, words: &[&str]| {
        let to = format!("train.output_dir={}", out(name).display());
        let output = train(&config, &[&[&*to], words].concat());
        assert!(output.status.success(), "{}", said(&output));
    };
    run("one", &["train.grad_accum=4"]);
    for (name, words) in [
        ("dp2", ["train.strategy=dp", "train.dp_ranks=2", "train.grad_accum=2"]),
        ("dp4", ["train.strategy=dp", "train.dp_ranks=4", "train.grad_accum=1"]),
    ] {
        run(name, &words);
        for key in ["loss", "grad_norm", "eval_loss"] {
            let difference = apart(&curve(&out("one"), key), &curve(&out(name), key));
            assert!(difference < 1e-5, "{name}: {key} differs by {difference:e}");
        }
        assert_eq!(curve(&out("one"), "tokens"), curve(&out(name), "tokens"), "every row once");
    }
    if !gloo_is_there() {
        return;
    }
    let to = format!("train.output_dir={}", out("ddp2").display());
    let output = launch(&config, 2, &[&to, "train.grad_accum=2"]).wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let weights = |name: &str| std::fs::read(out(name).join("adapter/adapter_model.safetensors")).unwrap();
    assert!(weights("ddp2") == weights("dp2"), "the same sums in the same order: the same bits, whatever carries them");
    assert_eq!(curve(&out("ddp2"), "loss"), curve(&out("dp2"), "loss"));
    // One rank speaks; each line says which.
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.lines().all(|line| line.starts_with("[rank 0] ")), "{text}");
    assert!(text.contains("ddp: 2 processes over gloo"), "{text}");
}

/// Over a stand-in for NCCL and the GPUs: the same bits as over Gloo.
#[cfg(feature = "cuda")]
#[test]
fn processes_over_nccl_train_the_same_bits() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 6"]);
    let run = |name: &str, flags: &[&str], words: &[&str], more: &[(&str, String)]| {
        let to = format!("train.output_dir={}", fixture.path(name).display());
        let args = [flags, &["train", config.to_str().unwrap(), &to, "train.grad_accum=1"], words].concat();
        tunesmith(&args).envs(more.iter().map(|(key, value)| (*key, value.as_str()))).output().unwrap()
    };
    let launch = ["launch", "--nproc", "2", "--timeout", "20", "--"];
    let nccl = ["train.ddp_backend=nccl"];
    let threads = run("dp", &[], &["train.strategy=dp", "train.dp_ranks=2"], &[]);
    assert!(threads.status.success(), "{}", said(&threads));
    let processes = run("nccl", &launch, &nccl, &crate::comm::stand_in(2));
    assert!(processes.status.success(), "{}", said(&processes));
    assert!(said(&processes).contains("ddp: 2 processes over nccl"), "{}", said(&processes));
    assert_eq!(curve(&fixture.path("nccl"), "loss"), curve(&fixture.path("dp"), "loss"));
    let weights = |name: &str| std::fs::read(fixture.path(name).join("adapter/adapter_model.safetensors")).unwrap();
    assert!(weights("nccl") == weights("dp"), "the same sums in the same order");
    // One GPU for two ranks, and none at all.
    let shared = run("shared", &launch, &nccl, &crate::comm::stand_in(1));
    assert_eq!(shared.status.code(), Some(2), "{}", said(&shared));
    assert!(said(&shared).contains("train.ddp_backend: nccl, but rank 1: there is no GPU 1"), "{}", said(&shared));
    if !Path::new("/dev/nvidiactl").exists() {
        let none = run("none", &launch, &nccl, &[]);
        assert_eq!(none.status.code(), Some(2), "{}", said(&none));
        assert!(said(&none).contains("there is no NVIDIA driver"), "{}", said(&none));
    }
}

#[test]
fn a_killed_rank_ends_the_others_and_is_named() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 100000"]);
    for victim in 0..3 {
        let launcher = launch(&config, 3, &["--overwrite"]);
        wait_for_lines(&fixture.path("out"), 3);
        let ranks = children(launcher.id());
        assert_eq!(ranks.len(), 3);
        let began = Instant::now();
        send(ranks[victim], libc::SIGKILL);
        let output = launcher.wait_with_output().unwrap();
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        assert!(ranks.iter().all(|&rank| !alive(rank)), "a rank is left behind");
        let text = said(&output);
        assert_eq!(output.status.code(), Some(7), "{text}");
        assert!(text.contains(&format!("peer error: rank {victim} was killed by signal 9")), "{text}");
        assert!(text.contains(&format!("rank {victim} ended")) && text.contains("seen by rank"), "{text}");
        assert!(text.contains("all_gather") || text.contains("all_to_all"), "the operation is named: {text}");
        std::fs::remove_dir_all(fixture.path("out")).unwrap();
    }
}

/// `just rank-test`.
#[test]
#[ignore = "three minutes"]
fn a_rank_killed_at_any_of_fifty_moments_leaves_nobody_behind() {
    assert!(gloo_is_there(), "this test is asked for by name");
    let fixture = Fixture::new();
    let config =
        fixture.config("run", &["train.max_steps: 100000", "train.save_steps: 3", "train.save_strategy: steps"]);
    let mut slowest = Duration::ZERO;
    for round in 0..50u64 {
        let launcher = launch(&config, 3, &["--overwrite"]);
        while children(launcher.id()).len() < 3 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // From before the program has begun to well into the steps.
        std::thread::sleep(Duration::from_millis(round * 37 % 1500));
        let (ranks, victim) = (children(launcher.id()), (round % 3) as usize);
        let began = Instant::now();
        send(ranks[victim], libc::SIGKILL);
        let output = launcher.wait_with_output().unwrap();
        slowest = slowest.max(began.elapsed());
        let text = said(&output);
        assert_eq!(output.status.code(), Some(7), "round {round}: {text}");
        assert!(text.contains(&format!("peer error: rank {victim} was killed by signal 9")), "round {round}: {text}");
        assert!(ranks.iter().all(|&rank| !alive(rank)), "round {round}: a rank is left behind");
    }
    assert!(slowest < Duration::from_secs(5), "{slowest:?}");
    println!("50 kills, the slowest end after {slowest:?}");
}

#[test]
fn a_stopped_rank_is_noticed_at_the_timeout() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 100000"]);
    let launcher = launch_with(&["--nproc", "2", "--timeout", "2"], &config, &[]);
    wait_for_lines(&fixture.path("out"), 3);
    let ranks = children(launcher.id());
    let began = Instant::now();
    send(ranks[1], libc::SIGSTOP);
    let output: Output = launcher.wait_with_output().unwrap();
    let took = began.elapsed();
    assert!(took > Duration::from_millis(1800) && took < Duration::from_secs(10), "{took:?}");
    assert!(ranks.iter().all(|&rank| !alive(rank)));
    let text = said(&output);
    assert_eq!(output.status.code(), Some(7), "{text}");
    // Whichever operation the other one waits in.
    assert!(text.contains("peer error: rank 0: ") && text.contains(": rank 1 did not answer, after 2."), "{text}");
}

#[test]
fn a_signal_to_the_launcher_or_to_one_rank_saves_once_and_a_resume_goes_on() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 150", "train.grad_accum: 1", "train.learning_rate: 0.001"]);
    let straight = launch(&config, 2, &[]).wait_with_output().unwrap();
    assert!(straight.status.success(), "{}", said(&straight));

    let stopped = fixture.path("stopped");
    let to = format!("train.output_dir={}", stopped.display());
    for (lines, to_launcher) in [(5, true), (40, false)] {
        let launcher = launch(&config, 2, &[&to, "--resume"]);
        wait_for_lines(&stopped, lines);
        let target = if to_launcher { i32::try_from(launcher.id()).unwrap() } else { children(launcher.id())[1] };
        send(target, libc::SIGTERM);
        let output = launcher.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(75), "{}", said(&output));
        assert_eq!(said(&output).matches("everything is saved").count(), 1, "{}", said(&output));
    }
    // The same rows a step with one process, and then with two again.
    let words = ["train", config.to_str().unwrap(), &to, "--resume", "train.grad_accum=2"];
    let one = tunesmith(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_lines(&stopped, 80);
    send(i32::try_from(one.id()).unwrap(), libc::SIGTERM);
    let one = one.wait_with_output().unwrap();
    assert_eq!(one.status.code(), Some(75), "{}", said(&one));
    let last = launch(&config, 2, &[&to, "--resume"]).wait_with_output().unwrap();
    assert!(last.status.success(), "{}", said(&last));
    let difference = apart(&curve(&fixture.path("out"), "loss"), &curve(&stopped, "loss"));
    assert!(difference < 1e-5, "{difference:e}");
    let other = train(&config, &[&to, "--resume", "train.max_steps=200"]);
    assert_eq!(other.status.code(), Some(5), "half the rows a step is another run: {}", said(&other));
    assert!(said(&other).contains("world_size: 2 in the checkpoint, 1 now"), "{}", said(&other));
}

#[test]
fn a_lost_rank_is_made_up_for_by_a_restart() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let extra = ["train.max_steps: 60", "train.save_strategy: steps", "train.save_steps: 5"];
    let config = fixture.config("run", &extra);
    let straight = launch(&config, 2, &[]).wait_with_output().unwrap();
    assert!(straight.status.success(), "{}", said(&straight));
    let to = format!("train.output_dir={}", fixture.path("lost").display());
    let launcher = launch_with(&["--nproc", "2", "--max-restarts", "1"], &config, &[&to]);
    wait_for_lines(&fixture.path("lost"), 12);
    send(children(launcher.id())[1], libc::SIGKILL);
    let output = launcher.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("restart 1 of 1"), "{}", said(&output));
    let key = "loss";
    assert_eq!(curve(&fixture.path("out"), key), curve(&fixture.path("lost"), key), "bit for bit");
}

#[test]
fn what_fails_on_every_rank_is_said_once() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let config = fixture.config("run", &["data.train_path: /nowhere.jsonl"]);
    let output = launch(&config, 3, &[]).wait_with_output().unwrap();
    let text = said(&output);
    assert_eq!(text.matches("/nowhere.jsonl").count(), 1, "{text}");
    assert_eq!(text.matches(" error: ").count(), 1, "{text}");
    assert!(!fixture.path("out").exists(), "nothing is left behind");
}

#[test]
fn strategies_that_contradict_the_launcher_are_refused() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &[]);
    let refused = |output: &Output| {
        assert_eq!(output.status.code(), Some(2), "{}", said(output));
        said(output)
    };
    assert!(refused(&train(&config, &["train.strategy=dp"])).contains("train.dp_ranks"));
    let single = launch(&config, 2, &["train.strategy=single"]).wait_with_output().unwrap();
    assert!(refused(&single).contains("tunesmith launch has started 2 ranks"));
    let other = tunesmith(&["launch", "--", "data", config.to_str().unwrap()]).output().unwrap();
    assert!(refused(&other).contains("`data` does not run as several ranks"));
    let gpus = tunesmith(&["launch", "--", "train", config.to_str().unwrap()]).env("NUM_GPUS", "99").output().unwrap();
    assert!(refused(&gpus).contains("env NUM_GPUS=99: "));
    let accelerate = fixture.path("acc.yaml");
    std::fs::write(&accelerate, "distributed_type: MULTI_CPU\nnum_processes: 2\n").unwrap();
    let word = format!("train.accelerate={}", accelerate.display());
    let alone = refused(&train(&config, &[&word]));
    assert!(alone.contains("acc.yaml:2 num_processes: 2, but this is 1 rank"), "{alone}");
    let mut command = tunesmith(&["launch", "--nproc", "2", "--", "train", config.to_str().unwrap()]);
    let missing = command.env("TUNESMITH_GLOO", "/nowhere/lib.so").output().unwrap();
    let text = refused(&missing);
    assert!(text.contains("/nowhere/lib.so") && text.contains("libgloo-dev"), "{text}");
    assert_eq!(text.lines().filter(|line| line.contains("/nowhere")).collect::<BTreeSet<_>>().len(), 1, "{text}");
}
