//! A second image encoder (`TheWorld`) from files to a trained model: training in stages, the feature cache, a stopped and
//! resumed run, and what is refused.
use crate::pictures::{copy, dataset, golden, kept, paired, picture, seeing, whole, write_rows};
use crate::run::fixture::{Fixture, said, train, tunesmith};
use crate::run::resume::straight_equals_stopped_on;
use serde_json::{Value, json};
use std::fs;
use tunesmith::config::{Config, WorldProjection};
use tunesmith::data::batch::IGNORE;
use tunesmith::model::weights::WeightFiles;

const TOKENS: &str = "tuning.new_tokens: [\"<start_of_world>\", \"<end_of_world>\"]";
const SIDE: &str = "vision.world.image_size: 16";

/// A fixture with Gemma 3 and the autoencoder of a golden run.
fn world(name: &str) -> Fixture {
    let fixture = seeing("gemma3");
    copy(&golden(&format!("vision/{name}/vae")), &fixture.path("vae"));
    fixture
}

fn encoder(fixture: &Fixture) -> String {
    format!("vision.world.encoder: {}", fixture.path("vae").display())
}

#[test]
fn rows_of_the_second_encoder_stand_behind_the_first_token() {
    let fixture = world("world_kl");
    let rows = fixture.path("rows.jsonl");
    let shown = json!({"images": ["rgb.png", "wide.png"], "question": "what?", "answer": "a cat"});
    write_rows(&rows, [shown, json!({"question": "what?", "answer": "a cat"})]);
    // Two tokens that the model has are those around the rows.
    let path = fixture.path("model/tokenizer.json");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains("<unused0>") && text.contains("<unused1>"));
    fs::write(&path, text.replace("<unused0>", "<start_of_world>").replace("<unused1>", "<end_of_world>")).unwrap();
    let load = |set: &dyn Fn(&mut Config)| dataset(&fixture.path("model"), &rows, set).unwrap();
    let tokenizer = load(&|_| ()).tokenizer;
    let [begin, end] = ["<start_of_world>", "<end_of_world>"].map(|token| tokenizer.id(token).unwrap());
    let load = |set: &dyn Fn(&mut Config)| load(set).train.batch([0, 1]).unwrap();
    let plain = load(&|_| ());
    for (projection, rows) in [(WorldProjection::Spatial, 16), (WorldProjection::Channel, 4)] {
        let batch = load(&|config: &mut Config| {
            config.vision.world.encoder = Some(fixture.path("vae"));
            config.vision.world.image_size = 16;
            config.vision.world.projection_mode = projection;
        });
        let added = 2 * (rows + 2);
        assert_eq!(batch.cu_seqlens, [0, plain.cu_seqlens[1] + added, plain.cu_seqlens[2] + added]);
        // The template writes no BOS, so they come first.
        let block = [vec![begin; rows + 1], vec![end]].concat();
        assert_eq!(batch.tokens[..added], [block.clone(), block].concat());
        assert_eq!(batch.tokens[added..], plain.tokens);
        assert_eq!(batch.targets[added..], plain.targets);
        assert!(batch.targets[..added].iter().all(|&target| target == IGNORE));
        let runs: Vec<_> =
            batch.images.iter().map(|image| (image.pixels.world, image.runs[0].start, image.rows())).collect();
        let own: Vec<_> = plain.images.iter().map(|image| (false, image.runs[0].start + added, image.rows())).collect();
        assert_eq!(runs, [vec![(true, 1, rows), (true, rows + 3, rows)], own].concat());
        // Values from -1 to 1: a token for each pixel.
        let values = &batch.images[0].pixels.patches;
        assert_eq!(values.len(), 3 * 16 * 16);
        assert!(values.iter().all(|value| (-1.0..=1.0).contains(value)) && values.iter().any(|value| *value < -0.1));
    }
}

