//! Models that read images against Transformers (`scripts/golden/vision.py`): logits, losses, gradients of adapters,
//! connector and encoder, greedy generations, and twenty steps.
pub mod across;
mod golden;
pub mod memory;
mod variants;
mod whole_modules;

use crate::parity::{Tensors, close, json as read_json, put, recipe, tensors};
use golden::{Run, golden, integers, untrained, world};
use serde_json::{Value, json};
use std::sync::Arc;
use tunesmith::checkpoint::AdapterConfig;
use tunesmith::checkpoint::loaded_adapter::LoadedAdapter;
use tunesmith::checkpoint::peft::save_adapter;
use tunesmith::comm::single::Single;
use tunesmith::config::arch::Arch;
use tunesmith::config::vision::{Bidirectional, Features, Pairing, VisionArch, VisionTraining};
use tunesmith::config::{Config, LrScheduler, TargetModules};
use tunesmith::data::batch::Batch;
use tunesmith::eval::{Settings, Unwatched, generate_with_images};
use tunesmith::export::merge::set_adapter;
use tunesmith::model::stack::Stack;
use tunesmith::model::targets::{Targets, placed};
use tunesmith::model::weights::WeightFiles;
use tunesmith::model::{Model, PictureEncoder};
use tunesmith::optim::{AdamW, Betas, Optimizer, Schedule};
use tunesmith::parallel::optimizer::slots;
use tunesmith::train::step::step;

const LOGITS: f32 = 5e-5;
const GRADIENT: f32 = 5e-5;
/// Runs with a second encoder: beside Gemma 3, in front of captions, beside models whose pictures have places in a grid, and where a prompt sees both ways.
pub const WORLDS: [&str; 6] =
    ["world_kl", "world_wan", "world_prefix", "world_qwen2_5_vl", "world_qwen3_vl", "world_paligemma"];
/// The golden models and pairs, in groups. One test compares each group with PyTorch.
pub const EQUAL: [&[&str]; 7] = [
    &["prefix", "prefix_mlp", "prefix_gpt2", "prefix_naflex", "llava", "smolvlm", "idefics3", "gemma3"],
    &["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"],
    &["internvl", "paligemma"],
    &["llava_onevision"],
    &["mistral3", "ministral3", "pixtral"],
    &["gemma4", "gemma4_31b", "gemma4_a4b"],
    &["across_vit", "across_clip", "across_siglip", "across_dinov2"],
];
/// Golden runs with adapters on the encoder.
pub const ADAPTED: [&str; 12] = [
    "llava_adapters",
    "smolvlm_adapters",
    "idefics3_adapters",
    "gemma3_adapters",
    "paligemma_adapters",
    "internvl_adapters",
    "qwen2_vl_adapters",
    "qwen2_5_vl_adapters",
    "qwen3_vl_adapters",
    "qwen3_5_adapters",
    "mistral3_adapters",
    "gemma4_adapters",
];
/// Rows of a step, in two micro-batches.
const ROWS: usize = 4;

fn config(name: &str) -> Config {
    let mut config = recipe();
    let lora = &mut config.tuning.lora;
    (lora.r, lora.lora_alpha) = (4, 8.0);
    lora.target_modules = if name == "prefix_gpt2" {
        TargetModules::List(["c_attn", "c_proj"].map(str::to_owned).to_vec())
    } else if name.starts_with("across") {
        TargetModules::List(["c_attn", "q_attn", "c_proj", "c_fc"].map(str::to_owned).to_vec())
    } else if name.contains("prefix") {
        TargetModules::List(["q_proj", "k_proj", "v_proj", "o_proj"].map(str::to_owned).to_vec())
    } else {
        TargetModules::Auto
    };
    config
}

/// Trains all of the connector and the encoder.
fn everything() -> VisionTraining {
    VisionTraining { connector: true, newline: true, encoder: true, ..VisionTraining::default() }
}

