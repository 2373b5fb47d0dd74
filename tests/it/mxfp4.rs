//! gpt-oss with its experts in MXFP4: dequantized numbers and logits as in Transformers, training with these experts
//! frozen, and merges that copy them.
use crate::parity::{close, tensors};
use crate::run::fixture::{said, tunesmith};
use std::fs;
use std::path::{Path, PathBuf};
use tunesmith::Kind;
use tunesmith::config::arch::Arch;
use tunesmith::config::{Config, load_text};
use tunesmith::data::batch::{Batch, Example};
use tunesmith::model::Model;
use tunesmith::model::weights::{Numbers, StackedTensor, WeightFiles, write_numbers_to};
use tunesmith::ops::quant::Format;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/mxfp4").join(path)
}

fn opened(dir: &Path) -> (Arch, WeightFiles) {
    let arch = Arch::from_dir(dir).unwrap();
    let weights = WeightFiles::open(dir, &arch.tensors()).unwrap();
    (arch, weights)
}

fn config(text: &str) -> Config {
    load_text(Path::new("case"), text).unwrap_or_else(|error| panic!("{text}: {error}")).config
}

#[test]
fn experts_are_widened_as_transformers_does_it() {
    let (arch, weights) = opened(&golden("model"));
    assert_eq!(weights.quantization(), Some(Format::Mxfp4));
    let specs = arch.tensors();
    let stacked = StackedTensor::of(specs.iter().map(|spec| (spec.name.as_str(), spec.shape.as_slice())));
    let stored = tensors(&golden("dequantized.safetensors"));
    let mut held = 0;
    for tensor in stacked.iter().filter(|tensor| !tensor.name.ends_with("_bias")) {
        let part = |name: &String| weights.read(name).unwrap().1;
        let expert = |parts: &Vec<String>| tensor.joined(&parts.iter().map(part).collect::<Vec<_>>());
        let found: Vec<f32> = tensor.experts.iter().flat_map(expert).collect();
        assert!(found == stored[&tensor.name].1, "{}", tensor.name);
        held += 1;
    }
    assert_eq!(held, 4, "two matrices in each of two blocks");
}

#[test]
fn logits_are_those_of_transformers_and_training_leaves_the_bytes() {
    let (arch, weights) = opened(&golden("model"));
    let stored = tensors(&golden("dequantized.safetensors"));
    let ids: Vec<u32> = stored["input_ids"].1.iter().map(|&id| id as u32).collect();
    let rows: Vec<usize> = (0..ids.len()).collect();
    let example = Example { labels: ids.iter().map(|&id| id as i32).collect(), input_ids: ids };
    let batch = Batch::from_examples(&[example]);
    let mut losses = Vec::new();
    for text in [
        "tuning: {lora: {r: 4}}",
        "{model: {quantization: mxfp4}, tuning: {lora: {r: 4}}}",
        "{model: {quantization: none}, tuning: {lora: {r: 4}}}",
    ] {
        let mut model = Model::load(&arch, Some(&weights), &config(text)).unwrap();
        close(text, &model.logits(&batch, &rows).unwrap(), &stored["logits"].1, 5e-5);
        model.params.zero_grads();
        losses.push(model.forward_backward(&batch, 0.05, 1.0, 0).unwrap());
    }
    assert!(losses[0] == losses[1], "the checkpoint's format is what auto means");
    assert!((losses[0] - losses[2]).abs() < 1e-5, "{losses:?}");
    // The other matrices may have another format.
    let mut mixed = Model::load(&arch, Some(&weights), &config("{tuning: {mode: qlora, lora: {r: 4}}}")).unwrap();
    mixed.params.zero_grads();
    assert!((mixed.forward_backward(&batch, 0.05, 1.0, 0).unwrap() - losses[0]).abs() > 1e-4, "attention in NF4");
    let error = Model::load(&arch, Some(&weights), &config("tuning: {mode: full}")).unwrap_err();
    assert!(error.kind() == Kind::Config && error.message().contains("mxfp4"), "{error}");
}

#[test]
fn a_merge_copies_experts_that_nothing_changes() {
    let root = tempfile::tempdir().unwrap();
    let (base, target) = (golden("model"), root.path().join("merged"));
    let adapter = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a/gpt_oss/adapter_init");
    let paths = [&base, &adapter, &target].map(|path| path.display().to_string());
    let [base_arg, adapter_arg, target_arg] = &paths;
    let args = ["merge", "--base", base_arg, "--adapter", adapter_arg, "--output", target_arg];
    let output = tunesmith(&args).env_remove("CONFIG").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let bytes = |dir: &Path, name: &str| {
        let file = fs::read(dir.join("model.safetensors")).unwrap();
        safetensors::SafeTensors::deserialize(&file).unwrap().tensor(name).unwrap().data().to_vec()
    };
    for name in ["gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks"] {
        let name = format!("model.layers.1.mlp.experts.{name}");
        assert!(bytes(&base, &name) == bytes(&target, &name), "{name}");
    }
    let changed = "model.layers.0.self_attn.q_proj.weight";
    assert!(bytes(&base, changed) != bytes(&target, changed));
    let text = fs::read_to_string(target.join("config.json")).unwrap();
    assert!(text.contains("mxfp4"), "{text}");
    opened(&target);
    // Widened where another dtype is asked for.
    let wide = root.path().join("wide");
    let wide_arg = wide.display().to_string();
    let args = ["merge", "--base", base_arg, "--adapter", adapter_arg, "--output", &wide_arg, "--dtype", "bfloat16"];
    let output = tunesmith(&args).env_remove("CONFIG").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let (_, weights) = opened(&wide);
    assert_eq!(weights.quantization(), None);
    assert!(!fs::read_to_string(wide.join("config.json")).unwrap().contains("mxfp4"));
}

