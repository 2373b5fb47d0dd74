//! The memory that images take: what the plan predicts, and what the engine holds.
use super::golden::Run;
use super::{config, everything, trained_by};
use crate::pictures::{picture, seeing, write_rows};
use crate::run::fixture::{said, train, tunesmith};
use serde_json::{Value, json};
use std::sync::Arc;
use tunesmith::config::arch::Arch;
use tunesmith::config::vision::{Features, VisionArch, VisionTraining};
use tunesmith::model::Model;
use tunesmith::plan::memory::{Device, Pass, Predictor, Storage};
use tunesmith::train::memory_prediction;
use tunesmith::train::shown_pictures::ShownPictures;

/// Rows of a batch: the same one, since all images of a pass are planned to be as large as the largest.
const ROWS: usize = 3;

pub const MODELS: [&str; 22] = [
    "prefix",
    "prefix_mlp",
    "prefix_gpt2",
    "across_vit",
    "across_clip",
    "llava",
    "smolvlm",
    "idefics3",
    "gemma3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "internvl",
    "paligemma",
    "llava_onevision",
    "mistral3",
    "pixtral",
    "gemma4",
    "gemma4_31b",
    "world_kl",
    "world_prefix",
];

fn parts() -> [(&'static str, VisionTraining); 5] {
    let none = VisionTraining::default;
    [
        ("frozen", none()),
        ("connector", VisionTraining { connector: true, ..none() }),
        ("everything", everything()),
        ("last block", VisionTraining { last_blocks: 1, ..none() }),
        ("adapters", VisionTraining { adapters: vec!["all-linear".into()], ..none() }),
    ]
}

/// What the pools hold after a pass of training and after one of a validation, and the same as predicted.
fn held_and_predicted(name: &str, training: VisionTraining, features: Option<Features>) -> [[u64; 3]; 2] {
    let whole = trained_by(name, training);
    let run = Run::read(name, &whole);
    let shows_one = |row: &&Value| row["images"].as_array().is_some_and(|images| images.len() == 1);
    let row = run.rows().iter().find(shows_one).unwrap_or_else(|| panic!("{name}: no row with one image"));
    let mut batch = run.batch(&std::array::from_fn::<Value, ROWS, _>(|_| row.clone()));
    let own = batch.images.iter().find(|image| !image.pixels.world).unwrap();
    let vision = VisionArch { features, ..(**whole.arch.vision.as_ref().unwrap()).clone() };
    let shown = ShownPictures::of_image(&vision, &own.pixels.tiles, own.pixels.joined.as_ref(), 1);
    if features.is_some() {
        let of = |world: bool| shown.pixels().iter().find(|pixels| pixels.world == world).unwrap();
        batch.images.iter_mut().for_each(|image| image.pixels = Arc::clone(of(image.pixels.world)));
    }
    let (arch, config) = (Arch { vision: Some(Arc::new(vision)), ..whole.arch }, config(name));
    let mut model = Model::load(&arch, None, &config).unwrap();
    model.params.zero_grads();
    for _ in 0..2 {
        model.forward_backward(&batch, 1.0, 1.0, 0).unwrap();
    }
    let [trained, head] = model.idle_bytes();
    model.release();
    for _ in 0..2 {
        model.loss(&batch).unwrap();
    }
    let held = [trained, head, model.idle_bytes()[0]];
    let job = memory_prediction::job_showing(&config, &arch, Storage::F32, None, Some(&shown)).unwrap();
    let predictor = Predictor::new(job, Device::Cpu);
    let tokens = batch.tokens.len() as u64;
    let pass = Pass { tokens, longest: tokens / ROWS as u64, labelled: batch.label_tokens() as u64 };
    let walked = predictor.activations(&pass);
    [held, [walked.pools, walked.head, predictor.evaluated(&pass) - walked.head]]
}

#[test]
fn buffers_of_encoder_and_connector_are_predicted_to_the_byte() {
    for name in MODELS {
        for (part, training) in parts() {
            let [held, predicted] = held_and_predicted(name, training, None);
            if name.starts_with("world") {
                // Its second encoder reuses buffers of other sizes, which is not predicted.
                let near = |(held, predicted): (&u64, &u64)| held <= predicted && predicted * 100 <= held * 108;
                assert!(held.iter().zip(&predicted).all(near), "{name}, {part}: {held:?} {predicted:?}");
                continue;
            }
            assert_eq!(held, predicted, "{name}, {part}");
        }
    }
}

/// With features from the cache there is no encoder, and the connector is there or not.
#[test]
fn buffers_behind_features_are_predicted_to_the_byte() {
    for name in MODELS {
        for (features, training) in [
            (Features::Encoder, VisionTraining { connector: true, ..VisionTraining::default() }),
            (Features::Connector, VisionTraining::default()),
        ] {
            let [held, predicted] = held_and_predicted(name, training, Some(features));
            assert_eq!(held, predicted, "{name}, {features:?}");
        }
    }
}

/// The bytes of a line of `memory-check`, predicted and measured.
fn line_of(text: &str, name: &str) -> [f64; 2] {
    let line =
        text.lines().find(|line| line.trim_start().starts_with(name)).unwrap_or_else(|| panic!("{name}: {text}"));
    let words: Vec<&str> = line.trim_start().trim_start_matches(name).split_whitespace().collect();
    [0, 2].map(|at| {
        let unit = match words[at + 1] {
            "B" => 1.0,
            "KiB" => 1024.0,
            "MiB" => 1024.0 * 1024.0,
            other => panic!("{other}: {text}"),
        };
        words[at].parse::<f64>().unwrap() * unit
    })
}

/// What `memory-check` predicts of a run with images is near what it measures, whatever is trained of the encoder.
#[test]
fn memory_check_knows_what_images_take() {
    let mut trained = Vec::new();
    for lines in [
        &["vision.cache_features: false"][..],
        &["tuning.freeze_vision: false", "tuning.freeze_connector: false"],
        &["tuning.vision_unfreeze_layers: 1"],
        &["vision.cache_features: true"],
    ] {
        let fixture = seeing("llava");
        let cache = format!("data.cache_dir: {}", fixture.path("cache").display());
        let config = fixture.config("run", &[lines, &[&cache, "train.batch_size: 8"]].concat());
        let done = tunesmith(&["memory-check", config.to_str().unwrap()]).output().unwrap();
        let text = said(&done);
        assert!(done.status.success(), "{lines:?}: {text}");
        let [predicted, measured] = line_of(&text, "activations");
        println!("{lines:?}: activations {predicted} predicted, {measured} measured, {:.3}", predicted / measured);
        assert!((predicted / measured - 1.0).abs() < 0.1, "{lines:?}: {text}");
        trained.push(predicted);
    }
    assert!(trained[1] > trained[2] && trained[2] > trained[0] && trained[0] > trained[3], "{trained:?}");
}

/// A plan knows the images of the first rows, or says what it assumes.
#[test]
fn a_plan_knows_the_images_of_the_first_rows() {
    let fixture = seeing("qwen2_5_vl");
    let config = fixture.config("run", &["vision.cache_features: false"]);
    let total = |words: &[&str]| {
        let done = tunesmith(&[&["plan", config.to_str().unwrap()], words].concat()).output().unwrap();
        let text = said(&done);
        assert!(done.status.success(), "{text}");
        text
    };
    let text = total(&[]);
    assert!(text.contains("planned with 1 image of ") && text.contains("in each row"), "{text}");
    let json = tunesmith(&["plan", config.to_str().unwrap(), "--json"]).output().unwrap();
    let frozen: Value = serde_json::from_slice(&json.stdout).unwrap();
    let json = tunesmith(&["plan", config.to_str().unwrap(), "--json", "tuning.freeze_vision=false"]).output().unwrap();
    let trained: Value = serde_json::from_slice(&json.stdout).unwrap();
    let kept = |plan: &Value| plan["plan"]["rows"][0]["rank"]["kept"].as_u64().unwrap();
    assert!(kept(&trained) > kept(&frozen), "{trained}");
}

/// An encoder that is trained keeps what its backward pass needs; one that is frozen does not.
#[test]
fn a_trained_encoder_takes_more_than_a_frozen_one_and_features_less() {
    let of = |training, features| held_and_predicted("llava", training, features)[1][0];
    let (frozen, whole) = (of(VisionTraining::default(), None), of(everything(), None));
    let last = of(VisionTraining { last_blocks: 1, ..VisionTraining::default() }, None);
    let cached = of(VisionTraining::default(), Some(Features::Encoder));
    assert!(cached < frozen && frozen < last && last < whole, "{cached} {frozen} {last} {whole}");
}

/// Sizes are chosen for the images of short rows too, not only for the longest rows, which may be text alone.
#[test]
fn measured_passes_hold_the_images_of_short_rows() {
    let long = "a tree by the sea and a cat in the tree ".repeat(8);
    let text = json!({"question": "what is it?", "answer": long});
    let image = json!({"image": picture("rgb.png"), "question": "a", "answer": "b"});
    let lines = [
        "train.max_steps: 1",
        "train.batch_size: auto",
        "train.effective_batch: 48",
        "train.grad_accum: auto",
        "train.num_threads: 2",
        "tuning.freeze_vision: false",
        "tuning.freeze_connector: false",
        "model.max_seq_len: 256",
    ];
    // What a pass of 768 tokens takes.
    let measured = |rows: Vec<&Value>| {
        let fixture = seeing("llava");
        write_rows(&fixture.path("train.jsonl"), rows.into_iter().cycle().take(96).cloned());
        let done = train(&fixture.config("run", &lines), &[]);
        let text = said(&done);
        assert!(done.status.success(), "{text}");
        let line =
            text.lines().find(|line| line.trim_start().starts_with("768 tokens")).unwrap_or_else(|| panic!("{text}"));
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words[3], "MiB", "{line}");
        words[2].parse::<f64>().unwrap()
    };
    let [texts, images] = [&text, &image].map(|row| measured(vec![row]));
    let both = measured([vec![&text], vec![&image; 15]].concat());
    assert!(images > 1.1 * texts, "images take {images} MiB, texts {texts}");
    assert!(both > 0.98 * images, "{both} MiB, and {images} without the texts");
}
