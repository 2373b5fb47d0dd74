//! Pairs of a text model and an image encoder (`vision.encoder`): trained as a whole, and in stages.
use crate::pictures::{encoder, paired, picture, seeing};
use crate::run::fixture::{Fixture, said, train, tunesmith};
use crate::run::resume::straight_equals_stopped_on;
use serde_json::Value;
use std::fs;
use std::path::Path;
use tunesmith::model::weights::WeightFiles;

/// The output of a command that succeeds.
fn done(args: &[&str]) -> String {
    let done = tunesmith(args).output().unwrap();
    assert!(done.status.success(), "{args:?}: {}", said(&done));
    said(&done)
}

/// Runs a stage with these lines into the folder `out`; what it said, and the losses of its validations.
fn stage(fixture: &Fixture, out: &str, lines: &[&str]) -> (String, Vec<f64>) {
    let own = ["train.max_steps: 3", "train.eval_strategy: steps", "train.eval_steps: 3", "train.eval_on_start: true"];
    let config = fixture.config(out, &[&own, lines].concat());
    let done = train(&config, &[&format!("train.output_dir={}", fixture.path(out).display())]);
    assert!(done.status.success(), "{out}: {}", said(&done));
    let metrics = fs::read_to_string(fixture.path(out).join("metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    (said(&done), lines.filter_map(|line| line["eval_loss"].as_f64()).collect())
}

/// The result of a run, as `key: value` or a word of a command line.
fn place(fixture: &Fixture, key: &str, folder: &str) -> String {
    format!("{key}{}", fixture.path(folder).display())
}

fn close(one: f64, other: f64) {
    assert!((one - other).abs() < 1e-5, "{one} and {other}");
}

#[test]
fn a_pair_that_is_trained_as_a_whole_is_used_from_its_folder() {
    for (mode, lines) in [
        ("full", &["tuning.freeze_vision: false"][..]),
        ("freeze", &["tuning.freeze.trainable_modules: [\"norms\"]"]),
        ("full", &["tuning.freeze_connector: true", "vision.connector: mlp"]),
    ] {
        let fixture = paired();
        let mode = format!("tuning.mode: {mode}");
        let (text, losses) = stage(&fixture, "one", &[&[encoder(&fixture).as_str(), mode.as_str()], lines].concat());
        assert!(text.contains("load_pair.py"), "{text}");
        let [config, model] = ["one.yaml", "one/model"].map(|name| fixture.path(name).display().to_string());
        let names = |file: &str| {
            let files = WeightFiles::open_file(&Path::new(&model).join(file)).unwrap();
            files.names().map(str::to_owned).collect::<Vec<_>>()
        };
        assert!(names("model.safetensors").iter().all(|name| !name.contains("vision") && !name.contains("projector")));
        assert!(names("vision.safetensors").iter().any(|name| name.starts_with("multi_modal_projector.")));
        assert!(names("vision.safetensors").iter().any(|name| name.starts_with("vision_tower.")));
        // With the run's configuration, and by its folder alone.
        let out = place(&fixture, "train.output_dir=", "one");
        let image = picture("rgb.png");
        let answer = done(&["infer", &config, &out, "--image", &image]);
        assert_eq!(done(&["infer", "--model", &model, "--image", &image]), answer);
        done(&["eval", &config, &out]);
        let exported = fixture.path("exported").display().to_string();
        done(&["export", &config, &out, "--hf", "--dtype", "float32", "--output", &exported]);
        assert_eq!(done(&["infer", "--model", &exported, "--image", &image]), answer);
        // A second stage starts with what the first one reached.
        let name = place(&fixture, "model.name: ", "one/model");
        let (_, further) = stage(&fixture, "two", &[&name, "tuning.freeze_connector: false"]);
        close(further[0], *losses.last().unwrap());
        let merged = fixture.path("merged").display().to_string();
        let adapter = fixture.path("two/adapter").display().to_string();
        done(&["merge", "--base", &model, "--adapter", &adapter, "--dtype", "float32", "--output", &merged]);
        let (_, further) = stage(&fixture, "three", &[&place(&fixture, "model.name: ", "merged"), &mode, lines[0]]);
        assert!(fixture.path("three/model/vision.json").is_file() && further[0] > 0.0);
        let config = fixture.config("again", &[&name, &encoder(&fixture)]);
        let refused = train(&config, &[]);
        assert!(refused.status.code() == Some(2) && said(&refused).contains("connector already"), "{}", said(&refused));
    }
}

#[test]
fn a_stopped_run_that_trains_all_of_a_seeing_model_ends_with_the_same_bits() {
    let fixture = paired();
    straight_equals_stopped_on(
        &fixture,
        &[&encoder(&fixture), "tuning.mode: full", "tuning.freeze_vision: false"],
        &[8],
    );
    let fixture = seeing("llava");
    straight_equals_stopped_on(&fixture, &["tuning.mode: full", "tuning.freeze_connector: false"], &[8]);
}
