//! The recipes of the justfile for several ranks, run through the wrapper as they are, except that nothing is built first and
//! another binary is named.
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

use super::fixture::{Fixture, said};
use crate::comm::gloo_is_there;

pub(super) fn just(env: &[(&str, &str)], words: &[&str]) -> Output {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(root.join("scripts/just"));
    command.args(["--no-deps", "--set", "tunesmith", env!("CARGO_BIN_EXE_tunesmith")]).args(words);
    for name in [
        "CONFIG",
        "OUT",
        "STYLE",
        "MERGED",
        "PROMPT",
        "NPROC",
        "NUM_GPUS",
        "DEEPSPEED_CONFIG",
        "ACCELERATE_CONFIG_FILE",
    ] {
        command.env_remove(name);
    }
    command.envs(env.iter().copied()).output().unwrap()
}

/// What a recipe that must work has said.
pub(super) fn done(output: &Output) -> String {
    assert!(output.status.success(), "{}", said(output));
    said(output)
}

#[test]
fn train_distributed_takes_num_gpus_as_ranks_on_the_cpu() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let config = format!("CONFIG={}", fixture.config("run", &["train.max_steps: 3"]).display());
    let text = done(&just(&[("TRAIN_BATCH_SIZE", "1")], &["train-distributed", &config, "NUM_GPUS=2"]));
    assert!(text.contains("NUM_GPUS=2: 2 ranks on the CPU; "), "{text}");
    assert!(text.contains("1 row x 2 accumulated x 2 ranks = 4"), "the variable reaches the ranks: {text}");
    assert!(text.contains("platform") && text.contains("computed on the CPU"), "{text}");
    let output = just(&[], &["train-distributed", &config, "NUM_GPUS=two", "--overwrite"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
}

#[test]
fn train_deepspeed_and_accelerates_file_start_what_they_say() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    // Sizes come from the file: what it says must not contradict the configuration.
    let config =
        fixture.config("run", &["train.max_steps: 3", "train.grad_accum: \"auto\"", "train.batch_size: \"auto\""]);
    let config = format!("CONFIG={}", config.display());
    let write = |name: &str, text: &str| std::fs::write(fixture.path(name), text).unwrap();
    write(
        "ds.json",
        "{\"train_batch_size\": 8, \"train_micro_batch_size_per_gpu\": 2, // rows\n \"zero_optimization\": {\"stage\": 0}}",
    );
    let deepspeed = format!("DEEPSPEED_CONFIG={}", fixture.path("ds.json").display());
    let text = done(&just(&[], &["train-deepspeed", &config, &deepspeed, "NPROC=2"]));
    assert!(text.contains("2 rows x 2 accumulated x 2 ranks = 8"), "{text}");
    write(
        "acc.yaml",
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: DS}\n"
            .replace("DS", fixture.path("ds.json").to_str().unwrap())
            .as_str(),
    );
    let accelerate = fixture.path("acc.yaml").display().to_string();
    let env = [("ACCELERATE_CONFIG_FILE", accelerate.as_str())];
    let text = done(&just(&env, &["train-distributed", &config, "--overwrite"]));
    assert!(text.contains("acc.yaml:2 num_processes: 2 ranks on the CPU"), "{text}");
    assert!(text.contains("2 rows x 2 accumulated x 2 ranks = 8"), "{text}");
    let output = just(&env, &["train-distributed", &config, "--overwrite", "NPROC=3"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("num_processes: 2, but tunesmith launch has started 3 ranks"), "{}", said(&output));
}

