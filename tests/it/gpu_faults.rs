//! Faults of a GPU: it refuses memory, or a call of the driver fails. The run continues with the same steps, or it ends with an
//! exit code that says why, and resumes from its checkpoint to the same losses. Each call that a small run makes fails once.
use crate::run::ends::metrics;
use crate::run::fixture::{Fixture, said, tunesmith};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};
use tunesmith::device::cuda::testing;

/// A run that takes longer than this is taken to hang.
const HANGS: Duration = Duration::from_secs(300);

/// A run of two steps with a checkpoint after each.
struct Run {
    fixture: Fixture,
    config: PathBuf,
    /// Its losses without a fault.
    losses: Vec<f64>,
    /// How often it calls each function of the driver.
    calls: BTreeMap<String, u64>,
}

impl Run {
    fn new(words: &[&str]) -> Self {
        let fixture = Fixture::new();
        let lines = [
            "model.device: cuda",
            "train.max_steps: 2",
            "train.warmup_steps: 0",
            "train.save_strategy: steps",
            "train.save_steps: 1",
            "data.val_path: UNSET",
            "logging.report: false",
            "logging.tensorboard: false",
        ];
        let config = fixture.config("run", &[&lines[..], words].concat());
        let mut run = Self { fixture, config, losses: Vec::new(), calls: BTreeMap::new() };
        // Once before: what is compiled then is there later.
        for _ in 0..2 {
            let counts = run.fixture.path("calls");
            let ended = run.train("plain", &[], &[("TUNESMITH_STAND_IN_CALLS", counts.to_str().unwrap())]);
            assert!(ended.status.success(), "{}", said(&ended));
            let text = std::fs::read_to_string(&counts).unwrap();
            let count =
                |line: &str| line.split_once('\t').map(|(name, count)| (name.to_owned(), count.parse().unwrap()));
            run.calls = text.lines().filter_map(count).collect();
        }
        run.losses = run.losses_of("plain");
        assert_eq!(run.losses.len(), 2);
        run
    }

    /// `tunesmith train` into a folder.
    fn train(&self, out: &str, words: &[&str], environment: &[(&str, &str)]) -> Output {
        let there = format!("train.output_dir={}", self.fixture.path(out).display());
        let mut command =
            tunesmith(&[&["train", self.config.to_str().unwrap(), "--overwrite", &there], words].concat());
        if words.contains(&"--resume") {
            command = tunesmith(&[&["train", self.config.to_str().unwrap(), &there], words].concat());
        }
        command.env("TUNESMITH_CUDA_LIBRARIES", testing::stand_in()).env("XDG_CACHE_HOME", self.fixture.root.path());
        command.envs(environment.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (mut child, began) = (command.spawn().unwrap(), Instant::now());
        while child.try_wait().unwrap().is_none() {
            if began.elapsed() > HANGS {
                child.kill().unwrap();
                panic!("{environment:?} hangs: {}", said(&child.wait_with_output().unwrap()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        child.wait_with_output().unwrap()
    }

    fn losses_of(&self, out: &str) -> Vec<f64> {
        let (steps, _) = metrics(&self.fixture.path(out));
        steps.iter().map(|line| line.get("loss").and_then(Value::as_f64).unwrap()).collect()
    }

    fn same(&self, out: &str, fault: &str) {
        let found = self.losses_of(out);
        assert_eq!(found.len(), self.losses.len(), "{fault}");
        for (found, expected) in found.iter().zip(&self.losses) {
            // Smaller passes round their sums otherwise.
            assert!((found - expected).abs() < 2e-5, "{fault}: {found} != {expected}");
        }
    }

    fn has_checkpoint(&self, out: &str) -> bool {
        let entries = std::fs::read_dir(self.fixture.path(out)).into_iter().flatten().flatten();
        entries.into_iter().any(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with("checkpoint-")))
    }

    /// Lets the nth call of a function fail. Returns the exit code.
    fn refuse(&self, function: &str, nth: u64, codes: &[i32]) -> i32 {
        let fault = format!("{function}:{nth}");
        let out = fault.replace(':', "-");
        let ended = self.train(&out, &[], &[("TUNESMITH_STAND_IN_FAIL", &fault)]);
        let code = ended.status.code().unwrap_or_else(|| panic!("{fault}: {:?} {}", ended.status, said(&ended)));
        assert!(codes.contains(&code), "{fault} ends with {code}: {}", said(&ended));
        if code == 0 {
            self.same(&out, &fault);
        } else if self.has_checkpoint(&out) {
            let resumed = self.train(&out, &["--resume"], &[]);
            assert!(resumed.status.success(), "{fault}, resumed: {}", said(&resumed));
            self.same(&out, &fault);
        }
        let _ = std::fs::remove_dir_all(self.fixture.path(&out));
        code
    }

    /// The calls of a function that fail in their turn: all, or so many spread over them.
    fn spread(&self, function: &str, few: Option<u64>) -> Vec<u64> {
        let all = self.calls[function];
        let Some(few) = few.filter(|&few| few < all) else { return (1..=all).collect() };
        (0..few).map(|at| 1 + at * (all - 1) / (few - 1).max(1)).collect()
    }

    /// Refuses calls, two at a time. Returns how often a run ended with each code.
    fn refuse_all(&self, faults: &[(String, u64)], codes: &[i32]) -> BTreeMap<i32, u64> {
        let (next, ended) = (std::sync::atomic::AtomicUsize::new(0), std::sync::Mutex::new(BTreeMap::new()));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while let Some((function, nth)) =
                        faults.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
                    {
                        let code = self.refuse(function, *nth, codes);
                        *ended.lock().unwrap().entry(code).or_default() += 1;
                    }
                });
            }
        });
        ended.into_inner().unwrap()
    }
}

