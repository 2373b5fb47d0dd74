//! Whole runs with each optimizer, with averages and with weighted rows: resumed bit by bit, refused when mixed up.
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tunesmith::config;
use tunesmith::train::run::{Options, run};
use tunesmith::train::signals::Stop;

use super::ends::metrics;
use super::fixture::{Fixture, said, train, tunesmith};
use super::resume::{StopAt, go, straight_equals_stopped, timeless};

/// Asks for no stop.
fn observer() -> StopAt {
    StopAt { stop: Stop::default(), at: u64::MAX }
}

/// Names and dtypes of a safetensors file.
fn header(path: &Path) -> Vec<(String, String)> {
    let bytes = fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names: Vec<_> =
        file.tensors().iter().map(|(name, view)| (name.clone(), format!("{:?}", view.dtype()))).collect();
    names.sort();
    names
}

#[test]
fn every_optimizer_resumes_to_the_bit() {
    straight_equals_stopped(&["train.optim: sgd", "train.optim_args: momentum=0.9,nesterov=true"], &[3, 8]);
    straight_equals_stopped(&["train.optim: adafactor", "train.weight_decay: 0.01"], &[3, 8]);
    straight_equals_stopped(&["train.optim: lion", "train.learning_rate: 0.001"], &[3, 8]);
    straight_equals_stopped(&["train.optim: muon"], &[3, 8]);
    straight_equals_stopped(&["train.optim: adamw_8bit", "tuning.mode: full"], &[3, 8]);
}

#[test]
fn schedule_free_runs_resume_to_the_bit() {
    let lines =
        ["train.optim: schedule_free_adamw", "train.lr_scheduler_type: constant_with_warmup", "train.max_grad_norm: 0"];
    straight_equals_stopped(&lines, &[1, 4, 9, 13]);
}

#[test]
fn averages_noise_smoothing_and_own_rates_resume_to_the_bit() {
    let lines = [
        "train.ema_decay: 0.8",
        "train.neftune_noise_alpha: 5",
        "train.label_smoothing_factor: 0.1",
        "train.z_loss: 0.0001",
        "tuning.lora.loraplus_lr_ratio: 4",
        r#"train.learning_rates: {"mlp\\..*": 0.002}"#,
        "train.lr_scheduler_type: warmup_stable_decay",
        r#"train.lr_scheduler_kwargs: {"num_decay_steps": 4}"#,
    ];
    straight_equals_stopped(&lines, &[1, 4, 9, 14]);
}

#[test]
fn the_state_of_8_bit_moments_is_bytes() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.optim: adamw_8bit", "tuning.mode: full"]);
    assert!(go(&config, &[], u64::MAX));
    let state = header(&fixture.path("out/checkpoint-000006/optimizer.safetensors"));
    let of = |name: &str| state.iter().filter(|(other, _)| other.starts_with(name)).cloned().collect::<Vec<_>>();
    let pairs =
        |pairs: &[(&str, &str)]| pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect::<Vec<_>>();
    let embedding = "model.embed_tokens.weight";
    let wanted = ["absmax1", "absmax2", "state1", "state2"].map(|end| format!("{embedding}.{end}"));
    let wanted: Vec<(&str, &str)> = wanted.iter().map(String::as_str).zip(["F32", "F32", "U8", "U8"]).collect();
    assert_eq!(of(embedding), pairs(&wanted));
    let norm = "model.norm.weight";
    assert_eq!(of(norm), pairs(&[("model.norm.weight.state1", "F32"), ("model.norm.weight.state2", "F32")]));
}

/// The averages are what is evaluated, saved and published; the trained values stand beside the optimizer's state.
fn publishes_averages(lines: &[&str]) {
    let fixture = Fixture::new();
    let mut all = vec!["train.eval_strategy: steps", "train.eval_steps: 6"];
    all.extend(lines);
    let config = fixture.config("run", &all);
    assert!(go(&config, &[], u64::MAX));
    let out = fixture.path("out");
    let weights = |folder: &str| fs::read(out.join(folder).join("adapter_model.safetensors")).unwrap();
    assert!(weights("checkpoint-000006") == weights("adapter"));
    let state = fs::read(out.join("checkpoint-000006/optimizer.safetensors")).unwrap();
    let state = safetensors::SafeTensors::deserialize(&state).unwrap();
    let adapter = weights("adapter");
    let adapter = safetensors::SafeTensors::deserialize(&adapter).unwrap();
    for (name, published) in adapter.tensors() {
        let plain = name.trim_start_matches("base_model.model.");
        let trained = state.tensor(&format!("{plain}.trained")).unwrap();
        assert_eq!(trained.shape(), published.shape());
        assert!(trained.data() != published.data(), "{name}: the average is another than the last value");
    }
    // A run from the published adapter, whose rate is 0, measures it: the evaluation saw the same weights.
    let (_, evaluations) = metrics(&out);
    let from = format!("tuning.adapter: {}", out.join("adapter").display());
    let again = fixture.config(
        "again",
        &[&from, "train.learning_rate: 0", "train.max_steps: 1", "train.eval_strategy: steps", "train.eval_steps: 1"],
    );
    let words = [format!("train.output_dir={}", fixture.path("out2").display())];
    assert!(go(&again, &words.each_ref().map(String::as_str), u64::MAX));
    let (_, measured) = metrics(&fixture.path("out2"));
    assert_eq!(measured[0]["eval_loss"], evaluations[0]["eval_loss"]);
}

