//! Limits of the machine, special files, outputs and signals, for every subcommand of the real program: each ends with an
//! exit code of its table, and with a message; nothing panics, aborts, hangs, or replaces what it should not.
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::run::fixture::{Fixture, said, train, tunesmith};

/// A run that has ended, and inputs for everything else.
struct World(Fixture);

impl World {
    fn new() -> Self {
        let fixture = Fixture::new();
        let config = fixture.config("run", &["train.max_steps: 2", "gen.max_new_tokens: 2", "train.num_threads: 1"]);
        let output = train(&config, &[]);
        assert!(output.status.success(), "{}", said(&output));
        fs::write(fixture.path("page.md"), "# Title\n\ntext\n").unwrap();
        fs::write(fixture.path("axolotl.yaml"), "base_model: x\nadapter: lora\ndatasets: [{path: a.jsonl}]\n").unwrap();
        fs::write(fixture.path("prompts.jsonl"), "\"abc\"\n\"def\"\n").unwrap();
        Self(fixture)
    }

    fn text(&self, name: &str) -> String {
        self.0.path(name).to_str().unwrap().to_owned()
    }

    /// Every subcommand, with an output of its own in the folder `to`; and whether it prints to standard output.
    fn commands(&self, to: &str) -> Vec<(Vec<String>, bool)> {
        let at = |name: &str| self.text(name);
        let to = |name: &str| self.text(&format!("{to}/{name}"));
        let config = at("run.yaml");
        let [out, launched] = ["run", "launched"].map(|name| format!("train.output_dir={}", to(name)));
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        vec![
            (words(&["config", &config]), true),
            (words(&["--help"]), true),
            (words(&["train", &config, &out, "train.max_steps=1"]), true),
            (words(&["launch", "--nproc", "1", "--", "train", &config, &launched, "train.max_steps=1"]), true),
            (words(&["data", &config, "--dump", &to("dump.jsonl")]), true),
            (words(&["process", &config, "--out", &to("rows.jsonl")]), true),
            (words(&["ingest", &at("page.md"), "--out", &to("pages.jsonl")]), true),
            (words(&["download", "owner/name", "--dir", &to("hub")]), false),
            (words(&["import", &at("axolotl.yaml"), "--out", &to("ours.yaml")]), true),
            (words(&["eval", &config, "--alone", "--rows", "1", "--output", &to("eval")]), true),
            (words(&["merge", &config, "--output", &to("merged")]), true),
            (words(&["export", &config, "--peft", "--output", &to("peft")]), true),
            (words(&["models", &at("model")]), true),
            (words(&["plan", &config]), true),
            (words(&["infer", &config, "--prompt", "abc"]), true),
            (words(&["infer", &config, "--in", &at("prompts.jsonl"), "--out", &to("answers.jsonl")]), false),
            (words(&["chat", &config]), false),
            (words(&["bench", "--model", &at("model"), "--seq", "8", "--steps", "1", "--threads", "1"]), true),
            (words(&["doctor"]), true),
            (words(&["gpu-info"]), true),
            (words(&["setup-accelerate", "--yes", "--out", &to("accelerate.yaml")]), true),
            (words(&["memory-check"]), true),
        ]
    }
}

/// Runs `tunesmith ARGS` in a shell after `before`, at most a minute.
fn shell(before: &str, args: &[String], after: &str) -> Output {
    let program = env!("CARGO_BIN_EXE_tunesmith");
    let quoted: Vec<String> = args.iter().map(|arg| format!("'{arg}'")).collect();
    let script = format!("{before}\nexec '{program}' {} {after}", quoted.join(" "));
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "60", "bash", "-c", &script]).env_remove("CONFIG").env("HF_HUB_OFFLINE", "1");
    command.env("HF_HUB_CACHE", "/nonexistent/hub").stdin(Stdio::null());
    command.output().unwrap()
}

/// The codes that the program may end with.
const CODES: [i32; 10] = [0, 2, 3, 4, 5, 6, 7, 8, 9, 75];

