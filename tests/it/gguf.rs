//! GGUF files of every family: tensor names are those of llama.cpp's own package, values are the model's, and models that
//! llama.cpp computes differently are refused.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, Value};
use serde_json::Value as Json;
use tunesmith::config::arch::{Arch, TensorSpec};
use tunesmith::model::weights::{WeightFiles, write_safetensors};

pub(crate) fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

pub(crate) fn json(path: &Path) -> Json {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A tokenizer of single bytes.
fn tokenizer() -> String {
    let is_shown = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let hidden = (0..256).filter(|byte| !is_shown(*byte)).collect::<Vec<_>>();
    let letter = |byte: u32| match hidden.iter().position(|other| *other == byte) {
        Some(place) => char::from_u32(256 + place as u32).unwrap(),
        None => char::from_u32(byte).unwrap(),
    };
    let vocab: BTreeMap<String, u32> = (0..256).map(|byte| (letter(byte).to_string(), byte)).collect();
    let bytes =
        serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "post_processor": null,
        "pre_tokenizer": bytes, "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                  "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    })
    .to_string()
}

/// A golden model with a tokenizer and some keys of its `config.json` changed. If those change shapes, its weights are drawn anew.
pub(crate) fn model(root: &Path, name: &str, keys: &[(&str, Json)], drawn: bool) -> PathBuf {
    let dir = root.join(format!("{name}{}", keys.len()));
    fs::create_dir_all(&dir).unwrap();
    let from = golden(&format!("a/{name}/model"));
    let mut config = json(&from.join("config.json"));
    for (key, value) in keys {
        match value {
            Json::Null => drop(config.as_object_mut().unwrap().remove(*key)),
            value => config[*key] = value.clone(),
        }
    }
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    fs::write(dir.join("tokenizer.json"), tokenizer()).unwrap();
    if drawn {
        let arch = Arch::from_dir(&dir).unwrap();
        let values =
            |spec: &TensorSpec| (0..spec.len()).map(|at| (at * 37 % 101) as f32 / 101.0 - 0.4).collect::<Vec<_>>();
        let tensors: Vec<_> = arch.tensors().into_iter().map(|spec| (values(&spec), spec)).collect();
        let tensors: Vec<_> =
            tensors.iter().map(|(values, spec)| (spec.name.clone(), spec.shape.clone(), &values[..])).collect();
        write_safetensors(&dir.join("model.safetensors"), &tensors, &[("format", "pt")]).unwrap();
    } else {
        for entry in fs::read_dir(&from).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().contains("safetensors")) {
                fs::copy(&path, dir.join(path.file_name().unwrap())).unwrap();
            }
        }
    }
    dir
}

pub(crate) fn export(dir: &Path, file: &Path) -> Output {
    let words = [dir, file].map(|path| path.display().to_string());
    let words = ["export", "--base", &words[0], "--gguf", "f32", "--output", &words[1]];
    Command::new(env!("CARGO_BIN_EXE_tunesmith")).args(words).env_remove("CONFIG").output().unwrap()
}

/// A case: a golden model, keys of its `config.json` to change, whether its weights are drawn anew, and the expected
/// `general.architecture`.
type Case = (&'static str, Vec<(&'static str, Json)>, bool, &'static str);

fn cases() -> Vec<Case> {
    let same = |name, architecture| (name, Vec::new(), false, architecture);
    let nemotron = || vec![("time_step_min", 0.001.into())];
    vec![
        same("llama", "llama"),
        same("qwen2", "qwen2"),
        same("gpt2", "gpt2"),
        same("gemma", "gemma"),
        same("seed_oss", "seed_oss"),
        same("granite", "granite"),
        ("qwen3_5", vec![("linear_value_head_dim", 12.into())], true, "qwen35"),
        ("qwen3_5_moe", vec![("linear_value_head_dim", 12.into())], true, "qwen35moe"),
        (
            "qwen3_next",
            vec![("linear_value_head_dim", 12.into()), ("mlp_only_layers", Json::Array(vec![]))],
            true,
            "qwen3next",
        ),
        ("gpt_oss", vec![("swiglu_alpha", Json::Null), ("swiglu_limit", Json::Null)], false, "gpt-oss"),
        same("lfm2", "lfm2"),
        ("lfm2_moe", vec![("routed_scaling_factor", 1.0.into())], false, "lfm2moe"),
        same("ministral3", "mistral3"),
        same("mistral4", "mistral4"),
        same("deepseek_v3", "deepseek2"),
        (
            "glm4_moe_lite",
            vec![("mlp_layer_types", serde_json::json!(["dense", "sparse", "sparse"]))],
            true,
            "deepseek2",
        ),
        same("glm4", "glm4"),
        same("glm4_moe", "glm4moe"),
        same("granitemoehybrid", "granitehybrid"),
        same("granite4_moe", "granitehybrid"),
        ("nemotron_h", nemotron(), false, "nemotron_h"),
        ("nemotron3_nano", nemotron(), false, "nemotron_h_moe"),
        same("hunyuan_v1_dense", "hunyuan-dense"),
        same("minimax_m2", "minimax-m2"),
        (
            "afmoe",
            vec![
                ("num_hidden_layers", 2.into()),
                ("layer_types", serde_json::json!(["sliding_attention", "sliding_attention"])),
            ],
            true,
            "afmoe",
        ),
        same("gemma4_31b", "gemma4"),
        same("gemma4_a4b", "gemma4"),
        same("gemma4_unified", "gemma4"),
    ]
}

