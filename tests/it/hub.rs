//! Models and data sets by name, from a hub on the loopback: the cache's layout, resuming, hashes, refusals.
mod accept;
mod program;
mod push;
mod server;
mod wire;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use server::{Reply, Request, Server, git_name, sha256};
use tunesmith::hub::{
    Destination, DownloadProgress, Hub, HubSettings, HubToken, Part, Repo, RepoKind, RetryPolicy, Snapshot,
};
use tunesmith::{Error, Result};

/// Hears everything.
#[derive(Default)]
struct Heard {
    notices: Mutex<Vec<String>>,
    bytes: Mutex<(u64, u64)>,
}

impl DownloadProgress for Heard {
    fn begin(&self, _what: &str, total: u64) {
        self.bytes.lock().unwrap().1 += total;
    }
    fn advance(&self, by: u64) {
        self.bytes.lock().unwrap().0 += by;
    }
    fn end(&self) {}
    fn notice(&self, text: &str) {
        self.notices.lock().unwrap().push(text.to_owned());
    }
}

/// A hub and a cache of its own.
struct World {
    server: Server,
    folder: tempfile::TempDir,
    settings: HubSettings,
    heard: Heard,
}

impl World {
    fn new() -> Self {
        let (server, folder) = (Server::start(), tempfile::tempdir().unwrap());
        let settings = HubSettings {
            endpoint: server.endpoint.clone(),
            cache: folder.path().join("cache"),
            token: None,
            offline: false,
            pace: RetryPolicy {
                attempts: 4,
                first_pause: Duration::from_millis(1),
                longest_pause: Duration::from_secs(2),
                silence: Duration::from_secs(10),
            },
        };
        Self { server, folder, settings, heard: Heard::default() }
    }

