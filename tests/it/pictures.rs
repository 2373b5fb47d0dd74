//! Rows with images from files to a trained model and its answers. Token ids and pixel values are those of the
//! processors of Transformers (`scripts/golden/picture_chats.py`).
use crate::run::fixture::{Fixture, said, train, tunesmith};
use crate::run::resume::straight_equals_stopped_on;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tunesmith::Kind;
use tunesmith::config::arch::Arch;
use tunesmith::config::{self, BadImages, Config, Contamination, Dedupe};
use tunesmith::data::batch::IGNORE;
use tunesmith::data::{Dataset, Silent, load};
use tunesmith::hub::{NoProgress, Part};
use tunesmith::model::weights::WeightFiles;
use tunesmith::train::vision::{Seer, Sight};

pub fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

pub fn picture(name: &str) -> String {
    golden("pixels").join(name).display().to_string()
}

pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// The folder of a golden model with a tokenizer, a template and an image processor.
fn model(name: &str, to: &Path) {
    let _ = fs::remove_dir_all(to);
    copy(&golden(&format!("vision/{}/model", name.trim_end_matches("_pan_and_scan"))), to);
    copy(&golden(&format!("picture_chats/{name}")), to);
}

fn chats(name: &str) -> Vec<Value> {
    let text = fs::read(golden(&format!("picture_chats/{name}/chats.json"))).unwrap();
    serde_json::from_slice::<Value>(&text).unwrap()["rows"].as_array().unwrap().clone()
}

pub fn write_rows(path: &Path, rows: impl IntoIterator<Item = Value>) {
    let lines: Vec<String> = rows.into_iter().map(|row| row.to_string()).collect();
    fs::write(path, lines.join("\n") + "\n").unwrap();
}

/// The data of a model folder and a file of rows beside the golden pictures.
pub fn dataset(folder: &Path, rows: &Path, change: impl Fn(&mut Config)) -> Result<Dataset, tunesmith::Error> {
    let mut config = Config::default();
    config.data.train_path = vec![rows.to_owned()];
    config.data.image_dir = Some(golden("pixels"));
    config.data.use_cache = false;
    change(&mut config);
    let arch = Arch::from_dir(folder).unwrap();
    let seer = Seer { dir: folder, tokenizer: folder, hidden_size: arch.hidden_size };
    let sight = Sight::of_rows(&config, seer, Part::Whole, &NoProgress)?;
    load(&config, folder, arch.text_ids(), &Silent, sight.as_ref().map(Sight::pictures).as_ref())
}

/// Models whose rows are held to those of their processors.
pub const PROCESSED: [&str; 17] = [
    "gemma3_pan_and_scan",
    "llava",
    "gemma3",
    "smolvlm",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "internvl",
    "paligemma",
    "llava_onevision",
    "mistral3",
    "ministral3",
    "pixtral",
    "gemma4",
    "gemma4_31b",
];

