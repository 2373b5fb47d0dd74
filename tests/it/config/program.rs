//! The program itself: `tunesmith config`, `doctor`, `--help`.
use super::*;
use crate::processes::processor_time;

/// `tunesmith config` as JSON: the value and source of a key.
fn setting(output: &Output, key: &str) -> (String, String) {
    let settings: serde_json::Value = serde_json::from_str(&stdout(output)).unwrap();
    let found = settings.as_array().unwrap().iter().find(|setting| setting["key"] == key).unwrap();
    (found["value"].to_string(), found["source"].as_str().unwrap().to_owned())
}

#[test]
fn the_three_spellings_of_just_reach_it() {
    let folder = Folder::new(&[("a.yaml", RUNNABLE)]);
    let word = folder.tunesmith().args(["config", "--json", "CONFIG=a.yaml", "TRAIN_BATCH_SIZE=3"]).output().unwrap();
    assert_eq!(setting(&word, "train.batch_size"), ("3".to_owned(), "argument".to_owned()));
    let env = folder
        .tunesmith()
        .args(["config", "--json"])
        .envs([("CONFIG", "a.yaml"), ("TRAIN_BATCH_SIZE", "3")])
        .output()
        .unwrap();
    assert_eq!(setting(&env, "train.batch_size"), ("3".to_owned(), "env TRAIN_BATCH_SIZE".to_owned()));
    let plain = folder.tunesmith().args(["config", "train.batch_size=3", "a.yaml", "--json"]).output().unwrap();
    assert_eq!(setting(&plain, "train.batch_size").0, "3");
    assert_eq!(setting(&plain, "model.name"), ("\"./models/small\"".to_owned(), "a.yaml:1".to_owned()));
}

