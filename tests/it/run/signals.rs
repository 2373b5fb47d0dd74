//! SIGINT, SIGTERM and SIGKILL, sent to the program while it runs.
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use super::fixture::{Fixture, said, train, tunesmith};
use super::resume::assert_same_ending;

fn start(config: &Path, words: &[&str]) -> Child {
    let mut args = vec!["train", config.to_str().unwrap()];
    args.extend(words);
    tunesmith(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn send(child: &Child, signal: i32) {
    // SAFETY: `kill` touches no memory; the child has not been waited for, so that its number is nobody else's.
    assert_eq!(unsafe { libc::kill(i32::try_from(child.id()).unwrap(), signal) }, 0);
}

fn wait_for_lines(metrics: &Path, count: usize) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::fs::read_to_string(metrics).unwrap_or_default().lines().count() < count {
        assert!(Instant::now() < deadline, "no {count} lines in {}", metrics.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn long_run(fixture: &Fixture) -> std::path::PathBuf {
    fixture.config(
        "run",
        &["train.max_steps: 120", "train.save_strategy: steps", "train.save_steps: 20", "train.save_total_limit: 2"],
    )
}

#[test]
fn a_run_interrupted_three_times_ends_as_one_that_was_not() {
    let fixture = Fixture::new();
    let config = long_run(&fixture);
    let straight = train(&config, &[]);
    assert!(straight.status.success(), "{}", said(&straight));

    let out = format!("train.output_dir={}", fixture.path("stopped").display());
    let metrics = fixture.path("stopped/metrics.jsonl");
    // SIGTERM between checkpoints; SIGINT twice, the second while it may be saving; SIGKILL, which saves nothing.
    for (signals, lines, code) in [
        (&[libc::SIGTERM][..], 5, Some(75)),
        (&[libc::SIGINT, libc::SIGINT], 30, Some(75)),
        (&[libc::SIGKILL], 70, None),
    ] {
        let child = start(&config, &[&out, "--resume"]);
        wait_for_lines(&metrics, lines);
        for &signal in signals {
            send(&child, signal);
        }
        let output: Output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), code, "{}", said(&output));
        if code.is_some() {
            assert!(said(&output).contains("everything is saved"), "{}", said(&output));
            // The command that goes on, whatever folder it is in.
            let again = format!("train {} {out} --resume`", config.display());
            assert!(said(&output).contains(&again), "{again}: {}", said(&output));
        }
    }
    let output = train(&config, &[&out, "--resume"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_same_ending(&fixture.path("out"), &fixture.path("stopped"), 120, false);
}

#[test]
fn a_signal_before_step_1_leaves_nothing_behind() {
    let fixture = Fixture::new();
    // Enough rows that tokenization takes a while.
    let rows = std::fs::read_to_string(fixture.path("train.jsonl")).unwrap().repeat(4000);
    std::fs::write(fixture.path("train.jsonl"), rows).unwrap();
    let config = fixture.config("run", &["data.use_cache: false"]);
    let child = start(&config, &[]);
    let lock = fixture.path("out/.lock");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !lock.exists() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
    send(&child, libc::SIGINT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(75), "{}", said(&output));
    assert!(said(&output).contains("before step 1"), "{}", said(&output));
    assert!(!fixture.path("out").exists());
}

#[test]
fn a_directory_in_use_is_refused_while_its_run_lives() {
    let fixture = Fixture::new();
    let config = long_run(&fixture);
    let child = start(&config, &["train.max_steps=100000"]);
    wait_for_lines(&fixture.path("out/metrics.jsonl"), 3);
    let second = train(&config, &["--resume"]);
    assert_eq!(second.status.code(), Some(6), "{}", said(&second));
    assert!(said(&second).contains(&format!("process {}", child.id())), "{}", said(&second));
    send(&child, libc::SIGTERM);
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(75));
    let third = train(&config, &["--resume", "train.max_steps=5"]);
    assert!(third.status.success(), "{}", said(&third));
}
