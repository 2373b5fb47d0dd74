//! Changes every key of every golden model's `config.json`. A model that still runs must compute what Transformers computes. One
//! that Transformers refuses, or cannot compute, must not run.
//!
//! Each key is tried once, with another of its values in each model; `TUNESMITH_ALL_VARIANTS=1` tries all values
//! (`just config-variants`).
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde_json::Value;
use tunesmith::Error;
use tunesmith::config::arch::Arch;
use tunesmith::data::batch::{Batch, Example, IGNORE};
use tunesmith::model::Model;
use tunesmith::model::weights::WeightFiles;

use crate::parity::{golden, json, recipe};

const TOKENS: usize = 24;
/// Limit for logits. It allows for the 5e-5 of the parity tests, for the rounding of stored values, and for larger logits.
const LIMIT: f64 = 1e-4;

/// A value of a key, and what Transformers does with the changed file: `refused`, `random` or `nan`, or some logits.
struct Variant {
    key: String,
    value: Value,
    outcome: String,
    logits: Option<Vec<f64>>,
}

/// A golden model, with the logits of its unchanged configuration.
struct Golden {
    family: String,
    base: Vec<f64>,
    /// The variants of each key.
    keys: Vec<Vec<Variant>>,
}

fn goldens() -> Vec<Golden> {
    let text = std::fs::read_to_string(golden("../config_variants.jsonl")).unwrap();
    text.lines().map(|line| Golden::of(&serde_json::from_str(line).unwrap())).collect()
}

impl Golden {
    fn of(line: &Value) -> Self {
        let base = numbers(&line["base"]);
        let variants = |(key, outcomes): (&String, &Value)| -> Vec<Variant> {
            let of_outcome = |(outcome, values): (&String, &Value)| -> Vec<Variant> {
                let variant = |found: &Value| {
                    let (value, logits) = match outcome.as_str() {
                        "same" => (found, Some(base.clone())),
                        "logits" => (&found[0], Some(numbers(&found[1]))),
                        _ => (found, None),
                    };
                    Variant { key: key.clone(), value: value.clone(), outcome: outcome.clone(), logits }
                };
                values.as_array().unwrap().iter().map(variant).collect()
            };
            outcomes.as_object().unwrap().iter().flat_map(of_outcome).collect()
        };
        let keys = line["variants"].as_object().unwrap().iter().map(variants).collect();
        Self { family: line["family"].as_str().unwrap().to_owned(), keys, base }
    }

    /// One variant of each key. Which one depends on `turn`, so that models differ in what they try.
    fn one_of_each(&self, turn: usize) -> Vec<&Variant> {
        self.keys.iter().enumerate().map(|(number, values)| &values[(turn + number) % values.len()]).collect()
    }
}

/// The logits that the script stores.
fn sample(dir: &Path) -> Result<Vec<f64>, Error> {
    let arch = Arch::from_dir(dir)?;
    let weights = WeightFiles::open(dir, &arch.tensors())?;
    let model = Model::load(&arch, Some(&weights), &recipe())?;
    let most = arch.vocab_size.min(300) as u32;
    let input_ids: Vec<u32> = (0..TOKENS as u32).map(|at| (7 * at * at + 3 * at + 11) % most).collect();
    let batch = Batch::from_examples(&[Example { input_ids, labels: vec![IGNORE; TOKENS] }]);
    let logits = model.logits(&batch, &[TOKENS / 2, TOKENS - 1])?;
    let at = |row: usize, id: usize| logits.get(row * arch.vocab_size + id).map_or(f64::NAN, |&logit| f64::from(logit));
    Ok(vec![at(1, 5), at(1, 77), at(0, 140)])
}

