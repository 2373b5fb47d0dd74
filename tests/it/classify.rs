//! Classification heads against Transformers, PEFT and scikit-learn: scores, losses, gradients, ten steps, metrics.
//! `scripts/golden/classify.py` made the goldens.
use std::path::{Path, PathBuf};

use serde_json::Value;
use tunesmith::checkpoint::loaded_adapter::score_head;
use tunesmith::checkpoint::peft;
use tunesmith::comm::single::Single;
use tunesmith::config::Config;
use tunesmith::config::arch::{Arch, ScoreHead};
use tunesmith::data::batch::{Batch, IGNORE};
use tunesmith::eval::metrics::scored::{Bootstrap, Scored};
use tunesmith::model::Model;
use tunesmith::model::weights::WeightFiles;
use tunesmith::optim::{AdamW, Betas, Optimizer};
use tunesmith::parallel::optimizer::slots;
use tunesmith::train::step::step;

use crate::parity::{close, golden as models, json, recipe, tensors};

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/classify").join(path)
}

/// The model with the golden's adapter and head.
fn load(family: &str, case: &str) -> Model {
    let (dir, adapter) = (models(family).join("model"), golden(case).join("adapter"));
    let mut arch = Arch::from_dir(&dir).unwrap();
    let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
    arch.score = score_head(&adapter).unwrap();
    let (own, stored) = peft::load_adapter(&adapter).unwrap();
    let mut config = recipe();
    config.tuning = own.settings(&arch, &config.tuning).unwrap();
    config.train.decay_norms_and_bias = true;
    let mut model = Model::load(&arch, Some(&weights), &config).unwrap();
    assert_eq!(stored.len(), model.params.specs.len(), "PEFT's tensors and ours");
    for spec in model.params.specs.clone() {
        model.params.values_mut().slice(spec.range()).write(&stored[&spec.name].1);
    }
    model
}

/// Rows `range` of a golden, each counted with its label's weight.
fn batch(golden: &Value, range: impl IntoIterator<Item = usize>) -> Batch {
    let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
    for row in range {
        let row = &golden["rows"][row];
        let ids: Vec<u32> = serde_json::from_value(row["ids"].clone()).unwrap();
        let mut labels = vec![IGNORE; ids.len()];
        let numbers = golden["weights"].is_null();
        let label = &row["label"];
        let bits = || (label.as_f64().unwrap() as f32).to_bits() as i32;
        labels.push(if numbers { bits() } else { label.as_i64().unwrap() as i32 });
        batch.push(&ids, &labels);
        if let Some(class) = label.as_u64().filter(|_| !numbers) {
            batch.weigh_last(golden["weights"][class as usize].as_f64().unwrap() as f32);
        }
    }
    batch
}

/// Scores, losses, gradients and ten steps of a golden with a classification head.
pub fn check(family: &str, case: &str) {
    let mut model = load(family, case);
    let golden_rows = json(&golden(case).join("golden.json"));
    let forward = tensors(&golden(case).join("forward.safetensors"));
    let first = batch(&golden_rows, 0..8);
    close("scores", &model.logits(&first, &first.ends()).unwrap(), &forward["scores"].1, 5e-5);
    let weight = first.label_weight();
    let loss = model.loss(&first).unwrap() / weight;
    assert!((loss - golden_rows["loss"].as_f64().unwrap()).abs() < 2e-5, "{loss}");
    // In three parts of unequal weight: the divisor is that of the whole.
    model.params.zero_grads();
    let mut sum = 0.0;
    for part in [0..3, 3..4, 4..8] {
        let part = batch(&golden_rows, part);
        sum += model.forward_backward(&part, 1.0 / weight as f32, 1.0, 0).unwrap();
    }
    assert!((sum / weight - loss).abs() < 1e-6, "{sum}");
    for spec in &model.params.specs {
        let name = model.arch.naming().map_or_else(|| spec.name.clone(), |naming| naming.stored(&spec.name));
        let wanted = &forward[&format!("grad.base_model.model.{name}")].1;
        let scale = wanted.iter().fold(1.0f32, |most, value| most.max(value.abs()));
        close(&spec.name, &model.params.grads().slice(spec.range()).read(), wanted, 5e-5 * scale);
    }
    let betas = Betas { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 };
    let mut optimizer = Optimizer::new(Box::new(AdamW(betas)), slots(&model.params.specs), model.params.values());
    for (number, wanted) in golden_rows["trace"].as_array().unwrap().iter().enumerate() {
        let row = |at: usize| (number * 8 + at) % 16;
        let parts = [(0..5).map(row), (5..8).map(row)].map(|rows| batch(&golden_rows, rows));
        let most = |outputs: &[f32]| (0..outputs.len()).max_by(|&a, &b| outputs[a].total_cmp(&outputs[b])).unwrap();
        let mut right = 0;
        for part in parts.iter().filter(|_| model.arch.outputs() > 1) {
            let outputs = model.logits(part, &part.ends()).unwrap();
            let labels = part.ends().into_iter().map(|end| part.targets[end]);
            right += outputs
                .chunks(model.arch.outputs())
                .zip(labels)
                .filter(|(row, label)| most(row) as i32 == *label)
                .count();
        }
        let found = step(&mut model, &mut optimizer, &Single, &parts, 1e-3, 1.0).unwrap();
        assert_eq!(found.right, right as u64, "before the update");
        let near = |found: f64, key: &str, limit: f64| {
            let wanted = wanted[key].as_f64().unwrap();
            assert!((found - wanted).abs() <= limit * wanted.abs().max(1.0), "step {number}, {key}: {found} {wanted}");
        };
        near(found.loss, "loss", 2e-5);
        near(found.grad_norm, "grad_norm", 1e-4);
    }
    let after = tensors(&golden(case).join("head_after.safetensors"));
    let score = model.params.find("score.weight").unwrap();
    close("head", &model.params.values().slice(score.range()).read(), &after["base_model.model.score.weight"].1, 5e-6);
}

