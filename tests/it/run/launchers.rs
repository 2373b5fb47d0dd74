//! Launchers other than `tunesmith launch`, and the files in `examples/multi-node`, as far as one machine can test them.
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use super::fixture::{Fixture, said};
use crate::comm::gloo_is_there;

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/multi-node").join(name)
}

fn script(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn losses(out: &Path) -> Vec<f64> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter_map(|line| line["loss"].as_f64()).collect()
}

/// `sbatch` runs the script on the first node; `srun` starts the tasks, here a stand-in that sets what Slurm's does, for two nodes of a rank each
/// on this machine.
#[test]
fn the_script_for_slurm_starts_ranks_that_meet() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 4"]);
    let bin = fixture.path("bin");
    std::fs::create_dir_all(&bin).unwrap();
    script(
        &bin.join("srun"),
        "#!/bin/sh\nshift\nexport SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost,other \
         SLURM_STEP_TASKS_PER_NODE='1(x2)'\nSLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1 \"$@\" &\nother=$!\n\
         SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 \"$@\"\nstatus=$?\nwait $other || status=$?\nexit $status\n",
    );
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let output = Command::new("bash")
        .arg(example("slurm.sbatch"))
        .arg(&config)
        .env("PATH", path)
        .env("TUNESMITH", env!("CARGO_BIN_EXE_tunesmith"))
        .env("MASTER_PORT", port.to_string())
        .env("TRAIN_NUM_THREADS", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(
        said(&output).contains("ddp: 2 processes over gloo, 1 on this machine, started by Slurm"),
        "{}",
        said(&output)
    );
    assert_eq!(losses(&fixture.path("out")).len(), 4);
}

#[test]
fn the_files_for_kubernetes_and_the_shells_are_sound() {
    for (shell, name) in [("bash", "slurm.sbatch"), ("sh", "torchrun.sh")] {
        let output = Command::new(shell).arg("-n").arg(example(name)).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
    }
    let text = std::fs::read_to_string(example("jobset.yaml")).unwrap();
    let set: Value = serde_yaml::from_str(&text).unwrap();
    assert_eq!((set["apiVersion"].as_str(), set["kind"].as_str()), (Some("jobset.x-k8s.io/v1alpha2"), Some("JobSet")));
    let job = &set["spec"]["replicatedJobs"][0];
    let (name, pods) = (job["name"].as_str().unwrap(), &job["template"]["spec"]);
    assert_eq!(pods["completionMode"], "Indexed");
    assert_eq!(pods["parallelism"], pods["completions"]);
    let container = &pods["template"]["spec"]["containers"][0];
    let variable = |wanted: &str| {
        let all = container["env"].as_array().unwrap();
        all.iter().find(|one| one["name"] == wanted).unwrap_or_else(|| panic!("{wanted}"))["value"].clone()
    };
    assert_eq!(variable("WORLD_SIZE").as_str().unwrap(), pods["completions"].to_string());
    // A pod's name: set, job, the job's number, the pod's; and the service of the set's name.
    let set_name = set["metadata"]["name"].as_str().unwrap();
    assert_eq!(variable("MASTER_ADDR").as_str().unwrap(), format!("{set_name}-{name}-0-0.{set_name}"));
    assert_eq!(variable("MASTER_PORT").as_str().unwrap(), container["ports"][0]["containerPort"].to_string());
    assert!(variable("TUNESMITH_TOKEN").is_null(), "the token is a secret");
    let policy = &pods["podFailurePolicy"]["rules"][0]["onExitCodes"];
    assert_eq!(policy["values"], serde_json::json!([2, 3, 4]), "what would be wrong again");
    assert_eq!(policy["containerName"], container["name"]);
}

/// torchrun, where there is one: `TORCHRUN` or on `PATH`.
fn torchrun() -> String {
    std::env::var("TORCHRUN").unwrap_or_else(|_| "torchrun".to_owned())
}

fn agent(config: &Path, words: &[String], variables: &[(&str, &str)], before: &[&str]) -> Command {
    let script = example("torchrun.sh");
    let mut command =
        Command::new(before.first().map_or_else(|| script.to_str().unwrap().to_owned(), |first| (*first).to_owned()));
    if !before.is_empty() {
        command.args(&before[1..]).arg(&script);
    }
    command.arg(config).args(words).envs(variables.iter().copied());
    command.env("TUNESMITH", env!("CARGO_BIN_EXE_tunesmith")).env("TORCHRUN", torchrun()).env("OMP_NUM_THREADS", "1");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn free_port() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

/// `accelerate launch` with the files that ship, where there is one (`ACCELERATE` or on `PATH`): two CPU ranks, and what
/// the file says where it is named to us too. `just rank-test`.
#[test]
#[ignore = "needs accelerate"]
fn accelerate_launch_starts_two_ranks() {
    assert!(gloo_is_there(), "this test is asked for by name");
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 3"]);
    let program = std::env::var("ACCELERATE").unwrap_or_else(|_| "accelerate".to_owned());
    for (file, strategy) in [("multi_gpu_ddp.yaml", "ddp"), ("multi_gpu_fsdp.yaml", "fsdp")] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/accelerate").join(file);
        for named in [false, true] {
            let mut command = Command::new(&program);
            command.args(["launch", "--no_python", "--num_processes", "2", "--main_process_port", &free_port()]);
            command.arg("--config_file").arg(&file).arg(env!("CARGO_BIN_EXE_tunesmith")).arg("train").arg(&config);
            command.args(["--overwrite", "train.bf16=false"]);
            if named {
                command.env("ACCELERATE_CONFIG_FILE", &file);
            }
            let output = command.output().unwrap();
            let text = said(&output);
            assert!(output.status.success(), "{text}");
            let strategy = if named { strategy } else { "ddp" };
            assert!(text.contains(&format!("{strategy}: 2 processes over gloo")), "{text}");
            assert_eq!(!named, text.contains("ACCELERATE_CONFIG_FILE=FILE"), "{text}");
            assert_eq!(losses(&fixture.path("out")).len(), 3);
        }
    }
    let mut one = Command::new(&program);
    one.args(["launch", "--no_python", "--cpu", "--num_processes", "2", "--num_machines", "1"]);
    one.args(["--mixed_precision", "no", "--dynamo_backend", "no", env!("CARGO_BIN_EXE_tunesmith"), "train"]);
    let output = one.arg(&config).arg("--overwrite").output().unwrap();
    assert!(output.status.success() && said(&output).contains("has started one process"), "{}", said(&output));
}