#[test]
fn a_moving_average_is_evaluated_and_published() {
    publishes_averages(&["train.ema_decay: 0.5"]);
}

#[test]
fn the_average_of_schedule_free_is_evaluated_and_published() {
    publishes_averages(&["train.optim: schedule_free_adamw", "train.lr_scheduler_type: constant_with_warmup"]);
}

#[test]
fn a_checkpoint_of_another_optimizer_is_refused_with_both_sides() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.optim: sgd"]);
    assert!(go(&config, &[], u64::MAX));
    let words = ["train.resume_from_checkpoint=latest".to_owned(), "train.optim=lion".to_owned()];
    let resolved = config::load(&config, &words, &[], &[]).unwrap();
    let error = run(&resolved, &Options::default(), &Stop::default(), &observer()).unwrap_err();
    assert_eq!(error.kind(), tunesmith::Kind::Checkpoint);
    let text = error.to_string();
    assert!(text.contains("train.optim: sgd in the checkpoint, lion now") && !text.contains("--allow"), "{text}");
    let allowed = Options { allow: vec!["train.optim".to_owned()], ..Options::default() };
    let error = run(&resolved, &allowed, &Stop::default(), &observer()).unwrap_err();
    assert_eq!(error.kind(), tunesmith::Kind::Config, "{error}");
    // Arguments may be allowed to differ, but not what they add to the state.
    let words = ["train.resume_from_checkpoint=latest".to_owned(), "train.optim_args=momentum=0.9".to_owned()];
    let resolved = config::load(&config, &words, &[], &[]).unwrap();
    let allowed = Options { allow: vec!["train.optim_args".to_owned()], ..Options::default() };
    let error = run(&resolved, &allowed, &Stop::default(), &observer()).unwrap_err();
    assert!(error.to_string().contains("momentum_buffer"), "{error}");
}

#[test]
fn rows_with_weights_count_so_also_from_the_cache() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["tuning.lora.lora_dropout: 0"]);
    let rows = fs::read_to_string(fixture.path("train.jsonl")).unwrap();
    let run_into = |out: &str| {
        let word = format!("train.output_dir={}", fixture.path(out).display());
        assert!(go(&config, &[&word], u64::MAX));
        timeless(&fixture.path(out))
    };
    let plain = run_into("plain");
    let weighted = |weight: &dyn Fn(usize) -> Value| {
        let row = |(number, line): (usize, &str)| {
            let mut row: Value = serde_json::from_str(line).unwrap();
            row["loss_weight"] = weight(number);
            row.to_string() + "\n"
        };
        fs::write(fixture.path("train.jsonl"), rows.lines().enumerate().map(row).collect::<String>()).unwrap();
    };
    weighted(&|_| json!(1.0));
    assert_eq!(run_into("ones"), plain);
    weighted(&|number| json!([0.0, 1.0, 2.5][number % 3]));
    let first = run_into("first");
    assert_ne!(first[0]["loss"], plain[0]["loss"]);
    assert_eq!(first[0]["label_tokens"], plain[0]["label_tokens"]);
    assert_eq!(run_into("second"), first, "tokenized data from the cache has its weights");
    let dump = fixture.path("rows.dump");
    let dumped = tunesmith(&["data", config.to_str().unwrap(), "--dump", dump.to_str().unwrap()]).output().unwrap();
    assert!(dumped.status.success(), "{}", said(&dumped));
    let written = fs::read_to_string(&dump).unwrap();
    let weights: Vec<Value> =
        written.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss_weight"].clone()).collect();
    assert_eq!(weights[..3], [json!(0.0), Value::Null, json!(2.5)], "a weight of 1 is not written");
    weighted(&|number| if number == 4 { json!(-1) } else { json!(1) });
    let output = train(&config, &["--overwrite"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(said(&output).contains("train.jsonl:5") && said(&output).contains("loss_weight"), "{}", said(&output));
}

#[test]
fn contradictions_and_arguments_are_refused_before_anything_is_read() {
    let refused = |lines: &[&str], wanted: &str| {
        let fixture = Fixture::new();
        let output = train(&fixture.config("run", lines), &[]);
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains(wanted), "{wanted} is missing in: {}", said(&output));
        assert!(!fixture.path("out").exists());
    };
    refused(&["train.optim: schedule_free_adamw"], "set lr_scheduler_type: constant");
    let constant = "train.lr_scheduler_type: constant_with_warmup";
    refused(&["train.optim: schedule_free_adamw", constant, "train.ema_decay: 0.9"], "keep one");
    refused(&["tuning.mode: full", "tuning.lora.loraplus_lr_ratio: 16"], "which this mode does not train");
    refused(&["train.optim: sgd", "train.optim_args: momentun=0.9"], "did you mean momentum");
    refused(&[r#"train.learning_rates: {"q_prj": 0.001}"#], "did you mean q_proj");
    refused(&["train.lr_scheduler_type: warmup_stable_decay"], "num_decay_steps");
}