#[test]
fn stages_train_one_after_the_other_and_answer() {
    for (name, mode, architecture) in [
        ("world_kl", "spatial", "linear"),
        ("world_wan", "channel", "mlp"),
        ("world_wan", "spatial", "mlp_no_final_gelu"),
    ] {
        let fixture = world(name);
        let lines = [
            &encoder(&fixture),
            TOKENS,
            SIDE,
            &format!("vision.world.projection_mode: {mode}"),
            &format!("vision.world.projection_architecture: {architecture}"),
            "model.max_seq_len: 96",
        ];
        let stage = |out: &str, more: &[&str]| {
            let output = format!("train.output_dir: {}", fixture.path(out).display());
            whole(&fixture, &[&lines[..], &[&output, "data.packing: true"], more].concat());
            let file = fs::read(fixture.path(out).join("adapter/adapter_model.safetensors")).unwrap();
            let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            let header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
            let mut names: Vec<String> = header.as_object().unwrap().keys().cloned().collect();
            names.retain(|name| name != "__metadata__");
            let has = |part: &str| names.iter().any(|name| name.contains(part));
            (
                has("world_projector"),
                has("trainable_tokens_delta"),
                has("lora_A"),
                has("vision_tower") || has("world_encoder"),
            )
        };
        assert_eq!(stage("align", &["tuning.freeze_language: true"]), (true, true, false, false), "{name}");
        let first = format!("tuning.adapter: {}", fixture.path("align/adapter").display());
        // The second stage begins with the projector of the first: without a rate it keeps it.
        let second = ["tuning.lora.r: 2", &first, "train.learning_rate: 0"];
        assert_eq!(stage("tuned", &second), (true, true, true, false), "{name}");
        let read = |out: &str| {
            let path = fixture.path(out).join("adapter/adapter_model.safetensors");
            let file = WeightFiles::open_file(&path).unwrap();
            let name = file.names().find(|name| name.contains("world_projector") && name.ends_with("weight")).unwrap();
            file.read(name).unwrap().1
        };
        assert_eq!(read("align"), read("tuned"), "{name}");
    }
}