/// A name with the number of its block left out.
fn pattern(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    match parts.as_slice() {
        ["blk", _, rest @ ..] => format!("blk.{{bid}}.{}", rest.join(".")),
        _ => name.to_owned(),
    }
}

#[test]
fn every_family_has_the_names_and_keys_of_its_architecture() {
    let names = json(&golden("gguf/names.json"));
    let known = |list: &Json| -> BTreeSet<String> {
        list.as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect()
    };
    let keys = known(&names["keys"]);
    let root = tempfile::tempdir().unwrap();
    for (name, changes, drawn, architecture) in cases() {
        let dir = model(root.path(), name, &changes, drawn);
        let file = root.path().join(format!("{name}.gguf"));
        let output = export(&dir, &file);
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let content = Content::read(&mut fs::File::open(&file).unwrap()).unwrap();
        let Value::String(found) = &content.metadata["general.architecture"] else { panic!("{name}: no architecture") };
        assert_eq!(found, architecture, "{name}");
        for key in content.metadata.keys() {
            let general = match key.strip_prefix(&format!("{architecture}.")) {
                Some(own) => format!("{{arch}}.{own}"),
                None => key.clone(),
            };
            assert!(keys.contains(&general), "{name}: no key {key} in llama.cpp");
        }
        let tensors = known(&names["architectures"][architecture]);
        let arch = Arch::from_dir(&dir).unwrap();
        for (tensor, info) in &content.tensor_infos {
            // Names end with the kind of the tensor, but for those that have none.
            let full = pattern(tensor);
            let bare = ["weight", "bias", "scale"].iter().find_map(|end| full.strip_suffix(&format!(".{end}")));
            // llama.cpp also reads gate and up of experts apart where its converter writes them as one tensor.
            let both = ["_gate_exps", "_up_exps"].iter().find_map(|end| bare?.strip_suffix(end));
            let both = both.map(|start| format!("{start}_gate_up_exps"));
            let is_known = tensors.contains(bare.unwrap_or(&full)) || both.is_some_and(|both| tensors.contains(&both));
            assert!(is_known, "{name}: no tensor {tensor} in llama.cpp's {architecture}");
            assert!(info.shape.dims().iter().all(|size| *size > 0), "{name}: {tensor} is empty");
        }
        let blocks = content.metadata[&format!("{architecture}.block_count")].to_u32().unwrap() as usize;
        assert_eq!(blocks, arch.num_hidden_layers, "{name}");
        // No number of the model is lost, but for those of tables that are cut, and none is doubled.
        let count = |infos: &mut dyn Iterator<Item = usize>| infos.sum::<usize>();
        let own = count(&mut arch.tensors().iter().map(TensorSpec::len));
        let computed = |name: &&String| name.starts_with("rope_");
        let written = count(
            &mut content
                .tensor_infos
                .iter()
                .filter(|(name, _)| !computed(name))
                .map(|(_, info)| info.shape.elem_count()),
        );
        assert_eq!(written, own, "{name}");
    }
}

/// A tensor of a GGUF file, by rows.
fn values(file: &Path, tensor: &str) -> (Vec<usize>, Vec<f32>) {
    let mut opened = fs::File::open(file).unwrap();
    let content = Content::read(&mut opened).unwrap();
    let tensor = content.tensor(&mut opened, tensor, &Device::Cpu).unwrap().dequantize(&Device::Cpu).unwrap();
    (tensor.dims().to_vec(), tensor.flatten_all().unwrap().to_vec1().unwrap())
}