/// What is trained of connector and encoder in a golden run.
fn training(name: &str) -> VisionTraining {
    if name.starts_with("world") {
        return VisionTraining { connector: name == "world_prefix", ..VisionTraining::default() };
    }
    if name.ends_with("_adapters") {
        return VisionTraining { adapters: vec!["all-linear".into()], ..VisionTraining::default() };
    }
    everything()
}

/// A golden run of the models of that `model_type`.
pub fn run_of(name: &str) -> &str {
    if name == "vision-encoder-decoder" { "across_vit" } else { name }
}

/// The golden run that has the model of another: of one with adapters on the encoder, or with a second encoder, that without.
pub fn of_model(name: &str) -> &str {
    match name.strip_prefix("world_") {
        Some("kl" | "wan") => "gemma3",
        Some(other) => other,
        None => name.trim_end_matches("_adapters"),
    }
}

/// A golden model with adapters on the decoder, and this part of connector and encoder trained.
fn trained_by(name: &str, training: VisionTraining) -> Model {
    let of_model = of_model(name);
    let dir = golden(of_model).join("model");
    let mut arch = Arch::from_dir(&dir).unwrap();
    let weights = WeightFiles::open_model(&dir, &arch, &arch.tensors()).unwrap();
    let vision = if of_model.starts_with("prefix") {
        let hidden_size = (name == "prefix_mlp").then_some(40);
        let pairing = Pairing { hidden_size, feature_layer: None, dropout: 0.0 };
        VisionArch::pair(&golden(of_model).join("encoder"), &pairing, arch.hidden_size).unwrap()
    } else {
        VisionArch::of_model(&dir, arch.hidden_size).unwrap()
    };
    let world = name.starts_with("world").then(|| Arc::new(world(name, arch.hidden_size)));
    arch.vision = Some(Arc::new(VisionArch { training, world, ..vision }));
    Model::load(&arch, Some(&weights), &config(name)).unwrap()
}

/// As [`trained_by`], with the stored values of connector and adapters.
fn started(name: &str, training: VisionTraining) -> Model {
    let mut model = trained_by(name, training);
    // Blocks above the output that is taken are not loaded here.
    let unused = untrained(name);
    let init = tensors(&golden(name).join("init.safetensors")).into_iter();
    put(&mut model, &init.filter(|(name, _)| !unused.contains(name)).collect());
    model
}

/// Logits, losses and gradients of four rows, greedy answers, and twenty steps.
fn check(name: &str) {
    let mut model = started(name, training(name));
    let run = Run::read(name, &model);
    run.check_rows(name);
    let batch = run.batch(&run.rows()[..ROWS]);
    // In prefix mode the stored logits begin with that of the last picture's row.
    let prefix = run.json["prefix"] == true;
    let picture = |row: usize| run.rows()[row]["images"][0].as_u64().unwrap() as usize;
    let world = run.json["world"]["rows"].as_u64().map_or(0, |rows| rows as usize + 2);
    let shift = |row: usize| if prefix { world + run.rows_of[picture(row)] - 1 } else { 0 };
    let chosen = run.json["rows_of_logits"].as_array().unwrap().iter().map(integers);
    let chosen: Vec<usize> =
        chosen.map(|it| batch.cu_seqlens[it[0] as usize] + shift(it[0] as usize) + it[1] as usize).collect();
    close(&format!("{name}: logits"), &model.logits(&batch, &chosen).unwrap(), &run.forward["logits"].1, LOGITS);
    close(&format!("{name}: losses"), &model.token_losses(&batch).unwrap(), &run.forward["losses"].1, LOGITS);
    let stored = check_gradients(name, &mut model, &batch);
    // Blocks above the layer that is taken, and a norm behind them, get no gradient.
    let unknown = stored.iter().filter(|(name, _)| model.params.find(name).is_none());
    unknown.for_each(|(other, (_, wanted))| assert!(wanted.iter().all(|value| *value == 0.0), "{name}: no {other}"));
    check_answers(name, &model, &run);
    check_trace(name, &mut model, &run);
}