#[test]
fn a_weighted_classification_on_llama_is_pytorch_s() {
    check("llama", "llama");
}

#[test]
fn a_weighted_classification_on_gemma_2_is_pytorch_s() {
    // Whose logits over the vocabulary are capped, and whose scores are not.
    check("gemma2", "gemma2");
}

#[test]
fn a_weighted_classification_on_gpt2_is_pytorch_s() {
    // Whose head has the same name beside other names of all modules.
    check("gpt2", "gpt2");
}

#[test]
fn a_classifier_of_experts_has_no_router_loss_as_in_transformers() {
    let dir = models("mixtral").join("model");
    let loss = |balance: Option<f64>| {
        let mut arch = Arch::from_dir(&dir).unwrap();
        let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
        arch.experts.as_mut().unwrap().balance = balance;
        arch.score = Some(ScoreHead { labels: vec!["a".into(), "b".into()] });
        let mut model = Model::load(&arch, Some(&weights), &Config::default()).unwrap();
        let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
        batch.push(&[5, 6, 7], &[IGNORE, IGNORE, IGNORE, 1]);
        model.params.zero_grads();
        model.forward_backward(&batch, 1.0, 1.0, 0).unwrap()
    };
    assert_eq!(loss(None).to_bits(), loss(Some(0.5)).to_bits());
}

#[test]
fn a_regression_is_pytorch_s() {
    check("llama", "regression");
}

#[test]
fn measures_are_scikit_learn_s() {
    let cases = json(&golden("measures.json"));
    for case in cases.as_array().unwrap() {
        let count = case["labels"].as_u64().unwrap() as usize;
        let labels = if count == 1 { Vec::new() } else { (0..count).map(|label| label.to_string()).collect() };
        let mut scored = Scored::new(ScoreHead { labels });
        for (row, target) in case["scores"].as_array().unwrap().iter().zip(case["targets"].as_array().unwrap()) {
            let row: Vec<f32> = serde_json::from_value(row.clone()).unwrap();
            let target = match count {
                1 => (target.as_f64().unwrap() as f32).to_bits() as i32,
                _ => target.as_i64().unwrap() as i32,
            };
            scored.push(&row, target, 1.0);
        }
        let bootstrap = Bootstrap { replicates: 200, confidence: 0.9, seed: 1 };
        let scores = scored.scores(bootstrap);
        for (name, wanted) in case["expected"].as_object().unwrap() {
            let found = scores.iter().find(|score| score.name == *name).unwrap_or_else(|| panic!("{name}"));
            let wanted = wanted.as_f64().unwrap();
            assert!((found.value - wanted).abs() < 1e-9, "{name} of {count}: {} {wanted}", found.value);
            let (low, high) = found.interval.unwrap();
            assert!(low <= high && low <= found.value + 0.05 && high >= found.value - 0.05, "{name}: {low} {high}");
        }
        if let Some(wanted) = case.get("confusion") {
            let wanted: Vec<Vec<u64>> = serde_json::from_value(wanted.clone()).unwrap();
            assert_eq!(scored.confusion(), wanted);
        }
        let same = scored.differences(&scored, bootstrap);
        assert!(same.iter().all(|difference| difference.interval.is_none_or(|range| range == (0.0, 0.0))));
    }
}
