//! Real deaths of the program, and disks that fail under it: at every operation on files that a run makes (a shim is loaded
//! before the C library), and at any time. A short selection always runs; `just crash-test` runs all of it.
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tunesmith::checkpoint::{self, newest_complete};

use super::fixture::{Fixture, said, tunesmith};
use super::resume::{assert_same_ending, go};

/// The shim, compiled once.
pub fn shim() -> &'static Path {
    static SHIM: OnceLock<PathBuf> = OnceLock::new();
    SHIM.get_or_init(|| {
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("crash-shim-{}.so", std::process::id()));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/run/shim.c");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source).arg("-ldl");
        assert!(cc.status().expect("cc, which Rust links with").success());
        library
    })
}

/// Numbers that look random, the same in each run of the tests.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

/// A run of a few steps with checkpoints after steps 2, 4 and 6, and the same with all of them kept, uninterrupted.
pub struct Case {
    fixture: Fixture,
    config: PathBuf,
    last: u64,
    /// Seconds that the uninterrupted run took.
    seconds: f64,
}

impl Case {
    fn new(last: u64, every: u64, extra: &[&str]) -> Self {
        let fixture = Fixture::new();
        let (steps, every) = (format!("train.max_steps: {last}"), format!("train.save_steps: {every}"));
        let mut lines = vec!["train.save_strategy: steps", "train.save_total_limit: 1", "logging.report: false"];
        lines.extend([steps.as_str(), every.as_str()]);
        lines.extend(extra);
        let config = fixture.config("run", &lines);
        let began = Instant::now();
        let straight = tunesmith(&["train", config.to_str().unwrap(), "TRAIN_SAVE_TOTAL_LIMIT=null"]).output().unwrap();
        assert!(straight.status.success(), "{}", said(&straight));
        Self { fixture, config, last, seconds: began.elapsed().as_secs_f64() }
    }

    fn straight(&self) -> PathBuf {
        self.fixture.path("out")
    }

    pub fn command(&self, out: &Path) -> Command {
        let out = format!("TRAIN_OUTPUT_DIR={}", out.display());
        tunesmith(&["train", self.config.to_str().unwrap(), &out, "--resume"])
    }

    /// A place for this case's files.
    pub fn path(&self, name: &str) -> PathBuf {
        self.fixture.path(name)
    }

    /// The run in the folder `out`, under the shim.
    fn meets(&self, out: &Path, how: &str, at: usize) -> Output {
        let mut command = self.command(out);
        command.env("LD_PRELOAD", shim()).env("CRASH_DIR", out).env("CRASH_HOW", how).env("CRASH_AT", at.to_string());
        command.env("CRASH_LOG", self.fixture.path("operations")).output().unwrap()
    }

    /// What the run does to its files, when nothing happens: the kinds of its operations in their order.
    fn operations(&self, how: &str) -> Vec<String> {
        let out = self.fixture.path("counted");
        let output = self.meets(&out, how, 0);
        assert!(output.status.success(), "{}", said(&output));
        std::fs::remove_dir_all(out).unwrap();
        let log = self.fixture.path("operations");
        let text = std::fs::read_to_string(&log).unwrap();
        std::fs::remove_file(log).unwrap();
        text.lines().map(|line| line.split(' ').nth(1).unwrap().to_owned()).collect()
    }

