//! Encoders, connectors and whole models against Transformers (`scripts/golden/vision.py`).
use super::encoder::Encoder;
use super::tiles::Tiles;
use crate::grads::Grads;
use crate::weights::WeightFiles;
use crate::{Model, ParamSpec};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tunesmith_base::error::Result;
use tunesmith_config::arch::Arch;
use tunesmith_config::vision::{Pairing, VisionArch, VisionTraining};
use tunesmith_config::{Config, DeviceChoice, InitLora, TargetModules};
use tunesmith_data::batch::{Batch, IGNORE, ImageRows};
use tunesmith_device::FloatBuffer;
use tunesmith_ops::activation::Activation;
use tunesmith_vision::{Pixels, Tile};

const LOGITS: f32 = 5e-5;
const GRADIENT: f32 = 5e-5;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/vision").join(path)
}

fn json(path: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden(path)).unwrap()).unwrap()
}

fn close(what: &str, got: &[f32], want: &[f32], limit: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    let worst = got.iter().zip(want).fold(0.0f32, |most, (got, want)| most.max((got - want).abs()));
    assert!(got.iter().all(|value| value.is_finite()) && worst <= limit, "{what}: {worst:e}, limit {limit:e}");
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, value| most.max(value.abs()))
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

fn config() -> Config {
    let mut config = Config::default();
    config.model.device = DeviceChoice::Cpu;
    let lora = &mut config.tuning.lora;
    lora.init_lora_weights = InitLora::Kaiming;
    (lora.r, lora.lora_alpha) = (4, 8.0);
    lora.target_modules = TargetModules::Auto;
    config
}

/// An encoder alone, in a model whose decoder is another golden's.
fn encoder(name: &str, feature_layer: Option<i64>) -> Model {
    let dir = golden("prefix/model");
    let mut arch = Arch::from_dir(&dir).unwrap();
    let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
    let pairing = Pairing { hidden_size: None, feature_layer, dropout: 0.0 };
    let mut vision = VisionArch::pair(&golden(name).join("model"), &pairing, &arch).unwrap();
    vision.training = VisionTraining { encoder: true, ..VisionTraining::default() };
    vision.encoder.feature.drop_prefix = false;
    arch.vision = Some(Arc::new(vision));
    Model::load(&arch, Some(&weights), &config()).unwrap()
}

fn features(model: &Model, pictures: &[Arc<Pixels>]) -> Vec<f32> {
    let vision = model.vision.as_ref().unwrap();
    let (_, trace) = walk(model, &vision.encoder, pictures).unwrap();
    trace
}

type Walked = (super::encoder::Saved, Vec<f32>);

fn walk(model: &Model, encoder: &Encoder, pictures: &[Arc<Pixels>]) -> Result<Walked> {
    let vision = model.vision.as_ref().unwrap();
    let pass = model.evaluation();
    let pass = vision.pass(&pass, None, &[]);
    let tiles = Tiles::of(pictures.iter().map(|picture| &**picture));
    let all: Vec<f32> = pictures.iter().flat_map(|picture| picture.patches.clone()).collect();
    let patches = Activation::from_rows(&vision.pool, &all, encoder.spec.patch_values());
    let (y, saved) = encoder.forward(&pass, &tiles, patches, true)?;
    Ok((saved.unwrap(), y.to_rows()))
}

#[test]
fn encoders_equal_transformers() {
    for name in ["vit", "clip", "siglip", "dinov2", "dinov2_larger", "dinov2_registers"] {
        let stored = WeightFiles::open_file(&golden(name).join("features.safetensors")).unwrap();
        let mut model = encoder(name, None);
        let pictures = pixels(&stored.read("pixel_values").unwrap(), 8);
        let last = stored.read("last").unwrap();
        if name == "dinov2_larger" {
            let error = walk(&model, &model.vision.as_ref().unwrap().encoder, &pictures).err().unwrap();
            assert!(error.message().contains("36") || error.message().contains("4 x 4"), "{error}");
            let mut vision = (**model.arch.vision.as_ref().unwrap()).clone();
            vision.training = VisionTraining { last_blocks: 3, ..VisionTraining::default() };
            let arch = Arch { vision: Some(Arc::new(vision)), ..model.arch.clone() };
            let dir = golden("prefix/model");
            let weights = WeightFiles::open(&dir, &Arch::from_dir(&dir).unwrap().tensors()).unwrap();
            model = Model::load(&arch, Some(&weights), &config()).unwrap();
        }
        close(&format!("{name}: last"), &features(&model, &pictures), &last.1, 2e-5);
        let second = stored.read("second").unwrap().1;
        if name != "dinov2_larger" {
            close(&format!("{name}: second"), &features(&encoder(name, Some(-2)), &pictures), &second, 2e-5);
        }
        check_encoder_gradients(name, &model, &pictures, &stored);
    }
}