const ALLOCATE: &str = "cuMemAllocAsync";

fn allocations(words: &[&str], few: Option<u64>) {
    let run = Run::new(words);
    let faults: Vec<_> = run.spread(ALLOCATE, few).into_iter().map(|nth| (ALLOCATE.to_owned(), nth)).collect();
    let ended = run.refuse_all(&faults, &[0, 9]);
    println!(
        "{words:?}: {} of {} allocations refused; runs by exit code: {ended:?}",
        faults.len(),
        run.calls[ALLOCATE]
    );
    assert!(ended.contains_key(&0), "some steps are repeated in smaller passes: {ended:?}");
}

fn calls(words: &[&str], few: Option<u64>) {
    let run = Run::new(words);
    let functions = run.calls.keys().filter(|name| *name != ALLOCATE);
    let faults: Vec<_> =
        functions.flat_map(|name| run.spread(name, few).into_iter().map(|nth| (name.clone(), nth))).collect();
    let ended = run.refuse_all(&faults, &[0, 9, 10]);
    println!("{words:?}: {} calls of {} functions fail; runs by exit code: {ended:?}", faults.len(), run.calls.len());
}

#[test]
fn a_run_survives_or_names_memory_that_is_refused() {
    allocations(&[], Some(40));
}

#[test]
fn a_run_that_validates_and_answers_survives_or_names_memory_that_is_refused() {
    let generates =
        ["train.predict_with_generate: true", "train.generation_max_new_tokens: 3", "gen.max_new_tokens: 3"];
    let validates = ["data.val_path: VAL", "train.eval_strategy: steps", "train.eval_steps: 1", "gen.num_samples: 2"];
    allocations(&[&validates[..], &generates].concat(), Some(12));
}

#[test]
fn a_call_that_fails_ends_a_run_with_its_code_and_harms_no_checkpoint() {
    calls(&[], Some(3));
}

#[test]
#[ignore = "minutes: scripts/just gpu-faults"]
fn every_allocation_may_be_refused() {
    allocations(&[], None);
    let offloaded = ["train.activation_offloading: true", "model.quantization: nf4", "train.optim: adamw_8bit"];
    allocations(&offloaded, None);
    allocations(&["train.offload_param: true", "model.quantization: nf4"], None);
}

#[test]
#[ignore = "many minutes: scripts/just gpu-faults"]
fn every_call_may_fail() {
    calls(&["train.activation_offloading: true", "train.offload_param: true"], Some(200));
}