/// Every file that ships starts a run that shares what it says, with the losses of copies.
#[test]
fn the_shipped_files_train() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let config = format!("CONFIG={}", fixture.config("run", &["train.max_steps: 3"]).display());
    let losses = || {
        let text = std::fs::read_to_string(fixture.path("out/metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        lines.filter_map(|line| line["loss"].as_f64()).collect::<Vec<_>>()
    };
    done(&just(&[], &["train-distributed", &config, "NPROC=2"]));
    let copies = losses();
    for (variable, file, strategy) in [
        ("DEEPSPEED_CONFIG", "deepspeed/zero1.json", "zero1"),
        ("DEEPSPEED_CONFIG", "deepspeed/zero2.json", "zero2"),
        ("DEEPSPEED_CONFIG", "deepspeed/zero3.json", "zero3"),
        ("DEEPSPEED_CONFIG", "deepspeed/zero3_offload.json", "zero3"),
        ("ACCELERATE_CONFIG_FILE", "configs/accelerate/multi_gpu_ddp.yaml", "ddp"),
        ("ACCELERATE_CONFIG_FILE", "configs/accelerate/multi_gpu_fsdp.yaml", "fsdp"),
    ] {
        let named = format!("{variable}={file}");
        let text =
            done(&just(&[], &["train-distributed", &config, &named, "NPROC=2", "--overwrite", "TRAIN_BF16=false"]));
        assert!(text.contains(&format!("{strategy}: 2 processes over gloo")), "{file}: {text}");
        let apart = losses().iter().zip(&copies).map(|(one, other)| (one / other - 1.0).abs()).fold(0.0, f64::max);
        assert!(apart < 1e-5, "{file}: {apart:e}");
    }
}

#[test]
fn tensorboard_stands_beside_and_goes_afterwards() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let config = format!("CONFIG={}", fixture.config("run", &["train.max_steps: 3"]).display());
    let board = fixture.path("tensorboard");
    let ended = fixture.path("ended");
    let script = format!(
        "#!/bin/sh\ntrap 'echo yes >{}; exit 0' TERM\necho http://localhost\nwhile :; do sleep 0.1; done\n",
        ended.display()
    );
    std::fs::write(&board, script).unwrap();
    std::fs::set_permissions(&board, std::fs::Permissions::from_mode(0o755)).unwrap();
    let board = board.display().to_string();
    for (recipe, port, strategy) in [("train-distributed-tb", "6311", "ddp"), ("train-deepspeed-tb", "6312", "zero2")] {
        let env = [("TENSORBOARD", board.as_str()), ("TB_PORT", port)];
        let text = done(&just(&env, &[recipe, &config, "NPROC=2", "--overwrite"]));
        assert!(text.contains(&format!("{strategy}: 2 processes over gloo")), "{text}");
        assert!(text.contains(&format!("TensorBoard: http://localhost:{port}")), "{text}");
        assert!(text.contains("2 of 2 ranks on this machine"), "{text}");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while !ended.exists() && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        std::fs::remove_file(&ended).expect("TensorBoard has been stopped");
    }
}

#[test]
fn setup_accelerate_writes_what_the_other_recipes_take() {
    let fixture = Fixture::new();
    let out = fixture.path("made/default.yaml");
    let flag = format!("--out={}", out.display());
    // No terminal: nothing is asked.
    let text = done(&just(&[], &["setup-accelerate", &flag]));
    let several = tunesmith::cmd::devices::several(std::thread::available_parallelism().unwrap().get());
    let ranks = if several == 1 { "1 rank".to_owned() } else { format!("{several} ranks") };
    assert!(text.contains(&format!("{ranks} on this machine")) && text.contains("ACCELERATE_CONFIG_FILE="), "{text}");
    assert!(std::fs::read_to_string(&out).unwrap().contains(&format!("num_processes: {several}\n")));
    let again = just(&[], &["setup-accelerate", &flag, "--yes"]);
    assert_eq!(again.status.code(), Some(2), "{}", said(&again));
    assert!(said(&again).contains("is there already"));
    done(&just(&[], &["setup-accelerate", &flag, "--overwrite", "--num-processes", "2", "--strategy", "zero2"]));
    let config = format!("CONFIG={}", fixture.config("run", &[]).display());
    let shown = done(&just(&[("ACCELERATE_CONFIG_FILE", out.to_str().unwrap())], &["config", &config]));
    assert!(shown.lines().any(|line| line.starts_with("train.strategy") && line.contains("zero2")), "{shown}");
}