#[test]
fn ids_and_pixels_are_those_of_the_processors() {
    for name in PROCESSED {
        let root = tempfile::tempdir().unwrap();
        let (folder, rows) = (root.path().join("model"), root.path().join("rows.jsonl"));
        model(name, &folder);
        let chats = chats(name);
        write_rows(&rows, chats.iter().map(|chat| json!({"messages": chat["messages"], "images": chat["images"]})));
        let image_token = config::vision::VisionArch::of_model(&folder, 32).unwrap().chat.unwrap().token;
        for loss_on in [config::LossOn::Assistant, config::LossOn::All] {
            let data = dataset(&folder, &rows, |config| {
                config.data.loss_on = loss_on;
                config.data.chat_template = (name == "paligemma").then_some(config::BuiltinTemplate::Paligemma);
            });
            let data = data.unwrap();
            let batch = data.train.batch(0..chats.len()).unwrap();
            let mut images = batch.images.iter();
            for (number, chat) in chats.iter().enumerate() {
                let about = format!("{name}: row {number}");
                let wanted: Vec<u32> =
                    chat["input_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
                let sequence = batch.cu_seqlens[number]..batch.cu_seqlens[number + 1];
                assert_eq!(batch.tokens[sequence.clone()], wanted[..], "{about}");
                let predicts_rows = |at: usize| at + 1 < sequence.end && batch.tokens[at + 1] == image_token;
                let labelled = sequence.clone().filter(|&at| batch.targets[at] != IGNORE);
                assert!(labelled.clone().all(|at| !predicts_rows(at)), "{about}: a picture's row is learned");
                assert!(labelled.count() > 0, "{about}");
                let shown = images.by_ref().take(chat["images"].as_array().unwrap().len());
                let bytes: Vec<u8> =
                    shown.flat_map(|image| &image.pixels.patches).flat_map(|value| value.to_le_bytes()).collect();
                if let Some(crc) = chat["pixels"].as_u64() {
                    assert_eq!(u64::from(crc32fast::hash(&bytes)), crc, "{about}");
                }
            }
        }
    }
}

/// A fixture whose model sees pictures, with rows that show them and rows of text.
pub fn seeing(name: &str) -> Fixture {
    let fixture = Fixture::new();
    model(name, &fixture.path("model"));
    let row = |number: usize| {
        let file = ["rgb.png", "wide.png", "tall.png", "rgba.png", "rotated.png"][number % 5];
        let answer = ["a cat", "the sea", "a tree"][number % 3];
        if number % 4 == 3 {
            json!({"messages": [{"role": "user", "content": "no picture"}, {"role": "assistant", "content": answer}]})
        } else {
            json!({"image": picture(file), "question": "what is it?", "answer": answer})
        }
    };
    write_rows(&fixture.path("train.jsonl"), (0..24).map(row));
    write_rows(&fixture.path("val.jsonl"), (24..30).map(row));
    fixture
}

/// A pair of the fixture's model and an encoder, with captions.
pub fn paired() -> Fixture {
    paired_with("siglip", &json!({"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}}))
}

/// A pair of the fixture's model and a golden encoder with this image processor, with captions.
pub fn paired_with(name: &str, settings: &Value) -> Fixture {
    let fixture = Fixture::new();
    let encoder = fixture.path("encoder");
    copy(&golden(&format!("vision/{name}/model")), &encoder);
    fs::write(encoder.join("preprocessor_config.json"), settings.to_string()).unwrap();
    fs::copy(golden("pixels/rgb.png"), fixture.path("a.png")).unwrap();
    fs::copy(golden("pixels/wide.png"), fixture.path("b.png")).unwrap();
    let row = |number: usize| match number % 3 {
        0 => json!({"image": "a.png", "caption": "a cat"}),
        1 => json!({"image": {"path": "b.png", "bytes": null}, "alt_text": ["the sea", "the blue sea"]}),
        _ => json!({"image": "b.png", "text": "waves"}),
    };
    write_rows(&fixture.path("train.jsonl"), (0..24).map(row));
    write_rows(&fixture.path("val.jsonl"), (24..30).map(row));
    fixture
}

pub fn encoder(fixture: &Fixture) -> String {
    format!("vision.encoder: {}", fixture.path("encoder").display())
}

/// Trains, scores, and answers about a picture; returns what `infer` printed.
pub fn whole(fixture: &Fixture, lines: &[&str]) -> String {
    let config = fixture
        .config("run", &[&["train.max_steps: 3", "train.eval_strategy: steps", "train.eval_steps: 3"], lines].concat());
    let done = train(&config, &[]);
    assert!(done.status.success(), "{}", said(&done));
    assert!(said(&done).contains("--image "), "{}", said(&done));
    let config = config.to_str().unwrap();
    let scored = tunesmith(&["eval", config]).output().unwrap();
    assert!(scored.status.success(), "{}", said(&scored));
    let mut args = vec!["infer", config, "--image"];
    let file = picture("rgb.png");
    args.push(&file);
    if !lines.iter().any(|line| line.starts_with("vision.encoder")) {
        args.extend(["--prompt", "what is it?"]);
    }
    let answered = tunesmith(&args).output().unwrap();
    assert!(answered.status.success(), "{}", said(&answered));
    String::from_utf8(answered.stdout).unwrap()
}

#[test]
fn models_that_see_train_and_answer_from_the_command_line() {
    for name in [
        "llava",
        "gemma3",
        "smolvlm",
        "qwen2_vl",
        "qwen3_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "internvl",
        "llava_onevision",
        "mistral3",
        "pixtral",
        "gemma4",
        "gemma4_31b",
    ] {
        whole(&seeing(name), &[]);
    }
    // Its prompts see both ways where the encoder is loaded: a merge is compared on rows that do not.
    let paligemma = seeing("paligemma");
    whole(&paligemma, &["data.chat_template: paligemma"]);
    let [config, merged] = ["run.yaml", "merged"].map(|name| paligemma.path(name).display().to_string());
    let done = tunesmith(&["merge", &config, "--output", &merged, "--dtype", "float32"]).output().unwrap();
    assert!(done.status.success(), "{}", said(&done));
    let naflex = json!({"image_processor_type": "Siglip2ImageProcessor", "patch_size": 8, "max_num_patches": 20});
    let naflex = paired_with("naflex", &naflex);
    whole(&naflex, &[&encoder(&naflex), "data.packing: true"]);
    // Fewer pixels take fewer tokens.
    let qwen = seeing("qwen2_5_vl");
    whole(&qwen, &["data.packing: true", "model.max_seq_len: 96", "train.gradient_checkpointing: true"]);
    let tokens = |words: &[&str]| {
        let config = qwen.path("run.yaml").display().to_string();
        let done = tunesmith(&[&["data", &config, "--json"], words].concat()).output().unwrap();
        assert!(done.status.success(), "{}", said(&done));
        let json: Value = serde_json::from_slice(&done.stdout).unwrap();
        json["pictures"]["train"]["tokens"].clone()
    };
    assert_eq!(tokens(&[]), json!([2, 8]));
    assert_eq!(tokens(&["vision.min_pixels=256", "vision.max_pixels=1024"]), json!([2, 5]));
    let fixture = paired();
    whole(
        &fixture,
        &[
            &encoder(&fixture),
            "vision.connector: mlp",
            "vision.connector_dropout: 0.1",
            "train.learning_rates: {\"multi_modal_projector.*\": 0.003}",
        ],
    );
}

#[test]
fn every_part_can_be_trained_or_kept() {
    let trained = |lines: &[&str]| {
        let fixture = paired();
        let config = fixture.config("run", &[&["train.max_steps: 2", &encoder(&fixture)], lines].concat());
        let done = train(&config, &[]);
        assert!(done.status.success(), "{lines:?}: {}", said(&done));
        let out = fixture.path("out");
        let folder = if out.join("adapter").is_dir() { out.join("adapter") } else { out.join("model") };
        let bytes: Vec<u8> = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|end| end == "safetensors"))
            .flat_map(|path| {
                let bytes = fs::read(path).unwrap();
                let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
                bytes[8..8 + length].to_vec()
            })
            .collect();
        let header = String::from_utf8(bytes).unwrap();
        ["lora_A", "multi_modal_projector", "vision_tower"].map(|part| header.contains(part))
    };
    assert_eq!(trained(&[]), [true, true, false], "the connector of a pair, by default");
    assert_eq!(trained(&["tuning.freeze_connector: true"]), [true, false, false]);
    assert_eq!(trained(&["tuning.freeze_language: true"]), [false, true, false]);
    assert_eq!(trained(&["tuning.freeze_vision: false"]), [true, true, true]);
    assert_eq!(trained(&["tuning.vision_unfreeze_layers: 1"]), [true, true, true]);
    assert_eq!(trained(&["tuning.vision_target_modules: [\"q_proj\"]"]), [true, true, true]);
    assert_eq!(trained(&["tuning.vision_target_modules: [\"all-linear\"]"]), [true, true, true]);
}

#[test]
fn what_trains_nothing_or_names_nothing_of_the_encoder_is_refused() {
    let fixture = paired();
    let config = fixture.config("run", &["train.max_steps: 1", &encoder(&fixture)]);
    let cases: [(&[&str], &str); 3] = [
        (&["tuning.freeze_language=true", "tuning.freeze_connector=true"], "nothing is trained"),
        (&["tuning.vision_unfreeze_layers=99"], "tuning.vision_unfreeze_layers: 99, and the encoder has"),
        (&["tuning.vision_target_modules=[query]"], "no linear module query"),
    ];
    for (words, message) in cases {
        let refused = train(&config, words);
        assert!(refused.status.code() == Some(2) && said(&refused).contains(message), "{}", said(&refused));
    }
    let file = fixture.path("encoder/config.json");
    let mut changed: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    changed["attention_dropout"] = json!(0.5);
    fs::write(&file, changed.to_string()).unwrap();
    let refused = train(&config, &[]);
    assert!(refused.status.code() == Some(4) && said(&refused).contains("attention_dropout"), "{}", said(&refused));
}

#[test]
fn an_adapter_of_the_connector_alone_is_evaluated_merged_and_exported() {
    let fixture = paired();
    let lines = ["train.max_steps: 1", "tuning.freeze_language: true", &encoder(&fixture)];
    let config = fixture.config("run", &lines).display().to_string();
    let done = train(Path::new(&config), &[]);
    assert!(done.status.success(), "{}", said(&done));
    let to = |name: &str| fixture.path(name).display().to_string();
    let commands = [
        vec!["eval".to_owned(), config.clone()],
        vec!["merge".to_owned(), config.clone(), "--output".to_owned(), to("merged")],
        vec!["export".to_owned(), config.clone(), "--peft".to_owned(), "--output".to_owned(), to("peft")],
    ];
    for words in commands {
        let done = tunesmith(&words.iter().map(String::as_str).collect::<Vec<_>>()).output().unwrap();
        assert!(done.status.success(), "{words:?}: {}", said(&done));
    }
    let card = std::fs::read_to_string(fixture.path("peft/README.md")).unwrap();
    assert!(card.contains("from load_vision import load") && card.contains("pipeline_tag: image-t"), "{card}");
    // llama.cpp has no pairs: the message says so, and what to write instead.
    let file = to("m.gguf");
    let own = ["export", &config, "--gguf", "f32", "--pre-tokenizer", "gpt-2", "--output", &file];
    let refused = tunesmith(&own).output().unwrap();
    let wanted = "--gguf: llama.cpp cannot see images with a text model paired with an image encoder (vision.encoder)";
    let text = said(&refused);
    assert!(refused.status.code() == Some(2) && text.contains(wanted) && text.contains("--mmproj none"), "{text}");
    let alone = tunesmith(&[&own[..], &["--mmproj", "none"]].concat()).output().unwrap();
    assert!(alone.status.success(), "{}", said(&alone));
}

#[test]
fn a_stopped_run_with_pictures_ends_with_the_same_bits() {
    let fixture = seeing("smolvlm");
    let lines = [
        "tuning.freeze_connector: false",
        "tuning.vision_unfreeze_layers: 1",
        "data.packing: true",
        "model.max_seq_len: 96",
    ];
    straight_equals_stopped_on(&fixture, &lines, &[3, 8]);
}

#[test]
fn text_alone_does_not_load_the_encoder_and_trains_as_before() {
    let fixture = seeing("llava");
    let rows = (0..24).map(|number| {
        let answer = ["a cat", "no"][number % 2];
        json!({"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": answer}]})
    });
    write_rows(&fixture.path("train.jsonl"), rows);
    let run = |out: &str, words: &[&str]| {
        let config = fixture.config(out, &["train.max_steps: 3", "data.val_path: UNSET"]);
        let out = fixture.path(out);
        let output = format!("train.output_dir={}", out.display());
        let done = train(&config, &[&[output.as_str()], words].concat());
        assert!(done.status.success(), "{}", said(&done));
        fs::read(out.join("adapter/adapter_model.safetensors")).unwrap()
    };
    assert_eq!(run("one", &[]), run("two", &["vision.load=false"]));
}

