//! Encoders alone against Transformers (`scripts/golden/vision.py`); `tests/it/vision.rs` has whole models.
use super::encoder::Encoder;
use super::tiles::Tiles;
use crate::Model;
use crate::grads::Grads;
use crate::weights::WeightFiles;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tunesmith_base::error::Result;
use tunesmith_config::arch::Arch;
use tunesmith_config::vision::{Pairing, VisionArch, VisionTraining};
use tunesmith_config::{Config, DeviceChoice, InitLora, TargetModules};
use tunesmith_device::FloatBuffer;
use tunesmith_ops::activation::Activation;
use tunesmith_vision::{Pixels, Tile};

const GRADIENT: f32 = 5e-5;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/vision").join(path)
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
    pixels_with(stored, patch, false)
}

/// As [`pixels`]; with `channels_last`, patches are `[row, column, channel]`.
fn pixels_with(stored: &(Vec<usize>, Vec<f32>), patch: usize, channels_last: bool) -> Vec<Arc<Pixels>> {
    let [count, channels, height, width] = stored.0[..] else { panic!("four sizes") };
    let tile = Tile { rows: height / patch, columns: width / patch };
    let of = |picture: usize| {
        let mut patches = Vec::with_capacity(channels * height * width);
        for (row, column) in (0..tile.rows).flat_map(|row| (0..tile.columns).map(move |column| (row, column))) {
            if channels_last {
                for (down, across) in (0..patch).flat_map(|down| (0..patch).map(move |across| (down, across))) {
                    let at = (row * patch + down) * width + column * patch + across;
                    patches.extend((0..channels).map(|channel| stored.1[channel * height * width + at]));
                }
                continue;
            }
            for channel in 0..channels {
                for line in 0..patch {
                    let at = ((picture * channels + channel) * height + row * patch + line) * width + column * patch;
                    patches.extend_from_slice(&stored.1[at..at + patch]);
                }
            }
        }
        Arc::new(Pixels { patches, tiles: vec![tile], joined: None, world: false })
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
    let mut vision = VisionArch::pair(&golden(name).join("model"), &pairing, arch.hidden_size).unwrap();
    vision.training = VisionTraining { encoder: true, ..VisionTraining::default() };
    vision.encoder.feature.drop_prefix = false;
    arch.vision = Some(Arc::new(vision));
    Model::load(&arch, Some(&weights), &config()).unwrap()
}

fn features(model: &Model, pictures: &[Arc<Pixels>]) -> Vec<f32> {
    let vision = model.vision.as_ref().unwrap();
    let (_, trace) = walk(model, vision.encoder.as_ref().unwrap(), pictures).unwrap();
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
    Ok((saved.unwrap(), y[0].to_rows()))
}

#[test]
fn encoders_equal_transformers() {
    for name in [
        "vit",
        "clip",
        "siglip",
        "dinov2",
        "dinov2_larger",
        "dinov2_registers",
        "dinov2_registers_larger",
        "dinov2_registers_smaller",
        "pixtral_alone",
    ] {
        let stored = WeightFiles::open_file(&golden(name).join("features.safetensors")).unwrap();
        let model = encoder(name, None);
        let pictures = pixels(&stored.read("pixel_values").unwrap(), 8);
        let last = stored.read("last").unwrap();
        close(&format!("{name}: last"), &features(&model, &pictures), &last.1, 2e-5);
        let second = stored.read("second").unwrap().1;
        close(&format!("{name}: second"), &features(&encoder(name, Some(-2)), &pictures), &second, 2e-5);
        check_encoder_gradients(name, &model, &pictures, &stored);
    }
}

#[test]
fn pictures_of_several_shapes_equal_siglip_2() {
    let stored = WeightFiles::open_file(&golden("naflex").join("features.safetensors")).unwrap();
    let pictures: Vec<Arc<Pixels>> = (0..4)
        .flat_map(|number| {
            let (shape, values) = stored.read(&format!("pixel_values.{number}")).unwrap();
            pixels_with(&([&[1], &shape[..]].concat(), values), 8, true)
        })
        .collect();
    let model = encoder("naflex", None);
    close("last", &features(&model, &pictures), &stored.read("last").unwrap().1, 2e-5);
    let second = stored.read("second").unwrap().1;
    close("second", &features(&encoder("naflex", Some(-2)), &pictures), &second, 2e-5);
    check_encoder_gradients("naflex", &model, &pictures, &stored);
}

fn check_encoder_gradients(name: &str, model: &Model, pictures: &[Arc<Pixels>], stored: &WeightFiles) {
    let vision = model.vision.as_ref().unwrap();
    let (saved, _) = walk(model, vision.encoder.as_ref().unwrap(), pictures).unwrap();
    let pass = model.evaluation();
    let pass = vision.pass(&pass, None, &[]);
    let tiles = Tiles::of(pictures.iter().map(|picture| &**picture));
    let seed = stored.read("seed").unwrap();
    let dy = Activation::from_rows(&vision.pool, &seed.1, *seed.0.last().unwrap());
    let mut buffer = FloatBuffer::zeros(model.device(), model.params.len());
    let mut grads = Grads::whole(&mut buffer);
    vision.encoder.as_ref().unwrap().backward(&pass, &tiles, saved, vec![dy], &model.params, &mut grads).unwrap();
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