fn check_encoder_gradients(name: &str, model: &Model, pictures: &[Arc<Pixels>], stored: &WeightFiles) {
    let vision = model.vision.as_ref().unwrap();
    let (saved, _) = walk(model, &vision.encoder, pictures).unwrap();
    let pass = model.evaluation();
    let pass = vision.pass(&pass, None, &[]);
    let tiles = Tiles::of(pictures.iter().map(|picture| &**picture));
    let seed = stored.read("seed").unwrap();
    let dy = Activation::from_rows(&vision.pool, &seed.1, *seed.0.last().unwrap());
    let mut buffer = FloatBuffer::zeros(model.device(), model.params.len());
    let mut grads = Grads::whole(&mut buffer);
    vision.encoder.backward(&pass, &tiles, saved, dy, &model.params, &mut grads).unwrap();
    drop(grads);
    let mut found = 0;
    let prefix = &vision.arch.encoder.prefix;
    for stored_name in stored.names().filter_map(|key| key.strip_prefix("grad.")) {
        let ours = format!("{prefix}{}", stored_name.trim_start_matches("vision_model."));
        let Some(spec) = model.params.find(&ours) else { continue };
        let (shape, wanted) = stored.read(&format!("grad.{stored_name}")).unwrap();
        assert_eq!(spec.shape, shape, "{name}: {ours}");
        let got = buffer.view().slice(spec.range()).read();
        // A key's bias moves all of a query's scores alike: its gradient is zero but for rounding.
        let limit = GRADIENT * largest(&wanted).max(if ours.contains("k_proj.bias") { 10.0 } else { 0.1 });
        close(&format!("{name}: gradient of {ours}"), &got, &wanted, limit);
        found += 1;
    }
    let trained = model.params.specs.iter().filter(|spec| spec.name.starts_with(prefix.as_str())).count();
    assert_eq!(found, trained, "{name}: every trained tensor has a gradient");
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
    let init = WeightFiles::open_file(&golden(name).join("init.safetensors")).unwrap();
    for stored in init.names() {
        let (shape, values) = init.read(stored).unwrap();
        let spec: &ParamSpec = model.params.find(stored).unwrap_or_else(|| panic!("{name}: {stored}"));
        assert_eq!(spec.shape, shape, "{stored}");
        let range = spec.range();
        model.params.put(&range, &values);
    }
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
    let forward = WeightFiles::open_file(&golden(name).join("forward.safetensors")).unwrap();
    let pictures = pixels(&forward.read("pixel_values").unwrap(), 8);
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
    close(&format!("{name}: logits"), &logits, &forward.read("logits").unwrap().1, LOGITS);
    let losses = model.token_losses(&batch).unwrap();
    close(&format!("{name}: losses"), &losses, &forward.read("losses").unwrap().1, LOGITS);

    // Gradients of adapters, connector and encoder.
    model.params.zero_grads();
    model.forward_backward(&batch, 1.0 / batch.label_tokens() as f32, 1.0, 0).unwrap();
    let grads = WeightFiles::open_file(&golden(name).join("grads.safetensors")).unwrap();
    let whole = model.params.grads().read();
    let scale = whole.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let mut held = 0;
    for stored in grads.names() {
        let ours = our_name(&model, stored);
        let Some(spec) = model.params.find(&ours) else {
            // Blocks above the layer that is taken, and a norm behind them, get no gradient.
            assert!(grads.read(stored).unwrap().1.iter().all(|value| *value == 0.0), "{name}: no {ours}");
            continue;
        };
        let (shape, wanted) = grads.read(stored).unwrap();
        assert_eq!(spec.shape, shape, "{name}: {ours}");
        let limit = GRADIENT * largest(&wanted).max(0.01 * scale);
        close(&format!("{name}: gradient of {ours}"), &whole[spec.range()], &wanted, limit);
        held += 1;
    }
    assert_eq!(held, model.params.specs.len(), "{name}: every trained tensor is held against PyTorch's gradient");
    check_answers(name, &model, &run, &pictures, rows_of);
    check_text_alone(name, &mut model);
}

/// The name of a stored gradient: towers may be named without what their family has before its names.
fn our_name(model: &Model, stored: &str) -> String {
    let prefix = &model.arch.vision.as_ref().unwrap().encoder.prefix;
    let inner = stored.strip_prefix("model.vision_tower.").map(|rest| rest.trim_start_matches("vision_model."));
    match inner {
        Some(inner) => format!("{prefix}{inner}"),
        None => stored.to_owned(),
    }
}

/// Greedy answers, whether a prompt is read at once or in parts.
fn check_answers(name: &str, model: &Model, run: &Value, pictures: &[Arc<Pixels>], rows_of: usize) {
    for answered in run["answers"].as_array().unwrap() {
        let row = serde_json::json!({ "input_ids": answered["prompt"], "labels": answered["prompt"], "images": answered["images"] });
        let mut batch = Batch::default();
        push(&mut batch, run, &row, pictures, rows_of);
        let wanted = integers(&answered["answer"]);
        for part in [usize::MAX, 2] {
            let whole = model.vision.as_ref().unwrap().arch.bidirectional;
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

/// A batch without pictures has the bits that the decoder alone gives it.
fn check_text_alone(name: &str, model: &mut Model) {
    let tokens: Vec<u32> = (3..23).collect();
    let batch = Batch { tokens, targets: (4..24).collect(), cu_seqlens: vec![0, 9, 20], ..Batch::default() };
    let with = model.token_losses(&batch).unwrap();
    model.vision = None;
    assert_eq!(model.token_losses(&batch).unwrap(), with, "{name}");
    let image = ImageRows { runs: vec![0..1], pixels: Arc::new(Pixels { patches: Vec::new(), tiles: Vec::new() }) };
    let error = model.token_losses(&Batch { images: vec![image], ..batch }).unwrap_err();
    assert!(error.message().contains("no encoder"), "{error}");
}

#[test]
fn a_linear_connector_before_a_decoder_equals_pytorch() {
    check("prefix");
}

#[test]
fn an_mlp_before_a_decoder_equals_pytorch() {
    check("prefix_mlp");
}

#[test]
fn llava_equals_transformers() {
    check("llava");
}

#[test]
fn smolvlm_equals_transformers() {
    check("smolvlm");
}

#[test]
fn gemma3_equals_transformers() {
    check("gemma3");
}