/// The adapter's bytes and the losses of a run; its cache is `cache` below the fixture.
pub fn kept(fixture: &Fixture, out: &str, cache: &str, lines: &[&str]) -> (Vec<u8>, String, String) {
    let cache = format!("data.cache_dir: {}", fixture.path(cache).display());
    let own = ["train.num_train_epochs: 2", "train.eval_strategy: epoch", "gen.num_samples: 2", &cache];
    let config = fixture.config(out, &[&own, lines].concat());
    let done = train(&config, &[&format!("train.output_dir={}", fixture.path(out).display())]);
    assert!(done.status.success(), "{lines:?}: {}", said(&done));
    let metrics = fs::read_to_string(fixture.path(out).join("metrics.jsonl")).unwrap();
    let losses: Vec<String> = metrics
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|line| format!("{} {} {}", line["step"], line["loss"], line["eval_loss"]))
        .collect();
    let adapter = fs::read(fixture.path(out).join("adapter/adapter_model.safetensors")).unwrap();
    (adapter, losses.join("\n"), said(&done))
}

#[test]
fn kept_features_train_to_the_same_bits_as_the_encoder_that_makes_them() {
    let pair = paired();
    let encoder = encoder(&pair);
    let mlp = [&encoder, "vision.connector: mlp", "vision.connector_dropout: 0.1"];
    for (fixture, lines) in [
        // What is kept: the encoder's rows as the connector is trained, or the connector's.
        (&pair, &mlp[..]),
        (&seeing("smolvlm"), &["data.packing: true", "model.max_seq_len: 96"]),
        (&seeing("gemma3"), &["tuning.freeze_connector: false"]),
        (&seeing("llava"), &["tuning.lora.lora_dropout: 0.1"]),
        (&seeing("qwen2_5_vl"), &[]),
        (&seeing("qwen3_vl"), &[]),
        (&seeing("llava_onevision"), &["tuning.freeze_connector: false"]),
        (&seeing("llava_onevision"), &["data.packing: true", "model.max_seq_len: 96"]),
    ] {
        let run = |out: &str, cache: &str, more: &str| kept(fixture, out, cache, &[lines, &[more]].concat());
        let each = run("each", "none", "vision.cache_features: false");
        assert!(!each.2.contains("features of"), "{}", each.2);
        assert!(!fixture.path("none/features").exists());
        let once = run("once", "cache", "vision.feature_cache_size: 1GiB");
        assert!(once.2.contains("is not loaded"), "{}", once.2);
        assert_eq!(once.1, each.1, "{lines:?}");
        assert!(once.0 == each.0, "{lines:?}");
        let again = run("again", "cache", "vision.cache_features: true");
        assert!(!again.2.contains("is not loaded") && again.0 == once.0, "nothing is computed again: {}", again.2);
    }
}

