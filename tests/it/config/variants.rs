//! Every key of every golden family's `config.json`, changed: what runs computes what Transformers computes, and what
//! Transformers refuses, or cannot compute, does not run.
//!
//! A ninth of the variants is tried; `TUNESMITH_ALL_VARIANTS=1` tries all (`just config-variants`).
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde_json::Value;
use tunesmith::Error;
use tunesmith::config::arch::Arch;
use tunesmith::data::batch::{Batch, Example, IGNORE};
use tunesmith::model::Model;
use tunesmith::model::weights::WeightFiles;

use crate::parity::{golden, recipe};

const TOKENS: usize = 24;
/// Logits: parity's 5e-5, the rounding of what is stored, and larger values than parity's models have.
const LIMIT: f64 = 1e-4;

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

fn changed(config: &Value, key: &str, value: &Value) -> Value {
    let mut config = config.clone();
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

fn numbers(outcome: &Value) -> Option<Vec<f64>> {
    outcome.as_array().map(|numbers| numbers.iter().map(|number| number.as_f64().unwrap()).collect())
}

#[test]
fn every_changed_key_computes_what_transformers_does_or_is_refused() {
    let all = std::env::var_os("TUNESMITH_ALL_VARIANTS").is_some();
    let text = std::fs::read_to_string(golden("../config_variants.jsonl")).unwrap();
    let (mut alike, mut refused, mut wrong) = (0, 0, Vec::new());
    // Refused here, and of no matter to Transformers.
    let mut strict = std::collections::BTreeMap::new();
    for (number, line) in text.lines().enumerate() {
        let line: Value = serde_json::from_str(line).unwrap();
        let family = line["family"].as_str().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let source = golden(family).join("model");
        for entry in std::fs::read_dir(&source).unwrap() {
            let path = entry.unwrap().path();
            if path.to_string_lossy().contains("safetensors") {
                std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        let config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
        let base = numbers(&line["base"]).unwrap();
        for (index, variant) in line["variants"].as_array().unwrap().iter().enumerate() {
            if !all && !(index + number).is_multiple_of(9) {
                continue;
            }
            let (key, value, outcome) = (variant[0].as_str().unwrap(), &variant[1], &variant[2]);
            let label = format!("{family} {key}: {value}");
            let changed = changed(&config, key, value).to_string();
            std::fs::write(folder.path().join("config.json"), changed).unwrap();
            let expected = if *outcome == 0 { Some(base.clone()) } else { numbers(outcome) };
            let found = catch_unwind(AssertUnwindSafe(|| sample(folder.path())));
            match (found, expected) {
                (Err(_), _) => wrong.push(format!("{label}: a panic")),
                (Ok(Err(error)), expected) => {
                    refused += 1;
                    if expected.is_some() && *outcome == 0 {
                        strict.entry(format!("{key}: {value}")).or_insert_with(|| format!("{family}: {error}"));
                    }
                }
                (Ok(Ok(found)), Some(expected)) => {
                    let largest = expected.iter().fold(1.0_f64, |most, number| most.max(number.abs()));
                    let far = |(a, b): (&f64, &f64)| a.is_nan() || (a - b).abs() > LIMIT * largest;
                    if found.iter().zip(&expected).any(far) {
                        wrong.push(format!("{label}: {found:?}, Transformers {expected:?}"));
                    }
                    alike += 1;
                }
                (Ok(Ok(found)), None) => {
                    let finite = found.iter().all(|number| number.is_finite());
                    if outcome != "nan" || finite {
                        wrong.push(format!("{label}: runs, Transformers: {outcome}"));
                    }
                }
            }
        }
    }
    if all {
        for (variant, error) in &strict {
            println!("only here refused: {variant}: {error}");
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), alike + refused + wrong.len(), wrong.join("\n"));
    assert!(alike > refused / 4, "{alike} ran, {refused} were refused");
    println!("{alike} alike, {refused} refused");
}
