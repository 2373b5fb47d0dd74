//! Adapters of PEFT on modules other than the linear ones of a block (`tests/golden/adapters`): rows and whole tables of the
//! vocabulary, routers, experts. They are loaded, run, trained and merged as PEFT does it.
use std::path::{Path, PathBuf};

use serde_json::Value;
use tunesmith::checkpoint::AdapterConfig;
use tunesmith::checkpoint::loaded_adapter::LoadedAdapter;
use tunesmith::checkpoint::peft;
use tunesmith::comm::single::Single;
use tunesmith::config::{Config, ModelConfig, load_text};
use tunesmith::data::batch::Batch;
use tunesmith::export::merge::{Parts, compare, sample_logits};
use tunesmith::model::adapters::Method;
use tunesmith::model::targets::Targets;
use tunesmith::optim::{AdamW, Betas, Optimizer};
use tunesmith::parallel::optimizer::slots;
use tunesmith::train::step::step;

use crate::parity::{Forward, Tensors, close, golden as models, tensors};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/adapters")
}

/// The rows of a golden, in which every token but the first has a label.
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
    let top = LoadedAdapter::open(&dir, &parts.arch).unwrap();
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
        // The golden stores no gradients of whole tables.
        let Some((shape, wanted)) = stored.get(&format!("grad.base_model.model.{}", spec.name)) else {
            let whole = case.starts_with("tables") || case.starts_with("tied");
            assert!(whole && !spec.name.contains("lora"), "{case}: {}", spec.name);
            continue;
        };
        assert_eq!(&spec.shape, shape, "{case}: {}", spec.name);
        let most = wanted.iter().fold(1e-3f32, |most, value| most.max(value.abs()));
        close(&format!("{case}: {}", spec.name), &model.params.grads().slice(spec.range()).read(), wanted, 1e-4 * most);
        compared += 1;
    }
    assert_eq!(compared, stored.keys().filter(|name| name.starts_with("grad.")).count(), "{case}: PEFT trains no more");
    if let Some((_, losses)) = stored.get("losses") {
        let mut model = parts.adapted(&top, &ModelConfig::default()).unwrap();
        let betas = Betas { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 };
        let mut optimizer = Optimizer::new(Box::new(AdamW(betas)), slots(&model.params.specs), model.params.values());
        for (index, &expected) in losses.iter().enumerate() {
            let loss = step(&mut model, &mut optimizer, &Single, std::slice::from_ref(&batch), 1e-3, 1.0).unwrap().loss;
            assert!((loss - f64::from(expected)).abs() < 2e-5, "{case}: step {index}: {loss} {expected}");
        }
        assert!(losses[0] - losses[losses.len() - 1] > 0.01, "{case}: training shows");
    }
    let logits = sample_logits(&model).unwrap();
    let merged = parts.merged(Some(top)).unwrap();
    let difference = compare(&logits, &sample_logits(&merged.model().unwrap()).unwrap(), merged.arch.outputs());
    assert!(difference.largest <= 1e-5 * difference.scale, "{case}: {difference:?}");
}

