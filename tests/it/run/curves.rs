//! The numbers of training do not change from one version to the next: runs on the portable kernels, stored to the last bit.
//!
//! Each case stores the lines of `metrics.jsonl` up to what the clock decides, and the digests of the final weights and of the
//! optimizer's state. A change that means to alter a number rewrites the file:
//! `TUNESMITH_TEST_UPDATE=1 cargo test --test it run::curves`. Checkpoints of step 3 that an earlier version wrote are kept in
//! `tests/golden/checkpoints/VERSION/`; from each, a run of today ends with the stored numbers.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::fixture::{Fixture, said, train};

/// What a run left: its metrics, and the digest of each file of weights and state.
type Left = (Vec<String>, BTreeMap<String, String>);

/// A name, a model of `tests/golden` (none: the fixture's own), and lines of its configuration.
const CASES: &[(&str, Option<&str>, &[&str])] = &[
    ("lora-packed", None, &["data.packing: true", "train.neftune_noise_alpha: 5.0"]),
    (
        "qlora-adamw_8bit",
        None,
        &["tuning.mode: qlora", "train.optim: adamw_8bit", "tuning.lora.use_rslora: true", "train.batch_size: 4"],
    ),
    (
        "dora-gemma3",
        Some("gemma3"),
        &["tuning.lora.use_dora: true", "tuning.lora.lora_dropout: 0.0", "train.gradient_checkpointing: true"],
    ),
    (
        "lora-qwen3_moe",
        Some("qwen3_moe"),
        &["tuning.lora.target_modules: all-linear", "tuning.lora.lora_dropout: 0.0", "train.optim: adamw_torch"],
    ),
    (
        "full-bf16-adafactor",
        None,
        &["tuning.mode: full", "train.bf16: true", "train.optim: adafactor", "train.learning_rate: 0.001"],
    ),
    (
        "full-zero2-ema",
        None,
        &[
            "tuning.mode: full",
            "train.learning_rate: 0.001",
            "train.strategy: zero2",
            "train.dp_ranks: 2",
            "train.ema_decay: 0.9",
        ],
    ),
    (
        "freeze-fsdp-lion",
        None,
        &[
            "tuning.mode: freeze",
            "tuning.freeze.trainable_layers: 1",
            "train.optim: lion",
            "train.learning_rate: 0.0003",
            "train.strategy: fsdp",
            "train.dp_ranks: 2",
        ],
    ),
    (
        "ia3-phi3",
        Some("phi3"),
        &["tuning.mode: ia3", "train.label_smoothing_factor: 0.1", "train.lr_scheduler_type: linear"],
    ),
    (
        "oft-qwen2-schedule_free",
        Some("qwen2"),
        &["tuning.mode: oft", "train.optim: schedule_free_adamw", "train.lr_scheduler_type: constant_with_warmup"],
    ),
];

/// Cases of which a checkpoint is kept.
const KEPT: &[&str] = &["lora-packed", "qlora-adamw_8bit", "lora-qwen3_moe", "full-zero2-ema", "freeze-fsdp-lion"];

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// The fixture with the weights of a golden model under its tokenizer, which has fewer tokens.
fn fixture(model: Option<&str>) -> Fixture {
    let fixture = Fixture::new();
    if let Some(name) = model {
        std::fs::remove_file(fixture.path("model/model.safetensors")).unwrap();
        copy(&golden("a").join(name).join("model"), &fixture.path("model"));
    }
    fixture
}

fn left(out: &Path) -> Left {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| {
        let end = [",\"tokens_per_second\"", ",\"eval_seconds\""].into_iter().find_map(|clock| line.find(clock));
        line[..end.expect("a line says what it took")].to_owned()
    });
    let mut digests = BTreeMap::new();
    for folder in ["adapter", "model", "checkpoint-000006"] {
        for entry in std::fs::read_dir(out.join(folder)).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|end| end == "safetensors") {
                let digest = blake3::hash(&std::fs::read(&path).unwrap()).to_hex();
                digests.insert(path.strip_prefix(out).unwrap().display().to_string(), digest.to_string());
            }
        }
    }
    (lines.collect(), digests)
}

/// A case's configuration, and what else its folder needs.
fn configured(model: Option<&str>, extra: &[&str]) -> (Fixture, PathBuf) {
    let fixture = fixture(model);
    let mut lines = vec!["tuning.backend: reference", "train.eval_strategy: steps", "train.eval_steps: 3"];
    lines.extend(["train.save_strategy: steps", "train.save_steps: 3", "train.seed: 7"]);
    lines.extend(extra);
    let config = fixture.config("run", &lines);
    (fixture, config)
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn updates() -> bool {
    std::env::var_os("TUNESMITH_TEST_UPDATE").is_some()
}

fn stored() -> BTreeMap<String, Left> {
    serde_json::from_str(&std::fs::read_to_string(golden("curves.json")).unwrap()).unwrap()
}

#[test]
fn losses_and_weights_are_to_the_bit_those_of_earlier_versions() {
    let mut expected = if updates() { BTreeMap::new() } else { stored() };
    for (name, model, extra) in CASES {
        let (fixture, config) = configured(*model, extra);
        let output = train(&config, &[]);
        assert!(output.status.success(), "{name}: {}", said(&output));
        let found = left(&fixture.path("out"));
        assert!(found.0.len() == 8 && found.1.len() > 1, "{name}: {found:?}");
        if updates() {
            expected.insert((*name).to_owned(), found);
            let kept = golden("checkpoints").join(env!("CARGO_PKG_VERSION")).join(name);
            if KEPT.contains(name) && !kept.exists() {
                copy(&fixture.path("out/checkpoint-000003"), &kept);
            }
        } else {
            assert_eq!(Some(&found), expected.get(*name), "{name}");
        }
    }
    if updates() {
        std::fs::write(golden("curves.json"), serde_json::to_string_pretty(&expected).unwrap() + "\n").unwrap();
    }
    assert_eq!(expected.len(), CASES.len(), "stored cases that no longer run");
}

#[test]
fn runs_go_on_from_checkpoints_of_earlier_versions() {
    let expected = stored();
    let mut count = 0;
    for version in std::fs::read_dir(golden("checkpoints")).unwrap() {
        for kept in std::fs::read_dir(version.unwrap().path()).unwrap() {
            let kept = kept.unwrap().path();
            let (name, model, extra) =
                CASES.iter().find(|case| kept.ends_with(case.0)).expect("a case for each kept checkpoint");
            let (fixture, config) = configured(*model, extra);
            let output = train(&config, &[&format!("train.resume_from_checkpoint={}", kept.display())]);
            assert!(output.status.success(), "{name}: {}", said(&output));
            let ((lines, digests), (all, ends)) = (left(&fixture.path("out")), &expected[*name]);
            assert_eq!((&lines[..], &digests), (&all[4..], ends), "{}", kept.display());
            count += 1;
        }
    }
    assert!(count >= KEPT.len());
}
