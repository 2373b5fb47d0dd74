//! `tunesmith plan --run`: the plan of a run, made as `train` makes it, without training.
use serde_json::Value;

use super::fixture::{Fixture, said, tunesmith};

fn plan(fixture: &Fixture, name: &str, extra: &[&str]) -> Value {
    let config = fixture.config(name, extra);
    let output = tunesmith(&["plan", config.to_str().unwrap(), "--run", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let mut plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    // What the machine has free changes from moment to moment.
    assert!(plan["memory"].as_object_mut().unwrap().remove("budget").is_some());
    plan
}

#[test]
fn a_plan_holds_what_the_run_then_does_and_leaves_the_output_directory_alone() {
    let fixture = Fixture::new();
    let eval = ["train.eval_strategy: epoch", "train.eval_batch_size: 3", "train.metric_for_best_model: eval_loss"];
    let of = plan(&fixture, "planned", &eval);
    assert!(!fixture.path("out").exists(), "nothing is written there");
    assert_eq!([&of["batch"]["batch_size"], &of["batch"]["grad_accum"], &of["steps"]["total"]], [2, 2, 6]);
    assert_eq!([&of["steps"]["effective_batch"], &of["steps"]["per_epoch"], &of["steps"]["warmup"]], [4, 6, 2]);
    assert_eq!([&of["evaluation"]["when"], &of["saving"]["when"]], ["epochs", "never"]);
    assert_eq!((&of["evaluation"]["batch_size"], &of["evaluation"]["metric"]["name"]), (&3.into(), &"loss".into()));
    assert_eq!([&of["parallel"]["strategy"], &of["model"]["mode"]], ["single", "lora"]);
    assert_eq!(of["learning_rate"]["after_warmup"], 0.01);
    assert!(of["memory"]["predicted"]["rank"].is_object(), "{of:#}");

    // A run that exists can be planned, too.
    let config = fixture.config("planned", &eval);
    let output = tunesmith(&["train", config.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(plan(&fixture, "planned", &eval), of);
    let output = tunesmith(&["plan", config.to_str().unwrap(), "--run"]).output().unwrap();
    let text = said(&output);
    for line in ["batch size", "effective batch", "metric.greater is better", "output dir"] {
        assert!(output.status.success() && text.contains(line), "{line}: {text}");
    }
}

#[test]
fn ranks_and_sizes_are_decided_in_a_plan() {
    let fixture = Fixture::new();
    let ranks = ["train.strategy: zero2", "train.dp_ranks: 2", "train.lr_scaling: linear"];
    let of = plan(&fixture, "ranks", &ranks);
    assert_eq!(
        [&of["parallel"]["strategy"], &of["ranks"]["count"], &of["ranks"]["in_process"]],
        [&Value::from("zero2"), &2.into(), &2.into()]
    );
    assert_eq!([&of["parallel"]["shards_optimizer"], &of["parallel"]["shards_weights"]], [true, false]);
    assert!(of["learning_rate"]["scaling"].as_str().unwrap().contains("linear scaling"), "{of:#}");
    assert_eq!(of["evaluation"], Value::Null);

    let sizes = ["train.batch_size: auto", "train.effective_batch: 8", "train.gradient_checkpointing: auto"];
    let of = plan(&fixture, "sizes", &sizes);
    let number = |value: &Value| value.as_u64().unwrap();
    assert_eq!(number(&of["batch"]["batch_size"]) * number(&of["batch"]["grad_accum"]), 8);
    assert_eq!((&of["chosen"]["checkpointing"], of["batch"]["checkpointing"] == "auto"), (&true.into(), false));
}

/// Transformers takes a number below 1 as a share of all steps, rounded up.
#[test]
fn shares_of_all_steps_say_when_a_run_logs_validates_and_saves() {
    let fixture = super::fixture::Fixture::new();
    let shares = ["train.eval_steps: 0.34", "train.save_steps: 0.5", "train.logging_steps: 0.5"];
    let more = ["train.eval_strategy: steps", "train.save_strategy: steps", "train.max_steps: 6"];
    let config = fixture.config("run", &[&shares[..], &more[..]].concat());
    let output = super::fixture::train(&config, &[]);
    let text = super::fixture::said(&output);
    assert!(output.status.success(), "{text}");
    let after = |what: &str| text.lines().filter(|line| line.starts_with(what)).count();
    assert_eq!(after("evaluation after step 3:"), 1, "{text}");
    assert_eq!((after("evaluation after step"), after("step ")), (2, 2), "{text}");
    for (step, exists) in [(2, false), (3, true), (6, true)] {
        assert_eq!(fixture.path(&format!("out/checkpoint-{step:06}")).is_dir(), exists, "{step}: {text}");
    }
}