    fn hub(&self) -> Hub<'_> {
        Hub::new(self.settings.clone(), &self.heard)
    }

    fn model(&self, revision: Option<&str>) -> Result<Snapshot> {
        self.hub().model("owner/name", revision, Part::Whole, Destination::Cache)
    }

    fn refusal(&self) -> Error {
        self.model(None).unwrap_err()
    }

    fn offline(&self) -> HubSettings {
        HubSettings { offline: true, endpoint: "http://127.0.0.1:9".into(), ..self.settings.clone() }
    }

    fn repo(&self) -> PathBuf {
        self.settings.cache.join("models--owner--name")
    }

    /// What lies in `blobs`.
    fn blobs(&self) -> Vec<String> {
        let entries = fs::read_dir(self.repo().join("blobs")).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn weights() -> Vec<u8> {
    (0..300_000_u32).flat_map(u32::to_le_bytes).collect()
}

/// A model with things in its repository that are not wanted.
fn publish(world: &World, revision: &str) -> String {
    world.server.commit(
        "models/owner/name",
        revision,
        &[
            ("config.json", revision.as_bytes()),
            ("tokenizer.json", b"{}"),
            ("model.safetensors", &weights()),
            ("pytorch_model.bin", b"never"),
            ("modeling_name.py", b"never"),
            ("README.md", b"# name"),
            ("onnx/model.onnx", b"never"),
        ],
    )
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_model_comes_into_the_standard_cache_without_code_and_pickles() {
    let mut world = World::new();
    let commit = publish(&world, "main");
    world.settings.token = Some(HubToken::new("hf_secret", "a test"));
    let snapshot = world.model(None).unwrap();
    assert_eq!(snapshot.label(), format!("owner/name@{}", &commit[..12]));
    assert_eq!(snapshot.dir, world.repo().join("snapshots").join(&commit));
    assert_eq!(names(&snapshot.dir), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(fs::read(snapshot.dir.join("model.safetensors")).unwrap(), weights());
    let target = fs::read_link(snapshot.dir.join("model.safetensors")).unwrap();
    assert_eq!(target, Path::new("../../blobs").join(sha256(&weights())));
    assert!(world.blobs().contains(&git_name(b"{}")));
    assert_eq!(fs::read_to_string(world.repo().join("refs/main")).unwrap(), commit);
    let (bytes, total) = *world.heard.bytes.lock().unwrap();
    assert_eq!((bytes, total), (1_200_006, 1_200_006));
    // The token goes to the hub and not to where it redirects.
    for request in world.server.log() {
        let expected = (!request.target.starts_with("/cdn/")).then(|| "Bearer hf_secret".to_owned());
        assert_eq!(request.token, expected, "{request:?}");
    }
}

#[test]
fn a_merged_pair_comes_with_its_encoders() {
    let world = World::new();
    let files = ["vision.json", "vision.safetensors", "world.json", "world.safetensors"];
    let encoders = files.map(|name| (name, name.as_bytes()));
    let model: [(&str, &[u8]); 3] =
        [("config.json", b"{}"), ("model.safetensors", b"weights"), ("other.safetensors", b"never")];
    world.server.commit("models/owner/name", "main", &[&model[..], &encoders].concat());
    let described = world.hub().model("owner/name", None, Part::Description, Destination::Cache).unwrap();
    assert_eq!(names(&described.dir), ["config.json", "vision.json", "world.json"]);
    let whole = world.model(None).unwrap();
    assert_eq!(names(&whole.dir), [&["config.json", "model.safetensors"], &files[..]].concat());
}

#[test]
fn what_is_in_the_cache_is_not_asked_for_again() {
    let world = World::new();
    let commit = publish(&world, "main");
    let first = world.model(None).unwrap();
    let before = world.server.log().len();
    assert_eq!(world.model(None).unwrap(), first);
    assert_eq!(world.server.log().len(), before + 1, "which commit main is, and nothing else");
    assert_eq!(world.model(Some(&commit)).unwrap(), first);
    assert_eq!(world.server.log().len(), before + 1, "a commit never changes");
    let offline = Hub::new(world.offline(), &world.heard);
    assert_eq!(offline.model("owner/name", None, Part::Whole, Destination::Cache).unwrap(), first);
}

#[test]
fn offline_says_what_the_cache_lacks() {
    let world = World::new();
    publish(&world, "main");
    world.hub().model("owner/name", None, Part::Description, Destination::Cache).unwrap();
    assert_eq!(world.server.count("GET", "/cdn/"), 0, "a description has no weights");
    let offline = Hub::new(world.offline(), &world.heard);
    offline.model("owner/name", None, Part::Description, Destination::Cache).unwrap();
    let error = offline.model("owner/name", None, Part::Whole, Destination::Cache).unwrap_err();
    assert!(error.message().contains("lacks model.safetensors"), "{error}");
    let error = offline.model("owner/other", None, Part::Whole, Destination::Cache).unwrap_err();
    assert!(
        error.message().contains("not in the cache") && error.hint_text().unwrap().contains("download owner/other")
    );
}

#[test]
fn without_a_network_one_line_says_so_and_the_hint_what_to_do() {
    let world = World::new();
    let away = Hub::new(HubSettings { endpoint: "http://127.0.0.1:9".into(), ..world.settings.clone() }, &world.heard);
    let error = away.model("owner/name", None, Part::Whole, Destination::Cache).unwrap_err();
    assert_eq!(error.kind(), tunesmith::Kind::Io);
    let expected = "the hub (http://127.0.0.1:9) cannot be reached: Connection refused (os error 111)";
    assert!(error.message().ends_with(expected), "{error}");
    let hint = error.hint_text().unwrap();
    for word in ["network", "HF_ENDPOINT", "HF_HUB_OFFLINE=1", "model.name may be a folder"] {
        assert!(hint.contains(word), "{word}: {hint}");
    }
    let notices = world.heard.notices.lock().unwrap();
    assert!(notices.iter().all(|notice| notice.starts_with("the hub cannot be reached: ")), "{notices:?}");
}

#[test]
fn a_hub_that_is_away_gives_way_to_the_cache() {
    let world = World::new();
    publish(&world, "main");
    let first = world.model(None).unwrap();
    world.server.fault(|_, _, _| Reply::status(503, &[], ""));
    assert_eq!(world.model(None).unwrap(), first);
    let notices = world.heard.notices.lock().unwrap().join("\n");
    assert!(notices.contains("using what the cache has"), "{notices}");
}

#[test]
fn revisions_are_other_commits() {
    let world = World::new();
    let (main, old) = (publish(&world, "main"), publish(&world, "v1.0"));
    let snapshot = world.model(Some("v1.0")).unwrap();
    assert_eq!(
        (snapshot.commit.as_str(), fs::read(snapshot.dir.join("config.json")).unwrap()),
        (&*old, b"v1.0".to_vec())
    );
    assert_eq!(world.model(None).unwrap().commit, main);
    assert_eq!(world.server.count("GET", "/cdn/"), 1, "the same weights are fetched once");
    let error = world.model(Some("v1.1")).unwrap_err();
    assert!(error.message().contains("no revision v1.1") && error.hint_text().unwrap().contains("v1.0"), "{error}");
    assert_eq!(world.model(Some("../main")).unwrap_err().kind(), tunesmith::Kind::Config);
}

#[test]
fn shards_are_those_that_the_index_names() {
    let world = World::new();
    let index =
        br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}"#;
    let files: [(&str, &[u8]); 6] = [
        ("config.json", b"{}"),
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", b"one"),
        ("model-2.safetensors", b"two"),
        ("consolidated.safetensors", b"never"),
        ("tokenizer.model", b"t"),
    ];
    world.server.commit("models/owner/name", "main", &files);
    let dir = world.model(None).unwrap().dir;
    let expected = [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
    ];
    assert_eq!(names(&dir), expected);
    world.server.commit("models/owner/name", "bad", &[files[0], files[1], files[2]]);
    let error = world.model(Some("bad")).unwrap_err();
    assert!(error.message().contains("model-2.safetensors"), "{error}");
    world.server.commit("models/owner/name", "old", &[files[0], ("pytorch_model.bin", b"x")]);
    let error = world.model(Some("old")).unwrap_err();
    assert!(error.hint_text().unwrap().contains("pytorch_model.bin"), "{error}");
}

/// Cuts the weights' body after `keep` bytes in the first `times` requests.
fn cut(keep: usize, times: usize) -> impl Fn(&Request, usize, Reply) -> Reply + Send + 'static {
    move |request, before, reply| {
        let is_cut = request.is("GET", "/cdn/") && before < times;
        Reply { cut: if is_cut { Some(keep) } else { reply.cut }, ..reply }
    }
}

#[test]
fn a_cut_download_goes_on_where_it_stopped() {
    let world = World::new();
    publish(&world, "main");
    world.server.fault(cut(700_000, 1));
    let dir = world.model(None).unwrap().dir;
    assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), weights());
    let ranges: Vec<_> =
        world.server.log().iter().filter(|request| request.is("GET", "/cdn/")).map(|request| request.range).collect();
    assert_eq!(ranges.len(), 2);
    assert!(ranges[0].is_none() && ranges[1].is_some_and(|start| (1..=700_000).contains(&start)), "{ranges:?}");
    assert_eq!(*world.heard.bytes.lock().unwrap(), (1_200_006, 1_200_006), "no byte is counted twice");
}

