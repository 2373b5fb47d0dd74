//! Adapters on an image encoder, and settings beside them: what a run trains, all other commands read.
use crate::pictures::{encoder, golden, paired_with, seeing, write_rows};
use crate::run::fixture::{Fixture, said, train, tunesmith};
use serde_json::{Value, json};
use std::fs;

const ADAPTERS: &str = "tuning.vision_target_modules: [\"all-linear\"]";

fn done(args: &[&str]) -> String {
    let output = tunesmith(args).env_remove("CONFIG").output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    said(&output)
}

/// The loss of the model `name` in the results of an evaluation.
fn loss(fixture: &Fixture, name: &str) -> f64 {
    let text = fs::read_to_string(fixture.path("out/eval/metrics.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["models"][name]["scores"]["loss"]["value"].as_f64().unwrap()
}

#[test]
fn what_is_trained_of_an_encoder_is_evaluated_merged_and_exported() {
    let steps = ["train.max_steps: 6", "train.learning_rate: 0.02", "train.warmup_steps: 0", "gen.max_new_tokens: 2"];
    for (name, settings) in [
        ("oft", &["tuning.mode: oft"][..]),
        ("ia3", &["tuning.mode: ia3"]),
        ("dora beside unfrozen blocks", &["tuning.lora.use_dora: true", "tuning.vision_unfreeze_layers: 1"]),
        ("the encoder alone", &["tuning.freeze_language: true"]),
    ] {
        let fixture = seeing("qwen2_5_vl");
        let config = fixture.config("run", &[&steps[..], &[ADAPTERS], settings].concat());
        let trained = train(&config, &[]);
        assert!(trained.status.success(), "{name}: {}", said(&trained));
        let config = config.display().to_string();
        done(&["eval", &config, "--alone"]);
        let adapted = loss(&fixture, "tuned");
        let merged = fixture.path("merged").display().to_string();
        done(&["merge", &config, "--output", &merged, "--dtype", "float32"]);
        done(&["export", &config, "--peft"]);
        done(&["eval", &config, "--base", &format!("model.name={merged}")]);
        let found = loss(&fixture, "base");
        assert!((found - adapted).abs() < 1e-4, "{name}: {found} once merged, {adapted} before");
        let from = format!("tuning.adapter={}", fixture.path("out/adapter").display());
        let further = ["train", &config, &from, &format!("train.output_dir={}", fixture.path("further").display())];
        done(&further);
    }
}

/// Trains with these lines, and holds the loss of the merged folder to that of the model and its adapter.
fn merges_alike(name: &str, fixture: &Fixture, lines: &[&str]) {
    let steps = ["train.max_steps: 3", "train.learning_rate: 0.02", "train.warmup_steps: 0", "gen.max_new_tokens: 2"];
    let config = fixture.config("run", &[&steps[..], lines].concat());
    let trained = train(&config, &[]);
    assert!(trained.status.success(), "{name}: {}", said(&trained));
    let config = config.display().to_string();
    done(&["eval", &config]);
    let (adapted, before) = (loss(fixture, "tuned"), loss(fixture, "base"));
    assert!((adapted - before).abs() > 1e-3, "{name}: nothing was learned");
    let merged = fixture.path("merged").display().to_string();
    done(&["merge", &config, "--output", &merged, "--dtype", "float32"]);
    // A pair in one folder needs no encoder of its own.
    let plain = fixture.config("plain", &["gen.max_new_tokens: 2"]).display().to_string();
    done(&["eval", &plain, "--base", "vision.load=true", &format!("model.name={merged}")]);
    let found = loss(fixture, "base");
    assert!((found - adapted).abs() < 1e-4, "{name}: {found} once merged, {adapted} before");
}

#[test]
fn trained_connectors_and_blocks_of_every_kind_of_encoder_are_merged() {
    let parts = ["tuning.freeze_connector: false", "tuning.vision_unfreeze_layers: 1"];
    for name in ["qwen2_vl", "qwen3_5", "internvl", "mistral3", "gemma4"] {
        merges_alike(name, &seeing(name), &parts);
    }
    let sized = |class: &str| json!({"image_processor_type": class, "size": {"height": 32, "width": 32}});
    let edge = |class: &str| json!({"image_processor_type": class, "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": true});
    let pixtral = json!({"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 32}, "patch_size": {"height": 8, "width": 8}});
    for (name, settings) in [
        ("vit", sized("ViTImageProcessor")),
        ("clip", edge("CLIPImageProcessor")),
        ("dinov2", edge("BitImageProcessor")),
        ("dinov2_registers", edge("BitImageProcessor")),
        ("pixtral_alone", pixtral),
    ] {
        let fixture = paired_with(name, &settings);
        merges_alike(
            name,
            &fixture,
            &[&encoder(&fixture), "vision.connector: mlp", "tuning.vision_unfreeze_layers: 1"],
        );
    }
}

#[test]
fn every_kind_of_adapter_saves_the_connector_beside_it() {
    for mode in ["lora", "ia3", "oft"] {
        for frozen in [false, true] {
            let lines = [
                format!("tuning.mode: {mode}"),
                format!("tuning.freeze_language: {frozen}"),
                "tuning.freeze_connector: false".to_owned(),
            ];
            let fixture = seeing("llava");
            merges_alike(mode, &fixture, &lines.each_ref().map(String::as_str));
            let config = fs::read(fixture.path("out/adapter/adapter_config.json")).unwrap();
            let config: Value = serde_json::from_slice(&config).unwrap();
            assert_eq!(config["modules_to_save"], json!(["multi_modal_projector"]), "{mode}, {frozen}");
            assert_eq!(
                config["target_modules"] == "dummy-target-modules",
                frozen,
                "{mode}: {}",
                config["target_modules"]
            );
        }
    }
}

/// A stage that trains the connector, alone or beside the language model, and then one that goes on with its adapter.
#[test]
fn a_second_stage_goes_on_from_every_kind_of_adapter() {
    for mode in ["lora", "ia3", "oft"] {
        let fixture = seeing("llava");
        let adapter = |out: &str| fixture.path(out).join("adapter").display().to_string();
        let run = |out: &str, lines: &[&str]| {
            let own = [&*format!("tuning.mode: {mode}"), "train.max_steps: 2", "train.eval_strategy: no"];
            let into = format!("train.output_dir={}", fixture.path(out).display());
            let done = train(&fixture.config(out, &[&own[..], lines].concat()), &[&into]);
            assert!(done.status.success(), "{mode}, {out}: {}", said(&done));
            let config = fs::read(fixture.path(out).join("adapter/adapter_config.json")).unwrap();
            serde_json::from_slice::<Value>(&config).unwrap()
        };
        run("alone", &["tuning.freeze_language: true", "tuning.freeze_connector: false"]);
        run("beside", &["tuning.freeze_connector: false"]);
        for (first, connector) in [("alone", false), ("alone", true), ("beside", false), ("beside", true)] {
            let from = format!("tuning.adapter: {}", adapter(first));
            let trains = format!("tuning.freeze_connector: {}", !connector);
            let config = run(&format!("{first}-{connector}"), &[&from, &trains]);
            let modules = &config["target_modules"];
            assert!(*modules != json!([]) && modules != "dummy-target-modules", "{mode}, {first}: {modules}");
            assert_eq!(config["modules_to_save"], json!(["multi_modal_projector"]), "{mode}, {first}, {connector}");
        }
    }
    // A module of the language model that is saved too.
    let fixture = seeing("llava");
    let lines = ["tuning.lora.modules_to_save: [\"lm_head\"]", "tuning.freeze_connector: false"];
    merges_alike("a head beside", &fixture, &lines);
    let config = fs::read(fixture.path("out/adapter/adapter_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(config["modules_to_save"].as_array().unwrap().len(), 2, "{}", config["modules_to_save"]);
}

#[test]
fn what_chooses_modules_of_a_frozen_language_model_is_refused() {
    let fixture = seeing("llava");
    for (key, value) in [("modules_to_save", "[\"embed_tokens\"]"), ("target_modules", "[\"q_proj\"]"), ("bias", "all")]
    {
        let line = format!("tuning.lora.{key}: {value}");
        let refused = train(&fixture.config("run", &["tuning.freeze_language: true", ADAPTERS, &line]), &[]);
        let text = said(&refused);
        assert!(refused.status.code() == Some(2) && text.contains(key) && text.contains("freeze_language"), "{text}");
    }
    let idle = "tuning.lora.rank_pattern: {\"blocks.7\": 2}";
    let refused = train(&fixture.config("run", &["tuning.freeze_language: true", ADAPTERS, idle]), &[]);
    let text = said(&refused);
    assert!(refused.status.code() == Some(2) && text.contains("matches no module that has an adapter"), "{text}");
}

/// What makes embeddings for each block and the connector are both in the first segment, which is gathered once for their gradients.
#[test]
fn a_connector_beside_embeddings_of_each_block_trains_in_shards() {
    let fixture = seeing("gemma4");
    let lines = ["train.max_steps: 2", "train.warmup_steps: 0", "tuning.freeze_connector: false", "gen.num_samples: 0"];
    let run = |name: &str, more: &[&str]| {
        let out = format!("train.output_dir: {}", fixture.path(name).display());
        let done = train(&fixture.config(name, &[&lines[..], more, &[&out]].concat()), &[]);
        assert!(done.status.success(), "{name}: {}", said(&done));
        let text = fs::read_to_string(fixture.path(name).join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter_map(|line| line["loss"].as_f64()).collect::<Vec<f64>>()
    };
    let one = run("one", &["train.batch_size: 2", "train.grad_accum: 2"]);
    let shards =
        run("shards", &["train.batch_size: 2", "train.grad_accum: 1", "train.strategy: zero3", "train.dp_ranks: 2"]);
    assert_eq!(one.len(), 2);
    assert!(one.iter().zip(&shards).all(|(one, other)| (one - other).abs() < 1e-5), "{one:?}, {shards:?}");
}

#[test]
fn images_that_fit_no_connector_are_refused_before_the_model_loads() {
    let fixture = seeing("gemma3");
    let file = fixture.path("model/preprocessor_config.json");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("32"), "{text}");
    fs::write(&file, text.replace("32", "40")).unwrap();
    let refused = train(&fixture.config("run", &["train.max_steps: 1"]), &[]);
    let text = said(&refused);
    assert!(
        refused.status.code() == Some(3) && text.contains("no multiples of") && !text.contains("panicked"),
        "{text}"
    );
}

#[test]
fn rows_to_answer_name_images_beside_their_file() {
    let fixture = seeing("llava");
    let folder = fixture.path("questions");
    fs::create_dir(&folder).unwrap();
    fs::copy(golden("pixels/rgb.png"), folder.join("only_here.png")).unwrap();
    write_rows(&folder.join("rows.jsonl"), [json!({"image": "only_here.png", "question": "what is it?"})]);
    let (model, rows, out) = (fixture.path("model"), folder.join("rows.jsonl"), folder.join("answers.jsonl"));
    let [model, rows, out] = [model, rows, out].map(|path| path.display().to_string());
    done(&["infer", "--model", &model, "--in", &rows, "--out", &out, "gen.max_new_tokens=2"]);
    assert!(fs::read_to_string(&out).unwrap().contains("answer"));
    let named =
        ["--image", &folder.join("only_here.png").display().to_string(), "--prompt", "what?"].map(str::to_owned);
    let words = ["infer", "--model", &model, &named[0], &named[1], &named[2], &named[3], "vision.load=false"];
    let refused = tunesmith(&words).env_remove("CONFIG").output().unwrap();
    assert!(refused.status.code() == Some(2) && said(&refused).contains("vision.load: false"), "{}", said(&refused));
}
