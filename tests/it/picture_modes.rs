//! Every model that reads images: trained in every mode and with packing, and asked about an image, as the table in
//! docs/guides/images.md promises.
use crate::pictures::{golden, picture, seeing, write_rows};
use crate::run::fixture::{Fixture, said, train, tunesmith};
use crate::vision::across::captioner;
use serde_json::{Value, json};
use std::fs;
use std::io::Write as _;
use std::process::Stdio;

/// A mode of training, and its settings.
pub type Mode = (&'static str, &'static [&'static str]);

/// The modes in which each of [`SEEING`] is trained.
pub const MODES: [Mode; 3] = [
    ("LoRA", &["tuning.mode: lora", "tuning.freeze_connector: false"]),
    ("QLoRA", &["tuning.mode: qlora", "model.quantization: nf4"]),
    ("full", &["tuning.mode: full", "tuning.freeze_vision: false", "tuning.freeze_connector: false"]),
];

/// The models that are trained in each mode, packed, and asked about an image.
pub const SEEING: [&str; 15] = [
    "gemma3",
    "gemma4",
    "idefics3",
    "internvl",
    "llava",
    "llava_onevision",
    "mistral3",
    "paligemma",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "smolvlm",
    CAPTIONER,
];

/// Whose rows are captions.
const CAPTIONER: &str = "vision-encoder-decoder";

/// A fixture with rows of one image each. Idefics3 has the golden model of SmolVLM, which is the same under other names.
fn fixture(name: &str) -> Fixture {
    if name == CAPTIONER {
        let fixture = captioner("across_vit");
        let rows = ["rgb.png", "wide.png", "tall.png", "rgba.png"].into_iter().enumerate().map(|(number, file)| {
            let caption = ["a cat", "the sea"][number % 2];
            json!({"image": golden("pixels").join(file), "caption": caption})
        });
        let rows: Vec<Value> = rows.collect();
        write_rows(&fixture.path("train.jsonl"), rows[..2].to_vec());
        write_rows(&fixture.path("val.jsonl"), rows[2..].to_vec());
        return fixture;
    }
    let fixture = seeing(if name == "idefics3" { "smolvlm" } else { name });
    if name == "idefics3" {
        for (file, names) in [
            (
                "config.json",
                [("\"smolvlm\"", "\"idefics3\""), ("smolvlm_vision", "idefics3_vision"), ("SmolVLMFor", "Idefics3For")],
            ),
            ("preprocessor_config.json", [("SmolVLMImage", "Idefics3Image"); 3]),
        ] {
            let path = fixture.path("model").join(file);
            let text =
                names.into_iter().fold(fs::read_to_string(&path).unwrap(), |text, (old, new)| text.replace(old, new));
            fs::write(path, text).unwrap();
        }
    }
    let row = |number: usize| {
        let file = ["rgb.png", "wide.png", "tall.png", "rgba.png"][number % 4];
        let answer = ["a cat", "the sea"][number % 2];
        let asked = json!([{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": answer}]);
        json!({"images": [golden("pixels").join(file)], "messages": asked})
    };
    write_rows(&fixture.path("train.jsonl"), (0..2).map(row));
    write_rows(&fixture.path("val.jsonl"), (2..4).map(row));
    fixture
}

/// The loss of each step.
fn losses(fixture: &Fixture) -> Vec<f64> {
    let text = fs::read_to_string(fixture.path("out/metrics.jsonl")).unwrap();
    let steps = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64());
    steps.collect()
}

#[test]
fn every_model_trains_in_every_mode_packed_and_answers() {
    for name in SEEING {
        let fixture = fixture(name);
        let template = if name == "paligemma" { "paligemma" } else { "UNSET" };
        let lines = [
            &format!("data.chat_template: {template}"),
            // The captioner has 128 positions.
            &format!("model.max_seq_len: {}", if name == CAPTIONER { 128 } else { 256 }),
            "train.batch_size: 2",
            "train.grad_accum: 1",
            "train.max_steps: 12",
            "train.warmup_steps: 1",
            "train.learning_rate: 0.02",
            "train.logging_steps: 1",
            "data.shuffle: false",
        ];
        for (mode, settings) in MODES {
            let config = fixture.config("run", &[&lines[..], settings].concat());
            let done = train(&config, &["--overwrite"]);
            assert!(done.status.success(), "{name}, {mode}: {}", said(&done));
            let found = losses(&fixture);
            assert!(found.len() == 12 && found.iter().all(|loss| loss.is_finite()), "{name}, {mode}: {found:?}");
            assert!(found[11] < 0.9 * found[0], "{name}, {mode} learns nothing: {found:?}");
            let config = config.display().to_string();
            let file = picture("rgb.png");
            let asked: &[&str] = if name == CAPTIONER { &[] } else { &["--prompt", "what is it?"] };
            let asked = tunesmith(&[&["infer", &config, "--image", &file], asked].concat()).output().unwrap();
            assert!(asked.status.success(), "{name}, {mode}: {}", said(&asked));
            // The same rows in one: the loss of the first step is that of the rows.
            let packed = ["data.packing: true", "train.batch_size: 1", "train.max_steps: 1"];
            let config = fixture.config("packed", &[&lines[..], settings, &packed].concat());
            let done = train(&config, &["--overwrite"]);
            assert!(done.status.success(), "{name}, {mode}, packed: {}", said(&done));
            let packed = losses(&fixture);
            assert!(packed.len() == 1 && (packed[0] - found[0]).abs() < 1e-5, "{name}, {mode}: {packed:?}, {found:?}");
        }
    }
}

/// Nobody knows before a conversation whether it will show images.
#[test]
fn a_multimodal_model_chats_about_images_without_being_told() {
    let fixture = seeing("llava");
    let image = picture("rgb.png");
    let chat = |model: &str, words: &[&str]| {
        let mut chat = tunesmith(&[&["chat", "--model", model, "--max-new-tokens", "4"], words].concat());
        let mut chat = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let asked = format!("/image {image}\nwhat is it?\n/quit\n");
        chat.stdin.take().unwrap().write_all(asked.as_bytes()).unwrap();
        let done = chat.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", said(&done));
        said(&done)
    };
    let model = fixture.path("model").display().to_string();
    let asked = ["infer", "--model", &model, "--max-new-tokens", "4", "--image", &image, "--prompt", "what is it?"];
    let asked = tunesmith(&asked).output().unwrap();
    let answer = String::from_utf8(asked.stdout).unwrap();
    let told = chat(&model, &[]);
    assert!(told.contains("shown with the next question") && told.contains(answer.trim_end()), "{answer:?}: {told}");
    let without = chat(&model, &["vision.load=false"]);
    assert!(without.contains("leave out vision.load=false"), "{without}");
    let of_text = chat(&Fixture::new().path("model").display().to_string(), &[]);
    assert!(of_text.contains("start with vision.load=true, which loads it or says why not"), "{of_text}");
}
