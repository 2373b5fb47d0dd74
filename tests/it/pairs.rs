//! Pairs of a text model and an image encoder (`vision.encoder`): trained as a whole, and in stages.
use crate::pictures::{encoder, paired, picture, seeing, write_rows};
use crate::run::fixture::{Fixture, said, train, tunesmith};
use crate::run::resume::straight_equals_stopped_on;
use serde_json::{Value, json};
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;
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
        assert!(text.contains("load_vision.py"), "{text}");
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
fn ranks_that_shard_a_pair_save_the_folder_that_one_rank_saves() {
    for (mode, part) in
        [("full", "tuning.freeze_vision: false"), ("freeze", "tuning.freeze.trainable_modules: [\"norms\"]")]
    {
        let fixture = paired();
        let mode = format!("tuning.mode: {mode}");
        let common = [encoder(&fixture), mode, part.to_owned(), "vision.connector: mlp".to_owned()];
        let common: Vec<&str> = common.iter().map(String::as_str).collect();
        let saves = ["train.batch_size: 1", "train.save_strategy: steps", "train.save_steps: 2"];
        let go = |out: &str, lines: &[&str]| stage(&fixture, out, &[&common[..], &saves, lines].concat()).1;
        let one = go("one", &["train.grad_accum: 2"]);
        let ranks = |strategy: &str| [format!("train.strategy: {strategy}"), "train.dp_ranks: 2".to_owned()];
        let apart = |out: &str, strategy: &str, more: &[&str]| {
            let [strategy, count] = ranks(strategy);
            go(out, &[&[strategy.as_str(), &count, "train.grad_accum: 1"], more].concat())
        };
        let copies = apart("copies", "dp", &[]);
        let image = picture("rgb.png");
        let answer = |out: &str| {
            let model = fixture.path(out).join("model").display().to_string();
            done(&["infer", "--model", &model, "--image", &image])
        };
        let files = |out: &str| {
            let model = fixture.path(out).join("model");
            let mut names: Vec<_> = fs::read_dir(&model).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            let read = |name: &std::ffi::OsString| fs::read(model.join(name)).unwrap();
            names.iter().map(|name| (name.clone(), read(name))).collect::<Vec<_>>()
        };
        for strategy in ["fsdp", "zero3"] {
            // Shares have the bits of copies; one rank adds gradients in another order.
            assert_eq!(apart(strategy, strategy, &[]), copies, "{strategy}, {common:?}");
            assert!(files(strategy) == files("copies"), "{strategy}, {common:?}");
            let checkpoint = fixture.path(strategy).join("checkpoint-000002").display().to_string();
            apart("resumed", strategy, &[&format!("train.resume_from_checkpoint: {checkpoint}")]);
            assert!(files("resumed") == files("copies"), "{strategy}, resumed, {common:?}");
            fs::remove_dir_all(fixture.path("resumed")).unwrap();
        }
        one.iter().zip(&copies).for_each(|(&one, &copies)| close(one, copies));
        let names = |out: &str| files(out).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names("fsdp"), names("one"));
        for file in ["model.safetensors", "vision.safetensors"] {
            let [one, other] =
                ["one", "fsdp"].map(|out| WeightFiles::open_file(&fixture.path(out).join("model").join(file)).unwrap());
            assert!(one.names().eq(other.names()), "{file}");
            for name in one.names() {
                let [one, other] = [&one, &other].map(|file| file.read(name).unwrap().1);
                let far = one.iter().zip(&other).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max);
                assert!(far < 1e-4, "{file}, {name}: {far}");
            }
        }
        assert_eq!(answer("fsdp"), answer("one"));
    }
}