#[test]
fn a_download_that_is_always_cut_fails_and_the_next_run_goes_on() {
    let world = World::new();
    publish(&world, "main");
    world.server.fault(cut(200_000, 1));
    world.server.fault(|request, before, reply| {
        let keep = if before == 0 { 200_000 } else { 0 };
        if request.is("GET", "/cdn/") { Reply { cut: Some(keep), ..reply } } else { reply }
    });
    let error = world.refusal();
    assert_eq!(error.kind(), tunesmith::Kind::Io);
    assert!(error.hint_text().unwrap().contains("what has arrived is kept"), "{error}");
    assert_eq!(world.server.count("GET", "/cdn/"), 4, "as many attempts as were allowed");
    assert!(!world.repo().join("refs/main").exists(), "an unfinished download is no revision");
    let partial = world.blobs().into_iter().find(|name| name.ends_with(".incomplete")).unwrap();
    assert!(fs::metadata(world.repo().join("blobs").join(partial)).unwrap().len() > 0);
    world.server.heal();
    let dir = world.model(None).unwrap().dir;
    assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), weights());
    assert!(world.server.log().last().unwrap().range.is_some());
}

#[test]
fn a_server_without_ranges_sends_the_whole_again() {
    let world = World::new();
    publish(&world, "main");
    let whole = weights();
    world.server.fault(move |request, before, reply| match (request.is("GET", "/cdn/"), before) {
        (true, 0) => Reply { cut: Some(500_000), ..reply },
        (true, _) => Reply { body: whole.clone(), ..Reply::status(200, &[], "") },
        _ => reply,
    });
    let dir = world.model(None).unwrap().dir;
    assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), weights());
}

#[test]
fn damage_is_found_by_the_hash_and_not_kept() {
    for path in ["/cdn/", "tokenizer.json"] {
        let world = World::new();
        publish(&world, "main");
        let damage = |times: usize| {
            move |request: &Request, before: usize, mut reply: Reply| {
                if request.is("GET", path) && before < times && !reply.body.is_empty() {
                    let middle = reply.body.len() / 2;
                    reply.body[middle] ^= 1;
                }
                reply
            }
        };
        world.server.fault(damage(100));
        let error = world.refusal();
        assert!(error.message().contains("arrived damaged twice"), "{error}");
        let left = world.blobs();
        let sums = [sha256(&weights()), git_name(b"{}")];
        let bad = if path == "/cdn/" { &sums[0] } else { &sums[1] };
        assert!(!left.iter().any(|name| name.starts_with(bad.as_str())), "{left:?}");
        world.server.fault(damage(world.server.count("GET", path) + 1));
        world.model(None).unwrap();
        assert!(world.blobs().contains(bad));
    }
}

