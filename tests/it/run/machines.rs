//! Two "machines": network namespaces of this one, joined by a cable that can be cut. Needs root and `ip`; where they are
//! not there the test says so.
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::fixture::{Fixture, said, tunesmith};
use super::ranks::{apart, curve, wait_for_lines};
use crate::comm::gloo_is_there;

/// The run's token, by which the ranks of both machines recognize each other.
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// Two namespaces and the cable between them; gone when it is dropped.
struct Machines {
    names: [String; 2],
}

impl Machines {
    const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

    /// Sets up both namespaces; the error says why this machine cannot.
    fn new() -> Result<Self, String> {
        let id = std::process::id();
        let machines = Self { names: [0, 1].map(|side| format!("ts{id}-{side}")) };
        let cables = [0, 1].map(|side| format!("ts{id}.{side}"));
        for name in &machines.names {
            ip(&["netns", "add", name])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        ip(&["link", "add", &cables[0], "type", "veth", "peer", "name", &cables[1]])?;
        for (side, (name, cable)) in machines.names.iter().zip(&cables).enumerate() {
            ip(&["link", "set", cable, "netns", name])?;
            ip(&["-n", name, "link", "set", cable, "name", "cable"])?;
            ip(&["-n", name, "addr", "add", &format!("{}/24", Self::ADDRESSES[side]), "dev", "cable"])?;
            ip(&["-n", name, "link", "set", "cable", "up"])?;
        }
        Ok(machines)
    }

    /// `tunesmith launch` of one rank on each machine.
    fn launch(&self, config: &Path, words: &[&str]) -> [Child; 2] {
        [0, 1].map(|side| {
            let (number, config) = (side.to_string(), config.to_str().unwrap());
            let mut args = vec!["launch", "--nproc", "1", "--nnodes", "2", "--node-rank", &number, "--timeout", "4"];
            args.extend(["--master-addr", Self::ADDRESSES[0], "--master-port", "29511", "--", "train", config]);
            let plain = tunesmith(&[&args, words].concat());
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &self.names[side]]).arg(plain.get_program()).args(plain.get_args());
            for (name, value) in plain.get_envs() {
                match value {
                    Some(value) => command.env(name, value),
                    None => command.env_remove(name),
                };
            }
            command.env("TUNESMITH_TOKEN", TOKEN).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
    }

    fn cut(&self) {
        ip(&["-n", &self.names[1], "link", "set", "cable", "down"]).unwrap();
    }

    fn mend(&self) {
        ip(&["-n", &self.names[1], "link", "set", "cable", "up"]).unwrap();
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "del", name]);
        }
    }
}

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).output().map_err(|error| format!("ip: {error}"))?;
    let why = || format!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    if output.status.success() { Ok(()) } else { Err(why()) }
}

fn ended(children: [Child; 2]) -> [Output; 2] {
    children.map(|child| child.wait_with_output().unwrap())
}

#[test]
fn two_machines_train_the_curve_of_one_and_a_cut_cable_ends_both_in_time() {
    let machines = match Machines::new() {
        Ok(machines) if gloo_is_there() => machines,
        Ok(_) => return,
        Err(why) => return eprintln!("SKIPPED, no network namespaces here: {why}"),
    };
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 12"]);
    let to = |name: &str| format!("train.output_dir={}", fixture.path(name).display());
    for output in ended(machines.launch(&config, &[&to("two"), "train.grad_accum=1"])) {
        assert!(output.status.success(), "{}", said(&output));
    }
    let one = super::fixture::train(&config, &[&to("one")]);
    assert!(one.status.success(), "{}", said(&one));
    let difference = apart(&curve(&fixture.path("one"), "loss"), &curve(&fixture.path("two"), "loss"));
    assert!(difference < 1e-5, "{difference:e}");

    let endless = [&*to("cut"), "train.max_steps=100000"];
    let running = machines.launch(&config, &endless);
    wait_for_lines(&fixture.path("cut"), 3);
    machines.cut();
    let began = Instant::now();
    let outputs = ended(running);
    let took = began.elapsed();
    // Four seconds for the operation, and then for asking the other machine what has become of it.
    assert!(took > Duration::from_millis(3500) && took < Duration::from_secs(15), "{took:?}");
    for (rank, output) in outputs.iter().enumerate() {
        let text = said(output);
        assert_eq!(output.status.code(), Some(7), "rank {rank}: {text}");
        // Beyond the cut each sees the other only by what it cannot reach.
        let lost = ["rank 1", "the rendezvous at 10.77.0.1:29511 does not answer"][rank];
        assert!(text.contains(&format!("peer error: rank {rank}: ")) && text.contains(lost), "rank {rank}: {text}");
    }
    // Mended, it is a net as before.
    machines.mend();
    for output in ended(machines.launch(&config, &[&to("again"), "train.grad_accum=1"])) {
        assert!(output.status.success(), "{}", said(&output));
    }
    assert_eq!(curve(&fixture.path("again"), "loss"), curve(&fixture.path("two"), "loss"), "bit for bit");
}
