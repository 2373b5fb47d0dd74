//! Classification and regression end to end: trained, resumed, shared by ranks, measured, asked, merged, refused.
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::{Value, json};

use super::ends::metrics;
use super::fixture::{Fixture, said, train, tunesmith};
use super::resume::go;

/// Words that end in a letter that says the label, rarer ones less often.
fn word(number: usize) -> (String, &'static str) {
    let (end, label) =
        [('x', "plenty"), ('x', "plenty"), ('x', "plenty"), ('y', "some"), ('x', "plenty"), ('z', "rare")][number % 6];
    let letters = (0..2 + number % 4).map(|index| char::from(b'a' + ((number * 5 + index * 7) % 20) as u8));
    (letters.chain([end]).collect(), label)
}

fn write(path: &Path, rows: impl IntoIterator<Item = Value>) {
    let mut text = String::new();
    rows.into_iter().for_each(|row| writeln!(text, "{row}").unwrap());
    std::fs::write(path, text).unwrap();
}

/// A fixture whose rows are words with labels.
fn fixture() -> Fixture {
    let fixture = Fixture::new();
    let row = |number| {
        let (text, label) = word(number);
        json!({ "text": text, "label": label, "id": number })
    };
    write(&fixture.path("train.jsonl"), (0..48).map(row));
    write(&fixture.path("val.jsonl"), (48..72).map(row));
    fixture
}

const CLASSIFIES: [&str; 6] = [
    "task: classification",
    "gen.num_samples: UNSET",
    "train.class_weights: balanced",
    "train.batch_size: 8",
    "tuning.lora.lora_dropout: 0.0",
    "train.learning_rate: 0.02",
];

fn config(fixture: &Fixture, name: &str, more: &[&str]) -> PathBuf {
    fixture.config(name, &[&CLASSIFIES[..], more].concat())
}

fn ask(args: &[&str]) -> Output {
    tunesmith(args).output().unwrap()
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))).unwrap()
}