#[test]
fn features_are_computed_ahead_of_a_run_and_predictions_know_them() {
    let fixture = paired();
    let cache = format!("data.cache_dir: {}", fixture.path("cache").display());
    let config = fixture.config("run", &["train.num_train_epochs: 2", &encoder(&fixture), &cache]);
    let word = config.to_str().unwrap();
    let command = |args: &[&str]| {
        let done = tunesmith(args).output().unwrap();
        assert!(done.status.success(), "{args:?}: {}", said(&done));
        said(&done)
    };
    let checked = command(&["memory-check", word]);
    assert!(!fixture.path("cache/features").exists(), "a prediction computes nothing: {checked}");
    let encoded = command(&["encode", word]);
    assert!(encoded.contains("features of 2 images, 2 of them computed now"), "{encoded}");
    let encoded = command(&["encode", word]);
    assert!(encoded.contains("features of 2 images, 0 of them computed now"), "{encoded}");
    // Another encoder's are others; room is asked for; a trained encoder has none.
    let refused = |args: &[&str], code: i32, part: &str| {
        let done = tunesmith(args).output().unwrap();
        assert!(done.status.code() == Some(code) && said(&done).contains(part), "{args:?}: {}", said(&done));
    };
    refused(&["encode", word, "vision.feature_cache_size=1KiB", "vision.backend=pil"], 6, "feature_cache_size");
    refused(&["encode", word, "tuning.vision_unfreeze_layers=1"], 2, "encoder is trained");
    let text = Fixture::new();
    refused(&["encode", text.config("run", &[]).to_str().unwrap()], 2, "show no images");
    // What is damaged is computed again, and the rest is used.
    let folder = fs::read_dir(fixture.path("cache/features")).unwrap().next().unwrap().unwrap().path();
    let file = fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&file).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[header + 1] ^= 1;
    fs::write(&file, &bytes).unwrap();
    let encoded = command(&["encode", word]);
    assert!(encoded.contains("damaged features of 1 image: these features are computed again"), "{encoded}");
    assert!(encoded.contains("features of 2 images, 1 of them computed now"), "{encoded}");
    let run = |out: &str| {
        let done = train(&config, &[&format!("train.output_dir={}", fixture.path(out).display())]);
        assert!(done.status.success(), "{}", said(&done));
        (said(&done), fs::read(fixture.path(out).join("adapter/adapter_model.safetensors")).unwrap())
    };
    let (text, mended) = run("mended");
    assert!(!text.contains("computed again"), "{text}");
    for entry in fs::read_dir(&folder).unwrap() {
        let file = entry.unwrap().path();
        let bytes = fs::read(&file).unwrap();
        fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    }
    let (text, cut) = run("cut");
    assert!(text.contains("3 files that cannot be read: these features are computed again") && cut == mended, "{text}");
    fs::remove_dir_all(&folder).unwrap();
    let (text, fresh) = run("fresh");
    assert!(!text.contains("computed again") && fresh == mended, "{text}");
}