#[test]
fn the_rate_follows_the_ranks_where_it_shall() {
    let fixture = Fixture::new();
    let extra =
        ["train.max_steps: 20", "train.warmup_steps: 0", "train.lr_scaling: linear", "train.lr_scheduler_type: linear"];
    let mut config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(fixture.config("run", &extra)).unwrap()).unwrap();
    config["train"].as_object_mut().unwrap().remove("warmup_steps");
    let path = fixture.path("scaled.yaml");
    std::fs::write(&path, config.to_string()).unwrap();
    let output = super::fixture::train(&path, &["train.strategy=dp", "train.dp_ranks=2", "train.grad_accum=1"]);
    let text = done(&output);
    assert!(
        text.contains("linear scaling: 1e-2 is meant for 2 rows per step; 4 make it 2.0000e-2 (x 2.0000)"),
        "{text}"
    );
    assert!(text.contains("no warm-up is set, so it rises in 5 % of the steps"), "{text}");
    let rate = |step: usize| {
        let lines = std::fs::read_to_string(fixture.path("out/metrics.jsonl")).unwrap();
        let line: serde_json::Value = serde_json::from_str(lines.lines().nth(step - 1).unwrap()).unwrap();
        line["learning_rate"].as_f64().unwrap()
    };
    assert_eq!((rate(1), rate(2)), (0.0, 0.02));
}

/// The commands of README's section on the reader's own data, on what they name.
#[test]
fn the_readmes_commands_run_as_printed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let (_, section) = readme.split_once("## Your own data").expect("the section");
    let (_, block) = section.split_once("```sh\n").expect("a block");
    let (block, _) = block.split_once("```").expect("its end");
    let folder = tempfile::tempdir().unwrap();
    let given = format!("scripts/just --no-deps --set tunesmith '{}'", env!("CARGO_BIN_EXE_tunesmith"));
    let mut ran = 0;
    // What builds, and the list of recipes, need no test.
    for line in
        block.lines().filter(|line| !line.contains("just install") && !line.trim_start().starts_with("scripts/just  "))
    {
        let line = line.replace("scripts/just", &given);
        let mut command = Command::new("sh");
        command.args(["-c", &line]).current_dir(root).env_remove("CONFIG").stdin(std::process::Stdio::null());
        command.env("TRAIN_OUTPUT_DIR", folder.path()).env("TRAIN_MAX_STEPS", "2");
        let text = done(&command.output().unwrap());
        assert!(!line.contains(" train ") || text.contains("ask the result"), "{text}");
        ran += 1;
    }
    assert!(ran >= 4, "{block}");
}

#[test]
fn the_recipes_run_what_cargo_has_built_wherever_that_is() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let just = |env: &[(&str, &str)], words: &[&str]| {
        let mut command = Command::new(root.join("scripts/just"));
        command.env_remove("CARGO_TARGET_DIR").env_remove("CARGO_BUILD_TARGET_DIR").envs(env.iter().copied());
        done(&command.args(words).output().unwrap())
    };
    let built = |env: &[(&str, &str)]| just(env, &["--evaluate", "tunesmith"]).trim().to_owned();
    assert_eq!(built(&[]), root.join("target/release/tunesmith").display().to_string());
    assert_eq!(
        built(&[("CARGO_TARGET_DIR", "/builds"), ("CARGO_BUILD_TARGET_DIR", "/no")]),
        "/builds/release/tunesmith"
    );
    assert_eq!(built(&[("CARGO_BUILD_TARGET_DIR", "/builds")]), "/builds/release/tunesmith");
    // Also where cargo's own configuration names another folder.
    for recipe in ["install", "_build"] {
        let told = just(&[("CARGO_TARGET_DIR", "/builds")], &["--dry-run", recipe]);
        assert!(told.contains("--target-dir \"/builds\""), "{told}");
    }
}
