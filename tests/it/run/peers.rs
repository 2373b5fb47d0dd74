//! Ranks that do not belong together, started one by one as another launcher would: every rank names both sides, long before
//! `train.ddp_timeout`. Also ways to start several ranks where Gloo is not built yet, or cannot be.
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::fixture::{Fixture, said, tunesmith};
use super::ranks::curve;
use crate::comm::{gloo_is_there, stand_in};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// A rank, described by its environment variables and command-line words.
#[derive(Clone, Copy)]
struct Peer<'a> {
    rank: &'a str,
    size: &'a str,
    token: &'a str,
    words: &'a [&'a str],
}

impl<'a> Peer<'a> {
    const fn new(rank: &'a str, size: &'a str) -> Self {
        Self { rank, size, token: TOKEN, words: &[] }
    }

    fn start(self, config: &Path, port: u16) -> Child {
        self.command(config, port).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn command(self, config: &Path, port: u16) -> Command {
        let mut command =
            tunesmith(&[&["train", config.to_str().unwrap(), "train.ddp_timeout=600"], self.words].concat());
        command.envs([
            ("RANK", self.rank),
            ("WORLD_SIZE", self.size),
            ("LOCAL_RANK", self.rank),
            ("LOCAL_WORLD_SIZE", self.size),
            ("MASTER_ADDR", "127.0.0.1"),
            ("TUNESMITH_TOKEN", self.token),
        ]);
        command.env("MASTER_PORT", port.to_string());
        command
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Runs the ranks and returns their outputs. All must end within 15 seconds.
fn ended(config: &Path, peers: &[Peer<'_>]) -> Vec<Output> {
    let (port, began) = (free_port(), Instant::now());
    let running: Vec<Child> = peers.iter().map(|peer| peer.start(config, port)).collect();
    let outputs = running.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    outputs
}

#[test]
fn ranks_that_disagree_name_both_sides_on_every_rank_within_a_quarter_of_a_minute() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let config = &fixture.config("run", &[]);
    let pair = [Peer::new("0", "2"), Peer::new("1", "2")];
    let other = |words| [pair[0], Peer { words, ..pair[1] }];
    let cases: Vec<(Vec<Peer<'_>>, &[&str])> = vec![
        (
            vec![Peer::new("0", "2"), Peer::new("1", "3"), Peer::new("2", "3")],
            &["world size: ", "2 on rank 0", "3 on rank "],
        ),
        (other(&["train.ddp_backend=nccl"]).to_vec(), &["engine: ", " on rank 0", " on rank 1"]),
        (other(&["train.strategy=zero2"]).to_vec(), &["train.strategy: ", "auto on rank 0", "zero2 on rank 1"]),
        (other(&["train.batch_size=auto"]).to_vec(), &["train.batch_size: ", "2 on rank 0", "auto on rank 1"]),
        (vec![pair[0], Peer { token: "another-token-of-another-run", ..pair[1] }], &["rank 1 (", "token"]),
    ];
    for (peers, named) in &cases {
        for output in ended(config, peers) {
            let text = said(&output);
            assert_eq!(output.status.code(), Some(2), "{text}");
            assert!(named.iter().all(|part| text.contains(part)), "{text}");
        }
    }
    assert!(!fixture.path("out").exists(), "nothing was begun");
}

/// A second launch with the first one's variables: it says whom it has met, and the first goes on.
#[test]
fn ranks_of_a_second_run_at_the_same_place_change_nothing_in_the_first() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 100000"]);
    let port = free_port();
    let peers = [Peer::new("0", "2"), Peer::new("1", "2")];
    // Nobody reads what it prints: a pipe would fill up and stop it.
    let unheard =
        |peer: Peer<'_>| peer.command(&config, port).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut first = peers.map(unheard);
    super::ranks::wait_for_lines(&fixture.path("out"), 2);
    let began = Instant::now();
    let second = peers.map(|peer| peer.start(&config, port)).map(|child| child.wait_with_output().unwrap());
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    let [busy, late] = second.map(|output| {
        assert_eq!(output.status.code(), Some(7), "{}", said(&output));
        said(&output)
    });
    assert!(busy.contains(&format!("cannot listen on 127.0.0.1:{port}")), "{busy}");
    assert!(late.contains("rank 1 (process") && late.contains("all 2 ranks of its run are connected"), "{late}");
    let before = curve(&fixture.path("out"), "loss").len();
    super::ranks::wait_for_lines(&fixture.path("out"), before + 2);
    for rank in &mut first {
        rank.kill().unwrap();
        rank.wait().unwrap();
    }
}

/// The program in a place of its own, with nothing of a build beside it, and a cache of its own.
fn elsewhere(fixture: &Fixture) -> (PathBuf, [(&'static str, PathBuf); 2]) {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("elsewhere-{}/a/b/c", fixture.root.path().file_name().unwrap().to_string_lossy()));
    std::fs::create_dir_all(&folder).unwrap();
    let program = folder.join("tunesmith");
    std::fs::hard_link(env!("CARGO_BIN_EXE_tunesmith"), &program).unwrap();
    (program, [("HOME", fixture.path("home")), ("XDG_CACHE_HOME", fixture.path("home/cache"))])
}

fn launched(fixture: &Fixture, variables: &[(&str, &str)], flags: &[&str]) -> String {
    let (program, places) = elsewhere(fixture);
    let config = fixture.config("run", &["train.max_steps: 3", "train.grad_accum: 1"]);
    let plain = tunesmith(&[&["launch"], flags, &["--", "train", config.to_str().unwrap()]].concat());
    let mut command = Command::new(&program);
    command.args(plain.get_args()).envs(places).envs(variables.iter().copied());
    for name in
        ["TUNESMITH_GLOO", "NUM_GPUS"].into_iter().filter(|name| variables.iter().all(|(other, _)| other != name))
    {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    std::fs::remove_dir_all(program.ancestors().nth(4).unwrap()).unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(curve(&fixture.path("out"), "loss").len(), 3);
    said(&output)
}

#[test]
fn ranks_are_threads_where_gloo_cannot_be_built_and_it_is_said_why() {
    let fixture = Fixture::new();
    let text = launched(&fixture, &[("CXX", "/nowhere/c++"), ("NUM_GPUS", "2")], &[]);
    assert!(text.contains("launch: 2 ranks on this machine as threads of one process"), "{text}");
    assert!(text.contains("there is no C++ compiler (/nowhere/c++)") && text.contains("libgloo-dev"), "{text}");
    assert!(text.contains("2 rows x 1 accumulated x 2 ranks = 4"), "{text}");
}

#[test]
fn gloo_is_built_when_it_is_first_needed() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let text = launched(&fixture, &[], &["--nproc", "2"]);
    assert!(text.contains("building the Gloo library") && text.contains("ddp: 2 processes over gloo"), "{text}");
    assert!(fixture.path("home/cache/tunesmith/gloo/libtunesmith_gloo.so").is_file());
}

/// Slurm may show each process only its own GPU, number 0 of each.
#[test]
fn ranks_divide_the_memory_of_a_gpu_that_they_share_and_of_no_other() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 1", "model.device: cuda", "train.ddp_backend: gloo"]);
    for (second, budget) in [("0", "1.80 GiB"), ("1", "3.60 GiB")] {
        let port = free_port();
        let out = format!("train.output_dir={}", fixture.path(second).display());
        let start = |rank: &'static str, gpu: &str| {
            let mut command = Peer { words: &[&out], ..Peer::new(rank, "2") }.command(&config, port);
            command.envs(stand_in(1)).env("TUNESMITH_STAND_IN_FIRST", gpu);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let ranks = [start("0", "0"), start("1", second)];
        let [first, other] = ranks.map(|rank| rank.wait_with_output().unwrap());
        assert!(first.status.success() && other.status.success(), "{}{}", said(&first), said(&other));
        let line = format!("{budget}: 90 % of what is free");
        assert!(said(&first).contains(&line), "{line}: {}", said(&first));
    }
}
