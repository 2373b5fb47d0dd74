//! Names of the hub through the real program: `download`, `train`, `data` and `doctor`.
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use super::server::{Reply, Server};
use crate::run::fixture::{Fixture, said, tunesmith};

/// A server with the tiny model, its rows and an adapter for it, and a home of its own.
pub struct Program {
    pub server: Server,
    fixture: Fixture,
    commit: String,
}

impl Program {
    pub fn new() -> Self {
        let (server, fixture) = (Server::start(), Fixture::new());
        let files: Vec<(String, Vec<u8>)> = fs::read_dir(fixture.path("model"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap()))
            .collect();
        let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
        let commit = server.commit("models/tiny/llama", "main", &files);
        let rows = fs::read(fixture.path("train.jsonl")).unwrap();
        server.commit("datasets/tiny/rows", "main", &[("data/train.jsonl", &rows)]);
        Self { server, fixture, commit }
    }

    pub fn run(&self, args: &[&str], environment: &[(&str, &str)]) -> Output {
        self.command(args, environment).output().unwrap()
    }

    pub fn command(&self, args: &[&str], environment: &[(&str, &str)]) -> Command {
        let mut command = tunesmith(args);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("HF_") || name.starts_with("HUGGING")) {
            command.env_remove(name);
        }
        command.env_remove("MODEL").env_remove("CONFIG");
        command.env("HF_ENDPOINT", &self.server.endpoint).env("HF_HOME", self.fixture.path("home"));
        command.envs(environment.iter().copied()).current_dir(self.fixture.root.path());
        command
    }
}

pub fn good(output: &Output) -> String {
    assert!(output.status.success(), "{}", said(output));
    said(output)
}

#[test]
fn a_model_of_the_hub_is_downloaded_trained_and_named_by_its_commit() {
    let program = Program::new();
    let config = program.fixture.config("hub", &["model.name: tiny/llama", "train.max_steps: 1"]);
    let config = config.to_str().unwrap();
    let text = good(&program.run(&["download", "MODEL=tiny/llama"], &[]));
    assert!(text.contains("downloading") && text.contains(&program.commit[..12]), "{text}");
    let rows = "data.train_path=hf://datasets/tiny/rows/data/train.jsonl";
    let text = good(&program.run(&["data", config, rows], &[("HF_TOKEN", "hf_secret")]));
    assert!(text.contains("24"), "{text}");
    // From here on without the hub.
    program.server.fault(|_, _, _| Reply::status(500, &[], ""));
    let offline = [("HF_HUB_OFFLINE", "1")];
    let text = good(&program.run(&["train", config, rows], &offline));
    assert!(text.contains(&format!("tiny/llama@{}", &program.commit[..12])), "{text}");
    let out = program.fixture.path("out");
    let resolved = fs::read_to_string(out.join("config.resolved.yaml")).unwrap();
    assert!(resolved.contains(&format!("revision: \"{}\"", program.commit)), "{resolved}");
    let adapter = fs::read_to_string(out.join("adapter/adapter_config.json")).unwrap();
    assert!(adapter.contains("\"tiny/llama\""), "{adapter}");
    // The adapter goes to the hub, and training goes on from there.
    program.server.heal();
    let read = |name: &str| fs::read(out.join("adapter").join(name)).unwrap();
    let (about, tensors) = (read("adapter_config.json"), read("adapter_model.safetensors"));
    let files: [(&str, &[u8]); 2] = [("adapter_config.json", &about), ("adapter_model.safetensors", &tensors)];
    program.server.commit("models/tiny/adapter", "v1", &files);
    let words = ["train", config, "tuning.adapter=tiny/adapter@v1", "train.output_dir=second", "train.learning_rate=0"];
    let again: Vec<&str> = words.into_iter().filter(|word| !word.starts_with("tuning.lora")).collect();
    let output = program.run(&again, &[]);
    good(&output);
    let second = fs::read(program.fixture.path("second/adapter/adapter_model.safetensors")).unwrap();
    assert_eq!(second, tensors, "with a learning rate of 0 the adapter stays as it was");
}

#[test]
fn errors_name_the_cause_and_never_the_token() {
    let program = Program::new();
    let refused = |args: &[&str], environment: &[(&str, &str)], code: i32| {
        let output = program.run(args, environment);
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        let text = said(&output);
        assert!(!text.contains("hf_secret"), "{text}");
        text
    };
    let text = refused(&["download", "tiny/none"], &[("HF_TOKEN", "hf_secret")], 4);
    assert!(text.contains("the token from env HF_TOKEN was sent") && text.contains("hint:"), "{text}");
    let text = refused(&["download", "tiny/llama", "--revision", "mian"], &[], 4);
    assert!(text.contains("did you mean main?"), "{text}");
    let text = refused(&["download", "tiny/rows", "--dataset", "--split", "test"], &[], 3);
    assert!(text.contains("no split test") && text.contains("data/train.jsonl"), "{text}");
    refused(&["download"], &[], 2);
    refused(&["download", "tiny/llama"], &[("HF_ENDPOINT", "nowhere")], 2);
    let text = refused(&["download", "tiny/llama"], &[("HF_HUB_OFFLINE", "1")], 4);
    assert!(text.contains("not in the cache"), "{text}");
    let local = program.fixture.config("local", &["model.revision: v1"]);
    assert!(refused(&["train", local.to_str().unwrap()], &[], 2).contains("model.revision"));
}

#[test]
fn doctor_says_where_the_cache_is_and_whether_there_is_a_token() {
    let program = Program::new();
    let text = good(&program.run(&["doctor"], &[]));
    assert!(text.contains("no token") && text.contains(program.fixture.path("home/hub").to_str().unwrap()), "{text}");
    let text = good(&program.run(&["doctor"], &[("HF_TOKEN", "hf_secret"), ("HF_ENDPOINT", "http://me:word@host")]));
    assert!(text.contains("a token from env HF_TOKEN") && text.contains("http://host"), "{text}");
    assert!(!text.contains("hf_secret") && !text.contains("word"), "{text}");
}

#[test]
fn data_sets_are_downloaded_into_a_folder() {
    let program = Program::new();
    let text = good(&program.run(&["download", "tiny/rows", "--dataset", "--dir", "rows"], &[]));
    assert!(text.contains("rows/data/train.jsonl"), "{text}");
    assert!(program.fixture.path("rows/data/train.jsonl").is_file());
    assert!(!Path::new(&program.fixture.path("home/hub/datasets--tiny--rows/snapshots")).exists());
}