    /// Checks what must hold after any fault: no checkpoint is damaged, the newest one is at least as new as the last that was
    /// reported as saved, and it equals that of the uninterrupted run byte for byte.
    fn look(&self, out: &Path, output: &Output) {
        let (newest, damaged) = newest_complete(out).unwrap();
        assert!(damaged.is_empty(), "{damaged:?}");
        let text = String::from_utf8_lossy(&output.stdout);
        let saved =
            text.lines().filter_map(|line| line.strip_prefix("saved ")?.rsplit_once("checkpoint-")?.1.parse().ok());
        let saved: u64 = saved.max().unwrap_or(0);
        let Some(newest) = newest else {
            assert_eq!(saved, 0, "lost: {}", said(output));
            return;
        };
        let found = checkpoint::open(newest).unwrap();
        assert!(found.state.step >= saved, "{} after {saved} was said to be saved", found.dir.display());
        let reference = checkpoint::store::checkpoint_dir(&self.straight(), found.state.step);
        for entry in std::fs::read_dir(&reference).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap();
            assert!(
                std::fs::read(found.dir.join(name)).unwrap() == std::fs::read(&path).unwrap(),
                "{} differs from the uninterrupted run's",
                found.dir.join(name).display()
            );
        }
    }

    /// Resumes the run to its end in this process. It must end as the uninterrupted run did, and leave no temporary files.
    pub fn finish(&self, out: &Path) {
        let words = [&*format!("train.output_dir={}", out.display()), "train.resume_from_checkpoint=latest"];
        assert!(go(&self.config, &words, u64::MAX));
        assert_same_ending(&self.straight(), out, self.last, false);
        for entry in std::fs::read_dir(out).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let stale = [".tmp", ".old-", ".del-", ".lock"].iter().any(|mark| name.contains(mark));
            assert!(!stale, "{name} is left behind");
        }
    }

    /// Death or failure at each of `points`; returns how many there were.
    fn at(&self, how: &str, points: impl Iterator<Item = usize>) -> usize {
        let mut count = 0;
        for at in points {
            let out = self.fixture.path(&format!("{how}-{at}"));
            let output = self.meets(&out, how, at);
            let text = format!("{how} at {at}: {}", said(&output));
            if ["kill", "torn"].contains(&how) {
                assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{text}");
            } else {
                assert_eq!(output.status.code(), Some(6), "{text}");
            }
            if out.exists() {
                self.look(&out, &output);
                self.finish(&out);
                std::fs::remove_dir_all(out).unwrap();
            }
            count += 1;
        }
        count
    }

    /// Starts the run again and again and kills each life after `life`, until a life has come to its end or `kills` have
    /// been made; returns how many.
    fn killed(&self, out: &Path, kills: usize, mut life: impl FnMut() -> Life) -> usize {
        for kill in 0..kills {
            let began = Instant::now();
            let mut child = self.command(out).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let life = life();
            let lines = || std::fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default().lines().count();
            let first = lines() + life.steps;
            while child.try_wait().unwrap().is_none() && lines() < first {
                assert!(began.elapsed() < Duration::from_secs(120), "no {first} steps in {}", out.display());
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(life.then);
            let _ = child.kill(); // it may have ended
            let output = child.wait_with_output().unwrap();
            let ended = output.status.success();
            assert!(ended || output.status.signal() == Some(libc::SIGKILL), "{}", said(&output));
            self.look(out, &output);
            if ended {
                return kill;
            }
        }
        kills
    }
}

/// When a life ends: after so many more lines in its metrics, and then some time.
struct Life {
    steps: usize,
    then: Duration,
}

pub fn short(extra: &[&str]) -> Case {
    Case::new(6, 2, &[&["logging.tensorboard: false"], extra].concat())
}

pub const QLORA: &[&str] = &["tuning.mode: qlora"];
/// Checkpoints are put together from two ranks' shares while they are written.
pub const SHARED: &[&str] =
    &["tuning.mode: full", "train.learning_rate: 0.001", "train.strategy: zero1", "train.dp_ranks: 2"];

#[test]
fn death_or_failure_at_a_few_operations_loses_nothing() {
    let case = short(&[]);
    let (all, growing) = (case.operations("kill").len(), case.operations("EIO").len());
    assert!(all > 100 && growing > 60, "{all} {growing}");
    case.at("kill", (17..all).step_by(all / 6));
    case.at("torn", [all / 2].into_iter());
    case.at("ENOSPC", [growing / 3, growing - 9].into_iter());
    case.at("EIO", [growing / 2].into_iter());
    case.at("EDQUOT", [growing / 2].into_iter());
    let shared = short(SHARED);
    shared.at("kill", [shared.operations("kill").len() / 2].into_iter());
    shared.at("EIO", [shared.operations("EIO").len() / 2].into_iter());
}

fn death_at_every_operation(name: &str, extra: &[&str]) {
    let case = short(extra);
    let (began, operations) = (Instant::now(), case.operations("kill"));
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for kind in &operations {
        *kinds.entry(kind).or_default() += 1;
    }
    let killed = case.at("kill", 1..=operations.len());
    let writes = operations.iter().enumerate().filter(|(_, kind)| *kind == "write").map(|(index, _)| index + 1);
    let torn = case.at("torn", writes);
    let seconds = began.elapsed().as_secs();
    println!(
        "{name}: kill -9 before each of {killed} operations {kinds:?}, in the middle of {torn} writes: {seconds} s"
    );
}

