//! Changes every key of image encoders and image processors (`scripts/golden/vision_variants.py`). A model that still runs must
//! compute what Transformers computes. One that Transformers refuses, or cannot compute, must not run.
use super::golden::{Run, golden, picture_of_encoder};
use super::{config, trained_by};
use crate::config::variants::{are_near, changed, numbers};
use crate::parity::json as read_json;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tunesmith::Error;
use tunesmith::config::arch::Arch;
use tunesmith::config::vision::{Features, Pairing, Processing, VisionArch, VisionTraining};
use tunesmith::data::batch::Batch;
use tunesmith::model::stack::Stack;
use tunesmith::model::weights::WeightFiles;
use tunesmith::model::{Model, PictureEncoder};
use tunesmith::vision::{Picture, Pixels, Processor};

/// Pixels of a patch's side.
const PATCH: usize = 8;

/// An exception: a variant runs here although Transformers refuses it or lacks a weight. Models, key, values, and the reason.
type Exception = (&'static [&'static str], &'static str, &'static [&'static str], &'static str);

const EXCEPTIONS: [Exception; 9] = [
    (
        &["dinov2", "dinov2_registers"],
        "out_features",
        &["[]", "[\"stage3\",\"stage3\"]", "\"bogus\"", "[\"bogus\"]"],
        "it names outputs of a backbone; what is read here is the last hidden state, which has no name among them",
    ),
    (
        &["dinov2", "dinov2_registers"],
        "out_indices",
        &["[]", "[3,3]", "\"bogus\"", "[4]", "[0]", "[null]", "[\"1\"]"],
        "as out_features",
    ),
    (
        &["vit"],
        "pooler_act",
        &["\"bogus\""],
        "the pooler reads the hidden states, and nothing that is read here comes from it",
    ),
    (&["vit"], "pooler_output_size", &["33", "64", "-1", "31", "16", "1"], "as pooler_act"),
    (
        &["internvl"],
        "vision_config.use_mask_token",
        &["true"],
        "the weight that is missing stands for masked patches, and no picture of a row has such",
    ),
    (
        &["llava", "llava_onevision"],
        "vision_config.image_size",
        &["33"],
        "it has as many patches as 32, and pictures are as large as the image processor makes them; told not to compare the sizes, the \
         encoders alone (vit, clip) compute the same",
    ),
    (
        &["llava", "ministral3"],
        "vision_config.num_hidden_layers",
        &["4"],
        "the block that is missing is above the output that is taken, so its random weights mean nothing",
    ),
    (
        &["llava_onevision"],
        "image_grid_pinpoints",
        &["[\"removed\"]", "null"],
        "the picture of the golden was cut by the grids of the unchanged file, and not by the class's; a run refuses grids that are not \
         those of preprocessor_config.json",
    ),
    (
        &["llava_onevision"],
        "vision_aspect_ratio",
        &["[\"removed\"]"],
        "as image_grid_pinpoints: the golden's text has as many tokens as anyres_max_2 gives, the class's anyres_max_9 more",
    ),
];

/// What the changes of a line came to.
#[derive(Default)]
struct Tally {
    alike: usize,
    refused: usize,
    /// Refused here alone, by key and value.
    strict: BTreeMap<String, Vec<String>>,
    /// Runs here alone, by [`EXCEPTIONS`].
    excepted: usize,
    wrong: Vec<String>,
}

impl Tally {
    /// Runs every variant of a line. `run` computes from a changed file; `is_near` compares with what Transformers has.
    fn add<T: std::fmt::Debug>(
        &mut self,
        name: &str,
        (line, file): (&Value, &Value),
        run: &dyn Fn(&Value) -> Result<T, Error>,
        is_near: &dyn Fn(&T, &Value) -> bool,
    ) {
        let base = run(file).unwrap_or_else(|error| panic!("{name}, unchanged: {error}"));
        assert!(is_near(&base, &line["base"]), "{name}, unchanged: {base:?}, Transformers {}", line["base"]);
        for (key, outcomes) in line["variants"].as_object().unwrap() {
            for (outcome, values) in outcomes.as_object().unwrap() {
                for found in values.as_array().unwrap() {
                    let (value, expected) = match outcome.as_str() {
                        "same" => (found, Some(&line["base"])),
                        "logits" => (&found[0], Some(&found[1])),
                        _ => (found, None),
                    };
                    let label = format!("{name} {key}: {value}");
                    let known = EXCEPTIONS.iter().any(|(models, of, values, _)| {
                        models.contains(&name) && of == key && values.contains(&value.to_string().as_str())
                    });
                    match catch_unwind(AssertUnwindSafe(|| run(&changed(file, key, value)))) {
                        Err(_) => self.wrong.push(format!("{label}: a panic")),
                        Ok(Err(error)) => {
                            self.refused += 1;
                            if expected.is_some() {
                                let text = error.to_string();
                                let text = text.rsplit("config.json: ").next().unwrap_or_default();
                                let of = self.strict.entry(format!("{key}: {value}: {text}")).or_default();
                                of.push(name.to_owned());
                            }
                        }
                        Ok(Ok(result)) => match expected {
                            Some(expected) if is_near(&result, expected) => self.alike += 1,
                            Some(expected) => self.wrong.push(format!("{label}: {result:?}, Transformers {expected}")),
                            None if known => self.excepted += 1,
                            None => self.wrong.push(format!("{label}: runs, Transformers: {outcome}: {result:?}")),
                        },
                    }
                }
            }
        }
    }

