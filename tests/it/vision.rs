//! Models that see pictures against Transformers (`scripts/golden/vision.py`): logits, losses, gradients of adapters,
//! connector and encoder, greedy answers, and twenty steps.
use crate::parity::{Tensors, close, json as read_json, on_gpu, put, recipe, tensors};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tunesmith::comm::single::Single;
use tunesmith::config::arch::Arch;
use tunesmith::config::vision::{Pairing, VisionArch, VisionTraining};
use tunesmith::config::{Config, LrScheduler, TargetModules};
use tunesmith::data::batch::{Batch, IGNORE, ImageRows};
use tunesmith::model::Model;
use tunesmith::model::weights::WeightFiles;
use tunesmith::optim::{AdamW, Betas, Optimizer, Schedule};
use tunesmith::parallel::optimizer::slots;
use tunesmith::train::step::step;
use tunesmith::vision::{Pixels, Tile};

const LOGITS: f32 = 5e-5;
const GRADIENT: f32 = 5e-5;
/// Rows of a step, in two micro-batches.
const ROWS: usize = 4;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vision").join(path)
}

fn json(path: &str) -> Value {
    read_json(&golden(path))
}

fn config() -> Config {
    let mut config = recipe();
    (config.tuning.lora.r, config.tuning.lora.lora_alpha) = (4, 8.0);
    config.tuning.lora.target_modules = TargetModules::Auto;
    config
}

/// Pictures `[count, channels, height, width]` as an encoder with square patches reads them.
fn pixels(stored: &(Vec<usize>, Vec<f32>), patch: usize) -> Vec<Arc<Pixels>> {
    let [count, channels, height, width] = stored.0[..] else { panic!("four sizes") };
    let tile = Tile { rows: height / patch, columns: width / patch };
    let of = |picture: usize| {
        let mut patches = Vec::with_capacity(channels * height * width);
        for (row, column) in (0..tile.rows).flat_map(|row| (0..tile.columns).map(move |column| (row, column))) {
            for channel in 0..channels {
                for line in 0..patch {
                    let at = ((picture * channels + channel) * height + row * patch + line) * width + column * patch;
                    patches.extend_from_slice(&stored.1[at..at + patch]);
                }
            }
        }
        Arc::new(Pixels { patches, tiles: vec![tile] })
    };
    (0..count).map(of).collect()
}

/// A whole golden model: everything of encoder and connector is trained, and adapters on the decoder.
fn whole(name: &str) -> Model {
    let dir = golden(name).join("model");
    let mut arch = Arch::from_dir(&dir).unwrap();
    let weights = WeightFiles::open_model(&dir, &arch, &arch.tensors()).unwrap();
    let paired = name.starts_with("prefix");
    let mut vision = if paired {
        let hidden_size = (name == "prefix_mlp").then_some(40);
        let pairing = Pairing { hidden_size, feature_layer: None, dropout: 0.0 };
        VisionArch::pair(&golden(name).join("encoder"), &pairing, &arch).unwrap()
    } else {
        VisionArch::of_model(&dir, &arch).unwrap()
    };
    vision.training = VisionTraining { connector: true, encoder: true, ..VisionTraining::default() };
    arch.vision = Some(Arc::new(vision));
    let mut config = config();
    if paired {
        let targets = ["q_proj", "k_proj", "v_proj", "o_proj"].map(str::to_owned);
        config.tuning.lora.target_modules = TargetModules::List(targets.to_vec());
    }
    let mut model = Model::load(&arch, Some(&weights), &config).unwrap();
    put(&mut model, &tensors(&golden(name).join("init.safetensors")));
    model
}

fn integers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

/// Appends a row of `run.json` to a batch.
fn push(batch: &mut Batch, run: &Value, row: &Value, pictures: &[Arc<Pixels>], rows_of: usize) {
    let mut ids: Vec<u32> = integers(&row["input_ids"]).into_iter().map(|id| id as u32).collect();
    let mut labels: Vec<i32> = integers(&row["labels"]).into_iter().map(|label| label as i32).collect();
    let images: Vec<usize> = integers(&row["images"]).into_iter().map(|at| at as usize).collect();
    let start = batch.tokens.len();
    let mut places = Vec::new();
    if run["prefix"] == true {
        places.push(0..rows_of);
        ids.splice(0..0, vec![0; rows_of]);
        labels.splice(0..0, vec![IGNORE; rows_of]);
    } else {
        let image = run["image_token"].as_u64().unwrap() as u32;
        let mut at = 0;
        while at < ids.len() {
            if ids[at] == image {
                places.push(at..at + rows_of);
                at += rows_of;
            } else {
                at += 1;
            }
        }
    }
    assert_eq!(places.len(), images.len());
    for (place, picture) in places.into_iter().zip(images) {
        let rows = ImageRows { runs: vec![place], pixels: Arc::clone(&pictures[picture]) };
        batch.images.push(rows.moved(start));
    }
    if batch.cu_seqlens.is_empty() {
        batch.cu_seqlens.push(0);
    }
    batch.push(&ids, &labels);
}

