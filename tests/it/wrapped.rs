//! Language models inside multimodal checkpoints: the models of `tests/golden/a`, wrapped as `tests/golden/wrapped` has it, in
//! the names of Transformers' files and in those that it has in memory.
mod makers;
mod run;

use crate::parity::{Forward, golden as plain, json};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tunesmith::checkpoint::loaded_adapter::LoadedAdapter;
use tunesmith::checkpoint::peft;
use tunesmith::config::arch::{Arch, Vocabulary, WRAPPERS};
use tunesmith::export::merge::{Parts, dequantized};
use tunesmith::model::weights::WeightFiles;

/// Dtype, shape and bytes by name.
type Raw = BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>;

/// The wrapped models.
const MODELS: [&str; 11] = [
    "gemma3",
    "gemma3n",
    "llava",
    "mistral3",
    "idefics3",
    "qwen2_5_vl",
    "qwen3_5",
    "gemma4",
    "gemma4_a4b",
    "gemma4_unified",
    "muse_glimmer",
];

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/wrapped").join(path)
}

/// Every tensor of a folder's safetensors files, or of one file.
pub fn read(path: &Path) -> Raw {
    let files: Vec<PathBuf> = if path.is_file() {
        vec![path.to_owned()]
    } else {
        let all = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        all.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).collect()
    };
    let mut raw = Raw::new();
    for file in files {
        let bytes = std::fs::read(&file).unwrap();
        for (name, view) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
            raw.insert(name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
        }
    }
    raw
}

pub fn write(path: &Path, raw: &Raw) {
    let views = raw.iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// The tensors of a file by other names.
fn renamed(raw: &Raw, name: impl Fn(&str) -> String) -> Raw {
    raw.iter().map(|(stored, tensor)| (name(stored), tensor.clone())).collect()
}

/// A wrapped golden model in a folder of its own: `saved` as Transformers saves it, else as it has it in memory. Also the
/// language model of `tests/golden/a` that it holds.
fn model(name: &str, saved: bool) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let names = json(&golden(&format!("{name}/names.json")));
    let language = names["language_model"].as_str().unwrap().to_owned();
    let listed = names[if saved { "saved" } else { "in_memory" }].as_array().unwrap();
    let own = read(&plain(&language).join("model"));
    let beside = read(&golden(&format!("{name}/beside.safetensors")));
    let mut tensors = Raw::new();
    for listed in listed.iter().map(|name| name.as_str().unwrap()) {
        // Transformers has other names for what Gemma 4 12B reads pictures with than its files.
        let in_memory = |other: &str| {
            let other = other.replace("vision_embedder.", "embed_vision.");
            other.replace("embed_vision.embedding_", "embed_vision.multimodal_embedder.embedding_")
        };
        let same = |other: &str| {
            let renamed = name == "gemma4_unified" && listed == in_memory(other);
            renamed || listed == other || listed == format!("model.{other}")
        };
        let text = |other: &str| {
            let rest = other.strip_prefix("model.").unwrap_or(other);
            ["model.language_model.", "language_model.model.", "model.text_model.", "language_model.", "model.", ""]
                .iter()
                .any(|start| listed == format!("{start}{rest}"))
        };
        let found = beside.iter().find(|(name, _)| same(name)).or_else(|| own.iter().find(|(name, _)| text(name)));
        let (_, tensor) = found.unwrap_or_else(|| panic!("{name}: {listed}"));
        tensors.insert(listed.to_owned(), tensor.clone());
    }
    assert_eq!(tensors.len(), own.len() + beside.len(), "{name}");
    write(&dir.path().join("model.safetensors"), &tensors);
    std::fs::copy(golden(&format!("{name}/config.json")), dir.path().join("config.json")).unwrap();
    let generation = "generation_config.json";
    std::fs::copy(plain(&language).join("model").join(generation), dir.path().join(generation)).unwrap();
    (dir, language)
}