#[test]
fn a_picture_that_cannot_be_read_is_refused_or_left_out() {
    let root = tempfile::tempdir().unwrap();
    let (folder, rows) = (root.path().join("model"), root.path().join("rows.jsonl"));
    model("llava", &folder);
    fs::write(root.path().join("broken.png"), "no image").unwrap();
    let broken = root.path().join("broken.png").display().to_string();
    let row = |image: &str| json!({"image": image, "question": "what?", "answer": "a cat"});
    write_rows(&rows, [row("rgb.png"), row(&broken)]);
    let refused = dataset(&folder, &rows, |_| ()).unwrap_err();
    assert_eq!(refused.kind(), Kind::Data);
    assert!(refused.message().contains("rows.jsonl:2") && refused.message().contains("broken.png"), "{refused}");
    let data = dataset(&folder, &rows, |config| config.data.bad_images = config::BadImages::Skip).unwrap();
    assert_eq!((data.train.len(), data.report.train.bad_images.rows), (1, 1));
    assert!(data.report.warnings.iter().any(|warning| warning.contains("image")), "{:?}", data.report.warnings);
    // More places than pictures, and a text that contains what stands for a picture.
    for (row, part) in [
        (
            json!({"images": ["rgb.png"], "messages": [{"role": "user", "content": "<image> or <image>"}, {"role": "assistant", "content": "a"}]}),
            "1 image",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image", "path": "rgb.png"}]}, {"role": "assistant", "content": "<image>"}]}),
            "places",
        ),
    ] {
        write_rows(&rows, [row]);
        let refused = dataset(&folder, &rows, |_| ()).unwrap_err();
        assert!(refused.message().contains(part), "{refused}");
    }
}

