//! Whole runs on a GPU beside the same runs on the CPU. The GPUs are the stand-in's.
use crate::run::ends::metrics;
use crate::run::fixture::{Fixture, said, tunesmith};
use serde_json::Value;
use std::path::Path;
use std::process::Output;
use tunesmith::device::cuda::testing;

fn train(config: &Path, words: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = tunesmith(&[&["train", config.to_str().unwrap()], words].concat());
    command.env("TUNESMITH_CUDA_LIBRARIES", testing::stand_in()).env("XDG_CACHE_HOME", config.parent().unwrap());
    command.envs(environment.iter().copied()).output().unwrap()
}

/// As [`train`], into the folder `name`. Checks that the run succeeds, and returns its output.
fn trained(fixture: &Fixture, config: &Path, name: &str, words: &[&str], environment: &[(&str, &str)]) -> String {
    let out = format!("train.output_dir={}", fixture.path(name).display());
    let ended = train(config, &[&[&*out], words].concat(), environment);
    assert!(ended.status.success(), "{name}: {}", said(&ended));
    said(&ended)
}

fn losses(fixture: &Fixture, name: &str) -> Vec<f64> {
    metrics(&fixture.path(name)).0.iter().map(|line| line.get("loss").and_then(Value::as_f64).unwrap()).collect()
}

fn assert_close(name: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 2e-5, "{name}: {found} != {expected}");
    }
}

#[test]
fn a_quantized_base_trains_on_a_gpu_as_on_the_cpu() {
    let fixture = Fixture::new();
    // A dropout and noise too: their counters are the same everywhere.
    let config = fixture.config("run", &["train.max_steps: 4", "data.val_path: UNSET"]);
    for (name, words) in [
        ("nf4", &["model.quantization=nf4"][..]),
        ("fp4", &["model.quantization=fp4", "train.optim=adamw_8bit"]),
        ("int8", &["model.quantization=int8", "train.neftune_noise_alpha=5"]),
        ("fp8", &["model.quantization=fp8"]),
        ("muon", &["train.optim=muon"]),
        ("freeze", &["tuning.mode=freeze", "tuning.freeze.trainable_layers=1"]),
    ] {
        trained(&fixture, &config, name, words, &[]);
        let on_gpu = format!("{name} gpu");
        let said = trained(&fixture, &config, &on_gpu, &[words, &["model.device=cuda"]].concat(), &[]);
        assert_eq!(said.contains("computed by the processor, tensor by tensor"), name == "muon", "{said}");
        assert_close(name, &losses(&fixture, &on_gpu), &losses(&fixture, name));
    }
}

#[test]
fn a_checkpoint_of_a_gpu_goes_to_the_cpu_where_that_is_allowed() {
    let fixture = Fixture::new();
    let lines = ["model.device: cuda", "train.max_steps: 3", "train.save_strategy: steps", "train.save_steps: 3"];
    let config = fixture.config("run", &lines);
    trained(&fixture, &config, "out", &[], &[]);
    let words = ["--resume", "model.device=cpu", "train.max_steps=6"];
    let refused = train(&config, &words, &[]);
    assert_eq!(refused.status.code(), Some(5), "{}", said(&refused));
    trained(&fixture, &config, "out", &[&words[..], &["--allow", "simd"]].concat(), &[]);
    trained(&fixture, &config, "cpu", &["model.device=cpu", "train.max_steps=6"], &[]);
    // The first three steps had the rate of a run of three.
    assert_eq!(losses(&fixture, "out").len(), 6);
    assert_close("first", &losses(&fixture, "out")[..1], &losses(&fixture, "cpu")[..1]);
}

#[test]
fn what_other_programs_hold_of_a_gpu_is_left_to_them() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["model.device: cuda", "train.max_steps: 1"]);
    let said = trained(&fixture, &config, "out", &[], &[("TUNESMITH_STAND_IN_USED", "3221225472")]);
    // 90 % of the fourth GiB.
    assert!(said.contains("922 MiB: 90 % of what is free"), "{said}");
}

#[test]
fn automatic_batch_sizes_are_measured_on_the_gpu() {
    let fixture = Fixture::new();
    let lines = ["model.device: cuda", "train.max_steps: 2", "train.batch_size: auto", "train.grad_accum: auto"];
    let config = fixture.config("run", &[&lines[..], &["train.effective_batch: 8"]].concat());
    trained(&fixture, &config, "cpu", &["model.device=cpu", "train.batch_size=4"], &[]);
    let expected = losses(&fixture, "cpu");
    // How many rows are as fast as any depends on times. Whether the largest pass fits depends on memory alone.
    for (name, memory, largest) in
        [("roomy", "4294967296", "tokens, fits"), ("tight", "39200000", "tokens does not fit; passes are limited to")]
    {
        let said = trained(&fixture, &config, name, &[], &[("TUNESMITH_STAND_IN_MEMORY", memory)]);
        let line = said.lines().find(|line| line.contains("effective batch")).expect("the batch");
        assert!(line.ends_with("= 8"), "{line}");
        assert!(said.contains(largest), "{name}: {said}");
        assert_close(name, &losses(&fixture, name), &expected);
    }
}