#[test]
fn a_merged_model_has_its_second_encoder_in_its_folder() {
    for (name, mode, architecture, beside) in [
        ("world_kl", "spatial", "linear", "gemma3"),
        ("world_wan", "channel", "mlp", "gemma3"),
        ("world_kl", "channel", "mlp_no_final_gelu", "a pair that chats"),
        ("world_kl", "spatial", "mlp", "a pair"),
        ("world_wan", "spatial", "mlp", "qwen3_vl"),
    ] {
        let (chats, pairs) = (beside != "a pair", beside.starts_with("a pair"));
        let fixture = if pairs { paired() } else { seeing(beside) };
        copy(&golden(&format!("vision/{name}/vae")), &fixture.path("vae"));
        let mut first = String::new();
        let tokens = if pairs && chats {
            "tuning.new_tokens: [\"<image>\", \"<start_of_world>\", \"<end_of_world>\"]"
        } else {
            TOKENS
        };
        if pairs {
            first = format!("vision.encoder: {}", fixture.path("encoder").display());
        }
        if pairs && chats {
            let row = |number: usize| json!({"image": picture(["rgb.png", "wide.png"][number % 2]), "question": "what is it?", "answer": "a cat"});
            write_rows(&fixture.path("train.jsonl"), (0..24).map(row));
            write_rows(&fixture.path("val.jsonl"), (24..30).map(row));
        }
        let own = encoder(&fixture);
        let (mode, architecture) = (
            format!("vision.world.projection_mode: {mode}"),
            format!("vision.world.projection_architecture: {architecture}"),
        );
        let common = ["model.max_seq_len: 96", "train.eval_strategy: steps", "train.eval_steps: 3"];
        let stage = |out: &str, lines: &[&str]| {
            let output = format!("train.output_dir: {}", fixture.path(out).display());
            let own = [&common[..], &["train.max_steps: 3", "train.eval_on_start: true", &output], lines].concat();
            let config = fixture.config(out, &own);
            let done = train(&config, &[]);
            assert!(done.status.success(), "{}", said(&done));
            let metrics = fs::read_to_string(fixture.path(out).join("metrics.jsonl")).unwrap();
            let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            lines.filter_map(|line| line["eval_loss"].as_f64()).collect::<Vec<f64>>()
        };
        let done = |args: &[&str]| {
            let done = tunesmith(args).output().unwrap();
            assert!(done.status.success(), "{args:?}: {}", said(&done));
            said(&done)
        };
        let mut lines = vec![own.as_str(), tokens, SIDE, &mode, &architecture];
        lines.extend(pairs.then_some(first.as_str()));
        lines.extend((pairs && chats).then_some("vision.image_token: <image>"));
        let losses = stage("tuned", &lines);
        let path = |name: &str| fixture.path(name).display().to_string();
        let (config, merged, image) = (path("tuned.yaml"), path("merged"), picture("rgb.png"));
        let ask = ["--image", &image, "--prompt", "what is it?"];
        let ask = &ask[..if chats { 4 } else { 2 }];
        let answer = done(&[&["infer", &config], ask].concat());
        let text = done(&["merge", &config, "--output", &merged, "--dtype", "float32"]);
        assert!(text.contains("load_vision.py"), "{text}");
        assert_eq!(done(&[&["infer", "--model", &merged], ask].concat()), answer, "{name}");
        let exported = path("exported");
        done(&["export", &config, "--hf", "--dtype", "float32", "--output", &exported]);
        for file in ["world.json", "world.safetensors", "model.safetensors"] {
            let read = |folder: &str| fs::read(fixture.path(folder).join(file)).unwrap();
            assert!(read("merged") == read("exported"), "{name}, {file}");
        }
        // Runs that train the model itself write such a folder too.
        let parts = ["tuning.mode: freeze", "tuning.freeze.trainable_modules: [\"norms\", \"embeddings\", \"head\"]"];
        let (out, more) =
            if name == "world_wan" { ("freeze", &parts[..]) } else { ("full", &["tuning.mode: full"][..]) };
        let whole = stage(out, &[&lines, more].concat());
        let (config, model) = (path(&format!("{out}.yaml")), path(&format!("{out}/model")));
        let answer = done(&[&["infer", &config], ask].concat());
        assert_eq!(done(&[&["infer", "--model", &model], ask].concat()), answer, "{name}, {out}");
        done(&["eval", &config]);
        let file = WeightFiles::open_file(&fixture.path(out).join("model/model.safetensors")).unwrap();
        assert!(file.names().all(|name| !name.contains("world")), "{name}, {out}");
        let further = stage(&format!("after-{out}"), &[&format!("model.name: {model}"), "tuning.mode: full"]);
        assert!((further[0] - whole.last().unwrap()).abs() < 1e-5, "{whole:?} {further:?}");
        assert!(fixture.path(&format!("after-{out}/model/world.safetensors")).is_file());
        // It is trained further without keys of the encoder, and merged again.
        let base = format!("model.name: {merged}");
        let further = stage("further", &[&base]);
        assert!((further[0] - losses.last().unwrap()).abs() < 1e-5, "{losses:?} {further:?}");
        let (config, again) = (path("further.yaml"), path("again"));
        let answer = done(&[&["infer", &config], ask].concat());
        done(&["merge", &config, "--output", &again, "--dtype", "float32"]);
        assert_eq!(done(&[&["infer", "--model", &again], ask].concat()), answer, "{name}");
        let adapter = path("further/adapter");
        let third = path("third");
        done(&["merge", "--base", &merged, "--adapter", &adapter, "--dtype", "float32", "--output", &third]);
        let read = |folder: &str| fs::read(fixture.path(folder).join("world.safetensors")).unwrap();
        assert!(read("third") == read("again") && read("again") != read("merged"), "{name}");
        // Its files are not trusted.
        let path_of = |file: &str| fixture.path("third").join(file);
        let whole = fs::read_to_string(path_of("world.json")).unwrap();
        let asked = |part: &str| {
            let done = tunesmith(&[&["infer", "--model", &third], ask].concat()).output().unwrap();
            assert!(done.status.code() == Some(4) && said(&done).contains(part), "{part}: {}", said(&done));
        };
        for (key, value, part) in [
            ("projection_mode", json!("both"), "projection_mode"),
            ("projection_architecture", json!(1), "projection_architecture"),
            ("image_size", json!(15), "image_size: 15"),
            ("token_ids", json!([3]), "token_ids"),
            ("token_ids", json!([3, 4_000_000_000_u32]), "no token 4000000000"),
            ("encoder_config", json!(null), "encoder_config"),
        ] {
            let mut changed: Value = serde_json::from_str(&whole).unwrap();
            changed[key] = value;
            fs::write(path_of("world.json"), changed.to_string()).unwrap();
            if path_of("manifest.json").exists() {
                asked("not as tunesmith wrote it");
                fs::remove_file(path_of("manifest.json")).unwrap();
            }
            asked(part);
        }
        fs::write(path_of("world.json"), whole).unwrap();
        fs::remove_file(path_of("world.safetensors")).unwrap();
        asked("world.safetensors");
        let (other, named) = (format!("train.output_dir={}", path("other")), own.replace(": ", "="));
        let refused = tunesmith(&["train", &config, &other, &named]).output().unwrap();
        assert!(
            refused.status.code() == Some(2) && said(&refused).contains("has a second encoder already"),
            "{}",
            said(&refused)
        );
    }
}