/// The gradient of everything that is trained; returns all that are stored.
fn check_gradients(name: &str, model: &mut Model, batch: &Batch) -> Tensors {
    model.params.zero_grads();
    model.forward_backward(batch, 1.0 / batch.label_tokens() as f32, 1.0, 0).unwrap();
    let whole = model.params.grads().read();
    let stored = tensors(&golden(name).join("grads.safetensors"));
    let largest = |values: &[f32]| values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let scale = stored.values().fold(0.0f32, |most, (_, values)| most.max(largest(values)));
    for spec in &model.params.specs {
        let (shape, wanted) = stored.get(&spec.name).unwrap_or_else(|| panic!("{name}: {}", spec.name));
        assert_eq!(&spec.shape, shape, "{name}: {}", spec.name);
        let limit = GRADIENT * largest(wanted).max(0.01 * scale);
        close(&format!("{name}: gradient of {}", spec.name), &whole[spec.range()], wanted, limit);
    }
    stored
}

/// Greedy answers, whether a prompt is read at once or in parts.
fn check_answers(name: &str, model: &Model, run: &Run) {
    let whole = model.arch.vision.as_ref().unwrap().bidirectional != Bidirectional::Never;
    let (mut prompts, mut images, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for answered in run.json["answers"].as_array().unwrap() {
        let prompt = &answered["prompt"];
        let row = json!({ "input_ids": prompt, "labels": prompt, "images": answered["images"] });
        let batch = run.batch(&[row]);
        let wanted = integers(&answered["answer"]);
        // A picture whose rows see those after them is read as a whole.
        for part in if whole { vec![usize::MAX] } else { vec![usize::MAX, 5, 1] } {
            let mut cache = model.cache_with_images(&batch.images).unwrap();
            let mut next = Vec::new();
            for tokens in batch.tokens.chunks(part) {
                next = vec![model.extend(&mut [(&mut cache, tokens)]).unwrap().best()[0].unwrap()];
            }
            let mut found = Vec::new();
            while found.len() < wanted.len() {
                found.push(i64::from(next[0]));
                next = vec![model.extend(&mut [(&mut cache, &next)]).unwrap().best()[0].unwrap()];
            }
            assert_eq!(found, wanted, "{name}: read in parts of {part}");
        }
        if whole && let Some(first) = batch.images.iter().find(|image| !image.pixels.world) {
            let mut cache = model.cache_with_images(&batch.images).unwrap();
            let cut = &batch.tokens[..=first.runs[0].start];
            let error = model.extend(&mut [(&mut cache, cut)]).unwrap_err();
            assert!(error.message().contains("inside of an image"), "{error}");
        }
        prompts.push(batch.tokens);
        images.push(batch.images);
        all.push(wanted);
    }
    let settings = Settings::greedy(all[0].len(), usize::MAX, Vec::new());
    let answers = generate_with_images(model, &prompts, &images, &settings, &mut Unwatched).unwrap().unwrap();
    for (answer, wanted) in answers.iter().zip(all) {
        assert_eq!(answer.tokens.iter().map(|&token| i64::from(token)).collect::<Vec<_>>(), wanted, "{name}: together");
    }
}

/// Twenty steps of everything that is trained.
fn check_trace(name: &str, model: &mut Model, run: &Run) {
    let rows = run.rows()[ROWS..].chunks(ROWS).map(<[_]>::to_vec);
    check_steps(name, model, run, &run.json["steps"], rows);
}

/// Steps with these rows; returns what each step left of the trained values.
fn check_steps(
    name: &str,
    model: &mut Model,
    run: &Run,
    steps: &Value,
    rows: impl Iterator<Item = Vec<Value>>,
) -> Vec<Vec<f32>> {
    let betas = Betas { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 };
    let mut optimizer = Optimizer::new(Box::new(AdamW(betas)), slots(&model.params.specs), model.params.values());
    let schedule = Schedule::new(LrScheduler::Cosine, 1e-3, 3, 20).unwrap();
    let mut left = Vec::new();
    for (index, (expected, rows)) in steps.as_array().unwrap().iter().zip(rows).enumerate() {
        let micro_batches = [run.batch(&rows[..ROWS / 2]), run.batch(&rows[ROWS / 2..])];
        let rate = schedule.lr(index as u64);
        let stats = step(model, &mut optimizer, &Single, &micro_batches, rate, 1.0).unwrap();
        let number = |key: &str| expected[key].as_f64().unwrap();
        assert!((rate - number("lr")).abs() < 1e-12, "{name}, step {index}: rate {rate}");
        assert_eq!(stats.label_tokens as f64, number("label_tokens"), "{name}, step {index}");
        let (loss, wanted) = (stats.loss, number("loss"));
        assert!((loss - wanted).abs() <= 5e-5, "{name}, step {index}: loss {loss} != {wanted}");
        let norm = (stats.grad_norm / number("grad_norm") - 1.0).abs();
        // Four times the distance of PyTorch's own numbers from those in double precision, where that is more.
        let limit = (4.0 * expected["drift"].as_f64().unwrap_or(0.0)).max(1e-4);
        assert!(norm <= limit, "{name}, step {index}: norm {} != {}", stats.grad_norm, number("grad_norm"));
        left.push(model.params.values().read());
    }
    left
}

/// A step without images updates neither encoder nor connector, and does not count for their bias correction.
#[test]
fn steps_without_pictures_leave_encoder_and_connector_as_in_pytorch() {
    let name = "llava";
    let mut model = started(name, training(name));
    let run = Run::read(name, &model);
    let stored = read_json(&golden("llava/text_steps.json"));
    let order: Vec<Vec<Value>> = stored["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|step| integers(step).into_iter().map(|row| run.rows()[row as usize].clone()).collect())
        .collect();
    let without: Vec<bool> = order.iter().map(|rows| rows.iter().all(|row| row["images"] == json!([]))).collect();
    assert_eq!(without.iter().filter(|&&it| it).count(), 7, "two of them in a row");
    let left = check_steps(name, &mut model, &run, &stored["steps"], order.into_iter());
    for (step, pair) in left.windows(2).enumerate() {
        for spec in &model.params.specs {
            let seen = !spec.name.contains("lora_");
            assert_eq!(spec.vision, seen, "{}", spec.name);
            let same = pair[0][spec.range()] == pair[1][spec.range()];
            assert_eq!(same, seen && without[step + 1], "step {}: {}", step + 1, spec.name);
        }
    }
}

#[test]
fn every_model_that_sees_pictures_equals_pytorch() {
    EQUAL[0].iter().for_each(|name| check(name));
}

#[test]
fn every_qwen_vl_equals_pytorch() {
    EQUAL[1].iter().for_each(|name| check(name));
}

#[test]
fn internvl_and_paligemma_equal_pytorch() {
    EQUAL[2].iter().for_each(|name| check(name));
}

#[test]
fn llava_onevision_equals_pytorch() {
    EQUAL[3].iter().for_each(|name| check(name));
}

#[test]
fn mistral3_and_pixtral_equal_pytorch() {
    EQUAL[4].iter().for_each(|name| check(name));
}

#[test]
fn gemma4_equals_pytorch() {
    EQUAL[5].iter().for_each(|name| check(name));
}

#[test]
fn models_that_read_images_by_cross_attention_equal_pytorch() {
    EQUAL[6].iter().for_each(|name| check(name));
}

#[test]
fn a_second_encoder_equals_diffusers() {
    for name in WORLDS {
        check(name);
        let model = started(name, training(name));
        let run = Run::read(name, &model);
        // Its latents, as they are computed ahead of training.
        let dir = golden(of_model(name)).join("model");
        let weights = WeightFiles::open_model(&dir, &model.arch, &model.arch.tensors()).unwrap();
        let (stack, features) = (Stack::default(), Features::Encoder);
        let encoder = PictureEncoder::load(&model.arch, Some(&weights), &config(name), &stack, features).unwrap();
        let (shape, wanted) = &run.forward["latents"];
        let (channels, places) = (shape[1], shape[2] * shape[3]);
        for (pixels, wanted) in run.worlds.iter().zip(wanted.chunks_exact(channels * places)) {
            let found = encoder.encode(pixels).unwrap();
            let by_channel = (0..channels).flat_map(|channel| (0..places).map(move |place| place * channels + channel));
            close(&format!("{name}: latents"), &by_channel.map(|at| found[at]).collect::<Vec<_>>(), wanted, LOGITS);
        }
        if model.arch.vision.as_ref().unwrap().prefix {
            continue;
        }
        // Its rows see what is before them alone, so a text may be read up to their middle.
        let batch = run.batch(&run.rows()[..1]);
        let last = [batch.tokens.len() - 1];
        let whole = model.logits(&batch, &last).unwrap();
        let mut cache = model.cache_with_images(&batch.images).unwrap();
        let (first, rest) = batch.tokens.split_at(4);
        assert!(batch.images[0].pixels.world && batch.images[0].runs[0].contains(&4), "{name}");
        model.extend(&mut [(&mut cache, first)]).unwrap();
        let next = model.extend(&mut [(&mut cache, rest)]).unwrap().best()[0].unwrap() as usize;
        let best = (0..whole.len()).max_by(|&a, &b| whole[a].total_cmp(&whole[b])).unwrap();
        assert_eq!(next, best, "{name}");
    }
}

#[test]
fn adapters_on_encoders_equal_peft() {
    ADAPTED.into_iter().for_each(check);
}

/// One of each kind: `cuda` holds a GPU to them, early among the tests, since it takes long.
pub fn check_of_each_kind() {
    [
        "prefix",
        "prefix_gpt2",
        "across_vit",
        "gemma3",
        "qwen2_5_vl",
        "qwen3_vl",
        "mistral3",
        "gemma4",
        "llava_onevision",
        "qwen2_5_vl_adapters",
    ]
    .into_iter()
    .chain(WORLDS)
    .for_each(check);
}

/// What is trained of connector and encoder, and the tower's adapters, are in the adapter's files, and come back.
#[test]
fn an_adapter_s_files_hold_connector_and_encoder() {
    for (name, training) in [
        ("prefix", VisionTraining { connector: true, last_blocks: 1, ..VisionTraining::default() }),
        (
            "llava",
            VisionTraining {
                connector: true,
                adapters: vec!["q_proj".into(), "fc1".into()],
                ..VisionTraining::default()
            },
        ),
        ("gemma3", VisionTraining { connector: true, encoder: true, ..VisionTraining::default() }),
        ("qwen3_vl", VisionTraining { connector: true, adapters: vec!["qkv".into()], ..VisionTraining::default() }),
        ("mistral3", VisionTraining { connector: true, adapters: vec!["o_proj".into()], ..VisionTraining::default() }),
        (
            "gemma4",
            VisionTraining { connector: true, adapters: vec!["q_proj.linear".into()], ..VisionTraining::default() },
        ),
        ("gemma4_31b", VisionTraining { connector: true, encoder: true, ..VisionTraining::default() }),
        ("across_vit", VisionTraining { connector: true, encoder: true, ..VisionTraining::default() }),
        ("across_siglip", VisionTraining { encoder: true, ..VisionTraining::default() }),
        ("across_clip", VisionTraining { adapters: vec!["q_proj".into()], ..VisionTraining::default() }),
    ] {
        let mut model = trained_by(name, training);
        let arch = model.arch.clone();
        let config = config(name);
        let placements = placed(&arch, &config.tuning).unwrap();
        let expected = Targets::of(&config.tuning).tensors(&arch, &placements).unwrap();
        let own: Vec<(String, Vec<usize>)> =
            model.params.specs.iter().map(|spec| (spec.name.clone(), spec.shape.clone())).collect();
        let sorted = |mut names: Vec<(String, Vec<usize>)>| {
            names.sort();
            names
        };
        assert_eq!(sorted(own), sorted(expected), "{name}");
        // Every value differs from that of a fresh model.
        let values: Vec<f32> = (0..model.params.len()).map(|at| (at as f32 * 0.37).sin()).collect();
        model.params.put(&(0..values.len()), &values);
        let saved = AdapterConfig::of(&config.tuning, &placements, None).on(&arch).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let specs = model.params.specs.clone();
        let tensors: Vec<(String, Vec<usize>, &[f32])> =
            specs.iter().map(|spec| (spec.name.clone(), spec.shape.clone(), &values[spec.range()])).collect();
        save_adapter(dir.path(), &saved, &tensors).unwrap();
        let loaded = LoadedAdapter::open(dir.path(), &arch).unwrap();
        let mut again = trained_by(name, arch.vision.as_ref().unwrap().training.clone());
        set_adapter(&mut again, &loaded);
        assert_eq!(again.params.values().read(), values, "{name}");
        // Without the encoder the files are refused, not read in part.
        let blind = Arch { vision: None, ..arch };
        assert!(LoadedAdapter::open(dir.path(), &blind).is_err(), "{name}");
    }
}

/// What a run trains of an encoder has the gradient that it has where all is trained.
#[test]
fn a_part_of_an_encoder_trains_as_it_does_in_the_whole() {
    for last_blocks in [0, 1] {
        let training = VisionTraining { connector: true, last_blocks, ..VisionTraining::default() };
        let mut model = started("prefix", training);
        let run = Run::read("prefix", &model);
        let batch = run.batch(&run.rows()[..ROWS]);
        check_gradients("prefix", &mut model, &batch);
        let of_tower = model.params.specs.iter().filter(|spec| spec.name.contains("vision_tower"));
        assert_eq!(of_tower.clone().count(), 16 * last_blocks);
        assert!(of_tower.clone().all(|spec| spec.name.contains("layers.2.")));
    }
}

/// A connector alone has the gradient that it has where adapters are trained too.
#[test]
fn a_connector_trains_before_a_frozen_decoder() {
    let training = VisionTraining { connector: true, freeze_language: true, ..VisionTraining::default() };
    let mut model = trained_by("prefix_mlp", training);
    assert_eq!(model.params.specs.len(), 4);
    let init = tensors(&golden("prefix_mlp/init.safetensors")).into_iter();
    put(&mut model, &init.filter(|(name, _)| !name.contains("lora_")).collect());
    let run = Run::read("prefix_mlp", &model);
    let batch = run.batch(&run.rows()[..ROWS]);
    let loss = |model: &Model| model.loss(&batch).unwrap();
    let before = loss(&model);
    model.params.zero_grads();
    model.forward_backward(&batch, 1.0, 1.0, 0).unwrap();
    let grads = model.params.grads().read();
    let mut values = model.params.values().read();
    // A step along the gradient changes the loss by its square.
    let square: f64 = grads.iter().map(|&grad| f64::from(grad) * f64::from(grad)).sum();
    let length = 1e-3 / square;
    values.iter_mut().zip(&grads).for_each(|(value, grad)| *value -= (length * f64::from(*grad)) as f32);
    model.params.put(&(0..values.len()), &values);
    let fallen = before - loss(&model);
    assert!((fallen / 1e-3 - 1.0).abs() < 0.2, "{fallen}");
}

/// Text beside a model that sees pictures has the bits that the language model alone gives it, and a picture needs an encoder.
#[test]
fn text_alone_is_as_without_an_encoder() {
    for name in ["prefix", "gemma3"] {
        let model = started(name, everything());
        let dir = golden(name).join("model");
        let arch = Arch { vision: None, ..model.arch.clone() };
        let weights = WeightFiles::open_model(&dir, &arch, &arch.tensors()).unwrap();
        let mut blind = Model::load(&arch, Some(&weights), &config(name)).unwrap();
        let adapters = tensors(&golden(name).join("init.safetensors")).into_iter();
        put(&mut blind, &adapters.filter(|(name, _)| name.contains("lora_")).collect());
        let tokens: Vec<u32> = (3..23).collect();
        let batch = Batch { tokens, targets: (4..24).collect(), cu_seqlens: vec![0, 9, 20], ..Batch::default() };
        assert_eq!(model.token_losses(&batch).unwrap(), blind.token_losses(&batch).unwrap(), "{name}");
        let run = Run::read(name, &model);
        let error = blind.token_losses(&run.batch(&run.rows()[..1])).unwrap_err();
        assert!(error.message().contains("no encoder"), "{error}");
        // Rows that are no picture's, or that stand for another number of them.
        let mut odd = run.batch(&run.rows()[..1]);
        odd.images[0].runs[0].end -= 1;
        let error = model.token_losses(&odd).unwrap_err();
        assert!(error.message().contains("stand for it"), "{error}");
    }
}

/// Dropout between a connector's modules does not depend on how a step is cut into micro-batches.
#[test]
fn a_connector_drops_the_same_values_however_a_step_is_cut() {
    let dir = golden("prefix_mlp/model");
    let mut arch = Arch::from_dir(&dir).unwrap();
    let weights = WeightFiles::open_model(&dir, &arch, &arch.tensors()).unwrap();
    let pairing = Pairing { hidden_size: Some(40), feature_layer: None, dropout: 0.5 };
    let vision = VisionArch::pair(&golden("prefix_mlp/encoder"), &pairing, arch.hidden_size).unwrap();
    arch.vision = Some(Arc::new(VisionArch { training: everything(), ..vision }));
    let mut config = config("prefix_mlp");
    config.tuning.lora.lora_dropout = 0.25;
    let model = Model::load(&arch, Some(&weights), &config).unwrap();
    check_cuts("prefix_mlp", model, 1e-3);
}

/// Dropout drops the same values however a step is cut into micro-batches, and others in another step, whose loss is more than `apart`
/// away.
pub fn check_cuts(name: &str, mut model: Model, apart: f64) {
    let run = Run::read(name, &model);
    let rows = &run.rows()[..ROWS];
    let mut gradients = |cuts: &[usize], step: u64| {
        model.params.zero_grads();
        let (mut first_row, mut loss) = (0, 0.0);
        for ends in cuts.windows(2) {
            let batch = Batch { first_row, ..run.batch(&rows[ends[0]..ends[1]]) };
            loss += model.forward_backward(&batch, 0.02, 1.0, step).unwrap();
            first_row += batch.tokens.len() as u64;
        }
        (loss, model.params.grads().read())
    };
    let (loss, whole) = gradients(&[0, 4], 7);
    let (again, parts) = gradients(&[0, 1, 3, 4], 7);
    assert!((loss - again).abs() < 1e-4, "{loss} {again}");
    close("gradients", &parts, &whole, 1e-5);
    assert!((gradients(&[0, 4], 8).0 - loss).abs() > apart, "another step drops others");
}

/// Transformers passes these encoders no word to interpolate positions, and they refuse images of other sizes.
#[test]
fn models_whose_encoder_has_one_size_refuse_others() {
    for name in ["llava", "gemma3", "paligemma", "llava_onevision"] {
        let model = golden(name).join("model");
        let vision = VisionArch::of_model(&model, Arch::from_dir(&model).unwrap().hidden_size).unwrap();
        let [rows, columns] = vision.encoder.grid;
        vision.check_tile(rows, columns).unwrap();
        let refused = vision.check_tile(2 * rows, 2 * columns).unwrap_err();
        assert!(refused.message().contains("the encoder has positions for"), "{name}: {refused}");
    }
}
