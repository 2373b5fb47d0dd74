//! Bases in quantization formats of their makers (FP8, GPTQ, AWQ, compressed-tensors, NVFP4): they dequantize as the formats'
//! own code does, can be trained on, keep their format in merges, and damaged files are refused.
use crate::parity::close;
use crate::run::fixture::{said, tunesmith};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tunesmith::Kind;
use tunesmith::config::arch::{Arch, Vocabulary};
use tunesmith::config::{Config, load_text};
use tunesmith::data::batch::{Batch, Example};
use tunesmith::error::Result;
use tunesmith::export::merge::Parts;
use tunesmith::model::Model;
use tunesmith::model::quantize;
use tunesmith::model::weights::WeightFiles;
use tunesmith::ops::quant::Format;

const CASES: [&str; 11] =
    ["fp8", "fp8_edges", "gptq", "gptq_claims", "gptq8", "awq", "ct_int4", "ct_int8", "ct_fp8", "ct_nvfp4", "nvfp4"];

/// A mixture of experts in each format.
const EXPERTS: [&str; 8] = [
    "fp8_experts",
    "gptq_experts",
    "awq_experts",
    "ct_int4_experts",
    "ct_int8_experts",
    "ct_fp8_experts",
    "ct_nvfp4_experts",
    "nvfp4_experts",
];

pub fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/makers").join(case)
}

fn expected(case: &str) -> Value {
    serde_json::from_slice(&fs::read(golden(case).join("expected.json")).unwrap()).unwrap()
}

fn opened(dir: &Path) -> Result<(Arch, WeightFiles)> {
    let arch = Arch::from_dir(dir)?;
    let weights = WeightFiles::open(dir, &arch.tensors())?;
    Ok((arch, weights))
}

fn config(text: &str) -> Config {
    load_text(Path::new("case"), text).unwrap_or_else(|error| panic!("{text}: {error}")).config
}

fn load(dir: &Path, quantization: &str) -> Result<Model> {
    let (arch, weights) = opened(dir)?;
    let text = format!("{{model: {{quantization: {quantization}}}, tuning: {{lora: {{r: 4}}}}}}");
    Model::load(&arch, Some(&weights), &config(&text))
}

/// FNV-1a of the bytes of numbers.
fn digest(values: &[f32]) -> String {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes());
    let hash =
        bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

fn batch(ids: &Value) -> Batch {
    let input_ids: Vec<u32> = serde_json::from_value(ids.clone()).unwrap();
    Batch::from_examples(&[Example { labels: input_ids.iter().map(|&id| id as i32).collect(), input_ids }])
}

#[test]
fn every_number_is_the_one_that_the_format_s_own_code_gives() {
    for case in CASES.into_iter().chain(EXPERTS) {
        let ((arch, weights), expected) = (opened(&golden(case).join("model")).unwrap(), expected(case));
        let digests: BTreeMap<String, String> = serde_json::from_value(expected["digests"].clone()).unwrap();
        for (name, wanted) in &digests {
            let matrix = weights.read_quantized(name).unwrap_or_else(|error| panic!("{case}: {error}"));
            assert_eq!(&digest(&matrix.dequantize()), wanted, "{case}: {name}");
            let layout = weights.layout(name).unwrap();
            // A file that claims to be symmetric, and is not, has zeros of its own.
            let shape = weights.shape(name).unwrap().to_vec();
            let zeros = if case == "gptq8" { shape[0] } else { 0 };
            assert_eq!(layout.bytes(&shape), (matrix.bytes() - zeros) as u64, "{case}: {name}");
        }
        let quantized = arch.tensors().iter().filter(|spec| weights.format_of(&spec.name).is_some()).count();
        assert_eq!(quantized, digests.len(), "{case}");
        // What config.json says alone is what the files hold, but for scales of other forms: a plan needs no files.
        let config = config("tuning: {lora: {r: 4}}");
        let kept = |files| quantize::kept(&arch, &config, files).unwrap();
        let (described, held) = (kept(None), kept(Some(&weights)));
        assert_eq!(described.keys().collect::<Vec<_>>(), digests.keys().collect::<Vec<_>>(), "{case}");
        for name in digests.keys().filter(|_| case != "fp8_edges") {
            let shape = weights.shape(name).unwrap();
            assert_eq!(described[name].bytes(shape), held[name].bytes(shape), "{case}: {name}");
        }
    }
}

