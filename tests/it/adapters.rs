//! PEFT's adapters on what is no linear module of a block (`tests/golden/adapters`): rows and whole tables of the vocabulary, routers,
//! experts. Loaded, run, trained and merged as PEFT does it.
use std::path::{Path, PathBuf};

use tunesmith::checkpoint::finished::Finished;
use tunesmith::checkpoint::peft;
use tunesmith::config::ModelConfig;
use tunesmith::data::batch::Batch;
use tunesmith::export::merge::{Parts, compare, sample_logits};

use crate::parity::{Tensors, close, golden as models, tensors};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/adapters")
}

/// The rows of a golden, every token but the first a label.
fn batch(stored: &Tensors) -> Batch {
    let (shape, ids) = &stored["ids"];
    let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
    for row in ids.chunks(shape[1]) {
        let ids: Vec<u32> = row.iter().map(|&id| id as u32).collect();
        let labels: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
        batch.push(&ids, &labels);
    }
    batch
}

fn check(case: &str, family: &str) {
    let (base, dir) = (models(family).join("model"), golden().join(case).join("adapter"));
    let stored = tensors(&golden().join(case).join("golden.safetensors"));
    let parts = Parts::open(&base, &[], &peft::vocabulary(&dir).unwrap()).unwrap();
    let top = Finished::open(&dir, &parts.arch).unwrap();
    let mut model = parts.adapted(&top, &ModelConfig::default()).unwrap();
    let batch = batch(&stored);
    let length = stored["ids"].0[1];
    let rows: Vec<usize> = (0..2).flat_map(|row| [3, 7, 11].map(|at| row * length + at)).collect();
    close(case, &model.logits(&batch, &rows).unwrap(), &stored["logits"].1, 5e-5);
    let scale = 1.0 / batch.label_tokens() as f32;
    model.params.zero_grads();
    let loss = model.forward_backward(&batch, scale, 1.0, 0).unwrap() * f64::from(scale);
    if model.arch.experts.as_ref().is_none_or(|experts| experts.balance.is_none()) {
        assert!((loss - f64::from(stored["loss"].1[0])).abs() < 2e-5, "{case}: {loss} {:?}", stored["loss"]);
    }
    let mut compared = 0;
    for spec in &model.params.specs {
        // Of whole tables no gradients are stored.
        let Some((shape, wanted)) = stored.get(&format!("grad.base_model.model.{}", spec.name)) else {
            assert!(case.starts_with("tables") && !spec.name.contains("lora"), "{case}: {}", spec.name);
            continue;
        };
        assert_eq!(&spec.shape, shape, "{case}: {}", spec.name);
        let most = wanted.iter().fold(1e-3f32, |most, value| most.max(value.abs()));
        close(&format!("{case}: {}", spec.name), &model.params.grads()[spec.range()], wanted, 1e-4 * most);
        compared += 1;
    }
    assert_eq!(compared, stored.keys().filter(|name| name.starts_with("grad.")).count(), "{case}: PEFT trains no more");
    let logits = sample_logits(&model).unwrap();
    let merged = parts.merged(Some(top)).unwrap();
    let difference = compare(&logits, &sample_logits(&merged.model().unwrap()).unwrap(), merged.arch.outputs());
    assert!(difference.largest <= 1e-5 * difference.scale, "{case}: {difference:?}");
}

#[test]
fn rows_of_either_table_are_pefts() {
    for case in ["rows_list", "rows_apart", "rows_of_the_head", "rows_grown"] {
        check(case, "llama");
    }
    check("rows_tied", "qwen2");
}

#[test]
fn whole_tables_of_a_grown_vocabulary_are_pefts() {
    check("tables", "llama");
    // Stored because the vocabulary has grown, not because they were trained.
    check("tables_beside", "llama");
}

#[test]
fn routers_and_experts_are_pefts() {
    for (case, family) in [
        ("mixtral", "mixtral"),
        ("qwen3_moe", "qwen3_moe"),
        ("qwen2_moe", "qwen2_moe"),
        ("former_names", "mixtral"),
        ("transformers_4", "mixtral"),
    ] {
        check(case, family);
    }
}