#[test]
fn refusals_say_what_to_do() {
    let mut world = World::new();
    publish(&world, "main");
    let gated = |status| {
        move |request: &Request, _, reply| {
            let headers = [("X-Error-Code", "GatedRepo"), ("X-Error-Message", "You sent Bearer hf_secret")];
            if request.target.contains("/resolve/") { Reply::status(status, &headers, "") } else { reply }
        }
    };
    world.server.fault(gated(401));
    let error = world.refusal();
    assert_eq!(error.kind(), tunesmith::Kind::Model);
    let hint = error.hint_text().unwrap();
    assert!(hint.contains(&format!("accept the licence at {}/owner/name", world.server.endpoint)), "{hint}");
    assert!(hint.contains("HF_TOKEN"), "{hint}");
    world.settings.token = Some(HubToken::new("hf_secret", "env HF_TOKEN"));
    world.server.fault(gated(403));
    let text = world.refusal().to_string();
    assert!(text.contains("the token from env HF_TOKEN was sent") && text.contains("You sent Bearer ***"), "{text}");
    assert!(!text.contains("hf_secret"), "{text}");
    world.server.heal();

    let missing = |name: &str| world.hub().model(name, None, Part::Whole, Destination::Cache).unwrap_err().to_string();
    assert!(missing("owner/gone").contains("401"));
    world.server.fault(|_, _, _| Reply::status(404, &[("X-Error-Code", "RepoNotFound")], ""));
    let text = missing("owner/gone");
    assert!(text.contains("404") && text.contains("check the name") && text.contains("owner/gone"), "{text}");
    world.server.fault(|_, _, _| Reply::status(403, &[], r#"{"error":"no"}"#));
    assert!(missing("owner/gone").contains("not allowed (403"));
}

#[test]
fn a_busy_hub_is_asked_again_after_the_time_it_names() {
    let world = World::new();
    publish(&world, "main");
    let busy = |wait: &'static str, times: usize| {
        move |_: &Request, before: usize, reply| {
            if before < times { Reply::status(429, &[("Retry-After", wait)], "") } else { reply }
        }
    };
    world.server.fault(busy("1", 1));
    let began = std::time::Instant::now();
    world.hub().model("owner/name", None, Part::Description, Destination::Cache).unwrap();
    assert!(began.elapsed() >= Duration::from_secs(1));
    world.server.fault(busy("3600", 1_000));
    let error = world.refusal().to_string();
    assert!(error.contains("429") && error.contains("wait 3600 s"), "{error}");
    let other = World::new();
    other.server.fault(|_, _, _| Reply::status(500, &[], ""));
    let error = other.refusal();
    assert_eq!((error.kind(), other.server.log().len()), (tunesmith::Kind::Io, 4));
    assert!(error.message().contains("500"), "{error}");
}

#[test]
fn listings_cannot_lead_out_of_the_cache() {
    for path in ["../../evil.json", "/etc/evil.json", "a/../../../evil.json", "a\\b.json"] {
        let world = World::new();
        publish(&world, "main");
        world.server.commit("models/owner/name", "main", &[("config.json", b"{}"), (path, b"evil")]);
        let error = world.refusal();
        assert!(error.message().contains("outside of its folder"), "{error}");
        assert!(world.blobs().is_empty());
    }
    let world = World::new();
    publish(&world, "main");
    world.server.fault(|request, _, reply| {
        let file = r#"{"type":"file","oid":"0","size":1,"path":"x"},"#;
        let body = format!("[{}", file.repeat(60_000)).trim_end_matches(',').to_owned() + "]";
        if request.target.contains("/tree/") { Reply::status(200, &[], &body) } else { reply }
    });
    assert!(world.refusal().message().contains("more than 50000 files"));
    // Neither may what the hub says of a single file.
    world.server.fault(|request, _, mut reply| {
        if request.is("HEAD", "/resolve/") {
            reply.headers.retain(|(name, _)| !name.eq_ignore_ascii_case("etag"));
            reply.headers.push(("ETag".into(), "\"../../evil\"".into()));
        }
        reply
    });
    let error = world.refusal();
    assert!(error.message().contains("no usable ETag"), "{error}");
}

#[test]
fn more_bytes_than_announced_are_not_taken() {
    let world = World::new();
    publish(&world, "main");
    world.server.fault(|request, _, mut reply| {
        if request.is("GET", "/cdn/") {
            reply.body.extend([0; 1000]);
        }
        reply
    });
    assert!(world.refusal().message().contains("more than the announced"));
    assert!(!world.blobs().iter().any(|name| name.starts_with(&sha256(&weights()))));
}

#[test]
fn a_file_is_fetched_once_by_those_who_want_it_at_the_same_time() {
    let world = World::new();
    publish(&world, "main");
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| world.model(None).unwrap());
        }
    });
    assert_eq!(world.server.count("GET", "/cdn/"), 1);
}