#[test]
fn a_config_alone_says_which_matrices_a_dequantized_base_holds_in_float32() {
    let config = config("{model: {quantization: none}, tuning: {lora: {r: 4}}}");
    // `fp8_edges` and Mistral's names for scales: what stays dense is in the files alone.
    for case in CASES.into_iter().chain(EXPERTS).filter(|case| *case != "fp8_edges") {
        let (arch, weights) = opened(&golden(case).join("model")).unwrap();
        let described = quantize::float32(&arch, &config, None).unwrap();
        let linear = quantize::matrices(&arch, &[]).unwrap();
        let quantized = |name: &&String| weights.layout(name).is_some();
        assert_eq!(described, linear.iter().filter(quantized).cloned().collect(), "{case}");
        assert!(
            !described.is_empty() && described.is_subset(&quantize::float32(&arch, &config, Some(&weights)).unwrap())
        );
    }
}

#[test]
fn training_is_that_on_the_dequantized_base() {
    for case in CASES.into_iter().chain(EXPERTS) {
        let (dir, expected) = (golden(case).join("model"), expected(case));
        let batch = batch(&expected["input_ids"]);
        let rows: Vec<usize> = (0..batch.tokens.len()).collect();
        let logits: Vec<f32> = serde_json::from_value(expected["logits"].clone()).unwrap();
        let mut results = Vec::new();
        for quantization in ["auto", "none"] {
            let mut model = load(&dir, quantization).unwrap_or_else(|error| panic!("{case}: {error}"));
            close(case, &model.logits(&batch, &rows).unwrap(), &logits, 5e-5);
            // B is zero at first: without numbers in it no gradient of A is.
            for spec in model.params.specs.clone() {
                let values: Vec<f32> =
                    (0..spec.range().len()).map(|at| ((at * 37 % 101) as f32 - 50.0) / 2000.0).collect();
                model.params.put(&spec.range(), &values);
            }
            model.params.zero_grads();
            let loss = model.forward_backward(&batch, 0.05, 1.0, 0).unwrap();
            let gradients: Vec<u32> = model.params.grads().read().iter().map(|value| value.to_bits()).collect();
            assert!(gradients.iter().any(|&bits| bits != 0), "{case}");
            results.push((loss.to_bits(), gradients));
        }
        assert!(results[0] == results[1], "{case}: the dequantized base gives other bits");
    }
}

#[test]
fn experts_of_unsloth_s_gpt_oss_are_read() {
    let (dir, expected) = (golden("unsloth").join("model"), expected("unsloth"));
    let (arch, weights) = opened(&dir).unwrap();
    let digests: BTreeMap<String, String> = serde_json::from_value(expected["digests"].clone()).unwrap();
    assert_eq!(digests.len(), 2 * 6 * 3);
    for (name, wanted) in &digests {
        assert_eq!(&digest(&weights.read(name).unwrap().1), wanted, "{name}");
    }
    let batch = batch(&expected["input_ids"]);
    let rows: Vec<usize> = (0..batch.tokens.len()).collect();
    let logits: Vec<f32> = serde_json::from_value(expected["logits"].clone()).unwrap();
    // bitsandbytes has left attention dense.
    for text in [
        "tuning: {lora: {r: 4}}",
        "tuning: {mode: qlora, lora: {r: 4}}",
        "{model: {quantization: none}, tuning: {lora: {r: 4}}}",
    ] {
        let model = Model::load(&arch, Some(&weights), &config(text)).unwrap();
        close(text, &model.logits(&batch, &rows).unwrap(), &logits, 5e-5);
    }
    // A matrix whose scales are gone.
    let error = changed("unsloth", &|all| {
        drop(all.remove("model.layers.1.mlp.experts.down_projs.3.weight.absmax"));
    });
    assert!(error.unwrap_err().to_string().contains("down_projs.3.weight.absmax"));
}