#[test]
fn the_data_report_tells_copies_leaks_and_answers_that_say_little() {
    let fixture = paired();
    fs::copy(fixture.path("a.png"), fixture.path("c.png")).unwrap();
    let row = |number: usize| match number % 12 {
        0 => json!({"image": "c.png", "caption": "Waves at sea."}),
        1 => json!({"image": "b.png", "caption": "one  cat"}),
        _ => json!({"image": "a.png", "caption": "one cat"}),
    };
    write_rows(&fixture.path("train.jsonl"), (0..24).map(row));
    write_rows(&fixture.path("val.jsonl"), [json!({"image": "c.png", "caption": "a cat"})]);
    let config = fixture.config("run", &[&encoder(&fixture)]);
    let args = ["data", config.to_str().unwrap()];
    let text = String::from_utf8(tunesmith(&args).output().unwrap().stdout).unwrap();
    for line in [
        "images, train: 3 files, 1 of them copies, 45 x 33 to 90 x 41 pixels, 16 tokens each",
        "answers about them, train: 24, 2 different; 2 to 3 words each (2.1 on average), 5 different, 0 of these once",
        "warning: train: 92 % of the answers about images are \"one cat\"",
        "warning: validation shows 1 image of the training rows",
    ] {
        assert!(text.contains(line), "{line:?} is not in\n{text}");
    }
    let json = tunesmith(&[args[0], args[1], "--json"]).output().unwrap();
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["pictures"]["train"]["copies"], 1);
    assert_eq!(json["pictures"]["train"]["answers"]["near_duplicates"]["answers"], 0);
}

#[test]
fn the_data_report_tells_captions_that_are_nearly_the_same() {
    let fixture = paired();
    let words = ["red", "green", "blue", "black", "white", "brown"];
    let caption = |number: usize| match number % 6 {
        5 => "A small brown dog, in the grass.".to_owned(),
        number => format!("{} things {number} stand on shelf {number}", words[number]),
    };
    let row = |caption: String| json!({"image": "a.png", "caption": caption});
    let near = ["a small brown dog in the grass", "a small brown dog in the green grass"].map(String::from);
    write_rows(&fixture.path("train.jsonl"), (0..12).map(caption).chain(near).map(row));
    let config = fixture.config("run", &[&encoder(&fixture)]);
    let args = ["data", config.to_str().unwrap()];
    let text = String::from_utf8(tunesmith(&args).output().unwrap().stdout).unwrap();
    for line in [
        "near-duplicates among them, train: 2 of 8 different ones share at least 80 % of their words with an earlier one, in 1 group",
        "(first: \"A small brown dog, in the grass.\" and \"a small brown dog in the grass\")",
    ] {
        assert!(text.contains(line), "{line:?} is not in\n{text}");
    }
    assert!(!text.contains("near-duplicates among them, validation"), "{text}");
}

