//! `tunesmith export … --push`: what arrives at the hub, what is not sent twice, and how refusals read.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use super::server::{Reply, Server};
use crate::run::fixture::{said, tunesmith};

struct World {
    server: Server,
    folder: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        Self { server: Server::start(), folder: tempfile::tempdir().unwrap() }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// Exports the tiny llama's adapter as a PEFT folder and pushes it to `me/mine`, with this token.
    fn push(&self, token: Option<&str>, more: &[&str]) -> Output {
        let golden = |part: &str| {
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a/llama").join(part).display().to_string()
        };
        let (base, adapter, out) = (golden("model"), golden("adapter_init"), self.out().display().to_string());
        let args = ["export", "--base", &base, "--adapter", &adapter, "--push", "me/mine", "--output", &out];
        let mut command = tunesmith(&[&args[..], more].concat());
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("HF_") || name.starts_with("HUGGING")) {
            command.env_remove(name);
        }
        command.env("HF_ENDPOINT", &self.server.endpoint).env("HF_HOME", self.folder.path().join("home"));
        command.envs(token.map(|token| ("HF_TOKEN", token))).env_remove("CONFIG").output().unwrap()
    }

    /// The files of the repository's newest commit, which are those of the folder.
    fn arrived(&self) -> Vec<String> {
        let state = self.server.state();
        let repo = &state.repos["models/me/mine"];
        let files = &repo.commits[&repo.refs["main"]];
        for (name, bytes) in files {
            assert!(*bytes == fs::read(self.out().join(name)).unwrap(), "{name}");
        }
        files.keys().cloned().collect()
    }
}

#[track_caller]
fn good(output: &Output) -> String {
    let text = said(output);
    assert!(output.status.success() && !text.contains("hf_writer"), "{text}");
    text
}

#[test]
fn an_adapter_arrives_in_one_commit_and_large_files_once() {
    let world = World::new();
    let text = good(&world.push(None, &["--peft", "--dry-run"]));
    assert!(text.contains("would upload to me/mine") && text.contains("README.md"), "{text}");
    assert!(world.server.log().is_empty(), "nothing was sent");
    let text = good(&world.push(Some("hf_writer"), &["--peft", "--overwrite", "--private"]));
    assert!(text.contains("4 files") && text.contains(&format!("{}/me/mine", world.server.endpoint)), "{text}");
    assert_eq!(
        world.arrived(),
        ["README.md", "adapter_config.json", "adapter_model.safetensors", "generation_config.json"]
    );
    assert!(world.server.state().repos["models/me/mine"].private);
    assert_eq!(world.server.count("PUT", "/store/"), 1);
    // The same again: the repository is there, and so is the large file.
    good(&world.push(Some("hf_writer"), &["--peft", "--overwrite"]));
    assert_eq!(world.server.count("PUT", "/store/"), 1);
    assert_eq!(world.server.count("POST", "/commit/main"), 2);
}

#[test]
fn a_model_arrives_in_parts_and_after_failures_that_pass() {
    let world = World::new();
    world.server.state().storage.part_bytes = Some(100_000);
    world.server.fault(|request, before, reply| {
        let once = ["/preupload/", "/store/", "/commit/"].iter().any(|part| request.target.contains(part));
        if once && before == 0 { Reply::status(503, &[("Retry-After", "0")], "") } else { reply }
    });
    let text = good(&world.push(Some("hf_writer"), &["--hf", "--dtype", "float32"]));
    assert!(text.contains("status 503; trying again"), "{text}");
    let arrived = world.arrived();
    for name in ["README.md", "config.json", "model.safetensors"] {
        assert!(arrived.iter().any(|other| other == name), "{arrived:?}");
    }
    let parts = fs::metadata(world.out().join("model.safetensors")).unwrap().len().div_ceil(100_000) as usize;
    assert!(parts > 3);
    assert_eq!(world.server.count("PUT", "/store/"), 2 * parts, "each once more after its failure");
}

#[test]
fn what_is_sent_is_sent_again_where_a_redirect_leads() {
    let world = World::new();
    world.server.fault(|request, _, reply| {
        let moves = ["/preupload/", "/store/"].iter().any(|part| request.target.contains(part));
        if !moves || request.target.contains("moved=") {
            return reply;
        }
        let mark = if request.target.contains('?') { '&' } else { '?' };
        Reply::status(307, &[("Location", &format!("{}{mark}moved=1", request.target))], "")
    });
    good(&world.push(Some("hf_writer"), &["--peft"]));
    world.arrived();
    for part in ["/preupload/", "/store/"] {
        let log = world.server.log();
        let bodies: Vec<&[u8]> =
            log.iter().filter(|request| request.target.contains(part)).map(|request| &*request.body).collect();
        assert!(bodies.len() == 2 && bodies[0] == bodies[1] && !bodies[0].is_empty(), "{part}");
    }
}

#[test]
fn refusals_say_what_to_do_and_never_the_token() {
    let world = World::new();
    let refused = |token: Option<&str>, code: i32, wanted: &[&str]| {
        let output = world.push(token, &["--peft", "--overwrite"]);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(code), "{text}");
        for word in wanted {
            assert!(text.contains(word), "no {word}: {text}");
        }
        assert!(token.is_none_or(|token| !text.contains(token)) && !text.contains("SIGNED"), "{text}");
    };
    refused(None, 2, &["there is no token", "HF_TOKEN"]);
    assert!(!world.out().exists(), "said before the work");
    refused(Some("hf_nobody"), 4, &["(401)", "env HF_TOKEN", "role `write`"]);
    refused(Some("hf_reader"), 4, &["(403)", "may not write", "create_pr"]);
    let answer = |status: u16, part: &'static str| {
        world.server.fault(move |request, _, reply| {
            let body = r#"{"error":"not now"}"#;
            if request.target.contains(part) { Reply::status(status, &[("Retry-After", "0")], body) } else { reply }
        });
    };
    answer(403, "/store/");
    refused(Some("hf_writer"), 4, &["(403)", "could not send the large files"]);
    answer(500, "/objects/batch");
    refused(Some("hf_writer"), 6, &["status 500", "could not send the large files"]);
    answer(409, "/commit/");
    refused(Some("hf_writer"), 4, &["(409)", "changed at the same time", "run it again", "not now"]);
    answer(200, "/preupload/");
    refused(Some("hf_writer"), 4, &["makes no sense"]);
}
