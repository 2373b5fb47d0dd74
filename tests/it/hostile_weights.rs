//! Model files whose tensors contradict each other or `config.json`: shapes without sizes, more experts than there are, and
//! the same matrix under two names. Each is refused by name, before anything is made of it.
use crate::makers::{Tensors, tensors, write};
use safetensors::Dtype;
use std::fs;
use std::path::{Path, PathBuf};
use tunesmith::Kind;
use tunesmith::config::arch::Arch;
use tunesmith::error::Result;
use tunesmith::model::weights::WeightFiles;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path).join("model")
}

/// Opens a copy of a model with other tensors.
fn opened(model: &str, change: &dyn Fn(&mut Tensors)) -> Result<WeightFiles> {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(golden(model).join("config.json"), dir.path().join("config.json")).unwrap();
    let mut all = tensors(&golden(model));
    change(&mut all);
    write(&dir.path().join("model.safetensors"), &all);
    let arch = Arch::from_dir(dir.path())?;
    WeightFiles::open_model(dir.path(), &arch, &arch.tensors())
}

#[track_caller]
fn refused(model: &str, parts: &[&str], change: &dyn Fn(&mut Tensors)) {
    let unchanged = opened(model, &|_| {});
    assert!(unchanged.is_ok(), "{model}: {unchanged:?}");
    let error = opened(model, change).unwrap_err();
    assert_eq!(error.kind(), Kind::Model, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "{model}, {part}: {error}");
    }
}

/// A tensor of zeros in bfloat16, or of another dtype with as many bytes a number as `bytes` says.
fn zeros(shape: &[usize], dtype: Dtype, bytes: usize) -> (Vec<usize>, Dtype, Vec<u8>) {
    (shape.to_vec(), dtype, vec![0; bytes * shape.iter().product::<usize>()])
}

fn bf16(shape: &[usize]) -> (Vec<usize>, Dtype, Vec<u8>) {
    zeros(shape, Dtype::BF16, 2)
}

#[test]
fn stacked_experts_of_any_shape_are_no_panic() {
    let ends = ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"];
    for (model, ends) in [("a/gpt_oss", &ends[..]), ("mxfp4", &ends[2..]), ("a/mistral4", &ends[..2])] {
        for end in ends {
            let layer = usize::from(model == "a/mistral4");
            let name = format!("model.layers.{layer}.mlp.experts.{end}");
            for shape in [&[][..], &[6], &[6, 1, 1, 1], &[0, 64, 64], &[6, 0, 64]] {
                refused(model, &[&format!("model.layers.{layer}.mlp.experts.")], &|all| {
                    all.insert(name.clone(), bf16(shape));
                });
            }
        }
    }
}

#[test]
fn experts_are_as_many_as_the_config_says() {
    let names = |layer: usize, end: &str| format!("model.layers.{layer}.mlp.experts.{end}");
    refused("a/gpt_oss", &["gate_up_proj", "holds 7 experts, expected 6"], &|all| {
        all.insert(names(0, "gate_up_proj"), bf16(&[7, 64, 64]));
    });
    refused("a/mistral4", &["down_proj", "holds 5 experts, expected 6"], &|all| {
        all.insert(names(1, "down_proj"), bf16(&[5, 64, 24]));
    });
    refused("mxfp4", &["gate_up_proj_blocks", "holds 7 experts, expected 6"], &|all| {
        for end in ["gate_up_proj_blocks", "gate_up_proj_scales"] {
            let (mut shape, dtype, _) = all[&names(0, end)].clone();
            shape[0] = 7;
            all.insert(names(0, end), zeros(&shape, dtype, 1));
        }
    });
    // A model without experts: nothing is made of the claim, which takes no bytes.
    for (model, end) in [("a/llama", "mlp.experts.gate_up_proj"), ("a/llama", "feed_forward.experts.gate_up_proj")] {
        refused(model, &[end, "[65536, 2, 0]", "is no part of"], &|all| {
            all.insert(format!("model.layers.9.{end}"), bf16(&[65_536, 2, 0]));
        });
    }
}

#[test]
fn the_same_matrix_under_two_names_is_refused() {
    let twice = "is there twice";
    refused("mxfp4", &[twice, "experts.0.gate_proj.weight", "gate_up_proj_blocks"], &|all| {
        all.insert("model.layers.0.mlp.experts.gate_up_proj".into(), bf16(&[6, 64, 64]));
    });
    refused("a/gpt_oss", &[twice, "experts.1.gate_proj.weight", "gate_up_proj"], &|all| {
        all.insert("model.layers.0.mlp.experts.1.gate_proj.weight".into(), bf16(&[32, 64]));
    });
    refused("a/mistral4", &[twice, "experts.1.up_proj.weight", "gate_up_proj"], &|all| {
        all.insert("model.layers.1.mlp.experts.1.up_proj.weight".into(), bf16(&[24, 64]));
    });
    refused("a/granite4_moe", &[twice, "experts.1.gate_proj.weight", "input_linear.weight"], &|all| {
        all.insert("model.layers.0.block_sparse_moe.experts.1.gate_proj.weight".into(), bf16(&[24, 64]));
    });
    refused("a/mixtral", &[twice, "experts.0.w1.weight", "experts.gate_up_proj"], &|all| {
        let is_first = |name: &&String| name.starts_with("model.layers.0.") && name.ends_with(".w1.weight");
        let count = all.keys().filter(is_first).count();
        all.insert("model.layers.0.block_sparse_moe.experts.gate_up_proj".into(), bf16(&[count, 96, 64]));
    });
    refused("makers/unsloth", &[twice, "router.weight", "router.linear.weight"], &|all| {
        let router = all["model.layers.0.mlp.router.linear.weight"].clone();
        all.insert("model.layers.0.mlp.router.weight".into(), router);
    });
    for model in ["vision/gemma3", "vision/llava", "vision/qwen3_vl"] {
        for other in ["model.language_model.", "language_model.model.", "model."] {
            let end = "layers.0.self_attn.q_proj.weight";
            let all = tensors(&golden(model));
            let own = all.keys().find(|name| name.contains("language_model") && name.ends_with(end)).unwrap();
            if *own != format!("{other}{end}") {
                refused(model, &[twice, own, &format!("{other}{end}")], &|all| {
                    all.insert(format!("{other}{end}"), all[own].clone());
                });
            }
        }
    }
}

#[test]
fn stacked_experts_in_fp8_are_told_as_what_they_are() {
    let first =
        |model: &str, end: &str| tensors(&golden(model)).keys().find(|name| name.ends_with(end)).unwrap().clone();
    for model in ["a/mistral4", "a/gemma4_a4b", "a/gpt_oss"] {
        let name = first(model, "experts.gate_up_proj");
        refused(model, &[&name, "F8_E4M3", "experts stacked in one tensor are not read in FP8 yet"], &|all| {
            let (shape, ..) = all[&name].clone();
            all.insert(name.clone(), zeros(&shape, Dtype::F8_E4M3, 1));
            let scales = (vec![shape[0], 1, 1], Dtype::F32, 1f32.to_le_bytes().repeat(shape[0]));
            all.insert(format!("{name}_scale_inv"), scales);
        });
    }
}
