//! `mmproj`, llama.cpp's second file of a multimodal model: compared with files of its own converter
//! (`scripts/golden/mmproj.py`) and with the model's files; and what is refused.
use crate::pictures::{copy, golden, seeing};
use crate::run::fixture::{said, train, tunesmith};
use candle_core::quantized::gguf_file::{Content, Value};
use serde_json::{Value as Json, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Output;
use tunesmith::model::weights::WeightFiles;

fn read_json(path: &Path) -> Json {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A golden model with its image processor. `changes` has keys of `config.json`, by part (an empty name for the whole), and of
/// `preprocessor_config.json`, which are left out where they are null.
fn folder(root: &Path, name: &str, changes: &Json) -> PathBuf {
    let dir = root.join(name);
    copy(&golden(&format!("vision/{name}/model")), &dir);
    copy(&golden(&format!("picture_chats/{name}")), &dir);
    let change = |file: &str, part: &str, keys: &Json| {
        let mut all = read_json(&dir.join(file));
        let object = if part.is_empty() { &mut all } else { &mut all[part] }.as_object_mut().unwrap();
        for (key, value) in keys.as_object().unwrap() {
            match value {
                Json::Null => drop(object.remove(key)),
                value => drop(object.insert(key.clone(), value.clone())),
            }
        }
        fs::write(dir.join(file), all.to_string()).unwrap();
    };
    for (part, keys) in changes["config"].as_object().into_iter().flatten() {
        change("config.json", part, keys);
    }
    if !changes["processor"].is_null() {
        change("preprocessor_config.json", "", &changes["processor"]);
    }
    dir
}

/// Exports to `out` with a type and further flags.
fn export(what: &[&str], kind: &str, out: &Path, flags: &[&str]) -> Output {
    let out = out.display().to_string();
    let own = ["export", "--gguf", kind, "--pre-tokenizer", "gpt-2", "--output", &out];
    tunesmith(&[&own[..], what, flags].concat()).output().unwrap()
}

fn exported(what: &[&str], kind: &str, out: &Path, flags: &[&str]) -> String {
    let done = export(what, kind, out, flags);
    assert!(done.status.success(), "{}", said(&done));
    said(&done)
}

fn beside(path: &Path) -> PathBuf {
    path.with_file_name(format!("mmproj-{}", path.file_name().unwrap().to_string_lossy()))
}

/// A GGUF file: its keys, and of each tensor its shape, its type and the CRC-32 of its bytes, as the golden has them.
struct Written {
    keys: BTreeMap<String, Json>,
    tensors: BTreeMap<String, String>,
    content: Content,
    path: PathBuf,
}

impl Written {
    fn open(path: &Path) -> Self {
        let mut file = fs::File::open(path).unwrap();
        let content = Content::read(&mut file).unwrap();
        let keys = content.metadata.iter().map(|(key, value)| (key.clone(), plain(value))).collect();
        let mut tensors = BTreeMap::new();
        for (name, info) in &content.tensor_infos {
            let size = info.shape.elem_count() / info.ggml_dtype.block_size() * info.ggml_dtype.type_size();
            file.seek(SeekFrom::Start(content.tensor_data_offset + info.offset)).unwrap();
            let mut bytes = vec![0; size];
            file.read_exact(&mut bytes).unwrap();
            let shape: Vec<String> = info.shape.dims().iter().map(ToString::to_string).collect();
            let kind = format!("{:?}", info.ggml_dtype);
            tensors.insert(name.clone(), format!("{} {kind} {}", shape.join("x"), crc32fast::hash(&bytes)));
        }
        Self { keys, tensors, content, path: path.to_owned() }
    }

    fn values(&self, name: &str) -> Vec<f32> {
        let mut file = fs::File::open(&self.path).unwrap();
        let tensor = self.content.tensor(&mut file, name, &candle_core::Device::Cpu).unwrap();
        let tensor = tensor.dequantize(&candle_core::Device::Cpu).unwrap();
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }
}

fn plain(value: &Value) -> Json {
    match value {
        Value::U32(number) => json!(number),
        Value::I32(number) => json!(number),
        Value::F32(number) => json!(number),
        Value::Bool(is) => json!(is),
        Value::String(text) => json!(text),
        Value::Array(values) => values.iter().map(plain).collect(),
        other => panic!("{other:?}"),
    }
}

/// Whether two values of a header are the same as numbers of 32 bits.
fn same(own: &Json, theirs: &Json) -> bool {
    match (own, theirs) {
        (Json::Array(own), Json::Array(theirs)) => {
            own.len() == theirs.len() && own.iter().zip(theirs).all(|(own, theirs)| same(own, theirs))
        }
        (Json::Number(own), Json::Number(theirs)) => own.as_f64().unwrap() as f32 == theirs.as_f64().unwrap() as f32,
        _ => own == theirs,
    }
}

/// Keys that tunesmith writes and the converter leaves out: by what models of this size differ from its defaults.
const MORE: [&str; 4] = [
    "general.name",
    "clip.vision.projector.scale_factor",
    "clip.vision.preproc_min_tiles",
    "clip.vision.preproc_max_tiles",
];

/// The same of one family. Without `use_gelu`, llama.cpp takes quick GELU, which Gemma 4 does not have.
const MORE_OF: [(&str, &str); 4] = [
    ("gemma4", "clip.use_gelu"),
    ("gemma4_31b", "clip.use_gelu"),
    ("gemma4_31b", "clip.vision.attention.head_count_kv"),
    ("gemma4_31b", "clip.vision.attention.head_dim"),
];

#[test]
fn files_equal_those_of_llama_cpps_converter() {
    let golden = read_json(&golden("mmproj/files.json"));
    let root = tempfile::tempdir().unwrap();
    for (family, wanted) in golden["families"].as_object().unwrap() {
        let dir = folder(root.path(), family, &wanted["changes"]);
        for kind in ["f32", "f16", "q8_0"] {
            let out = root.path().join(format!("{family}.{kind}.gguf"));
            exported(&["--base", dir.to_str().unwrap()], kind, &out, &[]);
            let own = Written::open(&beside(&out));
            let about = format!("{family} {kind}");
            for (key, value) in wanted[kind]["keys"].as_object().unwrap() {
                let found = own.keys.get(key).unwrap_or_else(|| panic!("{about}: no {key}"));
                // Of Qwen2-VL, the converter writes the language model's width there, which llama.cpp does not read.
                let value = if (family.as_str(), key.as_str()) == ("qwen2_vl", "clip.vision.feed_forward_length") {
                    &json!(64)
                } else {
                    value
                };
                assert!(same(found, value), "{about}: {key} is {found}, not {value}");
            }
            for key in own.keys.keys().filter(|key| wanted[kind]["keys"].get(key).is_none()) {
                let known = MORE.contains(&key.as_str()) || MORE_OF.contains(&(family.as_str(), key.as_str()));
                assert!(known, "{about}: {key} is not the converter's");
            }
            let theirs = wanted[kind]["tensors"].as_object().unwrap();
            let names = |names: Vec<&String>| names.into_iter().cloned().collect::<BTreeSet<_>>();
            assert_eq!(names(own.tensors.keys().collect()), names(theirs.keys().collect()), "{about}");
            for (name, tensor) in theirs {
                let tensor = tensor.as_str().unwrap();
                if (family.as_str(), kind, name.as_str()) == ("gemma3", "f32", "mm.input_projection.weight") {
                    // The converter rounds Gemma 3's projection to float16 in files of float32 too.
                    assert_eq!(tensor.replace("F16", "F32").rsplit_once(' ').unwrap().0, "32x32 F32");
                    assert!(own.tensors[name].starts_with("32x32 F32 "), "{about}: {}", own.tensors[name]);
                } else {
                    assert_eq!(own.tensors[name], tensor, "{about}: {name}");
                }
            }
        }
    }
}

#[test]
fn idefics3_has_the_file_of_smolvlm() {
    let root = tempfile::tempdir().unwrap();
    let changes = json!({
        "config": {
            "": {"model_type": "idefics3", "architectures": ["Idefics3ForConditionalGeneration"]},
            "vision_config": {"model_type": "idefics3_vision"},
        },
        "processor": {"image_processor_type": "Idefics3ImageProcessor"},
    });
    let file = |place: &str, changes: &Json| {
        let dir = folder(&root.path().join(place), "smolvlm", changes);
        let out = root.path().join(place).join("m.gguf");
        exported(&["--base", dir.to_str().unwrap()], "f16", &out, &[]);
        fs::read(beside(&out)).unwrap()
    };
    assert!(file("idefics3", &changes) == file("smolvlm", &json!({})));
}

/// The converter knows no LLaVA with CLIP: the values are compared with the model's own.
#[test]
fn clip_is_written_up_to_the_block_that_the_connector_reads() {
    let root = tempfile::tempdir().unwrap();
    let dir = folder(root.path(), "llava", &json!({}));
    let out = root.path().join("m.gguf");
    let text = exported(&["--base", dir.to_str().unwrap()], "f32", &out, &[]);
    assert!(text.contains("note            llama.cpp takes CLIP's class token for the last patch"), "{text}");
    let own = Written::open(&beside(&out));
    for (key, value) in [
        ("general.architecture", json!("clip")),
        ("general.type", json!("mmproj")),
        ("clip.projector_type", json!("mlp")),
        ("clip.vision.block_count", json!(2)),
        ("clip.vision.feature_layer", json!([2])),
        ("clip.vision.image_size", json!(32)),
        ("clip.vision.projection_dim", json!(32)),
    ] {
        assert_eq!(own.keys[key], value, "{key}");
    }
    // Without either key, llama.cpp takes CLIP's quick GELU.
    assert!(!own.keys.contains_key("clip.use_gelu") && !own.keys.contains_key("clip.use_silu"));
    let files = WeightFiles::open_file(&dir.join("model.safetensors")).unwrap();
    let tower = "vision_tower.vision_model.";
    let tower =
        if files.shape(&format!("{tower}embeddings.class_embedding")).is_some() { tower } else { "vision_tower." };
    let mut pairs: Vec<(String, String)> = [
        ("embeddings.class_embedding", "v.class_embd"),
        ("embeddings.patch_embedding.weight", "v.patch_embd.weight"),
        ("embeddings.position_embedding.weight", "v.position_embd.weight"),
        ("pre_layrnorm.weight", "v.pre_ln.weight"),
        ("pre_layrnorm.bias", "v.pre_ln.bias"),
    ]
    .map(|(name, own)| (format!("{tower}{name}"), own.to_owned()))
    .to_vec();
    for layer in 0..2 {
        for (module, part) in [
            ("layer_norm1", "ln1"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.out_proj", "attn_out"),
            ("layer_norm2", "ln2"),
            ("mlp.fc1", "ffn_up"),
            ("mlp.fc2", "ffn_down"),
        ] {
            for kind in ["weight", "bias"] {
                let name = format!("{tower}encoder.layers.{layer}.{module}.{kind}");
                pairs.push((name, format!("v.blk.{layer}.{part}.{kind}")));
            }
        }
    }
    for (module, part) in [("linear_1", "mm.0"), ("linear_2", "mm.2")] {
        for kind in ["weight", "bias"] {
            pairs.push((format!("multi_modal_projector.{module}.{kind}"), format!("{part}.{kind}")));
        }
    }
    assert_eq!(own.tensors.len(), pairs.len(), "{:?}", own.tensors.keys());
    for (name, part) in pairs {
        let (shape, values) = files.read(&name).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(own.content.tensor_infos[&part].shape.dims(), shape, "{part}");
        assert_eq!(own.values(&part), values, "{part}");
    }
}

#[test]
fn the_language_model_of_qwen_vl_has_positions_of_three_axes() {
    let names = read_json(&golden("gguf/names.json"));
    let known = |list: &Json| -> BTreeSet<String> {
        list.as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect()
    };
    let root = tempfile::tempdir().unwrap();
    for (family, architecture, sections, deep) in [
        ("qwen2_vl", "qwen2vl", [1, 1, 2, 0], None),
        ("qwen2_5_vl", "qwen2vl", [2, 1, 1, 0], None),
        ("qwen3_vl", "qwen3vl", [2, 1, 1, 0], Some(2)),
        ("qwen3_5", "qwen35", [2, 1, 1, 0], None),
        ("qwen3_5_moe", "qwen35moe", [2, 1, 1, 0], None),
    ] {
        let dir = folder(root.path(), family, &json!({}));
        let out = root.path().join(format!("{family}.gguf"));
        // Where llama.cpp has no file for the encoder, the language model is written all the same.
        exported(&["--base", dir.to_str().unwrap()], "f32", &out, &["--mmproj", "none"]);
        assert!(!beside(&out).exists(), "{family}");
        let own = Written::open(&out);
        assert_eq!(own.keys["general.architecture"], architecture, "{family}");
        assert_eq!(own.keys[&format!("{architecture}.rope.dimension_sections")], json!(sections), "{family}");
        assert_eq!(own.keys.get(&format!("{architecture}.n_deepstack_layers")), deep.map(|deep| json!(deep)).as_ref());
        let tensors = known(&names["architectures"][architecture]);
        for name in own.tensors.keys() {
            // A decay has no kind behind its name.
            let bare = [".weight", ".bias"].iter().find_map(|kind| name.strip_suffix(kind)).unwrap_or(name);
            let general = match bare.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
                Some((_, part)) => format!("blk.{{bid}}.{part}"),
                None => bare.to_owned(),
            };
            assert!(tensors.contains(&general), "{family}: {name}");
        }
        let keys = known(&names["keys"]);
        for key in own.keys.keys() {
            let general = key.strip_prefix(architecture).map_or(key.clone(), |rest| format!("{{arch}}{rest}"));
            assert!(keys.contains(&general), "{family}: {key}");
        }
    }
}

#[test]
fn what_was_trained_of_encoder_and_connector_is_merged_first() {
    let fixture = seeing("smolvlm");
    let lines = [
        "train.max_steps: 2",
        "train.learning_rate: 0.01",
        "tuning.freeze_connector: false",
        r#"tuning.vision_target_modules: ["q_proj", "fc1"]"#,
    ];
    let config = fixture.config("run", &lines);
    let trained = train(&config, &[]);
    assert!(trained.status.success(), "{}", said(&trained));
    let (config, root) = (config.to_str().unwrap(), fixture.path("out"));
    let merged = root.join("merged").display().to_string();
    let done = tunesmith(&["merge", config, "--dtype", "float32", "--output", &merged]).output().unwrap();
    assert!(done.status.success(), "{}", said(&done));
    let tensors = |what: &[&str], name: &str| {
        let out = root.join(name);
        let text = exported(what, "f32", &out, &[]);
        let command = format!("llama-mtmd-cli -m {} --mmproj {} --image IMAGE", out.display(), beside(&out).display());
        assert!(text.contains(&format!("use it          {command}")), "{text}");
        (Written::open(&out).tensors, Written::open(&beside(&out)).tensors)
    };
    let base = tensors(&["--base", fixture.path("model").to_str().unwrap()], "base.gguf");
    let run = tensors(&[config], "run.gguf");
    assert_eq!(run, tensors(&["--base", &merged], "merged.gguf"), "as the merged folder");
    let changed: Vec<&String> = run.1.keys().filter(|name| run.1[*name] != base.1[*name]).collect();
    let wanted = ["attn_q.weight", "ffn_up.weight", "mm.model.fc.weight"];
    assert!(changed.iter().all(|name| wanted.iter().any(|part| name.ends_with(part))), "{changed:?}");
    assert_eq!(changed.len(), 7, "two matrices of three blocks, and the connector: {changed:?}");
    // Without --output, both are in the run's folder.
    let own = tunesmith(&["export", config, "--gguf", "q4_0", "--pre-tokenizer", "gpt-2"]).output().unwrap();
    assert!(own.status.success(), "{}", said(&own));
    for name in ["out.q4_0.gguf", "mmproj-out.q8_0.gguf"] {
        assert!(root.join(name).is_file(), "{name}: {}", said(&own));
    }
    // llama.cpp has adapters for the language model alone.
    let out = root.join("lora.gguf").display().to_string();
    let alone = ["export", config, "--gguf", "f16", "--adapter-only", "--output", &out];
    let alone = tunesmith(&alone).output().unwrap();
    assert!(alone.status.code() == Some(2) && said(&alone).contains("--lora has no effect"), "{}", said(&alone));
}

#[test]
fn models_that_llama_cpp_lacks_or_computes_otherwise_are_refused_by_name() {
    let root = tempfile::tempdir().unwrap();
    let vision = |key: &str, value: Json| json!({"config": {"vision_config": {key: value}}});
    let processor = |key: &str, value: Json| json!({"processor": {key: value}});
    let cases = [
        ("paligemma", json!({}), "no file (mmproj) for the image encoder of a paligemma model"),
        ("llava_onevision", json!({}), "no file (mmproj) for the image encoder of a llava_onevision model"),
        ("qwen2_5_vl", json!({}), "a window_size other than 112"),
        ("qwen2_5_vl", vision("fullatt_block_indexes", json!([0, 2])), "a window_size other than 112"),
        (
            "qwen2_5_vl",
            json!({"config": {"vision_config": {"window_size": 112, "fullatt_block_indexes": [0, 2]}}}),
            "other blocks than every n-th",
        ),
        ("qwen2_vl", vision("rope_parameters", json!({"rope_theta": 500.0})), "a rope_theta other than 10000"),
        ("llava", vision("hidden_act", json!("relu")), "ReLU in an image encoder"),
        (
            "llava",
            json!({"config": {"": {"vision_feature_select_strategy": "full"}}}),
            "a class token among an image's rows",
        ),
        ("llava", json!({"config": {"": {"projector_hidden_act": "relu"}}}), "another activation than GELU"),
        ("internvl", vision("norm_type", json!("rms_norm")), "this norm in the image encoder"),
        ("smolvlm", processor("rescale_factor", json!(0.01)), "a rescale_factor other than 1/255"),
        ("smolvlm", processor("max_image_size", json!({"longest_edge": 48})), "images of 48 pixels a side"),
        ("llava", processor("do_center_crop", json!(false)), "images that are no squares of one size"),
        ("smolvlm", processor("image_processor_type", json!("ChameleonImageProcessor")), "ChameleonImageProcessor"),
        ("llava", vision("model_type", json!("pixtral")), "the image encoder of a llava model is not read"),
        ("mistral3", json!({}), "a norm of the connector with another epsilon than the encoder's"),
        (
            "ministral3",
            json!({"config": {"text_config": {"rms_norm_eps": 1e-5}}}),
            "another output than the last block's",
        ),
        ("pixtral", vision("rope_parameters", json!({"rope_theta": 500.0})), "a rope_theta other than 10000"),
        ("pixtral", vision("hidden_act", json!("gelu_pytorch_tanh")), "GELU by tanh in the image encoder"),
        ("gemma4_31b", vision("rope_parameters", json!({"rope_theta": 500.0})), "a rope_theta other than 100"),
        ("gemma4_31b", vision("hidden_activation", json!("gelu")), "an activation other than GELU by tanh"),
        ("gemma4", json!({}), "use_bidirectional_attention other than null for E2B and E4B"),
    ];
    for (number, (family, changes, wanted)) in cases.into_iter().enumerate() {
        let root = root.path().join(number.to_string());
        let dir = folder(&root, family, &changes);
        let (base, out) = (["--base", dir.to_str().unwrap()], root.join("m.gguf"));
        // Asked for: nothing is written.
        let refused = export(&base, "f32", &out, &["--mmproj", "f16"]);
        let text = said(&refused);
        assert!(refused.status.code() == Some(4) && text.contains(wanted), "{family}: {wanted}: {text}");
        assert!(!out.exists() && !beside(&out).exists(), "{family}: {wanted}");
        // Otherwise the language model is written, and one line says why it is alone.
        let text = exported(&base, "f32", &out, &[]);
        let line = text.lines().find(|line| line.starts_with("images ")).unwrap_or_else(|| panic!("{text}"));
        assert!(line.starts_with("images          none: ") && line.contains(wanted), "{family}: {line}");
        assert!(out.is_file() && !beside(&out).exists(), "{family}: {wanted}");
    }
}

#[test]
fn an_encoder_that_cannot_be_written_is_not_lost_unseen() {
    let fixture = seeing("llava_onevision");
    let config = fixture.config("run", &["train.max_steps: 1", "tuning.freeze_connector: false"]);
    let trained = train(&config, &[]);
    assert!(trained.status.success(), "{}", said(&trained));
    let (config, out) = (config.to_str().unwrap(), fixture.path("m.gguf"));
    let refused = export(&[config], "f32", &out, &[]);
    let text = said(&refused);
    let wanted = "the adapter changes the image encoder or the connector, and llama.cpp has no file (mmproj)";
    assert!(refused.status.code() == Some(2) && text.contains(wanted) && !out.exists(), "{text}");
    exported(&[config], "f32", &out, &["--mmproj", "none"]);
    assert!(out.is_file() && !beside(&out).exists());
}

#[test]
fn neither_file_is_written_where_one_is_there() {
    let root = tempfile::tempdir().unwrap();
    let dir = folder(root.path(), "smolvlm", &json!({}));
    let (base, out) = (["--base", dir.to_str().unwrap()], root.path().join("m.gguf"));
    fs::write(beside(&out), "mine").unwrap();
    let refused = export(&base, "f16", &out, &[]);
    assert!(refused.status.code() == Some(2) && said(&refused).contains("is there already"), "{}", said(&refused));
    assert!(!out.exists() && fs::read(beside(&out)).unwrap() == b"mine");
    let text = exported(&base, "q8_0", &out, &["--overwrite", "--mmproj", "f32"]);
    assert!(text.contains("images          ") && Written::open(&beside(&out)).keys["general.file_type"] == 0, "{text}");
    let other = export(&base, "f16", &out, &["--overwrite", "--mmproj", "q2_k"]);
    assert!(other.status.code() == Some(2) && said(&other).contains("expected auto, none, f16, q8_0 or f32"));
    // A model that reads text alone.
    let text = golden("a/qwen2/model").display().to_string();
    let refused = export(&["--base", &text], "f16", &root.path().join("t.gguf"), &["--mmproj", "f16"]);
    assert!(
        refused.status.code() == Some(2) && said(&refused).contains("this model reads no images"),
        "{}",
        said(&refused)
    );
}