#[test]
fn a_column_of_pictures_is_read_from_a_parquet_file() {
    let fixture = paired();
    fs::copy(golden("columns/pictures.parquet"), fixture.path("rows.parquet")).unwrap();
    let rows = format!("data.train_path: {}", fixture.path("rows.parquet").display());
    let cache = format!("data.cache_dir: {}", fixture.path("cache").display());
    let config = fixture.config("run", &["train.num_train_epochs: 2", &rows, &cache, &encoder(&fixture)]);
    let done = tunesmith(&["data", config.to_str().unwrap()]).output().unwrap();
    assert!(said(&done).contains("images, train: 3 files, 45 x 33 pixels"), "{}", said(&done));
    let done = train(&config, &[]);
    assert!(done.status.success(), "{}", said(&done));
    assert_eq!(fs::read_dir(fixture.path("cache/pictures")).unwrap().count(), 3);
}

#[test]
fn a_gguf_file_comes_with_a_second_one_for_the_trained_connector() {
    let fixture = seeing("llava");
    let out = fixture.path("out.gguf");
    let export = |words: &[&str]| {
        let out = out.display().to_string();
        let own = ["export", "--gguf", "f32", "--pre-tokenizer", "gpt-2", "--overwrite", "--output", &out];
        let done = tunesmith(&[&own, words].concat()).output().unwrap();
        assert!(done.status.success() && said(&done).contains("--mmproj"), "{}", said(&done));
        fs::read(out.replace("out.gguf", "mmproj-out.gguf")).unwrap()
    };
    let model = fixture.path("model").display().to_string();
    let base = export(&["--base", &model]);
    let config = fixture.config("run", &["train.max_steps: 1", "tuning.freeze_connector: false"]);
    let trained = train(&config, &[]);
    assert!(trained.status.success(), "{}", said(&trained));
    assert_ne!(export(&[config.to_str().unwrap()]), base, "training shows");
}

/// What ends a line is no module of PEFT: it is trained with the whole model, and an adapter's merge keeps it.
#[test]
fn what_ends_a_line_is_trained_with_the_whole_model() {
    let fixture = seeing("llava_onevision");
    let names = ["image_newline", "multi_modal_projector.linear_1.weight"];
    let read = |folder: &str| {
        let file = WeightFiles::open_file(&fixture.path(folder).join("model.safetensors")).unwrap();
        names.map(|name| file.read(name).unwrap_or_else(|error| panic!("{folder}: {error}")).1)
    };
    let base = read("model");
    let run = |mode: &str| {
        let out = fixture.path(mode).display().to_string();
        let lines = ["train.max_steps: 2", &format!("tuning.mode: {mode}"), "tuning.freeze_connector: false"];
        let config = fixture.config(&format!("run_{mode}"), &lines);
        let done = train(&config, &[&format!("train.output_dir={out}")]);
        assert!(done.status.success(), "{mode}: {}", said(&done));
        config.display().to_string()
    };
    run("full");
    let full = read("full/model");
    assert!(full[0] != base[0] && full[1] != base[1], "both are trained");
    let config = run("lora");
    let (out, merged) = (fixture.path("lora"), fixture.path("merged").display().to_string());
    let out = format!("train.output_dir={}", out.display());
    let done = tunesmith(&["merge", &config, &out, "--dtype", "float32", "--output", &merged]).output().unwrap();
    assert!(done.status.success(), "{}", said(&done));
    let merged = read("merged");
    assert!(merged[0] == base[0] && merged[1] != base[1], "the connector alone is in the adapter");
}

#[test]
fn a_model_that_sees_nothing_says_so() {
    let fixture = Fixture::new();
    write_rows(&fixture.path("train.jsonl"), [json!({"image": picture("rgb.png"), "question": "q", "answer": "a"})]);
    let config = fixture.config("run", &[]);
    let refused = train(&config, &[]);
    assert_eq!(refused.status.code(), Some(4), "{}", said(&refused));
    assert!(said(&refused).contains("vision.encoder"), "{}", said(&refused));
    let refused = train(&config, &["vision.load=false"]);
    assert_eq!(refused.status.code(), Some(3), "{}", said(&refused));
    assert!(said(&refused).contains("the model sees none"), "{}", said(&refused));
}

