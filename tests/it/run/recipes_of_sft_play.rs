//! The recipes of the justfile that users of SFT-Play know, on files that ship with the repository.
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::fixture::{Fixture, said};
use super::recipes::{done, just};

const CHAT: &str = "CONFIG=examples/chat/chat.yaml";

fn rows(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn style_begins_every_system_message_and_render_writes_what_is_learned() {
    let fixture = Fixture::new();
    let out = |name: &str| format!("OUT={}", fixture.path(name).display());
    done(&just(&[], &["process", CHAT, &out("plain/train.jsonl")]));
    done(&just(&[], &["style", CHAT, &out("styled/train.jsonl"), "STYLE=Be brief. Don't guess."]));
    done(&just(&[("STYLE", "Be brief. Don't guess.")], &["style", CHAT, &out("again/train.jsonl")]));
    let text = done(&just(&[], &["style", CHAT, &out("default/train.jsonl")]));
    assert!(text.contains("style: STYLE is not set: every system message begins with"), "{text}");
    let report = std::fs::read_to_string(fixture.path("default/train.report.md")).unwrap();
    assert!(report.contains("- every system message begins with: \"Answer in two short lines"), "{report}");
    assert!(report.contains("| rows | train, before the split |"), "{report}");
    done(&just(&[], &["render", CHAT, &out("rendered/train.jsonl")]));
    let (plain, styled) = (rows(&fixture.path("plain/train.jsonl")), rows(&fixture.path("styled/train.jsonl")));
    assert_eq!(styled, rows(&fixture.path("again/train.jsonl")), "a word or a variable");
    let rendered = rows(&fixture.path("rendered/train.jsonl"));
    assert!(!plain.is_empty() && plain.len() == styled.len() && plain.len() == rendered.len());
    for (plain, styled) in plain.iter().zip(&styled) {
        let (before, after) = (plain["messages"].as_array().unwrap(), styled["messages"].as_array().unwrap());
        assert!(
            after[0]["role"] == "system" && after[0]["content"].as_str().unwrap().starts_with("Be brief. Don't guess.")
        );
        let rest =
            |messages: &[Value]| messages.iter().filter(|one| one["role"] != "system").cloned().collect::<Vec<_>>();
        assert_eq!(rest(before), rest(after));
    }
    for row in &rendered {
        let count = |key: &str| row[key].as_array().unwrap().len();
        assert!(count("input_ids") == count("labels") && !row["text"].as_str().unwrap().is_empty());
    }
    for name in ["plain", "styled", "rendered"] {
        assert!(fixture.path(&format!("{name}/train.validation.jsonl")).is_file(), "{name}");
    }
    // The pipeline is the three of them, into data/ where it runs.
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let words = ["examples/chat/chat.yaml", "examples/quickstart/model", "examples/chat/rows.jsonl"]
        .map(|path| root.join(path).display().to_string());
    let output = Command::new(root.join("scripts/rows"))
        .args(["pipeline", env!("CARGO_BIN_EXE_tunesmith"), &words[0]])
        .args([format!("model.name={}", words[1]), format!("data.train_path={}", words[2])])
        .current_dir(fixture.root.path())
        .env_remove("CONFIG")
        .output()
        .unwrap();
    done(&output);
    for folder in ["processed", "processed_with_style", "rendered"] {
        let written = rows(&fixture.path(&format!("data/{folder}/train.jsonl")));
        assert_eq!(written.len(), plain.len(), "{folder}");
    }
}

#[test]
fn check_says_whether_configuration_and_rows_are_sound() {
    let text = done(&just(&[], &["check", CHAT]));
    assert!(text.contains("row 1 of train") && text.contains("are sound; next: just train"), "{text}");
    let typo = just(&[], &["check", CHAT, "train.batchsize=2"]);
    assert_eq!(typo.status.code(), Some(2), "{}", said(&typo));
    let rows = just(&[], &["check", CHAT, "data.train_path=examples/nowhere.jsonl"]);
    assert_eq!(rows.status.code(), Some(3), "{}", said(&rows));
}

#[test]
fn the_first_token_of_raw_text_is_not_shown_as_learned() {
    let text = done(&just(&[], &["data", "CONFIG=examples/dapt/dapt.yaml", "--rows", "1"]));
    let row = text.lines().skip_while(|line| !line.starts_with("row 1 of train")).nth(1).unwrap();
    assert!(row.contains('⟦') && !row.starts_with('⟦'), "{row}");
}

#[test]
fn train_bnb_and_train_unsloth_train_adapters_on_a_base_in_four_bits() {
    let fixture = Fixture::new();
    for name in ["bnb", "unsloth"] {
        let out = fixture.path(name);
        let to = format!("train.output_dir={}", out.display());
        let words = [
            &format!("train-{name}"),
            CHAT,
            &to,
            "train.max_steps=1",
            "train.batch_size=2",
            "train.eval_strategy=no",
            "gen.num_samples=0",
        ];
        done(&just(&[], &words));
        // As printed: with the recipe's own file, whose rows are longer than what the small model sees.
        let text = done(&just(&[], &[&format!("train-{name}"), &to, words[3], words[5], words[6], "--overwrite"]));
        let note = "model.max_seq_len: 512, which is what this model sees by its config.json, and not 4096";
        assert_eq!(text.contains(note), name == "unsloth", "{text}");
        let stamp = std::fs::read_to_string(out.join("checkpoint-000001/backend.json")).unwrap();
        assert!(stamp.contains("nf4"), "{stamp}");
    }
}

#[test]
fn merge_test_loads_the_merged_model_and_lets_it_answer() {
    let fixture = Fixture::new();
    let config = format!("CONFIG={}", fixture.config("run", &["train.max_steps: 2"]).display());
    let early = just(&[], &["merge-test", &config]);
    assert_eq!(early.status.code(), Some(4), "{}", said(&early));
    assert!(said(&early).contains("run `just merge CONFIG=…` first"), "{}", said(&early));
    done(&just(&[], &["train", &config]));
    done(&just(&[], &["merge", &config]));
    let text = done(&just(&[], &["merge-test", &config, "PROMPT=ab"]));
    assert!(text.contains("loads and answers"), "{text}");
    // As variables, and as just's own.
    let merged = fixture.path("out/merged").display().to_string();
    let text = done(&just(&[("MERGED", &merged), ("PROMPT", "ab")], &["merge-test"]));
    assert!(text.contains(&format!("{merged} loads and answers")), "{text}");
    let echo = fixture.path("echo");
    std::fs::write(&echo, "#!/bin/sh\necho \"$@\"\n").unwrap();
    std::fs::set_permissions(&echo, std::fs::Permissions::from_mode(0o755)).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/merge-test");
    let text = done(&Command::new(script).arg(&echo).env("MERGED", &merged).env("PROMPT", "a b").output().unwrap());
    assert!(text.contains(&format!("--model {merged} --prompt a b")), "{text}");
    let text = done(&just(&[], &[&format!("MERGED={merged}"), "merge-test"]));
    assert!(text.contains("loads and answers"), "{text}");
}

#[test]
fn an_example_that_is_not_there_is_refused_with_the_names_of_those_that_are() {
    let output = just(&[], &["example", "nope"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    let said = said(&output);
    assert!(said.contains("no example nope; there are: caption chat classification continue dapt"), "{said}");
}

#[test]
fn event_files_are_removed_and_nothing_else() {
    let fixture = Fixture::new();
    let folder = fixture.path("runs/one/tb");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["events.out.tfevents.1.host", "notes.txt"] {
        std::fs::write(folder.join(name), "x").unwrap();
    }
    let logdir = format!("TB_LOGDIR={}", fixture.path("runs").display());
    let shown = done(&just(&[], &["tb-open", &logdir, "TB_PORT=6399"]));
    assert!(shown.contains("port 6399; start it: just tensorboard") && shown.contains("runs"), "{shown}");
    assert!(!shown.contains("http:"), "{shown}");
    for words in [&["tensorboard", "--help"][..], &["tb-open", "--help"]] {
        assert!(done(&just(&[], words)).contains("usage: just tensorboard"));
    }
    assert!(done(&just(&[], &["tb-clean", &logdir])).contains("removed 1 event file below"));
    let left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["notes.txt"]);
}

#[test]
fn train_and_watch_leaves_tensorboard_until_it_is_stopped() {
    let fixture = Fixture::new();
    let config = format!("CONFIG={}", fixture.config("run", &["train.max_steps: 2"]).display());
    let (board, ended) = (fixture.path("tensorboard"), fixture.path("ended"));
    let script = format!(
        "#!/bin/sh\ntrap 'echo yes >{}; exit 0' TERM\necho http://localhost\nwhile :; do sleep 0.1; done\n",
        ended.display()
    );
    std::fs::write(&board, script).unwrap();
    std::fs::set_permissions(&board, std::fs::Permissions::from_mode(0o755)).unwrap();
    let env = [("TENSORBOARD", board.to_str().unwrap()), ("TB_PORT", "6313")];
    done(&just(&env, &["train-and-watch", &config]));
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(!ended.exists(), "it stays after the run");
    assert!(done(&just(&env, &["tb-open"])).contains("visit: http://localhost:6313"));
    assert!(done(&just(&env, &["tb-stop"])).contains("stopped"));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while !ended.exists() && std::time::Instant::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(ended.exists());
}