/// Through the wrapper and the justfile as they are, but for the build before the recipe and the binary it names.
#[test]
fn the_three_spellings_work_in_front_of_and_behind_a_recipe() {
    let folder = Folder::new(&[("a.yaml", RUNNABLE)]);
    let config = format!("CONFIG={}", folder.path("a.yaml").display());
    let just = |env: &[(&str, &str)], words: &[&str]| {
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/just"));
        command.args(["--no-deps", "--set", "tunesmith", env!("CARGO_BIN_EXE_tunesmith")]).args(words);
        let output = command.env_remove("CONFIG").envs(env.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        setting(&output, "train.batch_size")
    };
    let argument = ("3".to_owned(), "argument".to_owned());
    assert_eq!(just(&[], &["config", "--json", &config, "TRAIN_BATCH_SIZE=3"]), argument);
    assert_eq!(just(&[], &[&config, "config", "--json", "train.batch_size=3"]), argument);
    let variable = ("3".to_owned(), "env TRAIN_BATCH_SIZE".to_owned());
    assert_eq!(just(&[("TRAIN_BATCH_SIZE", "3")], &["config", &config, "--json"]), variable);
}

#[test]
fn the_argument_wins_over_the_variable_config() {
    let folder = Folder::new(&[("a.yaml", RUNNABLE), ("b.yaml", "train: {seed: 5}")]);
    let output = folder.tunesmith().args(["config", "--json", "a.yaml"]).env("CONFIG", "b.yaml").output().unwrap();
    assert_eq!(setting(&output, "train.seed").1, "default");
}

#[test]
fn the_table_is_aligned_and_plain_without_a_terminal() {
    let folder = Folder::new(&[("a.yaml", RUNNABLE)]);
    let text = stdout(&folder.tunesmith().args(["config", "a.yaml"]).output().unwrap());
    assert!(!text.contains('\x1b'));
    let column = text.lines().find_map(|line| line.find("./models/small")).unwrap();
    for line in text.lines().filter(|line| !line.is_empty()) {
        assert!(line.as_bytes()[column] != b' ' && line.as_bytes()[column - 1] == b' ', "{line}");
    }
    assert_eq!(text.lines().filter(|line| !line.is_empty()).count(), config::schema::options().count());
}

#[test]
fn a_configuration_that_cannot_run_is_shown_with_a_note() {
    let folder = Folder::new(&[("a.yaml", RUNNABLE), ("base.yaml", "train: {eval_strategy: epoch}")]);
    let note = |file: &str| {
        let output = folder.tunesmith().args(["config", file]).output().unwrap();
        assert!(stdout(&output).contains("train.seed"));
        String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(note("a.yaml"), "");
    assert_eq!(note("base.yaml"), "note: this configuration cannot be run: base.yaml: model.name is not set\n");
}

#[test]
fn errors_go_to_stderr_with_exit_code_2() {
    let folder = Folder::new(&[("a.yaml", "train:\n  lerning_rate: 1\n"), ("b.yaml", "")]);
    for (args, message) in [
        (
            &["config", "a.yaml"][..],
            "config error: a.yaml:2:3: unknown key train.lerning_rate\n  hint: did you mean train.learning_rate?\n",
        ),
        (&["config"][..], "no configuration file is given"),
        (&["config", "a.yaml", "b.yaml"][..], "two configuration files are given: a.yaml and b.yaml"),
        (&["config", "a.yaml", "--no-such-flag"][..], "unexpected argument '--no-such-flag'"),
        (&["cnfig"][..], "similar subcommand exists: 'config'"),
    ] {
        let output = folder.tunesmith().args(args).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(message) && !stderr.contains('\x1b') && output.stdout.is_empty(), "{args:?}: {stderr}");
    }
}

/// Other programs write `-1` for "none", "all", or "any".
#[test]
fn a_negative_number_is_answered_with_what_is_valid() {
    let folder = Folder::new(&[("a.yaml", "")]);
    let shape = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/plan/qwen2.5-7b");
    for (args, message) in [
        (
            &["infer", "--model", "x", "--prompt", "a", "--top-k", "-1"][..],
            "config error: flag --top-k: gen.top_k: expected an integer of at least 0, found the integer -1\n  \
             hint: --top-k K: Sample only from this many most probable tokens; 0 for all\n",
        ),
        (
            &["infer", "--model", "x", "--prompt", "a", "--seed", "-1"],
            "hint: --seed N: Seed of sampling (`null`: `train.seed`)\n",
        ),
        (
            &["chat", "--model", "x", "--max-new-tokens", "-1"],
            "expected an integer, 1 to 1000000, found the integer -1\n",
        ),
        (
            &["chat", "--model", "x", "--temperature", "-0.5"],
            "expected a number, greater than 0, found the number -0.5\n",
        ),
        (&["eval", "a.yaml", "--rows", "-1"], "invalid value '-1' for '--rows <N>': expected an integer, at least 1\n"),
        (&["data", "a.yaml", "--rows", "-1"], "'--rows <N>': expected an integer, at least 0\n"),
        (
            &["train", "a.yaml", "--gpu-ids", "-1,0"],
            "invalid value '-1' for '--gpu-ids <N,N>': expected an integer, at least 0\n",
        ),
        (
            &["launch", "--timeout", "-1", "--", "train", "a.yaml"],
            "expected a number, greater than 0 and at most 1000000000\n",
        ),
        (&["launch", "--nproc", "-1", "--", "train", "a.yaml"], "--nproc -1"),
        (&["plan", "a.yaml", "--model", shape, "--vram", "-1GiB"], "--vram \"-1GiB\", expected a size such as 24GiB"),
        (&["bench", "--max-tokens-per-pass", "0"], "expected an integer, at least 1\n"),
        (&["merge", "--density", "-0.5"], "expected a number, greater than 0 and at most 1\n"),
    ] {
        let output = folder.tunesmith().args(args).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(message) && !stderr.contains("unexpected"), "{args:?}: {stderr}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let folder = Folder::new(&[]);
    let mut child = folder
        .tunesmith()
        .args(["config", "--schema"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The names of secrets in it are keys, and stay as they are.
#[test]
fn the_references_are_printed_to_the_byte() {
    let folder = Folder::new(&[]);
    for (flag, file) in
        [("--schema", "schema.json"), ("--docs", "configuration.md"), ("--foreign", "foreign-configs.md")]
    {
        let text = stdout(&folder.tunesmith().args(["config", flag]).output().unwrap());
        let kept = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(file)).unwrap();
        assert!(text == kept, "config {flag} is not docs/{file}");
    }
}

#[test]
fn help_of_help_is_help() {
    let folder = Folder::new(&[]);
    for words in [&["help"][..], &["help", "--help"], &["help", "-h"]] {
        assert!(stdout(&folder.tunesmith().args(words).output().unwrap()).contains("doctor"), "{words:?}");
    }
    assert!(stdout(&folder.tunesmith().args(["help", "train", "--help"]).output().unwrap()).contains("--resume"));
}

#[test]
fn help_is_there_at_once() {
    let folder = Folder::new(&[]);
    let least = (0..5).map(|_| {
        let (text, took) = processor_time(folder.tunesmith().arg("--help"));
        assert!(text.contains("doctor"));
        took
    });
    let least = least.min().unwrap();
    assert!(least < Duration::from_millis(50), "{least:?}");
}

#[test]
fn doctor_says_what_it_found_and_leaves_nothing() {
    let folder = Folder::new(&[]);
    let text = stdout(&folder.tunesmith().arg("doctor").env("PATH", "").output().unwrap());
    for subject in ["processor", "vectors", "memory", "disk here", "output", "just", "tensorboard", "gpu", "python"] {
        assert!(text.contains(subject), "{subject}: {text}");
    }
    assert!(text.contains("hint: run `cargo install just --locked`"), "{text}");
    assert_eq!(std::fs::read_dir(folder.0.path()).unwrap().count(), 0);
}