/// Two agents of torchrun on one machine, a rank each; one rank is killed, and all start again from the newest checkpoint: the curve is
/// that of a run that nothing happened to. `just rank-test`.
#[test]
#[ignore = "needs torchrun"]
fn torchrun_starts_and_restarts_two_agents() {
    assert!(gloo_is_there(), "this test is asked for by name");
    let fixture = Fixture::new();
    let extra = ["train.max_steps: 60", "train.save_strategy: steps", "train.save_steps: 5"];
    let config = fixture.config("run", &extra);
    let run = |out: &str, kill: bool| -> Vec<Output> {
        let port = free_port();
        let to = vec![format!("train.output_dir={}", fixture.path(out).display())];
        let start = |rank: &str| {
            let variables = [("MASTER_PORT", port.as_str()), ("NNODES", "2"), ("NODE_RANK", rank), ("NPROC", "1")];
            agent(&config, &to, &variables, &[]).spawn().unwrap()
        };
        let agents = [start("0"), start("1")];
        if kill {
            while losses(&fixture.path(out)).len() < 12 {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            let ranks = workers(agents[1].id());
            assert_eq!(ranks.len(), 1, "{ranks:?}");
            // SAFETY: `kill` touches no memory; the process is one that this test has started.
            assert_eq!(unsafe { libc::kill(ranks[0], libc::SIGKILL) }, 0);
        }
        agents.into_iter().map(|agent| agent.wait_with_output().unwrap()).collect()
    };
    for output in run("straight", false).into_iter().chain(run("lost", true)) {
        assert!(output.status.success(), "{}", said(&output));
    }
    let (straight, lost) = (losses(&fixture.path("straight")), losses(&fixture.path("lost")));
    assert_eq!(straight.len(), 60);
    assert_eq!(straight, lost, "bit for bit");
    println!("torchrun: two agents, a rank killed, restarted: {} losses equal to the bit", lost.len());
}

/// Processes of ours below `parent`.
fn workers(parent: u32) -> Vec<i32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let ppid = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse::<u32>().ok());
        let ours = stat.contains("(tunesmith)");
        if ours && ppid == Some(parent) {
            found.push(process);
        }
    }
    found
}

/// Removes both network namespaces when it is dropped.
struct Namespaces;
impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in ["ts-one", "ts-two"] {
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

/// Two machines as two network namespaces that a pair of virtual cards joins. `just rank-test`, as root.
#[test]
#[ignore = "needs torchrun and root"]
fn torchrun_joins_two_network_namespaces() {
    assert!(gloo_is_there(), "this test is asked for by name");
    let ip = |words: &str| {
        let output = Command::new("ip").args(words.split(' ')).output().unwrap();
        assert!(output.status.success(), "ip {words}: {}", said(&output));
    };
    let _namespaces = Namespaces;
    for name in ["ts-one", "ts-two"] {
        ip(&format!("netns add {name}"));
        ip(&format!("-n {name} link set lo up"));
    }
    ip("link add ts-a netns ts-one type veth peer name ts-b netns ts-two");
    for (name, card, address) in [("ts-one", "ts-a", "10.77.0.1/24"), ("ts-two", "ts-b", "10.77.0.2/24")] {
        ip(&format!("-n {name} addr add {address} dev {card}"));
        ip(&format!("-n {name} link set {card} up"));
    }
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 20"]);
    let start = |rank: &str, name: &str| {
        let variables = [
            ("MASTER_ADDR", "10.77.0.1"),
            ("MASTER_PORT", "29511"),
            ("NNODES", "2"),
            ("NODE_RANK", rank),
            ("NPROC", "2"),
        ];
        agent(&config, &[], &variables, &["ip", "netns", "exec", name]).spawn().unwrap()
    };
    let agents = [start("0", "ts-one"), start("1", "ts-two")];
    let outputs = agents.map(|agent| agent.wait_with_output().unwrap());
    for output in &outputs {
        assert!(output.status.success(), "{}", said(output));
    }
    let text = said(&outputs[0]);
    assert!(
        text.contains("ddp: 4 processes over gloo, 2 on this machine, started by torchrun, meeting at 10.77.0.1"),
        "{text}"
    );
    assert_eq!(losses(&fixture.path("out")).len(), 20);
    println!("torchrun: two network namespaces, two ranks in each, 20 steps");
}