#[test]
fn latent_keys_are_transposed_and_values_are_not() {
    let root = tempfile::tempdir().unwrap();
    let dir = model(root.path(), "deepseek_v3", &[], false);
    let file = root.path().join("m.gguf");
    assert!(export(&dir, &file).status.success());
    let files = WeightFiles::open_file(&dir.join("model.safetensors")).unwrap();
    let (_, both) = files.read("model.layers.0.self_attn.kv_b_proj.weight").unwrap();
    // Four heads; keys of 16 and values of 12 features, made of 32.
    let (heads, key, value, rank) = (4, 16, 12, 32);
    let (shape, keys) = values(&file, "blk.0.attn_k_b.weight");
    assert_eq!(shape, [heads, rank, key]);
    let (shape, of_values) = values(&file, "blk.0.attn_v_b.weight");
    assert_eq!(shape, [heads, value, rank]);
    for head in 0..heads {
        for feature in 0..rank {
            for row in 0..key {
                let wanted = both[(head * (key + value) + row) * rank + feature];
                assert_eq!(keys[(head * rank + feature) * key + row], wanted, "key {head} {feature} {row}");
            }
            for row in 0..value {
                let wanted = both[(head * (key + value) + key + row) * rank + feature];
                assert_eq!(of_values[(head * value + row) * rank + feature], wanted, "value {head} {feature} {row}");
            }
        }
    }
}

#[test]
fn state_spaces_have_their_decay_itself_and_not_its_logarithm() {
    let root = tempfile::tempdir().unwrap();
    let dir = model(root.path(), "granitemoehybrid", &[], false);
    let file = root.path().join("m.gguf");
    assert!(export(&dir, &file).status.success());
    let files = WeightFiles::open_file(&dir.join("model.safetensors")).unwrap();
    let (_, logarithm) = files.read("model.layers.0.mamba.A_log").unwrap();
    let (shape, decay) = values(&file, "blk.0.ssm_a");
    assert_eq!(shape, [8, 1]);
    assert!(decay.iter().zip(&logarithm).all(|(decay, logarithm)| (decay + logarithm.exp()).abs() < 1e-6));
    // Gate and up are one matrix in the model's file.
    let (_, both) = files.read("model.layers.0.shared_mlp.input_linear.weight").unwrap();
    let [gate, up] = ["gate", "up"].map(|part| values(&file, &format!("blk.0.ffn_{part}.weight")));
    assert_eq!((gate.0, up.0), (vec![72, 64], vec![72, 64]));
    assert_eq!([gate.1, up.1].concat(), both);
}

#[test]
fn models_that_llama_cpp_would_compute_otherwise_are_refused_by_name() {
    let root = tempfile::tempdir().unwrap();
    for (name, keys, wanted) in [
        ("lfm3", vec![], "this family"),
        ("olmo_hybrid", vec![], "this family"),
        ("qwen3_5", vec![], "heads of keys and of values of different widths"),
        ("gpt_oss", vec![], "swiglu_alpha 1.3 and swiglu_limit 0.7"),
        ("lfm2_moe", vec![], "experts' weights scaled by 1.4"),
        ("nemotron_h", vec![], "limits on the time steps of Mamba 2"),
        ("glm4_moe_lite", vec![], "dense blocks between expert blocks"),
        ("deepseek_v2", vec![], "q_lora_rank null with this number of blocks"),
        ("deepseek_v2_groups", vec![], "groups of experts chosen by their best one"),
        ("gemma3n", vec![], "a sliding window in these blocks"),
        ("afmoe", vec![("mup_enabled", false.into())], "an embedding scaled by 1"),
        ("muse_glimmer", vec![("post_norm_eps", 1e-6.into())], "a post_norm_eps other than 1e-8"),
        (
            "granitemoehybrid",
            vec![("time_step_limit", serde_json::json!([0.01, 1.0]))],
            "limits on the time steps of Mamba 2",
        ),
        ("llama_dynamic", vec![], "rope_type dynamic"),
    ] {
        let dir = model(root.path(), name, &keys, false);
        let file = root.path().join(format!("{name}.gguf"));
        let output = export(&dir, &file);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(4), "{name}: {said}");
        assert!(said.contains("llama.cpp does not compute") && said.contains(wanted), "{name}: {said}");
        assert!(said.contains("serve the merged folder with Transformers or vLLM"), "{name}: {said}");
        assert!(!file.exists(), "{name}");
    }
}