#[test]
fn the_language_model_inside_is_the_one_that_it_is_alone() {
    for name in MODELS {
        for saved in [true, false] {
            let (dir, language) = model(name, saved);
            let alone = plain(&language).join("model");
            let (arch, expected) = (Arch::from_dir(dir.path()).unwrap(), Arch::from_dir(&alone).unwrap());
            assert_eq!(arch.wrapper.unwrap().model_type, name.trim_end_matches("_a4b"));
            assert_eq!(Arch { wrapper: None, ..arch.clone() }, expected, "{name}, saved: {saved}");
            let weights = WeightFiles::open_model(dir.path(), &arch, &arch.tensors()).unwrap();
            let own = WeightFiles::open(&alone, &arch.tensors()).unwrap();
            for spec in arch.tensors() {
                assert_eq!(weights.read(&spec.name).unwrap(), own.read(&spec.name).unwrap(), "{name}: {}", spec.name);
            }
            let others = weights.wrapping().unwrap();
            assert!(
                others.bytes() > 0
                    && others
                        .tensors(false)
                        .unwrap()
                        .iter()
                        .all(|(name, ..)| !name.contains("layers.0.mlp.gate_proj") || name.contains("vision"))
            );
            // Neither the names nor the rest are part of what an adapter was trained on.
            assert_eq!(weights.fingerprint().unwrap(), own.fingerprint().unwrap(), "{name}");
        }
    }
}