/// Logits, losses and gradients of four rows, and greedy answers.
fn check(name: &str) {
    let mut model = whole(name);
    let run = json(&format!("{name}/run.json"));
    let forward = tensors(&golden(name).join("forward.safetensors"));
    let pictures = pixels(&forward["pixel_values"], 8);
    let vision = model.arch.vision.clone().unwrap();
    let rows_of = vision.rows([(4, 4)]);
    let rows = &run["data"].as_array().unwrap()[..4];
    let mut batch = Batch::default();
    rows.iter().for_each(|row| push(&mut batch, &run, row, &pictures, rows_of));

    // Logits of the whole batch. In prefix mode they begin with that of the last picture's row.
    let shift = if run["prefix"] == true { rows_of - 1 } else { 0 };
    let chosen = run["rows_of_logits"].as_array().unwrap().iter().map(integers);
    let chosen: Vec<usize> = chosen.map(|it| batch.cu_seqlens[it[0] as usize] + shift + it[1] as usize).collect();
    let logits = model.logits(&batch, &chosen).unwrap();
    close(&format!("{name}: logits"), &logits, &forward["logits"].1, LOGITS);
    let losses = model.token_losses(&batch).unwrap();
    close(&format!("{name}: losses"), &losses, &forward["losses"].1, LOGITS);

    check_gradients(name, &mut model, &batch);
    check_answers(name, &model, &run, &pictures, rows_of);
    check_trace(name, &mut model, &run, &pictures, rows_of);
}

/// Gradients of adapters, connector and encoder.
fn check_gradients(name: &str, model: &mut Model, batch: &Batch) {
    model.params.zero_grads();
    model.forward_backward(batch, 1.0 / batch.label_tokens() as f32, 1.0, 0).unwrap();
    let whole = model.params.grads().read();
    let scale = whole.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let stored: Tensors = tensors(&golden(name).join("grads.safetensors"));
    let mut held = 0;
    for (stored, (shape, wanted)) in &stored {
        let Some(spec) = model.params.find(stored) else {
            // Blocks above the layer that is taken, and a norm behind them, get no gradient.
            assert!(wanted.iter().all(|value| *value == 0.0), "{name}: no {stored}");
            continue;
        };
        assert_eq!(&spec.shape, shape, "{name}: {stored}");
        let largest = wanted.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let limit = GRADIENT * largest.max(0.01 * scale);
        close(&format!("{name}: gradient of {stored}"), &whole[spec.range()], wanted, limit);
        held += 1;
    }
    assert_eq!(held, model.params.specs.len(), "{name}: every trained tensor is held against PyTorch's gradient");
}

/// Greedy answers, whether a prompt is read at once or in parts.
fn check_answers(name: &str, model: &Model, run: &Value, pictures: &[Arc<Pixels>], rows_of: usize) {
    for answered in run["answers"].as_array().unwrap() {
        let row = serde_json::json!({ "input_ids": answered["prompt"], "labels": answered["prompt"], "images": answered["images"] });
        let mut batch = Batch::default();
        push(&mut batch, run, &row, pictures, rows_of);
        let wanted = integers(&answered["answer"]);
        for part in [usize::MAX, 2] {
            let whole = model.arch.vision.as_ref().unwrap().bidirectional;
            if whole && part != usize::MAX {
                continue;
            }
            let mut cache = model.cache_with_images(&batch.images).unwrap();
            let (mut found, mut new) = (Vec::new(), Vec::new());
            for tokens in batch.tokens.chunks(part) {
                let best = model.extend(&mut [(&mut cache, tokens)]).unwrap().best();
                new = best;
            }
            while found.len() < wanted.len() {
                found.push(i64::from(new[0]));
                new = model.extend(&mut [(&mut cache, &new)]).unwrap().best();
            }
            assert_eq!(found, wanted, "{name}: read in parts of {part}");
        }
    }
}

/// Twenty steps of everything that is trained.
fn check_trace(name: &str, model: &mut Model, run: &Value, pictures: &[Arc<Pixels>], rows_of: usize) {
    let betas = Betas { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 };
    let mut optimizer = Optimizer::new(Box::new(AdamW(betas)), slots(&model.params.specs), model.params.values());
    let schedule = Schedule::new(LrScheduler::Cosine, 1e-3, 3, 20).unwrap();
    let rows = &run["data"].as_array().unwrap()[ROWS..];
    for (index, expected) in run["steps"].as_array().unwrap().iter().enumerate() {
        let micro_batch = |rows: &[Value]| {
            let mut batch = Batch::default();
            rows.iter().for_each(|row| push(&mut batch, run, row, pictures, rows_of));
            batch
        };
        let rows = &rows[index * ROWS..][..ROWS];
        let micro_batches = [micro_batch(&rows[..ROWS / 2]), micro_batch(&rows[ROWS / 2..])];
        let rate = schedule.lr(index as u64);
        let stats = step(model, &mut optimizer, &Single, &micro_batches, rate, 1.0).unwrap();
        let number = |key: &str| expected[key].as_f64().unwrap();
        assert!((rate - number("lr")).abs() < 1e-12, "{name}, step {index}: rate {rate}");
        assert_eq!(stats.label_tokens as f64, number("label_tokens"), "{name}, step {index}");
        let (loss, wanted) = (stats.loss, number("loss"));
        assert!((loss - wanted).abs() <= 5e-5, "{name}, step {index}: loss {loss} != {wanted}");
        let norm = (stats.grad_norm / number("grad_norm") - 1.0).abs();
        assert!(norm <= 1e-4, "{name}, step {index}: norm {} != {}", stats.grad_norm, number("grad_norm"));
    }
}

#[test]
fn every_model_that_sees_pictures_equals_pytorch() {
    ["prefix", "prefix_mlp", "llava", "smolvlm", "gemma3"].into_iter().for_each(check);
}

#[test]
fn a_gpu_sees_what_the_cpu_sees() {
    on_gpu(|| ["prefix", "gemma3"].into_iter().for_each(check));
}