#[test]
fn a_run_may_code_the_numbers_in_another_format() {
    for case in ["fp8_edges", "gptq", "ct_nvfp4"] {
        let (dir, expected) = (golden(case).join("model"), expected(case));
        let batch = batch(&expected["input_ids"]);
        let rows: Vec<usize> = (0..batch.tokens.len()).collect();
        let logits = |quantization: &str| load(&dir, quantization).unwrap().logits(&batch, &rows).unwrap();
        let (plain, int8, nf4) = (logits("none"), logits("int8"), logits("nf4"));
        let off = |other: &[f32]| plain.iter().zip(other).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        // How far NF4 is off depends on the model; 8 bits are nearer than 4.
        let [int8, nf4] = [off(&int8), off(&nf4)];
        assert!(int8 > 0.0 && int8 < nf4, "{case}: {int8} {nf4}");
        let (arch, weights) = opened(&dir).unwrap();
        let error = Model::load(&arch, Some(&weights), &config("tuning: {mode: full}")).unwrap_err();
        assert!(error.kind() == Kind::Config && error.message().contains("cannot be trained"), "{error}");
    }
}

/// The tensors of a file: shape, dtype and bytes.
pub type Tensors = BTreeMap<String, (Vec<usize>, safetensors::Dtype, Vec<u8>)>;