/// Experts with an adapter merged in are numbers of the other matrices' dtype, all of them.
#[test]
fn a_merge_widens_experts_that_an_adapter_changes() {
    let root = tempfile::tempdir().unwrap();
    let (base, target) = (golden("model"), root.path().join("merged"));
    let adapter = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/adapters/experts_mxfp4/adapter");
    let paths = [&base, &adapter, &target].map(|path| path.display().to_string());
    let [base_arg, adapter_arg, target_arg] = &paths;
    let args = ["merge", "--base", base_arg, "--adapter", adapter_arg, "--output", target_arg];
    let output = tunesmith(&args).env_remove("CONFIG").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("MXFP4"), "{}", said(&output));
    let (_, weights) = opened(&target);
    assert_eq!(weights.quantization(), None);
    assert!(weights.is_bf16("model.layers.0.mlp.experts.1.gate_proj.weight"));
    assert!(!fs::read_to_string(target.join("config.json")).unwrap().contains("mxfp4"));
}

/// Changes shape and bytes of the tensor of that name.
type Change = dyn Fn(&str, &mut Vec<usize>, &mut Vec<u8>);

#[test]
fn damaged_experts_are_refused_by_name() {
    let file = fs::read(golden("model/model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    let refused = |change: &Change| {
        let dir = tempfile::tempdir().unwrap();
        fs::copy(golden("model/config.json"), dir.path().join("config.json")).unwrap();
        let mut all = Vec::new();
        for (name, view) in file.tensors() {
            // The others keep their bytes; only those of experts are of interest here.
            let (mut shape, mut bytes) = (view.shape().to_vec(), view.data().to_vec());
            let is_bytes = view.dtype() == safetensors::Dtype::U8;
            if is_bytes {
                change(&name, &mut shape, &mut bytes);
            } else {
                let halves = bytes.chunks_exact(2).map(|half| half::bf16::from_le_bytes([half[0], half[1]]).to_f32());
                bytes = halves.flat_map(f32::to_le_bytes).collect();
            }
            all.push((name, shape, bytes, is_bytes));
        }
        let floats: Vec<Vec<f32>> = (all.iter())
            .map(|(_, _, bytes, is_bytes)| match is_bytes {
                true => Vec::new(),
                false => bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect(),
            })
            .collect();
        let numbers: Vec<_> = (all.iter().zip(&floats))
            .map(|((name, shape, bytes, is_bytes), floats)| {
                let numbers = if *is_bytes {
                    Numbers::U8(bytes.as_slice().into())
                } else {
                    Numbers::F32(floats.as_slice().into())
                };
                (name.clone(), shape.clone(), numbers)
            })
            .collect();
        let mut out = fs::File::create(dir.path().join("model.safetensors")).unwrap();
        write_numbers_to(&mut out, &numbers, &[]).unwrap();
        let arch = Arch::from_dir(dir.path()).unwrap();
        let weights = WeightFiles::open(dir.path(), &arch.tensors())?;
        Model::load(&arch, Some(&weights), &config("tuning: {lora: {r: 4}}"))
    };
    assert!(refused(&|_, _, _| {}).is_ok());
    let scale = |name: &str, _: &mut Vec<usize>, bytes: &mut Vec<u8>| {
        if name.ends_with("1.mlp.experts.down_proj_scales") {
            bytes[7] = 255;
        }
    };
    let error = refused(&scale).unwrap_err();
    assert!(error.kind() == Kind::Model && error.to_string().contains("scale of 255"), "{error}");
    let flat = |name: &str, shape: &mut Vec<usize>, _: &mut Vec<u8>| {
        if name.ends_with("0.mlp.experts.gate_up_proj_blocks") {
            *shape = vec![shape.iter().product()];
        }
    };
    let error = refused(&flat).unwrap_err();
    assert!(error.kind() == Kind::Model && error.to_string().contains("experts"), "{error}");
    let fewer = |name: &str, shape: &mut Vec<usize>, bytes: &mut Vec<u8>| {
        if name.contains("1.mlp.experts.gate_up_proj_") {
            let one = bytes.len() / shape[0];
            shape[0] -= 1;
            bytes.truncate(bytes.len() - one);
        }
    };
    let error = refused(&fewer).unwrap_err();
    assert!(error.kind() == Kind::Model && error.to_string().contains("holds 5 experts, expected 6"), "{error}");
}
