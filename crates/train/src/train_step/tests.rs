//! Tests that a run whose step results arrive one step late writes the same lines and files as one whose results are there at
//! once.
use crate::options::Options;
use crate::run::run;
use crate::signals::Stop;
use crate::step::StepStats;
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use tunesmith_checkpoint::store::checkpoint_dir;
use tunesmith_config::load_text;
use tunesmith_device::{Delivery, Late};
use tunesmith_telemetry::progress::SilentObserver;

/// Whether results come late. No other test of this crate makes steps.
static LATE: AtomicBool = AtomicBool::new(false);
/// Results that nobody has waited for yet, and those that were there only after the next step.
static AWAITED: AtomicU64 = AtomicU64::new(0);
static A_STEP_LATE: AtomicU64 = AtomicU64::new(0);

/// Results that are never there before somebody waits for them.
struct Slow(Late<StepStats>);

impl Delivery<StepStats> for Slow {
    fn is_ready(&self) -> bool {
        false
    }

    fn wait(self: Box<Self>) -> StepStats {
        AWAITED.fetch_sub(1, SeqCst);
        self.0.wait()
    }
}

pub(super) fn delay(stats: Late<StepStats>) -> Late<StepStats> {
    if !LATE.load(SeqCst) {
        return stats;
    }
    let before = AWAITED.fetch_add(1, SeqCst);
    assert!(before <= 1, "results are waited for at the latest one step later");
    A_STEP_LATE.fetch_add(before, SeqCst);
    Late::new(Slow(stats))
}

/// What a run leaves behind.
#[derive(Debug, PartialEq)]
struct Outcome {
    error: Option<String>,
    /// The lines of `metrics.jsonl`, without times.
    lines: Vec<Value>,
    /// The files of its checkpoints.
    files: Vec<(String, Vec<u8>)>,
}

/// Runs a configuration in a fresh folder, with results `late` or not.
fn outcome(extra: &str, late: bool) -> Outcome {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/checkpoints/0.1.0/full-zero2-ema");
    std::fs::create_dir(path("model")).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(model.join(name), path("model").join(name)).unwrap();
    }
    let row = |number: usize| {
        let word = ["abc", "de", "fghij", "klm"][number % 4];
        format!(
            r#"{{"messages": [{{"role": "user", "content": "{word}{number}"}}, {{"role": "assistant", "content": "{word}"}}]}}"#
        )
    };
    let rows = |numbers: std::ops::Range<usize>| numbers.map(row).collect::<Vec<_>>().join("\n");
    std::fs::write(path("train.jsonl"), rows(0..24)).unwrap();
    std::fs::write(path("val.jsonl"), rows(24..30)).unwrap();
    let at = root.path().display();
    let text = format!(
        "model: {{name: {at}/model, max_seq_len: 64}}\n\
         tuning: {{mode: full}}\n\
         data: {{train_path: {at}/train.jsonl, val_path: {at}/val.jsonl, use_cache: false}}\n\
         gen: {{num_samples: 0}}\n\
         train: {{output_dir: {at}/out, batch_size: 2, grad_accum: 2, max_steps: 7, {extra}}}\n"
    );
    let resolved = load_text(&path("run.yaml"), &text).unwrap();
    LATE.store(late, SeqCst);
    let ended = run(&resolved, &Options::default(), &Stop::default(), &SilentObserver);
    assert_eq!(AWAITED.load(SeqCst), 0, "every result is recorded");
    let error = ended.err().map(|error| error.to_string().replace(&at.to_string(), ""));
    let mut lines: Vec<Value> = std::fs::read_to_string(path("out/metrics.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    for line in &mut lines {
        let line = line.as_object_mut().unwrap();
        line.retain(|key, _| !["tokens_per_second", "peak_bytes", "eval_seconds"].contains(&key.as_str()));
    }
    let mut files = Vec::new();
    for step in 1..=7 {
        let dir = checkpoint_dir(&path("out"), step);
        for name in ["model.safetensors", "optimizer.safetensors", "state.json"] {
            files.extend(std::fs::read(dir.join(name)).ok().map(|bytes| (format!("{name} of step {step}"), bytes)));
        }
    }
    Outcome { error, lines, files }
}

#[test]
fn results_that_come_a_step_late_change_no_line_and_no_file() {
    let saving =
        "learning_rate: 0.01, save_strategy: steps, save_steps: 3, eval_strategy: steps, eval_steps: 2, ema_decay: 0.9";
    let (now, late) = (outcome(saving, false), outcome(saving, true));
    assert_eq!(now.error, None);
    assert!(now.lines.len() >= 10 && now.files.len() >= 6, "{} lines, {} files", now.lines.len(), now.files.len());
    assert_eq!(now.lines, late.lines);
    assert!(now == late, "the files of checkpoints");
    assert!(A_STEP_LATE.swap(0, SeqCst) >= 2);

    // A run that diverges ends after the same step.
    let diverging = "learning_rate: 1e38, save_strategy: \"no\", max_nonfinite_steps: 2";
    let (now, late) = (outcome(diverging, false), outcome(diverging, true));
    assert!(now.error.as_ref().is_some_and(|error| error.contains("2 steps in a row")), "{:?}", now.error);
    assert_eq!(now, late);
}