#[test]
fn rows_never_lose_their_images_in_silence() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &[]);
    let plain = json!({"text": "plain text", "input_ids": null});
    for (row, format, form) in [
        (json!({"images": [picture("rgb.png")], "input_ids": [5, 6, 7]}), "auto", "rows {input_ids} are text only"),
        (json!({"images": [picture("rgb.png")], "input_ids": [5, 6, 7]}), "tokenized", "{messages, images}"),
        (
            json!({"images": [picture("rgb.png")], "prompt": "p", "completion": "c"}),
            "auto",
            "rows {prompt, completion}",
        ),
        (json!({"images": [picture("rgb.png")], "text": "t"}), "auto", "data.format: text"),
    ] {
        write_rows(&fixture.path("train.jsonl"), [row.clone()]);
        let refused = train(&config, &["vision.load=false", &format!("data.format={format}")]);
        assert_eq!(refused.status.code(), Some(3), "{row}: {}", said(&refused));
        for part in ["train.jsonl:1: the row shows images in \"images\"", form] {
            assert!(said(&refused).contains(part), "{row}: {} lacks {part}", said(&refused));
        }
    }
    // A row far behind those that decide the file's form.
    let late = json!({"image": picture("rgb.png"), "text": "t"});
    let rows: Vec<_> = std::iter::repeat_n(plain, 70).chain([late]).collect();
    write_rows(&fixture.path("train.jsonl"), rows);
    let refused = train(&config, &["vision.load=false"]);
    assert_eq!(refused.status.code(), Some(3), "{}", said(&refused));
    assert!(said(&refused).contains("train.jsonl:71: the row shows images"), "{}", said(&refused));
    let asked = train(&config, &["vision.load=false", "data.format=text", "data.val_path=[]"]);
    assert!(asked.status.success(), "{}", said(&asked));
}

/// Sizes decide how many tokens an image takes, and a damaged file leaves its row out: cached tokens are of the files that were there.
#[test]
fn a_replaced_or_repaired_image_is_tokenized_again() {
    let root = tempfile::tempdir().unwrap();
    let (folder, rows, images) =
        (root.path().join("model"), root.path().join("rows.jsonl"), root.path().join("images"));
    model("qwen2_5_vl", &folder);
    fs::create_dir(&images).unwrap();
    let put = |name: &str, of: &str| fs::copy(golden("pixels").join(of), images.join(name)).unwrap();
    put("one.png", "rgb.png");
    fs::write(images.join("two.png"), "no image").unwrap();
    let row = |name: &str| json!({"image": name, "question": "q", "answer": "a"});
    write_rows(&rows, [row("one.png"), row("two.png")]);
    let read = || {
        let data = dataset(&folder, &rows, |config| {
            config.data.image_dir = Some(images.clone());
            config.data.use_cache = true;
            config.data.cache_dir = Some(root.path().join("cache"));
            config.data.bad_images = BadImages::Skip;
        });
        let data = data.unwrap();
        (data.report.train.kept, data.report.from_cache, data.train.length(0))
    };
    let (kept, _, length) = read();
    assert_eq!(kept, 1, "a damaged image");
    assert_eq!(read(), (1, false, length), "and it is looked at again");
    put("two.png", "rgb.png");
    assert_eq!(read(), (2, false, length), "repaired");
    assert_eq!(read(), (2, true, length));
    put("one.png", "wide.png");
    let (kept, from_cache, now) = read();
    assert!(kept == 2 && !from_cache && now != length, "replaced: {now} tokens as before");
    assert_eq!(read(), (2, true, now));
}

#[test]
fn the_same_words_about_another_image_are_another_row() {
    let root = tempfile::tempdir().unwrap();
    let [folder, rows, held_out] = ["model", "rows.jsonl", "held_out.jsonl"].map(|name| root.path().join(name));
    model("llava", &folder);
    let answer = "a small brown cat sits on the old mat in the house near the open door";
    let row = |name: &str| json!({"image": name, "question": "What do you see?", "answer": answer});
    write_rows(&rows, ["rgb.png", "wide.png", "tall.png", "rgb.png"].map(row));
    for dedupe in [Dedupe::Exact, Dedupe::Minhash] {
        let report = dataset(&folder, &rows, |config| config.data.dedupe = dedupe).unwrap().report.train;
        assert_eq!(report.duplicates.rows + report.near_duplicates.rows, 1, "{dedupe:?}");
    }
    for (name, contaminated) in [("rgba.png", 0), ("wide.png", 1)] {
        write_rows(&held_out, [row(name)]);
        let data = dataset(&folder, &rows, |config| {
            config.data.val_path = vec![held_out.clone()];
            config.data.contamination = Contamination::Drop;
        });
        assert_eq!(data.unwrap().report.train.contaminated.rows, contaminated, "{name}");
    }
}