/// Adapters on all projections of latent attention; `check` holds merged and unmerged models of other families together.
#[test]
fn adapters_on_latent_attention_merge() {
    for family in ["deepseek_v3_dense", "deepseek_v3", "moonlight", "deepseek_v2_groups", "glm4_moe_lite", "mistral4"] {
        let dir = models(family).join("adapter_init");
        let parts = Parts::open(&models(family).join("model"), &[], &peft::vocabulary(&dir).unwrap()).unwrap();
        let top = LoadedAdapter::open(&dir, &parts.arch).unwrap();
        let forward = Forward::read(family);
        forward.check(&parts.adapted(&top, &ModelConfig::default()).unwrap(), &forward.tensors, "_lora");
        forward.check(&parts.merged(Some(top)).unwrap().model().unwrap(), &forward.tensors, "_lora");
    }
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

/// An embedding and a head that share a matrix, trained as two, as one, or by rows of either.
#[test]
fn tables_of_a_model_that_shares_them_are_pefts() {
    for (case, separated) in [
        ("tied_both", true),
        ("tied_head", true),
        ("tied_embedding", true),
        ("tied_ensured", false),
        ("tied_rows_of_the_head", true),
        ("tied_rows_apart", true),
        ("tied_table_and_rows", true),
        ("tied_grown", true),
        ("tied_grown_beside", false),
    ] {
        check(case, "qwen2");
        let dir = golden().join(case).join("adapter");
        let parts = Parts::open(&models("qwen2").join("model"), &[], &peft::vocabulary(&dir).unwrap()).unwrap();
        assert_eq!(parts.arch.separated, separated, "{case}");
    }
}

/// Adapters on top of others: what one has changed in a shared matrix is in both copies, once another has made two of it.
#[test]
fn a_matrix_is_shared_until_an_adapter_gives_the_head_its_own() {
    let (base, dir) = (models("qwen2").join("model"), |case: &str| golden().join(case).join("adapter"));
    let values = |below: &str, top: &str| {
        let parts = Parts::open(&base, &[dir(below)], &peft::vocabulary(&dir(top)).unwrap()).unwrap();
        let top = LoadedAdapter::open(&dir(top), &parts.arch).unwrap();
        let on_top = sample_logits(&parts.adapted(&top, &ModelConfig::default()).unwrap()).unwrap();
        let merged = parts.merged(Some(top)).unwrap();
        let difference = compare(&on_top, &sample_logits(&merged.model().unwrap()).unwrap(), merged.arch.outputs());
        assert!(difference.largest <= 1e-5 * difference.scale, "{below}: {difference:?}");
        let row = |table: &str, token: usize| {
            let spec = merged.arch.tensors().into_iter().find(|spec| spec.name == table).unwrap();
            merged.values(&spec).unwrap()[token * merged.arch.hidden_size..][..merged.arch.hidden_size].to_vec()
        };
        ["model.embed_tokens.weight", "lm_head.weight"].map(|table| row(table, 7))
    };
    let stored = |case: &str, name: &str, row: usize| {
        let tensors = tensors(&dir(case).join("adapter_model.safetensors"));
        let (shape, values) = &tensors[&format!("base_model.model.{name}")];
        values[row * shape[1]..][..shape[1]].to_vec()
    };
    // Rows 7, 3 and 40 of a shared matrix, then an embedding of its own: the head keeps the rows.
    let rows = stored("rows_tied", "model.embed_tokens.token_adapter.trainable_tokens_delta", 0);
    let [embedding, head] = values("rows_tied", "tied_embedding");
    assert!(embedding == stored("tied_embedding", "model.embed_tokens.weight", 7) && head == rows);
    // The other way round the rows are those of the embedding alone.
    let [embedding, head] = values("tied_head", "rows_tied");
    assert!(embedding == rows && head == stored("tied_head", "lm_head.weight", 7));
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

/// The settings of a case as a configuration.
fn settings(case: &str) -> Config {
    let text = std::fs::read_to_string(golden().join(case).join("settings.json")).unwrap();
    let mut lora: Value = serde_json::from_str(&text).unwrap();
    if lora["target_modules"].as_array().is_some_and(Vec::is_empty) {
        lora["target_modules"] = "^$".into();
    }
    (lora["r"], lora["lora_alpha"]) = (2.into(), 6.into());
    load_text(Path::new(case), &format!("tuning: {{lora: {lora}}}")).unwrap().config
}

/// Checks an adapter of ours with the settings and the values of PEFT's: it has the same places and the same tensors. PEFT has
/// loaded it with the settings that we write, and computed the same logits.
fn check_written(case: &str, family: &str) {
    let dir = golden().join(case);
    let parts =
        Parts::open(&models(family).join("model"), &[], &peft::vocabulary(&dir.join("adapter")).unwrap()).unwrap();
    let theirs = LoadedAdapter::open(&dir.join("adapter"), &parts.arch).unwrap();
    let tuning = settings(case).tuning;
    let targets = Targets { strict: false, ..tuning.lora.targets() };
    let placed = targets.place(&parts.arch, &tuning.lora).unwrap();
    assert_eq!(placed, theirs.placements, "{case}");
    let written = AdapterConfig::of(&tuning, &placed, Some(family.trim_start_matches("../"))).on(&parts.arch).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let named: Vec<_> = placed.iter().flat_map(tunesmith::model::adapters::Placement::tensors).collect();
    let values = named.iter().map(|(name, shape)| (name.clone(), shape.clone(), &theirs.tensors[name].1[..]));
    peft::save_adapter(folder.path(), &written, &values.collect::<Vec<_>>()).unwrap();
    let stored = |path: &Path| tensors(&path.join("adapter_model.safetensors"));
    assert!(stored(folder.path()) == stored(&dir.join("adapter")), "{case}");
    let text = std::fs::read_to_string(folder.path().join("adapter_config.json")).unwrap();
    let ours = dir.join("ours/adapter_config.json");
    if std::env::var_os("TUNESMITH_TEST_UPDATE").is_some() {
        std::fs::create_dir_all(dir.join("ours")).unwrap();
        std::fs::write(&ours, &text).unwrap();
        return;
    }
    assert!(
        std::fs::read_to_string(&ours).is_ok_and(|ours| ours == text),
        "{case}: TUNESMITH_TEST_UPDATE=1, then adapters.py: {text}"
    );
    let stored = tensors(&dir.join("golden.safetensors"));
    assert!(stored["ours"] == stored["logits"], "{case}: PEFT loads ours");
}

/// Adapters on experts of every family that has some, with a rank and an alpha of their own, and on one of their two parameters.
#[test]
fn experts_of_every_family_are_pefts() {
    for family in [
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "lfm2_moe",
        "gemma4_a4b",
        "deepseek_v2",
        "deepseek_v3",
        "mistral4",
        "afmoe",
        "minimax_m2",
        "gpt_oss",
    ] {
        check_written(&format!("experts_{family}"), family);
        check(&format!("experts_{family}"), family);
    }
    for (case, family) in [("gate_up", "gpt_oss"), ("down", "gpt_oss"), ("of_a_block", "qwen3_5_moe")] {
        check_written(&format!("experts_{case}"), family);
        check(&format!("experts_{case}"), family);
    }
}

/// The same where the experts are in MXFP4, and stay so.
#[test]
fn experts_in_mxfp4_are_pefts() {
    check_written("experts_mxfp4", "../mxfp4");
    check("experts_mxfp4", "../mxfp4");
}

/// Adapters by the names that experts had as modules: gate and up then share one with twice the rank and twice the alpha.
#[test]
fn experts_by_their_former_names_are_pefts() {
    for family in ["qwen3_next", "glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "afmoe", "minimax_m2"] {
        check_written(&format!("fused_{family}"), family);
        check(&format!("fused_{family}"), family);
    }
}
