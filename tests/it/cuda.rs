//! The whole engine on a GPU: the stand-in of `crates/device/stand_in`, or a real one with `TUNESMITH_TEST_GPU=1`. The limits are
//! those of the CPU.
use crate::parity::{check_full, check_passes, check_training, check_variant_of, families, on_gpu, other_kinds};
use crate::run::ends::metrics;
use crate::run::fixture::{Fixture, said, tunesmith};
use crate::run::resume::straight_equals_stopped;
use serde_json::Value;
use std::path::Path;
use std::process::Output;
use tunesmith::device::cuda::testing;

#[test]
fn every_family_computes_as_pytorch_on_a_gpu() {
    on_gpu(|| {
        for family in families() {
            check_passes(&family);
        }
    });
}

#[test]
fn families_train_as_peft_on_a_gpu() {
    on_gpu(|| {
        for family in ["llama", "gemma3", "qwen3_moe", "qwen3_5", "nemotron_h"] {
            check_training(family, &mut check_passes(family));
        }
    });
}

#[test]
#[ignore = "minutes: scripts/just gpu-test"]
fn every_family_trains_as_peft_on_a_gpu() {
    on_gpu(|| {
        for family in families() {
            check_training(&family, &mut check_passes(&family));
        }
    });
}

#[test]
fn full_fine_tuning_equals_pytorch_on_a_gpu() {
    on_gpu(|| check_full("full", true));
}

#[test]
fn every_kind_of_adapter_equals_peft_on_a_gpu() {
    on_gpu(|| {
        for variant in ["dora", "modules_to_save"] {
            check_variant_of("llama", variant);
        }
        for variant in other_kinds() {
            check_variant_of("qwen2", &variant);
        }
    });
}

#[test]
fn a_run_that_stops_goes_on_to_the_bit_on_a_gpu() {
    testing::stand_in();
    straight_equals_stopped(&["model.device: cuda", "train.optim: adamw_8bit", "model.quantization: nf4"], &[4]);
}

/// `tunesmith train`, its GPUs those of the stand-in.
fn train(config: &Path, words: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut args = vec!["train", config.to_str().unwrap()];
    args.extend(words);
    let mut command = tunesmith(&args);
    command.env("TUNESMITH_CUDA_LIBRARIES", testing::stand_in()).env("XDG_CACHE_HOME", config.parent().unwrap());
    command.envs(environment.iter().copied()).output().unwrap()
}

fn losses(output_dir: &Path) -> Vec<f64> {
    let (steps, evaluations) = metrics(output_dir);
    let of = |line: &Value| line.get("loss").or_else(|| line.get("eval_loss")).and_then(Value::as_f64).unwrap();
    steps.iter().chain(&evaluations).map(of).collect()
}

#[test]
fn a_run_has_the_losses_of_the_cpu_and_says_where_it_computes() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.eval_strategy: steps", "train.eval_steps: 3", "gen.num_samples: 1"]);
    let cpu = train(&config, &[], &[]);
    assert!(cpu.status.success(), "{}", said(&cpu));
    let expected = losses(&fixture.path("out"));
    for (name, words) in [
        ("auto", &["model.device=auto"][..]),
        ("two", &["model.device=cuda", "train.strategy=dp", "train.dp_ranks=2", "train.grad_accum=1"]),
        ("sharded", &["model.device=cuda:1", "train.strategy=fsdp", "train.dp_ranks=2", "train.grad_accum=1"]),
    ] {
        let out = fixture.path(name);
        let there = format!("train.output_dir={}", out.display());
        let found = train(&config, &[words, &[&there]].concat(), &[]);
        assert!(found.status.success(), "{name}: {}", said(&found));
        let gpu = if name == "sharded" { "GPU 1 (Stand-in GPU)" } else { "GPU 0 (Stand-in GPU)" };
        assert!(said(&found).contains(gpu), "{name}: {}", said(&found));
        let losses = losses(&out);
        assert_eq!(losses.len(), expected.len());
        for (found, expected) in losses.iter().zip(&expected) {
            assert!((found - expected).abs() < 2e-5, "{name}: {found} != {expected}");
        }
    }
}

#[test]
fn bfloat16_products_train_as_float32_does() {
    let fixture = Fixture::new();
    let mut means = Vec::new();
    for (name, bf16) in [("wide", "false"), ("narrow", "true")] {
        let lines = [
            "model.device: cuda",
            "train.max_steps: 60",
            "data.val_path: UNSET",
            "tuning.lora.lora_dropout: 0",
            "train.learning_rate: 0.002",
        ];
        let config = fixture.config(name, &[&lines[..], &[&format!("train.bf16: {bf16}")]].concat());
        let out = fixture.path(name);
        let ended = train(&config, &[&format!("train.output_dir={}", out.display())], &[]);
        assert!(ended.status.success(), "{}", said(&ended));
        let losses = losses(&out);
        means.push(losses[40..].iter().sum::<f64>() / 20.0);
    }
    assert!(means[0] != means[1], "products are rounded");
    assert!((means[1] / means[0] - 1.0).abs() < 0.005, "mean losses of the last steps: {means:?}");
}

#[test]
fn a_checkpoint_goes_to_another_device_where_that_is_allowed() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 3", "train.save_strategy: steps", "train.save_steps: 3"]);
    assert!(train(&config, &[], &[]).status.success());
    let words = ["--resume", "model.device=cuda", "train.max_steps=6"];
    let refused = train(&config, &words, &[]);
    assert_eq!(refused.status.code(), Some(5), "{}", said(&refused));
    assert!(
        said(&refused).contains("Stand-in GPU (sm_90)") && said(&refused).contains("--allow simd"),
        "{}",
        said(&refused)
    );
    let allowed = train(&config, &[&words[..], &["--allow", "simd"]].concat(), &[]);
    assert!(allowed.status.success(), "{}", said(&allowed));
    assert_eq!(losses(&fixture.path("out")).len(), 6);
}

#[test]
fn what_a_gpu_lacks_or_does_ends_with_its_exit_code() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["model.device: cuda", "train.output_dir: OUT"]);
    let nowhere = fixture.path("empty");
    std::fs::create_dir(&nowhere).unwrap();
    for (variable, value, code, says) in [
        ("TUNESMITH_CUDA_LIBRARIES", nowhere.to_str().unwrap(), 10, "libcuda.so.1"),
        ("TUNESMITH_STAND_IN_DEVICES", "0", 10, "CUDA_ERROR_NO_DEVICE"),
        ("TUNESMITH_STAND_IN_DRIVER", "11080", 10, "CUDA 11.8"),
        ("TUNESMITH_STAND_IN_MEMORY", "30000000", 9, "memory"),
        ("TUNESMITH_STAND_IN_FAIL", "cuLaunchKernel:40", 10, "CUDA_ERROR_LAUNCH_FAILED"),
        ("TUNESMITH_STAND_IN_FAIL", "lost:300", 10, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
        ("TUNESMITH_STAND_IN_FAIL", "cuStreamSynchronize:9", 10, "cuStreamSynchronize"),
        ("TUNESMITH_STAND_IN_FAIL", "cuModuleLoadData:1", 0, ""),
    ] {
        let ended = train(&config, &["--overwrite"], &[(variable, value)]);
        assert_eq!(ended.status.code(), Some(code), "{variable}={value}: {}", said(&ended));
        assert!(said(&ended).contains(says), "{variable}={value}: {}", said(&ended));
    }
}