#[track_caller]
fn ends_well(output: &Output, what: &str) -> i32 {
    let text = said(output);
    let code = output.status.code().unwrap_or_else(|| panic!("{what}: {:?}: {text}", output.status.signal()));
    assert!(CODES.contains(&code), "{what}: exit code {code}: {text}");
    for word in ["panicked", "RUST_BACKTRACE", "has overflowed", "memory allocation of"] {
        assert!(!text.contains(word), "{what}: {text}");
    }
    assert!(code == 0 || text.contains(" error: ") || text.contains("2>"), "{what}: no message: {text:?}");
    code
}

/// Does `work` with each of `items`, two at a time.
fn in_pairs<T: Sync>(items: &[T], work: impl Fn(&T) + Sync) {
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    work(item);
                }
            });
        }
    });
}

#[test]
fn no_limit_of_the_machine_ends_a_command_without_a_message() {
    let world = World::new();
    for (number, (fault, after)) in
        [("ulimit -v 250000", ""), ("ulimit -n 5", ""), ("ulimit -s 100", ""), ("ulimit -f 0", ""), ("", "<&-")]
            .into_iter()
            .enumerate()
    {
        let mut commands = world.commands(&format!("limited{number}"));
        // It measures for longer than this test has time.
        commands.retain(|(args, _)| args[0] != "bench");
        in_pairs(&commands, |(args, _)| {
            ends_well(&shell(fault, args, after), &format!("{fault} {after}: {args:?}"));
        });
    }
}

#[test]
fn output_that_cannot_be_written_is_an_error_and_a_reader_that_has_gone_is_none() {
    let world = World::new();
    for (number, (after, wanted)) in
        [(">/dev/full", Some(6)), (">&-", Some(6)), ("2>/dev/full", None), (">/dev/null 2>&-", None)]
            .into_iter()
            .enumerate()
    {
        in_pairs(&world.commands(&format!("printed{number}")), |(args, prints)| {
            let output = shell("", args, after);
            let code = output.status.code();
            let what = format!("{after}: {args:?}: {}", said(&output));
            match wanted {
                Some(wanted) if *prints => {
                    assert_eq!(code, Some(wanted), "{what}");
                    assert!(said(&output).contains("standard output"), "{what}");
                }
                _ => assert!(code.is_some_and(|code| CODES.contains(&code)), "{what}"),
            }
        });
    }
    let config = world.text("run.yaml");
    let script = format!("set -o pipefail; '{}' config '{config}' | head -1", env!("CARGO_BIN_EXE_tunesmith"));
    let output = Command::new("bash").args(["-c", &script]).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", said(&output));
}

#[test]
fn threads_that_the_system_does_not_give_are_a_limit_too() {
    // The limit of processes does not hold for the superuser.
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 || Command::new("setpriv").arg("--version").output().is_err() {
        return;
    }
    let world = World::new();
    let open = Command::new("chmod").args(["-R", "a+rwX", world.0.root.path().to_str().unwrap()]).status().unwrap();
    assert!(open.success());
    let program = env!("CARGO_BIN_EXE_tunesmith");
    let copy = world.text("tunesmith");
    fs::copy(program, &copy).unwrap();
    let copied = Command::new("chmod").args(["a+rx", &copy]).status().unwrap();
    assert!(copied.success());
    for (limit, number) in [(1, 65_001), (2, 65_002), (3, 65_003)] {
        for (args, _) in world.commands(&format!("threads{limit}")) {
            let user = number.to_string();
            let mut command = Command::new("timeout");
            command.args(["-s", "KILL", "60", "setpriv", "--reuid", &user, "--clear-groups", "bash", "-c"]);
            let quoted: Vec<String> = args.iter().map(|arg| format!("'{arg}'")).collect();
            command.arg(format!("ulimit -u {limit}; exec '{copy}' {}", quoted.join(" ")));
            command.env_remove("CONFIG").env("HF_HUB_OFFLINE", "1").env("HF_HUB_CACHE", "/nonexistent/hub");
            let output = command.stdin(Stdio::null()).output().unwrap();
            ends_well(&output, &format!("ulimit -u {limit}: {args:?}"));
        }
    }
}