#[test]
#[ignore = "minutes; just crash-test"]
fn death_at_every_operation_of_lora() {
    death_at_every_operation("lora", &[]);
}

#[test]
#[ignore = "minutes; just crash-test"]
fn death_at_every_operation_of_qlora() {
    death_at_every_operation("qlora", QLORA);
}

#[test]
#[ignore = "minutes; just crash-test"]
fn death_at_every_operation_of_two_ranks() {
    death_at_every_operation("full, zero1 on two ranks", SHARED);
}

fn a_full_and_a_failing_disk_at_every_write(name: &str, extra: &[&str]) {
    let case = short(extra);
    let (began, count) = (Instant::now(), case.operations("EIO").len());
    let full = case.at("ENOSPC", 1..=count);
    let failing = case.at("EIO", 1..=count);
    case.at("EDQUOT", (1..=count).step_by(7));
    println!("{name}: ENOSPC from each of {full} writes on, EIO at each of {failing}: {} s", began.elapsed().as_secs());
}

#[test]
#[ignore = "minutes; just crash-test"]
fn a_full_and_a_failing_disk_at_every_write_of_lora() {
    a_full_and_a_failing_disk_at_every_write("lora", &[]);
}

#[test]
#[ignore = "minutes; just crash-test"]
fn a_full_and_a_failing_disk_at_every_write_of_qlora() {
    a_full_and_a_failing_disk_at_every_write("qlora", QLORA);
}

#[test]
#[ignore = "minutes; just crash-test"]
fn a_full_and_a_failing_disk_at_every_write_of_two_ranks() {
    a_full_and_a_failing_disk_at_every_write("full, zero1 on two ranks", SHARED);
}

#[test]
#[ignore = "minutes; just crash-test"]
fn death_at_any_time() {
    let case = Case::new(60, 3, &[]);
    let (began, mut random) = (Instant::now(), Random(0x5eed));
    let (mut kills, mut runs) = (0, 0);
    while kills < 200 {
        let out = case.fixture.path(&format!("random-{runs}"));
        let micros = (1.2e6 * case.seconds) as u64;
        kills += case.killed(&out, (200 - kills).min(20), || Life {
            steps: 0,
            then: Duration::from_micros(random.below(micros)),
        });
        case.finish(&out);
        std::fs::remove_dir_all(out).unwrap();
        runs += 1;
    }
    println!("kill -9 at {kills} random times over {runs} runs: {} s", began.elapsed().as_secs());
}

#[test]
#[ignore = "minutes; just crash-test"]
fn thirty_deaths_leave_no_trace_in_any_mode() {
    let packed = ["data.packing: true", "model.max_seq_len: 32", "train.batch_size: 1", "logging.tensorboard: false"];
    let modes: [(&str, &[&str]); 7] = [
        ("lora, dropout 0.1", &[]),
        ("qlora, dropout 0.1", &["tuning.mode: qlora"]),
        ("dora, recomputation", &["tuning.lora.use_dora: true", "train.gradient_checkpointing: true"]),
        ("full, zero1 on two ranks", SHARED),
        ("qlora, two ranks as threads", &["tuning.mode: qlora", "train.strategy: dp", "train.dp_ranks: 2"]),
        ("full, 8-bit AdamW", &["tuning.mode: full", "train.learning_rate: 0.001", "train.optim: adamw_8bit"]),
        (
            "freeze, moving average",
            &["tuning.mode: freeze", "tuning.freeze.trainable_modules: [\"norms\", \"mlp\"]", "train.ema_decay: 0.9"],
        ),
    ];
    for (name, extra) in modes {
        let (began, mut random) = (Instant::now(), Random(0xfeed));
        let mut lines = packed.to_vec();
        lines.extend(extra);
        let case = Case::new(400, 3, &lines);
        let out = case.fixture.path("killed");
        let kills = case.killed(&out, 30, || Life {
            steps: 1 + random.below(6) as usize,
            then: Duration::from_micros(random.below(20_000)),
        });
        assert_eq!(kills, 30, "the run was over too soon");
        case.finish(&out);
        println!("{name}: equal to the bit after {kills} deaths in 400 steps: {} s", began.elapsed().as_secs());
    }
}