#[test]
fn kept_latents_train_to_the_same_bits() {
    for lines in [
        &[][..],
        &["tuning.freeze_connector: false", "vision.world.projection_mode: channel", "tuning.lora.lora_dropout: 0.1"],
    ] {
        let fixture = world("world_wan");
        let own = [&encoder(&fixture), TOKENS, SIDE, "model.max_seq_len: 96"];
        let run = |out: &str, cache: &str, more: &str| kept(&fixture, out, cache, &[&own, lines, &[more]].concat());
        let each = run("each", "none", "vision.cache_features: false");
        let once = run("once", "cache", "vision.feature_cache_size: 1GiB");
        assert!(once.2.contains("went over 5 images and is not loaded"), "{}", once.2);
        assert_eq!(once.1, each.1);
        assert!(once.0 == each.0);
        let again = run("again", "cache", "vision.cache_features: true");
        assert!(again.0 == once.0 && !again.2.contains("is not loaded"), "{}", again.2);
    }
}

#[test]
fn a_stopped_run_with_a_second_encoder_ends_with_the_same_bits() {
    let fixture = world("world_kl");
    let lines = [
        &encoder(&fixture),
        TOKENS,
        SIDE,
        "vision.world.projection_mode: channel",
        "data.packing: true",
        "model.max_seq_len: 96",
    ];
    straight_equals_stopped_on(&fixture, &lines, &[3, 8]);
    let fixture = world("world_kl");
    let own = encoder(&fixture);
    straight_equals_stopped_on(&fixture, &[&[own.as_str(), "tuning.mode: full"], &lines[1..]].concat(), &[8]);
}

#[test]
fn commands_know_the_second_encoder_or_refuse_it_by_name() {
    let fixture = world("world_kl");
    let own = [&encoder(&fixture), TOKENS, SIDE, "vision.world.projection_mode: channel", "train.max_steps: 1"];
    let config = fixture.config("run", &own).display().to_string();
    let run = |args: &[&str]| tunesmith(args).output().unwrap();
    let known = |args: &[&str], part: &str| {
        let done = run(args);
        assert!(done.status.success() && said(&done).contains(part), "{args:?}: {}", said(&done));
    };
    known(&["data", &config, "--rows", "1"], "second encoder: 4 tokens");
    known(&["plan", &config], "");
    known(&["memory-check", &config], "");
    let done = train(fixture.path("run.yaml").as_path(), &[]);
    let other = format!("train.output_dir={}", fixture.path("other").display());
    assert!(done.status.success() && said(&done).contains("AutoencoderKL, frozen, 4 embeddings"), "{}", said(&done));
    let refused = |args: &[&str], part: &str| {
        let done = run(args);
        assert!(done.status.code() == Some(2) && said(&done).contains(part), "{args:?}: {}", said(&done));
    };
    refused(&["train", &config, &other, "vision.world.image_size=18"], "a multiple of 4");
    refused(&["train", &config, &other, "tuning.new_tokens=[]"], "<start_of_world>");
    refused(&["train", &config, &other, "vision.load=false"], "sees nothing");
    let without = ["vision.world.encoder=null", "vision.world.projection_mode=channel"];
    refused(&["train", &config, &other, without[0], without[1]], "vision.world.projection_mode");
    // What an autoencoder's files say and is not computed here.
    let path = fixture.path("vae/config.json");
    let text: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (change, part) in [
        (json!({"_class_name": "AutoencoderTiny"}), "AutoencoderTiny"),
        (json!({"act_fn": "relu"}), "act_fn"),
        (json!({"in_channels": 4}), "in_channels"),
        (json!({"norm_num_groups": 3}), "norm_num_groups"),
        (json!({"down_block_types": ["AttnDownEncoderBlock2D"]}), "down_block_types"),
        (json!({"block_out_channels": [8, 8, 1_u64 << 40]}), "block_out_channels"),
        (json!({"latent_channels": 8}), "tensor"),
        (json!({"_class_name": "AutoencoderKLWan", "is_residual": true}), "is_residual"),
        (json!({"_class_name": "AutoencoderKLWan", "patch_size": 2}), "patch_size"),
        (json!({"_class_name": "AutoencoderKLWan", "attn_scales": [0.5]}), "attn_scales"),
    ] {
        let mut text = text.clone();
        text.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        fs::write(&path, text.to_string()).unwrap();
        let done = run(&["train", &config, &other]);
        assert!(done.status.code() != Some(0) && said(&done).contains(part), "{part}: {}", said(&done));
    }
}