/// A folder with the weights of a model alone.
fn with_weights(source: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(source).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().contains("safetensors") {
            std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    folder
}

pub fn changed(config: &Value, key: &str, value: &Value) -> Value {
    let mut config = config.clone();
    // Keys of other classes.
    if key == "*" {
        let more = value.as_object().unwrap().iter();
        config.as_object_mut().unwrap().extend(more.map(|(key, value)| (key.clone(), value.clone())));
        return config;
    }
    let (path, name) = key.rsplit_once('.').unwrap_or(("", key));
    let place = path.split('.').filter(|part| !part.is_empty()).fold(&mut config, |place, part| &mut place[part]);
    let fields = place.as_object_mut().unwrap();
    if *value == serde_json::json!(["removed"]) {
        fields.remove(name);
    } else {
        fields.insert(name.to_owned(), value.clone());
    }
    config
}

pub fn numbers(found: &Value) -> Vec<f64> {
    found.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

pub fn are_near(found: &[f64], expected: &[f64]) -> bool {
    let largest = expected.iter().fold(1.0_f64, |most, number| most.max(number.abs()));
    found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= LIMIT * largest)
}

#[test]
fn a_rotary_share_of_zero_turns_nothing_where_transformers_turns_a_share() {
    let still = serde_json::json!({"rope_type": "default", "partial_rotary_factor": 0.0});
    let mut alike = Vec::new();
    for model in goldens() {
        let variants = model.keys.iter().flatten();
        let Some(variant) = variants.into_iter().find(|it| it.key == "rope_parameters" && it.value == still) else {
            continue;
        };
        let source = golden("..").join(&model.family).join("model");
        let folder = with_weights(&source);
        let config = changed(&json(&source.join("config.json")), &variant.key, &variant.value);
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        match (sample(folder.path()), &variant.logits) {
            (Ok(found), Some(expected)) => {
                assert!(are_near(&found, expected), "{}: {found:?}, Transformers {expected:?}", model.family);
                alike.push(model.family);
            }
            (Ok(_), None) => panic!("{} runs here alone", model.family),
            (Err(error), _) => {
                assert!(error.to_string().contains("rot") || error.to_string().contains("rope"), "{error}");
            }
        }
    }
    for family in ["a/glm4", "a/minimax_m2", "a/phi3", "a/qwen3_5"] {
        assert!(alike.iter().any(|it| it == family), "{family} is refused: {alike:?}");
    }
}

#[test]
fn every_changed_key_computes_what_transformers_does_or_is_refused() {
    let all = std::env::var_os("TUNESMITH_ALL_VARIANTS").is_some();
    let (mut alike, mut refused, mut wrong) = (0, 0, Vec::new());
    // Refused here alone.
    let mut strict = BTreeMap::new();
    for (turn, model) in goldens().iter().enumerate() {
        let family = &model.family;
        let source = golden("..").join(family).join("model");
        let folder = with_weights(&source);
        let config = json(&source.join("config.json"));
        let run = |config: &Value| {
            std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
            catch_unwind(AssertUnwindSafe(|| sample(folder.path())))
        };
        assert!(are_near(&run(&config).unwrap().unwrap(), &model.base), "{family}, unchanged");
        let tried = if all { model.keys.iter().flatten().collect() } else { model.one_of_each(turn) };
        for Variant { key, value, outcome, logits } in tried {
            let label = format!("{family} {key}: {value}");
            match (run(&changed(&config, key, value)), logits) {
                (Err(_), _) => wrong.push(format!("{label}: a panic")),
                (Ok(Err(error)), expected) => {
                    refused += 1;
                    if expected.is_some() {
                        let error = error.to_string();
                        let error = error.rsplit("config.json: ").next().unwrap_or_default().to_owned();
                        strict.entry(format!("{key}: {value}: {error}")).or_insert_with(Vec::new).push(family.clone());
                    }
                }
                (Ok(Ok(found)), Some(expected)) => {
                    alike += 1;
                    if !are_near(&found, expected) {
                        wrong.push(format!("{label}: {found:?}, Transformers {expected:?}"));
                    }
                }
                (Ok(Ok(found)), None) if outcome == "nan" && !found.iter().all(|number| number.is_finite()) => {
                    alike += 1;
                }
                (Ok(Ok(_)), None) => wrong.push(format!("{label}: runs, Transformers: {outcome}")),
            }
        }
    }
    if all {
        for (variant, families) in &strict {
            println!("only here refused: {variant}: {}", families.join(" "));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), alike + refused, wrong.join("\n"));
    assert!(alike > refused / 4, "{alike} ran, {refused} were refused");
    println!("{alike} alike, {refused} refused, {} of them here alone", strict.values().map(Vec::len).sum::<usize>());
}

#[test]
fn a_number_that_json_does_not_know_is_named_as_the_file_has_it() {
    let mut config = json(&golden("gpt2/model/config.json"));
    for (value, text) in
        [("NaN", "NaN"), ("-Infinity", "-Infinity"), ("{\"a\": 1}", "an object"), ("[NaN, 1]", "[NaN,1]")]
    {
        config["layer_norm_epsilon"] = Value::from("HERE");
        let written = config.to_string().replace("\"HERE\"", value);
        let error = Arch::from_json(&written, Path::new("config.json")).unwrap_err().to_string();
        assert!(error.contains(&format!("config.json: layer_norm_epsilon is {text}, expected ")), "{value}: {error}");
    }
}