pub fn tensors(dir: &Path) -> Tensors {
    let file = fs::read(dir.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    file.tensors()
        .iter()
        .map(|(name, it)| (name.clone(), (it.shape().to_vec(), it.dtype(), it.data().to_vec())))
        .collect()
}

pub fn write(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (shape, dtype, bytes))| {
        (name.clone(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes.as_slice()).unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A LoRA adapter on these modules.
fn write_adapter(dir: &Path, arch: &Arch, modules: &[&str]) {
    fs::create_dir_all(dir).unwrap();
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": modules, "bias": "none", "task_type": "CAUSAL_LM"});
    fs::write(dir.join("adapter_config.json"), config.to_string()).unwrap();
    let mut all = Tensors::new();
    for linear in arch.linear_modules().into_iter().filter(|it| modules.iter().any(|module| it.name.ends_with(module)))
    {
        for (end, shape) in [("A", vec![2, linear.in_features]), ("B", vec![linear.out_features, 2])] {
            let count: usize = shape.iter().product();
            let bytes = (0..count).flat_map(|at| (((at * 37 % 101) as f32 - 50.0) / 500.0).to_le_bytes()).collect();
            let name = format!("base_model.model.{}.lora_{end}.weight", linear.name);
            all.insert(name, (shape, safetensors::Dtype::F32, bytes));
        }
    }
    write(&dir.join("adapter_model.safetensors"), &all);
}

fn merge(root: &Path, case: &str, modules: &[&str], output: &str, more: &[&str]) -> (bool, String, PathBuf) {
    let (base, adapter, target) = (golden(case).join("model"), root.join("adapter"), root.join(output));
    write_adapter(&adapter, &Arch::from_dir(&base).unwrap(), modules);
    let paths = [&base, &adapter, &target].map(|path| path.display().to_string());
    let args = [&["merge", "--base", &paths[0], "--adapter", &paths[1], "--output", &paths[2]], more].concat();
    let output = tunesmith(&args).env_remove("CONFIG").output().unwrap();
    (output.status.success(), said(&output), target)
}

#[test]
fn a_merge_into_fp8_copies_what_it_leaves_and_codes_the_rest_again() {
    // Blocks; one scale for the matrix, a scale a row, exponents; a scale a row in BF16.
    for (case, modules) in
        [("fp8", &["q_proj"][..]), ("fp8_edges", &["q_proj", "k_proj", "v_proj"]), ("ct_fp8", &["q_proj"])]
    {
        let root = tempfile::tempdir().unwrap();
        let (done, text, target) = merge(root.path(), case, modules, "merged", &[]);
        assert!(done && text.contains("requantized     FP8, as the base has it"), "{text}");
        let (before, after) = (tensors(&golden(case).join("model")), tensors(&target));
        assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>(), "{case}");
        for (name, old) in &before {
            let new = &after[name];
            assert_eq!((&old.0, old.1), (&new.0, new.1), "{case}: {name}");
            let changed = modules.iter().any(|module| name.contains(&format!("self_attn.{module}.")));
            // Scales of activations stay, and an exponent may.
            let must = changed && name.ends_with(".weight");
            assert!(if old.2 == new.2 { !must } else { changed }, "{case}: {name}");
        }
        assert!(fs::read_to_string(target.join("config.json")).unwrap().contains("quantization_config"));
        // As near as E4M3 is: half of an eighth.
        let (_, dense) = opened(&golden(case).join("model")).unwrap();
        let ((arch, merged), wide) =
            (opened(&target).unwrap(), merge(root.path(), case, modules, "wide", &["--dtype", "float32"]));
        assert!(wide.0, "{}", wide.1);
        let (_, wide) = opened(&wide.2).unwrap();
        for spec in arch.tensors() {
            let [merged, wide, dense] = [&merged, &wide, &dense].map(|files| files.read(&spec.name).unwrap().1);
            if modules.iter().any(|module| spec.name.ends_with(&format!("{module}.weight"))) {
                assert!(merged != dense, "{case}: {}", spec.name);
                let most = wide.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                for (value, exact) in merged.iter().zip(&wide) {
                    assert!(
                        (value - exact).abs() <= exact.abs() / 15.0 + most / 5e4,
                        "{case} {}: {value} {exact}",
                        spec.name
                    );
                }
            } else {
                assert!(merged == wide, "{case}: {}", spec.name);
            }
        }
    }
}

#[test]
fn a_merge_leaves_matrices_in_the_formats_that_the_run_had_them_in() {
    // `fp8_edges` has blocks, scales for rows, and dense matrices side by side.
    for case in CASES.into_iter().chain(EXPERTS) {
        let dir = golden(case).join("model");
        let mut parts = Parts::open(&dir, &[], &Vocabulary::default()).unwrap();
        let (arch, weights) = opened(&dir).unwrap();
        let held = |text: &str| quantize::held(&arch, &config(text), &weights).unwrap().unwrap();
        assert_eq!(parts.hold(&held("tuning: {lora: {r: 4}}")).unwrap(), 0, "{case}");
        assert!(parts.hold(&held("{model: {quantization: nf4}, tuning: {lora: {r: 4}}}")).unwrap() > 0, "{case}");
    }
}

#[test]
fn a_merge_into_integers_says_which_dtype_to_give() {
    for case in ["gptq", "ct_int4", "nvfp4"] {
        let root = tempfile::tempdir().unwrap();
        let (done, text, target) = merge(root.path(), case, &["q_proj"], "merged", &[]);
        assert!(!done && text.contains("--dtype bfloat16") && text.contains("q_proj"), "{text}");
        assert!(!target.exists());
        let (done, text, target) = merge(root.path(), case, &["q_proj"], "wide", &["--dtype", "bfloat16"]);
        assert!(done, "{text}");
        assert_eq!(opened(&target).unwrap().1.quantization(), None);
        assert!(!fs::read_to_string(target.join("config.json")).unwrap().contains("quantization_config"));
        let (done, text, target) = merge(root.path(), case, &["q_proj"], "nf4", &["--requantize", "nf4"]);
        assert!(done, "{text}");
        assert_eq!(opened(&target).unwrap().1.quantization(), Some(Format::Nf4));
    }
    // What nothing changes is copied.
    let root = tempfile::tempdir().unwrap();
    let base = golden("fp8_edges").join("model");
    let adapter = root.path().join("adapter");
    let (done, text, target) = merge(root.path(), "fp8_edges", &["layers.0.mlp.gate_proj"], "merged", &[]);
    assert!(done && adapter.exists() && !text.contains("requantized"), "{text}");
    let (before, after) = (tensors(&base), tensors(&target));
    let other: Vec<&String> = before.keys().filter(|name| before[*name].2 != after[*name].2).collect();
    assert_eq!(other, ["model.layers.0.mlp.gate_proj.weight"]);
}

#[test]
fn models_says_how_a_base_is_stored() {
    for (case, text) in [
        ("fp8_edges", "fp8: FP8 in blocks of 48 x 24"),
        ("gptq", "gptq: integers of 4 bits in groups of 32"),
        ("nvfp4", "modelopt: NVFP4"),
    ] {
        let output = tunesmith(&["models", &golden(case).join("model").display().to_string()]).output().unwrap();
        assert!(output.status.success() && said(&output).contains(text), "{}", said(&output));
    }
}

/// Opens and loads a copy of a case with changed tensors.
fn changed(case: &str, change: &dyn Fn(&mut Tensors)) -> Result<Model> {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(golden(case).join("model/config.json"), dir.path().join("config.json")).unwrap();
    let mut all = tensors(&golden(case).join("model"));
    change(&mut all);
    write(&dir.path().join("model.safetensors"), &all);
    load(dir.path(), "auto")
}

#[test]
fn damaged_files_are_refused_by_name() {
    const Q: &str = "model.layers.1.self_attn.q_proj";
    let refused = |case: &str, parts: &[&str], change: &dyn Fn(&mut Tensors)| {
        assert!(changed(case, &|_| {}).is_ok());
        let error = changed(case, change).unwrap_err();
        assert_eq!(error.kind(), Kind::Model, "{error}");
        for part in parts {
            assert!(error.to_string().contains(part), "{case}, {part}: {error}");
        }
    };
    let tensor = |all: &mut Tensors, end: &str, change: &dyn Fn(&mut Vec<usize>, &mut Vec<u8>)| {
        let (shape, _, bytes) = all.get_mut(&format!("{Q}.{end}")).unwrap();
        change(shape, bytes);
    };
    let without = |end: &'static str| move |all: &mut Tensors| drop(all.remove(&format!("{Q}.{end}")));
    // One row less.
    let shorter = |end: &'static str| {
        move |all: &mut Tensors| {
            tensor(all, end, &|shape, bytes| {
                let row = bytes.len() / shape[0];
                shape[0] -= 1;
                bytes.truncate(bytes.len() - row);
            });
        }
    };
    refused("fp8", &["q_proj", "weight_scale_inv"], &without("weight_scale_inv"));
    refused("fp8", &["q_proj", "[3, 4]", "4 x 4"], &shorter("weight_scale_inv"));
    refused("fp8", &["q_proj", "NaN"], &|all| tensor(all, "weight", &|_, bytes| bytes[5] = 0x7f));
    refused("fp8", &["q_proj.weight_scale_inv", "infinite"], &|all| {
        tensor(all, "weight_scale_inv", &|_, bytes| bytes[..4].copy_from_slice(&f32::INFINITY.to_le_bytes()));
    });
    refused("fp8_edges", &["v_proj", "scale of NaN"], &|all| {
        all.get_mut("model.layers.1.self_attn.v_proj.scale").unwrap().2[1] = 255;
    });
    for end in ["qzeros", "scales"] {
        refused("gptq", &["q_proj", end], &without(end));
        refused("gptq", &["q_proj"], &shorter(end));
        refused("awq", &["q_proj"], &shorter(end));
    }
    refused("gptq", &["q_proj", "g_idx [64] beside it, expected I32 [56]"], &shorter("qweight"));
    refused("gptq", &["q_proj", "group 2"], &|all| tensor(all, "g_idx", &|_, bytes| bytes[0] = 2));
    refused("gptq", &["q_proj", "columns"], &shorter("g_idx"));
    refused("gptq", &["g_idx", "I32"], &|all| {
        let (shape, dtype, _) = all.get_mut(&format!("{Q}.g_idx")).unwrap();
        (*shape, *dtype) = (vec![shape[0], 4], safetensors::Dtype::U8);
    });
    refused("awq", &["is there beside"], &|all| {
        let other = all[&format!("{Q}.scales")].clone();
        all.insert(format!("{Q}.weight"), other);
    });
    for end in ["weight_scale", "weight_shape"] {
        refused("ct_int4", &["q_proj", end], &without(end));
    }
    refused("ct_int4", &["q_proj", "does not fit"], &|all| tensor(all, "weight_shape", &|_, bytes| bytes[8] = 32));
    refused("ct_int4", &["q_proj.weight_shape"], &|all| tensor(all, "weight_shape", &|_, bytes| bytes[15] = 1));
    refused("ct_int4", &["q_proj", "weight_zero_point [7, 4]"], &shorter("weight_zero_point"));
    refused("ct_nvfp4", &["q_proj", "weight_global_scale"], &without("weight_global_scale"));
    refused("ct_nvfp4", &["q_proj"], &|all| tensor(all, "weight_global_scale", &|_, bytes| bytes.fill(0)));
    refused("ct_nvfp4", &["q_proj"], &shorter("weight_scale"));
    refused("nvfp4", &["q_proj", "NaN"], &|all| tensor(all, "weight_scale", &|_, bytes| bytes[3] = 0xff));
    // A shape that config.json does not have.
    refused("ct_int8", &["q_proj", "expected [64, 64]"], &|all| {
        for end in ["weight_packed", "weight_scale"] {
            shorter(end)(all);
        }
        tensor(all, "weight_shape", &|_, bytes| bytes[0] = 63);
    });
}

/// Loads a copy of a case with other tensors and another `quantization_config`.
fn described(case: &str, describe: &dyn Fn(&mut Value), change: &dyn Fn(&mut Tensors)) -> Result<Vec<Vec<f32>>> {
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read(golden(case).join("model/config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    describe(&mut config["quantization_config"]);
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let mut all = tensors(&golden(case).join("model"));
    change(&mut all);
    write(&dir.path().join("model.safetensors"), &all);
    load(dir.path(), "auto")?;
    let (_, weights) = opened(dir.path())?;
    weights.layouts().keys().map(|name| Ok(weights.read(name)?.1)).collect()
}

#[test]
fn what_the_config_promises_and_the_file_lacks_is_refused() {
    const Q: &str = "model.layers.1.self_attn.q_proj";
    type Describe<'a> = &'a dyn Fn(&mut Value);
    let as_it_is: Describe<'_> = &|_| {};
    let refused = |case: &str, parts: &[&str], describe: Describe<'_>, change: &dyn Fn(&mut Tensors)| {
        let error = described(case, describe, change).unwrap_err();
        assert_eq!(error.kind(), Kind::Model, "{error}");
        for part in parts {
            assert!(error.to_string().contains(part), "{case}, {part}: {error}");
        }
    };
    let without = |end: &'static str| move |all: &mut Tensors| drop(all.remove(&format!("{Q}.{end}")));
    let put = |end: &'static str, shape: &'static [usize], dtype: safetensors::Dtype, bytes: usize| {
        move |all: &mut Tensors| {
            let count: usize = shape.iter().product();
            all.insert(format!("{Q}.{end}"), (shape.to_vec(), dtype, vec![0; count * bytes]));
        }
    };
    refused("ct_int4", &["q_proj", "weight_zero_point", "symmetric: false"], as_it_is, &without("weight_zero_point"));
    refused("awq", &["q_proj", "qzeros"], as_it_is, &without("qzeros"));
    let symmetric: Describe<'_> = &|it| it["zero_point"] = json!(false);
    refused("awq", &["q_proj", "qzeros", "zero_point: false"], symmetric, &|_| {});
    refused("gptq", &["q_proj", "g_idx"], as_it_is, &without("g_idx"));
    refused("gptq", &["q_proj", "g_idx [0]", "desc_act"], as_it_is, &put("g_idx", &[0], safetensors::Dtype::I32, 4));
    for all_columns in [false, true] {
        refused("gptq", &["q_proj.g_idx", "(-1)"], as_it_is, &|all| {
            let bytes = &mut all.get_mut(&format!("{Q}.g_idx")).unwrap().2;
            let last = if all_columns { bytes.len() } else { 4 };
            bytes[..last].fill(0xff);
        });
    }
    // Some columns without a group are damage, whatever config.json says.
    let in_order: Describe<'_> = &|it| it["desc_act"] = json!(false);
    refused("gptq", &["q_proj.g_idx", "(-1)"], in_order, &|all| {
        all.get_mut(&format!("{Q}.g_idx")).unwrap().2[..4].fill(0xff);
    });
    let retyped =
        |name: &'static str| move |it: &mut Value| it["config_groups"]["group_0"]["weights"]["type"] = json!(name);
    refused("ct_int8", &["is I8", "config.json says FP8"], &retyped("float"), &|all| {
        all.retain(|name, _| !name.ends_with("weight_shape") && !name.ends_with("weight_packed"));
    });
    refused("ct_fp8", &["is F8_E4M3", "config.json says int8"], &retyped("int"), &|_| {});
    let rows = put("weight_scale_inv", &[64], safetensors::Dtype::F32, 4);
    refused("fp8", &["q_proj", "has scales [64]", "expected 4 x 4"], as_it_is, &rows);
    let rows = put("weight_scale_inv", &[64, 1], safetensors::Dtype::F32, 4);
    refused("fp8", &["q_proj", "has scales [64, 1]", "expected 4 x 4"], as_it_is, &rows);
    // Sizes that no matrix has.
    for shape in [&[0, 64][..], &[8, 0]] {
        refused("gptq", &["q_proj", "expected a matrix"], as_it_is, &|all| {
            all.insert(format!("{Q}.qweight"), (shape.to_vec(), safetensors::Dtype::I32, Vec::new()));
        });
    }
}

#[test]
fn what_a_config_leaves_open_loads_with_the_same_numbers() {
    let same = |case: &str, describe: &dyn Fn(&mut Value), change: &dyn Fn(&mut Tensors)| {
        let found = described(case, describe, change).unwrap_or_else(|error| panic!("{case}: {error}"));
        assert!(found == described(case, &|_| {}, &|_| {}).unwrap(), "{case}");
    };
    let less = |keys: &'static [&'static str]| {
        move |it: &mut Value| keys.iter().for_each(|key| drop(it.as_object_mut().unwrap().remove(*key)))
    };
    // Groups in order: `g_idx` says so, or says nothing, or is not there.
    same("gptq_claims", &less(&["desc_act", "sym"]), &|_| {});
    same("gptq_claims", &|_| {}, &|all| all.retain(|name, _| !name.ends_with(".g_idx")));
    same("gptq_claims", &|_| {}, &|all| {
        all.iter_mut().filter(|(name, _)| name.ends_with(".g_idx")).for_each(|(_, it)| it.2.fill(0xff));
    });
    same("gptq_claims", &|_| {}, &|all| {
        let of_groups = all.iter_mut().filter(|(name, _)| name.ends_with(".g_idx"));
        of_groups.for_each(|(_, (shape, _, bytes))| (*shape, *bytes) = (vec![0], Vec::new()));
    });
    // One group: its order does not matter.
    same("gptq8", &|it| it["desc_act"] = json!(true), &|all| all.retain(|name, _| !name.ends_with(".g_idx")));
    same("awq", &less(&["zero_point", "version", "modules_to_not_convert"]), &|_| {});
    same(
        "ct_int4",
        &|it| drop(it["config_groups"]["group_0"]["weights"].as_object_mut().unwrap().remove("symmetric")),
        &|_| {},
    );
    same("fp8", &less(&["activation_scheme", "fmt"]), &|_| {});
    // A group that names the modules more closely, after one for all.
    same(
        "ct_fp8",
        &|it| {
            let float = it["config_groups"]["group_0"].clone();
            let mut int = float.clone();
            int["weights"]["type"] = json!("int");
            let mut close = float;
            close["targets"] = json!(["re:.*proj"]);
            it["config_groups"] = json!({ "group_0": int, "group_1": close });
        },
        &|_| {},
    );
}

#[test]
fn a_base_whose_config_says_nothing_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden("fp8").join("model");
    fs::copy(model.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("quantization_config");
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let error = load(dir.path(), "auto").unwrap_err();
    assert!(error.to_string().contains("F8_E4M3") && error.to_string().contains("quantization_config"), "{error}");
}