    fn check(&self) {
        for (variant, names) in &self.strict {
            println!("only here refused: {variant}: {}", names.join(" "));
        }
        let strict: usize = self.strict.values().map(Vec::len).sum();
        println!("{} alike, {} refused, {strict} of them here alone", self.alike, self.refused);
        assert!(self.wrong.is_empty(), "{} wrong:\n{}", self.wrong.len(), self.wrong.join("\n"));
        assert!(self.alike > self.refused / 4, "{} ran, {} were refused", self.alike, self.refused);
    }
}

fn lines(kind: &str) -> Vec<(String, Value)> {
    let text = fs::read_to_string(golden("../vision_variants.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| Some((line[kind].as_str()?.to_owned(), line))).collect()
}

/// The weights of a golden model in a folder whose `config.json` changes.
fn copied(name: &str) -> (tempfile::TempDir, Value) {
    let (folder, source) = (tempfile::tempdir().unwrap(), golden(name).join("model"));
    for entry in fs::read_dir(&source).unwrap() {
        let path: PathBuf = entry.unwrap().path();
        if path.to_string_lossy().contains("safetensors") {
            fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    (folder, read_json(&source.join("config.json")))
}

/// The numbers that the script stores.
fn sample(found: &[f32]) -> Vec<f64> {
    [5, found.len() / 2, found.len().saturating_sub(7)]
        .iter()
        .map(|&at| found.get(at).map_or(f64::NAN, |&number| f64::from(number)))
        .collect()
}

fn logits(name: &str, dir: &Path, batch: &Batch) -> Result<Vec<f64>, Error> {
    let mut arch = Arch::from_dir(dir)?;
    let vision = VisionArch::of_model(dir, arch.hidden_size)?;
    let weights = WeightFiles::open_model(dir, &arch, &arch.tensors())?;
    arch.vision = Some(Arc::new(vision));
    let model = Model::load(&arch, Some(&weights), &config(name))?;
    Ok(sample(&model.logits(batch, &[batch.tokens.len() - 1])?))
}

fn features(dir: &Path, pixels: &Pixels) -> Result<Vec<f64>, Error> {
    let decoder = golden("prefix/model");
    let mut arch = Arch::from_dir(&decoder)?;
    let weights = WeightFiles::open(&decoder, &arch.tensors())?;
    let pairing = Pairing { hidden_size: None, feature_layer: None, dropout: 0.0 };
    let mut vision = VisionArch::pair(dir, &pairing, arch.hidden_size)?;
    vision.encoder.feature.drop_prefix = false;
    arch.vision = Some(Arc::new(vision));
    let (stack, features) = (Stack::default(), Features::Encoder);
    let encoder = PictureEncoder::load(&arch, Some(&weights), &config("prefix"), &stack, features)?;
    Ok(sample(&encoder.encode(pixels)?))
}

/// Runs every variant of a line, and compares numbers.
fn add_numbers(tally: &mut Tally, name: &str, line: (&Value, &Value), run: &dyn Fn(&Value) -> Result<Vec<f64>, Error>) {
    tally.add(name, line, run, &|found, expected| are_near(found, &numbers(expected)));
}

#[test]
fn every_changed_key_of_an_encoder_computes_what_transformers_does_or_is_refused() {
    let mut tally = Tally::default();
    for (name, line) in lines("model") {
        let (folder, file) = copied(&name);
        let write = |file: &Value| fs::write(folder.path().join("config.json"), file.to_string()).unwrap();
        if golden(&name).join("run.json").is_file() {
            let run = Run::read(&name, &trained_by(&name, VisionTraining::default()));
            let row = run.rows().iter().find(|row| row["images"].as_array().is_some_and(|images| images.len() == 1));
            let batch = run.batch(&[row.unwrap().clone()]);
            let run = |file: &Value| {
                write(file);
                logits(&name, folder.path(), &batch)
            };
            add_numbers(&mut tally, &name, (&line, &file), &run);
        } else {
            let pixels = picture_of_encoder(&name);
            let run = |file: &Value| {
                write(file);
                features(folder.path(), &pixels)
            };
            add_numbers(&mut tally, &name, (&line, &file), &run);
        }
    }
    tally.check();
    // None of the exceptions is one no more.
    let all: usize = EXCEPTIONS.iter().map(|(models, _, values, _)| models.len() * values.len()).sum();
    assert_eq!(tally.excepted, all);
}

#[test]
fn every_changed_key_of_an_image_processor_computes_what_transformers_does_or_is_refused() {
    let mut tally = Tally::default();
    let folder = tempfile::tempdir().unwrap();
    let files = ["rgb.png", "wide.png", "tall.png"].map(|name| fs::read(golden("../pixels").join(name)).unwrap());
    let pictures = files.map(|bytes| Picture::decode(&bytes).unwrap());
    for (name, line) in lines("processor") {
        let run = |file: &Value| -> Result<Value, Error> {
            fs::write(folder.path().join("preprocessor_config.json"), file.to_string()).unwrap();
            let processor = Processor::new(Processing::open(folder.path())?, PATCH);
            let of = |picture: &Picture| {
                let Pixels { tiles, patches, .. } = processor.pixels(picture, false)?;
                let bytes: Vec<u8> = patches.iter().flat_map(|value| value.to_le_bytes()).collect();
                let tiles: Vec<[usize; 2]> = tiles.iter().map(|tile| [tile.rows, tile.columns]).collect();
                Ok(json!([tiles, crc32fast::hash(&bytes)]))
            };
            pictures.iter().map(of).collect::<Result<Vec<Value>, Error>>().map(Value::Array)
        };
        tally.add(&name, (&line, &line["settings"]), &run, &|found, expected| found == expected);
    }
    tally.check();
}