#[test]
fn adapters_of_peft_fit_in_both_namings() {
    for name in MODELS {
        let (dir, language) = model(name, true);
        let arch = Arch::from_dir(dir.path()).unwrap();
        let adapter = golden(&format!("{name}/adapter"));
        let own = LoadedAdapter::open(&plain(&language).join("adapter_init"), &Arch { wrapper: None, ..arch.clone() })
            .unwrap();
        let found = LoadedAdapter::open(&adapter, &arch).unwrap();
        assert_eq!(found.tensors, own.tensors, "{name}");
        assert_eq!(found.placements, own.placements, "{name}");
        let parts = Parts::open(dir.path(), &[], &Vocabulary::default()).unwrap();
        let forward = Forward::read(&language);
        forward.check(&parts.adapted(&found, &dequantized()).unwrap(), &forward.tensors, "_lora");
        forward.check(&parts.merged(Some(found)).unwrap().model().unwrap(), &forward.tensors, "_lora");

        // As Transformers before 4.52 named the modules.
        let old = tempfile::tempdir().unwrap();
        let raw = read(&adapter.join(peft::WEIGHTS_FILE));
        let older = renamed(&raw, |name| {
            let name = name.replace("base_model.model.model.language_model.", "base_model.model.language_model.model.");
            name.replace("base_model.model.model.text_model.", "base_model.model.language_model.model.")
        });
        assert!(older.keys().all(|name| name.contains(".language_model.model.")));
        write(&old.path().join(peft::WEIGHTS_FILE), &older);
        let mut config = json(&adapter.join(peft::CONFIG_FILE));
        let more = r"router\.proj|per_layer_(input_gate|projection)|altup\.\w+(_coefs|_router)|laurel\.linear_\w+";
        let beside = r"per_layer_model_projection|altup_(unembed_)?projections\.\d";
        let modules = format!(r"(layers\.\d+\..*(_proj(_\w+)?|{more})|{beside})");
        config["target_modules"] = format!(r"language_model\.model\.{modules}").into();
        std::fs::write(old.path().join(peft::CONFIG_FILE), config.to_string()).unwrap();
        assert_eq!(LoadedAdapter::open(old.path(), &arch).unwrap().tensors, own.tensors, "{name}");
        let vision = "base_model.model.vision_tower.layers.0.self_attn.q_proj";

        // What PEFT's all-linear has put on the vision tower too, and left as it was for want of images.
        let mut targets = vec!["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        if name == "qwen3_5" {
            targets.extend(["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]);
        }
        match name {
            "gemma4" => {
                targets.extend(["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]);
            }
            "gemma3n" => {
                targets.extend(["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]);
                targets.extend([
                    "linear_left",
                    "linear_right",
                    "modality_router",
                    "prediction_coefs",
                    "correction_coefs",
                ]);
                targets.extend(["altup_projections.0", "altup_projections.1", "altup_projections.2"]);
                targets.extend(["altup_unembed_projections.0", "altup_unembed_projections.1"]);
                targets.push("altup_unembed_projections.2");
            }
            "gemma4_a4b" => targets.push("router.proj"),
            _ => {}
        }
        config["target_modules"] = json!(targets);
        std::fs::write(old.path().join(peft::CONFIG_FILE), config.to_string()).unwrap();
        let some = |shape: [usize; 2], byte: u8| {
            (safetensors::Dtype::F32, shape.to_vec(), vec![byte; 4 * shape[0] * shape[1]])
        };
        let mut with = older.clone();
        with.insert(format!("{vision}.lora_A.weight"), some([4, 16], 1));
        with.insert(format!("{vision}.lora_B.weight"), some([16, 4], 0));
        write(&old.path().join(peft::WEIGHTS_FILE), &with);
        assert_eq!(LoadedAdapter::open(old.path(), &arch).unwrap().tensors, own.tensors, "{name}");
        with.insert(format!("{vision}.lora_B.weight"), some([16, 4], 1));
        write(&old.path().join(peft::WEIGHTS_FILE), &with);
        let error = LoadedAdapter::open(old.path(), &arch).unwrap_err();
        assert!(error.kind() == tunesmith::Kind::Checkpoint && error.message().contains(vision), "{error}");
    }
}

#[test]
fn what_text_config_leaves_out_is_what_its_class_assumes() {
    let defaults = json(&golden("defaults.json"));
    let describe = |text: &Value| {
        let config = json!({ "model_type": "llava", "tie_word_embeddings": false, "text_config": text });
        Arch::from_json(&config.to_string(), Path::new("config.json")).unwrap_or_else(|error| panic!("{text}: {error}"))
    };
    for (kind, whole) in defaults.as_object().unwrap() {
        // The outer flag is the one that counts here.
        let mut whole = whole.clone();
        whole.as_object_mut().unwrap().remove("tie_word_embeddings");
        assert_eq!(describe(&json!({ "model_type": kind })), describe(&whole), "{kind}");
    }
    // google/gemma-3-4b-it's.
    let text = json!({ "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024 });
    let config = json!({ "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "eos_token_id": [1, 106], "vision_config": {} });
    let arch = Arch::from_json(&config.to_string(), Path::new("config.json")).unwrap();
    let attention = arch.uniform_attention().unwrap();
    assert_eq!((attention.num_heads, attention.num_kv_heads, attention.head_dim), (8, 4, 256));
    assert_eq!((arch.vocab_size, arch.tie_word_embeddings, arch.eos_token_ids), (262_208, true, vec![1, 106]));
}

#[test]
fn wrappers_are_as_the_classes_of_transformers() {
    let classes = json(&golden("wrappers.json"));
    assert_eq!(classes.as_object().unwrap().len(), WRAPPERS.len());
    for wrapper in WRAPPERS {
        let about = &classes[wrapper.model_type];
        assert_eq!(wrapper.class_name, about["class_name"], "{wrapper:?}");
        assert_eq!(wrapper.module("model.layers"), format!("{}layers", about["base"].as_str().unwrap()), "{wrapper:?}");
        assert_eq!(wrapper.module("lm_head"), "lm_head");
        let describe = |config: Value| Arch::from_json(&config.to_string(), Path::new("config.json")).unwrap();
        let arch = describe(json!({ "model_type": wrapper.model_type, "text_config": {} }));
        let kind = about["language_model"].as_str().unwrap();
        let named = describe(json!({ "model_type": wrapper.model_type, "text_config": { "model_type": kind } }));
        assert_eq!(arch, named, "{wrapper:?}");
        assert_eq!(arch.tie_word_embeddings, about["tied"], "{wrapper:?}");
        let text = json!({ "tie_word_embeddings": true });
        let arch =
            describe(json!({ "model_type": wrapper.model_type, "tie_word_embeddings": false, "text_config": text }));
        assert_eq!(arch.tie_word_embeddings, about["text_ties"], "{wrapper:?}");
    }
}

#[test]
fn a_head_beside_the_embedding_is_its_own_where_it_differs() {
    // Mistral Small 3.1: no word of a tie, which the class then assumes, and a head in the file.
    let (dir, _) = model("mistral3", true);
    let path = dir.path().join("config.json");
    let mut config = json(&path);
    assert_eq!(config["tie_word_embeddings"], false);
    config.as_object_mut().unwrap().remove("tie_word_embeddings");
    std::fs::write(&path, config.to_string()).unwrap();
    let untied = Arch::from_dir(dir.path()).unwrap();
    assert!(!untied.tie_word_embeddings);
    WeightFiles::open_model(dir.path(), &untied, &untied.tensors()).unwrap();
    // A copy of the embedding is none of its own.
    let file = dir.path().join("model.safetensors");
    let mut raw = read(&file);
    raw.insert("language_model.lm_head.weight".into(), raw["language_model.model.embed_tokens.weight"].clone());
    write(&file, &raw);
    let tied = Arch::from_dir(dir.path()).unwrap();
    assert!(tied.tie_word_embeddings);
    WeightFiles::open_model(dir.path(), &tied, &tied.tensors()).unwrap();
    // The other head's name beside these names.
    let head = raw.remove("language_model.lm_head.weight").unwrap();
    raw.insert("lm_head.weight".into(), head);
    write(&file, &raw);
    config["tie_word_embeddings"] = false.into();
    std::fs::write(&path, config.to_string()).unwrap();
    let arch = Arch::from_dir(dir.path()).unwrap();
    assert!(!arch.tie_word_embeddings);
    let weights = WeightFiles::open_model(dir.path(), &arch, &arch.tensors()).unwrap();
    assert_eq!(weights.wrapping().unwrap().stored_name("lm_head.weight"), "lm_head.weight");
}

#[test]
fn heads_that_predict_ahead_stay_as_they_are() {
    let (dir, _) = model("qwen3_5", true);
    let file = dir.path().join("model.safetensors");
    let mut raw = read(&file);
    let head = raw["model.language_model.norm.weight"].clone();
    raw.insert("mtp.norm.weight".into(), head);
    write(&file, &raw);
    let arch = Arch::from_dir(dir.path()).unwrap();
    let weights = WeightFiles::open_model(dir.path(), &arch, &arch.tensors()).unwrap();
    let wrapping = weights.wrapping().unwrap();
    assert!(wrapping.predicts_ahead() && wrapping.has("mtp.norm.weight"));
    let (plain, _) = model("llava", true);
    let arch = Arch::from_dir(plain.path()).unwrap();
    let weights = WeightFiles::open_model(plain.path(), &arch, &arch.tensors()).unwrap();
    assert!(!weights.wrapping().unwrap().predicts_ahead());
}

/// Gemma 4's files have keys and values of blocks that take those of others.
#[test]
fn keys_that_no_class_reads_are_passed_over() {
    let (dir, _) = model("gemma4", true);
    let (file, arch) = (dir.path().join("model.safetensors"), Arch::from_dir(dir.path()).unwrap());
    let plain = read(&file);
    let attention = |layer: usize| format!("model.language_model.layers.{layer}.self_attn");
    let with = |layer: usize, names: &[&str]| {
        let mut raw = plain.clone();
        for name in names {
            raw.insert(
                format!("{}.{name}.weight", attention(layer)),
                plain[&format!("{}.{name}.weight", attention(1))].clone(),
            );
        }
        write(&file, &raw);
        WeightFiles::open_model(dir.path(), &arch, &arch.tensors())
    };
    let weights = with(4, &["k_proj", "v_proj", "k_norm"]).unwrap();
    assert!(!weights.wrapping().unwrap().has(&format!("{}.k_proj.weight", attention(4))));
    // A block with keys of its own has nothing to pass over.
    let mut raw = plain.clone();
    raw.insert(format!("{}.v_norm.weight", attention(0)), plain[&format!("{}.k_norm.weight", attention(0))].clone());
    write(&file, &raw);
    let error = WeightFiles::open_model(dir.path(), &arch, &arch.tensors()).unwrap_err();
    assert!(error.message().contains("v_norm"), "{error}");
}

/// Gemma 3n's class embeds ids from `vocab_offset` on by the tables of its encoders, without an image or sound too.
#[test]
fn ids_that_stand_for_images_and_sounds_are_refused() {
    let with = |vision: Value, audio: Value| {
        let mut config = json(&golden("gemma3n/config.json"));
        config["vision_config"]["vocab_offset"] = vision;
        config["audio_config"]["vocab_offset"] = audio;
        config
    };
    let first = |vision: Value, audio: Value| {
        Arch::from_json(&with(vision, audio).to_string(), Path::new("config.json")).map(|arch| arch.media_ids)
    };
    assert_eq!(first(json!(300), json!(400)).unwrap(), Some(300));
    assert_eq!(first(json!(400), json!(300)).unwrap(), Some(300));
    assert_eq!(first(Value::Null, Value::Null).unwrap(), None, "the class's own are beyond this vocabulary");
    assert!(first(json!("x"), json!(300)).unwrap_err().message().contains("vision_config.vocab_offset"));

    let (dir, language) = model("gemma3n", true);
    std::fs::write(dir.path().join("config.json"), with(json!(300), json!(400)).to_string()).unwrap();
    let arch = Arch::from_dir(dir.path()).unwrap();
    let weights = WeightFiles::open_model(dir.path(), &arch, &arch.tensors()).unwrap();
    let model = tunesmith::model::Model::load(&arch, Some(&weights), &crate::parity::recipe()).unwrap();
    let mut batch = Forward::read(&language).batch();
    batch.tokens.iter_mut().for_each(|id| *id %= 300);
    model.logits(&batch, &[0]).unwrap();
    batch.tokens[2] = 300;
    let error = model.logits(&batch, &[0]).unwrap_err();
    assert!(error.message().contains("token id 300 in a text, but ids from 300 on"), "{error}");

    // Rows are refused by file and line.
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/c/tokenizer_bpe_gpt2");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(tokenizer.join(file), dir.path().join(file)).unwrap();
    }
    let rows = dir.path().join("rows.jsonl");
    let mut config = tunesmith::config::Config::default();
    config.data.train_path = vec![rows.clone()];
    config.data.use_cache = false;
    let load = |text: &str| {
        std::fs::write(&rows, text).unwrap();
        tunesmith::data::load(&config, dir.path(), arch.text_ids(), &tunesmith::data::Silent, None)
    };
    load("{\"input_ids\": [5, 299]}\n").unwrap();
    let error = load("{\"input_ids\": [5, 299]}\n{\"input_ids\": [5, 300]}\n").unwrap_err();
    for part in ["rows.jsonl:2", "token id 300", "stand for images and sounds"] {
        assert!(error.message().contains(part), "{error} lacks {part}");
    }
}

#[test]
fn what_cannot_be_trained_inside_is_refused_by_name() {
    let refused = |config: Value| {
        let error = Arch::from_json(&config.to_string(), Path::new("some/config.json")).expect_err("must be refused");
        assert_eq!(error.kind(), tunesmith::Kind::Model);
        format!("{error} {}", error.hint_text().unwrap_or_default())
    };
    for (config, words) in [
        (
            json!({ "model_type": "mistral3", "text_config": { "model_type": "mistral5" } }),
            &["mistral5", "mistral3", "gemma3_text"][..],
        ),
        (
            json!({ "model_type": "llama4", "text_config": { "model_type": "llama4_text" } }),
            &["llama4", "multimodal", "llava_next"],
        ),
        (json!({ "model_type": "llava", "text_config": { "model_type": "mixtral" } }), &["mixtral"]),
        (json!({ "model_type": "gemma3" }), &["text_config"]),
        (json!({ "model_type": "gemma3", "text_config": 7 }), &["text_config is 7"]),
        (json!({ "model_type": "gemma3", "text_config": { "hidden_size": "wide" } }), &["text_config.hidden_size"]),
        (
            json!({ "model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"], "text_config": {} }),
            &["Gemma3ForConditionalGeneration"],
        ),
        (
            json!({ "model_type": "gemma3", "text_config": { "use_bidirectional_attention": true } }),
            &["use_bidirectional_attention"],
        ),
        (
            json!({ "model_type": "gemma3", "quantization_config": { "quant_method": "hqq" }, "text_config": {} }),
            &["hqq"],
        ),
    ] {
        let text = refused(config);
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
    // The rest of a multimodal checkpoint has no place in a language model alone.
    let (dir, _) = model("gemma3", true);
    let arch = Arch::from_dir(dir.path()).unwrap();
    assert!(WeightFiles::open(dir.path(), &arch.tensors()).is_err());
}