#[test]
fn outputs_never_replace_inputs_nor_what_is_not_theirs() {
    let world = World::new();
    let at = |name: &str| world.0.path(name);
    let rows = fs::read(at("train.jsonl")).unwrap();
    fs::create_dir(at("a")).unwrap();
    symlink(at("train.jsonl"), at("link.jsonl")).unwrap();
    fs::hard_link(at("train.jsonl"), at("hard.jsonl")).unwrap();
    let config = world.text("run.yaml");
    let spellings = ["train.jsonl", "a/../train.jsonl", "./link.jsonl", "hard.jsonl"];
    for name in spellings {
        let out = format!("{}/{name}", world.0.root.path().display());
        for args in [
            &["data", &config, "--overwrite", "--dump", &out][..],
            &["process", &config, "--overwrite", "--out", &out],
            &["infer", &config, "--overwrite", "--in", &world.text("train.jsonl"), "--out", &out],
        ] {
            let output = tunesmith(args).output().unwrap();
            assert_eq!(output.status.code(), Some(2), "{args:?}: {}", said(&output));
            let why = ["is an input of this command", "it is the --in file"];
            assert!(why.iter().any(|why| said(&output).contains(why)), "{args:?}: {}", said(&output));
        }
    }
    assert_eq!(fs::read(at("train.jsonl")).unwrap(), rows);
    // The model's files are inputs, too.
    let model = world.text("model/tokenizer_config.json");
    for args in [
        &["data", &config, "--overwrite", "--dump", &model][..],
        &["infer", &config, "--overwrite", "--in", &world.text("prompts.jsonl"), "--out", &model],
        &["import", &world.text("axolotl.yaml"), "--force", "--out", &world.text("axolotl.yaml")],
    ] {
        let output = tunesmith(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", said(&output));
    }
    // What is there stays, by whoever it was made.
    fs::write(at("mine.jsonl"), "mine\n").unwrap();
    for name in ["metrics.json", "samples.jsonl", "report.html"] {
        fs::create_dir_all(at("eval")).unwrap();
        fs::write(at("eval").join(name), "mine\n").unwrap();
        let output = tunesmith(&["eval", &config, "--alone", "--rows", "1", "--output", &world.text("eval")]).output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(2), "{name}: {}", said(&output));
        assert!(said(&output).contains("replace it with --overwrite"), "{name}: {}", said(&output));
        assert_eq!(fs::read_to_string(at("eval").join(name)).unwrap(), "mine\n");
        fs::remove_file(at("eval").join(name)).unwrap();
    }
    for name in ["metrics.json", "samples.jsonl", "report.html"] {
        fs::write(at("eval").join(name), "mine\n").unwrap();
    }
    let words = ["eval", &config, "--alone", "--rows", "1", "--overwrite", "--output", &world.text("eval")];
    let output = tunesmith(&words).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    for name in ["metrics.json", "samples.jsonl", "report.html"] {
        assert_ne!(fs::read_to_string(at("eval").join(name)).unwrap(), "mine\n", "{name}");
    }
    let mine = world.text("mine.jsonl");
    for args in [
        &["data", &config, "--dump", &mine][..],
        &["process", &config, "--out", &mine],
        &["ingest", &world.text("page.md"), "--out", &mine],
        &["infer", &config, "--in", &world.text("prompts.jsonl"), "--out", &mine],
        &["setup-accelerate", "--yes", "--out", &mine],
    ] {
        let output = tunesmith(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", said(&output));
        assert_eq!(fs::read_to_string(&mine).unwrap(), "mine\n", "{args:?}");
    }
    fs::write(at("mine.gguf"), "mine\n").unwrap();
    let gguf = ["export", &config, "--gguf", "f16", "--adapter-only", "--output", &world.text("mine.gguf")];
    assert_eq!(tunesmith(&gguf).output().unwrap().status.code(), Some(2));
    assert_eq!(fs::read_to_string(at("mine.gguf")).unwrap(), "mine\n");
    let output = tunesmith(&["data", &config, "--overwrite", "--dump", &mine]).output().unwrap();
    assert!(output.status.success() && fs::read_to_string(&mine).unwrap().contains("input_ids"), "{}", said(&output));
    // What `process` wrote it may write again, until somebody else has changed it.
    let out = world.text("processed.jsonl");
    for (words, code) in [(&[][..], 0), (&[], 0), (&["data.max_rows=9"], 0)] {
        let output = tunesmith(&[&["process", &config, "--out", &out], words].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
    }
    fs::write(&out, fs::read_to_string(&out).unwrap() + "\n").unwrap();
    let output = tunesmith(&["process", &config, "--out", &out]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    // A run's own names in a folder of somebody else's.
    for name in ["metrics.jsonl", "report.html", "config.resolved.yaml", "best"] {
        fs::create_dir_all(at("other")).unwrap();
        fs::write(at("other").join(name), "mine\n").unwrap();
        let output = train(&at("run.yaml"), &[&format!("train.output_dir={}", world.text("other"))]);
        assert_eq!(output.status.code(), Some(2), "{name}: {}", said(&output));
        assert_eq!(fs::read_to_string(at("other").join(name)).unwrap(), "mine\n");
        fs::remove_dir_all(at("other")).unwrap();
    }
    let output =
        train(&at("run.yaml"), &["--overwrite", &format!("data.train_path={}", world.text("out/metrics.jsonl"))]);
    assert!(
        output.status.code() == Some(2) && said(&output).contains("is inside train.output_dir = "),
        "{}",
        said(&output)
    );
    assert!(at("out/adapter/adapter_config.json").exists());
}

#[test]
fn special_files_are_refused_before_any_work_wherever_a_path_is_taken() {
    let world = World::new();
    let at = |name: &str| world.0.path(name);
    let config = world.text("run.yaml");
    assert!(Command::new("mkfifo").arg(at("fifo.jsonl")).status().unwrap().success());
    fs::create_dir(at("folder.jsonl")).unwrap();
    symlink(at("nothing"), at("dangling.jsonl")).unwrap();
    symlink(at("circle.jsonl"), at("circle.jsonl")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(at("socket.jsonl")).unwrap();
    symlink("/dev/zero", at("device.jsonl")).unwrap();
    let names = ["fifo.jsonl", "folder.jsonl", "dangling.jsonl", "circle.jsonl", "socket.jsonl", "device.jsonl"];
    let model = world.text("model");
    symlink("/dev/zero", at("device.gguf")).unwrap();
    let device = world.text("device.gguf");
    let gguf = ["export", &config, "--gguf", "f16", "--adapter-only", "--overwrite", "--output", &device];
    assert_eq!(tunesmith(&gguf).output().unwrap().status.code(), Some(6));
    in_pairs(&names, |name| {
        let special = world.text(name);
        let set = |key: &str| format!("{key}={special}");
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        for (args, code) in [
            (words(&["config", &special]), 2),
            (words(&["data", &config, &set("data.train_path")]), 3),
            (words(&["data", &config, &set("data.val_path")]), 3),
            (words(&["data", &config, &set("data.template_path")]), 4),
            (words(&["data", &config, "--overwrite", "--dump", &special]), 6),
            (words(&["process", &config, "--overwrite", "--out", &special]), 6),
            (words(&["ingest", &world.text("page.md"), "--overwrite", "--out", &special]), 6),
            (words(&["infer", &config, "--in", &special, "--out", &world.text("answers.jsonl")]), 3),
            (words(&["infer", &config, "--in", &world.text("prompts.jsonl"), "--out", &special]), 6),
            (words(&["import", &world.text("axolotl.yaml"), "--force", "--out", &special]), 6),
            (words(&["import", &special]), 2),
            (words(&["setup-accelerate", "--yes", "--overwrite", "--out", &special]), 6),
        ] {
            let output = shell("", &args, "");
            assert_eq!(output.status.code(), Some(code), "{args:?}: {}", said(&output));
            ends_well(&output, &format!("{args:?}"));
        }
        if *name != "folder.jsonl" {
            let output = shell("", &words(&["train", &config, &set("train.output_dir")]), "");
            assert_eq!(output.status.code(), Some(6), "{name}: {}", said(&output));
        }
        // In a model's folder, in the place of each of its files.
        for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
            let copy = at(&format!("model-{name}-{file}"));
            copy_folder(Path::new(&model), &copy);
            fs::remove_file(copy.join(file)).unwrap();
            fs::rename(make_special(&copy, name), copy.join(file)).unwrap();
            let out = format!("train.output_dir={}", world.text(&format!("unused-{name}-{file}")));
            let args = words(&["train", &config, &out, &format!("model.name={}", copy.display())]);
            let output = shell("", &args, "");
            let code = ends_well(&output, &format!("{name} as {file}"));
            assert!([3, 4].contains(&code), "{name} as {file}: {}", said(&output));
        }
    });
    // A link that leads out of a model's folder; one that stays in it will do.
    for (target, code) in [("../outside.safetensors", 4), ("inside.safetensors", 0)] {
        let copy = at(&format!("linked{code}"));
        copy_folder(Path::new(&model), &copy);
        fs::rename(copy.join("model.safetensors"), copy.join(target)).unwrap();
        symlink(target, copy.join("model.safetensors")).unwrap();
        let output = format!("train.output_dir={}", world.text(&format!("of-linked{code}")));
        let output = train(&at("run.yaml"), &[&output, &format!("model.name={}", copy.display())]);
        assert_eq!(output.status.code(), Some(code), "{target}: {}", said(&output));
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Another special file of the same kind in `folder`.
fn make_special(folder: &Path, kind: &str) -> PathBuf {
    let path = folder.join("special");
    match kind {
        "fifo.jsonl" => assert!(Command::new("mkfifo").arg(&path).status().unwrap().success()),
        "folder.jsonl" => fs::create_dir(&path).unwrap(),
        "dangling.jsonl" => symlink("nothing", &path).unwrap(),
        "circle.jsonl" => symlink("special", &path).unwrap(),
        "socket.jsonl" => drop(std::os::unix::net::UnixListener::bind(&path).unwrap()),
        _ => symlink("/dev/zero", &path).unwrap(),
    }
    path
}

#[test]
fn a_lock_that_is_a_link_is_not_written_through() {
    let world = World::new();
    let at = |name: &str| world.0.path(name);
    fs::write(at("precious"), "precious\n").unwrap();
    for hard in [false, true] {
        fs::create_dir_all(at("fresh")).unwrap();
        let link = at("fresh/.lock");
        if hard { fs::hard_link(at("precious"), &link) } else { symlink(at("precious"), &link) }.unwrap();
        let output = train(&at("run.yaml"), &[&format!("train.output_dir={}", world.text("fresh"))]);
        assert_eq!(output.status.code(), Some(6), "{}", said(&output));
        assert_eq!(fs::read_to_string(at("precious")).unwrap(), "precious\n");
        fs::remove_dir_all(at("fresh")).unwrap();
    }
}

fn send(child: &std::process::Child, signal: i32) {
    // SAFETY: `kill` touches no memory; the child has not been waited for, so that its number is nobody else's.
    assert_eq!(unsafe { libc::kill(i32::try_from(child.id()).unwrap(), signal) }, 0);
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_signal_ends_a_command_at_once_and_leaves_nothing_half_written() {
    let fixture = Fixture::new();
    // So many rows that writing takes several turns.
    let rows = fs::read_to_string(fixture.path("train.jsonl")).unwrap().repeat(200);
    fs::write(fixture.path("train.jsonl"), rows).unwrap();
    let config = fixture.config("run", &["data.use_cache: false"]);
    let config = config.to_str().unwrap();
    let out = fixture.path("to/rows.jsonl");
    let out = out.to_str().unwrap();
    let process = &["process", config, "--out", out][..];
    let data = &["data", config, "--dump", out][..];
    let folder = fixture.path("to");
    let cases = [(process, libc::SIGTERM), (process, libc::SIGINT), (process, libc::SIGHUP), (data, libc::SIGTERM)];
    for (args, signal) in cases {
        let mut child = stopped_while_it_writes(args, &folder);
        send(&child, signal);
        send(&child, libc::SIGCONT);
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(signal), "{args:?}: {status}");
        assert_eq!(names(&folder), [""; 0], "{args:?}");
    }
    // Killed outright it leaves its file, which the next one removes; that of a living one stays.
    let mut first = stopped_while_it_writes(process, &folder);
    first.kill().unwrap();
    first.wait().unwrap();
    let left = names(&folder);
    assert!(!left.is_empty());
    let mut second = stopped_while_it_writes(process, &folder);
    let living = names(&folder);
    assert!(living.iter().all(|name| !left.contains(name)), "{left:?} {living:?}");
    let mut third = stopped_while_it_writes(process, &folder);
    let now = names(&folder);
    assert!(living.iter().all(|name| now.contains(name)), "{living:?} {now:?}");
    for child in [&mut second, &mut third] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

/// Starts a command and stops it (`SIGSTOP`) while its temporary file in `folder` has something in it. It runs in short
/// turns, so that it does not end before somebody looks.
fn stopped_while_it_writes(args: &[&str], folder: &Path) -> std::process::Child {
    let mut child = tunesmith(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mark = format!(".tmp-{}-", child.id());
    let stat = format!("/proc/{}/stat", child.id());
    wait_until("a temporary file", || {
        send(&child, libc::SIGCONT);
        std::thread::sleep(Duration::from_millis(2));
        send(&child, libc::SIGSTOP);
        wait_until("it to stand still", || {
            assert!(child.try_wait().unwrap().is_none(), "{args:?} has ended");
            fs::read_to_string(&stat).unwrap().contains(") T ")
        });
        let own = names(folder).into_iter().filter(|name| name.contains(&mark));
        own.into_iter().any(|name| fs::metadata(folder.join(name)).is_ok_and(|metadata| metadata.len() > 0))
    });
    child
}

#[test]
fn training_saves_at_a_hang_up_and_ends_at_once_at_a_second_signal() {
    let fixture = Fixture::new();
    let config =
        fixture.config("run", &["train.max_steps: 100000", "train.save_strategy: steps", "train.save_steps: 5000"]);
    let metrics = fixture.path("out/metrics.jsonl");
    let lines = |count| move |path: &Path| fs::read_to_string(path).unwrap_or_default().lines().count() >= count;
    let mut args = vec!["train", config.to_str().unwrap()];
    let child = tunesmith(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("steps", || lines(3)(&metrics));
    send(&child, libc::SIGHUP);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.code() == Some(75) && said(&output).contains("SIGHUP"), "{}", said(&output));
    assert!(names(&fixture.path("out")).iter().any(|name| name.starts_with("checkpoint-")));
    // What blocks does not keep it: the run is stopped before it can answer the first signal.
    args.push("--resume");
    let child = tunesmith(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let before = fs::read_to_string(&metrics).unwrap().lines().count();
    wait_until("more steps", || lines(before + 3)(&metrics));
    send(&child, libc::SIGTERM);
    std::thread::sleep(Duration::from_millis(300));
    send(&child, libc::SIGTERM);
    let output = child.wait_with_output().unwrap();
    let ended = output.status.signal() == Some(libc::SIGTERM) || output.status.code() == Some(75);
    assert!(ended, "{:?}", output.status);
    assert!(names(&fixture.path("out")).iter().all(|name| !name.contains(".tmp-")));
}

#[test]
fn an_output_folder_that_goes_while_a_run_writes_to_it_costs_nothing_but_what_was_in_it() {
    let fixture = Fixture::new();
    let config =
        fixture.config("run", &["train.max_steps: 100000", "train.save_strategy: steps", "train.save_steps: 5000"]);
    let args = ["train", config.to_str().unwrap()];
    let child = tunesmith(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("steps", || {
        fs::read_to_string(fixture.path("out/metrics.jsonl")).is_ok_and(|text| text.lines().count() > 3)
    });
    fs::rename(fixture.path("out"), fixture.path("moved")).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", said(&output));
    assert!(said(&output).contains("was removed or moved while the run wrote to it"), "{}", said(&output));
    let more = train(&config, &["--resume", "train.max_steps=1"]);
    assert!(more.status.success() || said(&more).contains("checkpoint"), "{}", said(&more));
    assert!(names(&fixture.path("out")).iter().any(|name| name.starts_with("checkpoint-")));
}

#[test]
fn a_file_of_a_run_that_is_removed_or_replaced_stops_the_run_at_its_next_step_and_loses_nothing() {
    type Change = fn(&Path);
    // At once: the run must not find a moment without the file.
    let fifo: Change = |path| {
        let new = path.with_extension("new");
        assert!(Command::new("mkfifo").arg(&new).status().unwrap().success());
        fs::rename(new, path).unwrap();
    };
    let folder: Change = |path| {
        let _ = fs::remove_file(path);
        fs::create_dir(path).unwrap();
    };
    let replaced: Change = |path| {
        fs::write(path.with_extension("new"), "mine\n").unwrap();
        fs::rename(path.with_extension("new"), path).unwrap();
    };
    let changes: [(&str, Change, &str); 8] = [
        ("latest", folder, "is a folder, expected"),
        ("metrics.jsonl", fifo, "is a FIFO, expected"),
        ("metrics.jsonl", |path| fs::remove_file(path).unwrap(), "was removed or replaced"),
        ("metrics.jsonl", replaced, "was removed or replaced"),
        ("report.html", folder, "is a folder, expected"),
        ("config.resolved.yaml", fifo, "is a FIFO, expected"),
        ("backend.json", fifo, "is a FIFO, expected"),
        ("best", |path| symlink("/dev/zero", path).unwrap(), "is a link, expected"),
    ];
    in_pairs(&changes, |(name, change, expected)| {
        let fixture = Fixture::new();
        let config = fixture.config("run", &["train.max_steps: 100000", "train.save_strategy: no"]);
        let args = ["train", config.to_str().unwrap()];
        let mut child = tunesmith(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("steps", || {
            fs::read_to_string(fixture.path("out/metrics.jsonl")).is_ok_and(|text| text.lines().count() > 3)
        });
        let path = fixture.path("out").join(name);
        change(&path);
        let deadline = Instant::now() + Duration::from_secs(20);
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                child.kill().unwrap();
                panic!("{name}: the run went on");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let output = child.wait_with_output().unwrap();
        let said = said(&output);
        assert_eq!(output.status.code(), Some(6), "{name}: {said}");
        assert!(said.contains(expected) && said.contains(name) && said.contains("hint:"), "{name}: {said}");
        assert!(names(&fixture.path("out")).iter().any(|name| name.starts_with("checkpoint-")), "{name}");
    });
}

#[test]
fn a_pointer_that_is_replaced_between_saves_stops_the_run_with_its_state_saved() {
    let fixture = Fixture::new();
    let config = fixture.config(
        "run",
        &["train.max_steps: 100000", "train.save_strategy: steps", "train.save_steps: 1", "train.save_async: false"],
    );
    let latest = fixture.path("out/latest");
    let args = ["train", config.to_str().unwrap()];
    let mut child = tunesmith(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("a checkpoint", || latest.is_file());
    fs::write(fixture.path("mine"), "mine").unwrap();
    // A save that is under way may still put its own file over the link.
    wait_until("the end", || {
        if !latest.is_symlink() {
            symlink(fixture.path("mine"), fixture.path("link")).unwrap();
            fs::rename(fixture.path("link"), &latest).unwrap();
        }
        child.try_wait().unwrap().is_some()
    });
    let output = child.wait_with_output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(6), "{said}");
    assert!(said.contains("is a link, expected") && said.contains("is saved") && said.contains("--resume"), "{said}");
    assert_eq!(fs::read_to_string(fixture.path("mine")).unwrap(), "mine");
}

#[test]
fn damaged_files_beside_intact_checkpoints_do_not_keep_a_run_from_going_on() {
    let world = World::new();
    let config = world.0.path("run.yaml");
    for name in ["latest", "best", "metrics.jsonl"] {
        fs::write(world.0.path("out").join(name), "junk\nof mine\n").unwrap();
    }
    fs::write(world.0.path("out/backend.json"), [0; 64]).unwrap();
    let output = train(&config, &["--resume", "train.max_steps=3"]);
    assert!(output.status.success(), "{}", said(&output));
    let text = |name: &str| fs::read_to_string(world.0.path("out").join(name)).unwrap();
    assert!(text("latest").starts_with("checkpoint-000003"), "{}", text("latest"));
    assert_eq!(text("metrics.jsonl.kept-1"), "junk\nof mine\n");
    assert_eq!(text("backend.json.kept-1"), "\0".repeat(64));
    assert!(text("backend.json").starts_with('{'), "{}", text("backend.json"));
    assert!(text("metrics.jsonl").starts_with("{\"step\":"), "{}", text("metrics.jsonl"));
    fs::write(world.0.path("out/report.html"), "mine").unwrap();
    let output = train(&config, &["--resume", "train.max_steps=4"]);
    assert!(output.status.code() == Some(2) && !said(&output).contains("--overwrite"), "{}", said(&output));
}

#[test]
fn a_merge_that_was_killed_is_cleared_by_the_next() {
    let world = World::new();
    let at = |name: &str| world.0.path(name);
    let (config, merged) = (world.text("run.yaml"), world.text("merged"));
    let merge = ["merge", &config, "--output", &merged];
    let output = tunesmith(&merge).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    // Killed while it wrote, and between the two renames that put a new folder at the old one's place.
    fs::create_dir(at("merged.tmp-4194304")).unwrap();
    fs::write(at("merged.tmp-4194304/model.safetensors"), "half").unwrap();
    fs::rename(at("merged"), at("merged.old-4194304")).unwrap();
    for reader in [&["infer", "--prompt", "x", "--model"][..], &["infer", &config, "--prompt", "x", "--adapter"]] {
        let told = said(&tunesmith(&[reader, &[&merged]].concat()).output().unwrap());
        assert!(told.contains("was killed while it replaced") && told.contains("merged.old-4194304"), "{told}");
    }
    let output = tunesmith(&merge).output().unwrap();
    assert!(output.status.code() == Some(2) && said(&output).contains("is there already"), "{}", said(&output));
    let left: Vec<String> = names(world.0.root.path()).into_iter().filter(|name| name.starts_with("merged")).collect();
    assert_eq!(left, ["merged"], "the old folder is back, the half one gone");
    fs::write(at("merged/notes.txt"), "mine").unwrap();
    let output = tunesmith(&[&merge[..], &["--overwrite"]].concat()).output().unwrap();
    assert!(output.status.code() == Some(2) && said(&output).contains("notes.txt"), "{}", said(&output));
    fs::remove_file(at("merged/notes.txt")).unwrap();
    let output = tunesmith(&[&merge[..], &["--overwrite"]].concat()).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
}