#[test]
fn data_sets_are_found_by_configuration_and_split() {
    let world = World::new();
    let card = b"---\nconfigs:\n- config_name: chat\n  data_files:\n  - split: train\n    path: chat/*.jsonl\n---\n";
    let files: [(&str, &[u8]); 5] = [
        ("README.md", card),
        ("chat/a.jsonl", b"{}\n"),
        ("chat/b b.jsonl", b"{} \n"),
        ("plain/c.jsonl", b"{}"),
        ("data.py", b"never"),
    ];
    world.server.commit("datasets/owner/rows", "main", &files);
    let found = world.hub().dataset("owner/rows", None, None, None).unwrap();
    let ends: Vec<_> = found.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(ends, ["a.jsonl", "b b.jsonl"]);
    assert!(found[0].starts_with(world.settings.cache.join("datasets--owner--rows/snapshots")));
    assert_eq!(fs::read(&found[1]).unwrap(), b"{} \n");
    let error = world.hub().dataset("owner/rows", Some("other"), None, None).unwrap_err();
    assert_eq!(error.kind(), tunesmith::Kind::Data);
    assert!(error.message().contains("owner/rows") && error.hint_text().unwrap().contains("chat"), "{error}");
    let offline = Hub::new(world.offline(), &world.heard);
    assert_eq!(offline.dataset("owner/rows", Some("chat"), Some("train"), None).unwrap(), found);

    world.server.commit(
        "datasets/owner/plain",
        "main",
        &[("data/train-00000-of-00001.parquet", b"PAR1"), ("test.csv", b"a")],
    );
    let found = world.hub().dataset("owner/plain", None, None, None).unwrap();
    assert!(found.len() == 1 && found[0].ends_with("data/train-00000-of-00001.parquet"), "{found:?}");
}

#[test]
fn paths_may_lie_on_the_hub() {
    let world = World::new();
    world.server.commit("datasets/owner/rows", "v2", &[("x/a.jsonl", b"1"), ("x/b.jsonl", b"2"), ("c.csv", b"3")]);
    let local = |path: &str| world.hub().local_paths(&[PathBuf::from("here.jsonl"), PathBuf::from(path)]);
    let found = local("hf://datasets/owner/rows@v2/x/*.jsonl").unwrap();
    assert_eq!(found.len(), 3);
    assert!(found[0] == Path::new("here.jsonl") && found[2].ends_with("x/b.jsonl"));
    let error = local("hf://datasets/owner/rows@v2/d.csv").unwrap_err();
    assert!(error.hint_text().unwrap().contains("c.csv"), "{error}");
    assert!(local("hf://datasets/owner/rows/c.csv").unwrap_err().hint_text().unwrap().contains("v2"));
}

#[test]
fn a_folder_of_ones_own_is_filled_and_nothing_in_it_replaced() {
    let world = World::new();
    publish(&world, "main");
    let dir = world.folder.path().join("mine");
    let fetch = || world.hub().model("owner/name", None, Part::Whole, Destination::Folder(dir.clone()));
    assert_eq!(fetch().unwrap().dir, dir);
    assert_eq!(names(&dir), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert!(fs::symlink_metadata(dir.join("model.safetensors")).unwrap().is_file() && world.blobs().is_empty());
    fetch().unwrap();
    assert_eq!(world.server.count("GET", "/cdn/"), 1);
    fs::write(dir.join("config.json"), "mine").unwrap();
    let error = fetch().unwrap_err();
    assert!(error.message().contains("another content"), "{error}");
    assert_eq!(fs::read(dir.join("config.json")).unwrap(), b"mine");
}

#[test]
fn an_adapter_may_lie_on_the_hub() {
    let world = World::new();
    let files: [(&str, &[u8]); 3] =
        [("adapter_config.json", b"{}"), ("adapter_model.safetensors", b"x"), ("training_args.bin", b"never")];
    world.server.commit("models/owner/name", "main", &files);
    let dir = world.hub().adapter("owner/name", None).unwrap().dir;
    assert_eq!(names(&dir), ["adapter_config.json", "adapter_model.safetensors"]);
    assert!(world.refusal().hint_text().unwrap().contains("set tuning.adapter"));
    assert!(Repo::new(RepoKind::Model, "a/b/c").is_err());
}
