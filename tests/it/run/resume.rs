//! Resume is bit-exact: a run that is stopped and resumed ends with the same bytes as one that was not.
use std::path::Path;

use serde_json::Value;
use tunesmith::config;
use tunesmith::data::Progress;
use tunesmith::telemetry::progress::{Event, Observer};
use tunesmith::train::run::{Options, run};
use tunesmith::train::signals::Stop;

use super::ends::metrics;
use super::fixture::{Fixture, said, train, tunesmith};

/// Stands for a stop when the final weights are saved and the sample answers begin.
const AT_FINAL_WEIGHTS: u64 = u64::MAX - 1;

/// Asks for a stop while step `at` is being reported.
pub struct StopAt {
    pub stop: Stop,
    pub at: u64,
}

impl Progress for StopAt {
    fn begin(&self, _: &str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
    fn warn(&self, _: &str) {}
}

impl Observer for StopAt {
    fn event(&self, event: &Event<'_>) {
        let now = match event {
            Event::Step { line, .. } => line.step == self.at,
            Event::Saved(path) => self.at == AT_FINAL_WEIGHTS && path.ends_with("adapter"),
            _ => false,
        };
        if now {
            self.stop.request("the test");
        }
    }
}

/// Runs in this process until the end or until after step `stop_at`; says whether it came to the end.
pub fn go(config: &Path, words: &[&str], stop_at: u64) -> bool {
    let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
    let resolved = config::load(config, &words, &[], &[]).unwrap();
    let observer = StopAt { stop: Stop::default(), at: stop_at };
    match run(&resolved, &Options::default(), &observer.stop, &observer) {
        Ok(_) => true,
        Err(error) if error.kind() == tunesmith::Kind::Preempted => false,
        Err(error) => panic!("{error}"),
    }
}

/// Metrics without what depends on the clock and the process.
pub fn timeless(output_dir: &Path) -> Vec<Value> {
    let (steps, evaluations) = metrics(output_dir);
    let strip = |mut line: Value| {
        for key in ["tokens_per_second", "peak_bytes", "eval_seconds"] {
            line.as_object_mut().unwrap().remove(key);
        }
        line
    };
    steps.into_iter().chain(evaluations).map(strip).collect()
}

/// Every file of the last checkpoint and of the final weights is the same, and so are the metrics.
pub fn assert_same_ending(one: &Path, other: &Path, last: u64, stopped_at_the_end: bool) {
    assert_eq!(timeless(one), timeless(other));
    let checkpoint = format!("checkpoint-{last:06}");
    let weights = if one.join("adapter").is_dir() { "adapter" } else { "model" };
    for folder in [checkpoint.as_str(), weights] {
        let mut compared = 0;
        for entry in std::fs::read_dir(one.join(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            // A checkpoint written on a signal comes before its evaluation, which `state.json` then lacks.
            let evaluated = !(name == "state.json" && stopped_at_the_end);
            if evaluated && (name.ends_with(".safetensors") || name == "state.json") {
                let read = |root: &Path| std::fs::read(root.join(folder).join(&name)).unwrap();
                assert!(read(one) == read(other), "{folder}/{name} differs");
                compared += 1;
            }
        }
        assert!(compared > 0, "{folder} has nothing to compare");
    }
}

pub fn straight_equals_stopped(extra: &[&str], stops: &[u64]) {
    straight_equals_stopped_on(&Fixture::new(), extra, stops);
}

pub fn straight_equals_stopped_on(fixture: &Fixture, extra: &[&str], stops: &[u64]) {
    let last = 14; // steps of 24 rows / 4: six an epoch
    let mut lines = vec!["train.max_steps: 14", "train.eval_strategy: steps", "train.eval_steps: 4"];
    lines.extend(extra);
    let config = fixture.config("run", &lines);
    assert!(go(&config, &[], u64::MAX));
    let other = format!("train.output_dir={}", fixture.path("stopped").display());
    for &stop in stops {
        assert!(!go(&config, &[&other, "train.resume_from_checkpoint=latest"], stop), "stopped after {stop}");
    }
    assert!(go(&config, &[&other, "train.resume_from_checkpoint=latest"], u64::MAX));
    assert_same_ending(&fixture.path("out"), &fixture.path("stopped"), last, stops.contains(&last));
}

#[test]
fn lora_with_dropout_and_shuffling() {
    straight_equals_stopped(&[], &[1, 4, 6, 7, 13]);
}

#[test]
fn lora_with_packing_and_recompute() {
    straight_equals_stopped(
        &["data.packing: true", "model.max_seq_len: 32", "train.gradient_checkpointing: true", "train.batch_size: 1"],
        &[2, 5, 11],
    );
}

#[test]
fn a_conversation_of_several_renderings_is_one_row() {
    let fixture = Fixture::new();
    let template = "{% for m in messages %}<|{{ m.role }}|>\
        {{ m.content if loop.last else m.content.split('/')[-1] }}<|end|>{% endfor %}\
        {% if add_generation_prompt %}<|assistant|>{% endif %}";
    std::fs::write(fixture.path("rewriting.jinja"), template).unwrap();
    let turn = |role: &str, content: String| serde_json::json!({"role": role, "content": content});
    let row = |number: usize| {
        let answer = |turn: usize| format!("t{number}/a{turn}");
        let ask = |turn: usize| format!("q{}", number + turn);
        let messages = (0..2).flat_map(|nth| [turn("user", ask(nth)), turn("assistant", answer(nth))]);
        serde_json::json!({ "messages": messages.collect::<Vec<_>>() }).to_string()
    };
    for (file, rows) in [("train.jsonl", 0..24), ("val.jsonl", 24..30)] {
        std::fs::write(fixture.path(file), rows.map(row).collect::<Vec<_>>().join("\n")).unwrap();
    }
    let template = format!("data.template_path: {}", fixture.path("rewriting.jinja").display());
    straight_equals_stopped_on(&fixture, &[&template, "train.max_tokens_per_pass: 40"], &[1, 8]);
    let (steps, evaluations) = metrics(&fixture.path("out"));
    assert_eq!(steps[5]["epoch"], 1.0, "24 rows in steps of four, whatever their renderings");
    assert_eq!(evaluations[0]["eval_rows"], 6);

    let (config, dump) = (fixture.path("run.yaml"), fixture.path("dump.jsonl"));
    let shown = tunesmith(&["data", config.to_str().unwrap(), "--dump", dump.to_str().unwrap()]).output().unwrap();
    let shown = said(&shown);
    for part in ["train: 24 rows in 48 renderings", "row 1 of train, rendering 2 of 2", "⟦t0/a1<|end|>⟧"] {
        assert!(shown.contains(part), "{shown} lacks {part}");
    }
    assert_eq!(std::fs::read_to_string(dump).unwrap().lines().count(), 60, "a line for each rendering");
}

#[test]
fn full_mode_grouped_by_length() {
    straight_equals_stopped(
        &["tuning.mode: full", "train.learning_rate: 0.002", "train.group_by_length: true"],
        &[3, 8],
    );
}

#[test]
fn dora_with_dropout_in_parts_and_recompute() {
    straight_equals_stopped(
        &["tuning.lora.use_dora: true", "train.gradient_checkpointing: true", "train.max_tokens_per_pass: 24"],
        &[3, 9],
    );
}

#[test]
fn freeze_mode_and_new_tokens() {
    straight_equals_stopped(&["tuning.mode: freeze", "tuning.freeze.trainable_modules: [\"norms\", \"mlp\"]"], &[5]);
    straight_equals_stopped(
        &["tuning.new_tokens: [\"ab\", \"xyz\"]", "tuning.lora.init_lora_weights: pissa_niter_2"],
        &[2, 8],
    );
}

#[test]
fn a_checkpoint_holds_what_a_run_from_an_adapter_needs() {
    let fixture = Fixture::new();
    let first = fixture.config("first", &["train.output_dir: OUT-first", "tuning.lora.use_dora: true"]);
    assert!(go(&first, &[], u64::MAX));
    let adapter = fixture.path("out-first/adapter");
    let from = format!("tuning.adapter={}", adapter.display());
    let config = fixture.config("run", &[]);
    let other = format!("train.output_dir={}", fixture.path("stopped").display());
    assert!(go(&config, &[&from], u64::MAX));
    assert!(!go(&config, &[&from, &other], 3));
    std::fs::rename(&adapter, fixture.path("elsewhere")).unwrap();
    assert!(go(&config, &[&from, &other, "train.resume_from_checkpoint=latest"], u64::MAX));
    assert_same_ending(&fixture.path("out"), &fixture.path("stopped"), 6, false);
}

/// Steps of the checkpoints in a folder.
fn saved(output_dir: &Path) -> Vec<u64> {
    let names = std::fs::read_dir(output_dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut steps: Vec<u64> = names.filter_map(|name| name.strip_prefix("checkpoint-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

#[test]
fn a_share_as_save_steps_is_one_of_all_steps_after_a_resume_too() {
    let fixture = Fixture::new();
    let extra = ["train.save_strategy: steps", "train.save_steps: 0.25", "train.save_total_limit: null"];
    straight_equals_stopped_on(&fixture, &extra, &[3, 9]);
    // A quarter of 14 steps, rounded up; a stop saves where it is.
    assert_eq!(saved(&fixture.path("out")), [4, 8, 12, 14]);
    assert_eq!(saved(&fixture.path("stopped")), [3, 4, 8, 9, 12, 14]);
    // With more steps in all, a quarter of those.
    let words = ["train.resume_from_checkpoint=latest", "train.max_steps=26", "train.lr_scheduler_type=cosine"];
    assert!(go(&fixture.path("run.yaml"), &words, u64::MAX));
    assert_eq!(saved(&fixture.path("out")), [4, 8, 12, 14, 21, 26]);
}

#[test]
fn stopping_after_the_last_step_leaves_only_the_ending_to_do() {
    straight_equals_stopped(&[], &[14]);
}

#[test]
fn a_checkpoint_by_name_forgets_later_steps() {
    let fixture = Fixture::new();
    let config = fixture.config(
        "run",
        &[
            "train.save_strategy: steps",
            "train.save_steps: 2",
            "train.save_total_limit: null",
            "train.eval_strategy: steps",
            "train.eval_steps: 2",
        ],
    );
    assert!(go(&config, &[], u64::MAX));
    let before = timeless(&fixture.path("out"));
    let bytes =
        |folder: &str| std::fs::read(fixture.path("out").join(folder).join("adapter_model.safetensors")).unwrap();
    let (adapter, last) = (bytes("adapter"), bytes("checkpoint-000006"));
    let from = format!("train.resume_from_checkpoint={}", fixture.path("out/checkpoint-000002").display());
    assert!(go(&config, &[&from], u64::MAX));
    assert_eq!(timeless(&fixture.path("out")), before, "no line stands twice");
    assert!(fixture.path("out/checkpoint-000006.later").is_dir(), "what the first run saved is not lost");
    assert!(bytes("adapter") == adapter && bytes("checkpoint-000006") == last);
}

#[test]
fn another_number_of_steps_is_said_with_the_rate_that_follows() {
    let fixture = Fixture::new();
    let config = |name: &str, schedule: &str| {
        let out = format!("train.output_dir: {}", fixture.path(name).display());
        fixture.config(
            name,
            &["train.max_steps: 4", "train.warmup_steps: 0", &format!("train.lr_scheduler_type: {schedule}"), &out],
        )
    };
    for (schedule, end) in [("linear", "is 3.3333e-3 and not 2.5000e-3"), ("constant", "stays 1.0000e-2")] {
        let config = config(schedule, schedule);
        assert!(train(&config, &[]).status.success());
        let words = ["--resume", "train.max_steps=6"];
        let more = said(&train(&config, &words));
        let wanted = format!("the run now has 6 steps and not 4: the learning rate of step 5 {end}");
        assert!(more.contains(&wanted), "{wanted}: {more}");
        let same = said(&train(&config, &words));
        assert!(!same.contains("the run now has"), "{same}");
    }
}

#[test]
fn a_damaged_checkpoint_is_passed_over_and_a_changed_run_is_refused() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.save_strategy: steps", "train.save_steps: 2"]);
    assert!(go(&config, &[], u64::MAX));
    let damaged = fixture.path("out/checkpoint-000006/adapter_model.safetensors");
    let mut bytes = std::fs::read(&damaged).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let adapter = std::fs::read(fixture.path("out/adapter/adapter_model.safetensors")).unwrap();
    assert!(go(&config, &["train.resume_from_checkpoint=latest"], u64::MAX), "from step 4");
    assert_eq!(std::fs::read(fixture.path("out/adapter/adapter_model.safetensors")).unwrap(), adapter);

    let words = ["train.resume_from_checkpoint=latest".to_owned(), "train.learning_rate=0.02".to_owned()];
    let resolved = config::load(&config, &words, &[], &[]).unwrap();
    let observer = StopAt { stop: Stop::default(), at: u64::MAX };
    let refused = run(&resolved, &Options::default(), &observer.stop, &observer).unwrap_err();
    assert_eq!(refused.kind(), tunesmith::Kind::Checkpoint, "{refused}");
    assert!(refused.message().contains("0.02") && refused.message().contains("0.01"), "both sides: {refused}");
    let allowed = Options { allow: vec!["train.learning_rate".to_owned()], ..Options::default() };
    run(&resolved, &allowed, &Stop::default(), &observer).unwrap();
}

#[test]
fn sample_answers_that_were_cut_off_are_made_on_resume() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["gen.num_samples: 4", "gen.max_new_tokens: 4"]);
    assert!(!go(&config, &[], AT_FINAL_WEIGHTS));
    let report = || std::fs::read_to_string(fixture.path("out/report.html")).unwrap();
    assert!(!report().contains("Answers on held-out rows"));
    let adapter = std::fs::read(fixture.path("out/adapter/adapter_model.safetensors")).unwrap();
    assert!(go(&config, &["train.resume_from_checkpoint=latest"], u64::MAX));
    assert!(report().contains("Answers on held-out rows"));
    assert_eq!(std::fs::read(fixture.path("out/adapter/adapter_model.safetensors")).unwrap(), adapter);
}

#[test]
fn pointers_name_what_is_there_and_a_run_goes_on_from_them() {
    let fixture = Fixture::new();
    let config = fixture.config(
        "run",
        &[
            "train.save_strategy: steps",
            "train.save_steps: 2",
            "train.eval_strategy: steps",
            "train.eval_steps: 2",
            "train.load_best_model_at_end: true",
        ],
    );
    assert!(go(&config, &[], u64::MAX));
    let out = fixture.path("out");
    let pointer = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    assert_eq!(pointer("latest"), "checkpoint-000006\n");
    let (adapter, best) = (out.join("adapter/adapter_model.safetensors"), pointer("best"));
    let weights = std::fs::read(out.join(best.trim_end()).join("adapter_model.safetensors")).unwrap();
    assert!(std::fs::read(&adapter).unwrap() == weights, "the run ends with the best weights");

    // From an earlier one: what comes later is set aside, and no pointer is left that names it.
    let from = format!("train.resume_from_checkpoint={}", out.join("checkpoint-000002").display());
    assert!(!go(&config, &[&from], 3));
    assert_eq!(pointer("latest"), "checkpoint-000003\n");
    assert!(out.join("checkpoint-000006.later").is_dir());
    assert!(!out.join("best").exists() || out.join(pointer("best").trim_end()).is_dir());

    let from = format!("train.resume_from_checkpoint={}", out.join("latest").display());
    assert!(go(&config, &[&from], u64::MAX));
    assert!(std::fs::read(&adapter).unwrap() == weights, "the same end");
    assert_eq!(pointer("best"), best);
    let from = format!("train.resume_from_checkpoint={}", out.join("best").display());
    assert!(go(&config, &[&from], u64::MAX));
}