#[test]
fn chat_answers_about_images_from_the_folder_of_a_pair() {
    let fixture = paired();
    let encoder = encoder(&fixture);
    stage(&fixture, "adapted", &[&encoder]);
    stage(&fixture, "whole", &[&encoder, "tuning.mode: full"]);
    let image = picture("rgb.png");
    let talk = |args: &[&str]| {
        let mut chat = tunesmith(&[&["chat"], args].concat());
        let mut chat = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let words = format!("/image {image}\nabc\n/base\n/image {image}\n/tuned\n/image {image}\n/quit\n");
        chat.stdin.take().unwrap().write_all(words.as_bytes()).unwrap();
        let ended = chat.wait_with_output().unwrap();
        assert!(ended.status.success(), "{args:?}: {}", said(&ended));
        String::from_utf8(ended.stdout).unwrap()
    };
    let answer = |args: &[&str]| {
        let asked = tunesmith(&[&["infer"], args, &["--image", &image]].concat()).output().unwrap();
        assert!(asked.status.success(), "{args:?}: {}", said(&asked));
        String::from_utf8(asked.stdout).unwrap()
    };
    let config = |name: &str| fixture.path(&format!("{name}.yaml")).display().to_string();
    for (config, out) in [(config("adapted"), "adapted"), (config("whole"), "whole")] {
        let out = place(&fixture, "train.output_dir=", out);
        let (said, answer) = (talk(&[&config, &out]), answer(&[&config, &out]));
        assert!(said.starts_with(&answer) && said.trim_end().ends_with(answer.trim_end()), "{said:?} {answer:?}");
    }
    let model = fixture.path("whole/model").display().to_string();
    let (said, answer) = (talk(&["--model", &model]), answer(&["--model", &model]));
    assert!(said.starts_with(&answer), "{said:?} {answer:?}");
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

/// The connector's numbers in an adapter.
fn connector(fixture: &Fixture, folder: &str) -> Vec<Vec<f32>> {
    let file = WeightFiles::open_file(&fixture.path(folder).join("adapter_model.safetensors")).unwrap();
    let names = file.names().filter(|name| name.contains("multi_modal_projector"));
    names.map(|name| file.read(name).unwrap().1).collect()
}

#[test]
fn a_stage_keeps_frozen_what_the_stage_before_has_trained() {
    for (fixture, more, frozen) in [
        (paired(), Vec::new(), true),
        (paired(), Vec::new(), false),
        (seeing("llava"), vec!["tuning.freeze_connector: false"], true),
    ] {
        let encoder = if more.is_empty() { encoder(&fixture) } else { "seed: UNSET".to_owned() };
        let encoder: Vec<&str> = Some(encoder.as_str()).filter(|line| line.starts_with("vision")).into_iter().collect();
        let first = format!("tuning.freeze_language: {frozen}");
        let (_, losses) = stage(&fixture, "one", &[&encoder[..], &more, &[&first]].concat());
        let adapter = place(&fixture, "tuning.adapter: ", "one/adapter");
        // Its features are the connector's, or those of the encoder.
        let second = ["tuning.freeze_connector: true", "train.num_train_epochs: 2", "train.save_strategy: steps"];
        let lines = [&encoder[..], &second, &[&adapter, "train.save_steps: 2"]].concat();
        let (_, further) = stage(&fixture, "two", &lines);
        close(further[0], *losses.last().unwrap());
        assert!(further.last().unwrap() < &further[0], "{further:?}");
        let trained = connector(&fixture, "one/adapter");
        assert!(!trained.is_empty());
        for folder in ["two/adapter", "two/checkpoint-000002"] {
            assert_eq!(connector(&fixture, folder), trained, "{folder}");
        }
        // Interrupted, while the first stage is trained further.
        let config = fixture.path("two.yaml").display().to_string();
        let out = |name: &str| place(&fixture, "train.output_dir=", name);
        let ended = fs::read(fixture.path("two/adapter/adapter_model.safetensors")).unwrap();
        let checkpoint = fixture.path("two/checkpoint-000002").display().to_string();
        let resume = format!("train.resume_from_checkpoint={checkpoint}");
        fs::rename(fixture.path("one/adapter"), fixture.path("one/gone")).unwrap();
        done(&["train", &config, &out("resumed"), &resume]);
        assert!(fs::read(fixture.path("resumed/adapter/adapter_model.safetensors")).unwrap() == ended);
        fs::rename(fixture.path("one/gone"), fixture.path("one/adapter")).unwrap();
        // Its folder has all that is needed.
        let image = picture("rgb.png");
        let mut words = vec!["infer", &config, "--image", &image];
        if encoder.is_empty() {
            words.extend(["--prompt", "what is it?"]);
        }
        let two = out("two");
        let answer = done(&[&words[..], &[&two]].concat());
        assert_eq!(done(&[&words[..], &[&two, "--checkpoint", &checkpoint]].concat()).is_empty(), answer.is_empty());
        let scored = done(&["eval", &config, &two]);
        assert!(scored.contains("loss"), "{scored}");
        let merged = fixture.path("merged").display().to_string();
        done(&["merge", &config, &two, "--dtype", "float32", "--output", &merged]);
        words[1] = "--model";
        words.insert(2, &merged);
        assert_eq!(done(&words), answer);
        // A third stage trains it again, or goes on.
        let adapter = place(&fixture, "tuning.adapter: ", "two/adapter");
        for (out, frozen) in [("three", "false"), ("four", "true")] {
            let line = format!("tuning.freeze_connector: {frozen}");
            let (_, third) = stage(&fixture, out, &[&encoder[..], &[&adapter, &line]].concat());
            close(third[0], *further.last().unwrap());
            assert_eq!(connector(&fixture, &format!("{out}/adapter")) == trained, frozen == "true");
        }
    }
}

#[test]
fn a_stage_that_cannot_keep_what_the_stage_before_has_trained_says_so() {
    let fixture = paired();
    let encoder = encoder(&fixture);
    let adapted = "tuning.vision_target_modules: [\"layers.0.self_attn.q_proj\"]";
    stage(&fixture, "one", &[&encoder, adapted]);
    let adapter = place(&fixture, "tuning.adapter: ", "one/adapter");
    let config = fixture.config("two", &[&encoder, &adapter]);
    let refused = |words: &[&str], part: &str| {
        let done = train(&config, words);
        assert!(done.status.code() == Some(2) && said(&done).contains(part), "{}", said(&done));
    };
    refused(&[], "which this run does not train");
    refused(&["tuning.freeze_language=true"], "has trained the language model");
    // A block that is trained in full gets no adapter.
    let all = fixture.config("all", &[&encoder, &adapter, adapted, "tuning.vision_unfreeze_layers: 3"]);
    let done = train(&all, &[]);
    assert!(done.status.code() == Some(2) && said(&done).contains("no block that stays frozen"), "{}", said(&done));
    // What the stage before has not trained starts as in the base.
    stage(&fixture, "three", &[&encoder, &adapter, adapted, "tuning.vision_unfreeze_layers: 1"]);
}

#[test]
fn settings_of_images_are_refused_where_no_encoder_is_loaded() {
    let text = Fixture::new();
    let of_text = text.config("run", &["train.max_steps: 1"]);
    for word in [
        "tuning.freeze_vision=false",
        "tuning.freeze_connector=true",
        "tuning.freeze_language=true",
        "tuning.vision_unfreeze_layers=1",
        "tuning.vision_target_modules=[q_proj]",
        "vision.max_pixels=1024",
        "vision.cache_features=true",
        "vision.backend=pil",
    ] {
        let refused = train(&of_text, &[word]);
        let key = word.split('=').next().unwrap();
        let text = said(&refused);
        assert!(refused.status.code() == Some(2) && text.contains(&format!("{key}: ")), "{word}: {text}");
        assert!(text.contains("loads no image encoder") && text.contains("remove the key"), "{word}: {text}");
    }
    // Defaults may be written.
    let accepted = train(&of_text, &["tuning.freeze_vision=true", "vision.load=false", "vision.backend=torchvision"]);
    assert!(accepted.status.success(), "{}", said(&accepted));
}

#[test]
fn an_encoder_that_is_not_there_is_named_by_its_own_key() {
    let text = Fixture::new();
    let refused = train(&text.config("run", &["vision.encoder: ./nowhere"]), &[]);
    let message = said(&refused);
    assert_eq!(refused.status.code(), Some(4), "{message}");
    assert!(
        message.contains("vision.encoder: ./nowhere does not exist") && !message.contains("model.name"),
        "{message}"
    );
}

#[test]
fn a_processor_of_another_kind_of_encoder_is_refused() {
    let fixture = paired();
    let qwen = r#"{"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 256, "max_pixels": 1024}"#;
    fs::write(fixture.path("encoder/preprocessor_config.json"), qwen).unwrap();
    let refused = train(&fixture.config("run", &[&encoder(&fixture)]), &[]);
    let message = said(&refused);
    assert!(
        refused.status.code() == Some(4) && message.contains("does not prepare images for an encoder of"),
        "{message}"
    );
}

#[test]
fn an_encoder_whose_tensors_do_not_fit_its_configuration_is_refused() {
    let fixture = paired();
    let path = fixture.path("encoder/config.json");
    let mut shape: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    shape["intermediate_size"] = json!(7);
    fs::write(&path, shape.to_string()).unwrap();
    let config = fixture.config("run", &[&encoder(&fixture)]);
    let refused = train(&config, &[]);
    let message = said(&refused);
    assert!(refused.status.code() == Some(4) && message.contains("expected [7, "), "{message}");
}

#[test]
fn a_copy_of_a_row_s_image_that_is_lost_is_written_again() {
    let fixture = paired();
    let coded = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7";
    write_rows(&fixture.path("train.jsonl"), (0..4).map(|_| json!({"image": coded, "caption": "a cat"})));
    let config = fixture.config("run", &[&encoder(&fixture), "train.max_steps: 1"]);
    let run = |out: &str| {
        let done = train(&config, &[&place(&fixture, "train.output_dir=", out)]);
        (done.status.code(), said(&done))
    };
    assert_eq!(run("one").0, Some(0));
    let copies = || fs::read_dir(fixture.path("cache/pictures")).unwrap().map(|entry| entry.unwrap().path());
    let copy = copies().next().unwrap();
    fs::copy(fixture.path("b.png"), &copy).unwrap();
    let (code, message) = run("two");
    assert!(code == Some(3) && message.contains("remove it: the rows have it"), "{message}");
    fs::remove_file(&copy).unwrap();
    assert_eq!(run("three").0, Some(0));
    assert!(copy.is_file());
}

#[test]
fn an_image_with_too_many_pixels_is_refused_with_its_row() {
    let fixture = paired();
    let chunk = |name: &[u8], data: &[u8]| {
        let body = [name, data].concat();
        [&(data.len() as u32).to_be_bytes()[..], &body, &crc32fast::hash(&body).to_be_bytes()].concat()
    };
    let side = 40_000_u32.to_be_bytes();
    let head = chunk(b"IHDR", &[&side[..], &side, &[8, 2, 0, 0, 0]].concat());
    let png = [&b"\x89PNG\r\n\x1a\n"[..], &head, &chunk(b"IDAT", &[]), &chunk(b"IEND", &[])].concat();
    fs::write(fixture.path("huge.png"), png).unwrap();
    let rows = fs::read_to_string(fixture.path("train.jsonl")).unwrap();
    fs::write(fixture.path("train.jsonl"), rows + "{\"image\": \"huge.png\", \"caption\": \"much\"}\n").unwrap();
    let refused = train(&fixture.config("run", &[&encoder(&fixture)]), &[]);
    let message = said(&refused);
    assert_eq!(refused.status.code(), Some(3), "{message}");
    assert!(message.contains("train.jsonl:25") && message.contains("40000 x 40000 pixels"), "{message}");
}