#[test]
fn a_classifier_is_trained_measured_asked_and_merged() {
    let fixture = fixture();
    let more = [
        "train.max_steps: 18",
        "train.eval_strategy: steps",
        "train.eval_steps: 6",
        "train.save_strategy: steps",
        "train.save_steps: 6",
        "train.metric_for_best_model: eval_f1_macro",
        "train.load_best_model_at_end: true",
    ];
    let config = config(&fixture, "run", &more);
    let (config_text, out) = (config.to_str().unwrap(), fixture.path("out"));
    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    for told in [
        "label plenty",
        "32 rows (66.7 %), 16 for validation, weight 0.5000",
        "8 rows (16.7 %), 4 for validation, weight 2.0000",
    ] {
        assert!(said(&output).contains(told), "{told}: {}", said(&output));
    }
    let (steps, evaluations) = metrics(&out);
    // Eight rows a pass, two passes a step.
    let accuracy: Vec<f64> = steps.iter().map(|line| line["accuracy"].as_f64().unwrap()).collect();
    assert!(accuracy.iter().all(|share| (share * 16.0).fract() == 0.0 && (0.0..=1.0).contains(share)), "{accuracy:?}");
    assert!(accuracy[17] > 0.9 && accuracy[17] > accuracy[0], "{accuracy:?}");
    let events = super::events::read(&out.join("tb"));
    let logged = &events.scalars["train/accuracy"];
    assert_eq!(logged.len(), events.scalars["train/loss"].len(), "at each step that is logged");
    assert!(said(&output).contains("  accuracy ") && said(&output).contains("training accuracy"), "{}", said(&output));
    let best = evaluations.iter().map(|line| line["eval_scores"]["f1_macro"].as_f64().unwrap()).fold(0.0, f64::max);
    assert!(best > 0.9, "{evaluations:?}");
    for line in &evaluations {
        let cells: Vec<Vec<u64>> = serde_json::from_value(line["eval_confusion"].clone()).unwrap();
        assert_eq!(cells.iter().map(|row| row.iter().sum()).collect::<Vec<u64>>(), [16, 4, 4], "sorted labels");
        assert_eq!(line["eval_label_tokens"], 24);
    }
    let report = std::fs::read_to_string(out.join("report.html")).unwrap();
    assert!(report.contains("<h2>Labels</h2>") && report.contains("plenty taken for rare"));
    assert!(report.contains("Accuracy"));

    let adapter = read(&out.join("adapter/adapter_config.json"));
    assert_eq!(
        (&adapter["task_type"], &adapter["modules_to_save"]),
        (&json!("SEQ_CLS"), &json!(["classifier", "score"]))
    );
    let described = read(&out.join("adapter/config.json"));
    assert_eq!(described["architectures"], json!(["LlamaForSequenceClassification"]));
    assert_eq!(described["id2label"], json!({ "0": "plenty", "1": "rare", "2": "some" }));
    let resolved = std::fs::read_to_string(out.join("config.resolved.yaml")).unwrap();
    assert!(
        resolved.contains("task: \"classification\"") && resolved.contains("labels: [\"plenty\",\"rare\",\"some\"]")
    );

    // What `eval` measures is what the run measured of the weights that it ended with.
    let output = ask(&["eval", config_text]);
    assert!(output.status.success(), "{}", said(&output));
    let asked = said(&output);
    assert!(asked.contains("rows            24 of 24 (validation)"), "{asked}");
    assert!(asked.contains("intervals       95 %, by a bootstrap of "), "{asked}");
    let output = ask(&["eval", config_text, "--split", "test"]);
    assert!(said(&output).contains("there are no test rows: data.test_path is not set"), "{}", said(&output));
    let measured = read(&out.join("eval/metrics.json"));
    let score = &measured["models"]["tuned"]["scores"]["f1_macro"];
    assert!((score["value"].as_f64().unwrap() - best).abs() < 1e-9, "{measured}");
    assert!(score["low"].as_f64().unwrap() <= best && best <= score["high"].as_f64().unwrap());
    let samples = std::fs::read_to_string(out.join("eval/samples.jsonl")).unwrap();
    assert_eq!(samples.lines().count(), 24);
    let page = std::fs::read_to_string(out.join("eval/report.html")).unwrap();
    assert!(page.contains("taken for") && page.contains("roc_auc_ovr"));

    let probabilities = |output: &Output| -> Vec<f64> {
        assert!(output.status.success(), "{}", said(output));
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(said["prediction"], "some");
        said["probabilities"].as_object().unwrap().values().map(|share| share.as_f64().unwrap()).collect()
    };
    let asked = probabilities(&ask(&["infer", config_text, "--prompt", "hgy", "--json"]));
    assert!((asked.iter().sum::<f64>() - 1.0).abs() < 1e-9);
    let plain = ask(&["infer", config_text, "--prompt", "hgy"]);
    assert!(String::from_utf8_lossy(&plain.stdout).lines().next().unwrap().ends_with("  some"), "{}", said(&plain));
    write(&fixture.path("in.jsonl"), [json!({ "text": "hgy", "id": 1 }), json!({ "text": "abx" })]);
    let (input, answers) = (fixture.path("in.jsonl"), fixture.path("answers.jsonl"));
    let (input, answers) = (input.to_str().unwrap(), answers.to_str().unwrap());
    let output = ask(&["infer", config_text, "--in", input, "--out", answers]);
    assert!(output.status.success(), "{}", said(&output));
    let lines: Vec<Value> =
        std::fs::read_to_string(answers).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        (&lines[0]["prediction"], &lines[0]["id"], &lines[1]["prediction"]),
        (&json!("some"), &json!(1), &json!("plenty"))
    );
    // A file that was cut off goes on where it stands; one that is whole is left as it is.
    let whole = std::fs::read_to_string(answers).unwrap();
    std::fs::write(answers, &whole[..whole.find('\n').unwrap() + 6]).unwrap();
    for end in ["continuing with row 2", "all 2 rows are answered"] {
        let output = ask(&["infer", config_text, "--in", input, "--out", answers]);
        assert!(output.status.success() && said(&output).contains(end), "{}", said(&output));
        assert_eq!(std::fs::read_to_string(answers).unwrap(), whole);
    }

    let output = ask(&["merge", config_text]);
    assert!(output.status.success(), "{}", said(&output));
    let merged = out.join("merged");
    let again = probabilities(&ask(&[
        "infer",
        config_text,
        "--adapter",
        merged.to_str().unwrap(),
        "--prompt",
        "hgy",
        "--json",
    ]));
    assert!(asked.iter().zip(&again).all(|(one, other)| (one - other).abs() < 1e-5), "{asked:?} {again:?}");
    let checkpoint = out.join("best");
    let checkpoint = std::fs::read_to_string(&checkpoint).map_or(checkpoint, |name| out.join(name.trim()));
    probabilities(&ask(&[
        "infer",
        config_text,
        "--adapter",
        checkpoint.to_str().unwrap(),
        "--prompt",
        "hgy",
        "--json",
    ]));

    let output = ask(&["export", config_text, "--hf"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(read(&out.join("export-hf/config.json"))["problem_type"], "single_label_classification");
    let card = std::fs::read_to_string(out.join("export-hf/README.md")).unwrap();
    assert!(card.contains("AutoModelForSequenceClassification") && card.contains("pipeline_tag: text-classification"));
    let output = ask(&["export", config_text, "--gguf", "f16"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    let output = ask(&["chat", config_text]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
}

#[test]
fn a_classifier_resumes_to_the_bit_and_its_ranks_train_one_curve() {
    let fixture = fixture();
    let more = [
        "train.max_steps: 6",
        "train.eval_strategy: steps",
        "train.eval_steps: 3",
        "tuning.lora.lora_dropout: 0.1",
        "data.val_path: []",
        "data.split: 0.25",
    ];
    let config = config(&fixture, "run", &more);
    let to = |name: &str| format!("train.output_dir={}", fixture.path(name).display());
    let weights = |name: &str| std::fs::read(fixture.path(name).join("adapter/adapter_model.safetensors")).unwrap();
    assert!(go(&config, &[&to("whole")], u64::MAX));
    assert!(!go(&config, &[&to("halves")], 3));
    assert!(go(&config, &[&to("halves"), "train.resume_from_checkpoint=latest"], u64::MAX));
    assert_eq!(weights("whole"), weights("halves"));
    let (_, evaluations) = metrics(&fixture.path("whole"));
    let cells: Vec<Vec<u64>> = serde_json::from_value(evaluations[0]["eval_confusion"].clone()).unwrap();
    assert_eq!(cells.iter().map(|row| row.iter().sum()).collect::<Vec<u64>>(), [8, 2, 2], "the split is stratified");

    for strategy in ["dp", "zero1", "zero3"] {
        let strategy_word = format!("train.strategy={strategy}");
        let words = [&to(strategy), &strategy_word, "train.dp_ranks=2", "train.grad_accum=1"];
        let output = train(&config, &words);
        assert!(output.status.success(), "{strategy}: {}", said(&output));
        let (steps, of_ranks) = metrics(&fixture.path(strategy));
        for (one, other) in metrics(&fixture.path("whole")).0.iter().zip(&steps) {
            let (one, other) = (one["loss"].as_f64().unwrap(), other["loss"].as_f64().unwrap());
            assert!((one - other).abs() < 1e-5 * one.abs().max(1.0), "{strategy}: {one} {other}");
        }
        assert_eq!(evaluations[1]["eval_confusion"], of_ranks[1]["eval_confusion"], "{strategy}");
    }

    // Other labels, or weights, are another run.
    let refused = train(&config, &[&to("halves"), "--resume", "TRAIN_MAX_STEPS=8", "train.class_weights=none"]);
    assert_eq!(refused.status.code(), Some(5), "{}", said(&refused));
    assert!(said(&refused).contains("train.class_weights: balanced in the checkpoint, none now"), "{}", said(&refused));
    let refused = train(&config, &[&to("halves"), "--resume", "TRAIN_MAX_STEPS=8", "data.labels=[some,rare,plenty]"]);
    assert!(said(&refused).contains("data.labels"), "{}", said(&refused));
    assert_eq!(refused.status.code(), Some(5));
}

#[test]
fn ranks_that_share_a_head_of_scores_and_its_body_train_the_bits_of_copies_and_the_curve_of_one() {
    let fixture = fixture();
    let numbers = |number: usize| json!({ "text": word(number).0, "label": number as f64 / 40.0 });
    write(&fixture.path("numbers.jsonl"), (0..48).map(numbers));
    let data = format!("data.train_path: {}", fixture.path("numbers.jsonl").display());
    let common = [
        "gen.num_samples: UNSET",
        "train.batch_size: 2",
        // 22 rows by 4 a step: the last step of an epoch has nothing for a rank.
        "data.max_rows: 22",
        "train.max_steps: 7",
        "train.eval_strategy: steps",
        "train.eval_steps: 3",
        "train.eval_batch_size: 5",
        "train.learning_rate: 0.001",
    ];
    let classes = ["task: classification", "train.class_weights: balanced"];
    let number = ["task: regression", &*data, "data.val_path: []", "data.split: 0.25"];
    let cases: [(&str, Vec<&str>); 4] = [
        ("lora", [&classes[..], &["tuning.lora.lora_dropout: 0.1"]].concat()),
        ("qlora", [&classes[..], &["tuning.mode: qlora"]].concat()),
        ("full", [&classes[..], &["tuning.mode: full", "train.save_strategy: steps", "train.save_steps: 5"]].concat()),
        ("number", [&number[..], &["tuning.mode: full"]].concat()),
    ];
    for (name, lines) in cases {
        let config = fixture.config(name, &[&common[..], &lines[..]].concat());
        let out = |run: &str| fixture.path(&format!("{name}-{run}"));
        let run = |run: &str, words: &[&str]| {
            let to = format!("train.output_dir={}", out(run).display());
            assert!(go(&config, &[&[&*to], words].concat(), u64::MAX), "{name}, {run}");
        };
        let shared = ["train.dp_ranks=2", "train.grad_accum=1"];
        run("one", &["train.grad_accum=2"]);
        run("copies", &[&["train.strategy=dp"][..], &shared].concat());
        run("zero3", &[&["train.strategy=zero3"][..], &shared].concat());
        let how = ["train.strategy=fsdp", "train.fsdp_sharding_strategy=shard_grad_op"];
        run("fsdp", &[&how[..], &shared].concat());
        let file = if out("one").join("adapter").is_dir() {
            "adapter/adapter_model.safetensors"
        } else {
            "model/model.safetensors"
        };
        let weights = |run: &str| std::fs::read(out(run).join(file)).unwrap();
        let of = |line: &Value, key: &str| line[key].as_f64().unwrap();
        let (steps, evaluations) = metrics(&out("one"));
        for run in ["zero3", "fsdp"] {
            assert!(weights("copies") == weights(run), "{name}, {run}: the weights");
            let (found, evaluated) = metrics(&out(run));
            assert_eq!((found.len(), evaluated.len()), (7, evaluations.len()), "{name}, {run}");
            let pairs = steps.iter().zip(&found).map(|(one, other)| (of(one, "loss"), of(other, "loss")));
            let evaluated = evaluations.iter().zip(&evaluated);
            let evaluated = evaluated.map(|(one, other)| (of(one, "eval_loss"), of(other, "eval_loss")));
            for (one, other) in pairs.chain(evaluated) {
                assert!((one - other).abs() < 1e-5 * one.abs().max(0.1), "{name}, {run}: {one} {other}");
            }
        }
    }
}

#[test]
fn every_mode_trains_the_head_and_goes_on_from_its_model() {
    let fixture = fixture();
    for (mode, more) in [
        ("full", &[][..]),
        ("freeze", &["tuning.freeze.trainable_layers: 1"]),
        ("ia3", &[]),
        ("qlora", &["tuning.lora.use_dora: true", "data.packing: true", "train.batch_size: 1"]),
    ] {
        let mode_line = format!("tuning.mode: {mode}");
        let lines = [&[mode_line.as_str(), "train.max_steps: 3", "train.learning_rate: 0.004"], more].concat();
        let lines: Vec<&str> =
            CLASSIFIES.iter().copied().filter(|line| mode == "qlora" || !line.contains("lora")).chain(lines).collect();
        let config = fixture.config(mode, &lines);
        let out = fixture.path(&format!("out-{mode}"));
        let output = train(&config, &[&format!("train.output_dir={}", out.display())]);
        assert!(output.status.success(), "{mode}: {}", said(&output));
        let (steps, _) = metrics(&out);
        if mode == "qlora" {
            let labels: u64 = steps.iter().map(|line| line["label_tokens"].as_u64().unwrap()).sum();
            assert!(labels > 8, "several texts in a packed row, each with its own last token: {labels}");
        }
        let model = out.join("model");
        if !model.is_dir() {
            assert!(out.join("adapter/config.json").is_file());
            continue;
        }
        assert_eq!(read(&model.join("config.json"))["id2label"]["2"], "some");
        let bytes = std::fs::read(model.join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("score.weight").unwrap().shape(), [3, 32]);
        let again = fixture.path(&format!("again-{mode}"));
        let words = [format!("train.output_dir={}", again.display()), format!("model.name={}", model.display())];
        let output = train(&config, &[&words[0], &words[1]]);
        assert!(output.status.success(), "{mode}: {}", said(&output));
        let first = |out: &Path| metrics(out).0[0]["loss"].as_f64().unwrap();
        assert!(first(&again) < first(&out), "{mode}: it goes on from the trained head");
        let output = train(&config, &[&words[0], &words[1], "--overwrite", "data.labels=[a,b,c]"]);
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        let output = train(&fixture.config("plain", &[]), &[&words[1]]);
        assert_eq!(output.status.code(), Some(2), "a classifier is no language model: {}", said(&output));
    }
}

#[test]
fn numbers_are_learned_measured_and_told() {
    let fixture = Fixture::new();
    let row = |number: usize| {
        let (text, _) = word(number);
        let value = match text.chars().last() {
            Some('x') => 1.5,
            Some('y') => -0.5,
            _ => 0.25,
        };
        json!({ "text": text, "label": value })
    };
    write(&fixture.path("train.jsonl"), (0..48).map(row));
    write(&fixture.path("val.jsonl"), (48..60).map(row));
    let more = [
        "task: regression",
        "gen.num_samples: UNSET",
        "train.batch_size: \"auto\"",
        "train.effective_batch: 8",
        "train.grad_accum: \"auto\"",
        "train.max_steps: 16",
        "train.eval_strategy: epoch",
        "train.save_strategy: epoch",
        "train.metric_for_best_model: r2",
        "train.learning_rate: 0.02",
    ];
    let config = fixture.config("run", &more);
    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    let (_, evaluations) = metrics(&fixture.path("out"));
    let last = evaluations.last().unwrap();
    assert!(last["eval_scores"]["r2"].as_f64().unwrap() > 0.5, "{last}");
    assert_eq!(last["eval_loss"], last["eval_scores"]["mse"]);
    let output = ask(&["eval", config.to_str().unwrap()]);
    assert!(output.status.success(), "{}", said(&output));
    let found = &read(&fixture.path("out").join("eval/metrics.json"))["models"]["tuned"]["scores"];
    assert!(["mse", "mae", "r2", "pearson"].iter().all(|name| found[name]["value"].is_f64()), "{found}");
    let output = ask(&["infer", config.to_str().unwrap(), "--prompt", "abx"]);
    let number: f64 = String::from_utf8_lossy(&output.stdout).trim().parse().unwrap();
    assert!((number - 1.5).abs() < 0.8, "{number}");
}

#[test]
fn rows_and_settings_that_do_not_fit_are_refused_by_name() {
    let fixture = fixture();
    let config = config(&fixture, "run", &["train.eval_strategy: epoch"]);
    let refused = |words: &[&str], code: i32, parts: &[&str]| {
        let output = train(&config, words);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", said(&output));
        for part in parts {
            assert!(said(&output).contains(part), "{words:?}: {part} is not in {}", said(&output));
        }
    };
    let bad = fixture.path("bad.jsonl");
    let path = format!("data.val_path={}", bad.display());
    write(&bad, [json!({ "text": "ax", "label": "plenty" }), json!({ "text": "ay" })]);
    refused(&[&path], 3, &["bad.jsonl:2", "no label"]);
    write(&bad, [json!({ "text": "ax", "label": "plenti" })]);
    refused(&[&path], 3, &["bad.jsonl:1", "\"plenti\" is none of the 3 labels", "is it \"plenty\"?"]);
    write(&bad, [json!({ "text": "", "label": "plenty" })]);
    refused(&[&path], 3, &["bad.jsonl:1", "the text is empty"]);
    write(&bad, [json!({ "text": "ax", "label": 1 }), json!({ "text": "ay", "label": 1.0 })]);
    let path = format!("data.train_path={}", bad.display());
    refused(&[&path], 3, &["only the label \"1\""]);
    refused(&["train.class_weights={plenti: 2}"], 2, &["\"plenti\" is none of the labels", "did you mean plenty?"]);
    refused(&["train.predict_with_generate=true"], 2, &["train.predict_with_generate", "task: \"classification\""]);
    refused(&["train.metric_for_best_model=mse"], 2, &["train.metric_for_best_model", "f1_macro"]);
    refused(&["train.metric_for_best_model=f1.none"], 2, &["no such metric", "f1.plenty"]);
    refused(&["data.format=text"], 2, &["data.format", "{text, label}"]);
    refused(&["task=regression"], 3, &["the label is \"plenty\", expected a number"]);
    refused(&["task=regression", "train.class_weights=balanced"], 2, &["train.class_weights", "task: \"regression\""]);
    refused(&["data.labels=[a, b]", "task=causal_lm"], 2, &["data.labels", "task: \"causal_lm\""]);
    refused(&["gen.num_beams=4"], 2, &["gen.num_beams", "nothing is generated"]);
    refused(&["TASK=translation"], 2, &["task", "expected one of causal_lm, classification, regression"]);
}
